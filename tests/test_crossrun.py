"""Two runs are compared only where everything that differs between them is declared."""

import copy
import json
from pathlib import Path

import pytest

from exl3eval.crossrun import StoredRun, compare_runs, list_differences
from exl3eval.errors import InvalidRunError
from exl3eval.verify import read_stored_run

RESOLVED = {"name": "base", "doc": "x", "linear": "1-:reference", "embedding": "stored"}
RECEIPT = {
    "variant": "base",
    "resampling": {"seed": 1, "confidence": 0.95, "num_resamples": 999},
    "identity": {
        "device": {"name": "CPU", "threads": 2},
        "lane": "prefill",
        "code": {"packages": {"torch": "2.13.0"}},
        "arms": {"base": {"resolved": RESOLVED, "checkpoint_sha256": "a", "attention": "sdpa", "launches": []}},
    },
}


def _run(**changes: object) -> StoredRun:
    receipt = copy.deepcopy(RECEIPT)
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        target = receipt
        for parent in parents:
            target = target[parent]
        target[leaf] = value
    return StoredRun(receipt=receipt, arms={})


def test_equal_runs_do_not_differ() -> None:
    assert list_differences(_run(), _run()) == []


def test_what_variants_change_is_declared_and_the_rest_is_not() -> None:
    other = _run(
        identity__arms__base__resolved={**RESOLVED, "embedding": "int8"},
        identity__device__name="GPU",
        identity__lane="x",
    )
    found = {difference.field: difference for difference in list_differences(_run(), other)}
    assert set(found) == {"variant.embedding", "identity.device.name", "identity.lane"}
    assert found["variant.embedding"].declared
    assert not found["identity.device.name"].declared
    assert (found["identity.device.name"].left, found["identity.device.name"].right) == ("CPU", "GPU")


@pytest.mark.parametrize("declared", [["identity.device"], ["identity.device.name"], ["identity"]])
def test_a_caller_may_declare_a_field_or_a_part(declared: list[str]) -> None:
    found = list_differences(_run(), _run(identity__device__name="GPU"), declared=declared)
    assert [difference.declared for difference in found] == [True]


def test_a_prefix_of_a_name_declares_nothing() -> None:
    found = list_differences(_run(), _run(identity__device__name="GPU"), declared=["identity.dev"])
    assert [difference.declared for difference in found] == [False]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"identity__arms__base__checkpoint_sha256": "b"}, "arm.checkpoint_sha256"),
        ({"identity__code__packages__torch": "2.14.0"}, r"identity\.code\.packages\.torch"),
        ({"identity__new": 1}, r"identity\.new"),
    ],
)
def test_an_undeclared_difference_refuses(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRunError, match=f"differ in `{field}`") as caught:
        compare_runs(_run(), _run(**change))
    assert "--declare" in caught.value.hint


def test_engines_are_compared_only_above_their_own_difference() -> None:
    receipt, arms = read_stored_run(Path(__file__).parent / "data" / "report_run")
    own = StoredRun(receipt=receipt, arms=arms)

    def served(floor: float | None) -> StoredRun:
        other = json.loads(json.dumps(receipt))
        other["identity"]["engine"] = other["identity"]["reference_engine"] = "vllm"
        other["variant"] = "base"
        if floor is not None:
            other["results"]["floors"]["engines"] = {"reference": floor}
        return StoredRun(receipt=other, arms=arms)

    declared = ["identity.engine", "identity.reference_engine"]
    with pytest.raises(InvalidRunError, match="no floor between them was measured"):
        compare_runs(own, served(None), declared=declared)
    with pytest.raises(InvalidRunError, match="is below the floor between these engines"):
        compare_runs(own, served(1.0), declared=declared)
    _, comparison = compare_runs(own, served(1e-12), declared=declared)
    assert comparison.paired.delta.mean < 0.0

"""What a gate refuses to believe."""

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import FLOOR, build_arms, build_table, write_receipt, write_run

from exl3eval.compare import context_means
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.checks import check_context_order, check_one_design, list_differences
from exl3eval.gate.evidence import read_run
from exl3eval.records import digest_value, seal, write_json
from exl3eval.score.positions import split_arms, write_table
from exl3eval.suite.context import Context, Suite, suite_digest


def edit_receipt(folder: Path, change, *, redigest: bool = False) -> None:
    receipt = json.loads((folder / "receipt.json").read_text())
    change(receipt)
    if redigest:
        receipt |= {f"{part}_digest": digest_value(receipt[part]) for part in ("identity", "results")}
    write_json(folder / "receipt.json", seal(receipt))


def rewrite(folder: Path, arms) -> Path:
    """Replace the positions and write a receipt that fits them."""
    (folder / "positions.parquet").unlink()
    write_table(folder / "positions.parquet", build_table(arms))
    write_receipt(folder, arms, "variant")
    return folder


def test_rows_are_what_the_file_holds(tmp_path):
    arms = build_arms()
    run = read_run(write_run(tmp_path, arms))
    assert run.baseline.kl_NP.ravel() == pytest.approx(arms["base"]["kl"], abs=0.0)
    assert run.variant.num_contexts == 64
    table = split_arms(build_table({"base": arms["base"]}))["base"]
    assert np.array_equal(run.baseline.average(run.baseline.kl_NP).values, context_means(table, "kl").values)


def test_a_lane_that_scores_from_a_later_position_on_is_read(tmp_path):
    arms = build_arms()
    for rows in arms.values():
        rows["position"] = rows["position"] + 9
    assert read_run(write_run(tmp_path, arms)).variant.kl_NP.shape == (64, 16)


def test_the_first_contexts_are_a_prefix(tmp_path):
    rows = read_run(write_run(tmp_path, build_arms())).variant
    part = rows.first(10)
    assert part.contexts == rows.contexts[:10]
    assert np.array_equal(part.disagree_NP, rows.disagree_NP[:10])


def test_one_flipped_byte_of_the_positions_is_found(tmp_path):
    write_run(tmp_path, build_arms())
    content = bytearray((tmp_path / "positions.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "positions.parquet").write_bytes(content)
    with pytest.raises(InvalidRunError, match=r"positions\.parquet: sha256 was altered"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "redigest", "message"),
    [
        (lambda r: r["identity"].update(seed=2), False, "`identity` was altered"),
        (lambda r: r["results"]["floors"].update(x=1), False, "`results` was altered"),
        (lambda r: r["results"]["arms"]["base"]["kl"].update(mean=1e-9), True, "mean KL of `base`: the receipt says"),
        (lambda r: r["results"]["comparison"]["paired"]["delta"].update(mean=0.0), True, "mean difference"),
        (lambda r: r["identity"]["tokens"].update(num_contexts=63), True, r"\[64, 16\] contexts x positions"),
        (lambda r: r["identity"]["arms"]["variant"].update(launches=[]), True, "launched no EXL3 kernel"),
        (
            lambda r: r["identity"]["arms"]["variant"].update(attention="eager"),
            True,
            "attention: 'sdpa' against 'eager'",
        ),
        (
            lambda r: r["identity"]["arms"]["variant"]["resolved"].update(activations="bfloat16"),
            True,
            r"resolved\.activations: 'float32' against 'bfloat16'",
        ),
        (lambda r: r["identity"]["arms"]["variant"].update(checkpoint_sha256="2"), True, "checkpoint_sha256"),
        (lambda r: r.update(variant="other"), True, "no rows of arm `other`"),
        (lambda r: r["identity"].pop("arms"), True, "lacks or misuses 'arms'"),
        (lambda r: r.pop("results_digest"), False, "lacks or misuses 'results_digest'"),
    ],
)
def test_an_altered_receipt_is_invalid(tmp_path, change, redigest, message):
    write_run(tmp_path, build_arms())
    edit_receipt(tmp_path, change, redigest=redigest)
    with pytest.raises(InvalidRunError, match=message) as caught:
        read_run(tmp_path)
    assert caught.value.exit_code == 4
    assert caught.value.hint


def test_a_receipt_that_is_no_strict_json_is_invalid(tmp_path):
    write_run(tmp_path, build_arms())
    text = (tmp_path / "receipt.json").read_text()
    (tmp_path / "receipt.json").write_text(text.replace('"created"', '"x": NaN, "created"'))
    with pytest.raises(InvalidRunError, match="not strict JSON"):
        read_run(tmp_path)


def test_shuffled_contexts_are_invalid_even_with_fresh_digests(tmp_path):
    arms = build_arms()
    write_run(tmp_path, arms)
    order = np.random.default_rng(0).permutation(64)
    shuffled = {key: values.reshape(64, 16)[order].ravel() for key, values in arms["variant"].items()}
    keep = {key: arms["variant"][key] for key in ("arm", "context", "cluster", "stratum", "position")}
    with pytest.raises(InvalidRunError, match="differ in target tokens"):
        read_run(rewrite(tmp_path, arms | {"variant": shuffled | keep}))
    with pytest.raises(InvalidRunError, match="differ in contexts"):
        read_run(rewrite(tmp_path, arms | {"variant": shuffled}))


def test_rows_out_of_order_or_missing_are_invalid(tmp_path):
    arms = build_arms()
    write_run(tmp_path, arms)
    mixed = {key: np.roll(values, 3) for key, values in arms["variant"].items()}
    with pytest.raises(InvalidRunError, match="lie in 65 blocks"):
        read_run(rewrite(tmp_path, arms | {"variant": mixed}))
    relabelled = arms["variant"] | {"cluster": np.arange(64 * 16).astype(str)}
    with pytest.raises(InvalidRunError, match="cluster changes inside a context"):
        read_run(rewrite(tmp_path, arms | {"variant": relabelled}))


def test_a_broken_arm_is_invalid_not_a_data_point(tmp_path):
    arms = build_arms()
    arms["variant"]["top1"] = np.full(64 * 16, 3, np.int8)
    with pytest.raises(InvalidRunError, match=r"`variant` is broken: top-1 agreement 0\.0%"):
        read_run(write_run(tmp_path / "a", arms))
    arms = build_arms()
    arms["variant"]["entropy_arm"] = np.full(64 * 16, 6.9)
    with pytest.raises(InvalidRunError, match=r"entropy 6\.90 of 6\.91"):
        read_run(write_run(tmp_path / "b", arms))


def test_a_folder_without_a_run_is_usage(tmp_path):
    with pytest.raises(UsageError, match=r"holds no receipt\.json") as caught:
        read_run(tmp_path)
    assert caught.value.exit_code == 2


def test_foreign_evidence_is_never_gated(tmp_path):
    write_run(tmp_path, build_arms())
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(InvalidRunError, match="holds foreign evidence"):
        read_run(tmp_path)


def test_several_variants_must_share_everything_but_the_variant(tmp_path):
    arms = build_arms(changes={"one": 0.01, "two": 0.02})
    one = read_run(write_run(tmp_path / "one", arms, "one"))
    two = read_run(write_run(tmp_path / "two", arms, "two"))
    check_one_design([one, two])
    other = read_run(write_run(tmp_path / "other", arms, "two", engine="other"))
    with pytest.raises(InvalidRunError, match="engine: 'transformers' against 'other'"):
        check_one_design([one, other])
    drifted = {name: dict(rows) for name, rows in arms.items()}
    drifted["base"]["kl"] = drifted["base"]["kl"] * (1.0 + 1e-9)
    with pytest.raises(InvalidRunError, match="baseline `base` reads other numbers"):
        check_one_design([one, read_run(write_run(tmp_path / "drift", drifted, "two"))])
    with pytest.raises(InvalidRunError, match="differ in contexts: other lengths"):
        short = build_arms(changes={"two": 0.0}, num_contexts=40)
        check_one_design([one, read_run(write_run(tmp_path / "short", short, "two"))])


def context(name: str, cluster: str, stratum: str) -> Context:
    return Context(
        id=name,
        cluster=cluster,
        split="analysis",
        stratum=stratum,
        language="en",
        kind="text",
        source="",
        version="",
        licence="",
        chars=1,
        sha256="",
    )


def test_the_order_of_contexts_is_the_suites_own(tmp_path):
    arms = build_arms(num_contexts=40)
    rows = [arms["base"][key].reshape(40, 16)[:, 0] for key in ("context", "cluster", "stratum")]
    contexts = tuple(context(*map(str, row)) for row in zip(*rows, strict=True))
    suite = Suite(
        name="synthetic",
        digest=suite_digest(contexts),
        contexts=contexts,
        sealed=(),
        floors={},
        licences={},
        fallback_template="",
    )
    place = {c.id: i for i, c in enumerate(contexts)}
    order = [place[c.id] for c in suite.select("analysis", 40, seed=1)]
    ordered = {
        name: {key: values.reshape(40, 16)[order].ravel() for key, values in columns.items()}
        for name, columns in arms.items()
    }
    named = {"suite": {"name": "synthetic", "digest": suite.digest, "split": "analysis"}}
    check_context_order(read_run(write_run(tmp_path / "good", ordered, **named)), suite)
    with pytest.raises(InvalidRunError, match="contexts are not the suite's draw"):
        check_context_order(read_run(write_run(tmp_path / "unordered", arms, **named)), suite)
    for columns in ordered.values():
        columns["stratum"] = np.where(columns["stratum"] == "code", "prose", "code")
    with pytest.raises(InvalidRunError, match="strata are not the suite's draw"):
        check_context_order(read_run(write_run(tmp_path / "relabelled", ordered, **named)), suite)
    with pytest.raises(InvalidRunError, match="not synthetic"):
        check_context_order(read_run(write_run(tmp_path / "foreign", arms)), suite)


def test_differences_are_named_by_path():
    assert list_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 0}) == [
        "a.c: 2 against 3",
        "d: None against 0",
    ]
    assert FLOOR in build_arms()

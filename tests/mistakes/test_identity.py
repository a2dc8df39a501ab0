"""Holes in identity and provenance: what may move a number has a name, and what has a name is compared."""

import copy
import importlib
import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from exl3eval.arm import ArmRecord, ArmSpec, arm_contract
from exl3eval.crossrun import StoredRun, compare_runs, list_differences
from exl3eval.engine.capture import Capture
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import EmbeddingBytes
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.identity import source_digest
from exl3eval.receipt import _arm_identity
from exl3eval.records import digest_value, write_json
from exl3eval.report.document import Table
from exl3eval.report.reproduce import check_bundle, write_bundle
from exl3eval.report.sections import build_document
from exl3eval.report.study import arrange, load_study
from exl3eval.settings import load_settings
from exl3eval.variant import Variant
from exl3eval.verify import read_stored_run
from exl3eval.vllm_engine.child import check_effective
from exl3eval.vllm_engine.request import ChildRequest, LaneTask
from exl3eval.vllm_engine.stack import Evidence, VllmStack

RUN = Path(__file__).parents[1] / "data" / "report_run"
BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
OTHER = {
    "activations": "bfloat16",
    "linear": "1-:fp16-staged",
    "embedding": "int8",
    "head": "reference",
    "graphs": "decode",
    "quantize": "6-mcg",
    "logits": "bfloat16",
    "requires": ("reference",),
    "forbids": ("broken-window",),
    "lanes": ("decode",),
    "vllm": VllmStack(environment={}, arguments={}, evidence=(Evidence(kind="log", pattern="x"),)),
}


@pytest.fixture(scope="module")
def study():
    return load_study([RUN])


@pytest.fixture(scope="module")
def stored(study) -> StoredRun:
    return StoredRun(receipt=study.runs[0].receipt, arms=study.runs[0].rows)


def spec(variant: Variant) -> ArmSpec:
    return ArmSpec(
        name="arm",
        checkpoint=None,
        checkpoint_sha256="0",
        declared=variant,
        resolved=variant,
        lanes=(Lane(kind="prefill"),),
    )


def changed(run: StoredRun, **values: object) -> StoredRun:
    """The same run with other identity fields."""
    receipt = copy.deepcopy(dict(run.receipt))
    receipt["identity"] |= values
    return StoredRun(receipt=receipt, arms=run.arms)


@pytest.mark.parametrize("field", [f.name for f in fields(Variant) if f.name not in ("name", "doc")])
def test_every_field_of_a_variant_is_in_the_capture_and_in_the_receipt(field: str) -> None:
    """M13: 17 reports from 0.003 to 0.064 nats had one identity, because no receipt held the variant."""
    variants = BASE, replace(BASE, **{field: OTHER[field]})
    contracts = [arm_contract(spec(v), tokens="t", engine="e", device={"name": "cpu"}) for v in variants]
    assert digest_value(contracts[0]) != digest_value(contracts[1])
    records = [
        ArmRecord(
            spec=spec(variant),
            lane=Lane(kind="prefill"),
            capture=Capture(directory=Path(), launches={}, resumed=0, repeat_difference=0.0),
            launches={},
            embedding_bytes=EmbeddingBytes(stored=0, run=0),
            attention="sdpa",
        )
        for variant in variants
    ]
    first, second = (_arm_identity(record) for record in records)
    assert first["declared"] != second["declared"] and first["resolved"] != second["resolved"]


def test_runs_with_other_caches_are_not_compared(stored: StoredRun) -> None:
    """M14: FP8 and BF16 key-value caches were mixed in one decomposition, and nothing said so."""
    served = changed(stored, kv_cache="fp8")
    with pytest.raises(InvalidRunError, match=r"differ in `identity\.kv_cache`: None against 'fp8'"):
        compare_runs(stored, served)
    (difference,), comparison = compare_runs(stored, served, declared=["identity.kv_cache"])
    assert (difference.right, difference.declared, comparison.identical) == ("fp8", True, True)


def test_a_run_says_what_its_cache_is_kept_in(stored: StoredRun) -> None:
    """M15: divergences of a BF16 cache were published for a product that serves an FP8 cache."""
    lanes = [Lane(kind="prefill"), Lane(kind="chunked", rows=8), Lane(kind="decode", rows=1, scored=2)]
    assert [lane.kv_cache for lane in lanes] == [None, "activation dtype", "activation dtype"]
    (run,) = load_study([RUN]).runs
    quantized = replace(run, receipt=changed(stored, kv_cache="fp8").receipt)
    assert (run.lane, quantized.lane) == ("prefill", "prefill, KV fp8")
    assert stated(run, "A quantized KV cache: none was used.")
    assert not stated(quantized, "A quantized KV cache: none was used.")


def stated(run, sentence: str) -> bool:
    return sentence in repr(build_document(arrange([run])))


def test_an_engine_that_quantizes_its_cache_undeclared_is_invalid(tmp_path: Path) -> None:
    """M15: a checkpoint may ask the engine for an FP8 cache that no variant declares."""
    request = ChildRequest(
        arm="base",
        model="m",
        reference_model="m",
        reference_hidden="h",
        lanes=(LaneTask(lane=Lane(kind="prefill"), rows="r"),),
        style="one-token",
        mode="eager",
        activations="bfloat16",
        device_type="cuda",
        vocab_size=10,
        head="own",
        logits="float32",
        float32_head=False,
        arguments={},
        evidence=(),
        plugin=True,
        ids="i",
        digests=(),
        report="r",
        trust_remote_code=False,
        fresh=False,
    )
    effective = {
        "prefix_caching": False,
        "async_scheduling": False,
        "tensor_parallel": 1,
        "dtype": "bfloat16",
        "float32_matmul": "highest",
        "compile_mode": "NONE",
        "cudagraph_mode": "NONE",
        "kv_cache_dtype": "fp8",
    }
    check_effective(effective | {"kv_cache_dtype": "auto"}, request)
    check_effective(effective, replace(request, arguments={"kv_cache_dtype": "fp8"}))
    with pytest.raises(InvalidRunError, match="kv_cache_dtype"):
        check_effective(effective, request)


def test_every_factor_that_moved_is_named(stored: StoredRun) -> None:
    """M15b: one question had two answers, 3.2e-4 and 4.8e-4, and no receipt told which factor moved."""
    other = changed(stored, kv_cache="fp8", engine="vllm")
    assert [d.field for d in list_differences(stored, other)] == ["identity.engine", "identity.kv_cache"]
    with pytest.raises(InvalidRunError, match=r"differ in `identity\.engine` and 1 more"):
        compare_runs(stored, other)


def package(folder: Path, name: str, text: str) -> str:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return name


def test_sources_have_one_digest_in_any_place_and_another_after_any_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M20: digests covered absolute paths, so nobody could repeat them. M22: pins matched no file any more."""
    digests = []
    for place, text in (("here", "x = 1\n"), ("far/away", "x = 1\n"), ("here-edited", "x = 2\n")):
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(tmp_path / place))
            name = package(tmp_path / place, "pinned_harness", text)
            importlib.invalidate_caches()
            digests.append(source_digest(name))
            sys.modules.pop(name, None)
    assert digests[0] == digests[1] != digests[2]


def test_runs_of_other_sources_are_not_compared(stored: StoredRun) -> None:
    """M22: the harness drifted from its published pin without a word."""
    code = stored.receipt["identity"]["code"] | {"exl3eval_source_sha256": "0" * 64}
    with pytest.raises(InvalidRunError, match=r"differ in `identity\.code\.exl3eval_source_sha256`"):
        compare_runs(stored, changed(stored, code=code))


def test_a_receipt_without_its_positions_is_not_read(tmp_path: Path) -> None:
    """M18: receipts held summaries alone, with nothing behind them."""
    for name in ("receipt.json", "floors.parquet"):
        shutil.copyfile(RUN / name, tmp_path / name)
    with pytest.raises(UsageError, match=r"holds no positions\.parquet"):
        read_stored_run(tmp_path)


def test_captures_outlive_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M23: the only evidence of 14 reports lay in a temporary folder."""
    monkeypatch.delenv("EXL3EVAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    assert load_settings().cache_dir == tmp_path / "kept" / "exl3eval"


@pytest.fixture(scope="module")
def bundle(study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(study, build_document(study), folder)
    return folder


def test_a_report_carries_the_positions_it_rests_on(bundle: Path) -> None:
    """M23: what a report needs to be checked lies beside it."""
    kept = bundle / "runs" / "01" / "positions.parquet"
    assert kept.read_bytes() == (RUN / "positions.parquet").read_bytes()
    assert "numbers of 1 runs are what the positions give" in check_bundle(bundle)


def test_no_number_of_a_report_can_be_typed_by_hand(bundle: Path, tmp_path: Path) -> None:
    """M26: "391x below" was published where the figures gave 39x."""
    assert round(2.9e-5 / 0.074e-5) == 39
    shutil.copytree(bundle, tmp_path / "edited")
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    ratio = next(b for s in report["sections"] for b in s["blocks"] if b.get("id") == "floors")["rows"][0][4]
    ratio |= {"value": 10 * ratio["value"], "text": str(10 * ratio["value"])}
    write_json(tmp_path / "edited" / "report.json", report)
    with pytest.raises(InvalidRunError, match=r"report\.json is not what its positions give"):
        check_bundle(tmp_path / "edited")


def test_a_ratio_is_the_quotient_of_the_two_figures_beside_it(study) -> None:
    """M26: ratios of a report are cells that were computed, from the figures that the same row and run hold."""
    document = build_document(study)
    table: Table = next(b for s in document.sections for b in s.blocks if getattr(b, "id", "") == "floors")
    effect = abs(study.runs[0].paired["delta"]["mean"])
    ratios = [(row[2].value, row[4].value) for row in table.rows if isinstance(row[4].value, float)]
    assert len(ratios) >= 3
    assert [ratio for _, ratio in ratios] == pytest.approx([effect / floor for floor, _ in ratios])

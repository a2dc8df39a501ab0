"""Measuring on a CPU: what is unknown says why, running out of memory is a finding, receipts subtract."""

import gc
import json
import mmap
import sys
from pathlib import Path

import pytest
import torch
import typer
from tiny_models import llama_tensors, tiny_config, write_model

from exl3eval.errors import EXIT_FAIL, InvalidRunError, UsageError
from exl3eval.memory import commands, measure
from exl3eval.memory.budget import CARD, OWN_CAP, Budget, enforce_budget, judge_failure
from exl3eval.memory.measure import PHASES, MemoryRequest, measure_memory
from exl3eval.memory.meter import CpuMeter
from exl3eval.memory.present import format_bytes
from exl3eval.memory.receipt import build_receipt, compare_receipts, read_receipt
from exl3eval.progress import TerminalReporter
from exl3eval.records import seal, write_json, write_receipt
from exl3eval.variant import SCHEMA

CPU = torch.device("cpu")
BLOCK = 64 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_model(tmp_path_factory.mktemp("tiny"), llama_tensors(config), config)


def receipt_of(directory: Path, **changes: object) -> dict:
    request = MemoryRequest(model=directory, positions=12, decode_positions=3, device="cpu", **changes)
    return build_receipt(measure_memory(request, num_threads=1, reporter=TerminalReporter(quiet=True)))


@pytest.fixture(scope="module")
def receipts(directory: Path) -> dict[str, dict]:
    return {name: receipt_of(directory, variant=name) for name in ("base", "int8-embed")}


def rows_of(receipt: dict) -> dict[tuple[str, str], dict]:
    return {(row["section"], row["name"]): row for row in receipt["results"]["rows"]}


def test_a_figure_is_known_or_says_why(receipts: dict[str, dict]) -> None:
    for receipt in receipts.values():
        rows = receipt["results"]["rows"]
        assert len(rows) == len(rows_of(receipt)) > 40
        for row in rows:
            assert (row["bytes"] is None) == bool(row["why"]), row
        assert [phase["name"] for phase in receipt["results"]["phases"]] == list(PHASES)
        assert receipt["results"]["outcome"]["fits"] and receipt["results"]["budget"] is None
        assert {launch["route"] for launch in receipt["identity"]["launches"]} == {"reference"}
        assert {launch["rows_bucket"] for launch in receipt["identity"]["launches"]} == {1, 12, 16}


def test_the_cache_is_measured_and_calculated(receipts: dict[str, dict]) -> None:
    rows = rows_of(receipts["base"])
    per_token = 2 * 64 * 4
    for name in ("per token, by its tensors", "per token, by the formula", "per prefilled token, by its tensors"):
        assert rows["key-value cache", name]["bytes"] == per_token
    assert rows["key-value cache", "whole, by its tensors"]["bytes"] == 15 * per_token


def test_rows_multiply_the_cache_and_not_its_growth(directory: Path) -> None:
    rows = rows_of(receipt_of(directory, rows=3))
    assert rows["key-value cache", "per token, by its tensors"]["bytes"] == 512
    assert rows["key-value cache", "whole, by its tensors"]["bytes"] == 3 * 15 * 512


def test_two_receipts_subtract_with_their_sign(receipts: dict[str, dict]) -> None:
    changes = {(d.section, d.name): d for d in compare_receipts(receipts["base"], receipts["int8-embed"])}
    saved = changes["weights", "embedding, resident"]
    assert saved.change == (256 * 128 + 4 * 256) - 256 * 128 * 4 < 0
    assert changes["weights", "all, resident"].change == saved.change
    assert changes["weights", "embedding, stored"].change == 0
    assert changes["held", "load, by the allocator"].change is None
    back = {(d.section, d.name): d for d in compare_receipts(receipts["int8-embed"], receipts["base"])}
    assert back["weights", "embedding, resident"].change == -saved.change


def test_receipts_of_other_workloads_or_devices_are_not_subtracted(receipts: dict[str, dict]) -> None:
    other = json.loads(json.dumps(receipts["base"]))
    other["identity"]["workload"]["positions"] = 99
    with pytest.raises(UsageError, match="different workloads"):
        compare_receipts(receipts["base"], other)
    other = json.loads(json.dumps(receipts["base"]))
    other["identity"]["device"]["name"] = "another"
    with pytest.raises(UsageError, match="different devices"):
        compare_receipts(receipts["base"], other)


def test_a_receipt_is_written_once_and_read_back_only_whole(receipts: dict[str, dict], tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    write_receipt(path, receipts["base"])
    assert read_receipt(path) == seal(json.loads(json.dumps(receipts["base"])))
    assert str(tmp_path) not in path.read_text()
    with pytest.raises(UsageError, match="immutable"):
        write_receipt(path, receipts["base"])
    changed = json.loads(path.read_text())
    changed["results"]["rows"][0]["bytes"] += 1
    (tmp_path / "altered.json").write_text(json.dumps(changed))
    with pytest.raises(InvalidRunError, match="was altered"):
        read_receipt(tmp_path / "altered.json")
    write_json(tmp_path / "foreign.json", seal({}))
    with pytest.raises(UsageError, match="no memory receipt"):
        read_receipt(tmp_path / "foreign.json")


@pytest.mark.parametrize("failing", ["load", "prefill", "scoring"])
def test_running_out_of_memory_names_the_phase(directory: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say")

    monkeypatch.setattr(measure, {"load": "_load", "prefill": "_prefill", "scoring": "_score"}[failing], refuse)
    results = receipt_of(directory)["results"]
    assert results["outcome"] == {
        "fits": False,
        "phase": failing,
        "limit": CARD,
        "message": f"out of memory in phase {failing}: the card was full; no budget was set",
    }
    reached = PHASES[: PHASES.index(failing) + 1]
    assert [phase["name"] for phase in results["phases"]] == list(reached)
    assert results["phases"][-1]["why"] == "CUDA out of memory"
    for row in results["rows"]:
        assert (row["bytes"] is None) == bool(row["why"]), row


def test_whose_limit_it_was() -> None:
    failure = torch.OutOfMemoryError("CUDA out of memory.")
    ours = Budget(bytes=1 << 30, device_bytes=8 << 30, free_bytes=4 << 30)
    theirs = Budget(bytes=6 << 30, device_bytes=8 << 30, free_bytes=4 << 30)
    assert judge_failure("decode", failure, ours).limit == OWN_CAP
    assert "our own cap of 1.00 GiB" in judge_failure("decode", failure, ours).message
    assert judge_failure("decode", failure, theirs).limit == CARD
    assert judge_failure("decode", failure, None).limit == CARD
    fitted = judge_failure("graph", None, ours)
    assert fitted.fits and "allocator cap of 1.00 GiB" in fitted.message


def test_the_cap_is_set_in_bytes_of_the_device_and_lifted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU of 8 GiB with 4 GiB free, which like torch asks for an index."""
    fractions: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda.memory, "set_per_process_memory_fraction", lambda share, index: fractions.append((share, index))
    )
    with pytest.raises(KeyError), enforce_budget(2 << 30, torch.device("cuda")) as budget:
        assert budget == Budget(bytes=2 << 30, device_bytes=8 << 30, free_bytes=4 << 30) and budget.binds_first
        raise KeyError
    assert fractions == [(0.25, 1), (1.0, 1)]
    with enforce_budget(6 << 30, torch.device("cuda:0")) as budget:
        assert budget is not None and not budget.binds_first
    assert fractions[2:] == [(0.75, 0), (1.0, 0)]
    with pytest.raises(UsageError, match=r"exceeds the 8\.00 GiB"), enforce_budget(9 << 30, torch.device("cuda:0")):
        pass
    with enforce_budget(None, torch.device("cuda:0")) as budget:
        assert budget is None
    assert len(fractions) == 4


def test_a_cpu_takes_no_budget(directory: Path) -> None:
    with pytest.raises(UsageError, match="cannot cap CPU memory"), enforce_budget(1 << 30, CPU):
        pass
    with pytest.raises(UsageError, match="needs a GPU"):
        receipt_of(directory, budget=1 << 30)


def test_a_variant_that_makes_its_own_weights_is_refused(directory: Path, tmp_path: Path) -> None:
    fields = {"name": "q", "doc": "Q.", "activations": "auto", "linear": "auto", "embedding": "stored"}
    lines = [f'{name} = "{value}"' for name, value in {"schema": SCHEMA, **fields, "quantize": "4-mcg"}.items()]
    (tmp_path / "q.toml").write_text("\n".join(lines))
    with pytest.raises(UsageError, match="quantizes the 16-bit model at load"):
        receipt_of(directory, variant=str(tmp_path / "q.toml"))


def test_counts_that_are_not_positive_are_refused() -> None:
    with pytest.raises(UsageError, match="decode_positions is 0"):
        MemoryRequest(decode_positions=0)
    with pytest.raises(UsageError, match="budget is 0"):
        MemoryRequest(budget=0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident pages are read from /proc")
def test_settling_frees_what_only_garbage_holds() -> None:
    class Cycle:
        pass

    meter = CpuMeter()
    meter.settle()
    before = meter.read()
    assert before.process is not None and before.held is None and "held" in meter.unknown
    gc.disable()
    try:
        cycle = Cycle()
        # Pages of their own: the C allocator could hand back memory that is resident already.
        cycle.own, cycle.block = cycle, torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8).fill_(1)
        del cycle
        unsettled = meter.read()
    finally:
        gc.enable()
    assert unsettled.process - before.process > BLOCK // 2
    meter.settle()
    assert meter.read().process - before.process < BLOCK // 2
    if "process_peak" not in meter.unknown:
        assert unsettled.process_peak >= unsettled.process
        assert meter.read().process_peak < unsettled.process_peak


def test_sizes_are_spelled() -> None:
    assert format_bytes(None) == "unknown"
    assert format_bytes(168) == "168 B"
    assert format_bytes(-3 << 20) == "-3.00 MiB"
    assert format_bytes(1.1 * (1 << 30)) == "1.10 GiB"


def test_the_command_writes_compares_and_exits(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    app = typer.Typer()
    commands.register(app)
    app.callback()(lambda: None)
    common = [
        "memory",
        "--model",
        str(directory),
        "--positions",
        "8",
        "--decode-positions",
        "2",
        "--device",
        "cpu",
        "-q",
    ]
    first = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "a.json")])
    assert first.exit_code == 0, first.output
    assert "key-value cache" in first.output and "every phase fitted" in first.output
    second = CliRunner().invoke(app, [*common, "--variant", "int8-embed", "--against", str(tmp_path / "a.json")])
    assert second.exit_code == 0 and "this minus a" in second.output and "-95.00 KiB" in second.output
    again = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "a.json")])
    assert isinstance(again.exception, UsageError)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "_decode", refuse)
    failed = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "b.json")])
    assert failed.exit_code == EXIT_FAIL and "out of memory in phase decode" in failed.output
    assert read_receipt(tmp_path / "b.json")["results"]["outcome"]["phase"] == "decode"

"""Captures resume exactly, notice damage, and never mix contracts."""

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.capture import Capture, capture_arm
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.variant import Variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
PREFILL = Lane(kind="prefill")
CONTEXTS = [(f"{index:x}" * 64, torch.arange(index, index + 12) % VOCAB) for index in range(1, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ArmModel:
    directory = write_model(tmp_path_factory.mktemp("model"), llama_tensors(tiny_config()), tiny_config())
    return load_arm(open_checkpoint(directory), BASE, vocab_size=VOCAB, device=torch.device("cpu"))


def _capture(
    model: ArmModel,
    cache: Path,
    *,
    contract: str = "a",
    fresh: bool = False,
    num_threads: int = 1,
    lane: Lane = PREFILL,
    on_context=lambda n: None,
) -> Capture:
    return capture_arm(
        model,
        CONTEXTS,
        lane=lane,
        contract={"is": contract},
        cache_dir=cache,
        fresh=fresh,
        num_threads=num_threads,
        on_context=on_context,
    )


class _StopError(Exception):
    pass


def test_a_killed_run_continues_where_it_stopped(model: ArmModel, tmp_path: Path) -> None:
    whole = _capture(model, tmp_path / "whole")
    done = []

    def stop_after_two(count: int) -> None:
        done.append(count)
        if len(done) == 2:
            raise _StopError

    with pytest.raises(_StopError):
        _capture(model, tmp_path / "killed", on_context=stop_after_two)
    resumed = _capture(model, tmp_path / "killed")
    assert 2 <= resumed.resumed < len(CONTEXTS)
    assert resumed.launches == whole.launches
    for digest, _ in CONTEXTS:
        assert torch.equal(resumed.hidden_states(digest), whole.hidden_states(digest))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_context_is_made_again(model: ArmModel, tmp_path: Path, damage: str) -> None:
    before = _capture(model, tmp_path)
    first = min(before.directory.glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
        first.write_bytes(content)
    elif damage == "truncate":
        first.write_bytes(content[:-8])
    else:
        first.write_bytes(b"")
    after = _capture(model, tmp_path)
    assert after.resumed == len(CONTEXTS) - 1
    for digest, _ in CONTEXTS:
        assert torch.equal(before.hidden_states(digest), after.hidden_states(digest))


def test_another_contract_never_reuses(model: ArmModel, tmp_path: Path) -> None:
    _capture(model, tmp_path, contract="a")
    assert _capture(model, tmp_path, contract="b").resumed == 0
    assert _capture(model, tmp_path, contract="a").resumed == len(CONTEXTS)
    assert _capture(model, tmp_path, contract="a", fresh=True).resumed == 0


def test_launches_are_those_of_the_contexts(model: ArmModel, tmp_path: Path) -> None:
    """Seven linears per context, 12 rows each; the extra repeat of the first context is not counted."""
    capture = _capture(model, tmp_path)
    assert sum(capture.launches.values()) == 7 * len(CONTEXTS)
    assert {launch.rows_bucket for launch in capture.launches} == {12}
    assert {launch.route for launch in capture.launches} == {"reference"}


def test_threads_change_no_bit_and_no_count(model: ArmModel, tmp_path: Path) -> None:
    one, three = (_capture(model, tmp_path / str(n), num_threads=n) for n in (1, 3))
    assert one.launches == three.launches
    for digest, _ in CONTEXTS:
        assert torch.equal(one.hidden_states(digest), three.hidden_states(digest))


def test_the_repeat_has_the_same_bits(model: ArmModel, tmp_path: Path) -> None:
    assert _capture(model, tmp_path).repeat_difference == 0.0


def test_a_repeat_that_differs_is_measured(model: ArmModel, tmp_path: Path) -> None:
    _capture(model, tmp_path)
    weight = model.decoder.norm.weight
    weight.mul_(1.5)
    try:
        assert _capture(model, tmp_path).repeat_difference > 0.01
    finally:
        weight.div_(1.5)


def test_a_full_disk_loses_nothing(model: ArmModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import exl3eval.records as records

    real, calls = records.os.fsync, []

    def full_after_three(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(records.os, "fsync", full_after_three)
    with pytest.raises(UsageError, match="No space left on device") as caught:
        _capture(model, tmp_path)
    assert "free space" in caught.value.hint
    monkeypatch.setattr(records.os, "fsync", real)
    assert not list(tmp_path.rglob(".*"))
    assert _capture(model, tmp_path).resumed == 2


def test_non_finite_states_stop_before_anything_is_kept(model: ArmModel, tmp_path: Path) -> None:
    weight = model.decoder.norm.weight
    saved = weight.clone()
    weight[:] = float("nan")
    try:
        with pytest.raises(InvalidRunError, match="not finite"):
            _capture(model, tmp_path)
    finally:
        weight.copy_(saved)
    assert not list(tmp_path.rglob("*.safetensors"))

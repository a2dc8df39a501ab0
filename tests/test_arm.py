"""One arm: what it brings back suffices to score it, and a head that is not its own is found out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model

from exl3eval.arm import ArmOutcome, ArmSpec, ArmTask, run_arm
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import check_probe
from exl3eval.errors import InvalidRunError
from exl3eval.isolation import run_isolated
from exl3eval.progress import TerminalReporter
from exl3eval.variant import Variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
CPU = torch.device("cpu")
LANES = (Lane(kind="prefill"), Lane(kind="decode", rows=2, scored=3))


def _spec(directory: Path) -> ArmSpec:
    checkpoint = open_checkpoint(directory)
    return ArmSpec(name="base", checkpoint=checkpoint, checkpoint_sha256="c", declared=BASE, resolved=BASE, lanes=LANES)


def _run(spec: ArmSpec, cache: Path) -> ArmOutcome:
    task = ArmTask(
        spec=spec,
        contexts=tuple((f"{index:x}" * 64, torch.arange(index, index + 12) * 7 % VOCAB) for index in range(1, 4)),
        floor_contexts=(),
        contract={"of": "a test"},
        vocab_size=VOCAB,
        device="cpu",
        cache_dir=cache,
        num_threads=1,
        trust_remote_code=False,
        fresh=False,
    )
    return run_isolated(run_arm, task, TerminalReporter(quiet=True), label="arm")


@pytest.mark.parametrize("tied", [False, True])
def test_an_arm_runs_every_lane_and_its_head_is_had_without_the_model(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    tensors = {name: t for name, t in llama_tensors(config).items() if not (tied and name.startswith("lm_head"))}
    spec = _spec(write_model(tmp_path / "model", tensors, config))
    outcome = _run(spec, tmp_path / "cache")
    assert set(outcome.captures) == {"prefill", "decode[2]"}
    assert all(capture.repeat_difference == 0.0 and capture.launches for capture in outcome.captures.values())
    head = outcome.probe.load(spec, vocab_size=VOCAB, device=CPU)
    assert torch.equal(head.logits(outcome.probe.hidden_PH), outcome.probe.logits_PV)


def test_a_head_of_another_model_is_invalid(tmp_path: Path) -> None:
    spec = _spec(write_model(tmp_path / "model", llama_tensors(tiny_config()), tiny_config()))
    probe = _run(spec, tmp_path / "cache").probe
    moved = replace(probe, logits_PV=probe.logits_PV * 1.001)
    with pytest.raises(InvalidRunError, match="arm `base`: the head that scores gives other logits"):
        moved.load(spec, vocab_size=VOCAB, device=CPU)


def test_a_probe_that_says_nothing_is_invalid() -> None:
    states = torch.randn(4, 8)
    check_probe(states, "x")
    with pytest.raises(InvalidRunError, match="every hidden state of the probe is zero"):
        check_probe(torch.zeros(4, 8), "x")
    with pytest.raises(InvalidRunError, match="4 different tokens give one hidden state"):
        check_probe(states[:1].expand(4, 8), "x")

"""The same arms on a GPU: upstream's checkpoint is reproduced there too, in the same bits on every run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.score.divergence import measure_divergences
from exl3eval.variant import load_variant, resolve_variant

DATA = Path(__file__).parents[1] / "data" / "qwen2-tied"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]


@pytest.mark.parametrize("name", ["base", "int8-embed"])
def test_a_gpu_arm_agrees_with_the_cpu_arm(name: str) -> None:
    checkpoint = open_checkpoint(DATA / "exl3-mcg-5bpw")
    ids = load_file(DATA / "exl3-mcg-5bpw" / "upstream_logits.safetensors")["input_ids"][0]
    logits = {}
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        arm = load_arm(checkpoint, resolve_variant(load_variant(name), kind), vocab_size=1024, device=device)
        hidden = arm.hidden_states(ids)
        assert torch.equal(hidden, arm.hidden_states(ids))
        logits[kind] = arm.head.logits(hidden).cpu()
    scored = measure_divergences(logits["cpu"], {"cuda": logits["cuda"]}, ids.roll(-1))["cuda"]
    assert scored.kl.mean() <= 1e-5


def test_scoring_on_a_gpu_equals_scoring_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(64, 5000, generator=generator) * 3
    arm = ref + 0.1 * torch.randn(64, 5000, generator=generator)
    targets = torch.arange(64)
    here = measure_divergences(ref, {"a": arm}, targets)["a"]
    there = measure_divergences(ref.cuda(), {"a": arm.cuda()}, targets.cuda())["a"]
    for name in ("kl", "kl_reverse", "js", "tv", "delta_nll", "entropy_arm"):
        assert torch.allclose(getattr(here, name), getattr(there, name), rtol=0, atol=1e-14), name
    assert torch.equal(here.top1, there.top1)

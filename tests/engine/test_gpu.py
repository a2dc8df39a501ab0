"""The same arms on a GPU: upstream's checkpoint is reproduced there too, in the same bits on every run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl3_kernels import routes
from exl3_kernels.dispatch import measured_on
from exl3_kernels.routes import bucket_rows, read_launches, reset_launches
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.kernel_check.samples import make_weight
from exl3eval.score.divergence import measure_divergences
from exl3eval.variant import load_variant, resolve_variant

DATA = Path(__file__).parents[1] / "data" / "qwen2-tied"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]


@pytest.mark.parametrize(
    ("on_cpu", "on_gpu"),
    [("base", "base"), ("int8-embed", "int8-embed"), ("rotated-fp16", "base"), ("rotated-fp16", "triton")],
)
def test_a_gpu_arm_agrees_with_the_cpu_arm(on_cpu: str, on_gpu: str) -> None:
    checkpoint = open_checkpoint(DATA / "exl3-mcg-5bpw")
    ids = load_file(DATA / "exl3-mcg-5bpw" / "upstream_logits.safetensors")["input_ids"][0]
    logits = {}
    for kind, name in (("cpu", on_cpu), ("cuda", on_gpu)):
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


def _arm(name: str) -> ArmModel:
    variant = resolve_variant(load_variant(name), "cuda", measured=measured_on(torch.device("cuda", 0)))
    return load_arm(open_checkpoint(DATA / "exl3-mcg-5bpw"), variant, vocab_size=1024, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "rows"),
    [*(("base", rows) for rows in (1, 2, 5, 8, 16, 17)), ("triton", 1), ("triton", 17), ("triton", 33)],
)
def test_replayed_steps_have_the_bits_and_the_launches_of_eager_ones(name: str, rows: int) -> None:
    """A second batch shows that nothing of the first is left in the captured step or its cache."""
    arm = _arm(name)
    eager, replayed = (Lane(kind="decode", rows=rows, scored=12, graph=graph) for graph in (False, True))
    for start in (3, 400):
        ids_BT = (torch.arange(start, start + 24) * 7 + torch.arange(rows)[:, None] * 31) % 1024
        arm.run_lane(ids_BT, replayed)
        seen, states = {}, {}
        for lane in (eager, replayed):
            reset_launches()
            states[lane] = arm.run_lane(ids_BT, lane)
            seen[lane] = read_launches()
        assert torch.equal(states[eager], states[replayed])
        assert seen[eager] == seen[replayed]
        assert sum(n for launch, n in seen[replayed].items() if launch.rows_bucket == bucket_rows(rows)) >= 12 * 7


def test_a_python_counter_would_not_have_seen_the_replays() -> None:
    arm = _arm("base")
    lane = Lane(kind="decode", rows=2, scored=12, graph=True)
    ids_BT = (torch.arange(24) * 7 + torch.arange(2)[:, None]) % 1024
    arm.run_lane(ids_BT, lane)
    reset_launches()
    arm.run_lane(ids_BT, lane)
    counted_in_python = sum(n for launch, n in routes._launches.counts.items() if launch.rows_bucket == 2)
    assert counted_in_python == 0
    assert sum(n for launch, n in read_launches().items() if launch.rows_bucket == 2) > 0


def test_the_first_launch_of_a_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    _arm("base")
    weight = make_weight(128, 128, 4, "mcg", device=torch.device("cuda"))
    monkeypatch.setattr(routes, "_graph_launches", {})
    with (
        pytest.raises(RuntimeError, match="first EXL3 launch on a GPU is inside a graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        routes.count_launch("decode-gemm", 1, weight)

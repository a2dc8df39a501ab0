"""Time a layer of routed experts on one GPU: grouped, expert by expert, and dense in bfloat16. Synthetic weights.

python reports/kernels/experts/measure.py OUT.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import silu

from exl3_kernels.cuda import load_library
from exl3_kernels.dispatch import dispatch_for
from exl3_kernels.experts import Exl3Experts, Expert
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3eval.identity import code_identity, device_identity
from exl3eval.records import write_receipt

GPU = torch.device("cuda", 0)
HIDDEN, INNER, EXPERTS, SLOTS = 2048, 768, 128, 8
LAYERS = {
    "K4 mcg": [(4, "mcg")],
    "K4 mul1": [(4, "mul1")],
    "K3-5 mixed": [(3, "mul1"), (4, "mcg"), (5, "mul1")],
}
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
ROUTINGS = 8  # different ones per captured graph, so that few tokens do not meet their experts in the L2 cache
ROUNDS = 7
LOOP_ROUNDS = 2

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_linear(k: int, n: int, bits: int, codebook: str, generator: torch.Generator) -> Exl3Linear:
    """Return a linear of random words with the dispatch that this GPU's table gives it."""
    words = torch.randint(
        -(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=generator, dtype=torch.int16, device=GPU
    )
    weight = Exl3Weight(
        trellis=words,
        suh=(torch.randn(k, generator=generator, device=GPU) * k**-0.5).half(),
        svh=torch.randn(n, generator=generator, device=GPU).half(),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
    )
    return Exl3Linear(weight, dispatch=dispatch_for(torch.cuda.get_device_name(GPU), k, n, bits))


def make_experts(kinds: list[tuple[int, str]]) -> list[Expert]:
    """Return the layer's experts, kinds in turn."""
    generator = torch.Generator(GPU).manual_seed(0)

    def kind(number: int) -> tuple[int, str]:
        return kinds[number % len(kinds)]

    return [
        Expert(
            gate=make_linear(HIDDEN, INNER, *kind(e), generator),
            up=make_linear(HIDDEN, INNER, *kind(e + 1), generator),
            down=make_linear(INNER, HIDDEN, *kind(e + 2), generator),
        )
        for e in range(EXPERTS)
    ]


def make_calls(tokens: int) -> list[Call]:
    """Return calls of uniformly random routing."""
    generator = torch.Generator(GPU).manual_seed(tokens)
    calls = []
    for _ in range(ROUTINGS if tokens <= 64 else 2):
        x = torch.randn(tokens, HIDDEN, generator=generator, device=GPU).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=generator, device=GPU).topk(SLOTS, dim=1).indices
        scales = torch.rand(tokens, SLOTS, generator=generator, device=GPU).softmax(dim=1)
        calls.append((x, ids, scales))
    return calls


class Dense:
    """The same layer in bfloat16 through `torch._grouped_mm`: pairs sorted by expert on the GPU."""

    def __init__(self) -> None:
        generator = torch.Generator(GPU).manual_seed(1)
        self.gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator, device=GPU, dtype=torch.bfloat16)
        self.down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator, device=GPU, dtype=torch.bfloat16)
        self.numbers = torch.arange(EXPERTS, device=GPU)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [T, H]."""
        experts, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self.numbers, right=True).int()
        gate, up = torch._grouped_mm(x[order // SLOTS], self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(silu(gate) * up, self.down.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=GPU)
        return (y[back].view(*ids.shape, HIDDEN) * scales[..., None].to(y.dtype)).sum(dim=1)


def captured(layer: Callable[..., torch.Tensor], calls: list[Call]) -> Callable[[], None]:
    """Return the replay of a graph of all calls."""
    for call in calls:
        layer(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            layer(*call)
    return graph.replay


def seconds(run: Callable[[], object]) -> float:
    """Time one run with events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a large copy, the median of five."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device=GPU)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / statistics.median(seconds(lambda: target.copy_(source)) for _ in range(5))


def weight_bytes(experts: list[Expert], calls: list[Call]) -> float:
    """Return the stored bytes of the experts that a call routes to, on average."""
    size = torch.tensor(
        [sum(t.nbytes for linear in e for t in (linear.trellis, linear.suh, linear.svh)) for e in experts],
        dtype=torch.float64,
    )
    return statistics.mean(float(size[ids.unique().cpu()].sum()) for _, ids, _ in calls)


def measure(name: str, dense: Dense, bandwidth: float) -> list[dict[str, object]]:
    """Time every contestant at every token count, interleaved."""
    experts = make_experts(LAYERS[name])
    layers = {
        route: Exl3Experts(experts, activation=silu, dispatch=f"1-:{route}")
        for route in ("grouped-decode", "grouped-prefill", "experts-loop")
    }
    rows = []
    for tokens in TOKENS:
        calls = make_calls(tokens)
        runs = {"grouped-prefill": captured(layers["grouped-prefill"], calls), "dense bf16": captured(dense, calls)}
        if tokens * SLOTS <= 512:
            runs["grouped-decode"] = captured(layers["grouped-decode"], calls)
        times: dict[str, list[float]] = {contestant: [] for contestant in runs}
        for _ in range(ROUNDS):
            for contestant, run in runs.items():
                times[contestant].append(seconds(run) / len(calls))
        loop = layers["experts-loop"]
        loop(*calls[0])
        times["experts-loop"] = [seconds(partial(loop, *calls[0])) for _ in range(LOOP_ROUNDS)]
        needed = weight_bytes(experts, calls)
        rows.append(
            {
                "layer": name,
                "tokens": tokens,
                "median_s": {contestant: statistics.median(t) for contestant, t in times.items()},
                "spread_s": {contestant: max(t) - min(t) for contestant, t in times.items()},
                "weight_bytes": needed,
                "roofline_s": needed / bandwidth,
            }
        )
        told = {contestant: f"{statistics.median(t) * 1e6:.1f}" for contestant, t in times.items()}
        print(name, tokens, "roofline", f"{needed / bandwidth * 1e6:.1f}", told, flush=True)
    return rows


def main() -> None:
    """Measure and write the receipt."""
    library, bandwidth = load_library(GPU), copy_bandwidth()
    with torch.inference_mode():
        dense = Dense()
        rows = [row for name in LAYERS for row in measure(name, dense, bandwidth)]
    receipt = {
        "schema": "exl3eval/experts-timing/1",
        "workload": "synthetic weights and uniformly random routing; no model",
        "geometry": {"hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "slots": SLOTS},
        "activations": "bfloat16",
        "copy_bytes_per_s": bandwidth,
        "device": device_identity(GPU),
        "code": code_identity(),
        "kernels": {"architecture": library.architecture, "source_sha256": library.source_sha256},
        "rows": rows,
    }
    write_receipt(Path(sys.argv[1]), receipt)


if __name__ == "__main__":
    main()

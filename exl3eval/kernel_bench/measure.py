"""Measure routes against dense products on synthetic weights, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from exl3_kernels import gpu_routes  # noqa: F401  registers the routes
from exl3_kernels.cuda import load_library
from exl3_kernels.decode import DECODE, multiprocessors
from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import BLOCK, MULTIPLIERS, Exl3Weight
from exl3_kernels.workspace import release_workspaces, workspace_bytes
from exl3eval.kernel_bench.geometry import Geometry
from exl3eval.kernel_bench.timing import Contestant, Timing, capture, time_interleaved

ROTATED_BYTES = 420_000_000
MOST_COPIES = 512
PREFILL_ROWS = 512
PREFILL_LAUNCHES = 4
LEAST_LAUNCHES = 4
LARGEST_OUTPUT_BYTES = 1 << 31
PROBE = "load-probe"
DENSE = ("dense-fp16", "dense-bf16")
PROBE_CODEBOOK = 3

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One contestant in one cell.

    Parameters
    ----------
    geometry : Geometry
        The weight.
    codebook : str
        Of the weight.
    rows : int
        M.
    contestant : str
        A route, `dense-fp16`, `dense-bf16`, or `load-probe`: the decode GEMM without the decoding.
    timing : Timing
        Per launch.
    extra_bytes : int or None
        Memory of a route beyond operands and result, at its peak, its kept workspace included; None for the others.
    """

    geometry: Geometry
    codebook: str
    rows: int
    contestant: str
    timing: Timing
    extra_bytes: int | None


def measure(
    geometries: Sequence[Geometry], codebooks: Sequence[str], rows: Sequence[int], routes: Sequence[str]
) -> Iterator[Measurement]:
    """Yield measurements of every cell that fits the GPU, contestants of a cell interleaved.

    Weights rotate over more than 400 MB, so that no launch finds its own in the L2 cache.
    """
    for geometry in geometries:
        dense = _copies(geometry.dense_bytes)
        dense_weights = {
            name: torch.randn(dense, geometry.in_features, geometry.out_features, device="cuda", dtype=dtype).mul_(0.02)
            for name, dtype in zip(DENSE, (torch.float16, torch.bfloat16), strict=True)
        }
        for codebook in codebooks:
            weights = synthetic_weights(geometry, codebook, _copies(geometry.packed_bytes))
            for count in rows:
                if count * geometry.out_features * 2 > LARGEST_OUTPUT_BYTES:
                    continue
                yield from _measure_cell(geometry, codebook, count, routes, weights, dense_weights)
            del weights
        del dense_weights
        torch.cuda.empty_cache()


def synthetic_weights(geometry: Geometry, codebook: str, copies: int, seed: int = 1) -> list[Exl3Weight]:
    """Return weights of uniformly random words, with scales such that outputs are of the order of inputs."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    k, n = geometry.in_features, geometry.out_features
    shape = (k // 16, n // 16, 16 * geometry.bits)

    def signs(size: int) -> torch.Tensor:
        return torch.randint(0, 2, (size,), device="cuda", generator=generator).mul_(2).sub_(1)

    suh = (signs(k) * (0.5 + torch.rand(k, device="cuda", generator=generator)) * k**-0.5).half()
    svh = (signs(n) * (0.5 + torch.rand(n, device="cuda", generator=generator))).half()
    return [
        Exl3Weight(
            trellis=torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=generator),
            suh=suh,
            svh=svh,
            codebook=codebook,
            multiplier=MULTIPLIERS[codebook],
        )
        for _ in range(copies)
    ]


def _measure_cell(
    geometry: Geometry,
    codebook: str,
    rows: int,
    routes: Sequence[str],
    weights: Sequence[Exl3Weight],
    dense_weights: dict[str, torch.Tensor],
) -> Iterator[Measurement]:
    x_Mk = torch.randn(rows, geometry.in_features, device="cuda").half()
    contestants: dict[str, Contestant] = {}
    extra: dict[str, int] = {}
    for name, matrices in dense_weights.items():
        x, y = x_Mk.to(matrices.dtype), torch.empty(rows, geometry.out_features, device="cuda", dtype=matrices.dtype)
        contestants[name] = capture([_bind(torch.mm, x, matrix, out=y) for matrix in _cycle(list(matrices), rows)])
    for name in routes:
        route = ROUTES[name]
        if route.rejects(weights[0], rows, "cuda"):
            continue
        dtype = torch.bfloat16 if name.startswith("fp8") else torch.float16
        extra[name] = _extra_bytes(_bind(route.run, x_Mk, weights[0], None, dtype))
        contestants[name] = capture([_bind(route.run, x_Mk, weight, None, dtype) for weight in _cycle(weights, rows)])
    if rows == 1:
        contestants[PROBE] = capture([_bind_probe(weight) for weight in _cycle(weights, rows)])
    for name, timing in time_interleaved(contestants).items():
        yield Measurement(
            geometry=geometry,
            codebook=codebook,
            rows=rows,
            contestant=name,
            timing=timing,
            extra_bytes=extra.get(name),
        )


def _bind(function: Callable[..., object], *arguments: object, **options: object) -> Callable[[], object]:
    return lambda: function(*arguments, **options)


def _bind_probe(weight: Exl3Weight) -> Callable[[], object]:
    k, n, device = weight.in_features, weight.out_features, weight.trellis.device
    teams = DECODE.teams((k // BLOCK) * (n // BLOCK), multiprocessors(device))
    rotated = torch.zeros(8 * k, dtype=torch.float16, device=device)
    partial = torch.empty((teams + n // BLOCK) * BLOCK, device=device)
    library = load_library(device)

    def launch() -> None:
        library.call(
            "exl3_gemm", weight.trellis.data_ptr(), rotated.data_ptr(), partial.data_ptr(), 1, 1, k, n, weight.bits,
            PROBE_CODEBOOK, teams, 1, 0, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    return launch


def _extra_bytes(launch: Callable[[], object]) -> int:
    """Return the memory that a launch needs at its peak beyond what exists and what it returns."""
    release_workspaces()
    launch()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = launch()
    assert isinstance(result, torch.Tensor)
    return torch.cuda.max_memory_allocated() - before - result.nbytes + workspace_bytes()


def _copies(num_bytes: int) -> int:
    return max(1, min(MOST_COPIES, -(-ROTATED_BYTES // num_bytes)))


def _cycle(items: Sequence[_Item], rows: int) -> list[_Item]:
    """Return what one capture launches on: every copy, or a few of them where a launch lasts."""
    launches = PREFILL_LAUNCHES if rows >= PREFILL_ROWS else max(len(items), LEAST_LAUNCHES)
    return [items[i % len(items)] for i in range(launches)]

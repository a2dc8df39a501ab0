"""`kernels bench` and `kernels tune`: thin skins, added to the `kernels` application by `register`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3eval.errors import UsageError
from exl3eval.kernel_bench.geometry import GEOMETRIES, ROWS, Geometry, parse_geometry

if TYPE_CHECKING:
    from exl3eval.kernel_bench.measure import Measurement

CODEBOOKS = ("mcg", "mul1")

GeometryNames = Annotated[
    list[str] | None, typer.Option("--geometry", help="A shipped weight shape, or KxN:BITS; repeat for more.")
]
RowCounts = Annotated[list[int] | None, typer.Option("--rows", help="Rows of the input; repeat for more.")]
CodebookNames = Annotated[list[str] | None, typer.Option("--codebook", help="mcg, mul1 or 3inst; repeat for more.")]


def register(app: typer.Typer) -> None:
    """Add `bench` and `tune` to an application."""
    app.command()(bench)
    app.command()(tune)


def bench(
    out: Annotated[Path, typer.Option(help="Write bench.json and bench.md here.")],
    geometry: GeometryNames = None,
    rows: RowCounts = None,
    codebook: CodebookNames = None,
    peer: Annotated[Path | None, typer.Option(help="Another stack's times on this GPU, JSON.")] = None,
) -> None:
    """Time every route against dense products on synthetic weights."""
    import torch

    from exl3_kernels.cuda import load_library
    from exl3_kernels.routes import ROUTES
    from exl3eval.identity import package_versions
    from exl3eval.kernel_bench.measure import measure
    from exl3eval.kernel_bench.report import Peer, build_record, read_peer, render_markdown, write_bench
    from exl3eval.records import require_absent

    require_absent(out / "bench.json")
    gpu = _require_gpu()
    peer_times = read_peer(peer) if peer else Peer()
    found = []
    routes = tuple(name for name in ROUTES if name != "reference")
    for measurement in measure(_geometries(geometry), codebook or CODEBOOKS, rows or ROWS, routes):
        _talk(measurement)
        found.append(measurement)
    library = load_library(torch.device("cuda"))
    identity = {
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "kernels": {"architecture": library.architecture, "source_sha256": library.source_sha256},
        "peer": peer.name if peer else None,
    }
    record = build_record(found, peer_times, gpu=gpu, identity=identity)
    write_bench(out, record)
    print(render_markdown(record))


def tune(
    out: Annotated[Path, typer.Option(help="Write the dispatch table here, TOML.")],
    geometry: GeometryNames = None,
) -> None:
    """Measure where routes cross on this GPU and write its dispatch table."""
    from exl3eval.kernel_bench import tune as tuning
    from exl3eval.kernel_bench.measure import measure
    from exl3eval.records import write_atomic

    gpu = _require_gpu()
    found = []
    for measurement in measure(_geometries(geometry), CODEBOOKS, tuning.ROWS, tuning.ROUTES):
        _talk(measurement)
        found.append(measurement)
    table = tuning.tune(found, gpu)
    write_atomic(out, table)
    print(table)


def _geometries(names: list[str] | None) -> tuple[Geometry, ...]:
    return tuple(parse_geometry(name) for name in names) if names else GEOMETRIES


def _require_gpu() -> str:
    import torch

    from exl3_kernels.cuda import unavailable

    if not torch.cuda.is_available():
        raise UsageError(
            "no NVIDIA GPU is visible to torch", hint="run this on a machine with one; see `exl3eval doctor`"
        )
    if reason := unavailable(torch.device("cuda", torch.cuda.current_device())):
        raise UsageError(reason, hint="install the CUDA toolkit, or use another GPU")
    return torch.cuda.get_device_name()


def _talk(m: Measurement) -> None:
    print(f"{m.geometry.name} {m.codebook} M={m.rows} {m.contestant}: {m.timing.median_us:.1f} us", file=sys.stderr)

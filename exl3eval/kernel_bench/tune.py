"""From measured times to the dispatch table of one GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from exl3_kernels.dispatch import MeasuredShape, choose_dispatch, render_table
from exl3eval.kernel_bench.geometry import Geometry
from exl3eval.kernel_bench.measure import Measurement

ROUTES = ("decode-gemm", "shared-decode", "wide-decode", "prefill-reconstruct", "prefill-half", "prefill-fused")
ROWS = (1, 8, 16, 32, 64, 128, 144, 192, 256, 384, 512, 1024, 2048, 4096)


def tune(measurements: Iterable[Measurement], gpu: str) -> str:
    """Return the table, as TOML, of the fastest of `ROUTES` per weight shape and row count.

    Codebooks of a shape are averaged: their times differ by a few per cent and their crossovers hardly.

    Raises
    ------
    ValueError
        If a shape was measured with none of the routes.
    """
    times: dict[Geometry, dict[int, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for m in measurements:
        if m.contestant in ROUTES:
            times[m.geometry][m.rows][m.contestant].append(m.timing.median_us)
    shapes = tuple(
        MeasuredShape(
            in_features=geometry.in_features,
            out_features=geometry.out_features,
            bits=geometry.bits,
            dispatch=choose_dispatch(
                {rows: {r: sum(us) / len(us) for r, us in routes.items()} for rows, routes in by_rows.items()}
            ),
        )
        for geometry, by_rows in times.items()
    )
    return render_table(gpu, shapes)

"""The benchmark's record: every number as JSON, and one Markdown table per weight for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.kernel_bench.measure import DENSE, PROBE, Measurement
from exl3eval.kernel_bench.timing import REPETITIONS
from exl3eval.records import read_json, write_atomic, write_receipt

SCHEMA = "exl3eval/kernel-bench/3"
SAMPLING = f"{REPETITIONS} samples, contestants in turn, a rest as long as each sample"
PEAK_BYTES_PER_SECOND = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.04e12}

PeerCell = tuple[int, int, int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody else's times on some day's clock, in microseconds.

    Parameters
    ----------
    best_us : mapping
        (k, n, bits, codebook, rows) to its best route.
    dense_us : mapping
        (k, n, rows) to the dense float16 product of the same run, which says how fast the card ran.
    """

    best_us: Mapping[PeerCell, float] = field(default_factory=dict)
    dense_us: Mapping[tuple[int, int, int], float] = field(default_factory=dict)


def read_peer(path: Path) -> Peer:
    """Read a peer's times.

    Raises
    ------
    UsageError
        If the file is not a peer file.
    """
    try:
        rows = read_json(path)["rows"]
        return Peer(
            best_us={
                (row["k"], row["n"], row["K"], row["cb"], row["m"]): min(
                    row[c] for c in ("gemm_us", "recon_us") if c in row
                )
                for row in rows
            },
            dense_us={(row["k"], row["n"], row["m"]): row["dense_fp16_us"] for row in rows if "dense_fp16_us" in row},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path.name} is not a peer file: {error!r}",
            hint="it needs `rows` with k, n, K, cb, m and gemm_us or recon_us",
        ) from error


def roofline_us(measurement: Measurement, gpu: str) -> float | None:
    """Return the least time in which a GPU can read the packed weight and the rows and write the result.

    None for a GPU whose memory rate is not known. The rates are the vendors' figures.
    """
    geometry, rate = measurement.geometry, PEAK_BYTES_PER_SECOND.get(gpu)
    moved = geometry.packed_bytes + 2 * measurement.rows * (geometry.in_features + geometry.out_features)
    return None if rate is None else moved / rate * 1e6


def build_record(
    measurements: Sequence[Measurement], peer: Peer, *, gpu: str, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the benchmark as plain data.

    `to_peer` relates times, `to_peer_by_dense` what each run's times are to its own dense product.

    Raises
    ------
    ValueError
        If a cell has no dense product.
    """
    cells = []
    for (geometry, codebook, rows), group in _cells(measurements):
        dense = next((m for m in group if m.contestant == DENSE[0]), None)
        if dense is None:
            raise ValueError(f"{geometry.name} with {rows} rows has no dense product")
        k, n = geometry.in_features, geometry.out_features
        peer_us = peer.best_us.get((k, n, geometry.bits, codebook, rows))
        peer_dense_us = peer.dense_us.get((k, n, rows))
        cells.append(
            {
                "geometry": asdict(geometry),
                "codebook": codebook,
                "rows": rows,
                "roofline_us": roofline_us(dense, gpu),
                "peer_us": peer_us,
                "peer_dense_us": peer_dense_us,
                "contestants": {
                    m.contestant: asdict(m.timing)
                    | {
                        "extra_bytes": m.extra_bytes,
                        "to_dense_fp16": m.timing.median_us / dense.timing.median_us,
                        "to_peer": None if peer_us is None else m.timing.median_us / peer_us,
                        "to_peer_by_dense": None
                        if peer_us is None or peer_dense_us is None
                        else m.timing.median_us / dense.timing.median_us * peer_dense_us / peer_us,
                    }
                    for m in group
                },
            }
        )
    return {
        "schema": SCHEMA,
        "workload": "synthetic: random packed words",
        "sampling": SAMPLING,
        "gpu": gpu,
        **identity,
        "cells": cells,
    }


def render_markdown(record: Mapping[str, Any]) -> str:
    """Render a record: per weight and codebook one row per row count, microseconds and the best route's ratios."""
    lines = [
        f"# Kernel benchmark, {record['gpu']}",
        "",
        f"Workload {record['workload']}; no model runs here. Medians in microseconds per launch, of"
        f" {record['sampling']}; weights rotated through more than the L2 cache. `best` is the fastest exact route;"
        " `roofline` is the time to read the packed weight and the rows and write the result at the vendor's memory"
        " rate; `by dense` relates both sides to the dense product of their own run, whatever the card's clock;"
        " `extra` is the best route's memory beyond operands and result.",
    ]
    for (name, codebook), group in groupby(record["cells"], key=lambda c: (c["geometry"]["name"], c["codebook"])):
        cells = list(group)
        shape = cells[0]["geometry"]
        columns = list(dict.fromkeys(c for cell in cells for c in cell["contestants"]))
        lines += [
            "",
            f"## {name}: {shape['in_features']} x {shape['out_features']}, {shape['bits']} bits, {codebook}",
            "",
            "| rows | " + " | ".join(columns) + " | roofline | best | to dense | to peer | by dense | extra MiB |",
            "|" + "---:|" * (len(columns) + 7),
        ]
        for cell in cells:
            contestants = cell["contestants"]
            best = best_route(contestants)
            times = [f"{contestants[c]['median_us']:.1f}" if c in contestants else "" for c in columns]
            extra = contestants[best]["extra_bytes"]
            to_peer, by_dense = (
                "" if (ratio := contestants[best][name]) is None else f"{ratio:.2f}"
                for name in ("to_peer", "to_peer_by_dense")
            )
            lines.append(
                f"| {cell['rows']} | "
                + " | ".join(times)
                + f" | {'' if cell['roofline_us'] is None else format(cell['roofline_us'], '.1f')} | {best}"
                + f" | {contestants[best]['to_dense_fp16']:.2f} | {to_peer} | {by_dense}"
                + f" | {'' if extra is None else format(extra / (1 << 20), '.1f')} |"
            )
    return "\n".join(lines) + "\n"


def best_route(contestants: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the fastest route among those whose arithmetic the gate accepts by default: neither dense nor E4M3."""
    exact = [name for name in contestants if name not in (*DENSE, PROBE) and not name.startswith("fp8")]
    return min(exact, key=lambda name: contestants[name]["median_us"])


def write_bench(out: Path, record: Mapping[str, Any]) -> None:
    """Write `bench.json` and `bench.md`.

    Raises
    ------
    UsageError
        If there is a record, or the disk refuses.
    """
    write_receipt(out / "bench.json", record)
    write_atomic(out / "bench.md", render_markdown(record))


def _cells(measurements: Iterable[Measurement]) -> Iterable[tuple[tuple[Any, str, int], list[Measurement]]]:
    for key, group in groupby(measurements, key=lambda m: (m.geometry, m.codebook, m.rows)):
        yield key, list(group)

"""How deltas move over verdicts: series from the ledger, change points, and a plot that needs no library.

A change point is where two means explain a series better than one by more than `PENALTY` * log(n) of squared noise
units, found by binary segmentation. Noise is the largest of the verdicts' own standard errors and of the jitter between
neighbours, so that a series of tight bounds does not turn rounding into news.

Shapes: n points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exl3eval.gate.ledger import Entry
from exl3eval.stats.clusters import FloatArray

PENALTY = 3.0
MIN_SEGMENT = 2
_BARS = "▁▂▃▄▅▆▇█"
_MAD_TO_SD = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One verdict's figure."""

    id: int
    created: str
    outcome: str
    value: float
    se: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One endpoint of one variant on one suite and device, over time; `change_points` are indices of new levels."""

    variant: str
    endpoint: str
    suite: str
    device: str
    points: tuple[Point, ...]
    change_points: tuple[int, ...]


def collect_series(entries: Sequence[Entry], *, endpoint: str = "mean") -> list[Series]:
    """Group verdicts of one variant, suite, split and device, oldest first."""
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for entry in entries:
        device = (entry.record["device"] or {}).get("name") or ""
        for verdict in entry.record["verdict"]["endpoints"]:
            delta = verdict["delta"]
            if delta["endpoint"] != endpoint:
                continue
            sigma, deff = delta["sigma"] or 0.0, delta["deff"] or 1.0
            point = Point(
                id=entry.id,
                created=entry.created,
                outcome=entry.outcome,
                value=delta["value"],
                se=sigma * math.sqrt(deff / delta["num_contexts"]),
                margin=verdict["margin"]["value"],
            )
            groups.setdefault((delta["variant"], f"{entry.suite} {entry.split}", device), []).append(point)
    return [
        Series(
            variant=variant,
            endpoint=endpoint,
            suite=suite,
            device=device,
            points=tuple(points),
            change_points=find_change_points([p.value for p in points], [p.se for p in points]),
        )
        for (variant, suite, device), points in sorted(groups.items())
    ]


def find_change_points(values: Sequence[float], errors: Sequence[float]) -> tuple[int, ...]:
    """Return the indices at which a new level starts.

    Parameters
    ----------
    values, errors : sequence of float, length n
        Figures and their standard errors.
    """
    series = np.asarray(values, dtype=np.float64)
    steps = np.abs(np.diff(series))
    jitter = _MAD_TO_SD * float(np.median(steps)) / math.sqrt(2.0) if steps.size else 0.0
    noise = max(float(np.median(errors)) if len(errors) else 0.0, jitter)
    if series.size < 2 * MIN_SEGMENT or float(np.ptp(series)) == 0.0:
        return ()
    noise = noise or float(np.ptp(series)) * 1e-6
    return tuple(sorted(_split(series / noise, 0, series.size, PENALTY * math.log(series.size))))


def _split(series: FloatArray, start: int, stop: int, penalty: float) -> list[int]:
    """Split [start, stop) where it pays most, then each half."""
    part = series[start:stop]
    best_gain, best_at = penalty, 0
    for at in range(MIN_SEGMENT, len(part) - MIN_SEGMENT + 1):
        gap = float(part[:at].mean() - part[at:].mean())
        gain = gap * gap * at * (len(part) - at) / len(part)
        if gain > best_gain:
            best_gain, best_at = gain, at
    if not best_at:
        return []
    middle = start + best_at
    return [*_split(series, start, middle, penalty), middle, *_split(series, middle, stop, penalty)]


def sparkline(values: Sequence[float]) -> str:
    """Draw a series in one line of block characters, lowest to highest; at most the last 40 values."""
    shown = list(values)[-40:]
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)


def trend_svg(series: Series) -> str:
    """Draw a series with its margin line, outcomes and change points as a self-contained SVG."""
    width, height, pad = 640.0, 240.0, 40.0
    points = series.points
    values = [point.value for point in points]
    low, high = min([0.0, *values]), max([points[-1].margin, *values])
    span = (high - low) or 1.0

    def x(index: int) -> float:
        return pad + (width - 2 * pad) * (index / max(len(points) - 1, 1))

    def y(value: float) -> float:
        return height - pad - (height - 2 * pad) * (value - low) / span

    margin = points[-1].margin
    marks = "".join(
        f'<circle cx="{x(i):.1f}" cy="{y(p.value):.1f}" r="4" fill="{_fill(p.outcome)}">'
        f"<title>verdict {p.id}, {p.created}: {p.value:+.3e} ({p.outcome})</title></circle>"
        for i, p in enumerate(points)
    )
    changes = "".join(
        f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{pad}" y2="{height - pad}" stroke="#777" stroke-dasharray="3 3"/>'
        for at in series.change_points
    )
    path = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
    title = f"{series.variant}: delta of {series.endpoint} over {len(points)} verdicts"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{_escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{pad}" y="20">{_escape(title)}</text>'
        f'<line x1="{pad}" x2="{width - pad}" y1="{y(margin):.1f}" y2="{y(margin):.1f}" stroke="#c43c35"/>'
        f'<text x="{width - pad}" y="{y(margin) - 4:.1f}" text-anchor="end">margin {margin:.2e}</text>'
        f'<line x1="{pad}" x2="{width - pad}" y1="{y(0.0):.1f}" y2="{y(0.0):.1f}" stroke="#bbb"/>{changes}'
        f'<polyline points="{path}" fill="none" stroke="#335c99"/>{marks}</svg>\n'
    )


def _fill(outcome: str) -> str:
    return {"PASS": "#2c8a3d", "FAIL": "#c43c35"}.get(outcome, "#a86f00")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

"""What a figure shows, as numbers: three kinds of plot, drawn by `figures` and exported with the JSON report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis: what it measures, with its unit."""

    label: str
    log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A reference line with its name, and the value it stands at."""

    label: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    """One estimate: a point and, where it is known, its interval. `series` picks the colour."""

    label: str
    value: float
    low: float | None
    high: float | None
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Estimates one under another; values at or beyond `margin` are shaded as not acceptable."""

    x: Axis
    rows: tuple[ForestRow, ...]
    series: tuple[str, ...]
    margin: float | None = None
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line through points; `quiet` ones are context (a floor), drawn in grey."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    series: int
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Lines over one pair of axes; `steps` for histograms, `markers` where the points are what was measured."""

    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    steps: bool = False
    markers: bool = False
    verticals: tuple[Mark, ...] = ()
    horizontals: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point, with an interval in y where it is known."""

    label: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    series: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points over one pair of axes; `diagonal` draws y = x, `named` writes labels beside points."""

    x: Axis
    y: Axis
    points: tuple[Point, ...]
    series: tuple[str, ...]
    diagonal: bool = False
    named: bool = False
    front: tuple[tuple[float, float], ...] = ()
    horizontals: tuple[Mark, ...] = ()


Plot = Forest | Curves | Scatter

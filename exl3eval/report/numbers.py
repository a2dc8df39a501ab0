"""Numbers as people read them: as many digits as the interval supports, the exact value kept behind the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from exl3eval.report.document import NOT_MEASURED, Cell

_MAX_DECIMALS = 7


def plain(value: float, *, digits: int = 3, signed: bool = False) -> str:
    """Write a number with so many significant digits; far from 1 in scientific form."""
    sign = "+" if signed else ""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -_MAX_DECIMALS + digits - 1 <= exponent <= 5:
        return f"{value:{sign}.{digits - 1}e}"
    return f"{value:{sign}.{max(digits - 1 - exponent, 0)}f}"


def _decimals(estimate: Mapping[str, Any]) -> int | None:
    """Decimals that show two digits of the interval's half-width; None where there is no width to go by."""
    interval = estimate["interval"]
    width = (interval["high"] - interval["low"]) / 2 if interval else 0.0
    if width <= 0:
        return None
    decimals = 1 - math.floor(math.log10(width))
    return max(decimals, 0) if decimals <= _MAX_DECIMALS else None


def _fixed(value: float, decimals: int, *, signed: bool) -> str:
    """Write a number with so many decimals; one that they round to 0 has no sign."""
    rounded = round(value, decimals)
    return f"{rounded:{'+' if signed else ''}.{decimals}f}" if rounded else f"{0:.{decimals}f}"


def estimate_text(estimate: Mapping[str, Any], *, signed: bool = False) -> str:
    """Write the mean of an estimate."""
    value, decimals = estimate.get("mean", estimate.get("value")), _decimals(estimate)
    if decimals is None or value == 0:
        return plain(value, signed=signed)
    return _fixed(value, decimals, signed=signed)


def interval_text(estimate: Mapping[str, Any], *, signed: bool = False) -> str:
    """Write the interval of an estimate, or "unknown"."""
    interval = estimate["interval"]
    if interval is None:
        return "unknown"
    decimals = _decimals(estimate)
    ends = (interval["low"], interval["high"])
    if decimals is None:
        return f"[{', '.join(plain(end, signed=signed) for end in ends)}]"
    return f"[{', '.join(_fixed(end, decimals, signed=signed) for end in ends)}]"


def estimate_cells(estimate: Mapping[str, Any], *, signed: bool = False) -> tuple[Cell, Cell]:
    """Mean and interval, side by side."""
    return value_cell(estimate, signed=signed), interval_cell(estimate, signed=signed)


def value_cell(estimate: Mapping[str, Any], *, signed: bool = False) -> Cell:
    """The mean or value of an estimate."""
    return Cell(text=estimate_text(estimate, signed=signed), value=estimate.get("mean", estimate.get("value")))


def interval_cell(estimate: Mapping[str, Any], *, signed: bool = False) -> Cell:
    """The interval of an estimate; the reason where there is none."""
    interval = estimate["interval"]
    return Cell(
        text=interval_text(estimate, signed=signed),
        value=None if interval is None else (interval["low"], interval["high"]),
        hint=estimate["why"],
    )


def number_cell(value: float | None, *, digits: int = 3, signed: bool = False, why: str = "") -> Cell:
    """A number, or "unknown" with the reason."""
    if value is None:
        return Cell(text="unknown", hint=why)
    return Cell(text=plain(value, digits=digits, signed=signed), value=value)


def count_cell(value: int) -> Cell:
    """A whole number with thousands set apart."""
    return Cell(text=f"{value:,}", value=value)


def share_cell(value: float, *, decimals: int = 2) -> Cell:
    """A share of 1 as a percentage."""
    return Cell(text=percent(value, decimals=decimals), value=value)


def percent(value: float, *, decimals: int = 2) -> str:
    """Write a share of 1 as a percentage; one too small for the decimals keeps three digits."""
    if value and abs(value) < 0.5 * 10.0 ** (-2 - decimals):
        return f"{100 * value:.2e} %"
    return f"{100 * value:.{decimals}f} %"


def bytes_text(count: int) -> str:
    """Write a size in binary units."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def bytes_cell(count: int | None) -> Cell:
    """A size, or "not measured"."""
    return missing_cell() if count is None else Cell(text=bytes_text(count), value=count)


def text_cell(text: str, *, hint: str = "") -> Cell:
    """Plain words."""
    return Cell(text=text, value=text, hint=hint)


def missing_cell() -> Cell:
    """What no receipt holds."""
    return Cell(text=NOT_MEASURED)

"""Colours of figures and pages: light, dark, and the stand-ins that become CSS variables.

Series are told apart by people with any colour vision and stand out from both papers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one look."""

    ink: str
    muted: str
    grid: str
    shade: str
    paper: str
    series: tuple[str, ...]


LIGHT = Theme(
    ink="#1b1f24",
    muted="#5b6470",
    grid="#e3e6ea",
    shade="#f3d9d3",
    paper="#ffffff",
    series=("#0060a8", "#c04d00", "#00805c", "#a3478a", "#7a6200", "#4b4fc4"),
)
DARK = Theme(
    ink="#e8eaed",
    muted="#a4adb8",
    grid="#333b45",
    shade="#4a2a24",
    paper="#14181d",
    series=("#6db6f2", "#ff9d5c", "#4fd1a5", "#e79ad0", "#d9c355", "#aab0ff"),
)
# Stand-ins that no drawing uses by itself; an inline SVG turns each into the CSS variable of the same place.
NAMES = ("ink", "muted", "grid", "shade", "paper", *(f"series-{index}" for index in range(len(LIGHT.series))))
STAND_INS = tuple(f"#0b0c{index + 16:02x}" for index in range(len(NAMES)))
CSS = Theme(
    ink=STAND_INS[0],
    muted=STAND_INS[1],
    grid=STAND_INS[2],
    shade=STAND_INS[3],
    paper=STAND_INS[4],
    series=STAND_INS[5:],
)


def css_variables(theme: Theme) -> str:
    """Declare a theme's colours as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in zip(NAMES, theme_colors(theme), strict=True))


def theme_colors(theme: Theme) -> tuple[str, ...]:
    """List a theme's colours in the order of `NAMES`."""
    return (theme.ink, theme.muted, theme.grid, theme.shade, theme.paper, *theme.series)

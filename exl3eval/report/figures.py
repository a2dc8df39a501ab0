"""Drawing plots with matplotlib: light and dark files, and one SVG for the HTML page whose colours are CSS variables.

Colours are told apart by people with any colour vision, and every series also has its own dash and marker.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from html import escape
from typing import Any

from exl3eval.report.document import Figure
from exl3eval.report.numbers import plain
from exl3eval.report.plots import Axis, Curves, Forest, Mark, Plot, Scatter
from exl3eval.report.theme import CSS, NAMES, STAND_INS, Theme, theme_colors

DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_HOVER = 1_500
_SUBROW = 0.42
# Inches. Fixed margins: a layout engine would draw every figure twice more.
WIDTH, BELOW, RIGHT = 6.4, 0.5, 0.12
LEGEND_COLUMNS = 3
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def render_files(figure: Figure, theme: Theme, formats: tuple[str, ...], *, dpi: int = 200) -> dict[str, bytes]:
    """Draw a figure in one theme; the bytes depend on the figure and on matplotlib's version alone."""
    found = {"svg": _svg_file(figure, theme)} if "svg" in formats else {}
    if drawn_formats := [name for name in formats if name != "svg"]:
        with _drawn(figure, theme, text_as="path", dpi=dpi) as drawn:
            found |= {name: _print(drawn, name) for name in drawn_formats}
    return found


def _svg_file(figure: Figure, theme: Theme) -> bytes:
    """Colour the one drawing that all themes share."""
    svg = _uncoloured_svg(figure)
    for stand_in, color in zip(STAND_INS, theme_colors(theme), strict=True):
        svg = svg.replace(stand_in, color)
    return svg.encode()


@lru_cache(maxsize=32)
def _uncoloured_svg(figure: Figure) -> str:
    with _drawn(figure, CSS, text_as="path") as drawn:
        return re.sub(r"<metadata>.*?</metadata>", "", _print(drawn, "svg").decode(), flags=re.S)


def _print(drawn: Any, kind: str) -> bytes:
    """Draw once; `savefig` would draw twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    if kind == "png":
        FigureCanvasAgg(drawn).print_png(buffer)
    elif kind == "svg":
        FigureCanvasSVG(drawn).print_svg(buffer, metadata={"Date": None})
    else:
        FigureCanvasPdf(drawn).print_pdf(buffer, metadata={"CreationDate": None})
    return buffer.getvalue()


def svg_inline(figure: Figure) -> str:
    """Draw a figure as SVG to stand inside a page: colours from CSS variables, text as text, hover values as data."""
    with _drawn(figure, CSS, text_as="none") as drawn:
        drawn.patch.set_visible(False)
        svg = _print(drawn, "svg").decode()
        tips = {artist.get_gid(): artist.tips for artist in drawn.findobj(lambda artist: hasattr(artist, "tips"))}
    svg = svg[svg.index("<svg") :]
    for name, stand_in in zip(NAMES, STAND_INS, strict=True):
        svg = svg.replace(stand_in, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--sans)", svg)
    for name, texts in tips.items():
        svg = _mark_tips(svg, name, texts)
    svg = re.sub(r' id="', f' id="{figure.id}-', svg)
    svg = re.sub(r"url\(#", f"url(#{figure.id}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{figure.id}-', svg)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*pt" height="[^"]*pt"|(<svg [^>]*?)height="[^"]*pt"', r"\1\2", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*pt"', r"\1", svg, count=1)
    label = escape(figure.alt, quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).strip()


def _mark_tips(svg: str, name: str, texts: list[str]) -> str:
    """Put hover texts on the markers of one line: its `use` elements, in the order of its points."""
    start = svg.index(f'<g id="{name}">')
    end = svg.find('<g id="', start + 1)
    head, *markers = svg[start:end].split("<use ")
    if len(markers) != len(texts):
        raise ValueError(f"{name} has {len(markers)} markers for {len(texts)} texts")
    marked = (f'<use data-tip="{escape(text, quote=True)}" {rest}' for text, rest in zip(texts, markers, strict=True))
    return svg[:start] + head + "".join(marked) + svg[end:]


@contextmanager
def _drawn(figure: Figure, theme: Theme, *, text_as: str, dpi: int = 72) -> Iterator[Any]:
    """Open a finished matplotlib figure, without touching any global state for others."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    settings: dict[Any, Any] = {
        "svg.fonttype": text_as,
        "svg.hashsalt": figure.id,
        "pdf.fonttype": 42,
        "font.size": 9.0,
        "font.family": "DejaVu Sans",
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "text.color": theme.ink,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "legend.frameon": False,
        "figure.facecolor": theme.paper,
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        plot = figure.plot
        legend = 0.2 + 0.2 * math.ceil(_legend_entries(plot) / LEGEND_COLUMNS)
        body = 0.6 - 0.27 * _heights(plot)[-1] if isinstance(plot, Forest) else 2.7
        left = 0.35 + 0.075 * max(len(row.label) for row in plot.rows) if isinstance(plot, Forest) else 0.72
        width, height = WIDTH, body + legend + BELOW
        canvas = Canvas(figsize=(width, height), dpi=dpi)
        box = (left / width, BELOW / height, (width - left - RIGHT) / width, body / height)
        axes = canvas.add_axes(box)
        if isinstance(plot, Forest):
            _draw_forest(axes, plot, theme)
        elif isinstance(plot, Curves):
            _draw_curves(axes, plot, theme)
        else:
            _draw_scatter(axes, plot, theme)
        yield canvas


def _legend_entries(plot: Plot) -> int:
    if isinstance(plot, Forest):
        return len(plot.series) + len(plot.marks) + (plot.margin is not None)
    if isinstance(plot, Curves):
        return len(plot.curves) + len(plot.horizontals)
    return (0 if plot.named else len(plot.series)) + plot.diagonal + len(plot.horizontals)


def _give_tips(artist: Any, name: str, texts: list[str]) -> None:
    """Attach hover texts to the markers of a line, in order."""
    artist.set_gid(name)
    artist.tips = texts


def _color(theme: Theme, index: int) -> str:
    return theme.series[index % len(theme.series)]


def _scale(axes: Any, x: Axis, y: Axis) -> None:
    """Name the axes; log ones get powers of ten in plain characters, or plain numbers over less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name, spec in (("x", x), ("y", y)):
        getattr(axes, f"set_{name}label")(spec.label)
        if not spec.log:
            continue
        getattr(axes, f"set_{name}scale")("log")
        low, high = getattr(axes, f"get_{name}lim")()
        axis = getattr(axes, f"{name}axis")
        if high / low < 30:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        axis.set_minor_formatter(NullFormatter())


def _power_of_ten(value: float) -> str:
    exponent = round(math.log10(value))
    return f"{value:g}" if 0 <= exponent <= 3 else "10" + str(exponent).translate(_SUPERSCRIPT)


def _heights(plot: Forest) -> list[float]:
    """Place rows from the top; a row without a label stands close under the one that it belongs to."""
    heights, height = [], 0.0
    for index, row in enumerate(plot.rows):
        height -= 0.0 if index == 0 else 1.0 if row.label else _SUBROW
        heights.append(height)
    return heights


def _draw_forest(axes: Any, plot: Forest, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter

    heights = _heights(plot)
    for index, (row, height) in enumerate(zip(plot.rows, heights, strict=True)):
        color, marker = _color(theme, row.series), MARKERS[row.series % len(MARKERS)]
        interval = "interval unknown"
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [height, height], color=color, linewidth=1.8, solid_capstyle="butt")
            interval = f"[{plain(row.low)}, {plain(row.high)}]"
        (point,) = axes.plot([row.value], [height], marker, color=color, markersize=5.5)
        _give_tips(point, f"tips{index}", [f"{row.label} {plain(row.value)} {interval}".strip()])
    shown = [(height, row.label) for height, row in zip(heights, plot.rows, strict=True) if row.label]
    axes.set_yticks([height for height, _ in shown], [label for _, label in shown], color=theme.ink)
    axes.set_ylim(heights[-1] - 0.7, 0.7)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    for mark in plot.marks:
        axes.axvline(mark.value, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 2)))
    if plot.margin is not None:
        low, high = axes.get_xlim()
        high = max(high, plot.margin + 0.15 * (plot.margin - low))
        axes.axvspan(plot.margin, high, color=theme.shade, linewidth=0, zorder=0)
        axes.axvline(plot.margin, color=theme.ink, linewidth=1.0)
        axes.set_xlim(low, high)
    exponent = math.floor(math.log10(max(map(abs, axes.get_xlim()))))
    scale = "" if exponent >= -2 else f" × 10{str(exponent).translate(_SUPERSCRIPT)}"
    divisor = 10.0**exponent if scale else 1.0
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / divisor:g}"))
    axes.set_xlabel(plot.x.label + scale)
    handles = [
        _handle(label, color=_color(theme, index), marker=MARKERS[index % len(MARKERS)], linestyle="-")
        for index, label in enumerate(plot.series)
    ] + [_handle(mark.label, color=theme.muted, linestyle=(0, (4, 2))) for mark in plot.marks]
    if plot.margin is not None:
        handles.append(_handle(f"margin {plain(plot.margin)}", color=theme.ink, linestyle="-"))
    _legend(axes, handles)


def _draw_curves(axes: Any, plot: Curves, theme: Theme) -> None:
    handles = []
    for index, curve in enumerate(plot.curves):
        color = theme.muted if curve.quiet else _color(theme, curve.series)
        dash = (0, (2, 2)) if curve.quiet else DASHES[curve.series % len(DASHES)]
        marker = MARKERS[curve.series % len(MARKERS)] if plot.markers else None
        (line,) = axes.plot(
            curve.x,
            curve.y,
            color=color,
            linestyle=dash,
            linewidth=1.6,
            marker=marker,
            markersize=4,
            drawstyle="steps-post" if plot.steps else "default",
        )
        if plot.markers:
            texts = [f"{curve.label}: {plain(y)} at {plain(x)}" for x, y in zip(curve.x, curve.y, strict=True)]
            _give_tips(line, f"tips{index}", texts)
        handles.append(_handle(curve.label, color=color, linestyle=dash, marker=marker))
    _scale(axes, plot.x, plot.y)
    for mark in plot.verticals:
        axes.axvline(mark.value, color=theme.ink, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(
            mark.label,
            (mark.value, 1),
            (2, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=theme.muted,
        )
    _marks(axes, plot.horizontals, theme, handles)
    _legend(axes, handles)


def _draw_scatter(axes: Any, plot: Scatter, theme: Theme) -> None:
    handles = []
    for index in dict.fromkeys(point.series for point in plot.points):
        points = [point for point in plot.points if point.series == index]
        color, marker = _color(theme, index), MARKERS[index % len(MARKERS)]
        crowded = len(points) > MAX_HOVER
        (line,) = axes.plot(
            [point.x for point in points],
            [point.y for point in points],
            marker,
            color=color,
            markersize=6 if plot.named else 2 if crowded else 3.8,
            alpha=1.0 if plot.named else 0.5 if crowded else 0.8,
            markeredgewidth=0,
            rasterized=crowded,
        )
        if not crowded:
            texts = [f"{point.label}: {plain(point.x)}, {plain(point.y)}" for point in points]
            _give_tips(line, f"tips{index}", texts)
        for point in points if plot.named else ():
            if point.low is not None and point.high is not None:
                axes.plot([point.x, point.x], [point.low, point.high], color=color, linewidth=1.6)
            axes.annotate(point.label, (point.x, point.y), (7, 3), textcoords="offset points", fontsize=8.5)
        if not plot.named and plot.series[index]:
            handles.append(_handle(plot.series[index], color=color, marker=marker, linestyle="none"))
    if plot.front:
        axes.plot(*zip(*plot.front, strict=True), color=theme.muted, linewidth=1.0, zorder=1)
    _scale(axes, plot.x, plot.y)
    if plot.named:
        axes.margins(x=0.25, y=0.15)
        axes.set_ylim(bottom=0.0)
    if plot.diagonal:
        low = min(axes.get_xlim()[0], axes.get_ylim()[0])
        high = max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([low, high], [low, high], color=theme.muted, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        handles.append(_handle("no difference", color=theme.muted, linestyle=(0, (4, 2))))
    _marks(axes, plot.horizontals, theme, handles)
    _legend(axes, handles)


def _marks(axes: Any, marks: tuple[Mark, ...], theme: Theme, handles: list[Any]) -> None:
    for mark in marks:
        axes.axhline(mark.value, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 2)))
        handles.append(_handle(mark.label, color=theme.muted, linestyle=(0, (4, 2))))


def _handle(label: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, markersize=5, linewidth=1.6, **style)


def _legend(axes: Any, handles: list[Any]) -> None:
    if handles:
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=LEGEND_COLUMNS,
            fontsize=8.5,
            borderaxespad=0.2,
            handlelength=2.6,
        )

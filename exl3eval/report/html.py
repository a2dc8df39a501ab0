"""One self-contained HTML page: no network, no file beside it; readable without scripts, better with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from exl3eval.report.candidates import Candidates
from exl3eval.report.document import Block, Cell, Document, Figure, TokenViewer, split_code
from exl3eval.report.figures import svg_inline
from exl3eval.report.theme import DARK, LIGHT, css_variables
from exl3eval.report.worst import KINDS, token_text


def render_html(document: Document) -> str:
    """Render a report as one page; the same document gives the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., str]] = {
        "marked": _marked,
        "plain": _plain,
        "kind": _kind,
        "exact": _exact,
        "sort_key": _sort_key,
        "svg": _svg,
    }
    environment.filters |= filters
    return environment.get_template("report.html.jinja").render(
        document=document,
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        style=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
        viewer_json=_viewer_json,
    )


def _asset(name: str) -> str:
    return (resources.files("exl3eval.report") / "templates" / name).read_text(encoding="utf-8")


def _marked(text: str) -> Markup:
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if is_code else escape(piece) for is_code, piece in split_code(text)
    )


def _kind(block: Block) -> str:
    return type(block).__name__.lower()


def _svg(figure: Figure) -> Markup:
    return Markup(svg_inline(figure))


def _plain(text: str) -> str:
    return text.replace("`", "")


def _exact(cell: Cell) -> str:
    """Hover text: the exact value behind the rounded one, or the reason that there is none."""
    if isinstance(cell.value, tuple):
        exact = f"[{cell.value[0]!r}, {cell.value[1]!r}]"
    else:
        exact = repr(cell.value) if isinstance(cell.value, float) else ""
    return "; ".join(part for part in (exact, cell.hint) if part)


def _sort_key(cell: Cell) -> str:
    value = cell.value[0] if isinstance(cell.value, tuple) else cell.value
    return "" if value is None else repr(value) if isinstance(value, (int, float)) else str(value)


def _viewer_json(viewer: TokenViewer) -> Markup:
    """Lay out what the token viewer needs; `<` is escaped so that no token can end the script element."""
    ids: dict[int, str] = {}

    def shown(tokens: tuple[int, ...]) -> list[int]:
        ids.update((token, token_text(viewer.texts, token)) for token in tokens)
        return list(tokens)

    def listed(likely: tuple[Candidates | None, ...]) -> list[list[Any] | None]:
        return [
            None if found is None else [shown(found.ids), [float(f"{math.exp(x):.4g}") for x in found.log_probs]]
            for found in likely
        ]

    contexts: list[dict[str, Any]] = [
        {
            "name": context.context,
            "stratum": context.stratum,
            "first": context.first,
            "target": shown(context.target),
            "ref": shown(context.top1_ref),
            "likely": listed(context.likely_ref),
            "confidence": [float(f"{value:.4g}") for value in context.confidence_ref],
            "arms": [
                {
                    "name": row.arm,
                    "kl": [float(f"{value:.4g}") for value in row.kl],
                    "nll": [float(f"{value:.4g}") for value in row.delta_nll],
                    "first": shown(row.top1_arm),
                    "kind": list(row.kind),
                    "likely": listed(row.likely),
                }
                for row in context.arms
            ],
        }
        for context in viewer.contexts
    ]
    payload = {"contexts": contexts, "texts": {str(token): text for token, text in ids.items()}, "kinds": KINDS}
    text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))

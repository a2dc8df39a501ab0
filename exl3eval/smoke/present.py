"""The smoke test on a terminal."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from exl3eval.present import rows_table

_STYLES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def receipt_report(receipt: dict[str, Any]) -> RenderableType:
    """Render a receipt: needles by depth, agreement by class, and the verdict with its reasons."""
    identity, results = receipt["identity"], receipt["results"]
    arms, verdict = results["arms"], results["verdict"]
    depths = [f"{depth:g}" for depth in sorted(identity["needle"]["depths"])]
    contexts, steps = identity["tokens"]["num_contexts"], identity["steps"]
    head = (
        f"{contexts} contexts of {identity['tokens']['length']} ids, {steps} ids decoded after each, "
        f"on {identity['device']['name']}; a companion of the divergence, not a measure of it"
    )
    needles = [
        (
            name,
            f"{sum(r['hits'])}/{len(r['hits'])}",
            f"{r['control_hits']}/{r['controls']}",
            *(f"{r['by_depth'][depth]}/{contexts}" for depth in depths),
        )
        for name, r in ((name, arm["retrieval"]) for name, arm in arms.items())
    ]
    agreement = [
        (
            name,
            f"{a['counts']['agree'] / a['positions']:.2%}",
            *(str(a["counts"][name_]) for name_ in ("tie", "near tie", "flip")),
            f"{median(a['prefixes']):g} of {steps}",
            f"{a['whole']}/{a['contexts']}",
        )
        for name, a in ((name, arm["agreement"]) for name, arm in arms.items())
    ]
    return Group(
        Text(head),
        rows_table(("secrets", "reproduced", "unplanted", *(f"depth {depth}" for depth in depths)), needles),
        rows_table(("greedy", "agreement", "ties", "near ties", "flips", "median prefix", "whole"), agreement),
        Text(f"{receipt['judged']}: {verdict['outcome']}", style=_STYLES[verdict["outcome"]]),
        *(Text(f"- {reason}") for reason in verdict["reasons"]),
    )

"""Own head and shared head, side by side: what the body loses, and what the quantized head adds."""

from __future__ import annotations

from exl3eval.report.document import Column, Section, Table
from exl3eval.report.numbers import estimate_cells, number_cell, text_cell
from exl3eval.report.study import Run, Study
from exl3eval.request import shared_head_name


def head_lanes(study: Study) -> Section | None:
    """Show each arm through its own head and through the reference's; None where no run scored both."""
    rows = []
    for run in study.runs:
        for arm, shared in _pairs(run):
            own_kl, shared_kl = (run.results["arms"][name]["kl"] for name in (arm, shared))
            rows.append(
                (
                    text_cell(study.title(run)),
                    text_cell(f"`{arm}`"),
                    *estimate_cells(own_kl),
                    *estimate_cells(shared_kl),
                    number_cell(own_kl["mean"] - shared_kl["mean"], signed=True),
                )
            )
    if not rows:
        return None
    interval = study.runs[0].interval_name
    table = Table(
        id="heads",
        caption="KL through the arm's own head and through the reference's head, nats per position. The difference is "
        "what the head adds to this body's divergence; it is no divergence itself.",
        columns=(
            Column(name="run", numeric=False),
            Column(name="arm", numeric=False),
            Column(name="own head"),
            Column(name=interval),
            Column(name="shared head"),
            Column(name=interval),
            Column(name="own − shared"),
        ),
        rows=tuple(rows),
    )
    return Section(id="heads", title="Head lanes", blocks=(table,))


def _pairs(run: Run) -> list[tuple[str, str]]:
    candidates = (run.baseline, run.variant)
    return [(arm, shared) for arm in candidates if (shared := shared_head_name(arm)) in run.results["arms"]]

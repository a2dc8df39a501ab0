"""What the variant adds to its baseline, what the design can see, and the floors beside it."""

from __future__ import annotations

from collections.abc import Mapping

from exl3eval.floors import FLOORS
from exl3eval.report import series
from exl3eval.report.document import NOT_MEASURED, Block, Column, Figure, Notice, Prose, Section, Table
from exl3eval.report.numbers import (
    count_cell,
    estimate_cells,
    estimate_text,
    interval_text,
    number_cell,
    percent,
    share_cell,
    text_cell,
    value_cell,
)
from exl3eval.report.study import Run, Study
from exl3eval.stats.paired import POWER


def paired(study: Study) -> Section:
    """Show each variant against its baseline, context by context."""
    blocks: list[Block] = []
    for number, lane in enumerate(study.lanes, start=1):
        suffix = "" if len(study.lanes) == 1 else f"-{number}"
        runs = study.in_lane(lane)
        blocks += [
            _effect_table(study, runs, lane, f"paired{suffix}"),
            _design_table(study, runs, lane, f"design{suffix}"),
            *_gate_blocks(study, runs, lane, f"gate{suffix}"),
            Figure(
                id=f"forest{suffix}",
                caption=f"Paired differences with their intervals, {lane} lane"
                + (
                    "; the shaded side lies beyond the declared margin."
                    if series.paired_forest(study, lane).margin is not None
                    else "; no margin was declared."
                ),
                alt="Forest plot: "
                + "; ".join(
                    f"{study.label(run)} {estimate_text(run.paired['delta'], signed=True)} "
                    f"{interval_text(run.paired['delta'], signed=True)}"
                    for run in runs
                )
                + " nats.",
                plot=series.paired_forest(study, lane),
            ),
            Figure(
                id=f"contexts{suffix}",
                caption="Every context once: mean KL of the baseline against the variant; above the line the variant "
                "is worse.",
                alt="Scatter of per-context mean KL. "
                + " ".join(f"{study.label(run)}: {_signs_words(run.paired['by_context'])}." for run in runs),
                plot=series.context_scatter(study, lane),
            ),
        ]
    return Section(id="paired", title="Paired differences", blocks=tuple(blocks))


def _signs_words(signs: Mapping[str, int]) -> str:
    return f"better in {signs['wins']}, equal in {signs['ties']}, worse in {signs['losses']} contexts"


def _effect_table(study: Study, runs: tuple[Run, ...], lane: str, table_id: str) -> Table:
    rows = []
    for run in runs:
        delta, margin, floor = run.paired["delta"], series.margin_of(run), _floor_mean(run)
        rows.append(
            (
                text_cell(f"`{study.label(run)}` − `{run.baseline}`"),
                text_cell("0, every bit") if run.results["comparison"]["identical"] else value_cell(delta, signed=True),
                estimate_cells(delta, signed=True)[1],
                number_cell(margin) if margin is not None else text_cell("none"),
                text_cell(run.verdict["verdict"]["outcome"] if run.verdict else "not judged"),
                number_cell(abs(delta["mean"]) / floor if floor else None, why="the floor is 0"),
                text_cell("{wins}/{ties}/{losses}".format(**run.paired["by_context"])),
                number_cell(run.paired["sign_flip_p"]),
            )
        )
    return Table(
        id=table_id,
        caption=f"Variant minus baseline in nats per position, paired by context, {lane} lane; positive is worse. "
        "Wins are contexts in which the variant is closer to the reference.",
        columns=(
            Column(name="difference", numeric=False),
            Column(name="Δ mean KL"),
            Column(name=study.runs[0].interval_name),
            Column(name="margin"),
            Column(name="verdict", numeric=False),
            Column(name="|Δ|/floor", help="against the reference's own rounding floor"),
            Column(name="wins/ties/losses"),
            Column(name="p", help="cluster sign-flip permutation, two-sided"),
        ),
        rows=tuple(rows),
    )


def _design_table(study: Study, runs: tuple[Run, ...], lane: str, table_id: str) -> Table:
    rows = []
    for run in runs:
        paired, delta = run.paired, run.paired["delta"]
        ratio = paired["log_ratio"]
        rows.append(
            (
                text_cell(study.label(run)),
                count_cell(delta["num_contexts"]),
                count_cell(delta["num_clusters"]),
                number_cell(delta["deff"], why=delta["why"]),
                number_cell(paired["mde"], why="the spread is unknown or 0"),
                *(
                    estimate_cells(ratio, signed=True)
                    if ratio
                    else (number_cell(None, why="a context has a mean KL of 0"),) * 2
                ),
                number_cell(paired["median"], signed=True),
            )
        )
    return Table(
        id=table_id,
        caption=f"What the design can see, {lane} lane: n contexts of G documents, design effect, and smallest "
        "difference that it would detect with that probability.",
        columns=(
            Column(name="variant", numeric=False),
            Column(name="n"),
            Column(name="G"),
            Column(name="DEFF"),
            Column(name=f"MDE {percent(POWER, decimals=0)}"),
            Column(name="log ratio", help="mean of log(variant / baseline) over contexts"),
            Column(name=study.runs[0].interval_name),
            Column(name="median Δ"),
        ),
        rows=tuple(rows),
    )


def _gate_blocks(study: Study, runs: tuple[Run, ...], lane: str, table_id: str) -> list[Block]:
    if all(run.verdict is None for run in runs):
        return [Prose(text=f"Power against a margin: {NOT_MEASURED}; no gate judged these runs ({lane} lane).")]
    rows, refusals = [], []
    for run in runs:
        verdict = run.verdict["verdict"] if run.verdict else {"endpoints": [], "refusals": []}
        for endpoint in verdict["endpoints"]:
            delta, power = endpoint["delta"], endpoint["power"]
            if delta["variant"] != run.variant:
                continue
            rows.append(
                (
                    text_cell(f"`{study.label(run)}`"),
                    text_cell(delta["endpoint"]),
                    number_cell(delta["value"], signed=True),
                    number_cell(delta["upper"], signed=True, why=delta["why"]),
                    number_cell(endpoint["margin"]["value"]),
                    share_cell(power["power"], decimals=1) if power else number_cell(None, why=delta["why"]),
                    count_cell(power["contexts_needed"]) if power else number_cell(None, why=delta["why"]),
                    text_cell(endpoint["outcome"]),
                )
            )
        refusals += [Notice(text=f"Gate on `{study.label(run)}`: {why}") for why in verdict["refusals"]]
    table = Table(
        id=table_id,
        caption=f"The gate, {lane} lane: each endpoint passes when its upper bound lies below the margin declared "
        "before the run.",
        columns=(
            Column(name="variant", numeric=False),
            Column(name="endpoint", numeric=False),
            Column(name="Δ"),
            Column(name="upper bound"),
            Column(name="margin"),
            Column(name="power", help="chance that no true difference passes"),
            Column(name="n needed"),
            Column(name="verdict", numeric=False),
        ),
        rows=tuple(rows),
    )
    return [table, *refusals]


def _floor_mean(run: Run) -> float:
    return run.results["arms"][run.floor]["kl"]["mean"]


def floors(study: Study) -> Section:
    """Show what differs although nothing was changed, beside the effects. Never subtracted: KL is not additive."""
    rows = []
    for run in study.runs:
        effect = run.paired["delta"]["mean"]
        kl = run.results["arms"][run.floor]["kl"]
        rows.append(
            (
                text_cell(study.title(run)),
                text_cell(f"`{run.floor}`: the reference at its other precision"),
                *estimate_cells(kl),
                number_cell(abs(effect) / kl["mean"] if kl["mean"] else None, why="the floor is 0"),
            )
        )
        for name, words in ((run.control, "the reference in the lane"), (run.graph_control, "the same, replayed")):
            if name is not None:
                control = run.results["arms"][name]["kl"]
                rows.append(
                    (
                        text_cell(study.title(run)),
                        text_cell(f"`{name}`: {words}"),
                        *estimate_cells(control),
                        number_cell(
                            abs(effect) / control["mean"] if control["mean"] else None, why="the lane moves nothing"
                        ),
                    )
                )
        for name, change in run.results["floors"]["repeat_difference"].items():
            if name in (run.baseline, run.variant):
                rows.append(
                    (
                        text_cell(study.title(run)),
                        text_cell(f"`{name}` run again: largest change of a hidden state"),
                        text_cell("0, every bit") if change == 0.0 else number_cell(change),
                        text_cell(""),
                        text_cell(""),
                    )
                )
        for key, words in FLOORS.items():
            rows += [
                (
                    text_cell(study.title(run)),
                    text_cell(f"{words}: `{name}`"),
                    text_cell("0, every bit") if value == 0.0 else number_cell(value),
                    text_cell(""),
                    text_cell("") if value == 0.0 else number_cell(abs(effect) / value),
                )
                for name, value in run.results["floors"].get(key, {}).items()
            ]
    missing = [words for key, words in FLOORS.items() if not any(key in run.results["floors"] for run in study.runs)]
    blocks: list[Block] = [
        Table(
            id="floors",
            caption="Floors, measured and never subtracted (KL is not additive). KL in nats per position.",
            columns=(
                Column(name="run", numeric=False),
                Column(name="floor", numeric=False),
                Column(name="value"),
                Column(name=study.runs[0].interval_name),
                Column(name="|Δ|/floor"),
            ),
            rows=tuple(rows),
        )
    ]
    if missing:
        blocks.append(Prose(text=f"Floors {NOT_MEASURED}: {', '.join(missing)}."))
    return Section(id="floors", title="Floors", blocks=tuple(blocks))

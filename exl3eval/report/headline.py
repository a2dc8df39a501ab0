"""The result first: sentences whose every number is computed, and the headline tables of all arms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl3eval.report import series
from exl3eval.report.document import NOT_MEASURED, Block, Cell, Column, Figure, Notice, Prose, Section, Table
from exl3eval.report.numbers import (
    bytes_cell,
    bytes_text,
    count_cell,
    estimate_cells,
    estimate_text,
    interval_text,
    missing_cell,
    number_cell,
    percent,
    plain,
    share_cell,
    text_cell,
    value_cell,
)
from exl3eval.report.study import CONTROL, FLOOR, GRAPH_CONTROL, Arm, Run, Study


def summary(study: Study) -> Section:
    """Say what was found, in sentences whose every number is computed."""
    blocks: list[Block] = [Prose(text=_sentence(study, run)) for run in study.runs]
    blocks += [Notice(text=f"Warning: {warning}.") for run in study.runs for warning in run.receipt["warnings"]]
    return Section(id="summary", title="Summary", blocks=tuple(dict.fromkeys(blocks)))


def _sentence(study: Study, run: Run) -> str:
    arms, delta = run.results["arms"], run.paired["delta"]
    before, after = arms[run.baseline], arms[run.variant]
    place = f" in the {run.lane} lane" if len(study.lanes) > 1 else ""
    parts = [
        f"`{study.label(run)}`{place} reads {estimate_text(after['kl'])} nats per position from the "
        f"{run.identity['reference_precision']} reference ({_interval_words(after['kl'])}) and keeps its most likely "
        f"token at {percent(after['top1_agreement'])} of positions."
    ]
    if run.results["comparison"]["identical"]:
        parts.append(f"It agrees with `{run.baseline}` in every bit of every position.")
    else:
        floor = arms[run.floor]["kl"]["mean"]
        sizes = []
        if before["kl"]["mean"]:
            sizes.append(f"{percent(delta['mean'] / before['kl']['mean'])} of what `{run.baseline}` loses")
        if floor:
            sizes.append(f"{plain(abs(delta['mean']) / floor)} of the reference's own rounding floor")
        parts.append(
            f"Paired over {delta['num_contexts']} contexts from {delta['num_clusters']} documents, it differs from "
            f"`{run.baseline}` by {estimate_text(delta, signed=True)} nats ({_interval_words(delta, signed=True)})"
            + (f": {' and '.join(sizes)}." if sizes else ".")
        )
    parts.append(_verdict_words(run))
    stored = run.results["embedding_bytes"]
    old, new = stored[run.baseline]["run"], stored[run.variant]["run"]
    if old != new:
        parts.append(
            f"Its input embedding takes {bytes_text(new)} where `{run.baseline}`'s takes {bytes_text(old)} "
            f"({percent(new / old, decimals=1)})."
        )
    return " ".join(parts)


def _interval_words(estimate: Mapping[str, Any], *, signed: bool = False) -> str:
    if estimate["interval"] is None:
        return f"interval unknown: {estimate['why']}"
    return f"{percent(estimate['confidence'], decimals=0)} interval {interval_text(estimate, signed=signed)}"


def _verdict_words(run: Run) -> str:
    if run.verdict is None:
        return "No gate judged it."
    verdict, policy = run.verdict["verdict"], run.verdict["policy"]
    margin = series.margin_of(run)
    limit = f", margin {plain(margin)} nats on the mean" if margin is not None else ""
    nature = "exploratory verdict" if verdict["exploratory"] else "verdict"
    return f"The gate's {nature} is {verdict['outcome']} (policy `{policy['name']}`{limit})."


def headline(study: Study) -> Section:
    """Show every arm: divergence with tails, then agreement and cost."""
    blocks: list[Block] = []
    for lane in study.lanes:
        arms = study.arms(lane)
        run, *_ = study.in_lane(lane)
        if run.first_scored:
            last = run.identity["tokens"]["positions_per_context"] - 1
            blocks.append(
                Prose(text=f"The {lane} lane is scored from position {run.first_scored} to {last} of every context.")
            )
        suffix = "" if len(study.lanes) == 1 else f"-{study.lanes.index(lane) + 1}"
        blocks.append(_divergence_table(lane, arms, f"divergence{suffix}"))
        blocks.append(_agreement_table(lane, arms, f"agreement{suffix}"))
        blocks.append(_cost_block(lane, arms, f"cost{suffix}"))
        if (plot := series.size_fidelity(study, lane)) is not None:
            blocks.append(
                Figure(
                    id=f"pareto{suffix}",
                    caption=f"Size against fidelity, {lane} lane: the line joins the arms that no other beats on both.",
                    alt=f"Scatter of checkpoint size and mean KL of {', '.join(p.label for p in plot.points)}.",
                    plot=plot,
                )
            )
    return Section(id="headline", title="Headline", blocks=tuple(blocks))


def _divergence_table(lane: str, arms: tuple[Arm, ...], table_id: str) -> Table:
    columns = [Column(name="arm", numeric=False), Column(name="mean KL"), Column(name=arms[0].run.interval_name)]
    columns += [Column(name=name) for name in ("median", "p99", "p99.9", "max")]
    columns.append(Column(name="CVaR1 %", help="mean of the worst 1 % of positions"))
    rows = tuple(
        (
            arm_cell(arm),
            *estimate_cells(arm.summary["kl"]),
            *(value_cell(arm.tail(name)) for name in ("p50", "p99", "p99.9")),
            number_cell(arm.tail("max")["value"]),
            value_cell(arm.tail("cvar1")),
        )
        for arm in arms
    )
    return Table(
        id=table_id,
        caption=f"KL(reference ‖ arm) in nats per position, {lane} lane. Tails are of all positions pooled.",
        columns=tuple(columns),
        rows=rows,
    )


def _agreement_table(lane: str, arms: tuple[Arm, ...], table_id: str) -> Table:
    columns = [
        Column(name="arm", numeric=False),
        Column(name="top-1", help="positions where the most likely token is the reference's"),
        Column(name="flips", help="positions where it changes although the reference preferred its own clearly"),
        Column(name="near ties", help="changes between candidates less than one BF16 step apart in the reference"),
        Column(name="EAR", help="expected acceptance rate: 1 - total variation"),
        Column(name="ΔNLL", help="excess loss on the true token, nats"),
        Column(name=arms[0].run.interval_name),
    ]
    rows = tuple(
        (
            arm_cell(arm),
            share_cell(arm.summary["top1_agreement"]),
            count_cell(arm.summary["top1_flips"]),
            count_cell(arm.summary["top1_near_ties"] + arm.summary["top1_ties"]),
            Cell(text=f"{arm.summary['ear']:.4f}", value=arm.summary["ear"]),
            *estimate_cells(arm.summary["delta_nll"], signed=True),
        )
        for arm in arms
    )
    return Table(
        id=table_id,
        caption=f"Agreement with the reference and loss on the true token, {lane} lane.",
        columns=tuple(columns),
        rows=rows,
    )


def _cost_block(lane: str, arms: tuple[Arm, ...], table_id: str) -> Block:
    sizes, speeds = ([arm.optional(name) for arm in arms] for name in ("sizes", "speed"))
    if not any(sizes) and not any(speeds):
        return Prose(text=f"Checkpoint size, bits per weight and tokens per second ({lane} lane): {NOT_MEASURED}.")
    rows = tuple(
        (
            arm_cell(arm),
            bytes_cell(size["checkpoint_bytes"] if size else None),
            number_cell(size["body_bpw"], why="no EXL3 linears") if size else missing_cell(),
            number_cell(size["head_bpw"], why="the head is tied") if size else missing_cell(),
            number_cell(speed["tokens_per_second"]) if speed else missing_cell(),
        )
        for arm, size, speed in zip(arms, sizes, speeds, strict=True)
    )
    return Table(
        id=table_id,
        caption=f"Size and speed, {lane} lane.",
        columns=(
            Column(name="arm", numeric=False),
            Column(name="size"),
            Column(name="body bpw", help="bits per weight of the quantized body"),
            Column(name="head bpw"),
            Column(name="tokens/s"),
        ),
        rows=rows,
    )


def arm_cell(arm: Arm) -> Cell:
    """Name an arm, and say that it is a floor."""
    note = {FLOOR: " (floor)", CONTROL: " (lane control)", GRAPH_CONTROL: " (replay control)"}.get(arm.role, "")
    return text_cell(f"`{arm.label}`{note}")

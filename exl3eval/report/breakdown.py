"""Where the loss sits: over positions' size, kinds of text, depth and confidence; and what the arms ran."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from exl3eval.report import series
from exl3eval.report.document import NOT_MEASURED, Block, Cell, Column, Figure, Prose, Section, Table
from exl3eval.report.headline import arm_cell
from exl3eval.report.numbers import (
    bytes_cell,
    count_cell,
    estimate_cells,
    number_cell,
    percent,
    plain,
    share_cell,
    text_cell,
)
from exl3eval.report.study import BASELINE, VARIANT, Study

EXCEEDANCES = (1e-3, 1e-2, 1e-1, 1.0)


def lane_suffix(study: Study, lane: str) -> str:
    """Tell the blocks of several lanes apart."""
    return "" if len(study.lanes) == 1 else f"-{study.lanes.index(lane) + 1}"


def distribution(study: Study) -> Section:
    """Show how the loss is spread over positions."""
    blocks: list[Block] = []
    for lane in study.lanes:
        suffix, rows, zeros = lane_suffix(study, lane), [], []
        arms = study.arms(lane)
        for arm in arms:
            kl = arm.rows["kl"].to_numpy()
            shares = [float(np.count_nonzero(kl > threshold)) / len(kl) for threshold in EXCEEDANCES]
            rows.append((arm_cell(arm), count_cell(len(kl)), *(share_cell(share, decimals=3) for share in shares)))
            zeros.append(f"{arm.label} {percent(float(np.count_nonzero(kl == 0.0)) / len(kl), decimals=1)}")
        medians = ", ".join(f"{arm.label} {plain(arm.tail('p50')['value'])}" for arm in arms)
        tops = ", ".join(f"{arm.label} {plain(arm.tail('max')['value'])}" for arm in arms)
        blocks += [
            Table(
                id=f"exceedance{suffix}",
                caption=f"Share of positions whose KL exceeds a threshold, {lane} lane.",
                columns=(
                    Column(name="arm", numeric=False),
                    Column(name="positions"),
                    *(Column(name=f"> {threshold:g} nats") for threshold in EXCEEDANCES),
                ),
                rows=tuple(rows),
            ),
            Figure(
                id=f"histogram{suffix}",
                caption=f"Per-position KL, {lane} lane. Positions of exactly 0 have no place on a log axis: "
                f"{', '.join(zeros)}.",
                alt=f"Overlaid histograms of log KL per position. Medians in nats: {medians}.",
                plot=series.kl_histogram(study, lane),
            ),
            Figure(
                id=f"tail{suffix}",
                caption=f"Tail: share of positions beyond each KL, {lane} lane.",
                alt=f"Complementary cumulative distribution of KL per position on log axes. Largest values: {tops}.",
                plot=series.kl_exceedance(study, lane),
            ),
        ]
    return Section(id="distribution", title="Distribution over positions", blocks=tuple(blocks))


def by_stratum(study: Study) -> Section:
    """Show every kind of text on its own."""
    blocks: list[Block] = []
    for lane in study.lanes:
        arms = [arm for arm in study.arms(lane) if arm.role in (BASELINE, VARIANT)]
        strata = sorted({name for arm in arms for name in arm.summary["strata"]})
        columns = [Column(name="stratum", numeric=False), Column(name="contexts"), Column(name="documents")]
        for arm in arms:
            columns += [Column(name=f"`{arm.label}`"), Column(name=study.runs[0].interval_name)]
        rows = []
        for stratum in strata:
            estimates = [arm.summary["strata"][stratum] for arm in arms]
            rows.append(
                (
                    text_cell(stratum),
                    count_cell(estimates[0]["num_contexts"]),
                    count_cell(estimates[0]["num_clusters"]),
                    *(cell for estimate in estimates for cell in estimate_cells(estimate)),
                )
            )
        suffix = lane_suffix(study, lane)
        worst = max(strata, key=lambda name: arms[0].summary["strata"][name]["mean"])
        blocks += [
            Table(
                id=f"strata{suffix}",
                caption=f"Mean KL per kind of text in nats per position, {lane} lane. Each interval stands alone: "
                "a statement about the worst stratum needs a correction for their number.",
                columns=tuple(columns),
                rows=tuple(rows),
            ),
            Figure(
                id=f"strata-forest{suffix}",
                caption=f"Mean KL per kind of text, most lossy on top, {lane} lane. A point without a line has too "
                "few documents for an interval.",
                alt=f"Forest plot of mean KL over {len(strata)} kinds of text; the most lossy is {worst}.",
                plot=series.strata_forest(study, lane),
            ),
        ]
    return Section(id="strata", title="By kind of text", blocks=tuple(blocks))


def by_position(study: Study) -> Section:
    """Show the loss against depth, the reference's confidence and, in decode lanes, rows per forward pass."""
    blocks: list[Block] = []
    for lane in study.lanes:
        suffix, arms, edges = lane_suffix(study, lane), study.arms(lane), series.lane_edges(study, lane)
        binned = [series.mean_by_bin(arm.rows, "position", edges) for arm in arms]
        rows = tuple(
            (
                Cell(text=f"{low}" if high - low == 1 else f"{low} to {high - 1}", value=int(low)),
                count_cell(int(binned[0][1][index])),
                *(number_cell(float(means[index])) for means, _ in binned),
            )
            for index, (low, high) in enumerate(pairwise(edges))
        )
        blocks += [
            Table(
                id=f"positions{suffix}",
                caption=f"Mean KL by position in the context, nats, {lane} lane. Position 0 has one token before it.",
                columns=(
                    Column(name="position"),
                    Column(name="count"),
                    *(Column(name=f"`{arm.label}`") for arm in arms),
                ),
                rows=rows,
            ),
            Figure(
                id=f"position{suffix}",
                caption=f"Mean KL against how much context came before, {lane} lane.",
                alt=f"Lines of mean KL over position for {', '.join(arm.label for arm in arms)}; values in the table.",
                plot=series.kl_by_position(study, lane),
            ),
            Figure(
                id=f"confidence{suffix}",
                caption=f"Mean KL against the reference's confidence, {lane} lane.",
                alt="Lines of mean KL over ten bins of the reference's top probability for "
                f"{', '.join(arm.label for arm in arms)}.",
                plot=series.kl_by_confidence(study, lane),
            ),
        ]
    if (plot := series.kl_by_rows(study)) is not None:
        blocks.append(
            Figure(
                id="decode-rows",
                caption="Mean KL of decode lanes against rows per forward pass; verticals mark the dispatch's "
                "thresholds.",
                alt=f"Lines of mean KL over rows for {', '.join(curve.label for curve in plot.curves)}.",
                plot=plot,
            )
        )
    else:
        blocks.append(Prose(text=f"Decode lanes by rows per forward pass: {NOT_MEASURED}."))
    return Section(id="position", title="By position and confidence", blocks=tuple(blocks))


def engagement(study: Study) -> Section:
    """Show which routes ran, as counted inside the op."""
    rows = []
    for lane in study.lanes:
        for arm in study.arms(lane):
            record = arm.run.identity["arms"][arm.name]
            rows += [
                (
                    arm_cell(arm),
                    text_cell(lane),
                    text_cell(f"`{launch['route']}`"),
                    count_cell(launch["rows_bucket"]),
                    count_cell(launch["bits"]),
                    text_cell(launch["codebook"]),
                    text_cell(f"{launch['in_features']} × {launch['out_features']}"),
                    count_cell(launch["count"]),
                )
                for launch in record["launches"]
            ]
    table = Table(
        id="engagement",
        caption="Launches of EXL3 linears, counted inside the op and read back after the run. Arms of the 16-bit "
        "reference have none.",
        columns=(
            Column(name="arm", numeric=False),
            Column(name="lane", numeric=False),
            Column(name="route", numeric=False),
            Column(name="rows", help="row bucket"),
            Column(name="bits"),
            Column(name="codebook", numeric=False),
            Column(name="in × out"),
            Column(name="launches"),
        ),
        rows=tuple(rows),
    )
    return Section(id="engagement", title="Routes that ran", blocks=(table,))


def memory_speed(study: Study) -> Section:
    """Show what the arms hold in memory and how fast they ran, as far as it was measured."""
    blocks: list[Block] = []
    rows, timed = [], False
    for lane in study.lanes:
        for arm in study.arms(lane):
            embedding = arm.run.results["embedding_bytes"][arm.name]
            memory = arm.optional("memory")
            rows.append(
                (
                    arm_cell(arm),
                    text_cell(lane),
                    bytes_cell(embedding["stored"]),
                    bytes_cell(embedding["run"]),
                    bytes_cell(memory["peak_bytes"] if memory else None),
                )
            )
        if (plot := series.speed_fidelity(study, lane)) is not None:
            timed = True
            blocks.append(
                Figure(
                    id=f"speed{lane_suffix(study, lane)}",
                    caption=f"Speed against fidelity, {lane} lane.",
                    alt=f"Scatter of tokens per second and mean KL of {', '.join(p.label for p in plot.points)}.",
                    plot=plot,
                )
            )
    table = Table(
        id="memory",
        caption="Memory. The input embedding as stored and as run.",
        columns=(
            Column(name="arm", numeric=False),
            Column(name="lane", numeric=False),
            Column(name="embedding stored"),
            Column(name="embedding run"),
            Column(name="peak"),
        ),
        rows=tuple(rows),
    )
    if not timed:
        blocks.append(Prose(text=f"Speed: {NOT_MEASURED}."))
    return Section(id="memory", title="Memory and speed", blocks=(table, *blocks))

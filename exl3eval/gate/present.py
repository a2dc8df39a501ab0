"""Verdicts and history on a terminal: compact tables for people; every number comes from the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exl3eval.gate.baseline import BaselineCheck
from exl3eval.gate.ledger import Entry, SuiteUse
from exl3eval.gate.outputs import COLUMNS, endpoint_cells, number
from exl3eval.gate.speed import CellVerdict
from exl3eval.gate.trend import Series, sparkline
from exl3eval.present import rows_table

_STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "INVALID": "bold magenta"}


def verdict_tables(record: Mapping[str, Any]) -> RenderableType:
    """Render one verdict."""
    verdict, policy = record["verdict"], record["policy"]
    headline = Text.assemble(
        (verdict["outcome"], _STYLES[verdict["outcome"]]),
        " (exploratory)" if verdict["exploratory"] else "",
        f"  {', '.join(record['variants']) or '-'} against {record['baseline'] or '-'}, "
        f"policy {policy['name']} {policy['digest'][:12]} ({policy['mode']}, alpha {policy['alpha']})",
    )
    parts: list[RenderableType] = [headline]
    if verdict["endpoints"]:
        table = Table(box=box.SIMPLE_HEAD)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in COLUMNS[:3] else "right", no_wrap=True)
        for endpoint in verdict["endpoints"]:
            table.add_row(*endpoint_cells(endpoint))
        parts.append(table)
    if len(verdict["looks"]) > 1:
        looks = ", ".join(f"{look['num_contexts']} contexts: {look['outcome']}" for look in verdict["looks"])
        parts.append(Text(f"looks: {looks}"))
    if verdict["strata"]:
        worst = verdict["strata"][0]
        holm = "too few documents to judge" if worst["p_holm"] is None else f"Holm p {worst['p_holm']:.4f}"
        parts.append(
            Text(
                f"worst kind of text: {worst['stratum']} {number(worst['value'])} nats, margin "
                f"{number(worst['margin'])}, {holm}"
            )
        )
    parts += [
        Text(f"`{name}`: every position agrees exactly; the difference is exactly 0") for name in verdict["identical"]
    ]
    parts += [Text(f"refused: {reason}", style="yellow") for reason in verdict["refusals"]]
    parts += [Text(f"next: {step}") for step in verdict["next_steps"]]
    parts += [Text(f"note: {note}", style="yellow") for note in record["notes"]]
    return Group(*parts)


def power_table(study: Mapping[str, Any]) -> RenderableType:
    """Render a design study: one row per endpoint, power and MDE per size."""
    sizes = [size["n"] for size in next((e["sizes"] for e in study["endpoints"] if e["sizes"]), [])]
    rows = []
    for endpoint in study["endpoints"]:
        cells = [f"{s['power']:.2f} / {s['mde']:.1e}" for s in endpoint["sizes"]] or ["unknown"] * len(sizes)
        spread = ("-", "-") if endpoint["sigma_d"] is None else (f"{endpoint['sigma_d']:.2e}", _ratio(endpoint["deff"]))
        needed = "-" if endpoint["contexts_needed"] is None else str(endpoint["contexts_needed"])
        rows.append((endpoint["endpoint"], number(endpoint["margin"]["value"]), *spread, *cells, needed))
    columns = ("endpoint", "margin", "sigma_d", "DEFF", *(f"power / MDE at {n}" for n in sizes), "n needed")
    title = (
        f"{study['variant']} against {study['baseline']}: power at the margins of policy {study['policy']['name']}, "
        f"from {study['num_contexts']} contexts of {study['num_clusters']} documents"
    )
    return rows_table(columns, rows, title=title)


def check_tables(check: BaselineCheck) -> RenderableType:
    """Render a run held against its baseline."""
    rows = [endpoint_cells(asdict(endpoint)) for endpoint in check.verdict.endpoints]
    notes = [Text(f"refused: {reason}", style="yellow") for reason in check.verdict.refusals]
    notes += [Text(f"next: {step}") for step in check.verdict.next_steps]
    return Group(Text(check.message), rows_table(COLUMNS, rows), *notes)


def speed_table(cells: Sequence[CellVerdict]) -> RenderableType:
    """Render cells against their baseline."""
    rows = [(c.cell, c.outcome, f"{c.ratio:.3f}", f"{c.p_slower:.3f}", f"{c.p_no_slower:.3f}") for c in cells]
    return rows_table(("cell", "verdict", "ratio of medians", "p slower", "p no slower"), rows)


def foreign_table(record: Mapping[str, Any]) -> RenderableType:
    """Render foreign evidence with its limits."""
    mean = record["mean"]
    interval = mean["interval"]
    bounds = f"[{number(interval['low'])}, {number(interval['high'])}]" if interval else f"unknown: {mean['why']}"
    return Group(
        Text(record["label"], style="yellow"),
        Text(f"{record['measure']}: mean {number(mean['mean'])} over {mean['num_contexts']} contexts, 95 % {bounds}"),
        *(Text(f"limit: {limit}") for limit in record["limits"]),
    )


def history_tables(entries: Sequence[Entry], series: Sequence[Series], uses: Sequence[SuiteUse]) -> RenderableType:
    """Render the ledger: verdicts, one trend per series with its change points, and how often suites were used."""
    rows = [
        (
            str(entry.id),
            entry.created,
            entry.outcome + (" (exploratory)" if entry.exploratory else ""),
            ", ".join(entry.variants),
            entry.policy,
            entry.suite[:12],
            _first_delta(entry),
        )
        for entry in entries
    ]
    trends = [
        (
            one.variant,
            one.endpoint,
            one.device,
            sparkline([point.value for point in one.points]),
            number(one.points[-1].value),
            ", ".join(f"verdict {one.points[at].id}" for at in one.change_points) or "none",
        )
        for one in series
    ]
    counts = [(use.suite[:12], use.split, str(use.decisions), str(use.exploratory)) for use in uses]
    return Group(
        rows_table(("id", "when", "verdict", "variants", "policy", "suite", "mean delta"), rows, title="verdicts"),
        rows_table(("variant", "endpoint", "device", "trend", "last", "changes at"), trends, title="trend of deltas"),
        rows_table(("suite", "split", "decisions", "exploratory"), counts, title="uses of suites"),
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _first_delta(entry: Entry) -> str:
    means = [e["delta"]["value"] for e in entry.record["verdict"]["endpoints"] if e["delta"]["endpoint"] == "mean"]
    return ", ".join(number(value) for value in means) or "-"

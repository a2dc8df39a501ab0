"""Receipts on a terminal: compact tables for people; every number comes from the receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exl3eval.checkpoint.inspect import INVENTORY_COLUMNS, Inventory, inventory_rows
from exl3eval.floors import FLOORS


def _nats(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "0" if value == 0 else f"{value:.3e}" if abs(value) < 1e-3 else f"{value:.5f}"


def _interval(estimate: dict[str, Any]) -> str:
    interval = estimate["interval"]
    if interval is None:
        return f"unknown: {estimate['why']}"
    return f"[{_nats(interval['low'])}, {_nats(interval['high'])}]"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _arm_table(receipt: dict[str, Any]) -> Table:
    results, floor = receipt["results"], receipt["floor"]
    table = Table(box=box.SIMPLE_HEAD, title="KL(reference || arm), nats per position", title_justify="left")
    for column in ("arm", "mean", "95 % interval", "p50", "p99", "p99.9", "max", "top-1", "embedding"):
        table.add_column(column, justify="left" if column in ("arm", "95 % interval") else "right")
    candidates = [
        name for name in results["arms"] if name.partition("@")[0] in (receipt["baseline"], receipt["variant"])
    ]
    controls = [results["floors"][key]["arm"] for key in ("lane_control", "graph_control") if results["floors"][key]]
    for name in (*candidates, floor, *controls):
        arm = results["arms"][name]
        tails = {tail["name"]: tail["value"] for tail in arm["tails"]}
        table.add_row(
            name if name in candidates else f"{name} (floor)",
            _nats(arm["kl"]["mean"]),
            _interval(arm["kl"]),
            *(_nats(tails[key]) for key in ("p50", "p99", "p99.9", "max")),
            f"{arm['top1_agreement']:.2%}",
            _bytes(results["embedding_bytes"][name]["run"]),
        )
    return table


def paired_table(comparison: dict[str, Any]) -> Table:
    """Render a variant against its baseline."""
    paired = comparison["paired"]
    delta, signs = paired["delta"], paired["by_context"]
    title = f"{comparison['variant']} minus {comparison['baseline']}, paired by context"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("delta", "95 % interval", "wins/ties/losses", "sign-flip p", "n", "G", "DEFF", "MDE 80 %"):
        table.add_column(column, justify="left" if column == "95 % interval" else "right")
    table.add_row(
        "exactly 0" if comparison["identical"] else f"{delta['mean']:+.3e}",
        _interval(delta),
        f"{signs['wins']}/{signs['ties']}/{signs['losses']}",
        f"{paired['sign_flip_p']:.4f}",
        str(delta["num_contexts"]),
        str(delta["num_clusters"]),
        "-" if delta["deff"] is None else f"{delta['deff']:.2f}",
        "-" if paired["mde"] is None else f"{paired['mde']:.2e}",
    )
    return table


def _floor_table(receipt: dict[str, Any]) -> Table:
    delta = abs(receipt["results"]["comparison"]["paired"]["delta"]["mean"])
    table = Table(
        box=box.SIMPLE_HEAD, title="floors: KL of an arm from itself, nats per position", title_justify="left"
    )
    for column in ("nothing changed but", "arm", "KL", "|delta| / floor"):
        table.add_column(column, justify="left" if column in ("nothing changed but", "arm") else "right")
    for floor, words in FLOORS.items():
        for arm, value in receipt["results"]["floors"].get(floor, {}).items():
            table.add_row(words, arm, _nats(value), f"{delta / value:,.0f}" if value else "-")
    return table


def receipt_tables(receipt: dict[str, Any]) -> RenderableType:
    """Render a receipt for a terminal."""
    identity, results = receipt["identity"], receipt["results"]
    tokens = identity["tokens"]
    floor = results["floors"]["reference_rounding"]["kl"]
    saved = results["embedding_bytes"]
    scored = tokens["positions_per_context"] - tokens["first_scored"]
    lines = [
        f"{tokens['num_contexts']} contexts x {scored} positions of "
        f"{identity['suite']['name']}, "
        f"vocabulary {identity['vocabulary']['size']:,}, lane {identity['lane']}, "
        f"reference in {identity['reference_precision']}, {identity['device']['name']}",
        f"floor: the reference against itself in {receipt['floor'].partition('-')[2]} differs by {_nats(floor)} nats; "
        f"running a context again changes "
        + ("no bit" if not any(results["floors"]["repeat_difference"].values()) else "hidden states"),
    ]
    before, after = saved[receipt["baseline"]]["run"], saved[receipt["variant"]]["run"]
    if before != after:
        lines.append(f"input embedding: {_bytes(before)} -> {_bytes(after)} ({after / before:.1%})")
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in receipt["warnings"]]
    tables = _arm_table(receipt), paired_table(results["comparison"]), _floor_table(receipt)
    return Group(*(Text(line) for line in lines), *tables, *warnings)


def inventory_report(inventory: Inventory) -> RenderableType:
    """Render what a checkpoint holds, module by module, with totals."""
    totals = [
        ("body", _bpw(inventory.body_bpw)),
        ("head", _bpw(inventory.head_bpw)),
        ("embedding", _bytes(inventory.embedding_bytes)),
        ("EXL3 modules", f"{inventory.num_exl3} ({_bytes(inventory.exl3_bytes)})"),
        ("other tensors", f"{inventory.num_plain} ({_bytes(inventory.plain_bytes)})"),
        ("files", _bytes(inventory.file_bytes)),
    ]
    notes = [Text(f"note: {note}", style="yellow") for note in inventory.notes]
    return Group(rows_table(INVENTORY_COLUMNS, inventory_rows(inventory)), rows_table(("total", ""), totals), *notes)


def _bpw(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} bits per weight"


def rows_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """Render rows of text under column names."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

"""The memory receipt on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from exl3eval.memory.receipt import Difference
from exl3eval.present import rows_table

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_LISTED = ("held", "key-value cache", "activations")
_PEAKS = ("peak allocated", "peak reserved", "peak used")
_MOMENTS, _READ = ("before", "started", "served"), ("allocated", "reserved", "used")
UNKNOWN = "unknown"


def format_bytes(count: float | None) -> str:
    """Format a size, or a signed change of one; None is `unknown`."""
    if count is None:
        return UNKNOWN
    for unit, size in _UNITS:
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:g} B"


def receipt_report(receipt: dict[str, Any]) -> RenderableType:
    """Render a receipt: what was measured, every figure, why some are unknown, and what happened."""
    identity, results = receipt["identity"], receipt["results"]
    workload, resolved = identity["workload"], identity["resolved"]
    head = (
        f"{resolved['name']} ({identity['model']['form']}, {resolved['activations']}) on {identity['device']['name']}: "
        f"{workload['rows']} x {workload['positions']} tokens prefilled, {workload['decode_positions']} decoded"
    )
    routes = ", ".join(dict.fromkeys(launch["route"] for launch in identity["launches"])) or "none of EXL3"
    rows = results["rows"]
    figures = [(row["section"], row["name"], format_bytes(row["bytes"])) for row in rows if row["section"] in _LISTED]
    outcome = results["outcome"]
    return Group(
        Text(head),
        Text(f"routes launched: {routes}"),
        _pivot([row for row in rows if row["section"] == "weights"], "weights"),
        rows_table(("section", "what", "bytes"), figures),
        _pivot([row for row in rows if row["section"] == "peak"], "peak"),
        *(Text(f"{UNKNOWN}: {reason}") for reason in dict.fromkeys(row["why"] for row in rows if row["why"])),
        Text(outcome["message"], style="" if outcome["fits"] else "red"),
    )


def served_report(receipt: dict[str, Any]) -> RenderableType:
    """Render a served arm's receipt: three limits, what it holds, memory by moment, each request, and the outcome."""
    identity, results = receipt["identity"], receipt["results"]
    asked, depths = identity["limits"], identity["probes"]["depths"]
    head = (
        f"{identity['resolved']['name']} ({identity['model']['form']}, {identity['resolved']['activations']}, "
        f"{identity['mode']}) under vLLM on {identity['device']['name']}: requests of up to {asked['max_model_len']} "
        f"tokens, prepared for {asked['max_num_seqs']} side by side"
    )
    share = asked["engine_budget"]
    budget = "none: a cache of a fixed size" if share is None else format_bytes(results["engine_budget_bytes"])
    cap = "none" if asked["hard_cap_bytes"] is None else format_bytes(asked["hard_cap_bytes"])
    limits = [
        ("engine budget", budget, "vLLM plans with it" + ("" if share is None else f" ({share:g} of the device)")),
        ("hard cap", cap, "ours: torch's allocator reserves no more"),
        ("physical memory", format_bytes(results["device_bytes"]), "the device's, shared by every process"),
    ]
    tokens = results["kv_tokens"]
    figures = [
        ("weights", format_bytes(results["weights_bytes"]), ""),
        ("key-value cache", format_bytes(results["kv_cache_bytes"]), UNKNOWN if tokens is None else f"{tokens} tokens"),
        *((name, format_bytes(results[name.replace(" ", "_")]), "") for name in _PEAKS),
    ]
    moments = [
        (name, *(format_bytes(results["readings"][name][column]) for column in _READ))
        for name in _MOMENTS
        if name in results["readings"]
    ]
    requests = results["requests"]
    served = [
        (f"{depth:g}", str(each["prompt_tokens"]), _yes(each["finished"]), _yes(each["found"]))
        for depth, each in zip(depths, requests, strict=False)
    ]
    finished, found = (sum(each[what] for each in requests) for what in ("finished", "found"))
    outcome = "fits" if results["fits"] else f"does not fit, {results['outcome']}: {results['message']}"
    return Group(
        Text(head),
        rows_table(("limit", "bytes", "whose"), limits),
        rows_table(("held", "bytes", "room"), figures),
        rows_table(("at", *_READ), moments),
        rows_table(("secret at depth", "prompt tokens", "finished", "found"), served),
        *(Text(f"{UNKNOWN}: {', '.join(names)}: {reason}") for reason, names in _by_reason(results["unknown"]).items()),
        Text(
            f"{outcome}; of {len(depths)} requests {finished} finished, {found} found their secret",
            style="" if results["fits"] else "red",
        ),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _by_reason(unknown: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name in sorted(unknown):
        reasons.setdefault(unknown[name], []).append(name.removesuffix("_bytes").replace("_", " "))
    return reasons


def _pivot(rows: Sequence[dict[str, Any]], section: str) -> RenderableType:
    """Lay out rows named `line, column` as a matrix; lines of nothing but zeros are left out."""
    cells: dict[str, dict[str, float | None]] = {}
    for row in rows:
        line, _, column = row["name"].rpartition(", ")
        cells.setdefault(line or "all", {})[column] = row["bytes"]
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    lines = [
        (name, *(format_bytes(line[column]) if column in line else "" for column in columns))
        for name, line in cells.items()
        if any(value != 0 for value in line.values())
    ]
    return rows_table((section, *columns), lines)


def difference_report(differences: Sequence[Difference], *, against: str) -> RenderableType:
    """Render signed differences; rows that are equal or unknown on both sides are counted, not listed."""
    changed = [each for each in differences if each.change != 0 and (each.old, each.new) != (None, None)]
    rows = [
        (each.section, each.name, format_bytes(each.old), format_bytes(each.new), _signed(each.change))
        for each in changed
    ]
    table = rows_table(("section", "what", against, "this", "change"), rows, title=f"this minus {against}")
    unknown = sum((each.old, each.new) == (None, None) for each in differences)
    return Group(table, Text(f"{len(differences) - len(changed) - unknown} rows are equal, {unknown} unknown in both"))


def _signed(change: float | None) -> str:
    return UNKNOWN if change is None else f"{'+' if change > 0 else ''}{format_bytes(change)}"

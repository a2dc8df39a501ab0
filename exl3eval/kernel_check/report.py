"""The receipt of a check, and the table that people read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from exl3eval.kernel_check.finding import Finding
from exl3eval.kernel_check.subject import CONTROLS
from exl3eval.kernel_check.suite import is_green

SCHEMA = "exl3eval/kernel-check/1"
MARKS = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a", "not run": "not run"}


def build_receipt(findings: Sequence[Finding], *, identity: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Return the check as plain data: verdict, identity of code, device and kernels, and every finding."""
    counts = {status: sum(f.status == status for f in findings if f.route not in CONTROLS) for status in MARKS}
    return {
        "schema": SCHEMA,
        "verdict": "PASS" if is_green(findings) else "FAIL",
        "quick": quick,
        "routes": list(dict.fromkeys(f.route for f in findings)),
        "controls": [name for name in CONTROLS if any(f.route == name for f in findings)],
        "counts": counts,
        **identity,
        "findings": [asdict(finding) for finding in findings],
    }


def render_markdown(receipt: dict[str, Any]) -> str:
    """Render a receipt: the verdict, a table of verdicts, and per route what was measured against which bound."""
    findings = [Finding(**raw) for raw in receipt["findings"]]
    device = receipt["device"]["name"]
    counted = ", ".join(f"{count} {status}" for status, count in receipt["counts"].items())
    lines = [
        f"# Kernel check, {device}: {receipt['verdict']}",
        "",
        f"{counted}. Controls, which must fail: {', '.join(receipt['controls']) or 'none'}."
        + (" Quick: fewer cases than the full suite." if receipt["quick"] else ""),
        "",
        *_overview(findings, receipt["routes"]),
    ]
    for route, group in groupby(findings, key=lambda f: f.route):
        lines += ["", f"## {route}", "", "| # | property | verdict | cases | worst | bound | of | checked |"]
        lines.append("|---:|---|---|---:|---:|---:|---|---|")
        for f in group:
            said = "; ".join(part for part in (f.checked, f.reason) if part).replace("|", "/")
            numbers = f"{f.cases or ''} | {_number(f.worst)} | {_number(f.bound)} | {f.measure}"
            lines.append(f"| {f.number} | {f.name} | {MARKS[f.status]} | {numbers} | {said} |")
    return "\n".join(lines) + "\n"


def _overview(findings: Sequence[Finding], routes: Sequence[str]) -> list[str]:
    rows = list(dict.fromkeys((f.number, f.name) for f in sorted(findings, key=lambda f: f.number)))
    verdicts = {(f.number, f.name, f.route): MARKS[f.status] for f in findings}
    lines = ["| # | property | " + " | ".join(routes) + " |", "|---:|---|" + "---|" * len(routes)]
    for number, name in rows:
        cells = " | ".join(verdicts.get((number, name, route), "") for route in routes)
        lines.append(f"| {number} | {name} | {cells} |")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

"""Verdict records for machines and people in CI: JUnit XML, GitHub annotations, step summary, badges.

Functions of the record; nothing here decides anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from exl3eval.records import write_atomic, write_json

_COLOURS = {"PASS": "#2c8a3d", "FAIL": "#c43c35", "INCONCLUSIVE": "#a86f00", "INVALID": "#6b4fa0"}
COLUMNS = ("variant", "endpoint", "verdict", "delta", "bounds", "margin", "n", "G", "DEFF", "sigma_d", "MDE", "power")
_LABEL = "exl3eval gate"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_outputs(folder: Path, record: Mapping[str, Any]) -> None:
    """Write verdict.json, junit.xml, summary.md, badge.svg and badge.json, each atomically."""
    write_json(folder / "verdict.json", record)
    write_atomic(folder / "junit.xml", junit_xml(record))
    write_atomic(folder / "summary.md", summary_markdown(record))
    write_atomic(folder / "badge.svg", badge_svg(record))
    write_json(folder / "badge.json", badge_json(record))


def number(value: float | None) -> str:
    """Render a figure or unknown."""
    if value is None:
        return "unknown"
    return "0" if value == 0 else f"{value:+.3e}"


def junit_xml(record: Mapping[str, Any]) -> str:
    """Render JUnit XML: one case per variant, lane and endpoint, one per judged stratum, one for admissibility.

    FAIL is a failure; INCONCLUSIVE and INVALID are errors, so that no dashboard counts them as passed.
    """
    verdict = record["verdict"]
    suite = ElementTree.Element("testsuite", name=_LABEL, timestamp=record["created"].partition("+")[0], time="0")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(record).items():
        ElementTree.SubElement(properties, "property", name=name, value=_text(value))
    for endpoint in verdict["endpoints"]:
        delta = endpoint["delta"]
        case = _case(suite, f"{delta['variant']}.{verdict['lane']}", delta["endpoint"])
        _mark(case, endpoint["outcome"], _endpoint_line(endpoint), endpoint["next_step"])
        ElementTree.SubElement(case, "system-out").text = _text(_endpoint_details(endpoint))
    for stratum in verdict["strata"]:
        if stratum["p_holm"] is not None:
            case = _case(suite, f"{stratum['variant']}.{verdict['lane']}.strata", stratum["stratum"])
            line = (
                f"{number(stratum['value'])} nats, margin {number(stratum['margin'])}, Holm p {stratum['p_holm']:.4f}"
            )
            _mark(case, stratum["outcome"], line, "")
    case = _case(suite, f"policy.{record['policy']['name']}", "admissible")
    if verdict["refusals"] and not verdict["exploratory"]:
        outcome = verdict["outcome"] if verdict["outcome"] == "INVALID" else "INCONCLUSIVE"
        _mark(case, outcome, verdict["refusals"][0], "\n".join([*verdict["refusals"][1:], *verdict["next_steps"]]))
    cases = suite.findall("testcase")
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
        "skipped": 0,
    }
    root = ElementTree.Element("testsuites", name=_LABEL, time="0")
    for name, count in counts.items():
        suite.set(name, str(count))
        if name != "skipped":
            root.set(name, str(count))
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def github_annotations(record: Mapping[str, Any]) -> list[str]:
    """Render workflow commands that GitHub shows on a pull request: one line each."""
    verdict = record["verdict"]
    kind = {"PASS": "notice", "FAIL": "error", "INVALID": "error"}.get(verdict["outcome"], "warning")
    lines = [(kind, verdict["outcome"], f"policy {record['policy']['name']} {record['policy']['digest'][:12]}")]
    lines += [
        ("error" if e["outcome"] == "FAIL" else "warning", f"{e['outcome']} {e['delta']['endpoint']}", e["next_step"])
        for e in verdict["endpoints"]
        if e["outcome"] != "PASS"
    ]
    lines += [("warning", "refused", reason) for reason in verdict["refusals"]]
    return [
        f"::{kind} title={_escape(f'{_LABEL}: {title}', ':,')}::{_escape(message, '')}"
        for kind, title, message in lines
    ]


def summary_markdown(record: Mapping[str, Any]) -> str:
    """Render the step summary: the verdict, every endpoint with its power, and what to do next."""
    verdict, policy = record["verdict"], record["policy"]
    label = f"{verdict['outcome']}{' (exploratory)' if verdict['exploratory'] else ''}"
    subject = f" · {', '.join(record['variants'])} against {record['baseline']}" if record["variants"] else ""
    lines = [f"## {_LABEL}: {label}{subject}", "", f"Policy `{policy['name']}` `{policy['digest'][:12]}`", ""]
    if verdict["endpoints"]:
        lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(endpoint_cells(endpoint)) for endpoint in verdict["endpoints"]]
        lines.append("")
    failed = [s for s in verdict["strata"] if s["outcome"] == "FAIL"]
    lines += [
        f"- **{_cell(s['stratum'])}** hurt by `{_cell(s['variant'])}`: {number(s['value'])}, Holm p {s['p_holm']:.4f}"
        for s in failed
    ]
    lines += [f"- refused: {_cell(reason)}" for reason in verdict["refusals"]]
    lines += [f"- next: {_cell(step)}" for step in verdict["next_steps"]]
    lines += [f"- note: {_cell(note)}" for note in record["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def endpoint_cells(endpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """Lay one endpoint out as the cells of a table row, in the order of `COLUMNS`."""
    delta, power = endpoint["delta"], endpoint["power"]
    return (
        delta["variant"],
        delta["endpoint"],
        endpoint["outcome"],
        number(delta["value"]),
        f"[{number(delta['lower'])}, {number(delta['upper'])}]",
        number(endpoint["margin"]["value"]),
        str(delta["num_contexts"]),
        str(delta["num_clusters"]),
        "-" if delta["deff"] is None else f"{delta['deff']:.2f}",
        "-" if delta["sigma"] is None else f"{delta['sigma']:.2e}",
        "-" if power is None else f"{power['mde']:.2e}",
        "-" if power is None else f"{power['power']:.2f}",
    )


def badge_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a badge in the endpoint format of shields.io."""
    outcome = record["verdict"]["outcome"]
    return {"schemaVersion": 1, "label": _LABEL, "message": outcome.lower(), "color": _COLOURS[outcome].lstrip("#")}


def badge_svg(record: Mapping[str, Any]) -> str:
    """Draw the badge as a self-contained SVG with a text alternative."""
    outcome = record["verdict"]["outcome"]
    left, right = 12 + 6.6 * len(_LABEL), 14 + 7.4 * len(outcome)
    width = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="20" role="img" '
        f'aria-label="{_LABEL}: {outcome}"><title>{_LABEL}: {outcome}</title>'
        f'<rect width="{width:.0f}" height="20" rx="3" fill="#444"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" rx="3" fill="{_COLOURS[outcome]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:.0f}" y="14">{_LABEL}</text>'
        f'<text x="{left + right / 2:.0f}" y="14">{outcome}</text></g></svg>\n'
    )


def _properties(record: Mapping[str, Any]) -> dict[str, str]:
    policy, verdict = record["policy"], record["verdict"]
    looks = ", ".join(f"{look['num_contexts']}: {look['outcome']}" for look in verdict["looks"])
    return {
        "outcome": verdict["outcome"],
        "policy": policy["name"],
        "policy_digest": policy["digest"],
        "baseline": record["baseline"] or "",
        "suite": (record["suite"] or {}).get("digest", ""),
        "looks": looks,
        "exploratory": str(verdict["exploratory"]).lower(),
    } | {f"run_{i}": run["identity_digest"] for i, run in enumerate(record["runs"])}


def _endpoint_line(endpoint: Mapping[str, Any]) -> str:
    delta = endpoint["delta"]
    bounds = f"[{number(delta['lower'])}, {number(delta['upper'])}]"
    return f"{number(delta['value'])} {endpoint['unit']}, bounds {bounds}, margin {number(endpoint['margin']['value'])}"


def _endpoint_details(endpoint: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{n} {c}" for n, c in zip(COLUMNS[6:], endpoint_cells(endpoint)[6:], strict=True))
    return f"{endpoint['outcome']}: {_endpoint_line(endpoint)}; {figures}"


def _case(suite: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_text(classname), name=_text(name), time="0")


def _mark(case: ElementTree.Element, outcome: str, message: str, text: str) -> None:
    if outcome != "PASS":
        tag = "failure" if outcome == "FAIL" else "error"
        ElementTree.SubElement(case, tag, type=outcome, message=_text(message)).text = _text(text)


def _text(value: str) -> str:
    """Replace what XML cannot carry."""
    return _NOT_XML.sub("\ufffd", value)


def _escape(text: str, extra: str) -> str:
    """Escape a workflow command's data, or with `extra` its properties."""
    for character in "%\r\n" + extra:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _row(cells: Any) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""From run folders and a policy to a verdict record: the one place where evidence, ledger and decision meet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from exl3eval.errors import Exl3EvalError, InvalidRunError, UsageError
from exl3eval.gate.checks import check_context_order, check_one_design
from exl3eval.gate.decide import decide
from exl3eval.gate.declaration import Declaration, find_declaration
from exl3eval.gate.evidence import read_run
from exl3eval.gate.ledger import append_verdict, check_policy_unedited, open_ledger, register_policy
from exl3eval.gate.policy import Policy
from exl3eval.gate.rows import LABEL_FIELDS, Run
from exl3eval.gate.verdict import SCHEMA, Outcome, Verdict, invalid_verdict, refuse, verdict_json
from exl3eval.receipt import RECEIPT_FILE
from exl3eval.records import read_json
from exl3eval.suite.context import Suite
from exl3eval.suite.load import load_suite


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequest:
    """What to judge.

    Parameters
    ----------
    folders : sequence of Path
        Runs of `exl3eval kld --out`, one variant each, all against one baseline.
    policy : Policy
    policy_file : Path or None
        Where the policy was read from; None for a shipped one.
    ledger : Path
    suite : Suite or None
        To check the contexts' order and labels against; None when it is not at hand.
    exploratory : bool
    """

    folders: Sequence[Path]
    policy: Policy
    policy_file: Path | None
    ledger: Path
    suite: Suite | None = None
    exploratory: bool = False


def judge(request: GateRequest, *, now: datetime, executor: Executor | None = None) -> dict[str, Any]:
    """Judge runs, append the verdict to the ledger and return its record.

    Evidence that must not be read as a number gives an INVALID record, not an exception.

    Raises
    ------
    UsageError
        If a folder holds no run, one variant is given twice, or the ledger cannot be written.
    """
    with open_ledger(request.ledger) as ledger:
        first_seen = register_policy(ledger, request.policy, now=now)
    runs: list[Run] = []
    declarations: list[Declaration] = []
    try:
        runs = [read_run(folder) for folder in request.folders]
        _check_distinct(runs)
        check_one_design(runs)
        if request.suite is not None:
            for run in runs:
                check_context_order(run, request.suite)
        with open_ledger(request.ledger) as ledger:
            for run in runs:
                check_policy_unedited(ledger, request.policy, run.receipt["positions_sha256"])
        declarations = [
            find_declaration(request.policy, run.receipt, file=request.policy_file, first_seen=first_seen)
            for run in runs
        ]
        verdict = decide(runs, request.policy, exploratory=request.exploratory, executor=executor)
        undeclared = [found for found in declarations if not found.is_before_run]
        if undeclared:
            verdict = refuse(
                verdict,
                f"policy `{request.policy.name}` was first seen at {undeclared[0].since}, after the run it judges: "
                "commit it (or show it to `exl3eval power`) and run again, or --exploratory",
            )
    except InvalidRunError as error:
        verdict = invalid_verdict(error.message, error.hint)
    record = _record(request, runs, declarations, verdict, now)
    with open_ledger(request.ledger) as ledger:
        append_verdict(ledger, record)
    return record


def _check_distinct(runs: Sequence[Run]) -> None:
    names = [run.variant.arm for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"{names.count(twice[0])} of the runs measure variant `{twice[0]}`",
            hint="give each variant once; judge lanes one at a time",
        )


def _record(
    request: GateRequest,
    runs: Sequence[Run],
    declarations: Sequence[Declaration],
    verdict: Verdict,
    now: datetime,
) -> dict[str, Any]:
    first = runs[0] if runs else None
    declared = next((d for d in declarations if not d.is_before_run), declarations[0] if declarations else None)
    return {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "policy": {
            "name": request.policy.name,
            "digest": request.policy.digest,
            "mode": request.policy.mode,
            "alpha": request.policy.alpha,
            "min_power": request.policy.min_power,
            "declared": asdict(declared) if declared else None,
        },
        "suite": dict(first.identity["suite"]) if first else None,
        "order_verified": request.suite is not None and verdict.outcome is not Outcome.INVALID,
        "device": dict(first.identity["device"]) if first else None,
        "code": {"commit": first.identity["code"]["git"]["commit"]} if first else None,
        "baseline": first.baseline.arm if first else None,
        "variants": [run.variant.arm for run in runs],
        "runs": [
            {key: run.receipt[key] for key in ("created", "identity_digest", "results_digest", "positions_sha256")}
            for run in runs
        ],
        "notes": _notes(request, runs, verdict),
        "verdict": verdict_json(verdict),
    }


def _notes(request: GateRequest, runs: Sequence[Run], verdict: Verdict) -> list[str]:
    notes = []
    for run in runs:
        declared = [run.identity["arms"][rows.arm]["resolved"] for rows in (run.baseline, run.variant)]
        changed = [k for k in declared[0] if k not in LABEL_FIELDS and declared[0][k] != declared[1].get(k)]
        if run.identical and changed:
            notes.append(
                f"`{run.variant.arm}` changes {', '.join(changed)} and agrees with `{run.baseline.arm}` in every bit: "
                "check that it really does something"
            )
    if runs and request.suite is None:
        notes.append("the suite was not at hand: contexts' order and labels were not checked against it (--suite)")
    if verdict.exploratory:
        notes.append("exploratory: refusals are listed, not applied; this verdict is no gate")
    return notes


def suite_at_hand(folder: Path, given: Path | None) -> Suite | None:
    """Return the suite that a run was made over: the one given, or the shipped one if the run names its digest.

    Raises
    ------
    SuiteError
        If the suite given cannot be loaded.
    """
    if given is not None:
        return load_suite(given)
    try:
        shipped = load_suite()
        named = read_json(folder / RECEIPT_FILE)["identity"]["suite"]["digest"]
    except (Exl3EvalError, KeyError, TypeError):
        return None
    return shipped if named == shipped.digest else None

"""Baselines: what an arm read when a person said that it was right, to hold later runs against.

An entry is a folder named by the digest of its own record: scope, status, who and why, and the digest of its rows.
Nothing is ever blessed by a check, and an entry is never changed: a newer one in the same scope takes over.

| status | a later run in its scope |
|---|---|
| `good` | must not be worse than the blessed rows, by the policy |
| `waived` | as `good`, but a FAIL is let through until the waiver's last day |
| `known-broken` | must still FAIL against its own run's baseline: a silent cure is news too |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.checks import check_same_positions, list_differences
from exl3eval.gate.decide import decide
from exl3eval.gate.policy import Policy
from exl3eval.gate.rows import LABEL_FIELDS, ArmRows, Run, arm_rows
from exl3eval.gate.verdict import Outcome, Verdict
from exl3eval.receipt import POSITIONS_FILE
from exl3eval.records import digest_file, digest_value, read_json, write_atomic, write_json
from exl3eval.score.positions import read_positions, split_arms

SCHEMA = "exl3eval/baseline/1"
RECORD_FILE, ROWS_FILE = "baseline.json", "rows.parquet"
STATUSES = ("good", "waived", "known-broken")
_COLUMNS = ("context", "cluster", "stratum", "position", "target", "kl", "tv", "top1", "entropy_arm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blessing:
    """Who vouches for a baseline.

    Parameters
    ----------
    who, why : str
        Recorded, not checked; both required.
    status : str
        `good`, `waived` or `known-broken`.
    until : date or None
        Last day of a waiver; required for `waived`, and for it alone.
    """

    who: str
    why: str
    status: str = "good"
    until: date | None = None

    def __post_init__(self) -> None:
        if not self.who.strip() or not self.why.strip():
            raise UsageError("a baseline needs a name and a reason", hint="give --who and --why")
        if self.status not in STATUSES:
            raise UsageError(f"--status is {self.status!r}", hint=f"use one of: {', '.join(STATUSES)}")
        if (self.status == "waived") != (self.until is not None):
            raise UsageError(
                f"status `{self.status}` with --until {self.until}",
                hint="a waiver carries its last day (--until YYYY-MM-DD); nothing else does",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One entry of the store, checked."""

    digest: str
    scope: Mapping[str, Any]
    blessing: Blessing
    created: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCheck:
    """A run held against its baseline.

    Attributes
    ----------
    baseline : str
        Digest of the entry.
    status : str
    exit_code : int
        0 as it should be, else of the verdict; 1 for a waiver that ran out or a known-broken arm that is not.
    message : str
        What was found and what to do.
    verdict : Verdict
    """

    baseline: str
    status: str
    exit_code: int
    message: str
    verdict: Verdict


def run_scope(run: Run, arm: str) -> dict[str, Any]:
    """Return what two runs must share for their numbers of one arm to be comparable."""
    identity = run.identity
    own, device = identity["arms"][arm], identity["device"]
    head = identity["head_lane"]
    keys = ("name", "compute_capability") if device["type"] == "cuda" else ("isa",)
    return {
        "model": own["checkpoint_sha256"],
        "reference": identity["arms"][run.receipt["reference"]]["checkpoint_sha256"],
        "variant": {name: value for name, value in own["resolved"].items() if name not in LABEL_FIELDS},
        "provider": sorted({launch["route"] for launch in own["launches"]}),
        "suite": identity["suite"]["digest"],
        "split": identity["suite"]["split"],
        "tokens": identity["tokens"]["digest"],
        "device": {"type": device["type"]} | {key: device[key] for key in keys},
        "head_lane": head if isinstance(head, str) else head[arm],
    } | {key: identity[key] for key in ("lane", "engine", "reference_precision")}


def bless(store: Path, folder: Path, run: Run, arm: str, blessing: Blessing, *, now: datetime) -> Baseline:
    """Add an arm of a checked run to the store.

    Raises
    ------
    UsageError
        If the run has no such arm, or the entry exists.
    """
    tables = split_arms(read_positions(folder / POSITIONS_FILE))
    if arm not in tables:
        raise UsageError(f"the run has no arm `{arm}`", hint=f"it has: {', '.join(tables)}")
    sink = pa.BufferOutputStream()
    pq.write_table(tables[arm].select(list(_COLUMNS)), sink, compression="zstd", write_statistics=False)
    rows = sink.getvalue().to_pybytes()
    record = {
        "schema": SCHEMA,
        "scope": run_scope(run, arm),
        "arm": arm,
        "status": blessing.status,
        "until": blessing.until and blessing.until.isoformat(),
        "who": blessing.who,
        "why": blessing.why,
        "created": now.isoformat(timespec="seconds"),
        "rows_sha256": hashlib.sha256(rows).hexdigest(),
        "run": {key: run.receipt[key] for key in ("identity_digest", "results_digest", "positions_sha256")},
    }
    digest = digest_value(record)
    write_atomic(store / digest / ROWS_FILE, rows, exclusive=True)
    write_json(store / digest / RECORD_FILE, record, exclusive=True)
    return read_baseline(store / digest)


def read_baseline(folder: Path) -> Baseline:
    """Read an entry and check that it is what its name says.

    Raises
    ------
    InvalidRunError
        If the record or its rows were altered.
    """
    record = read_json(folder / RECORD_FILE)
    try:
        seen = {"record": digest_value(record), "rows": digest_file(folder / ROWS_FILE)}
        written = {"record": folder.name, "rows": record["rows_sha256"]}
        until = record["until"] and date.fromisoformat(record["until"])
        blessing = Blessing(who=record["who"], why=record["why"], status=record["status"], until=until)
        scope, created = record["scope"], record["created"]
    except (KeyError, TypeError, OSError, ValueError) as error:
        raise InvalidRunError(
            f"baseline {folder.name[:12]} lacks or misuses {error}", hint="restore the store from version control"
        ) from error
    if seen != written:
        raise InvalidRunError(
            f"baseline {folder.name[:12]} was altered: {'; '.join(list_differences(seen, written))}",
            hint="restore the store from version control; bless again to change it",
        )
    return Baseline(digest=folder.name, scope=scope, blessing=blessing, created=created, folder=folder)


def find_baseline(store: Path, scope: Mapping[str, Any]) -> Baseline:
    """Return the newest entry of a scope.

    Raises
    ------
    UsageError
        If there is none; names what differs from the nearest entry.
    """
    entries = [read_baseline(file.parent) for file in sorted(store.glob(f"*/{RECORD_FILE}"))]
    if matching := [entry for entry in entries if entry.scope == scope]:
        return max(matching, key=lambda entry: (entry.created, entry.digest))
    distances = [list_differences(entry.scope, scope) for entry in entries]
    nearest = f"; the nearest differs in {'; '.join(min(distances, key=len)[:3])}" if distances else ""
    raise UsageError(
        f"no baseline of {len(entries)} fits this run{nearest}",
        hint="`exl3eval baseline bless RUN --who NAME --why REASON` adds one; that is a person's decision",
    )


def check(
    store: Path, run: Run, arm: str, policy: Policy, *, today: date, executor: Executor | None = None
) -> BaselineCheck:
    """Hold one arm of a run against the newest baseline of its scope.

    Raises
    ------
    UsageError
        If there is no such arm, or no baseline in its scope.
    InvalidRunError
        If the entry was altered or its rows are over other positions.
    """
    arms = {rows.arm: rows for rows in (run.baseline, run.variant)}
    if arm not in arms:
        raise UsageError(f"the run has no arm `{arm}` to check", hint=f"it has: {', '.join(arms)}")
    baseline = find_baseline(store, run_scope(run, arm))
    status, until = baseline.blessing.status, baseline.blessing.until
    name = f"baseline {baseline.digest[:12]} ({status}, by {baseline.blessing.who})"
    if status == "known-broken":
        verdict = decide([run], policy, executor=executor)
        broken = verdict.outcome is Outcome.FAIL
        message = "still broken, as known" if broken else f"no longer FAILs ({verdict.outcome}): bless it as good"
        exit_code = 0 if broken else Outcome.FAIL.exit_code
    else:
        blessed = replace(_blessed_rows(baseline), arm=f"{arm}@{baseline.digest[:12]}")
        check_same_positions(blessed, arms[arm])
        verdict = decide([replace(run, baseline=blessed, variant=arms[arm])], policy, executor=executor)
        exit_code, message = verdict.outcome.exit_code, str(verdict.outcome)
        if verdict.outcome is Outcome.FAIL and until is not None:
            in_time = today <= until
            exit_code = 0 if in_time else exit_code
            message = f"FAIL, waived until {until}" if in_time else f"FAIL; the waiver ran out on {until}"
    return BaselineCheck(
        baseline=baseline.digest,
        status=status,
        exit_code=exit_code,
        message=f"{name}: {message}",
        verdict=verdict,
    )


def _blessed_rows(baseline: Baseline) -> ArmRows:
    return arm_rows("blessed", pq.read_table(baseline.folder / ROWS_FILE))


def check_json(check: BaselineCheck) -> dict[str, Any]:
    """Lay a check out as strict JSON."""
    return {"schema": "exl3eval/baseline-check/1", **asdict(check)}

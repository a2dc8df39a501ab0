"""The ledger: every verdict ever given, and when each policy was first seen, in one append-only SQLite file.

It answers three questions that no single verdict can: was the policy declared before the run that it judges, was it
edited after it had judged that run, and how often has a suite been used to decide (adaptive reuse, lessons M39).
Triggers refuse updates and deletions; who can edit the file can still forge it, so keep it where CI keeps its records.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.policy import Policy
from exl3eval.records import canonical_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS policies (
    digest TEXT PRIMARY KEY, name TEXT NOT NULL, first_seen TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY, created TEXT NOT NULL, outcome TEXT NOT NULL, exploratory INTEGER NOT NULL,
    variants TEXT NOT NULL, suite TEXT NOT NULL, split TEXT NOT NULL, policy TEXT NOT NULL,
    policy_digest TEXT NOT NULL, record TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS judged (
    positions_sha256 TEXT NOT NULL, verdict INTEGER NOT NULL REFERENCES verdicts (id), policy TEXT NOT NULL,
    policy_digest TEXT NOT NULL
) STRICT;
"""
_TABLES = ("policies", "verdicts", "judged")
_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verdict of the ledger."""

    id: int
    created: str
    outcome: str
    exploratory: bool
    variants: tuple[str, ...]
    suite: str
    split: str
    policy: str
    record: Mapping[str, Any]
    """The verdict record, as written by `exl3eval gate --json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteUse:
    """How often a split of a suite has been used to decide."""

    suite: str
    split: str
    decisions: int
    exploratory: int


@contextmanager
def open_ledger(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the ledger, creating it if needed; what was written is committed on leaving without an error.

    Raises
    ------
    UsageError
        If the file cannot be opened or is not a ledger.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=60.0)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"cannot open the ledger {path.name}: {error}", hint="check --ledger") from error
    try:
        connection.executescript(
            _SCHEMA
            + "".join(_TRIGGER.format(table=table, verb=verb) for table in _TABLES for verb in ("UPDATE", "DELETE"))
        )
        with connection:
            yield connection
    except sqlite3.Error as error:
        raise UsageError(f"the ledger {path.name} refused: {error}", hint="check that it is a ledger") from error
    finally:
        connection.close()


def register_policy(connection: sqlite3.Connection, policy: Policy, *, now: datetime) -> datetime:
    """Record a policy's digest if it is new; return when it was first seen."""
    connection.execute(
        "INSERT OR IGNORE INTO policies VALUES (?, ?, ?)",
        (policy.digest, policy.name, now.isoformat(timespec="seconds")),
    )
    (first_seen,) = connection.execute("SELECT first_seen FROM policies WHERE digest = ?", (policy.digest,)).fetchone()
    return datetime.fromisoformat(first_seen)


def check_policy_unedited(connection: sqlite3.Connection, policy: Policy, positions_sha256: str) -> None:
    """Refuse a policy that judged the same run before in another wording.

    Raises
    ------
    InvalidRunError
        Naming both digests.
    """
    row = connection.execute(
        "SELECT policy_digest, verdict FROM judged WHERE positions_sha256 = ? AND policy = ? AND policy_digest <> ?",
        (positions_sha256, policy.name, policy.digest),
    ).fetchone()
    if row is not None:
        raise InvalidRunError(
            f"policy `{policy.name}` was edited after verdict {row[1]} judged this run with it: "
            f"digest {row[0][:12]} then, {policy.digest[:12]} now",
            hint="restore the policy, or judge a new run made after the edit; margins are declared before the run",
        )


def append_verdict(connection: sqlite3.Connection, record: Mapping[str, Any]) -> int:
    """Append a verdict record and return its number."""
    policy, suite = record["policy"], record["suite"] or {}
    cursor = connection.execute(
        "INSERT INTO verdicts (created, outcome, exploratory, variants, suite, split, policy, policy_digest, record) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record["created"],
            record["verdict"]["outcome"],
            int(record["verdict"]["exploratory"]),
            canonical_json(record["variants"]),
            suite.get("digest", ""),
            suite.get("split", ""),
            policy["name"],
            policy["digest"],
            canonical_json(record),
        ),
    )
    number = int(cursor.lastrowid or 0)
    if record["verdict"]["endpoints"]:
        connection.executemany(
            "INSERT INTO judged VALUES (?, ?, ?, ?)",
            [(run["positions_sha256"], number, policy["name"], policy["digest"]) for run in record["runs"]],
        )
    return number


def list_verdicts(
    connection: sqlite3.Connection,
    *,
    variant: str | None = None,
    suite: str | None = None,
    outcome: str | None = None,
    policy: str | None = None,
) -> list[Entry]:
    """Return the verdicts that match, oldest first; `suite` matches the start of its digest."""
    rows = connection.execute(
        "SELECT id, created, outcome, exploratory, variants, suite, split, policy, record FROM verdicts "
        "WHERE suite LIKE ? || '%' AND outcome LIKE ? AND policy LIKE ? ORDER BY id",
        (suite or "", outcome or "%", policy or "%"),
    ).fetchall()
    entries = [
        Entry(
            id=row[0],
            created=row[1],
            outcome=row[2],
            exploratory=bool(row[3]),
            variants=tuple(json.loads(row[4])),
            suite=row[5],
            split=row[6],
            policy=row[7],
            record=json.loads(row[8]),
        )
        for row in rows
    ]
    return [entry for entry in entries if variant is None or variant in entry.variants]


def count_suite_uses(connection: sqlite3.Connection) -> list[SuiteUse]:
    """Count, per suite and split, the verdicts that decided and those that only explored."""
    rows = connection.execute(
        "SELECT suite, split, SUM(exploratory = 0), SUM(exploratory) FROM verdicts "
        "WHERE suite <> '' AND outcome <> 'INVALID' GROUP BY suite, split ORDER BY suite, split"
    ).fetchall()
    return [SuiteUse(suite=row[0], split=row[1], decisions=row[2], exploratory=row[3]) for row in rows]


def utc_now() -> datetime:
    """Return the time, to the second, as receipts write it."""
    return datetime.now(UTC).replace(microsecond=0)

"""Was the policy declared before the run? Three witnesses, any of which is enough.

The package, if the run was made by the very sources that ship the policy; the repository, if the file is unchanged
since a commit older than the run; the ledger, if it saw the digest before the run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exl3eval.gate.policy import Policy, shipped_file, shipped_policies
from exl3eval.identity import source_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Since when a policy is known to have been declared.

    Attributes
    ----------
    witness : str
        `package`, `commit`, `ledger` or `none`.
    since : str or None
        UTC time of the witness; None for the package, which is older than the run by construction.
    """

    witness: str
    since: str | None

    @property
    def is_before_run(self) -> bool:
        """Whether margins were fixed before the numbers existed."""
        return self.witness != "none"


def find_declaration(
    policy: Policy, receipt: Mapping[str, Any], *, file: Path | None, first_seen: datetime
) -> Declaration:
    """Find a witness that a policy is older than a run.

    Parameters
    ----------
    policy : Policy
    receipt : mapping
        Of the run.
    file : Path or None
        The policy's file; None for a shipped one.
    first_seen : datetime
        When the ledger first saw the policy's digest.
    """
    created = datetime.fromisoformat(receipt["created"])
    shipped = shipped_policies().get(policy.name)
    if shipped is not None and shipped.digest == policy.digest:
        if receipt["identity"]["code"].get("exl3eval_source_sha256") == source_digest("exl3eval"):
            return Declaration(witness="package", since=None)
        file = shipped_file(policy.name)
    committed = None if file is None else commit_time(file)
    for witness, since in (("commit", committed), ("ledger", first_seen)):
        if since is not None and since <= created:
            return Declaration(witness=witness, since=since.isoformat(timespec="seconds"))
    return Declaration(witness="none", since=first_seen.isoformat(timespec="seconds"))


def commit_time(file: Path) -> datetime | None:
    """Return when the file's present content was committed; None if it is not committed or was changed since."""

    def git(*arguments: str) -> subprocess.CompletedProcess[bytes] | None:
        command = ["git", "-C", str(file.resolve().parent), *arguments, "--", file.name]
        try:
            return subprocess.run(command, capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            return None

    clean, log = git("diff", "--quiet", "HEAD"), git("log", "-1", "--format=%ct")
    if clean is None or log is None or clean.returncode != 0 or not log.stdout.strip():
        return None
    return datetime.fromtimestamp(int(log.stdout), tz=UTC)

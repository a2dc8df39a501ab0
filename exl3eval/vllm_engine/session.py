"""What the arms of a run share, and what names and identifies their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.identity import source_digest
from exl3eval.records import digest_value
from exl3eval.suite.tokens import TokenSuite
from exl3eval.variant import MEASURED
from exl3eval.vllm_engine.environment import Interpreter, declared_environment
from exl3eval.vllm_engine.plan import VllmArm
from exl3eval.vllm_engine.request import ChildReport
from exl3eval.vllm_engine.stack import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSession:
    """What all arms of a run share.

    Parameters
    ----------
    interpreter : Interpreter
        For arms whose stack names none.
    interpreters : mapping of str to Interpreter
        By variant name, for those that do.
    inherited : mapping
        The caller's environment, of which children get a few names.
    tokens : TokenSuite
        Ids of every arm.
    vocab_size : int
        Ids scored.
    reference : Checkpoint
        The BF16 directory.
    device : device
        Where to run.
    machine : mapping
        Identity of the device.
    compiled : bool
        Whether candidates run under torch.compile.
    style : str
        How decode lanes are driven: `one-token` or `forced`.
    cache_dir : Path
        For rows, hidden states, requests and logs.
    num_processes : int
        Side by side: on a CPU one per core; on a GPU they share its memory, each with a cache of its own.
    trust_remote_code, fresh : bool
        As asked for.
    """

    interpreter: Interpreter
    interpreters: Mapping[str, Interpreter]
    inherited: Mapping[str, str]
    tokens: TokenSuite
    vocab_size: int
    reference: Checkpoint
    device: torch.device
    machine: Mapping[str, Any]
    compiled: bool = False
    style: str = "one-token"
    cache_dir: Path
    num_processes: int
    trust_remote_code: bool = False
    fresh: bool = False

    def interpreter_of(self, arm: VllmArm) -> Interpreter:
        """Return the interpreter of an arm: its stack's, or the common one."""
        return self.interpreters.get(arm.spec.name, self.interpreter)


def plugin_variant(arm: VllmArm) -> dict[str, Any] | None:
    """Say to this project's plugin what an arm means; None for an arm that does without.

    Its own table of crossovers resolves `measured`.
    """
    variant = arm.spec.resolved
    if arm.stack is not None or not (arm.spec.checkpoint.is_exl3 or variant.embedding != "stored"):
        return None
    linear = MEASURED if variant.linear.startswith(MEASURED) else variant.linear
    return {"linear": linear, "embedding": variant.embedding, "tally": True}


def hidden_folder(reference: VllmArm, session: VllmSession) -> Path:
    """Name the folder of the reference's hidden states."""
    contract = arm_contract(reference, session, None)
    return session.cache_dir / "captures" / digest_value({**contract, "hidden": True})[:32]


def arm_contract(arm: VllmArm, session: VllmSession, reference_hidden: Path | None) -> dict[str, Any]:
    """List what may change a bit of an arm's rows, beside its lane: the name of their folder is its digest."""
    interpreter = session.interpreter_of(arm)
    declared = declared_environment(
        device_type=session.device.type, mode=arm.mode, plugin=plugin_variant(arm), stack=arm.stack
    )
    packages = {name: found for name, found in interpreter.identity["packages"].items() if name != "exl3eval"}
    code = {name: source_digest(f"exl3eval.{name}") for name in ("vllm_engine", "score", "engine")}
    return {
        "arm": arm.spec.name,
        "checkpoint": arm.spec.checkpoint_sha256,
        "variant": {key: value for key, value in arm.spec.resolved.identity.items() if key != "vllm"},
        "stack": arm.stack.identity if arm.stack else None,
        "tokens": session.tokens.digest,
        "vocab_size": session.vocab_size,
        "packages": packages,
        "python": interpreter.version,
        "code": code,
        "environment": dict(declared),
        "device": dict(session.machine),
        "mode": arm.mode,
        "style": session.style,
        "reference": None if arm.is_reference or reference_hidden is None else reference_hidden.name,
    }


def arm_identity(
    arm: VllmArm,
    interpreter: Interpreter,
    declared: Mapping[str, str],
    report: ChildReport,
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """Say what an arm's engine was, for a receipt: no path."""
    return {
        "mode": arm.mode,
        "effective": dict(report.effective),
        "plugin": dict(report.plugin) if report.plugin is not None else None,
        "interpreter": interpreter.identity,
        "environment": dict(declared),
        "stack": arm.stack.identity if arm.stack else None,
        "evidence": [asdict(finding) for finding in findings],
    }

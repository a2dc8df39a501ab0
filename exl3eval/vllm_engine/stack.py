"""Someone else's vLLM stack, declared in a variant: what it is told, and what must prove that it ran.

A flag that silently does nothing scores exactly like its baseline, so a stack declares its own evidence:
a line of its log, a counter in its package, or the names of kernels that a profiler saw. Without it the arm
is INVALID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from exl3eval.errors import InvalidRunError, UsageError

KINDS = ("log", "counter", "kernels")
HINT = "see the recipe in docs/vllm_engine.md"
# What makes an arm an arm: a stack that set these would measure something else than it says.
RESERVED = (
    "async_scheduling",
    "compilation_config",
    "disable_log_stats",
    "distributed_executor_backend",
    "dtype",
    "enable_prefix_caching",
    "enforce_eager",
    "logits_processors",
    "logprobs_mode",
    "max_model_len",
    "model",
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "worker_extension_cls",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One proof that a stack did what it claims.

    Parameters
    ----------
    kind : str
        `log`: a regular expression over the process's output. `counter`: `package.module:name` of an int, a
        mapping to ints, or a function returning either, read after the run. `kernels`: a regular expression
        over the names of device kernels (on a CPU: operators) of one probe batch.
    pattern : str
        The expression or the dotted name.
    minimum : int
        Lines, counts or launches needed.
    """

    kind: str
    pattern: str
    minimum: int = 1

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise UsageError(f"evidence {self.kind} = {self.pattern!r} needs {self.minimum}", hint="ask for 1 or more")
        if self.kind == "counter":
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", self.pattern):
                raise UsageError(f"evidence counter {self.pattern!r} is not `package.module:name`", hint=HINT)
            return
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UsageError(
                f"evidence {self.kind} {self.pattern!r} is no regular expression: {error}", hint=HINT
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen of one evidence: how often, and the first sight of it."""

    kind: str
    pattern: str
    minimum: int
    count: int
    first: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStack:
    """The `[vllm]` table of a variant.

    Parameters
    ----------
    environment : mapping
        Variables set in this arm's process only.
    plugins : tuple of str
        Names of vLLM plugins to load; none by default, not even this project's.
    packages : tuple of str
        Import names whose versions and files enter the identity.
    arguments : mapping
        Further engine arguments, such as `quantization` or `attention_backend`.
    python : str
        Interpreter with that stack; empty for the setting's. Never part of a record: it is a path.
    evidence : tuple of Evidence
        All of it must be found.
    """

    environment: Mapping[str, str]
    plugins: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    arguments: Mapping[str, Any]
    python: str = ""
    evidence: tuple[Evidence, ...]

    def __post_init__(self) -> None:
        if not self.evidence:
            raise UsageError("[vllm] declares no evidence: a flag that does nothing would pass unseen", hint=HINT)
        if reserved := sorted(set(self.arguments) & set(RESERVED)):
            raise UsageError(f"[vllm] arguments sets `{reserved[0]}`, which the harness decides", hint=HINT)

    @property
    def interpreter(self) -> Path | None:
        """The interpreter declared, if any."""
        return Path(self.python) if self.python else None

    @property
    def identity(self) -> dict[str, Any]:
        """Everything declared but the interpreter's path."""
        return {
            "environment": dict(self.environment),
            "plugins": list(self.plugins),
            "packages": list(self.packages),
            "arguments": dict(self.arguments),
            "evidence": [{"kind": e.kind, "pattern": e.pattern, "minimum": e.minimum} for e in self.evidence],
        }


def parse_stack(table: Mapping[str, Any], *, where: str) -> VllmStack:
    """Parse the `[vllm]` table of a variant.

    Parameters
    ----------
    table : mapping
        As TOML gives it; `evidence` is one table or a list of them, each with one of `log`, `counter`, `kernels`.
    where : str
        The file, for messages.

    Raises
    ------
    UsageError
        On unknown keys, wrong types, arguments that the harness decides, or no evidence.
    """
    known = [field.name for field in fields(VllmStack)]
    if unknown := sorted(set(table) - set(known)):
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}"
        raise UsageError(f"{where}: unknown key `vllm.{unknown[0]}`", hint=hint)
    environment = table.get("environment", {})
    if not isinstance(environment, Mapping) or not all(isinstance(value, str) for value in environment.values()):
        raise UsageError(f"{where}: `vllm.environment` is not a table of strings", hint=HINT)
    arguments = table.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where}: `vllm.arguments` is not a table", hint=HINT)
    lists = {}
    for name in ("plugins", "packages"):
        lists[name] = table.get(name, [])
        if not isinstance(lists[name], Sequence) or not all(isinstance(item, str) for item in lists[name]):
            raise UsageError(f"{where}: `vllm.{name}` is not a list of strings", hint=HINT)
    python = table.get("python", "")
    if not isinstance(python, str):
        raise UsageError(f"{where}: `vllm.python` is not a string", hint=HINT)
    declared = table.get("evidence", [])
    declared = [declared] if isinstance(declared, Mapping) else declared
    return VllmStack(
        environment=dict(environment),
        arguments=dict(arguments),
        plugins=tuple(lists["plugins"]),
        packages=tuple(lists["packages"]),
        python=python,
        evidence=tuple(_parse_evidence(each, where) for each in declared),
    )


def _parse_evidence(table: Any, where: str) -> Evidence:
    kinds = [kind for kind in KINDS if isinstance(table, Mapping) and kind in table]
    if len(kinds) != 1 or set(table) - {kinds[0], "minimum"} or not isinstance(table[kinds[0]], str):
        raise UsageError(
            f"{where}: `vllm.evidence` holds {table!r}, expected one of {', '.join(KINDS)} with a string", hint=HINT
        )
    minimum = table.get("minimum", 1)
    if not isinstance(minimum, int) or isinstance(minimum, bool):
        raise UsageError(f"{where}: `vllm.evidence.minimum` is {minimum!r}, expected a whole number", hint=HINT)
    return Evidence(kind=kinds[0], pattern=table[kinds[0]], minimum=minimum)


def find_lines(evidence: Evidence, lines: Sequence[str]) -> Finding:
    """Count the lines in which an expression is found, of a log or of kernel names."""
    hits = [line for line in lines if re.search(evidence.pattern, line)]
    return Finding(
        kind=evidence.kind,
        pattern=evidence.pattern,
        minimum=evidence.minimum,
        count=len(hits),
        first=hits[0].strip()[:200] if hits else None,
    )


def check_findings(arm: str, findings: Sequence[Finding]) -> None:
    """Refuse an arm whose stack left no trace.

    Raises
    ------
    InvalidRunError
        Naming the evidence that is missing.
    """
    for finding in findings:
        if finding.count < finding.minimum:
            raise InvalidRunError(
                f"arm `{arm}`: evidence {finding.kind} = {finding.pattern!r} was seen {finding.count} times, "
                f"expected {finding.minimum} or more",
                hint="the stack did not engage: check its environment variables, plugins and version",
            )

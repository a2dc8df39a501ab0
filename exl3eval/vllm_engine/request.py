"""What a child process is asked for, and what it answers: two strict JSON records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3eval.engine.lanes import Lane
from exl3eval.errors import UsageError
from exl3eval.records import read_json, write_json
from exl3eval.vllm_engine.stack import Evidence, Finding

SCHEMA = "exl3eval/vllm-request/1"
REPORT_SCHEMA = "exl3eval/vllm-report/1"
MODES = ("eager", "compiled", "graphs", "graphs-uncompiled")
STYLES = ("one-token", "forced")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTask:
    """One lane of an arm.

    Parameters
    ----------
    lane : Lane
        Row regime.
    rows : str
        Folder for the divergences of each context.
    hidden : str or None
        Folder for hidden states: this lane is the reference, scored against its own replay. None for all others.
    """

    lane: Lane
    rows: str
    hidden: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """One arm, as its process is told. Paths are those of this machine: the record is scratch, never a receipt.

    Parameters
    ----------
    arm : str
        Its name, for messages.
    model : str
        Model directory.
    reference_model, reference_hidden : str
        Directory whose head turns the reference's hidden states into logits, and the folder of those.
    lanes : tuple of LaneTask
        In this order, in one engine.
    style : str
        How decode lanes are driven: `one-token` prompt steps, or `forced` sampling of the held-out ids.
    mode : str
        Of execution: `eager`, `compiled`, `graphs` (compiled, decode steps replayed) or `graphs-uncompiled`.
    activations : str
        Dtype of the engine.
    device_type : str
        `cpu` or `cuda`.
    vocab_size : int
        Ids scored.
    head, logits : str
        As in a variant: `own` or `reference`, `float32` or `bfloat16`.
    float32_head : bool
        Ask the engine for FP32 products in its 16-bit head.
    arguments : mapping
        Further engine arguments.
    evidence : tuple of Evidence
        Counters and kernels that must be seen; log lines are the parent's.
    plugin : bool
        Whether this project's plugin must be in force.
    ids : str
        Safetensors file with `ids`, int64 [N, T + 1].
    digests : tuple of str
        Of each context's ids, in the order of the file.
    report : str
        File to write at the end.
    trust_remote_code, fresh : bool
        As asked for.
    """

    arm: str
    model: str
    reference_model: str
    reference_hidden: str
    lanes: tuple[LaneTask, ...]
    style: str
    mode: str
    activations: str
    device_type: str
    vocab_size: int
    head: str
    logits: str
    float32_head: bool
    arguments: Mapping[str, Any]
    evidence: tuple[Evidence, ...]
    plugin: bool
    ids: str
    digests: tuple[str, ...]
    report: str
    trust_remote_code: bool
    fresh: bool

    def __post_init__(self) -> None:
        check_mode(self.mode, self.device_type)
        if self.style not in STYLES:
            raise UsageError(f"unknown decode style {self.style!r}", hint=f"use one of: {', '.join(STYLES)}")


def check_mode(mode: str, device_type: str) -> None:
    """Refuse a mode that does not exist, or that the device cannot run.

    Raises
    ------
    UsageError
        Naming the modes there are.
    """
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}", hint=f"use one of: {', '.join(MODES)}")
    if mode.startswith("graphs") and device_type != "cuda":
        raise UsageError(f"mode {mode!r} replays CUDA graphs, which a CPU has not", hint="use eager or compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """What one lane did in this call.

    Parameters
    ----------
    resumed : int
        Contexts found finished.
    repeat_difference : float
        Largest difference of emitted logits when the first batch was run again; 0.0 means the same bits.
    seconds : float
        Spent in the lane.
    """

    resumed: int
    repeat_difference: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """What the engine said of itself.

    Parameters
    ----------
    effective : mapping
        Configuration read back from the engine, without paths.
    plugin : mapping or None
        What this project's plugin resolved.
    lanes : mapping of str to LaneReport
        By lane name.
    embedding_bytes : int or None
        Of the input embedding as run; None where it cannot be told.
    findings : tuple of Finding
        Of counters and kernels.
    start_seconds : float
        From the import of vLLM to an engine that is ready.
    """

    effective: Mapping[str, Any]
    plugin: Mapping[str, Any] | None
    lanes: Mapping[str, LaneReport]
    embedding_bytes: int | None
    findings: tuple[Finding, ...]
    start_seconds: float


def write_request(path: Path, request: ChildRequest) -> None:
    """Write a request, atomically."""
    write_json(path, {"schema": SCHEMA, **asdict(request)})


def read_request(path: Path) -> ChildRequest:
    """Read a request.

    Raises
    ------
    UsageError
        If it is no request of this schema.
    """
    table = _open(path, SCHEMA)
    try:
        table["lanes"] = tuple(LaneTask(**each | {"lane": Lane(**each["lane"])}) for each in table["lanes"])
        table["evidence"] = tuple(Evidence(**each) for each in table["evidence"])
        return ChildRequest(**table | {"digests": tuple(table["digests"])})
    except (TypeError, KeyError) as error:
        raise _foreign(path, "a request", error) from error


def write_report(path: Path, report: ChildReport) -> None:
    """Write a report, atomically."""
    write_json(path, {"schema": REPORT_SCHEMA, **asdict(report)})


def read_report(path: Path) -> ChildReport:
    """Read a report.

    Raises
    ------
    UsageError
        If it is no report of this schema.
    """
    table = _open(path, REPORT_SCHEMA)
    try:
        table["lanes"] = {name: LaneReport(**each) for name, each in table["lanes"].items()}
        return ChildReport(**table | {"findings": tuple(Finding(**each) for each in table["findings"])})
    except (TypeError, KeyError, AttributeError) as error:
        raise _foreign(path, "a report", error) from error


def _open(path: Path, schema: str) -> dict[str, Any]:
    table = read_json(path)
    found = table.pop("schema", None) if isinstance(table, dict) else None
    if found != schema:
        raise _foreign(path, f"of schema {schema}", found)
    return dict(table)


def _foreign(path: Path, what: str, reason: object) -> UsageError:
    return UsageError(f"{path.name} is not {what}: {reason}", hint="run one version of exl3eval on both sides")

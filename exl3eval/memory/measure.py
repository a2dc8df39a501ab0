"""Measuring one arm's memory phase by phase: load, prefill, decode, scoring, and the capture of a CUDA graph.

Every phase starts and ends settled. What a phase keeps is the difference of the two; what it needed besides is its
peak above what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from exl3_kernels.dispatch import measured_on
from exl3_kernels.embedding import Int8Embedding
from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3_kernels.workspace import release_workspaces, workspace_bytes
from exl3eval.bundled import bundled_model
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.device import pin_arithmetic, resolve_device
from exl3eval.engine.graphs import DecodeGraph, cache_argument
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.engine.placement import check_routes
from exl3eval.engine.vocabulary import read_vocabulary
from exl3eval.errors import UsageError
from exl3eval.identity import code_identity, device_identity
from exl3eval.memory.account import KindBytes, weight_bytes
from exl3eval.memory.budget import Budget, Outcome, enforce_budget, judge_failure
from exl3eval.memory.cache import CacheBytes, cache_bytes, formula_bytes
from exl3eval.memory.meter import CpuMeter, CudaMeter, Meter, Reading
from exl3eval.progress import Reporter
from exl3eval.score.divergence import measure_divergences
from exl3eval.score.scoring import BLOCK_LOGITS
from exl3eval.variant import NO_QUANTIZING, Variant, load_variant, resolve_variant

PHASES = ("load", "prefill", "decode", "release", "scoring", "graph")
"""`release` drops the key-value cache; what it gives back is the cache as the allocator counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What to measure.

    Parameters
    ----------
    model : Path or None
        EXL3 or 16-bit directory; None for the bundled EXL3 model.
    variant : str
        Name of a variant, or a `.toml` file; of a 16-bit model only activations and embedding matter.
    activations : str or None
        In place of the variant's.
    positions, decode_positions : int
        Tokens of the prefill, and tokens decoded one at a time after it, per context.
    rows : int
        Contexts side by side.
    budget : int or None
        Bytes that the allocator may reserve.
    device : str
        `auto`, `cpu`, `cuda` or `cuda:N`.
    trust_remote_code : bool
        Let transformers run code from the model directory.

    Raises
    ------
    UsageError
        If a count is not positive.
    """

    model: Path | None = None
    variant: str = "base"
    activations: str | None = None
    positions: int = 512
    decode_positions: int = 32
    rows: int = 1
    budget: int | None = None
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("positions", "decode_positions", "rows", "budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", hint="give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase: readings before it, at its end with its garbage, and settled after it.

    `why` is the reason why the phase did not finish, empty if it did.
    """

    name: str
    before: Reading
    busy: Reading
    after: Reading
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """A finished measurement; what a failed phase would have told is None."""

    request: MemoryRequest
    declared: Variant
    resolved: Variant
    checkpoint: Checkpoint
    checkpoint_sha256: str
    phases: tuple[Phase, ...]
    weights: tuple[KindBytes, ...] | None
    overlay: int | None
    cache: CacheBytes | None
    formula: int | None
    formula_why: str
    workspaces: int | None
    graph_pool: int | None
    graph_why: str
    attention: str | None
    launches: dict[Launch, int]
    unknown: dict[str, str]
    budget: Budget | None
    outcome: Outcome
    code: dict[str, Any]
    device: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Course:
    """What one measurement has made so far, by phase."""

    arm: ArmModel | None = None
    ids_BT: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    cache: Any = None
    hidden_TH: torch.Tensor | None = None
    weights: tuple[KindBytes, ...] | None = None
    overlay: int | None = None
    cache_bytes: CacheBytes | None = None
    prefilled_bytes: int = 0
    workspaces: int | None = None
    graph_pool: int | None = None
    graph_why: str = ""


def measure_memory(request: MemoryRequest, *, num_threads: int, reporter: Reporter) -> MemoryRun:
    """Measure an arm's memory on a device; running out of memory is a finding, not an error.

    Raises
    ------
    UsageError, CheckpointError
        Before a model is loaded, if anything asked for does not exist or does not fit.
    """
    torch.set_num_threads(num_threads)
    pin_arithmetic()
    device = resolve_device(request.device)
    with enforce_budget(request.budget, device) as budget:
        return _measure(request, device, budget, reporter)


def resolve_stored(name: str, activations: str | None, device: torch.device) -> tuple[Variant, Variant]:
    """Return a variant that runs a stored model, as declared and as it runs on a device.

    Parameters
    ----------
    name : str
        Of a variant, or a `.toml` file.
    activations : str or None
        In place of the variant's.
    device : device
        Where it runs.

    Raises
    ------
    UsageError
        If there is no such variant, it quantizes at load, or the device cannot run it.
    """
    declared = load_variant(name)
    if activations is not None:
        declared = replace(declared, activations=activations)
    if declared.quantize != NO_QUANTIZING:
        raise UsageError(
            f"variant `{declared.name}` quantizes the 16-bit model at load",
            hint="make the EXL3 directory with `exl3eval quantize` and measure that",
        )
    return declared, resolve_variant(declared, device.type, measured=measured_on(device))


def _measure(request: MemoryRequest, device: torch.device, budget: Budget | None, reporter: Reporter) -> MemoryRun:
    declared, resolved = resolve_stored(request.variant, request.activations, device)
    if declared.vllm is not None:
        raise UsageError(f"variant `{declared.name}` declares a vLLM stack", hint="add --engine vllm")
    directory = request.model or bundled_model("exl3")
    checkpoint = open_checkpoint(directory)
    check_routes(checkpoint, resolved.linear, device)
    vocabulary = read_vocabulary(directory)
    with reporter.phase("digest model", sum(entry.nbytes for entry in checkpoint.tensors), "bytes") as advance:
        digest = checkpoint_digest(checkpoint, progress=advance)
    meter: Meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    release_workspaces()
    reset_launches()
    course = _Course(ids_BT=_make_ids(request, vocabulary.size, device))
    work: dict[str, Callable[[], None]] = {
        "load": lambda: _load(course, checkpoint, resolved, vocabulary.size, device, request.trust_remote_code),
        "prefill": lambda: _prefill(course, request),
        "decode": lambda: _decode(course, request),
        "release": lambda: _release(course),
        "scoring": lambda: _score(course, vocabulary.size),
        "graph": lambda: _capture_graph(course),
    }
    phases: list[Phase] = []
    failure = None
    with reporter.phase("measure", len(PHASES), "phases") as advance:
        meter.settle()
        settled = meter.read()
        for name in PHASES:
            phase, failure = _observe(meter, name, work[name], settled)
            settled = phase.after
            phases.append(phase)
            advance(1)
            if failure is not None:
                break
    formula, formula_why = formula_bytes(checkpoint.config, resolved.activations)
    return MemoryRun(
        request=request,
        declared=declared,
        resolved=resolved,
        checkpoint=checkpoint,
        checkpoint_sha256=digest,
        phases=tuple(phases),
        weights=course.weights,
        overlay=course.overlay,
        cache=course.cache_bytes,
        formula=formula,
        formula_why=formula_why,
        workspaces=course.workspaces,
        graph_pool=course.graph_pool,
        graph_why=course.graph_why,
        attention=None if course.arm is None else course.arm.attention,
        launches=read_launches(),
        unknown=dict(meter.unknown),
        budget=budget,
        outcome=judge_failure(phases[-1].name, failure, budget),
        code=code_identity(),
        device=device_identity(device),
    )


def _observe(
    meter: Meter, name: str, work: Callable[[], None], before: Reading
) -> tuple[Phase, torch.OutOfMemoryError | None]:
    failure = None
    try:
        work()
    except torch.OutOfMemoryError as error:
        failure = error.with_traceback(None)
    busy = meter.read()
    meter.settle()
    why = "" if failure is None else str(failure).partition(". ")[0]
    return Phase(name=name, before=before, busy=busy, after=meter.read(), why=why), failure


def _make_ids(request: MemoryRequest, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Make int64 [rows, positions + decode_positions]: sizes depend on no content."""
    count = request.rows * (request.positions + request.decode_positions)
    return (torch.arange(count, device=device) * 37 % vocab_size).view(request.rows, -1)


def _load(
    course: _Course, checkpoint: Checkpoint, variant: Variant, vocab_size: int, device: torch.device, trust: bool
) -> None:
    course.arm = load_arm(checkpoint, variant, vocab_size=vocab_size, device=device, trust_remote_code=trust)
    course.weights = weight_bytes(checkpoint, course.arm)
    overlays = [module for module in course.arm.decoder.modules() if isinstance(module, Int8Embedding)]
    course.overlay = sum(overlay.num_bytes for overlay in overlays)


def _release(course: _Course) -> None:
    course.cache = None


@torch.inference_mode()
def _prefill(course: _Course, request: MemoryRequest) -> None:
    from transformers import DynamicCache

    course.cache = DynamicCache()
    course.hidden_TH = _forward(course, course.ids_BT[:, : request.positions])[0].cpu()
    course.prefilled_bytes = cache_bytes(course.cache)
    course.workspaces = workspace_bytes() if course.ids_BT.is_cuda else 0


@torch.inference_mode()
def _decode(course: _Course, request: MemoryRequest) -> None:
    for position in range(request.positions, course.ids_BT.shape[1]):
        _forward(course, course.ids_BT[:, position : position + 1])
    total = cache_bytes(course.cache)
    grown = (total - course.prefilled_bytes) / (request.rows * request.decode_positions)
    first = course.prefilled_bytes / (request.rows * request.positions)
    course.cache_bytes = CacheBytes(per_token=grown, per_prefilled_token=first, total=total)


def _forward(course: _Course, ids_BT: torch.Tensor) -> torch.Tensor:
    assert course.arm is not None
    decoder = course.arm.decoder
    states = decoder(input_ids=ids_BT, use_cache=True, **{cache_argument(decoder): course.cache})
    return states.last_hidden_state


@torch.inference_mode()
def _score(course: _Course, vocab_size: int) -> None:
    """Score a block of positions as a run does: two arms' logits and their divergences."""
    assert course.arm is not None and course.hidden_TH is not None
    block_TH = course.hidden_TH[: max(1, BLOCK_LOGITS // vocab_size)].to(course.arm.device)
    logits_TV, again_TV = course.arm.head.logits(block_TH), course.arm.head.logits(block_TH)
    measure_divergences(logits_TV, {"arm": again_TV}, course.ids_BT[0, : len(block_TH)])


@torch.inference_mode()
def _capture_graph(course: _Course) -> None:
    """Capture the engine's decode step and count the memory that belongs to graphs."""
    arm = course.arm
    assert arm is not None
    if arm.device.type != "cuda":
        course.graph_why = "there are no CUDA graphs on a CPU"
        return
    try:
        graph = DecodeGraph(arm.decoder, course.ids_BT)
    except UsageError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise error.__cause__ from None
        course.graph_why = error.message
        return
    segments = torch.cuda.memory_snapshot()
    course.graph_pool = sum(segment["total_size"] for segment in segments if any(segment["segment_pool_id"]))
    del graph

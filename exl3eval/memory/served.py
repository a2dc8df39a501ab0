"""Memory of an arm as vLLM serves it: its limits, what it holds, and planted secrets asked back at full length."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl3eval.arm import ArmSpec
from exl3eval.bundled import bundled_model
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.device import resolve_device
from exl3eval.engine.placement import check_routes
from exl3eval.errors import UsageError
from exl3eval.identity import code_identity, device_identity
from exl3eval.memory.measure import resolve_stored
from exl3eval.progress import Reporter
from exl3eval.records import digest_value
from exl3eval.settings import Settings
from exl3eval.smoke.needle import Needle, make_needles
from exl3eval.suite.load import load_suite
from exl3eval.suite.tokens import TokenContext, load_tokenizer, tokenize_suite
from exl3eval.vllm_engine.arms import stage_model
from exl3eval.vllm_engine.environment import Interpreter, child_environment, declared_environment, find_interpreter
from exl3eval.vllm_engine.memory import FITS, EngineMemory, EngineMemoryRequest, MemoryProbe, measure_engine_memory
from exl3eval.vllm_engine.plan import VllmArm, execution_mode
from exl3eval.vllm_engine.process import LOG_FILE
from exl3eval.vllm_engine.request import check_mode
from exl3eval.vllm_engine.session import plugin_variant
from exl3eval.vllm_engine.stack import Finding, VllmStack, check_findings, find_lines

SCHEMA = "exl3eval/memory-served/1"
ENGINE_BUDGET_FRAC = 0.9
CPU_CACHE_BYTES = 1 << 30
DEPTHS = (0.0, 0.5, 1.0)
SEED = 1
PIECE_TOKENS = 2048
ANSWER_TOKENS = 16
MIN_MODEL_LEN = 64
LIMIT_OPTIONS = {
    "gpu_memory_utilization": "give --engine-budget",
    "kv_cache_memory_bytes": "leave it out: the cache is what the limits leave",
    "max_num_seqs": "give --max-num-seqs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What to serve, and under which limits.

    Parameters
    ----------
    model : Path or None
        EXL3 or 16-bit directory; None for the bundled EXL3 model.
    variant : str
        Name of a variant, or a `.toml` file.
    activations : str or None
        In place of the variant's.
    engine_budget : float or None
        vLLM's `gpu_memory_utilization`, in 0..1; None for `ENGINE_BUDGET_FRAC` on a GPU.
    hard_cap : int or None
        Bytes that the allocator may reserve.
    max_model_len : int
        Longest request in tokens; the probes are that long, room for an answer included.
    max_num_seqs : int
        Requests that the engine prepares for side by side.
    device : str
        `auto`, `cpu`, `cuda` or `cuda:N`.
    trust_remote_code : bool
        Let vLLM run code from the model directory.

    Raises
    ------
    UsageError
        If a number is outside its range.
    """

    model: Path | None = None
    variant: str = "base"
    activations: str | None = None
    engine_budget: float | None = None
    hard_cap: int | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 8
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.engine_budget is not None and not 0 < self.engine_budget <= 1:
            raise UsageError(f"--engine-budget is {self.engine_budget}", hint="give a share of the device in 0..1")
        for option, value, least in (
            ("--budget in bytes", self.hard_cap, 1),
            ("--max-model-len", self.max_model_len, MIN_MODEL_LEN),
            ("--max-num-seqs", self.max_num_seqs, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{option} is {value}", hint=f"give {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A finished account: what was served, under which limits, and what became of it."""

    identity: dict[str, Any]
    memory: EngineMemory
    evidence: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether the engine started and served every probe to its end."""
        return self.memory.outcome == FITS and all(each.finished for each in self.memory.requests)


def measure_served(request: ServedRequest, settings: Settings, *, reporter: Reporter) -> ServedRun:
    """Serve an arm with vLLM in a fresh process and account for its memory; not fitting is a finding, not an error.

    Parameters
    ----------
    request : ServedRequest
        What to serve.
    settings : Settings
        Interpreter, cache folder, and the environment of which the process gets a few names.
    reporter : Reporter
        Told about progress.

    Raises
    ------
    UsageError, CheckpointError
        If vLLM, model or variant cannot be had, the device cannot enforce a limit, or the engine fails for another
        reason than memory.
    InvalidRunError
        If the variant's stack left no trace in the log.
    """
    device = resolve_device(request.device)
    _check_limits(request, device)
    declared, resolved = resolve_stored(request.variant, request.activations, device)
    mode = execution_mode(compiled=False, graph=resolved.graphs != "off")
    check_mode(mode, device.type)
    interpreter = _interpreter(declared.vllm, settings)
    checkpoint = open_checkpoint(request.model or bundled_model("exl3"))
    check_routes(checkpoint, resolved.linear, device)
    _check_length(request.max_model_len, checkpoint.config)
    text, needles = _make_needles(checkpoint.directory, request.max_model_len, settings.cache_dir)
    with reporter.phase("digest model", sum(entry.nbytes for entry in checkpoint.tensors), "bytes") as advance:
        sha256 = checkpoint_digest(checkpoint, progress=advance)
    spec = ArmSpec(
        name=declared.name,
        checkpoint=checkpoint,
        checkpoint_sha256=sha256,
        declared=declared,
        resolved=resolved,
        lanes=(),
    )
    arm = VllmArm(name=spec.name, spec=spec, mode=mode, lanes=(), stack=declared.vllm)
    variables = declared_environment(device_type=device.type, mode=mode, plugin=plugin_variant(arm), stack=arm.stack)
    gpu = device.type == "cuda"
    budget_frac = request.engine_budget or ENGINE_BUDGET_FRAC
    cache_bytes = None if gpu else CPU_CACHE_BYTES
    identity = {
        "model": {
            "sha256": sha256,
            "form": "exl3" if checkpoint.is_exl3 else "16-bit",
            "model_type": checkpoint.config.get("model_type"),
        },
        "declared": declared.identity,
        "resolved": resolved.identity,
        "engine": "vllm",
        "mode": mode,
        "limits": {
            "engine_budget": budget_frac if gpu else None,
            "hard_cap_bytes": request.hard_cap,
            "kv_cache_bytes": cache_bytes,
            "max_model_len": request.max_model_len,
            "max_num_seqs": request.max_num_seqs,
        },
        "probes": {"depths": list(DEPTHS), "seed": SEED, "text_sha256": text.digest},
        "interpreter": interpreter.identity,
        "environment": variables,
        "trust_remote_code": request.trust_remote_code,
        "code": code_identity(),
        "device": device_identity(device),
    }
    folder = settings.cache_dir / "vllm" / digest_value(identity)[:32]
    with reporter.phase(f"serve {arm.name}", len(needles), "requests") as advance:
        memory = measure_engine_memory(
            EngineMemoryRequest(
                arm=arm.name,
                model=str(stage_model(checkpoint, folder)),
                mode=mode,
                activations=resolved.activations,
                device_type=device.type,
                arguments=({"trust_remote_code": True} if request.trust_remote_code else {})
                | (dict(arm.stack.arguments) if arm.stack else {}),
                max_model_len=request.max_model_len,
                max_num_seqs=request.max_num_seqs,
                budget_frac=budget_frac,
                hard_cap_bytes=request.hard_cap,
                kv_cache_bytes=cache_bytes,
                probes=tuple(_probe(needle) for needle in needles),
            ),
            python=interpreter.python,
            environment=child_environment(
                settings.environment, variables, cache_dir=settings.cache_dir, device_index=device.index
            ),
            folder=folder,
        )
        advance(len(memory.requests))
    return ServedRun(identity=identity, memory=memory, evidence=_find_evidence(arm, memory, folder))


def build_served_receipt(run: ServedRun) -> dict[str, Any]:
    """Assemble the receipt of an account."""
    results = {**asdict(run.memory), "fits": run.fits, "evidence": [asdict(finding) for finding in run.evidence]}
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": run.identity,
        "identity_digest": digest_value(run.identity),
        "results": results,
        "results_digest": digest_value(results),
    }


def _check_limits(request: ServedRequest, device: torch.device) -> None:
    """Refuse a limit that this device cannot enforce, or that would limit nothing."""
    if device.type != "cuda":
        for option, value, why in (
            ("--budget", request.hard_cap, "torch cannot cap CPU memory"),
            ("--engine-budget", request.engine_budget, "on a CPU vLLM gets a cache of a fixed size"),
        ):
            if value is not None:
                raise UsageError(f"{option} needs a GPU: {why}", hint="leave it out, or --device cuda")
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if request.hard_cap is not None and request.hard_cap > total:
        raise UsageError(
            f"the budget of {request.hard_cap / (1 << 30):.2f} GiB exceeds the {total / (1 << 30):.2f} GiB of {device}",
            hint="give a smaller --budget, or none",
        )


def _check_length(max_model_len: int, config: Mapping[str, Any]) -> None:
    """Refuse a length that the model was not made for; a scaled rotary embedding is vLLM's to judge."""
    text = config.get("text_config", config)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    known = text.get("max_position_embeddings")
    if known is not None and "factor" not in rope and max_model_len > known:
        raise UsageError(
            f"--max-model-len is {max_model_len}, more than the {known} positions of this model",
            hint=f"give {known} or less",
        )


def _interpreter(stack: VllmStack | None, settings: Settings) -> Interpreter:
    """Find the interpreter of an arm; its stack may set no limit, and proves itself by the log, all that is read."""
    if stack is None:
        return find_interpreter(settings.vllm_python, packages=())
    if unseen := [each for each in stack.evidence if each.kind != "log"]:
        raise UsageError(
            f"evidence {unseen[0].kind} = {unseen[0].pattern!r} is not seen here: a memory account reads the log alone",
            hint="declare `log` evidence in the [vllm] table",
        )
    if limits := sorted(LIMIT_OPTIONS.keys() & stack.arguments.keys()):
        raise UsageError(f"[vllm] arguments sets `{limits[0]}`", hint=LIMIT_OPTIONS[limits[0]])
    return find_interpreter(stack.interpreter or settings.vllm_python, packages=stack.packages)


def _find_evidence(arm: VllmArm, memory: EngineMemory, folder: Path) -> tuple[Finding, ...]:
    """Look for what the stack promised in the log; an engine that did not fit may have ended before it."""
    if arm.stack is None:
        return ()
    lines = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    findings = tuple(find_lines(each, lines) for each in arm.stack.evidence)
    if memory.outcome == FITS:
        check_findings(arm.name, findings)
    return findings


def _make_needles(directory: Path, max_model_len: int, cache_dir: Path) -> tuple[TokenContext, tuple[Needle, ...]]:
    """Return held-out text that fills the longest request, and that text with a secret at every depth."""
    length = max_model_len - ANSWER_TOKENS
    tokens = tokenize_suite(
        load_suite(),
        directory,
        num_contexts=-(-length // (PIECE_TOKENS - 1)),
        num_tokens=min(length, PIECE_TOKENS),
        seed=SEED,
        cache_dir=cache_dir,
    )
    text = _join(tokens.contexts, length, bos_id=tokens.bos_id)
    tokenizer = load_tokenizer(directory)
    try:
        needles = make_needles(
            (text,),
            DEPTHS,
            length=length,
            seed=SEED,
            encode=lambda words: tokenizer(words, add_special_tokens=False)["input_ids"],
        )
    except UsageError as error:
        raise UsageError(error.message, hint="give a larger --max-model-len") from error
    return text, tuple(needle for needle in needles if needle.depth is not None)


def _join(contexts: Sequence[TokenContext], length: int, *, bos_id: int | None) -> TokenContext:
    """Put contexts end to end, with one BOS at most, and cut them to `length` ids."""
    first, *others = contexts
    ids = np.concatenate([first.ids, *(each.ids[0 if bos_id is None else 1 :] for each in others)])[:length]
    return replace(first, ids=ids, digest=hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest())


def _probe(needle: Needle) -> MemoryProbe:
    return MemoryProbe(prompt=tuple(needle.prompt.tolist()), expected=tuple(needle.secret.tolist()))

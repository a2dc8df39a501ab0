"""The main job: contexts -> arms -> positions -> comparison -> receipt.

Arms of one run: the reference; the reference again at the other precision (its own rounding floor);
outside prefill the reference in the lane under test (what the lane itself moves); the baseline variant;
and the variant. Everything that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from exl3_kernels.routes import Launch
from exl3eval.bundled import bundled_model
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.compare import (
    ArmSummary,
    Comparison,
    Resampling,
    check_sanity,
    compare_arms,
    summarise_arm,
)
from exl3eval.engine.capture import Capture, capture_arm
from exl3eval.engine.device import pin_arithmetic, resolve_device
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import EmbeddingBytes, load_arm
from exl3eval.engine.placement import check_routes
from exl3eval.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.identity import code_identity, device_identity, engine_contract_digest
from exl3eval.progress import Reporter
from exl3eval.score.candidates import list_candidates
from exl3eval.score.positions import build_table, split_arms
from exl3eval.score.scoring import ScoredArm, ScoredContext, Scores, score_arms
from exl3eval.suite.load import Suite, load_suite
from exl3eval.suite.tokens import TokenSuite, tokenize_suite
from exl3eval.variant import Variant, load_variant, resolve_variant

REFERENCE = "reference"
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class KldRequest:
    """What to measure. The defaults are the main job on the bundled model.

    Parameters
    ----------
    model, reference : Path or None
        EXL3 and BF16 directories; both None for the bundled model.
    variant, baseline : str
        Variant names or `.toml` files; the paired delta is variant minus baseline.
    suite : Path or None
        Suite folder, None for the shipped one.
    split : str
        `analysis`; `qualification` is sealed and must be asked for.
    num_contexts : int or None
        A balanced prefix of the suite's permutation, None for all.
    num_positions : int
        Scored predictions per context.
    reference_precision : str
        Arithmetic of the reference's activations: `float32` or `bfloat16`.
    lane : Lane
        How contexts are fed to the arms under test; the reference itself always runs in one prefill.
    device : str
        `auto`, `cpu`, `cuda` or `cuda:N`.
    seed : int
        Of the context order and of resampling.
    trust_remote_code : bool
        Let transformers run code from the model directories.
    fresh : bool
        Ignore captures of earlier runs.
    """

    model: Path | None = None
    reference: Path | None = None
    variant: str = "base"
    baseline: str = "base"
    suite: Path | None = None
    split: str = "analysis"
    num_contexts: int | None = None
    num_positions: int = 512
    reference_precision: str = "float32"
    lane: Lane = field(default_factory=lambda: Lane(kind="prefill"))
    device: str = "auto"
    seed: int = 1
    trust_remote_code: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm to run."""

    name: str
    checkpoint: Checkpoint
    checkpoint_sha256: str
    declared: Variant
    resolved: Variant
    lane: Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """What one arm was and did; `launches` counts its body and its head."""

    spec: ArmSpec
    capture: Capture
    launches: dict[Launch, int]
    embedding_bytes: EmbeddingBytes
    attention: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KldRun:
    """A finished measurement."""

    request: KldRequest
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    arms: dict[str, ArmRecord]
    scores: Scores
    table: pa.Table
    candidates: pa.Table
    summaries: dict[str, ArmSummary]
    comparison: Comparison
    resampling: Resampling
    code: dict[str, Any]
    device: dict[str, Any]

    @property
    def floor_arm(self) -> str:
        """Name of the reference at its other precision."""
        return floor_name(self.request)


def floor_precision(request: KldRequest) -> str:
    """Return the precision that the reference is not evaluated in."""
    return next(precision for precision in PRECISIONS if precision != request.reference_precision)


def floor_name(request: KldRequest) -> str:
    """Name the arm that evaluates the reference at the other precision."""
    return f"{REFERENCE}-{floor_precision(request)}"


def _model_directories(request: KldRequest) -> tuple[Path, Path]:
    if request.model is None and request.reference is None:
        return bundled_model("exl3"), bundled_model("bf16")
    if request.model is None:
        raise UsageError("--reference was given without --model", hint="give the EXL3 directory with --model")
    if request.reference is None:
        raise UsageError(
            "--model was given without --reference", hint="give the BF16 directory that the model was made from"
        )
    return request.model, request.reference


def _check_request(request: KldRequest) -> None:
    if request.reference_precision not in PRECISIONS:
        raise UsageError(
            f"--reference-precision is {request.reference_precision!r}", hint=f"use one of: {', '.join(PRECISIONS)}"
        )
    if request.num_positions < 1:
        raise UsageError(f"--positions is {request.num_positions}", hint="score at least 1 position per context")
    if request.num_contexts is not None and request.num_contexts < 1:
        raise UsageError(f"--num-contexts is {request.num_contexts}", hint="score at least 1 context")


def lane_control_name(request: KldRequest) -> str:
    """Name the unquantized control: the reference in the lane under test."""
    return f"{REFERENCE}-{request.lane.slug}"


def _reference_arms(request: KldRequest) -> dict[str, tuple[Variant, Lane]]:
    """Return the reference, its other precision, and outside prefill the reference in the lane under test."""
    prefill = replace(request.lane, kind="prefill", rows=None)
    arms = {
        REFERENCE: (request.reference_precision, prefill),
        floor_name(request): (floor_precision(request), prefill),
    }
    if request.lane.kind != "prefill":
        arms[lane_control_name(request)] = (request.reference_precision, request.lane)
    return {
        name: (
            Variant(
                name=name,
                doc=f"The BF16 weights with {precision} activations, {lane.name}.",
                activations=precision,
                linear="1-:reference",
                embedding="stored",
            ),
            lane,
        )
        for name, (precision, lane) in arms.items()
    }


def _candidate_names(request: KldRequest, variants: dict[str, Variant]) -> dict[str, str]:
    """Map arm names to what was asked for; a variant against itself runs twice and must give the same bits."""
    baseline, variant = variants[request.baseline].name, variants[request.variant].name
    return {baseline: request.baseline, variant if variant != baseline else f"{variant}-repeat": request.variant}


def check_engagement(record: ArmRecord) -> None:
    """Prove from counters that an arm ran what its variant declares.

    Raises
    ------
    InvalidRunError
        If a required route never launched, or a forbidden one did.
    """
    variant = record.spec.resolved
    counts = Counter[str]()
    for launch, count in record.launches.items():
        counts[launch.route] += count
    seen = ", ".join(f"{route} x {count}" for route, count in sorted(counts.items())) or "no EXL3 launch"
    for route in variant.requires:
        if not counts[route]:
            raise InvalidRunError(
                f"arm `{record.spec.name}` declares route `{route}`, which launched 0 times in lane "
                f"{record.spec.lane.name} ({seen})",
                hint="choose a lane whose row counts reach the route; a claim about a route that never ran is void",
            )
    for route in variant.forbids:
        if counts[route]:
            raise InvalidRunError(
                f"arm `{record.spec.name}` forbids route `{route}`, which launched {counts[route]} times ({seen})",
                hint="the dispatch sends rows there: change the variant",
            )


def _check_lane(request: KldRequest, variants: Iterable[Variant]) -> None:
    for variant in variants:
        if variant.lanes and request.lane.kind not in variant.lanes:
            raise UsageError(
                f"variant `{variant.name}` says nothing in lane {request.lane.name}",
                hint=f"use --lane {variant.lanes[0]}",
            )
    request.lane.first_scored(request.num_positions)


def _digest_checkpoint(checkpoint: Checkpoint, label: str, reporter: Reporter) -> str:
    with reporter.phase(f"digest {label}", sum(entry.nbytes for entry in checkpoint.tensors), "bytes") as advance:
        return checkpoint_digest(checkpoint, progress=advance)


def run_kld(request: KldRequest, *, cache_dir: Path, num_threads: int, reporter: Reporter) -> KldRun:
    """Measure a variant against its baseline and the reference.

    Parameters
    ----------
    request : KldRequest
        What to measure.
    cache_dir : Path
        Token ids and captures live here; a killed run continues from it.
    num_threads : int
        CPU threads.
    reporter : Reporter
        Told about progress.

    Raises
    ------
    UsageError, CheckpointError, SuiteError
        Before any model is loaded, if anything asked for does not exist or does not fit.
    InvalidRunError
        If an arm ran but its result must not be read as a number.
    """
    _check_request(request)
    torch.set_num_threads(num_threads)
    pin_arithmetic()
    device = resolve_device(request.device)
    variants = {name: load_variant(name) for name in dict.fromkeys((request.baseline, request.variant))}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    resolved = {name: resolve_variant(variant, device.type, gpu=gpu) for name, variant in variants.items()}
    _check_lane(request, variants.values())
    model_dir, reference_dir = _model_directories(request)
    model, reference = open_checkpoint(model_dir), open_checkpoint(reference_dir)
    if reference.is_exl3 or reference.quant_method:
        raise UsageError(
            f"the reference {reference_dir.name} is quantized ({reference.quant_method or 'exl3'})",
            hint="the reference is the 16-bit model",
        )
    if model.quant_method not in (None, "exl3"):
        raise UsageError(f"{model_dir.name} is quantized as {model.quant_method}", hint="give an EXL3 directory")
    for variant in resolved.values():
        check_routes(model, variant.linear, device)
    vocabulary = read_vocabulary(reference_dir)
    check_same_vocabulary(vocabulary, read_vocabulary(model_dir))
    suite = load_suite(request.suite)
    tokens = tokenize_suite(
        suite,
        reference_dir,
        split=request.split,
        num_contexts=request.num_contexts,
        num_tokens=request.num_positions + 1,
        seed=request.seed,
        cache_dir=cache_dir,
    )
    model_sha = _digest_checkpoint(model, "model", reporter)
    reference_sha = _digest_checkpoint(reference, "reference", reporter)
    specs = [
        *(
            ArmSpec(name=name, checkpoint=reference, checkpoint_sha256=reference_sha, declared=v, resolved=v, lane=lane)
            for name, (v, lane) in _reference_arms(request).items()
        ),
        *(
            ArmSpec(
                name=name,
                checkpoint=model,
                checkpoint_sha256=model_sha,
                declared=variants[source],
                resolved=resolved[source],
                lane=request.lane,
            )
            for name, source in _candidate_names(request, variants).items()
        ),
    ]
    code = code_identity()
    records, scored = _run_arms(request, specs, tokens, vocabulary, device, code, cache_dir, num_threads, reporter)
    first = request.lane.first_scored(request.num_positions)
    contexts = [
        ScoredContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids_digest=c.digest, ids=c.ids, first=first)
        for c in tokens.contexts
    ]
    arms = {name: arm for name, arm in scored.items() if name != REFERENCE}
    with reporter.phase("score", len(contexts) * (request.num_positions - first), "positions") as advance:
        scores = score_arms(
            scored[REFERENCE],
            arms,
            contexts,
            reference_name=REFERENCE,
            num_threads=num_threads if device.type == "cpu" else 1,
            on_context=advance,
        )
    records = {
        name: replace(record, launches=dict(Counter(record.launches) + Counter(scores.launches[name])))
        for name, record in records.items()
    }
    for record in records.values():
        check_engagement(record)
    table = build_table(scores.placed)
    resampling = Resampling(seed=request.seed)
    baseline_name, variant_name = specs[-2].name, specs[-1].name
    summaries, comparison = reduce_positions(
        table,
        baseline=baseline_name,
        variant=variant_name,
        vocab_size=vocabulary.size,
        resampling=resampling,
        num_threads=num_threads,
        reporter=reporter,
    )
    worst = {each.context for name in (baseline_name, variant_name) for each in summaries[name].worst}
    return KldRun(
        request=request,
        suite=suite,
        tokens=tokens,
        vocabulary=vocabulary,
        arms=records,
        scores=scores,
        table=table,
        candidates=list_candidates(scored, [context for context in contexts if context.name in worst]),
        summaries=summaries,
        comparison=comparison,
        resampling=resampling,
        code=code,
        device=device_identity(device),
    )


def reduce_positions(
    table: pa.Table,
    *,
    baseline: str,
    variant: str,
    vocab_size: int,
    resampling: Resampling,
    num_threads: int,
    reporter: Reporter,
) -> tuple[dict[str, ArmSummary], Comparison]:
    """Compute every headline from the positions table alone.

    Raises
    ------
    InvalidRunError
        If an arm is broken rather than lossy.
    """
    arms = split_arms(table)
    with (
        ThreadPoolExecutor(max_workers=num_threads) as pool,
        reporter.phase("resample", len(arms) + 1, "estimates") as advance,
    ):
        summaries = {}
        for name, rows in arms.items():
            summaries[name] = summarise_arm(name, rows, resampling, executor=pool)
            advance(1)
        check_sanity(list(summaries.values()), vocab_size)
        comparison = compare_arms((baseline, arms[baseline]), (variant, arms[variant]), resampling, executor=pool)
        advance(1)
    return summaries, comparison


def _run_arms(
    request: KldRequest,
    specs: list[ArmSpec],
    tokens: TokenSuite,
    vocabulary: Vocabulary,
    device: torch.device,
    code: dict[str, Any],
    cache_dir: Path,
    num_threads: int,
    reporter: Reporter,
) -> tuple[dict[str, ArmRecord], dict[str, ScoredArm]]:
    inputs = [(context.digest, torch.from_numpy(context.ids[:-1].copy())) for context in tokens.contexts]
    machine = device_identity(device)
    engine = engine_contract_digest(code)
    records: dict[str, ArmRecord] = {}
    scored: dict[str, ScoredArm] = {}
    for spec in specs:
        arm = load_arm(
            spec.checkpoint,
            spec.resolved,
            vocab_size=vocabulary.size,
            device=device,
            trust_remote_code=request.trust_remote_code,
        )
        contract = {
            "arm": spec.name,
            "checkpoint": spec.checkpoint_sha256,
            "variant": asdict(spec.resolved),
            "tokens": tokens.digest,
            "engine": engine,
            "device": machine,
            "attention": arm.attention,
            "lane": spec.lane.name,
            "scored": spec.lane.scored,
        }
        with reporter.phase(f"run {spec.name}", len(inputs) * request.num_positions, "positions") as advance:
            capture = capture_arm(
                arm,
                inputs,
                lane=spec.lane,
                contract=contract,
                cache_dir=cache_dir,
                fresh=request.fresh,
                num_threads=num_threads if device.type == "cpu" else 1,
                on_context=advance,
            )
        records[spec.name] = ArmRecord(
            spec=spec,
            capture=capture,
            launches=capture.launches,
            embedding_bytes=arm.embedding_bytes,
            attention=arm.attention,
        )
        scored[spec.name] = ScoredArm(
            capture=capture,
            head=arm.head if spec.resolved.head == "own" else scored[REFERENCE].head,
            device=device,
            head_rows=spec.lane.head_rows,
            round_logits=spec.resolved.logits == "bfloat16",
        )
        del arm
        gc.collect()
    return records, scored

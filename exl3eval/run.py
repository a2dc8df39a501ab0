"""The main job: contexts -> arms -> positions -> comparison -> receipt.

Arms of one run: the reference; the reference again at the other precision (its own rounding floor); outside prefill
the reference in the lanes under test (what a lane itself moves); the baseline variant; and the variant. Each arm runs
in a process of its own. Everything that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from exl3eval.arm import ArmOutcome, ArmRecord, ArmSpec, ArmTask, arm_contract, check_engagement, run_arm
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.compare import (
    ArmSummary,
    Comparison,
    Resampling,
    check_sanity,
    compare_arms,
    summarise_arm,
)
from exl3eval.engine.device import pin_arithmetic, resolve_device
from exl3eval.engine.head import Head
from exl3eval.engine.lanes import Lane
from exl3eval.engine.placement import check_routes
from exl3eval.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from exl3eval.errors import InvalidRunError
from exl3eval.floors import NUM_CONTEXTS as FLOOR_CONTEXTS
from exl3eval.floors import FloorContext, label_floor
from exl3eval.identity import code_identity, device_identity, engine_contract_digest
from exl3eval.isolation import run_isolated, start_server
from exl3eval.online import quantize_at_load
from exl3eval.progress import Reporter
from exl3eval.request import (
    PREFILL,
    REFERENCE,
    KldRequest,
    candidate_lanes,
    candidate_names,
    check_lanes,
    check_request,
    floor_name,
    floor_precision,
    lane_control_name,
    open_models,
    reference_variant,
    shared_head_name,
)
from exl3eval.score.candidates import list_candidates
from exl3eval.score.positions import build_table, split_arms
from exl3eval.score.scoring import ScoredArm, ScoredContext, Scores, score_arms
from exl3eval.suite.load import Suite, load_suite
from exl3eval.suite.tokens import TokenSuite, tokenize_suite
from exl3eval.variant import NO_QUANTIZING, load_variant, resolve_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class KldRun:
    """A finished measurement in one lane."""

    request: KldRequest
    lane: Lane
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    arms: dict[str, ArmRecord]
    scores: Scores
    table: pa.Table
    floors: pa.Table
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

    @property
    def lane_control(self) -> str | None:
        """Name of the reference in the baseline's lane; None in prefill."""
        return self._control_of(self.comparison.baseline)

    @property
    def graph_control(self) -> str | None:
        """Name of the reference in the variant's lane, where that is not the baseline's."""
        control = self._control_of(self.comparison.variant)
        return None if control == self.lane_control else control

    def _control_of(self, arm: str) -> str | None:
        name = lane_control_name(self.arms[arm].lane)
        return name if name in self.arms else None


def _digest_checkpoint(checkpoint: Checkpoint, label: str, reporter: Reporter) -> str:
    with reporter.phase(f"digest {label}", sum(entry.nbytes for entry in checkpoint.tensors), "bytes") as advance:
        return checkpoint_digest(checkpoint, progress=advance)


def run_kld(request: KldRequest, *, cache_dir: Path, num_threads: int, reporter: Reporter) -> list[KldRun]:
    """Measure a variant against its baseline and the reference, lane by lane.

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

    Returns
    -------
    list of KldRun
        One per lane, in the order asked for.

    Raises
    ------
    UsageError, CheckpointError, SuiteError
        Before any model is loaded, if anything asked for does not exist or does not fit.
    InvalidRunError
        If an arm ran but its result must not be read as a number.
    """
    check_request(request)
    torch.set_num_threads(num_threads)
    pin_arithmetic()
    device = resolve_device(request.device)
    start_server()
    variants = {name: load_variant(name) for name in dict.fromkeys((request.baseline, request.variant))}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    resolved = {name: resolve_variant(variant, device.type, gpu=gpu) for name, variant in variants.items()}
    check_lanes(request, variants.values())
    model, reference = open_models(request)
    for variant in resolved.values():
        check_routes(model, variant.linear, device)
    vocabulary = read_vocabulary(reference.directory)
    check_same_vocabulary(vocabulary, read_vocabulary(model.directory))
    suite = load_suite(request.suite)
    tokens = tokenize_suite(
        suite,
        reference.directory,
        split=request.split,
        num_contexts=request.num_contexts,
        num_tokens=request.num_positions + 1,
        seed=request.seed,
        cache_dir=cache_dir,
    )
    model_sha = _digest_checkpoint(model, "model", reporter)
    reference_sha = _digest_checkpoint(reference, "reference", reporter)
    under_test = list(dict.fromkeys(lane for v in variants.values() for lane in candidate_lanes(request.lanes, v)))
    references = {
        REFERENCE: (request.reference_precision, (PREFILL, *(lane for lane in under_test if lane != PREFILL))),
        floor_name(request): (floor_precision(request), (PREFILL,)),
    }
    checkpoints = dict.fromkeys(variants, (model, model_sha))
    for name, variant in resolved.items():
        if variant.quantize != NO_QUANTIZING:
            made = quantize_at_load(
                reference,
                reference_sha,
                variant.quantize,
                seed=request.seed,
                device=device,
                cache_dir=cache_dir,
                num_threads=num_threads,
                reporter=reporter,
            )
            check_routes(made, variant.linear, device)
            checkpoints[name] = made, _digest_checkpoint(made, name, reporter)
    specs = [
        *(
            ArmSpec(
                name=name,
                checkpoint=reference,
                checkpoint_sha256=reference_sha,
                declared=reference_variant(name, precision),
                resolved=reference_variant(name, precision),
                lanes=lanes,
                is_reference=True,
            )
            for name, (precision, lanes) in references.items()
        ),
        *(
            ArmSpec(
                name=name,
                checkpoint=checkpoints[source][0],
                checkpoint_sha256=checkpoints[source][1],
                declared=variants[source],
                resolved=resolved[source],
                lanes=candidate_lanes(request.lanes, variants[source]),
            )
            for name, source in candidate_names(request, variants).items()
        ),
    ]
    code = code_identity()
    session = _Session(
        request=request,
        suite=suite,
        tokens=tokens,
        vocabulary=vocabulary,
        device=device,
        code=code,
        machine=device_identity(device),
        cache_dir=cache_dir,
        num_threads=num_threads,
        reporter=reporter,
    )
    outcomes = {spec.name: session.run(spec) for spec in specs}
    heads = {
        spec.name: outcomes[spec.name].probe.load(spec, vocab_size=vocabulary.size, device=device) for spec in specs
    }
    return [session.score_lane(lane, specs, outcomes, heads) for lane in request.lanes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What every step of one call shares."""

    request: KldRequest
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    device: torch.device
    code: dict[str, Any]
    machine: dict[str, Any]
    cache_dir: Path
    num_threads: int
    reporter: Reporter

    def run(self, spec: ArmSpec) -> ArmOutcome:
        """Run one arm in a process of its own."""
        floors = self.tokens.contexts[:FLOOR_CONTEXTS] if spec.name != floor_name(self.request) else ()
        task = ArmTask(
            spec=spec,
            contexts=tuple((c.digest, torch.from_numpy(c.ids[:-1].copy())) for c in self.tokens.contexts),
            floor_contexts=tuple(
                FloorContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids=c.ids) for c in floors
            ),
            contract=arm_contract(
                spec, tokens=self.tokens.digest, engine=engine_contract_digest(self.code), device=self.machine
            ),
            vocab_size=self.vocabulary.size,
            device=str(self.device),
            cache_dir=self.cache_dir,
            num_threads=self.num_threads,
            trust_remote_code=self.request.trust_remote_code,
            fresh=self.request.fresh,
        )
        return run_isolated(run_arm, task, self.reporter, label=f"arm `{spec.name}`")

    def score_lane(
        self,
        lane: Lane,
        specs: list[ArmSpec],
        outcomes: Mapping[str, ArmOutcome],
        heads: Mapping[str, Head],
    ) -> KldRun:
        """Score every arm of one lane, and reduce the positions to numbers."""
        request = self.request
        records = _lane_records(lane, specs, outcomes)
        scored = {name: self._scored_arm(record, heads) for name, record in records.items()}
        baseline, variant = specs[-2].name, specs[-1].name
        for name in (baseline, variant) if request.shared_head else ():
            record = records[name]
            records[shared_head_name(name)] = replace(
                record,
                spec=replace(record.spec, resolved=replace(record.spec.resolved, head="reference")),
            )
            scored[shared_head_name(name)] = replace(scored[name], head=heads[REFERENCE])
        first = lane.first_scored(request.num_positions)
        contexts = [
            ScoredContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids_digest=c.digest, ids=c.ids, first=first)
            for c in self.tokens.contexts
        ]
        with self.reporter.phase(
            f"score {lane.name}", len(contexts) * (request.num_positions - first), "positions"
        ) as advance:
            scores = score_arms(
                scored[REFERENCE],
                {name: arm for name, arm in scored.items() if name != REFERENCE},
                contexts,
                reference_name=REFERENCE,
                num_threads=self.num_threads if self.device.type == "cpu" else 1,
                on_context=advance,
            )
        records = {
            name: replace(record, launches=dict(Counter(record.launches) + Counter(scores.launches[name])))
            for name, record in records.items()
        }
        for record in records.values():
            check_engagement(record)
        table = build_table(scores.placed)
        for name in (baseline, variant) if request.shared_head else ():
            check_identical_head(table, name, heads[name], heads[REFERENCE])
        resampling = Resampling(seed=request.seed)
        summaries, comparison = reduce_positions(
            table,
            baseline=baseline,
            variant=variant,
            vocab_size=self.vocabulary.size,
            resampling=resampling,
            num_threads=self.num_threads,
            reporter=self.reporter,
        )
        worst = {each.context for name in (baseline, variant) for each in summaries[name].worst}
        measured = [
            replace(placed, arm=label_floor(placed.arm, name))
            for name, record in records.items()
            if "@" not in name
            for placed in outcomes[record.spec.name].floors.get(record.lane.name, [])
        ]
        return KldRun(
            request=request,
            lane=lane,
            suite=self.suite,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            arms=records,
            scores=scores,
            table=table,
            floors=build_table(measured),
            candidates=list_candidates(scored, [context for context in contexts if context.name in worst]),
            summaries=summaries,
            comparison=comparison,
            resampling=resampling,
            code=self.code,
            device=self.machine,
        )

    def _scored_arm(self, record: ArmRecord, heads: Mapping[str, Head]) -> ScoredArm:
        spec = record.spec
        return ScoredArm(
            capture=record.capture,
            head=heads[spec.name if spec.resolved.head == "own" else REFERENCE],
            device=self.device,
            head_rows=record.lane.head_rows,
            round_logits=spec.resolved.logits == "bfloat16",
        )


def check_identical_head(table: pa.Table, arm: str, own: Head, reference: Head) -> None:
    """Hold an arm whose head is the reference's to exactly 0 between its two head lanes.

    Raises
    ------
    InvalidRunError
        If the heads have the same bytes and a divergence differs.
    """
    weights = [head.module.weight for head in (own, reference) if isinstance(head.module, torch.nn.Linear)]
    if len(weights) < 2 or weights[0].dtype != weights[1].dtype or not torch.equal(*weights):
        return
    arms = split_arms(table)
    if not arms[arm]["kl"].equals(arms[shared_head_name(arm)]["kl"]):
        raise InvalidRunError(
            f"arm `{arm}` has the reference's head, and differs from itself scored through the reference's head",
            hint="the head lanes are not computed alike; please report it",
        )


def _lane_records(lane: Lane, specs: list[ArmSpec], outcomes: Mapping[str, ArmOutcome]) -> dict[str, ArmRecord]:
    """Pick each arm's part in one lane: references in prefill, controls and candidates in the lane."""

    def record(spec: ArmSpec, lane: Lane) -> ArmRecord:
        outcome = outcomes[spec.name]
        capture = outcome.captures[lane.name]
        return ArmRecord(
            spec=spec,
            lane=lane,
            capture=capture,
            launches=capture.launches,
            embedding_bytes=outcome.embedding_bytes,
            attention=outcome.attention,
        )

    reference, floor, *candidates = specs
    records = {spec.name: record(spec, PREFILL) for spec in (reference, floor)}
    of_lane = [each for spec in candidates for each in spec.lanes if replace(each, graph=False) == lane]
    for each in dict.fromkeys(of_lane):
        if each != PREFILL:
            records[lane_control_name(each)] = record(reference, each)
    for spec in candidates:
        records[spec.name] = record(spec, next(each for each in spec.lanes if each in of_lane))
    return records


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

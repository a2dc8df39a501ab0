"""Arms under transformers: each in a process of its own, scored here side by side through their heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
import torch

from exl3eval.arm import ArmOutcome, ArmRecord, ArmSpec, ArmTask, arm_contract, run_arm
from exl3eval.engine.head import Head
from exl3eval.engine.lanes import Lane
from exl3eval.errors import InvalidRunError
from exl3eval.floors import NUM_CONTEXTS as FLOOR_CONTEXTS
from exl3eval.floors import FloorContext, label_floor
from exl3eval.identity import engine_contract_digest
from exl3eval.isolation import run_isolated
from exl3eval.request import PREFILL, REFERENCE, floor_name, lane_control_name, shared_head_name
from exl3eval.score.candidates import list_candidates
from exl3eval.score.positions import split_arms
from exl3eval.score.scoring import ScoredArm, score_arms
from exl3eval.session import KldRun, Session


def run_arms(session: Session, specs: list[ArmSpec]) -> list[KldRun]:
    """Run every arm and score every lane.

    Parameters
    ----------
    session : Session
        What is measured, and where.
    specs : list of ArmSpec
        The reference, the reference at its other precision, baseline, variant.

    Raises
    ------
    CheckpointError, UsageError, InvalidRunError
        As loading, running and scoring raise them.
    """
    outcomes = {spec.name: run_one_arm(session, spec) for spec in specs}
    heads = {
        spec.name: outcomes[spec.name].probe.load(spec, vocab_size=session.vocabulary.size, device=session.device)
        for spec in specs
    }
    return [_score_lane(session, lane, specs, outcomes, heads) for lane in session.request.lanes]


def run_one_arm(session: Session, spec: ArmSpec) -> ArmOutcome:
    """Run one arm in a process of its own."""
    floors = session.tokens.contexts[:FLOOR_CONTEXTS] if spec.name != floor_name(session.request) else ()
    task = ArmTask(
        spec=spec,
        contexts=tuple((c.digest, torch.from_numpy(c.ids[:-1].copy())) for c in session.tokens.contexts),
        floor_contexts=tuple(FloorContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids=c.ids) for c in floors),
        contract=arm_contract(
            spec, tokens=session.tokens.digest, engine=engine_contract_digest(session.code), device=session.machine
        ),
        vocab_size=session.vocabulary.size,
        device=str(session.device),
        cache_dir=session.settings.cache_dir,
        num_threads=session.num_threads,
        trust_remote_code=session.request.trust_remote_code,
        fresh=session.request.fresh,
    )
    return run_isolated(run_arm, task, session.reporter, label=f"arm `{spec.name}`")


def _score_lane(
    session: Session,
    lane: Lane,
    specs: list[ArmSpec],
    outcomes: Mapping[str, ArmOutcome],
    heads: Mapping[str, Head],
) -> KldRun:
    records = _lane_records(lane, specs, outcomes)
    scored = {name: _scored_arm(session, record, heads) for name, record in records.items()}
    candidates = specs[-2].name, specs[-1].name
    shared = candidates if session.request.shared_head else ()
    for name in shared:
        spec = records[name].spec
        through = replace(spec, resolved=replace(spec.resolved, head="reference"))
        records[shared_head_name(name)] = replace(records[name], spec=through)
        scored[shared_head_name(name)] = replace(scored[name], head=heads[REFERENCE])
    contexts = session.contexts(lane)
    positions = sum(len(context.targets) for context in contexts)
    with session.reporter.phase(f"score {lane.name}", positions, "positions") as advance:
        scores = score_arms(
            scored[REFERENCE],
            {name: arm for name, arm in scored.items() if name != REFERENCE},
            contexts,
            reference_name=REFERENCE,
            num_threads=session.num_threads if session.device.type == "cpu" else 1,
            on_context=advance,
        )
    records = {
        name: replace(record, launches=dict(Counter(record.launches) + Counter(scores.launches[name])))
        for name, record in records.items()
    }
    floors = [
        replace(placed, arm=label_floor(placed.arm, name))
        for name, record in records.items()
        if name not in map(shared_head_name, shared)
        for placed in outcomes[record.spec.name].floors.get(record.lane.name, [])
    ]

    def check(table: pa.Table) -> None:
        for name in shared:
            check_identical_head(table, name, heads[name], heads[REFERENCE])

    return session.reduce(
        lane,
        records,
        scores,
        floors,
        candidates=candidates,
        list_worst=lambda worst: list_candidates(scored, worst),
        check=check,
    )


def _scored_arm(session: Session, record: ArmRecord, heads: Mapping[str, Head]) -> ScoredArm:
    spec = record.spec
    return ScoredArm(
        capture=record.capture,
        head=heads[spec.name if spec.resolved.head == "own" else REFERENCE],
        device=session.device,
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

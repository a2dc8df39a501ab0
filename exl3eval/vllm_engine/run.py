"""Arms under vLLM, lane by lane, into the numbers that every other run gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from exl3eval.arm import ArmRecord, ArmSpec
from exl3eval.engine.lanes import Lane
from exl3eval.floors import ENGINES, REPLAY_LIVE, label_floor
from exl3eval.request import PREFILL, REFERENCE, TRANSFORMERS, lane_control_names
from exl3eval.score.positions import Placed
from exl3eval.session import KldRun, Session
from exl3eval.transformers_run import run_one_arm
from exl3eval.variant import Variant
from exl3eval.vllm_engine.arms import LaneOutcome, run_vllm_arms
from exl3eval.vllm_engine.collect import collect_candidates, collect_replay_floor, collect_scores
from exl3eval.vllm_engine.environment import Interpreter, find_interpreter
from exl3eval.vllm_engine.plan import CROSS_ENGINE_ARM, plan_arms
from exl3eval.vllm_engine.session import VllmSession

Outcomes = Mapping[tuple[str, str], LaneOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreters:
    """Where arms run: `usual`, or what a variant's stack names (by variant name)."""

    usual: Interpreter
    named: Mapping[str, Interpreter]


def find_interpreters(variants: Collection[Variant], python: Path | None) -> Interpreters:
    """Examine every interpreter that a run needs, before any work.

    Raises
    ------
    UsageError
        If one cannot be had, or lacks vLLM, a package named, or this project.
    """
    stacks = {variant.name: variant.vllm for variant in variants if variant.vllm is not None}
    needed = tuple(name for stack in stacks.values() for name in stack.packages if not stack.python)
    return Interpreters(
        usual=find_interpreter(python, packages=needed),
        named={
            name: find_interpreter(stack.interpreter, packages=stack.packages)
            for name, stack in stacks.items()
            if stack.interpreter is not None
        },
    )


def run_vllm(session: Session, specs: list[ArmSpec], interpreters: Interpreters) -> list[KldRun]:
    """Run every arm under vLLM and reduce every lane.

    Parameters
    ----------
    session : Session
        What is measured, and where.
    specs : list of ArmSpec
        The reference, the reference at its other precision, baseline, variant.
    interpreters : Interpreters
        Where they run.

    Raises
    ------
    UsageError
        If vLLM cannot run what is asked for.
    InvalidRunError
        If an arm ran but its result must not be read as a number.
    """
    request, settings = session.request, session.settings
    stacks = {spec.name: stack for spec in specs if (stack := spec.declared.vllm) is not None}
    own_reference = request.reference_engine != TRANSFORMERS
    named = interpreters.named
    shared = VllmSession(
        interpreter=interpreters.usual,
        interpreters={spec.name: named[spec.declared.name] for spec in specs if spec.declared.name in named},
        inherited=settings.environment,
        tokens=session.tokens,
        vocab_size=session.vocabulary.size,
        reference=specs[0].checkpoint,
        device=session.device,
        machine=session.machine,
        compiled=request.compiled,
        style=request.decode_style,
        cache_dir=settings.cache_dir,
        num_processes=session.num_threads,
        trust_remote_code=request.trust_remote_code,
        fresh=request.fresh,
    )
    foreign = None if own_reference else run_one_arm(session, replace(specs[0], lanes=(PREFILL,)))
    outcomes = run_vllm_arms(
        plan_arms(specs, stacks=stacks, compiled=request.compiled, own_reference=own_reference),
        shared,
        session.reporter,
        reference_hidden=None if foreign is None else foreign.captures[PREFILL.name].directory,
    )
    return [_reduce_lane(session, lane, specs, outcomes) for lane in request.lanes]


def _reduce_lane(session: Session, lane: Lane, specs: list[ArmSpec], outcomes: Outcomes) -> KldRun:
    arms = _arms_of(lane, specs, outcomes)
    contexts = session.contexts(lane)
    scores = collect_scores(arms, contexts, reference=REFERENCE)
    return session.reduce(
        lane,
        {name: _record(outcome) for name, outcome in arms.items()},
        scores,
        _floors(session, lane, outcomes),
        candidates=(specs[-2].name, specs[-1].name),
        list_worst=lambda worst: collect_candidates(arms, worst),
    )


def _arms_of(lane: Lane, specs: list[ArmSpec], outcomes: Outcomes) -> dict[str, LaneOutcome]:
    """Pick the arms of one lane: references in prefill, controls and candidates in the lane."""
    names = {spec.name for spec in specs}
    arms = {
        name: outcome
        for (name, of), outcome in outcomes.items()
        if of == PREFILL.name and name in (specs[0].name, specs[1].name, CROSS_ENGINE_ARM)
    }
    for (name, _), outcome in outcomes.items():
        if replace(outcome.lane, graph=False) != lane:
            continue
        if name in names - {spec.name for spec in specs[:2]} or name in lane_control_names(outcome.lane):
            arms[name] = outcome
    return arms


def _record(outcome: LaneOutcome) -> ArmRecord:
    return ArmRecord(
        spec=outcome.spec,
        lane=outcome.lane,
        capture=outcome.capture,
        launches=outcome.capture.launches,
        embedding_bytes=outcome.embedding_bytes,
        attention=outcome.attention,
        engine=outcome.identity,
    )


def _floors(session: Session, lane: Lane, outcomes: Outcomes) -> list[Placed]:
    """Return what the reference's own logits, or another engine's reference, differ by from the yardstick."""
    contexts = session.contexts(lane)
    own, other = outcomes.get((REFERENCE, PREFILL.name)), outcomes.get((CROSS_ENGINE_ARM, PREFILL.name))
    if own is not None:
        return collect_replay_floor(own, contexts, label=label_floor(REPLAY_LIVE, REFERENCE))
    assert other is not None
    return collect_replay_floor(other, contexts, label=label_floor(ENGINES, REFERENCE))

"""Deltas plus a policy to a verdict: bounds against margins, never p-values against alpha.

PASS iff the one-sided upper bound of the paired difference lies below the margin (see `stretch_bounds` for skewed
differences), FAIL iff the lower bound lies above
it, INCONCLUSIVE otherwise. "Not significant, so pass" passes 49 % of regressions exactly at a 1 % margin at 32 contexts
(measurement.md section 4). Endpoints and variants combine by intersection-union: all must pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor

from exl3eval.gate.endpoints import UNITS, Delta, endpoint_value, estimate_deltas
from exl3eval.gate.policy import Policy
from exl3eval.gate.rows import ArmRows, Run
from exl3eval.gate.strata import judge_strata
from exl3eval.gate.verdict import EndpointVerdict, Look, Margin, Outcome, StratumVerdict, Verdict, resolve_margin, worst
from exl3eval.stats.power import Power, study_power
from exl3eval.stats.sequential import look_levels

# Documents per squared skewness before a bound on a mean is to be trusted. Cochran (1977) has 25 for the normal
# interval; 30 is what holds the false-pass rate at 32 contexts of a population of skewness 4.9.
CLUSTERS_PER_SKEW = 30.0

# A tail of the bootstrap holds at least this many resamples.
_TAIL_RESAMPLES = 4


def decide_bounds(lower: float | None, upper: float | None, margin: float, mode: str) -> Outcome:
    """Compare one-sided bounds with a margin.

    Parameters
    ----------
    lower, upper : float or None
        Bounds of the difference, each at the one-sided level; None when unknown.
    margin : float
    mode : str
        `non-inferiority`, or `equivalence` (TOST: two one-sided tests, at the margin and at its negative).
    """
    if lower is None or upper is None:
        return Outcome.INCONCLUSIVE
    two_sided = mode == "equivalence"
    if lower > margin or (two_sided and upper < -margin):
        return Outcome.FAIL
    if upper < margin and (not two_sided or lower > -margin):
        return Outcome.PASS
    return Outcome.INCONCLUSIVE


def decide(
    runs: Sequence[Run], policy: Policy, *, exploratory: bool = False, executor: Executor | None = None
) -> Verdict:
    """Judge one or several variants of one design.

    Parameters
    ----------
    runs : sequence of Run
        One variant each, checked by `exl3eval.gate.evidence.check_one_design`.
    policy : Policy
    exploratory : bool
        List refusals without applying them.
    executor : Executor, optional
        Threads for resampling; changes no bit of the result.
    """
    baseline, floor = runs[0].baseline, runs[0].floor
    variants = [run.variant for run in runs]
    available = baseline.num_contexts
    planned = [look for look in policy.looks if look <= available] or [available]
    levels, last_level = _levels(policy, planned)
    looks: list[Look] = []
    for count, level in zip(planned, levels, strict=True):
        arms = baseline.first(count), floor.first(count), [rows.first(count) for rows in variants]
        endpoints, strata = _judge(*arms, policy, level, last_level / level, exploratory, executor)
        decided = worst([*(e.outcome for e in endpoints), *(s.outcome for s in strata if s.outcome is Outcome.FAIL)])
        looks.append(Look(num_contexts=count, level=level, outcome=decided))
        if decided is not Outcome.INCONCLUSIVE:
            break
    small = _refuse_small(baseline.first(count), policy)
    refusals = [*small, *_refuse_unrepeatable(runs), *_refuse_powerless(endpoints, policy)]
    outcome = looks[-1].outcome
    if not exploratory and refusals and (outcome is Outcome.PASS or small):
        outcome = Outcome.INCONCLUSIVE
    steps = [endpoint.next_step for endpoint in endpoints if endpoint.next_step]
    if outcome is Outcome.INCONCLUSIVE and (later := [look for look in policy.looks if look > available]):
        steps.insert(0, f"extend the run to the next look: --num-contexts {later[0]}")
    steps += [
        f"`{s.variant}` hurts {s.stratum}: {s.value:+.2e} nats over a margin of {s.margin:.2e}; look at its contexts"
        for s in strata
        if s.outcome is Outcome.FAIL
    ]
    return Verdict(
        outcome=outcome,
        lane=runs[0].lane,
        endpoints=tuple(endpoints),
        strata=tuple(strata),
        looks=tuple(looks),
        identical=tuple(run.variant.arm for run in runs if run.identical),
        refusals=tuple(refusals),
        exploratory=exploratory,
        next_steps=tuple(dict.fromkeys(steps)),
    )


def _levels(policy: Policy, planned: Sequence[int]) -> tuple[Sequence[float], float]:
    """Return the one-sided error rate of each planned look, and that of the design's last look."""
    if not policy.looks:
        return (policy.alpha,), policy.alpha
    last = policy.looks[-1]
    if planned[0] not in policy.looks:
        level, final = look_levels([planned[0] / last, 1.0], policy.alpha)
        return (level,), final
    levels = look_levels([look / last for look in policy.looks], policy.alpha)
    return levels[: len(planned)], levels[-1]


def _judge(
    baseline: ArmRows,
    floor: ArmRows,
    variants: Sequence[ArmRows],
    policy: Policy,
    level: float,
    growth: float,
    exploratory: bool,
    executor: Executor | None,
) -> tuple[list[EndpointVerdict], list[StratumVerdict]]:
    """Judge every endpoint and stratum of every variant at one look; `growth` is the last look's level over this."""
    num_resamples = max(policy.num_resamples, math.ceil(_TAIL_RESAMPLES * len(variants) / level))
    deltas = estimate_deltas(
        baseline,
        variants,
        list(policy.margins),
        confidence=1.0 - level,
        num_resamples=num_resamples,
        seed=policy.seed,
        executor=executor,
    )
    margins = {
        endpoint: resolve_margin(
            rule, baseline=endpoint_value(baseline, endpoint), floor=endpoint_value(floor, endpoint)
        )
        for endpoint, rule in policy.margins.items()
    }
    endpoints = [
        judge_delta(
            delta,
            margins[delta.endpoint],
            policy,
            alpha=(1.0 - delta.confidence) * growth,
            exploratory=exploratory,
        )
        for delta in deltas
    ]
    strata = [
        verdict
        for rows in variants
        for verdict in judge_strata(baseline, floor, rows, policy, level, num_resamples, executor)
    ]
    return endpoints, strata


def judge_delta(
    delta: Delta, margin: Margin, policy: Policy, *, alpha: float, exploratory: bool = False
) -> EndpointVerdict:
    """Judge one endpoint.

    Parameters
    ----------
    delta : Delta
    margin : Margin
    policy : Policy
    alpha : float
        One-sided error rate of this bound at the design's last look: what power is computed for.
    exploratory : bool
        Give PASS to bounds that skewed differences leave too close to the margin.
    """
    outcome = decide_bounds(delta.lower, delta.upper, margin.value, policy.mode)
    too_skewed = (
        outcome is Outcome.PASS
        and not exploratory
        and decide_bounds(*stretch_bounds(delta), margin.value, policy.mode) is not Outcome.PASS
    )
    if too_skewed:
        outcome = Outcome.INCONCLUSIVE
    power = None
    if delta.sigma is not None:
        power = study_power(
            sigma=delta.sigma,
            deff=delta.deff or 1.0,
            num_contexts=max(policy.looks[-1] if policy.looks else 0, delta.num_contexts),
            num_clusters=delta.num_clusters,
            margin=margin.value,
            alpha=alpha,
            target=policy.min_power,
        )
    return EndpointVerdict(
        outcome=outcome,
        unit=UNITS[delta.endpoint],
        delta=delta,
        margin=margin,
        power=power,
        next_step=_skew_step(delta) if too_skewed else _next_step(delta, margin, outcome, power),
    )


def stretch_bounds(delta: Delta) -> tuple[float | None, float | None]:
    """Move the bound that a long tail threatens away from the estimate.

    A sample that misses its population's long tail has both too small a mean and too small a spread, so the envelope
    passes too much where differences grow with the context's own KLD: .06-.15 of regressions at the margin in
    simulation (skewness 3.2 and 4.9). With the distance to the bound multiplied by sqrt(30 skew^2 / G), where that is
    above 1, it is at most .066, and a harmless route with symmetric tails of kurtosis 19 passes in .79 instead of .83.
    """
    if delta.lower is None or delta.upper is None or not delta.skew:
        return delta.lower, delta.upper
    stretch = max(1.0, math.sqrt(CLUSTERS_PER_SKEW / delta.num_clusters) * abs(delta.skew))
    if delta.skew > 0.0:
        return delta.lower, delta.value + stretch * (delta.upper - delta.value)
    return delta.value + stretch * (delta.lower - delta.value), delta.upper


def _skew_step(delta: Delta) -> str:
    documents = math.ceil(CLUSTERS_PER_SKEW * (delta.skew or 0.0) ** 2)
    return (
        f"`{delta.variant}` {delta.endpoint}: the bound passes, but with a skew of {delta.skew:.1f} it needs about "
        f"{documents} documents to be trusted, not {delta.num_clusters}: add contexts, or --exploratory"
    )


def _next_step(delta: Delta, margin: Margin, outcome: Outcome, power: Power | None) -> str:
    label = f"`{delta.variant}` {delta.endpoint}"
    if outcome is Outcome.PASS:
        return ""
    if outcome is Outcome.FAIL:
        side = f"{delta.value:+.2e} against a margin of {margin.value:.2e}"
        return f"{label}: {side}: more contexts will not change that, find the cause"
    if power is None:
        return f"{label}: its error is unknown ({delta.why}); add documents, or more positions per context"
    room = margin.value - abs(delta.value)
    if room > 0.0:
        needed = math.ceil(power.contexts_needed * (margin.value / room) ** 2)
        at_zero = f"{power.contexts_needed} contexts if it is really 0"
        return f"{label}: needs about {needed} contexts if it is really {delta.value:+.2e} ({at_zero})"
    return (
        f"{label}: the estimate {delta.value:+.2e} lies beyond the margin {margin.value:.2e} but not surely so; "
        f"more than {delta.num_contexts} contexts will most likely FAIL it: look for the cause first"
    )


def _refuse_small(rows: ArmRows, policy: Policy) -> list[str]:
    num_clusters = len(set(rows.clusters))
    refusals = []
    if rows.num_contexts < policy.min_contexts:
        refusals.append(
            f"{rows.num_contexts} contexts give no trustworthy interval and no power: "
            f"run with --num-contexts {policy.min_contexts} or more"
        )
    if num_clusters < policy.min_clusters:
        refusals.append(
            f"{num_clusters} source documents give no trustworthy interval: add contexts from "
            f"{policy.min_clusters - num_clusters} more documents"
        )
    return refusals


def _refuse_unrepeatable(runs: Sequence[Run]) -> list[str]:
    """A repeat that differs is a floor under every difference that no pairing removes."""
    repeats: dict[str, float] = {}
    for run in runs:
        written = run.receipt["results"]["floors"]["repeat_difference"]
        repeats |= {arm: written[arm] for arm in (run.baseline.arm, run.variant.arm) if arm in written}
    return [
        f"the repeat floor of `{arm}` is too high: running a context again changed hidden states by {repeat:.2e}, "
        "expected exactly 0: make the arm repeatable, then run again"
        for arm, repeat in repeats.items()
        if repeat != 0.0
    ]


def _refuse_powerless(endpoints: Sequence[EndpointVerdict], policy: Policy) -> list[str]:
    return [
        f"`{e.delta.variant}` {e.delta.endpoint}: power {e.power.power:.2f} < {policy.min_power:.2f} at margin "
        f"{e.margin.value:.2e} (MDE {e.power.mde:.2e}): needs {e.power.contexts_needed} contexts, or --exploratory"
        for e in endpoints
        if e.power is not None and e.power.power < policy.min_power
    ]

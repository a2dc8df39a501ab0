"""Endpoints: the figures a change must not hurt, each as variant minus baseline with one-sided bounds.

Every endpoint is written so that more is worse: mean KL, its p99 and CVaR1% over all positions, lost probability mass
(total variation: EAR is 1 - TV), and the share of positions whose most likely id changes. All but p99 are means over
contexts, so they get the envelope interval; a quantile has no such form and gets the union of percentile and t.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from scipy import stats

from exl3eval.gate.policy import ENDPOINTS
from exl3eval.gate.rows import ArmRows
from exl3eval.stats.clusters import ContextSample, FloatArray, PositionSample
from exl3eval.stats.intervals import Estimate, estimate_means
from exl3eval.stats.multiplicity import joint_confidence
from exl3eval.stats.tail_changes import estimate_tail_changes
from exl3eval.stats.tails import linearise_cvar, pooled_quantile

UNITS = dict(zip(ENDPOINTS, ("nats", "nats", "nats", "probability", "share of positions"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One endpoint of one variant, minus the same of its baseline; positive is worse.

    Attributes
    ----------
    variant, endpoint : str
    baseline, value : float
        The endpoint's figure of the baseline, and the difference.
    lower, upper : float or None
        One-sided bounds, each at `confidence`; None with the reason in `why`.
    confidence : float
        Of a single bound, after the family of variants and the look have taken their share.
    sigma, deff : float or None
        Standard deviation over contexts and design effect. For p99, which is no mean, those that its bootstrap
        standard error amounts to with a design effect of 1.
    skew : float or None
        Skewness over contexts; None for p99.
    num_contexts, num_clusters : int
    why : str
    """

    variant: str
    endpoint: str
    baseline: float
    value: float
    lower: float | None
    upper: float | None
    confidence: float
    sigma: float | None
    deff: float | None
    skew: float | None
    num_contexts: int
    num_clusters: int
    why: str


def endpoint_value(rows: ArmRows, endpoint: str) -> float:
    """Return an arm's own figure: what fractions and floors of a margin are taken of."""
    if endpoint == "p99":
        return pooled_quantile(np.sort(rows.kl_NP, axis=None), 990)
    return rows.average(_figure(rows, endpoint)).mean()


def estimate_deltas(
    baseline: ArmRows,
    variants: Sequence[ArmRows],
    endpoints: Sequence[str],
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
    executor: Executor | None = None,
) -> list[Delta]:
    """Estimate endpoints of several variants at one joint level per endpoint.

    Parameters
    ----------
    baseline, variants : ArmRows
        On the same positions.
    endpoints : sequence of str
        Of `exl3eval.gate.policy.ENDPOINTS`.
    confidence : float
        Level of the one-sided bounds of one endpoint, for all variants together (max-T; Bonferroni for p99).
    num_resamples, seed, executor
        As `exl3eval.stats.intervals.estimate_means`.

    Returns
    -------
    list of Delta
        By variant, then endpoint, in the orders given.
    """
    found: dict[tuple[str, str], Delta] = {}
    for endpoint in endpoints:
        own = endpoint_value(baseline, endpoint)
        if endpoint == "p99":
            level = 1.0 - (1.0 - confidence) / len(variants)
            for rows in variants:
                found[rows.arm, endpoint] = _quantile_delta(
                    baseline, rows, own, confidence=level, num_resamples=num_resamples, seed=seed, executor=executor
                )
            continue
        before = baseline.average(_figure(baseline, endpoint))
        samples = [_difference(before, baseline, rows, endpoint) for rows in variants]
        level = joint_confidence(
            samples, confidence=confidence, num_resamples=num_resamples, seed=seed, executor=executor
        )
        estimates = estimate_means(samples, confidence=level, num_resamples=num_resamples, seed=seed, executor=executor)
        for rows, sample, estimate in zip(variants, samples, estimates, strict=True):
            found[rows.arm, endpoint] = mean_delta(rows.arm, endpoint, own, sample, estimate)
    return [found[rows.arm, endpoint] for rows in variants for endpoint in endpoints]


def mean_delta(variant: str, endpoint: str, baseline: float, sample: ContextSample, estimate: Estimate) -> Delta:
    """Present the estimate of a mean difference over contexts as an endpoint's delta."""
    return Delta(
        variant=variant,
        endpoint=endpoint,
        baseline=baseline,
        value=estimate.mean,
        lower=estimate.lower_bound,
        upper=estimate.upper_bound,
        confidence=estimate.confidence,
        sigma=estimate.sd,
        deff=estimate.deff,
        skew=0.0 if sample.all_equal else float(stats.skew(np.sort(sample.values))),
        num_contexts=estimate.num_contexts,
        num_clusters=estimate.num_clusters,
        why=estimate.why,
    )


def _figure(rows: ArmRows, endpoint: str) -> FloatArray:
    """Return numbers [N, P] whose mean over contexts is the endpoint."""
    if endpoint == "cvar1":
        return linearise_cvar(rows.kl_NP.ravel()).reshape(rows.kl_NP.shape)
    return {"mean": rows.kl_NP, "ear": rows.tv_NP, "top1": rows.disagree_NP}[endpoint]


def _difference(before: ContextSample, baseline: ArmRows, variant: ArmRows, endpoint: str) -> ContextSample:
    after = variant.average(_figure(variant, endpoint))
    return before.replace_values(after.values - before.values)


def _quantile_delta(
    baseline: ArmRows,
    variant: ArmRows,
    own: float,
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
    executor: Executor | None,
) -> Delta:
    num_positions = baseline.kl_NP.shape[1]
    labels, codes = np.unique(np.asarray(baseline.clusters), return_inverse=True)
    clusters = np.repeat(codes, num_positions)
    before, after = (PositionSample(values=rows.kl_NP.ravel(), clusters=clusters) for rows in (baseline, variant))
    changes = estimate_tail_changes(
        before, after, confidence=confidence, num_resamples=num_resamples, seed=seed, executor=executor
    )
    change = next(tail for tail in changes if tail.name == "p99")
    sigma = None
    if change.lower_bound is not None and change.upper_bound is not None:
        half = max(change.upper_bound - change.value, change.value - change.lower_bound)
        sigma = half / float(stats.t.isf(1.0 - confidence, len(labels) - 1)) * baseline.num_contexts**0.5
    return Delta(
        variant=variant.arm,
        endpoint="p99",
        baseline=own,
        value=change.value,
        lower=change.lower_bound,
        upper=change.upper_bound,
        confidence=confidence,
        sigma=sigma,
        deff=None if sigma is None else 1.0,
        skew=None,
        num_contexts=baseline.num_contexts,
        num_clusters=len(labels),
        why=change.why,
    )

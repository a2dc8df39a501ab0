"""Intervals for a mean over contexts: the envelope of cluster-t and cluster bootstrap-t.

Neither method alone holds its level everywhere (measurement.md section 4): cluster-t is the better one on paired,
heavy-tailed differences, bootstrap-t on skewed absolute KLD. Their envelope is the interval; BCa and percentile are
cross-checks that are shown and decide nothing. What this does not claim: on strongly skewed values at few contexts even
the envelope falls short of its nominal 95 % (bootstrap-t: .82 at 32 contexts of measured absolute KLD, .94 at 136).

An interval that cannot be known is None with the reason in `why`, never a width of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, FloatArray, Linearisation, linearise_mean
from exl3eval.stats.resample import resample_means

# Standard errors below this fraction of the standard deviation are rounding of an exact 0.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A closed interval in the unit of the estimate."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"interval [{self.low}, {self.high}] is not finite and ordered")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over contexts and what is known about its error.

    Attributes
    ----------
    mean : float
        In the unit of the values, as are all bounds.
    interval : Interval or None
        Two-sided at `confidence`: envelope of `cluster_t` and `bootstrap_t`.
    lower_bound, upper_bound : float or None
        One-sided, each at level `confidence`: what a gate compares with its margin.
    confidence : float
        In (0, 1).
    se : float or None
        CR2 cluster standard error.
    sd : float or None
        Standard deviation over contexts, the sigma of the power formulas.
    deff : float or None
        Design effect: se^2 over sd^2 / N. 1 when contexts are as good as independent.
    num_contexts, num_clusters : int
        N and G.
    cluster_t, bootstrap_t : Interval or None
        The two parts of the envelope, two-sided.
    bca, percentile : Interval or None
        Cluster bootstrap cross-checks, two-sided. They decide nothing.
    why : str
        Why something is None, or that all values are equal; empty for an ordinary estimate.
    """

    mean: float
    interval: Interval | None
    lower_bound: float | None
    upper_bound: float | None
    confidence: float
    se: float | None
    sd: float | None
    deff: float | None
    num_contexts: int
    num_clusters: int
    cluster_t: Interval | None
    bootstrap_t: Interval | None
    bca: Interval | None
    percentile: Interval | None
    why: str


def estimate_mean(
    sample: ContextSample,
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> Estimate:
    """Estimate one mean over contexts; see `estimate_means`."""
    return estimate_means([sample], confidence=confidence, num_resamples=num_resamples, seed=seed, executor=executor)[0]


def estimate_means(
    samples: Sequence[ContextSample],
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> tuple[Estimate, ...]:
    """Estimate the means of several arms on shared cluster resamples.

    Parameters
    ----------
    samples : sequence of ContextSample
        The arms, on the same contexts.
    confidence : float
        Level of the two-sided interval and of each one-sided bound.
    num_resamples : int
        Bootstrap resamples; at least 2 / (1 - confidence) - 1.
    seed : int
        Fixes the resamples.
    executor : Executor, optional
        Threads or processes; changes no bit of the result.

    Returns
    -------
    tuple of Estimate
        In the order of `samples`. One cluster gives intervals None; all-equal values give the exact [v, v].

    Raises
    ------
    UsageError
        If an option is out of range, there is no arm, or arms differ in their contexts.
    """
    check_resampling(confidence, num_resamples)
    if samples and samples[0].num_clusters == 1:
        why = "1 cluster: the variance between documents is unknown"
        return tuple(_unknown(sample, confidence, why) for sample in samples)
    resamples = resample_means(samples, num_resamples=num_resamples, seed=seed, executor=executor)
    return tuple(
        _estimate(sample, np.sort(means_B), np.sort(studentised_B), confidence)
        for sample, means_B, studentised_B in zip(
            samples, resamples.means_BA.T, resamples.studentised_BA.T, strict=True
        )
    )


def check_resampling(confidence: float, num_resamples: int) -> None:
    """Refuse a confidence outside (0, 1), or too few resamples to reach its tails.

    Raises
    ------
    UsageError
        Naming the option, what was seen and what is expected.
    """
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"confidence = {confidence}, expected a number in (0, 1)", hint="0.95 is the convention")
    needed = math.ceil(2.0 / (1.0 - confidence) - 1e-6) - 1
    if num_resamples < needed:
        raise UsageError(
            f"num_resamples = {num_resamples} cannot reach the tails at confidence {confidence}, expected >= {needed}",
            hint="use 9,999",
        )


def bootstrap_quantile(sorted_B: FloatArray, probability: float) -> float:
    """Return the order statistic of rank (B + 1) p, rounded outwards: a quantile without interpolation."""
    num_resamples = len(sorted_B)
    tail = min(probability, 1.0 - probability)
    rank = min(max(math.floor((num_resamples + 1) * tail + 1e-9), 1), num_resamples)
    return float(sorted_B[rank - 1] if probability <= 0.5 else sorted_B[num_resamples - rank])


def _estimate(sample: ContextSample, means_B: FloatArray, studentised_B: FloatArray, confidence: float) -> Estimate:
    """Build the estimate of one arm with two clusters or more; the arrays are sorted."""
    if sample.all_equal:
        return _null_arm(sample, confidence)
    linear = linearise_mean(sample)
    sd = sample.sd()
    if linear.se <= _ROUNDING * sd:
        return _unknown(sample, confidence, "every cluster has the same mean, so its spread says nothing")
    mean, se, alpha = linear.mean, linear.se, 1.0 - confidence
    t_tail = stats.t(df=sample.num_clusters - 1).isf

    def pivot_bounds(tail: float) -> tuple[float, float]:
        low = mean - se * bootstrap_quantile(studentised_B, 1.0 - tail)
        return low, mean - se * bootstrap_quantile(studentised_B, tail)

    half = se * float(t_tail(alpha / 2))
    cluster_t = Interval(low=mean - half, high=mean + half)
    low, high = pivot_bounds(alpha / 2)
    bootstrap_t = Interval(low=low, high=high) if math.isfinite(low) and math.isfinite(high) else None
    lower, upper = pivot_bounds(alpha)
    one_sided_half = se * float(t_tail(alpha))
    percentile = Interval(low=bootstrap_quantile(means_B, alpha / 2), high=bootstrap_quantile(means_B, 1 - alpha / 2))
    return Estimate(
        mean=mean,
        interval=bootstrap_t and envelope(cluster_t, bootstrap_t),
        lower_bound=min(lower, mean - one_sided_half) if math.isfinite(lower) else None,
        upper_bound=max(upper, mean + one_sided_half) if math.isfinite(upper) else None,
        confidence=confidence,
        se=se,
        sd=sd,
        deff=(se / sd) ** 2 * sample.num_contexts,
        num_contexts=sample.num_contexts,
        num_clusters=sample.num_clusters,
        cluster_t=cluster_t,
        bootstrap_t=bootstrap_t,
        bca=_bca(linear, means_B, alpha),
        percentile=percentile,
        why="" if bootstrap_t else "too few clusters differ from the rest: many resamples have no spread at all",
    )


def envelope(first: Interval, second: Interval) -> Interval:
    """Return the smallest interval that holds both."""
    return Interval(low=min(first.low, second.low), high=max(first.high, second.high))


def _bca(linear: Linearisation, means_B: FloatArray, alpha: float) -> Interval | None:
    """Bias-corrected accelerated cluster bootstrap (Efron 1987), acceleration from leave-one-cluster-out means."""
    below = np.mean(means_B < linear.mean) + 0.5 * np.mean(means_B == linear.mean)
    if not 0.0 < below < 1.0:
        return None
    bias = stats.norm.ppf(below)
    left_out = -linear.residual_sums_G / (linear.sizes_G.sum() - linear.sizes_G)
    gaps = left_out.mean() - left_out
    gaps /= np.abs(gaps).max()
    acceleration = np.sum(gaps**3) / (6.0 * np.sum(gaps**2) ** 1.5)
    shifted = bias + stats.norm.ppf([alpha / 2, 1.0 - alpha / 2])
    low, high = stats.norm.cdf(bias + shifted / (1.0 - acceleration * shifted))
    if low >= high:
        return None
    return Interval(low=bootstrap_quantile(means_B, low), high=bootstrap_quantile(means_B, high))


def _null_arm(sample: ContextSample, confidence: float) -> Estimate:
    """Build the estimate of an arm whose values are all the same number: exact, with no spread to study."""
    value = sample.mean()
    point = Interval(low=value, high=value)
    return Estimate(
        mean=value,
        interval=point,
        lower_bound=value,
        upper_bound=value,
        confidence=confidence,
        se=0.0,
        sd=0.0,
        deff=None,
        num_contexts=sample.num_contexts,
        num_clusters=sample.num_clusters,
        cluster_t=point,
        bootstrap_t=point,
        bca=None,
        percentile=point,
        why=f"all {sample.num_contexts} values are equal",
    )


def _unknown(sample: ContextSample, confidence: float, why: str) -> Estimate:
    """Build the estimate of a mean whose error cannot be known."""
    return Estimate(
        mean=sample.mean(),
        interval=None,
        lower_bound=None,
        upper_bound=None,
        confidence=confidence,
        se=None,
        sd=sample.sd() if sample.num_contexts > 1 else None,
        deff=None,
        num_contexts=sample.num_contexts,
        num_clusters=sample.num_clusters,
        cluster_t=None,
        bootstrap_t=None,
        bca=None,
        percentile=None,
        why=why,
    )

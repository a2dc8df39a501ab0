"""Tails over all positions pooled, with intervals that rest on clusters.

A p99 is a property of the pool: averaging per-context quantiles estimates something else, and reporting means alone hid
a 23x gap at p99 in public work (lessons M40). Both kinds of figure reduce to means over clusters, so they get the same
envelope interval as everything else:

- a quantile q: the share of positions above q is a mean; its interval, moved to the share that defines the quantile, is
  read back through the sorted positions (Woodruff 1952);
- CVaR: q + mean(max(x - q, 0)) / tail share (Rockafellar and Uryasev 2000) is a mean of excesses.

On simulated lognormal positions (136 clusters of two contexts) the 95 % intervals cover .96 on p99.9 and .94 on
CVaR1%, where the percentile cluster bootstrap covers .92 and .87. One-sided upper bounds of such tails still fall short
of .95 (.90-.93).

Shapes: P positions.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from exl3eval.stats.clusters import ContextSample, FloatArray, PositionSample
from exl3eval.stats.intervals import Estimate, Interval, estimate_means

QUANTILES_PERMILLE = {"p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
CVAR_NAME, CVAR_QUANTILE_PERMILLE = "cvar1", 990
MAX_NAME, MAX_WHY = "max", "a sample says nothing about values beyond its largest"


@dataclass(frozen=True, slots=True, kw_only=True)
class TailEstimate:
    """One tail figure, or the change of one between two arms.

    Attributes
    ----------
    name : str
        "p50", "p90", "p99", "p99.9" (smallest value with at least that share of positions at or below it),
        "cvar1" (mean of the worst 1 % of positions) or "max".
    value : float
        In the unit of the positions.
    interval : Interval or None
        Two-sided at `confidence`.
    lower_bound, upper_bound : float or None
        One-sided, each at level `confidence`.
    why : str
        Why something is None, or that all values are equal.
    """

    name: str
    value: float
    interval: Interval | None
    lower_bound: float | None
    upper_bound: float | None
    confidence: float
    why: str


def estimate_tails(
    sample: PositionSample,
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> tuple[TailEstimate, ...]:
    """Estimate quantiles, CVaR1% and the maximum of all positions pooled.

    Parameters
    ----------
    sample : PositionSample
        Per-position figures with their clusters.
    confidence, num_resamples, seed, executor
        As `exl3eval.stats.intervals.estimate_means`.

    Returns
    -------
    tuple of TailEstimate
        p50, p90, p99, p99.9, cvar1, max. The maximum has no interval: a sample says nothing about values beyond it.

    Raises
    ------
    UsageError
        If an option is out of range.
    """
    sorted_P = np.sort(sample.values)
    largest = unknown_tail(MAX_NAME, float(sorted_P[-1]), confidence, MAX_WHY)
    quantiles = {name: pooled_quantile(sorted_P, permille) for name, permille in QUANTILES_PERMILLE.items()}
    beyond = [(sample.values > quantile).astype(np.float64) for quantile in quantiles.values()]
    all_equal = bool(sorted_P[0] == sorted_P[-1])
    *shares, cvar = estimate_means(
        [
            ContextSample(values=column, clusters=sample.codes_P)
            for column in ([sample.values] if all_equal else [*beyond, linearise_cvar(sample.values)])
        ],
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
        executor=executor,
    )
    if all_equal:
        return (*(tail_from_mean(name, cvar) for name in (*quantiles, CVAR_NAME)), largest)
    inverted = (
        _invert_share(name, quantile, share, sorted_P)
        for (name, quantile), share in zip(quantiles.items(), shares, strict=True)
    )
    return (*inverted, tail_from_mean(CVAR_NAME, cvar), largest)


def pooled_quantile(sorted_P: FloatArray, permille: int) -> float:
    """Return the smallest value with at least permille/1000 of all positions at or below it."""
    return float(sorted_P[-(-permille * len(sorted_P) // 1000) - 1])


def linearise_cvar(values_P: FloatArray) -> FloatArray:
    """Return numbers [P] whose mean is CVaR1%: p99 + (excess over p99) / 0.01."""
    quantile = pooled_quantile(np.sort(values_P), CVAR_QUANTILE_PERMILLE)
    return quantile + np.maximum(values_P - quantile, 0.0) * (1000.0 / (1000 - CVAR_QUANTILE_PERMILLE))


def tail_from_mean(name: str, estimate: Estimate) -> TailEstimate:
    """Present the estimate of a figure that is a mean as a tail figure."""
    return TailEstimate(
        name=name,
        value=estimate.mean,
        interval=estimate.interval,
        lower_bound=estimate.lower_bound,
        upper_bound=estimate.upper_bound,
        confidence=estimate.confidence,
        why=estimate.why,
    )


def unknown_tail(name: str, value: float, confidence: float, why: str) -> TailEstimate:
    """Build a tail figure without an interval."""
    return TailEstimate(
        name=name, value=value, interval=None, lower_bound=None, upper_bound=None, confidence=confidence, why=why
    )


def _invert_share(name: str, quantile: float, share: Estimate, sorted_P: FloatArray) -> TailEstimate:
    """Read bounds on the share of positions beyond `quantile` back as bounds on the quantile."""
    if share.se == 0.0:
        return unknown_tail(name, quantile, share.confidence, "no position lies beyond this quantile")
    level = QUANTILES_PERMILLE[name] / 1000.0

    def value_at(bound: float | None) -> float | None:
        rank = 0 if bound is None else math.ceil((level + share.mean - bound) * len(sorted_P))
        return float(sorted_P[rank - 1]) if 1 <= rank <= len(sorted_P) else None

    low = value_at(share.interval.high if share.interval else None)
    high = value_at(share.interval.low if share.interval else None)
    interval = Interval(low=low, high=high) if low is not None and high is not None else None
    return TailEstimate(
        name=name,
        value=quantile,
        interval=interval,
        lower_bound=value_at(share.upper_bound),
        upper_bound=value_at(share.lower_bound),
        confidence=share.confidence,
        why=share.why or ("" if interval else "too few positions lie beyond this quantile to bound it"),
    )

"""How the pooled tails move between two arms on the same positions, on shared cluster resamples.

Positions are sorted once per arm; a resample only changes the weight of each cluster, so its quantile is found in a
table of cumulative counts per cluster and then inside one run of the sorted positions. Counts are whole numbers, so
every sum here is exact in any order. The change of CVaR1% is a paired mean and takes the envelope; the change of a
quantile has no such form and takes the union of the percentile interval and estimate +- t * bootstrap standard error.

Shapes: P positions, G clusters, K runs of L sorted positions, R resamples of one block, B in all, Q quantiles.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, FloatArray, IntArray, PositionSample
from exl3eval.stats.intervals import Interval, bootstrap_quantile, check_resampling, envelope, estimate_mean
from exl3eval.stats.resample import draw_cluster_counts, map_blocks
from exl3eval.stats.tails import (
    CVAR_NAME,
    MAX_NAME,
    MAX_WHY,
    QUANTILES_PERMILLE,
    TailEstimate,
    linearise_cvar,
    tail_from_mean,
    unknown_tail,
)


def estimate_tail_changes(
    baseline: PositionSample,
    variant: PositionSample,
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> tuple[TailEstimate, ...]:
    """Estimate the change of each tail figure, variant minus baseline.

    It is the difference of two pooled figures, not a tail of differences: which positions form the tail may change.

    Parameters
    ----------
    baseline, variant : PositionSample
        The two arms on the same positions in the same order.
    confidence, num_resamples, seed, executor
        As `exl3eval.stats.intervals.estimate_means`.

    Returns
    -------
    tuple of TailEstimate
        Changes of p50, p90, p99, p99.9, cvar1 and max, in that order.

    Raises
    ------
    UsageError
        If the arms do not hold the same positions, or an option is out of range.
    """
    check_resampling(confidence, num_resamples)
    if baseline.labels != variant.labels or not np.array_equal(baseline.codes_P, variant.codes_P):
        raise UsageError(
            f"the arms do not hold the same positions in the same order: {len(baseline.values)} positions in "
            f"{baseline.num_clusters} clusters against {len(variant.values)} in {variant.num_clusters}",
            hint="score both arms on one suite and keep its order",
        )
    cvar = estimate_mean(
        ContextSample(
            values=linearise_cvar(variant.values) - linearise_cvar(baseline.values), clusters=baseline.codes_P
        ),
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
        executor=executor,
    )
    return (
        *_quantile_changes(baseline, variant, confidence, num_resamples, seed, executor),
        tail_from_mean(CVAR_NAME, cvar),
        unknown_tail(MAX_NAME, float(variant.values.max() - baseline.values.max()), confidence, MAX_WHY),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedRuns:
    """Positions in ascending order of value, cut into K runs of L; padding belongs to the weightless cluster G."""

    values_KL: FloatArray
    codes_KL: IntArray
    counts_before_KG: FloatArray
    sizes_G: FloatArray


def sort_into_runs(sample: PositionSample) -> SortedRuns:
    """Sort positions and count, per cluster, how many come before each run."""
    num_positions, num_clusters = len(sample.values), sample.num_clusters
    length = math.isqrt(num_positions)
    num_runs = -(-num_positions // length)
    padding = num_runs * length - num_positions
    order = np.argsort(sample.values, kind="stable")
    codes = np.concatenate([sample.codes_P[order], np.full(padding, num_clusters)])
    cells = np.repeat(np.arange(num_runs), length) * (num_clusters + 1) + codes
    counts = np.bincount(cells, minlength=num_runs * (num_clusters + 1)).reshape(num_runs, -1)[:, :-1]
    return SortedRuns(
        values_KL=np.concatenate([sample.values[order], np.zeros(padding)]).reshape(num_runs, length),
        codes_KL=codes.reshape(num_runs, length),
        counts_before_KG=(np.cumsum(counts, axis=0) - counts).astype(np.float64),
        sizes_G=counts.sum(axis=0).astype(np.float64),
    )


def weighted_quantiles(counts_RG: FloatArray, runs: SortedRuns) -> FloatArray:
    """Return the quantiles [R, Q] of the pool in which cluster g's positions appear `counts_RG[:, g]` times."""
    rows = np.arange(len(counts_RG))
    total_R = counts_RG @ runs.sizes_G
    before_RK = counts_RG @ runs.counts_before_KG.T
    padded_RG = np.pad(counts_RG, ((0, 0), (0, 1)))
    quantiles = np.empty((len(counts_RG), len(QUANTILES_PERMILLE)))
    for column, permille in enumerate(QUANTILES_PERMILLE.values()):
        target_R = np.ceil(total_R * permille / 1000.0)
        run_R = np.sum(before_RK < target_R[:, None], axis=1) - 1
        weights_RL = np.take_along_axis(padded_RG, runs.codes_KL[run_R], axis=1)
        reached_RL = np.cumsum(weights_RL, axis=1) + before_RK[rows, run_R][:, None]
        quantiles[:, column] = runs.values_KL[run_R, np.sum(reached_RL < target_R[:, None], axis=1)]
    return quantiles


def _quantile_changes(
    baseline: PositionSample,
    variant: PositionSample,
    confidence: float,
    num_resamples: int,
    seed: int,
    executor: Executor | None,
) -> list[TailEstimate]:
    """Estimate the change of each quantile from draws that both arms share."""
    before, after = sort_into_runs(baseline), sort_into_runs(variant)
    every_cluster = np.ones((1, baseline.num_clusters))
    values = (weighted_quantiles(every_cluster, after) - weighted_quantiles(every_cluster, before))[0].tolist()
    if baseline.num_clusters == 1:
        why = "1 cluster: the variance between documents is unknown"
        return [
            unknown_tail(name, value, confidence, why) for name, value in zip(QUANTILES_PERMILLE, values, strict=True)
        ]
    statistic = partial(_drawn_changes, before=before, after=after)
    draws = map_blocks(statistic, stream="clusters", num_resamples=num_resamples, seed=seed, executor=executor)
    df = baseline.num_clusters - 1
    identical = np.array_equal(baseline.values, variant.values)
    return [
        _bound_change(name, value, np.sort(column), confidence, df, identical)
        for name, value, column in zip(QUANTILES_PERMILLE, values, draws.T, strict=True)
    ]


def _drawn_changes(
    generator: np.random.Generator, num_resamples: int, *, before: SortedRuns, after: SortedRuns
) -> FloatArray:
    counts_RG = draw_cluster_counts(generator, num_resamples, len(before.sizes_G))
    return weighted_quantiles(counts_RG, after) - weighted_quantiles(counts_RG, before)


def _bound_change(
    name: str, value: float, sorted_B: FloatArray, confidence: float, df: int, identical: bool
) -> TailEstimate:
    """Bound one change; identical arms are exact, but a change that no resample moves is not known."""
    if not identical and sorted_B[0] == sorted_B[-1]:
        return unknown_tail(name, value, confidence, "no resample changes this figure, so its spread is unknown")
    se = float(np.std(sorted_B, ddof=1))

    def union(alpha: float) -> Interval:
        half = se * float(stats.t.isf(alpha / 2, df))
        percentile = Interval(
            low=bootstrap_quantile(sorted_B, alpha / 2), high=bootstrap_quantile(sorted_B, 1.0 - alpha / 2)
        )
        return envelope(percentile, Interval(low=value - half, high=value + half))

    alpha = 1.0 - confidence
    one_sided = union(2.0 * alpha)
    return TailEstimate(
        name=name,
        value=value,
        interval=union(alpha),
        lower_bound=one_sided.low,
        upper_bound=one_sided.high,
        confidence=confidence,
        why="both arms hold the same values" if identical else "",
    )

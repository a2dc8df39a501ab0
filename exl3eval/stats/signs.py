"""Tests of "no difference" that use only signs or ranks, with the cluster as the unit of exchange.

They are shown beside the interval and never replace it: a large p-value says that no difference was seen, not that
there is none ("not significant, so pass" passes 49 % of regressions at the margin, measurement.md section 4).
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from exl3eval.stats.clusters import ContextSample, FloatArray
from exl3eval.stats.resample import map_blocks, sum_over_clusters

# All 2^G sign vectors are enumerated up to this many clusters that differ.
EXACT_CLUSTERS = 16

# Sums of the same magnitudes in another order tie up to rounding.
_TIE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class WinsTiesLosses:
    """How many units got better (difference < 0), stayed exactly equal, got worse (difference > 0)."""

    wins: int
    ties: int
    losses: int


def count_signs(differences: FloatArray) -> WinsTiesLosses:
    """Count wins, ties and losses of variant minus baseline, where less is better. Only an exact 0 is a tie."""
    wins, losses = int(np.sum(differences < 0)), int(np.sum(differences > 0))
    return WinsTiesLosses(wins=wins, ties=len(differences) - wins - losses, losses=losses)


def sign_flip_p(
    differences: ContextSample, *, num_resamples: int = 9_999, seed: int, executor: Executor | None = None
) -> float:
    """Two-sided permutation p-value: flip the sign of whole clusters, compare |sum of differences|.

    Exact when at most `EXACT_CLUSTERS` clusters differ from 0; otherwise seeded Monte Carlo with the
    (b + 1) / (m + 1) rule, which is a valid p-value and never 0 (Phipson and Smyth 2010).

    Parameters
    ----------
    differences : ContextSample
        Variant minus baseline per context.
    num_resamples : int
        m, the Monte Carlo sign vectors.
    seed : int
        Fixes them.
    executor : Executor, optional
        Threads or processes; changes no bit of the result.
    """
    sums = differences.sums_G
    sums = sums[sums != 0.0]
    if len(sums) <= EXACT_CLUSTERS:
        flipped = np.zeros(1)
        for cluster_sum in sums:
            flipped = np.concatenate([flipped + cluster_sum, flipped - cluster_sum])
        return float(np.mean(_as_extreme(flipped, observed=flipped[0], scale=np.abs(sums).sum())))
    statistic = partial(_flipped_sums, sums_G=sums)
    flipped = map_blocks(statistic, stream="signs", num_resamples=num_resamples, seed=seed, executor=executor)
    observed = sum_over_clusters(np.ones((1, len(sums))), sums[:, None])[0, 0]
    extreme = int(np.sum(_as_extreme(flipped, observed=observed, scale=np.abs(sums).sum())))
    return (extreme + 1) / (num_resamples + 1)


def sign_test_p(counts: WinsTiesLosses) -> float:
    """Two-sided exact sign test; ties are left out (1.0 when there is nothing else)."""
    decided = counts.wins + counts.losses
    return float(stats.binomtest(counts.wins, decided).pvalue) if decided else 1.0


def wilcoxon_p(differences: FloatArray) -> float:
    """Two-sided Wilcoxon signed-rank test; zeros are left out (1.0 when there is nothing else)."""
    decided = differences[differences != 0.0]
    return float(stats.wilcoxon(decided).pvalue) if decided.size else 1.0


def _flipped_sums(generator: np.random.Generator, num_resamples: int, *, sums_G: FloatArray) -> FloatArray:
    """Sum of cluster sums [R] under random signs."""
    signs = np.array([-1.0, 1.0])[generator.integers(0, 2, size=(num_resamples, len(sums_G)))]
    return sum_over_clusters(signs, sums_G[:, None])[:, 0]


def _as_extreme(flipped: FloatArray, *, observed: float, scale: float) -> np.ndarray:
    return np.abs(flipped) >= abs(observed) - _TIE * scale

"""Cluster resampling whose result does not depend on who computes it.

Resamples come in fixed blocks, each with its own Philox stream keyed by (seed, purpose, block index), and every
floating sum runs over clusters in one fixed order. So the same seed gives the same bits for any number of threads
or processes, and fewer resamples are a prefix of more. All arms of a call share the resamples, as a joint (max-T)
statement about several variants needs.

Clusters are drawn from the whole suite, not within strata: the measured coverage is of that scheme, and holding the
mix of strata fixed would only narrow the intervals.

Shapes: B resamples, R resamples of one block, G clusters, A arms, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, FloatArray, check_same_contexts, linearise_mean

BLOCK_RESAMPLES = 1024

_STREAMS = {"clusters": 0, "signs": 1}

# A resample whose spread is this small against its own shift is 1e6 standard errors away: call it infinite.
_ZERO_SPREAD = 1e-12
_ZERO_SHIFT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeanResamples:
    """Cluster bootstrap of the means of several arms on shared resamples.

    Attributes
    ----------
    means_BA : ndarray of float64
        Mean of each arm in each resample.
    studentised_BA : ndarray of float64
        (resampled mean - mean) / resampled standard error. Infinite where a resample has no spread at all.
    """

    means_BA: FloatArray
    studentised_BA: FloatArray


def resample_means(
    samples: Sequence[ContextSample], *, num_resamples: int, seed: int, executor: Executor | None = None
) -> MeanResamples:
    """Resample clusters once and compute every arm's mean and studentised mean.

    The resampled standard error is the functional of `linearise_mean` with each cluster's leverage held at its
    observed value, so that both sides of the pivot use one formula.

    Parameters
    ----------
    samples : sequence of ContextSample, length A
        The arms, on the same contexts, with at least two clusters.
    num_resamples : int
        B.
    seed : int
        Not negative.
    executor : Executor, optional
        Threads or processes to compute blocks on. Changes no bit of the result.

    Raises
    ------
    UsageError
        If there is no arm, arms differ in their contexts, or there is one cluster.
    """
    if not samples:
        raise UsageError("no arm to resample", hint="pass at least one sample")
    for other in samples[1:]:
        check_same_contexts(samples[0], other)
    arms = [linearise_mean(sample) for sample in samples]
    statistic = partial(
        _resampled_deviations,
        residual_sums_GA=np.stack([arm.residual_sums_G for arm in arms], axis=1),
        sizes_G=arms[0].sizes_G,
        leverage_G=arms[0].leverage_G,
        se_A=np.array([arm.se for arm in arms]),
    )
    deviations = map_blocks(statistic, stream="clusters", num_resamples=num_resamples, seed=seed, executor=executor)
    means = np.array([arm.mean for arm in arms])
    return MeanResamples(means_BA=means + deviations[:, 0], studentised_BA=deviations[:, 1])


def map_blocks(
    statistic: Callable[[np.random.Generator, int], FloatArray],
    *,
    stream: Literal["clusters", "signs"],
    num_resamples: int,
    seed: int,
    executor: Executor | None = None,
) -> FloatArray:
    """Compute `statistic(generator, R)` for each block and stack the rows in block order.

    `statistic` must be picklable when `executor` runs processes.

    Returns
    -------
    ndarray of float64, shape [B, ...]

    Raises
    ------
    UsageError
        If `num_resamples` is not positive or `seed` is negative.
    """
    if num_resamples < 1 or seed < 0:
        raise UsageError(
            f"num_resamples = {num_resamples} and seed = {seed}, expected num_resamples >= 1 and seed >= 0",
            hint="9,999 resamples and any fixed seed are the convention",
        )
    block = partial(_compute_block, statistic, stream, num_resamples, seed)
    blocks = range(-(-num_resamples // BLOCK_RESAMPLES))
    return np.concatenate(list((executor.map if executor else map)(block, blocks)))


def draw_cluster_counts(generator: np.random.Generator, num_resamples: int, num_clusters: int) -> FloatArray:
    """Draw G clusters with replacement, R times.

    Returns
    -------
    ndarray of float64, shape [R, G]
        How often each cluster was drawn; rows sum to G.
    """
    drawn = generator.integers(0, num_clusters, size=(num_resamples, num_clusters))
    cells = drawn + num_clusters * np.arange(num_resamples)[:, None]
    counts = np.bincount(cells.ravel(), minlength=num_resamples * num_clusters)
    return counts.reshape(num_resamples, num_clusters).astype(np.float64)


def sum_over_clusters(weights_RG: FloatArray, columns_GC: FloatArray) -> FloatArray:
    """Return weights @ columns [R, C], adding clusters one by one.

    A BLAS product may split or fuse the sum differently on other thread counts and processors; this one cannot.
    """
    total = np.zeros((len(weights_RG), columns_GC.shape[1]))
    product = np.empty_like(total)
    for weights_R, column_C in zip(np.ascontiguousarray(weights_RG.T), columns_GC, strict=True):
        np.multiply(weights_R[:, None], column_C, out=product)
        total += product
    return total


def _compute_block(
    statistic: Callable[[np.random.Generator, int], FloatArray],
    stream: str,
    num_resamples: int,
    seed: int,
    block: int,
) -> FloatArray:
    """Run `statistic` on one block's own random stream."""
    key = np.random.SeedSequence(entropy=seed, spawn_key=(_STREAMS[stream], block))
    rows = min(BLOCK_RESAMPLES, num_resamples - block * BLOCK_RESAMPLES)
    return statistic(np.random.Generator(np.random.Philox(key)), rows)


def _resampled_deviations(
    generator: np.random.Generator,
    num_resamples: int,
    *,
    residual_sums_GA: FloatArray,
    sizes_G: FloatArray,
    leverage_G: FloatArray,
    se_A: FloatArray,
) -> FloatArray:
    """Return [R, 2, A]: resampled mean minus mean, and the same over its resampled standard error."""
    num_clusters, num_arms = residual_sums_GA.shape
    counts_RG = draw_cluster_counts(generator, num_resamples, num_clusters)
    corrected_GA = leverage_G[:, None] * residual_sums_GA
    columns_GC = np.concatenate(
        [
            sizes_G[:, None],
            (leverage_G * sizes_G**2)[:, None],
            residual_sums_GA,
            corrected_GA * residual_sums_GA,
            corrected_GA * sizes_G[:, None],
        ],
        axis=1,
    )
    sums = sum_over_clusters(counts_RG, columns_GC)
    contexts, squared_sizes = sums[:, :1], sums[:, 1:2]
    residuals, squares, crosses = np.split(sums[:, 2:], [num_arms, 2 * num_arms], axis=1)
    shift = residuals / contexts
    scale = squares + shift**2 * squared_sizes
    spread = scale - 2.0 * shift * crosses
    spread = np.where(spread > _ZERO_SPREAD * scale, spread, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        studentised = shift * contexts / np.sqrt(spread)
    studentised[(spread == 0.0) & (np.abs(shift) <= _ZERO_SHIFT * se_A)] = 0.0
    return np.stack([shift, studentised], axis=1)

"""Which documents carry a mean: leave one cluster out and see how it moves. They are listed, never dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exl3eval.stats.clusters import ContextSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfluence:
    """What one cluster does to the mean over contexts.

    Attributes
    ----------
    cluster : str or int
        Its id.
    num_contexts : int
        Its number of contexts.
    cluster_mean : float
        Mean over its contexts.
    mean_without : float
        Mean over all other contexts.
    influence : float
        Mean with the cluster minus mean without it.
    """

    cluster: str | int
    num_contexts: int
    cluster_mean: float
    mean_without: float
    influence: float


def rank_influence(sample: ContextSample, *, num_top: int = 5) -> tuple[ClusterInfluence, ...]:
    """Return the clusters that move the mean most, largest |influence| first, ties by id.

    Clusters that do not move it are left out, and with one cluster nothing is left to compare with.
    """
    if sample.num_clusters == 1 or sample.all_equal:
        return ()
    sums, sizes, mean = sample.sums_G, sample.sizes_G, sample.mean()
    without = (sums.sum() - sums) / (sizes.sum() - sizes)
    influence = mean - without
    order = np.argsort(-np.abs(influence), kind="stable")
    top = order[influence[order] != 0.0][:num_top]
    return tuple(
        ClusterInfluence(
            cluster=sample.labels[code],
            num_contexts=int(sizes[code]),
            cluster_mean=float(sums[code] / sizes[code]),
            mean_without=float(without[code]),
            influence=float(influence[code]),
        )
        for code in top
    )

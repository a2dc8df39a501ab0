"""The same estimate for each kind of text, so that a mean cannot hide the one that a change hurts."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.intervals import Estimate, estimate_mean


def estimate_strata(
    sample: ContextSample,
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> dict[str | int, Estimate]:
    """Estimate the mean of each stratum on its own, in sorted order of strata.

    Levels are per stratum; a statement about the worst of them needs Holm or max-T on top. A stratum of one cluster
    has no interval and says so.

    Raises
    ------
    UsageError
        If the sample has no strata or an option is out of range.
    """
    if sample.strata is None:
        raise UsageError("the sample has no strata", hint="pass strata=, one kind of text per context")
    strata, clusters = np.asarray(sample.strata), np.asarray(sample.clusters)
    return {
        stratum.item(): estimate_mean(
            ContextSample(values=sample.values[strata == stratum], clusters=clusters[strata == stratum]),
            confidence=confidence,
            num_resamples=num_resamples,
            seed=seed,
            executor=executor,
        )
        for stratum in np.unique(strata)
    }

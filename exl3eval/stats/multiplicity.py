"""Several comparisons at once: a joint level from shared resamples, and Holm's step-down p-values.

The joint level is a balanced max-T (Beran 1988): the same cluster resamples give every arm's studentised mean, each is
replaced by its rank within its own arm, and the worst rank of each resample tells which single-comparison level keeps
the whole family at its own. Arms that move together cost little, independent ones cost as much as Bonferroni, and every
arm then gets the ordinary envelope at that level. Unadjusted, eight variants cover .687 (measurement.md section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.resample import resample_means


def joint_confidence(
    samples: Sequence[ContextSample],
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> float:
    """Return the level of single one-sided bounds at which all of them hold together at level `confidence`.

    Parameters
    ----------
    samples : sequence of ContextSample, length A
        The arms, on the same contexts. Arms whose values are all equal are exact and cost nothing.
    confidence : float
        Level of the family, for its upper bounds and for its lower bounds. For two-sided intervals of level
        1 - a, ask for 1 - a/2.
    num_resamples, seed, executor
        As `exl3eval.stats.intervals.estimate_means`; use the same ones there.

    Returns
    -------
    float
        Between `confidence` (one arm) and the Bonferroni level.

    Raises
    ------
    UsageError
        If `confidence` is out of range or the arms differ in their contexts.
    """
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"confidence = {confidence}, expected a number in (0, 1)", hint="0.95 is the convention")
    varying = [sample for sample in samples if not sample.all_equal]
    if len(varying) < 2 or varying[0].num_clusters < 2:
        return confidence
    alpha = 1.0 - confidence
    drawn = resample_means(varying, num_resamples=num_resamples, seed=seed, executor=executor).studentised_BA
    ranks_BA = stats.rankdata(drawn, axis=0) / (num_resamples + 1)
    worst = (ranks_BA.min(axis=1), 1.0 - ranks_BA.max(axis=1))
    rank = max(int(alpha * (num_resamples + 1) + 1e-9), 1)
    joint = min(float(np.partition(tail, rank - 1)[rank - 1]) for tail in worst)
    return 1.0 - min(max(joint, alpha / len(varying)), alpha)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Adjust p-values for the number of tests (Holm 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    stepped = np.minimum(np.maximum.accumulate(np.asarray(p_values, dtype=np.float64)[order] * factors), 1.0)
    adjusted = np.empty(len(p_values))
    adjusted[order] = stepped
    return tuple(adjusted.tolist())

"""A variant against its baseline on identical contexts.

Only the per-context difference is studied. Comparing the two arms' separate intervals, or an unpaired z, throws away
the pairing that is worth hundreds of times the contexts (lessons M28, P2), and the spread within one arm says nothing
about the power of the pair (M41).
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, check_same_contexts
from exl3eval.stats.influence import ClusterInfluence, rank_influence
from exl3eval.stats.intervals import Estimate, estimate_means
from exl3eval.stats.signs import WinsTiesLosses, count_signs, sign_flip_p, sign_test_p, wilcoxon_p

TRIMMED_FRACTION = 0.1
POWER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Variant minus baseline over the same contexts; positive means that the variant is worse.

    Attributes
    ----------
    delta : Estimate
        Mean difference, with n, G, DEFF and sigma_d (`delta.sd`).
    log_ratio : Estimate or None
        Mean of log(variant / baseline); None when a value of either arm is not positive. The fairer scale for a
        route whose error grows with the context's own KLD.
    by_context, by_cluster : WinsTiesLosses
        Signs of the per-context differences and of the per-cluster sums.
    sign_flip_p : float
        Cluster sign-flip permutation, two-sided: the primary p-value.
    sign_test_p, wilcoxon_p : float
        Two-sided, on clusters (sums and means): secondary.
    median, trimmed_mean : float
        Of the per-context differences, `TRIMMED_FRACTION` cut from each side: secondary.
    mde : float or None
        Smallest true difference that this design would call a regression with probability `POWER`, one-sided at
        `delta.confidence`; None when the spread is unknown or is 0 (a repeat that agrees is not a precise ruler, M33).
    top_clusters : tuple of ClusterInfluence
        The documents that move the mean difference most.
    """

    delta: Estimate
    log_ratio: Estimate | None
    by_context: WinsTiesLosses
    by_cluster: WinsTiesLosses
    sign_flip_p: float
    sign_test_p: float
    wilcoxon_p: float
    median: float
    trimmed_mean: float
    mde: float | None
    top_clusters: tuple[ClusterInfluence, ...]


def estimate_paired_difference(
    baseline: ContextSample,
    variant: ContextSample,
    *,
    confidence: float = 0.95,
    num_resamples: int = 9_999,
    seed: int,
    executor: Executor | None = None,
) -> PairedDifference:
    """Estimate variant minus baseline from per-context values of the same contexts in the same order.

    Parameters
    ----------
    baseline, variant : ContextSample
        The two arms.
    confidence, num_resamples, seed, executor
        As `estimate_means`.

    Raises
    ------
    UsageError
        If the contexts' clusters do not line up, or an option is out of range.
    """
    check_same_contexts(baseline, variant)
    differences = baseline.replace_values(variant.values - baseline.values)
    samples = [differences]
    if baseline.values.min() > 0.0 and variant.values.min() > 0.0:
        samples.append(baseline.replace_values(np.log(variant.values) - np.log(baseline.values)))
    delta, *log_ratios = estimate_means(
        samples, confidence=confidence, num_resamples=num_resamples, seed=seed, executor=executor
    )
    by_cluster = count_signs(differences.sums_G)
    return PairedDifference(
        delta=delta,
        log_ratio=log_ratios[0] if log_ratios else None,
        by_context=count_signs(differences.values),
        by_cluster=by_cluster,
        sign_flip_p=sign_flip_p(differences, num_resamples=num_resamples, seed=seed, executor=executor),
        sign_test_p=sign_test_p(by_cluster),
        wilcoxon_p=wilcoxon_p(differences.sums_G / differences.sizes_G),
        median=float(np.median(differences.values)),
        trimmed_mean=float(stats.trim_mean(np.sort(differences.values), TRIMMED_FRACTION)),
        mde=_mde_of(delta),
        top_clusters=rank_influence(differences),
    )


def minimum_detectable_effect(
    *, sigma: float, deff: float, num_contexts: int, alpha: float = 0.05, power: float = POWER
) -> float:
    """Return the effect that a one-sided test at level `alpha` detects with probability `power`.

    (z_{1-alpha} + z_power) * sigma * sqrt(deff / n): measurement.md section 4 solved for the margin.

    Parameters
    ----------
    sigma : float
        Standard deviation over contexts of the paired difference.
    deff : float
        Design effect of the clusters.
    num_contexts : int
        n.

    Raises
    ------
    UsageError
        If an argument is out of range.
    """
    if not (sigma > 0 and deff > 0 and num_contexts >= 1 and 0 < alpha < 1 and 0 < power < 1):
        raise UsageError(
            f"no power figure for sigma = {sigma}, deff = {deff}, n = {num_contexts}, alpha = {alpha}, power = {power}",
            hint="sigma and deff are positive, n >= 1, alpha and power lie in (0, 1)",
        )
    return float((stats.norm.isf(alpha) + stats.norm.ppf(power)) * sigma * math.sqrt(deff / num_contexts))


def _mde_of(delta: Estimate) -> float | None:
    if not delta.sd or not delta.deff:
        return None
    return minimum_detectable_effect(
        sigma=delta.sd, deff=delta.deff, num_contexts=delta.num_contexts, alpha=1.0 - delta.confidence
    )

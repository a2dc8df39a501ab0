"""The guard on kinds of text: a mean must not hide the one that a change hurts.

Each kind is tested alone for harm beyond its own margin, and p-values are adjusted for their number (Holm), so that
looking for the worst of many is no licence to find one. The guard can fail a change, never pass it.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
from scipy import stats

from exl3eval.gate.policy import Policy
from exl3eval.gate.rows import ArmRows
from exl3eval.gate.verdict import Outcome, StratumVerdict, resolve_margin
from exl3eval.stats.clusters import ContextSample, linearise_mean
from exl3eval.stats.intervals import estimate_mean
from exl3eval.stats.multiplicity import holm
from exl3eval.stats.resample import resample_means


def judge_strata(
    baseline: ArmRows,
    floor: ArmRows,
    variant: ArmRows,
    policy: Policy,
    level: float,
    num_resamples: int,
    executor: Executor | None,
) -> list[StratumVerdict]:
    """Test each kind of text for harm beyond its margin; Holm over kinds; the judged ones first, worst first."""
    if policy.strata is None:
        return []
    kl = {rows.arm: rows.average(rows.kl_NP).values for rows in (baseline, floor, variant)}
    kinds, clusters = np.asarray(baseline.strata), np.asarray(baseline.clusters)
    tests: list[StratumVerdict] = []
    for kind in sorted(set(baseline.strata)):
        chosen = kinds == kind
        own, floor_own = (float(kl[rows.arm][chosen].mean()) for rows in (baseline, floor))
        margin = resolve_margin(policy.strata, baseline=own, floor=floor_own).value
        values = kl[variant.arm][chosen] - kl[baseline.arm][chosen]
        sample = ContextSample(values=values, clusters=clusters[chosen])
        upper = p_harm = None
        if sample.num_clusters >= policy.strata.min_clusters:
            upper = estimate_mean(
                sample, confidence=1.0 - level, num_resamples=num_resamples, seed=policy.seed, executor=executor
            ).upper_bound
            p_harm = _harm_p(sample, margin, num_resamples=num_resamples, seed=policy.seed, executor=executor)
        tests.append(
            StratumVerdict(
                variant=variant.arm,
                stratum=kind,
                outcome=Outcome.INCONCLUSIVE,
                value=sample.mean(),
                upper=upper,
                margin=margin,
                num_contexts=sample.num_contexts,
                num_clusters=sample.num_clusters,
                p_harm=p_harm,
                p_holm=None,
            )
        )
    judged = [test for test in tests if test.p_harm is not None]
    adjusted = holm([test.p_harm for test in judged if test.p_harm is not None])
    found = [
        replace(test, p_holm=p_holm, outcome=Outcome.FAIL if p_holm < level else Outcome.PASS)
        for test, p_holm in zip(judged, adjusted, strict=True)
    ]
    found += [test for test in tests if test.p_harm is None]
    return sorted(found, key=lambda test: (test.p_holm is None, -test.value / test.margin))


def _harm_p(sample: ContextSample, margin: float, *, num_resamples: int, seed: int, executor: Executor | None) -> float:
    """One-sided p-value of "the mean is above the margin": the larger of cluster-t and cluster bootstrap-t."""
    if sample.all_equal:
        return 0.0 if sample.mean() > margin else 1.0
    linear = linearise_mean(sample)
    if linear.se == 0.0:
        return 1.0
    score = (linear.mean - margin) / linear.se
    drawn = resample_means([sample], num_resamples=num_resamples, seed=seed, executor=executor).studentised_BA[:, 0]
    above = (1 + int(np.sum(drawn >= score))) / (num_resamples + 1)
    return max(float(stats.t.sf(score, sample.num_clusters - 1)), above)

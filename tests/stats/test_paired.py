"""Pairing, signs and power: the lessons about them, each as a property."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.influence import rank_influence
from exl3eval.stats.intervals import Interval, estimate_mean
from exl3eval.stats.paired import estimate_paired_difference, minimum_detectable_effect
from exl3eval.stats.signs import WinsTiesLosses, count_signs, sign_flip_p, sign_test_p, wilcoxon_p


def two_arms(num_contexts: int = 136, shift: float = 0.01, seed: int = 0) -> tuple[ContextSample, ContextSample]:
    """Skewed base KLD near 0.003 and a variant `shift` worse with small noise, in pairs of contexts."""
    generator = np.random.default_rng(seed)
    clusters = np.arange(num_contexts) // 2
    base = 0.003 * np.exp(generator.normal(size=num_contexts))
    variant = base * (1 + shift) * np.exp(0.005 * generator.standard_t(5, size=num_contexts))
    return (ContextSample(values=values, clusters=clusters) for values in (base, variant))


def test_delta_is_the_estimate_of_the_differences():
    base, variant = two_arms()
    found = estimate_paired_difference(base, variant, seed=1)
    assert found.delta == estimate_mean(base.replace_values(variant.values - base.values), seed=1)
    assert found.log_ratio == estimate_mean(base.replace_values(np.log(variant.values) - np.log(base.values)), seed=1)
    assert math.log(1.01) in found.log_ratio.interval
    assert found.median == np.median(variant.values - base.values)


def test_pairing_sees_what_two_separate_intervals_cannot():
    """M28 and P2: the arms' own intervals overlap almost entirely, the paired one excludes 0 by far."""
    base, variant = two_arms()
    first, second = (estimate_mean(arm, seed=1) for arm in (base, variant))
    assert first.interval.low < second.mean < first.interval.high
    unpaired_z = (second.mean - first.mean) / math.hypot(first.se, second.se)
    paired = estimate_paired_difference(base, variant, seed=1)
    assert abs(unpaired_z) < 0.2
    assert paired.delta.interval.low > 0
    assert paired.delta.mean / paired.delta.se > 5
    assert paired.sign_flip_p < 0.001


def test_identical_arms_are_all_ties_with_an_exact_zero():
    """M31: ties went to one side and identical runs read as 0 of 512 wins. M33: no spread is not a precise ruler."""
    base, _ = two_arms()
    same = estimate_paired_difference(base, base, seed=1)
    assert same.by_context == WinsTiesLosses(wins=0, ties=136, losses=0)
    assert same.by_cluster == WinsTiesLosses(wins=0, ties=68, losses=0)
    assert same.delta.mean == 0.0
    assert same.delta.interval == same.log_ratio.interval == Interval(low=0.0, high=0.0)
    assert same.sign_flip_p == same.sign_test_p == same.wilcoxon_p == 1.0
    assert same.mde is None
    assert same.top_clusters == ()


def test_swapping_the_arms_swaps_everything():
    base, variant = two_arms(shift=0.0)
    forward, backward = (estimate_paired_difference(*arms, seed=1) for arms in ((base, variant), (variant, base)))
    assert forward.by_context.wins == backward.by_context.losses
    assert forward.delta.mean == -backward.delta.mean
    assert forward.delta.interval.high == pytest.approx(-backward.delta.interval.low, rel=1e-9)
    assert forward.sign_flip_p == backward.sign_flip_p
    assert forward.mde == pytest.approx(backward.mde)


def test_only_an_exact_zero_is_a_tie():
    counts = count_signs(np.array([-1e-300, 0.0, -0.0, 1e-300, 2.0]))
    assert counts == WinsTiesLosses(wins=1, ties=2, losses=2)


def test_log_ratio_needs_positive_values():
    base = ContextSample(values=[0.0, 1.0, 2.0, 5.0], clusters=range(4))
    found = estimate_paired_difference(base, base.replace_values(np.array([0.1, 1.2, 2.1, 5.3])), seed=1)
    assert found.log_ratio is None
    assert found.delta.mean == pytest.approx(0.175)


def test_arms_of_other_contexts_are_refused():
    base, _ = two_arms()
    other, _ = two_arms(num_contexts=130)
    with pytest.raises(UsageError, match="136 contexts in 68 clusters against 130 in 65"):
        estimate_paired_difference(base, other, seed=1)


def test_one_cluster_leaves_the_difference_unknown():
    base = ContextSample(values=[1.0, 2.0, 4.0], clusters=["a"] * 3)
    found = estimate_paired_difference(base, base.replace_values(base.values * 1.1), seed=1)
    assert found.delta.interval is found.mde is None
    assert found.sign_flip_p == 1.0
    assert found.top_clusters == ()


def test_sign_flip_enumerates_every_sign_vector_when_few_clusters():
    generator = np.random.default_rng(3)
    values, clusters = generator.normal(0.4, 1, size=20), np.arange(20) // 2
    sums = np.add.reduceat(values, np.arange(0, 20, 2))
    flips = [abs(np.dot(signs, sums)) for signs in product((1, -1), repeat=10)]
    expected = np.mean(np.array(flips) >= abs(sums.sum()) - 1e-12)
    assert sign_flip_p(ContextSample(values=values, clusters=clusters), seed=0) == expected


def test_sign_flip_monte_carlo_agrees_with_scipy_and_is_never_zero():
    values = np.random.default_rng(4).normal(0.25, 1, size=60)
    sample = ContextSample(values=values, clusters=range(60))
    theirs = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(0)
    ).pvalue
    assert sign_flip_p(sample, seed=1) == pytest.approx(theirs, abs=4 * math.sqrt(theirs / 9_999) + 1e-4)
    assert sign_flip_p(sample.replace_values(np.abs(values)), seed=1) == 1 / 10_000


def test_sign_flip_does_not_depend_on_workers():
    sample = ContextSample(values=np.random.default_rng(4).normal(size=60), clusters=range(60))
    with ThreadPoolExecutor(3) as executor:
        assert sign_flip_p(sample, seed=1, executor=executor) == sign_flip_p(sample, seed=1)


def test_sign_flip_holds_its_level_with_clusters_and_fails_without():
    generator = np.random.default_rng(6)
    clusters = np.arange(48) // 4
    with_clusters, without = [], []
    for _ in range(300):
        values = generator.normal(size=12)[clusters] + 0.5 * generator.normal(size=48)
        with_clusters.append(sign_flip_p(ContextSample(values=values, clusters=clusters), seed=1))
        singles = ContextSample(values=values, clusters=range(48))
        without.append(sign_flip_p(singles, seed=1, num_resamples=499))
    # Binomial error of 300 trials at 0.05 is 0.0126: three of them either side.
    assert np.mean(np.array(with_clusters) <= 0.05) == pytest.approx(0.05, abs=0.038)
    assert np.mean(np.array(without) <= 0.05) > 0.2


def test_rank_tests_match_scipy_and_leave_zeros_out():
    differences = np.array([0.0, 0.3, -0.1, 0.7, 0.9, 0.0, 1.1, 0.2, -0.4, 0.8])
    decided = differences[differences != 0]
    assert wilcoxon_p(differences) == stats.wilcoxon(decided).pvalue
    assert sign_test_p(count_signs(differences)) == stats.binomtest(2, 8).pvalue


def test_mde_solves_the_sample_size_formula():
    """n = DEFF ((z_{1-a} + z_{1-b}) sigma / margin)^2, and the published kernel-route shape."""
    mde = minimum_detectable_effect(sigma=2.0, deff=1.4, num_contexts=136)
    z = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    assert 1.4 * (z * 2.0 / mde) ** 2 == pytest.approx(136)
    published = minimum_detectable_effect(sigma=1.16e-4, deff=1.0, num_contexts=136)
    assert published == pytest.approx(2.6e-5, rel=0.06)
    base, variant = two_arms()
    found = estimate_paired_difference(base, variant, seed=1)
    assert found.mde == pytest.approx(z * found.delta.se)


def test_mde_comes_from_the_pair_not_from_one_arm():
    """M41: the spread within an arm overstates the paired spread by orders of magnitude."""
    base, variant = two_arms()
    found = estimate_paired_difference(base, variant, seed=1)
    assert found.delta.sd < base.values.std(ddof=1) / 30
    assert found.delta.sd == pytest.approx(np.std(variant.values - base.values, ddof=1), rel=1e-13)


@pytest.mark.parametrize(
    "bad", [{"sigma": 0.0}, {"deff": -1.0}, {"num_contexts": 0}, {"alpha": 1.0}, {"power": 0.0}, {"sigma": math.nan}]
)
def test_power_arguments_out_of_range_are_refused(bad):
    with pytest.raises(UsageError, match="no power figure"):
        minimum_detectable_effect(**({"sigma": 1.0, "deff": 1.0, "num_contexts": 10} | bad))


def test_influence_is_the_mean_with_and_without_the_cluster():
    sample = ContextSample(values=[1.0, 2.0, 3.0, 50.0, 0.0], clusters=["a", "a", "b", "c", "d"])
    top = rank_influence(sample, num_top=2)
    assert [cluster.cluster for cluster in top] == ["c", "a"]
    assert top[0].mean_without == pytest.approx(1.5)
    assert top[0].influence == pytest.approx(11.2 - 1.5)
    assert top[1].num_contexts == 2
    assert top[1].cluster_mean == 1.5
    assert top[1].mean_without == pytest.approx(53 / 3)

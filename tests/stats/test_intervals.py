"""Each interval equals its definition; what is unknown is None; the null arm is exact."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, linearise_mean
from exl3eval.stats.intervals import Interval, bootstrap_quantile, envelope, estimate_mean, estimate_means
from exl3eval.stats.resample import resample_means
from exl3eval.stats.strata import estimate_strata


def skewed(contexts: int = 60, per_cluster: int = 2, seed: int = 0) -> ContextSample:
    generator = np.random.default_rng(seed)
    clusters = np.arange(contexts) // per_cluster
    shared = generator.normal(size=contexts)[clusters]
    return ContextSample(values=np.exp(generator.normal(size=contexts) + shared), clusters=clusters)


def test_cluster_t_on_singletons_is_the_textbook_t_interval():
    sample = skewed(per_cluster=1)
    found = estimate_mean(sample, seed=0, confidence=0.9).cluster_t
    low, high = stats.t.interval(0.9, df=59, loc=sample.values.mean(), scale=stats.sem(sample.values))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))


def test_cluster_t_has_one_degree_of_freedom_less_than_clusters():
    estimate = estimate_mean(skewed(contexts=24, per_cluster=3), seed=0)
    assert (estimate.num_contexts, estimate.num_clusters) == (24, 8)
    half = (estimate.cluster_t.high - estimate.cluster_t.low) / 2
    assert half / estimate.se == pytest.approx(2.3646242515927853, rel=1e-12)  # t table, 7 df


def test_bootstrap_t_is_the_pivot_turned_round():
    sample = skewed()
    estimate, linear = estimate_mean(sample, seed=4), linearise_mean(sample)
    pivots = sorted(resample_means([sample], num_resamples=9_999, seed=4).studentised_BA[:, 0])
    assert estimate.bootstrap_t.low == linear.mean - linear.se * pivots[9_750 - 1]
    assert estimate.bootstrap_t.high == linear.mean - linear.se * pivots[250 - 1]
    assert estimate.upper_bound == max(
        linear.mean - linear.se * pivots[500 - 1], linear.mean + linear.se * stats.t.isf(1 - 0.95, 29)
    )


def test_interval_is_the_envelope_of_the_two_methods():
    estimate = estimate_mean(skewed(), seed=1)
    assert estimate.interval == envelope(estimate.cluster_t, estimate.bootstrap_t)
    assert estimate.interval.low == estimate.cluster_t.low < estimate.bootstrap_t.low
    assert estimate.interval.high == estimate.bootstrap_t.high > estimate.cluster_t.high
    assert estimate.interval.low < estimate.lower_bound < estimate.mean < estimate.upper_bound < estimate.interval.high


def test_a_bound_is_one_side_of_a_wider_two_sided_interval():
    one_sided, two_sided = estimate_mean(skewed(), seed=1), estimate_mean(skewed(), seed=1, confidence=0.9)
    assert one_sided.upper_bound == pytest.approx(two_sided.interval.high, rel=1e-12)
    assert one_sided.lower_bound == pytest.approx(two_sided.interval.low, rel=1e-12)


def test_cross_checks_agree_with_scipy_on_iid_values():
    sample = skewed(contexts=80, per_cluster=1)
    ours = estimate_mean(sample, seed=2, num_resamples=60_000)
    for method, interval in (("BCa", ours.bca), ("percentile", ours.percentile)):
        theirs = stats.bootstrap(
            (sample.values,), np.mean, n_resamples=60_000, method=method, rng=np.random.default_rng(3)
        ).confidence_interval
        # BCa reads the 99.5 % quantile here; its Monte Carlo error is 2 % of the standard error at 60,000 draws.
        assert interval.low == pytest.approx(theirs.low, abs=0.08 * ours.se)
        assert interval.high == pytest.approx(theirs.high, abs=0.08 * ours.se)
        if method == "BCa":
            assert interval.high - ours.percentile.high > 0.15 * ours.se  # so the comparison tells the two apart


def test_design_effect():
    values = np.random.default_rng(0).normal(size=40)
    assert estimate_mean(ContextSample(values=values, clusters=range(40)), seed=0).deff == pytest.approx(1.0, rel=1e-12)
    # Twins: 40 clusters of two identical contexts hold the information of 40, so DEFF is 2 up to (n - 1) / n terms.
    twins = ContextSample(values=np.repeat(values, 2), clusters=np.repeat(np.arange(40), 2))
    assert estimate_mean(twins, seed=0).deff == pytest.approx(2 * (79 / 80) * (40 / 39), rel=1e-12)


def test_ratio_mean_weighs_contexts_not_clusters():
    sample = ContextSample(values=[1.0, 1.0, 1.0, 5.0], clusters=["a", "a", "a", "b"])
    assert estimate_mean(sample, seed=0).mean == 2.0


def test_one_cluster_is_unknown_never_zero_width():
    """P9."""
    for values in ([1.0], [1.0, 2.0], [0.0, 0.0]):
        estimate = estimate_mean(ContextSample(values=values, clusters=["a"] * len(values)), seed=0)
        assert estimate.interval is estimate.lower_bound is estimate.upper_bound is estimate.se is None
        assert "1 cluster" in estimate.why


@pytest.mark.parametrize("value", [0.0, 0.1, -3e-5])
def test_the_null_arm_is_exact(value):
    sample = ContextSample(values=[value] * 30, clusters=[i // 3 for i in range(30)])
    estimate = estimate_mean(sample, seed=0)
    assert estimate.mean == estimate.lower_bound == estimate.upper_bound == value
    assert estimate.interval == Interval(low=value, high=value)
    assert estimate.se == 0.0
    assert estimate.deff is None
    assert "all 30 values are equal" in estimate.why


def test_equal_cluster_means_of_unequal_values_are_unknown():
    sample = ContextSample(values=[0.1, 0.3] * 10, clusters=[i // 2 for i in range(20)])
    estimate = estimate_mean(sample, seed=0)
    assert estimate.interval is None
    assert "same mean" in estimate.why


def test_one_cluster_that_differs_leaves_the_far_side_unknown():
    estimate = estimate_mean(ContextSample(values=[0.0] * 39 + [1.0], clusters=range(40)), seed=0)
    assert estimate.interval is estimate.upper_bound is estimate.bootstrap_t is None
    assert estimate.lower_bound < 0.0
    assert "too few clusters differ" in estimate.why


def test_two_clusters_do_not_crash():
    estimate = estimate_mean(ContextSample(values=[1.0, 2.0, 4.0], clusters=["a", "a", "b"]), seed=0)
    assert estimate.cluster_t.low < estimate.mean < estimate.cluster_t.high
    assert estimate.interval is None  # half of all resamples draw one cluster twice


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=12),
    num_clusters=st.integers(1, 6),
)
def test_no_input_yields_nan_or_a_disordered_interval(values, num_clusters):
    sample = ContextSample(values=values, clusters=[i % num_clusters for i in range(len(values))])
    estimate = estimate_mean(sample, seed=0, num_resamples=99)
    numbers = [x for x in asdict(estimate).values() if isinstance(x, float)]
    assert all(math.isfinite(x) for x in numbers)
    for interval in (estimate.interval, estimate.cluster_t, estimate.bootstrap_t, estimate.bca, estimate.percentile):
        assert interval is None or interval.low <= interval.high
    assert (estimate.interval is None) <= bool(estimate.why)


def test_same_seed_same_digits_and_order_of_contexts_is_irrelevant():
    sample = skewed()
    order = np.random.default_rng(8).permutation(60)
    shuffled = ContextSample(values=sample.values[order], clusters=np.asarray(sample.clusters)[order])
    assert estimate_mean(sample, seed=7) == estimate_mean(sample, seed=7) == estimate_mean(shuffled, seed=7)
    assert estimate_mean(sample, seed=7) != estimate_mean(sample, seed=8)


def test_location_and_scale_carry_through():
    sample = skewed()
    base = estimate_mean(sample, seed=1)
    moved = estimate_mean(sample.replace_values(3.0 - 2.0 * sample.values), seed=1)
    assert moved.se == pytest.approx(2.0 * base.se, rel=1e-12)
    assert moved.interval.low == pytest.approx(3.0 - 2.0 * base.interval.high, rel=1e-9)
    assert moved.bca.high == pytest.approx(3.0 - 2.0 * base.bca.low, rel=1e-6)


def test_arms_are_estimated_as_if_alone():
    first, second = skewed(seed=1), skewed(seed=2)
    assert estimate_means([first, second], seed=3) == (estimate_mean(first, seed=3), estimate_mean(second, seed=3))


def test_quantile_ranks():
    draws = np.arange(1.0, 10_000.0)
    assert bootstrap_quantile(draws, 0.025) == 250
    assert bootstrap_quantile(draws, 0.975) == 9_750
    assert bootstrap_quantile(draws, 1 - 0.9) == 1_000
    assert bootstrap_quantile(draws, 0.0) == 1


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_out_of_range_is_refused(confidence):
    with pytest.raises(UsageError, match=f"confidence = {confidence}"):
        estimate_mean(skewed(), seed=0, confidence=confidence)


def test_too_few_resamples_are_refused():
    with pytest.raises(UsageError, match=r"num_resamples = 38 .* expected >= 39"):
        estimate_mean(skewed(), seed=0, num_resamples=38)
    assert estimate_mean(skewed(), seed=0, num_resamples=39).interval is not None


def test_strata_are_estimated_on_their_own():
    sample = skewed(contexts=40)
    strata = np.array(["code", "prose"])[np.arange(40) // 38]
    with_strata = ContextSample(values=sample.values, clusters=sample.clusters, strata=strata)
    found = estimate_strata(with_strata, seed=1)
    assert list(found) == ["code", "prose"]
    part = ContextSample(values=sample.values[:38], clusters=np.asarray(sample.clusters)[:38])
    assert found["code"] == estimate_mean(part, seed=1)
    assert found["prose"].interval is None
    assert "1 cluster" in found["prose"].why
    with pytest.raises(UsageError, match="no strata"):
        estimate_strata(sample, seed=1)

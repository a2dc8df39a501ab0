"""Pooled tails equal their definitions; weighted quantiles equal copying the clusters."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import PositionSample
from exl3eval.stats.tail_changes import estimate_tail_changes, sort_into_runs, weighted_quantiles
from exl3eval.stats.tails import QUANTILES_PERMILLE, estimate_tails

NAMES = [*QUANTILES_PERMILLE, "cvar1", "max"]


def positions(count: int, clusters: int, seed: int = 0, decimals: int | None = None) -> PositionSample:
    generator = np.random.default_rng(seed)
    labels = np.sort(generator.integers(0, clusters, size=count))
    values = np.exp(-7 + 1.6 * generator.normal(size=count) + 0.8 * generator.normal(size=clusters)[labels])
    return PositionSample(values=values if decimals is None else values.round(decimals), clusters=labels)


def naive_quantiles(values: np.ndarray) -> list[float]:
    return [np.quantile(values, permille / 1000, method="inverted_cdf") for permille in QUANTILES_PERMILLE.values()]


def naive_cvar(values: np.ndarray) -> float:
    """Mean of the worst 1 %, the boundary value counted in part when 1 % is not a whole number of positions."""
    ordered, share = np.sort(values)[::-1], len(values) / 100
    whole = int(share)
    return (ordered[:whole].sum() + (share - whole) * ordered[whole]) / share


@pytest.mark.parametrize("count", [101, 999, 1_000, 1_001, 7_777])
@pytest.mark.parametrize("decimals", [None, 3])
def test_values_equal_their_definitions(count, decimals):
    sample = positions(count, 9, decimals=decimals)
    found = {tail.name: tail.value for tail in estimate_tails(sample, seed=0, num_resamples=99)}
    assert list(found) == NAMES
    assert [found[name] for name in QUANTILES_PERMILLE] == naive_quantiles(sample.values)
    assert found["cvar1"] == pytest.approx(naive_cvar(sample.values), rel=1e-12)
    assert found["max"] == sample.values.max()


@pytest.mark.parametrize("count", [1, 2, 10, 1_000, 1_003])
def test_weighted_quantiles_equal_copies_of_clusters(count):
    sample = positions(count, 7, decimals=3)
    clusters = sample.num_clusters
    counts = np.random.default_rng(1).multinomial(clusters, np.full(clusters, 1 / clusters), size=50)
    found = weighted_quantiles(counts.astype(float), sort_into_runs(sample))
    for row, weights in zip(found, counts, strict=True):
        copies = np.concatenate([np.repeat(sample.values[sample.codes_P == g], weights[g]) for g in range(clusters)])
        assert row.tolist() == naive_quantiles(copies)


def test_intervals_hold_the_value_and_order_of_positions_is_irrelevant():
    sample = positions(8_000, 40)
    order = np.random.default_rng(2).permutation(8_000)
    shuffled = PositionSample(values=sample.values[order], clusters=np.asarray(sample.clusters)[order])
    tails = estimate_tails(sample, seed=1, num_resamples=999)
    assert tails == estimate_tails(shuffled, seed=1, num_resamples=999)
    for tail in tails[:-1]:
        assert tail.interval.low < tail.value < tail.interval.high
        assert tail.interval.low <= tail.lower_bound <= tail.value <= tail.upper_bound <= tail.interval.high


def test_the_pool_is_not_the_average_of_quantiles():
    """M40."""
    values = np.concatenate([np.linspace(0, 1, 1_000), np.linspace(0, 100, 1_000)])
    sample = PositionSample(values=values, clusters=np.repeat([0, 1], 1_000))
    pooled = estimate_tails(sample, seed=0, num_resamples=99)[2].value
    averaged = np.mean([np.quantile(values[:1_000], 0.99), np.quantile(values[1_000:], 0.99)])
    assert pooled == pytest.approx(98, abs=0.2)
    assert averaged < 51


def test_clusters_widen_the_tails():
    sample = positions(8_000, 40)
    alone = PositionSample(values=sample.values, clusters=np.arange(8_000))
    widths = [
        [tail.interval.high - tail.interval.low for tail in estimate_tails(s, seed=1, num_resamples=199)[:3]]
        for s in (sample, alone)
    ]
    assert all(clustered > 1.3 * single for clustered, single in zip(*widths, strict=True))


def test_the_maximum_has_no_interval():
    tail = estimate_tails(positions(500, 5), seed=0)[-1]
    assert tail.interval is tail.lower_bound is tail.upper_bound is None
    assert "beyond its largest" in tail.why


def test_too_few_positions_beyond_a_quantile_are_unknown():
    tails = {tail.name: tail for tail in estimate_tails(positions(900, 30), seed=0)}
    assert tails["p99.9"].interval is None
    assert "no position lies beyond" in tails["p99.9"].why
    assert tails["p50"].interval is not None
    assert tails["p50"].why == ""


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_all_equal_positions_are_exact(value):
    sample = PositionSample(values=[value] * 600, clusters=np.arange(600) // 20)
    for tail in estimate_tails(sample, seed=0)[:-1]:
        assert tail.value == tail.interval.low == tail.interval.high == tail.upper_bound == value
        assert "equal" in tail.why


def test_one_cluster_is_unknown():
    sample = PositionSample(values=np.arange(2_000.0), clusters=[0] * 2_000)
    doubled = PositionSample(values=sample.values * 2, clusters=[0] * 2_000)
    for tail in (*estimate_tails(sample, seed=0)[:-1], *estimate_tail_changes(sample, doubled, seed=0)[:-1]):
        assert tail.interval is None
        assert "1 cluster" in tail.why


def test_changes_are_paired():
    base = positions(8_000, 40)
    worse = PositionSample(values=base.values * 1.05, clusters=base.clusters)
    changes = estimate_tail_changes(base, worse, seed=1, num_resamples=999)
    alone = estimate_tails(base, seed=1, num_resamples=999)
    for change, tail in zip(changes[:-1], alone[:-1], strict=True):
        assert change.value == pytest.approx(0.05 * tail.value, rel=1e-9)
        assert change.interval.low > 0
        # The change scales with the tail, so its interval is about 0.05 of the tail's own.
        assert change.interval.high - change.interval.low < 0.1 * (tail.interval.high - tail.interval.low)


def test_identical_arms_change_by_exactly_zero():
    base = positions(3_000, 20)
    for change in estimate_tail_changes(base, base, seed=0)[:-1]:
        assert change.value == change.interval.low == change.interval.high == change.upper_bound == 0.0
    # A variant that touches only the top leaves p50 alone in every resample: that is not a known spread of 0.
    top = PositionSample(
        values=np.where(base.values > np.quantile(base.values, 0.99), 2 * base.values, base.values),
        clusters=base.clusters,
    )
    median = estimate_tail_changes(base, top, seed=0)[0]
    assert median.value == 0.0
    assert median.interval is None


def test_changes_do_not_depend_on_workers():
    base, other = positions(5_000, 30), positions(5_000, 30)
    other = PositionSample(values=other.values[::-1].copy(), clusters=base.clusters)
    expected = estimate_tail_changes(base, other, seed=1, num_resamples=2_500)
    with ThreadPoolExecutor(3) as executor:
        assert estimate_tail_changes(base, other, seed=1, num_resamples=2_500, executor=executor) == expected


def test_arms_of_other_positions_are_refused():
    with pytest.raises(UsageError, match="100 positions in 5 clusters against 90 in"):
        estimate_tail_changes(positions(100, 5), positions(90, 5), seed=0)

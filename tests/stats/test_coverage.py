"""Coverage by simulation on clustered populations shaped like the measured ones (measurement.md section 4).

A population is 300 clusters of three contexts on a grid of quantiles, so its mean is known and it has the finite tails
of real rows. A sample draws clusters with replacement and takes one to three contexts of each.
"""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from exl3eval.stats.clusters import ContextSample, PositionSample
from exl3eval.stats.intervals import Estimate, estimate_means
from exl3eval.stats.resample import resample_means
from exl3eval.stats.tails import QUANTILES_PERMILLE, estimate_tails

POPULATION_CLUSTERS, CLUSTER_CONTEXTS = 300, 3
SIZES = (1, 2, 1, 3, 1)
NUM_CONTEXTS = (32, 64, 136)
METHODS = ("percentile", "bca", "cluster_t", "bootstrap_t", "interval")


def on_grid(distribution, generator: np.random.Generator, contexts: int) -> np.ndarray:
    """Quantiles of a distribution in random places, [clusters, contexts]."""
    count = POPULATION_CLUSTERS * contexts
    quantiles = distribution.ppf((np.arange(count) + 0.5) / count)
    return generator.permutation(quantiles).reshape(POPULATION_CLUSTERS, contexts)


def clustered(distribution, *, between: float, within: float) -> np.ndarray:
    generator = np.random.default_rng(0)
    shared, own = on_grid(distribution, generator, 1), on_grid(distribution, generator, CLUSTER_CONTEXTS)
    return between * shared + within * own


def absolute_population() -> np.ndarray:
    """Lognormal KLD: skew 4.9, kurtosis 38."""
    return np.exp(clustered(stats.norm, between=1.2, within=0.7))


def paired_population() -> np.ndarray:
    """Symmetric heavy-tailed differences: kurtosis 19, as a kernel route's 21."""
    return clustered(stats.t(2.2), between=0.3**0.5, within=0.7**0.5)


def draw(population: np.ndarray, num_contexts: int, replications: int, seed: int = 0) -> list[ContextSample]:
    sizes = np.resize(SIZES, num_contexts)
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), num_contexts) + 1].copy()
    sizes[-1] -= sizes.sum() - num_contexts
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    members = np.concatenate([np.arange(size) for size in sizes])
    generator = np.random.default_rng(seed + num_contexts)
    picked = generator.integers(0, POPULATION_CLUSTERS, size=(replications, len(sizes)))
    first = generator.integers(0, CLUSTER_CONTEXTS, size=picked.shape)
    values = population[picked[:, clusters], (members + first[:, clusters]) % CLUSTER_CONTEXTS]
    return [ContextSample(values=row, clusters=clusters) for row in values]


def estimate(samples: list[ContextSample]) -> list[Estimate]:
    """Replications ride along as arms: the code under test is the real one, its resamples are shared."""
    return [
        found
        for start in range(0, len(samples), 200)
        for found in estimate_means(samples[start : start + 200], seed=start, num_resamples=999)
    ]


@functools.cache
def coverage(kind: str, num_contexts: int, replications: int) -> dict[str, float]:
    population = {"absolute": absolute_population, "paired": paired_population}[kind]()
    truth, samples = population.mean(), draw(population, num_contexts, replications)
    found = estimate(samples)
    covered = {method: float(np.mean([truth in getattr(estimate, method) for estimate in found])) for method in METHODS}
    iid = [abs(s.mean() - truth) <= 1.96 * s.sd() / num_contexts**0.5 for s in samples]
    return covered | {
        "ignoring clusters": float(np.mean(iid)),
        "false pass": float(np.mean([estimate.upper_bound < truth for estimate in found])),
        "false fail": float(np.mean([estimate.lower_bound > truth for estimate in found])),
    }


def mean_coverage(kind: str, method: str, replications: int = 600) -> float:
    return float(np.mean([coverage(kind, n, replications)[method] for n in NUM_CONTEXTS]))


def test_order_of_methods_on_skewed_absolute_values():
    order = [mean_coverage("absolute", m) for m in ("bootstrap_t", "bca", "percentile")]
    assert order == sorted(order, reverse=True)
    assert order[0] > order[1] + 0.01 > order[2] + 0.02
    assert mean_coverage("absolute", "cluster_t") == pytest.approx(order[2], abs=0.015)
    for n in NUM_CONTEXTS:
        cell = coverage("absolute", n, 600)
        assert cell["bootstrap_t"] > cell["bca"] > cell["percentile"]


def test_order_of_methods_on_heavy_tailed_paired_differences():
    order = [mean_coverage("paired", m) for m in ("cluster_t", "bootstrap_t", "bca")]
    assert order[0] > order[1] + 0.01 > order[2] + 0.015
    for n in NUM_CONTEXTS:
        cell = coverage("paired", n, 600)
        assert cell["cluster_t"] >= cell["bootstrap_t"] >= cell["bca"]


def test_the_envelope_holds_its_level_where_it_is_stated_to():
    # Standard error of 600 replications at .95: .009.
    for n in NUM_CONTEXTS:
        assert coverage("paired", n, 600)["interval"] >= 0.93
        assert coverage("paired", n, 600)["false pass"] <= 0.07
    # Skewed absolute values: short of .95 at few contexts, as stated, and never below either part.
    for n, floor in zip(NUM_CONTEXTS, (0.86, 0.90, 0.92), strict=True):
        assert coverage("absolute", n, 600)["interval"] >= floor
    for kind in ("absolute", "paired"):
        for n in NUM_CONTEXTS:
            cell = coverage(kind, n, 600)
            assert cell["interval"] >= max(cell["cluster_t"], cell["bootstrap_t"])


def test_ignoring_clusters_under_covers():
    for n in NUM_CONTEXTS:
        cell = coverage("absolute", n, 600)
        assert cell["ignoring clusters"] < 0.86
        assert cell["ignoring clusters"] < cell["interval"] - 0.08
    assert mean_coverage("paired", "ignoring clusters") < 0.92


def test_max_t_on_shared_resamples_holds_the_family_of_eight():
    """Joint coverage of 8 correlated variants at 136 contexts: about .95 with max-T, far less unadjusted."""
    replications, variants = 150, 8
    population = paired_population()
    samples = draw(population, 136, replications * (variants + 1))
    shared, own = samples[:replications], samples[replications:]
    family = [
        shared[i // variants].replace_values(0.5 * shared[i // variants].values + own[i].values)
        for i in range(replications * variants)
    ]
    studentised, estimates = [], []
    for start in range(0, len(family), 240):
        arms = family[start : start + 240]
        studentised.append(resample_means(arms, num_resamples=999, seed=start).studentised_BA)
        estimates += estimate_means(arms, num_resamples=999, seed=start)
    pivots = np.abs(np.concatenate(studentised, axis=1)).reshape(999, replications, variants)
    critical = np.quantile(pivots.max(axis=2), 0.95, axis=0)
    errors = np.array([abs(e.mean - 1.5 * population.mean()) / e.se for e in estimates]).reshape(replications, variants)
    alone = stats.t.isf(0.025, estimates[0].num_clusters - 1)
    assert np.mean(errors.max(axis=1) <= critical) >= 0.90
    assert np.mean(errors.max(axis=1) <= alone) < 0.80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "measured"),
    [
        ("absolute", "percentile", (None, 0.853, 0.903)),
        ("absolute", "bca", (None, 0.869, 0.918)),
        ("absolute", "cluster_t", (None, 0.844, 0.894)),
        ("absolute", "bootstrap_t", (None, None, 0.939)),
        ("paired", "cluster_t", (0.959, 0.956, 0.953)),
        ("paired", "bootstrap_t", (0.923, 0.903, 0.913)),
    ],
)
def test_coverage_is_within_two_points_of_the_measured_table(kind, method, measured):
    # The lognormal is milder than the real rows at 32 contexts (bootstrap-t .90 against .82): not compared there.
    for n, expected in zip(NUM_CONTEXTS, measured, strict=True):
        if expected is not None:
            assert coverage(kind, n, 3_000)[method] == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_bounds_hold_at_many_replications():
    for n in NUM_CONTEXTS:
        cell = coverage("paired", n, 3_000)
        assert cell["interval"] >= 0.94
        # 0.05 and four standard errors of 3,000 replications.
        assert cell["false pass"] <= 0.066
        assert cell["false fail"] <= 0.066


@pytest.mark.slow
def test_tails_cover_their_lognormal_truth():
    """136 clusters of 2 contexts of 128 positions: quantiles .95 and CVaR1% .94, not the percentile bootstrap's .87."""
    spreads = {"position": 1.6, "context": 0.6, "cluster": 0.6}
    sigma = math.hypot(*spreads.values())
    truth = {name: math.exp(sigma * stats.norm.ppf(permille / 1000)) for name, permille in QUANTILES_PERMILLE.items()}
    truth["cvar1"] = math.exp(sigma**2 / 2) * stats.norm.cdf(sigma - stats.norm.ppf(0.99)) / 0.01
    clusters, covered = np.repeat(np.arange(136), 256), []
    generator = np.random.default_rng(0)
    for seed in range(250):
        shared = spreads["cluster"] * generator.normal(size=136)[clusters]
        shared += spreads["context"] * np.repeat(generator.normal(size=272), 128)
        values = np.exp(shared + spreads["position"] * generator.normal(size=len(clusters)))
        tails = estimate_tails(PositionSample(values=values, clusters=clusters), seed=seed, num_resamples=399)
        covered.append([truth[tail.name] in tail.interval for tail in tails[:-1]])
    # Standard error of 250 replications: .015.
    assert np.all(np.mean(covered, axis=0) >= 0.90)

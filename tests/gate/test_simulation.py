"""The gate's error rates by simulation, on seven populations shaped like measured ones (measurement.md section 4).

A population is 300 clusters of three contexts on a grid of quantiles: its mean is known, its tails are finite. A sample
draws clusters with replacement and takes one to three contexts of each. The margin is put exactly at the true mean: a
PASS is then an error, and so is a FAIL.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from exl3eval.gate.decide import judge_delta
from exl3eval.gate.endpoints import mean_delta
from exl3eval.gate.policy import MarginRule, Policy
from exl3eval.gate.verdict import Margin, Outcome
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.intervals import estimate_means
from exl3eval.stats.multiplicity import joint_confidence
from exl3eval.stats.sequential import look_levels

CLUSTERS, CONTEXTS = 300, 3
BETWEEN, WITHIN = 0.3**0.5, 0.7**0.5
POLICY = Policy(name="simulation", doc="", margins={"mean": MarginRule(absolute=1.0)})
LOOKS = (32, 64, 96, 136)


def on_grid(distribution, generator: np.random.Generator, contexts: int) -> np.ndarray:
    count = CLUSTERS * contexts
    return generator.permutation(distribution.ppf((np.arange(count) + 0.5) / count)).reshape(CLUSTERS, contexts)


def clustered(distribution, between: float = BETWEEN, within: float = WITHIN, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return between * on_grid(distribution, generator, 1) + within * on_grid(distribution, generator, CONTEXTS)


def absolute() -> np.ndarray:
    """A whole KLD: skewness 4.9, kurtosis 38."""
    return np.exp(clustered(stats.norm, 1.2, 0.7))


def int8_embedding() -> np.ndarray:
    """Small differences, 60 % of them worse, mean a sixth of their spread."""
    return 0.17 + clustered(stats.t(4)) / 1.41


def kernel_route() -> np.ndarray:
    """Symmetric, kurtosis 19."""
    return clustered(stats.t(2.2))


def multiplicative() -> np.ndarray:
    """FP8 prefill: every context worse, by a share of its own KLD."""
    return np.exp(clustered(stats.norm, 0.8, 0.5) + clustered(stats.norm, 0.2, 0.3, seed=5))


def ties() -> np.ndarray:
    """Three fifths exact ties, the rest worse on average."""
    values = clustered(stats.t(5), seed=3) + 0.3
    return np.where(np.random.default_rng(9).random(values.shape) < 0.6, 0.0, values)


def two_sizes() -> np.ndarray:
    """Strong clusters, half of them three times as large (see `draw`)."""
    return clustered(stats.t(6), 0.6, 0.8)


def heavy() -> np.ndarray:
    """One context in twenty five times as wild: kurtosis 25."""
    wild = np.random.default_rng(4).random((CLUSTERS, CONTEXTS)) < 0.05
    return clustered(stats.norm) * np.where(wild, 5.0, 1.0)


POPULATIONS = (absolute, int8_embedding, kernel_route, multiplicative, ties, two_sizes, heavy)


def draw(population, num_contexts: int, replications: int, seed: int = 0) -> list[ContextSample]:
    values = population()
    sizes = np.resize((1, 1, 1, 3, 3, 3) if population is two_sizes else (1, 2, 1, 3, 1), num_contexts)
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), num_contexts) + 1].copy()
    sizes[-1] -= sizes.sum() - num_contexts
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    members = np.concatenate([np.arange(size) for size in sizes])
    generator = np.random.default_rng(seed + num_contexts)
    picked = generator.integers(0, CLUSTERS, size=(replications, len(sizes)))
    first = generator.integers(0, CONTEXTS, size=picked.shape)
    drawn = values[picked[:, clusters], (members + first[:, clusters]) % CONTEXTS]
    return [ContextSample(values=row, clusters=clusters) for row in drawn]


def judge(samples: list[ContextSample], margin: float, confidence: float = 0.95, num_resamples: int = 999):
    """Judge replications; they ride along as arms, so the code under test is the real one."""
    found = []
    for start in range(0, len(samples), 200):
        part = samples[start : start + 200]
        estimates = estimate_means(part, confidence=confidence, num_resamples=num_resamples, seed=start)
        for sample, estimate in zip(part, estimates, strict=True):
            delta = mean_delta("variant", "mean", 0.0, sample, estimate)
            at = Margin(value=margin, fraction=0.0, absolute=margin, floors=0.0)
            found.append((judge_delta(delta, at, POLICY, alpha=1.0 - confidence), estimate))
    return found


def rates(population, num_contexts: int, replications: int) -> dict[str, float]:
    truth = float(population().mean())
    found = judge(draw(population, num_contexts, replications), truth)
    outcomes = [verdict.outcome for verdict, _ in found]
    return {
        "false pass": outcomes.count(Outcome.PASS) / replications,
        "false fail": outcomes.count(Outcome.FAIL) / replications,
    } | {
        part: float(np.mean([truth in getattr(estimate, part) for _, estimate in found]))
        for part in ("interval", "cluster_t", "bootstrap_t", "bca", "percentile")
    }


@pytest.mark.parametrize("population", POPULATIONS, ids=lambda p: p.__name__)
def test_no_population_passes_regressions_at_the_margin(population):
    # Standard error of 300 replications at .05: .013.
    cell = rates(population, 136, 300)
    assert cell["false pass"] <= 0.07 + 0.013
    assert cell["interval"] >= max(cell["cluster_t"], cell["bootstrap_t"])


@pytest.mark.slow
@pytest.mark.parametrize("num_contexts", [32, 64, 136])
@pytest.mark.parametrize("population", POPULATIONS, ids=lambda p: p.__name__)
def test_error_rates_at_many_replications(population, num_contexts):
    # Standard error of 2,400 replications at .06: .005.
    cell = rates(population, num_contexts, 2_400)
    assert cell["false pass"] <= 0.07
    methods = [cell[name] for name in ("cluster_t", "bootstrap_t", "bca", "percentile")]
    nearest = min(methods, key=lambda coverage: abs(coverage - 0.95))
    assert abs(cell["interval"] - 0.95) <= abs(nearest - 0.95) + 0.02


def test_a_harmless_kernel_route_passes_and_a_bad_one_fails():
    harmless = draw(kernel_route, 136, 200)
    sigma = float(np.mean([sample.sd() for sample in harmless]))
    margin = 0.3 * sigma + float(kernel_route().mean())
    outcomes = [verdict.outcome for verdict, _ in judge(harmless, margin)]
    assert outcomes.count(Outcome.PASS) >= 0.75 * len(outcomes)
    assert outcomes.count(Outcome.FAIL) <= 0.01 * len(outcomes)
    worse = [sample.replace_values(sample.values + 2.0 * margin) for sample in harmless]
    outcomes = [verdict.outcome for verdict, _ in judge(worse, margin)]
    assert outcomes.count(Outcome.FAIL) >= 0.75 * len(outcomes)
    assert outcomes.count(Outcome.PASS) == 0


def sequential_false_pass(population, replications: int) -> tuple[float, float]:
    """False-pass rate of four looks with spending, and of four looks at the full level each."""
    truth = float(population().mean())
    samples = draw(population, LOOKS[-1], replications)
    generator = np.random.default_rng(1)
    order = generator.permutation(samples[0].num_clusters)
    codes = samples[0].codes_N
    sequence = np.argsort(order[codes], kind="stable")
    spent, naive = np.zeros(replications, bool), np.zeros(replications, bool)
    levels = look_levels([look / LOOKS[-1] for look in LOOKS], 0.05)
    for look, level in zip(LOOKS, levels, strict=True):
        keep = sequence[:look]
        part = [ContextSample(values=s.values[keep], clusters=codes[keep]) for s in samples]
        for passed, alpha in ((spent, level), (naive, 0.05)):
            if alpha * 3_999 < 1.0:
                continue  # The first look spends 5e-5: less than any number of replications here can see.
            verdicts = judge(part, truth, confidence=1.0 - alpha, num_resamples=3_999 if alpha < 0.01 else 999)
            passed |= np.array([verdict.outcome is Outcome.PASS for verdict, _ in verdicts])
    return float(spent.mean()), float(naive.mean())


def test_looking_four_times_spends_no_more_than_looking_once():
    spent, naive = sequential_false_pass(int8_embedding, 200)
    assert spent <= 0.055 + 0.016
    assert naive > spent + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("population", [int8_embedding, kernel_route, two_sizes], ids=lambda p: p.__name__)
def test_sequential_false_pass_at_many_replications(population):
    spent, naive = sequential_false_pass(population, 3_000)
    assert spent <= 0.055 + 0.004
    assert naive > spent + 0.02


def family(replications: int, variants: int = 8) -> tuple[list[list[ContextSample]], float]:
    """Correlated variants on shared contexts, and their common true mean."""
    samples = draw(kernel_route, 136, replications * (variants + 1))
    shared, own = samples[:replications], samples[replications:]
    families = [
        [shared[i].replace_values(0.5 * shared[i].values + own[i * variants + j].values) for j in range(variants)]
        for i in range(replications)
    ]
    return families, 1.5 * float(kernel_route().mean())


def family_coverage(replications: int) -> tuple[float, float]:
    """Two-sided family-wise coverage at the joint level, and at the level of one."""
    families, truth = family(replications)
    joint, alone = [], []
    for seed, arms in enumerate(families):
        level = joint_confidence(arms, confidence=0.975, num_resamples=999, seed=seed)
        for held, confidence in ((joint, level), (alone, 0.975)):
            found = estimate_means(arms, confidence=confidence, num_resamples=1_999, seed=seed)
            held.append(all(e.lower_bound <= truth <= e.upper_bound for e in found))
    return float(np.mean(joint)), float(np.mean(alone))


def test_eight_variants_hold_together():
    joint, alone = family_coverage(80)
    assert joint >= 0.94 - 0.025
    assert alone < 0.85


@pytest.mark.slow
def test_eight_variants_hold_together_at_many_replications():
    joint, alone = family_coverage(2_000)
    assert joint >= 0.94
    assert alone < 0.80


def test_eight_variants_are_fast_and_do_not_depend_on_threads():
    (arms, *_), _ = family(1)
    options = {"num_resamples": 9_999, "seed": 1}
    start = time.perf_counter()
    level = joint_confidence(arms, **options)
    alone = estimate_means(arms, confidence=level, **options)
    assert time.perf_counter() - start <= 2.0
    for threads in (1, 2, 5):
        with ThreadPoolExecutor(threads) as pool:
            assert joint_confidence(arms, executor=pool, **options) == level
            assert estimate_means(arms, confidence=level, executor=pool, **options) == alone

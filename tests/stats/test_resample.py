"""Resamples are reproducible to the bit and equal their definition."""

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample, linearise_mean
from exl3eval.stats.resample import (
    BLOCK_RESAMPLES,
    _compute_block,
    draw_cluster_counts,
    resample_means,
    sum_over_clusters,
)

NUM_RESAMPLES = 3 * BLOCK_RESAMPLES + 17


def arms(count: int, contexts: int = 60, clusters: int = 23) -> list[ContextSample]:
    generator = np.random.default_rng(5)
    labels = generator.integers(0, clusters, size=contexts)
    return [ContextSample(values=np.exp(generator.normal(size=contexts)), clusters=labels) for _ in range(count)]


def counts_of(num_resamples: int, num_clusters: int, seed: int) -> np.ndarray:
    blocks = range(-(-num_resamples // BLOCK_RESAMPLES))
    return np.concatenate(
        [
            _compute_block(
                lambda rng, rows: draw_cluster_counts(rng, rows, num_clusters), "clusters", num_resamples, seed, b
            )
            for b in blocks
        ]
    )


def test_means_and_studentised_means_equal_a_naive_loop_over_copies():
    """The definition: build each resample by repeating clusters, and recompute mean and standard error from scratch."""
    samples = arms(2)
    draws = resample_means(samples, num_resamples=40, seed=9)
    counts = counts_of(40, samples[0].num_clusters, seed=9).astype(int)
    for a, sample in enumerate(samples):
        linear, n = linearise_mean(sample), sample.num_contexts
        members = [sample.values[sample.codes_N == g] for g in range(sample.num_clusters)]
        for b in range(40):
            drawn = np.repeat(np.arange(sample.num_clusters), counts[b])
            pooled = np.concatenate([members[g] for g in drawn])
            mean = pooled.mean()
            squares = [((members[g] - mean).sum()) ** 2 / (1 - len(members[g]) / n) for g in drawn]
            se = np.sqrt(np.sum(squares)) / len(pooled)
            assert draws.means_BA[b, a] == pytest.approx(mean, rel=1e-12)
            assert draws.studentised_BA[b, a] == pytest.approx((mean - linear.mean) / se, rel=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_threads_change_no_bit(workers):
    expected = resample_means(arms(3), num_resamples=NUM_RESAMPLES, seed=1)
    with ThreadPoolExecutor(workers) as executor:
        got = resample_means(arms(3), num_resamples=NUM_RESAMPLES, seed=1, executor=executor)
    assert got.means_BA.tobytes() == expected.means_BA.tobytes()
    assert got.studentised_BA.tobytes() == expected.studentised_BA.tobytes()


def test_processes_change_no_bit():
    expected = resample_means(arms(3), num_resamples=NUM_RESAMPLES, seed=1)
    for workers in (1, 2):
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            got = resample_means(arms(3), num_resamples=NUM_RESAMPLES, seed=1, executor=executor)
        assert got.means_BA.tobytes() == expected.means_BA.tobytes()
        assert got.studentised_BA.tobytes() == expected.studentised_BA.tobytes()


def test_blas_threads_change_no_bit():
    script = """
import numpy as np
from exl3eval.stats.clusters import ContextSample, PositionSample
from exl3eval.stats.intervals import estimate_means
from exl3eval.stats.tail_changes import estimate_tail_changes
generator = np.random.default_rng(0)
arms = [ContextSample(values=generator.normal(size=300), clusters=range(300)) for _ in range(4)]
tails = [PositionSample(values=generator.normal(size=40_000), clusters=np.arange(40_000) // 100) for _ in range(2)]
print([x.hex() for e in estimate_means(arms, seed=1) for x in (e.interval.low, e.interval.high, e.bca.low)])
print([x.interval.low.hex() for x in estimate_tail_changes(*tails, seed=1, num_resamples=999) if x.interval])
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "4")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("0x") == 12 + 5


def test_an_arm_does_not_feel_the_other_arms():
    samples = arms(4)
    alone = resample_means(samples[2:3], num_resamples=500, seed=3)
    together = resample_means(samples, num_resamples=500, seed=3)
    assert alone.studentised_BA[:, 0].tobytes() == together.studentised_BA[:, 2].tobytes()


def test_fewer_resamples_are_a_prefix_and_seeds_differ():
    long = resample_means(arms(1), num_resamples=NUM_RESAMPLES, seed=1).means_BA
    short = resample_means(arms(1), num_resamples=BLOCK_RESAMPLES + 5, seed=1).means_BA
    other = resample_means(arms(1), num_resamples=BLOCK_RESAMPLES, seed=2).means_BA
    assert np.array_equal(long[: len(short)], short)
    assert not np.array_equal(long[: len(other)], other)


def test_blocks_do_not_repeat_each_other():
    means = resample_means(arms(1), num_resamples=2 * BLOCK_RESAMPLES, seed=1).means_BA[:, 0]
    assert not np.array_equal(means[:BLOCK_RESAMPLES], means[BLOCK_RESAMPLES:])


def test_counts_are_multinomial():
    counts = counts_of(20_000, 10, seed=4)
    assert np.all(counts.sum(axis=1) == 10)
    # Mean 1 and variance 1 - 1/G per cluster; 6 standard errors of 20,000 draws.
    assert np.allclose(counts.mean(axis=0), 1.0, atol=6 * np.sqrt(0.9 / 20_000))
    assert np.allclose(counts.var(axis=0), 0.9, atol=0.08)
    assert np.allclose(np.cov(counts.T)[0, 1:], -0.1, atol=0.05)


def test_resampled_spread_is_the_standard_error_without_a_sqrt_b():
    """P1: the spread of the resampled means is the standard error; dividing it by sqrt(B) is 31.6x too small."""
    sample = ContextSample(values=np.exp(np.random.default_rng(1).normal(size=200)), clusters=range(200))
    se = linearise_mean(sample).se
    for num_resamples in (1_000, 8_000):
        spread = resample_means([sample], num_resamples=num_resamples, seed=1).means_BA.std(ddof=1)
        assert spread == pytest.approx(se, rel=0.1)


def test_sums_equal_the_matrix_product():
    generator = np.random.default_rng(0)
    weights, columns = generator.poisson(1.0, size=(50, 31)).astype(float), generator.normal(size=(31, 7))
    assert np.allclose(sum_over_clusters(weights, columns), weights @ columns, rtol=1e-13, atol=1e-13)


def test_an_all_equal_arm_gives_zeros_and_no_nan():
    sample = ContextSample(values=[0.3] * 12, clusters=[i // 2 for i in range(12)])
    draws = resample_means([sample], num_resamples=200, seed=0)
    assert np.all(draws.means_BA == 0.3)
    assert np.all(draws.studentised_BA == 0.0)


def test_a_resample_without_spread_is_infinite_not_nan():
    sample = ContextSample(values=[0.0] * 9 + [1.0], clusters=range(10))
    studentised = resample_means([sample], num_resamples=500, seed=0).studentised_BA
    assert not np.isnan(studentised).any()
    # (9/10)^10 = 0.349 of the resamples miss the only cluster that differs.
    assert np.mean(np.isneginf(studentised)) == pytest.approx(0.349, abs=0.08)


def test_options_out_of_range_are_refused():
    for num_resamples, seed in ((0, 1), (10, -1)):
        with pytest.raises(UsageError, match=f"num_resamples = {num_resamples} and seed = {seed}"):
            resample_means(arms(1), num_resamples=num_resamples, seed=seed)
    with pytest.raises(UsageError, match="no arm"):
        resample_means([], num_resamples=10, seed=1)
    with pytest.raises(UsageError, match="same contexts"):
        resample_means([*arms(1), *arms(1, contexts=40)], num_resamples=10, seed=1)


def test_eight_variants_over_136_contexts_take_under_two_seconds():
    samples = arms(8, contexts=136, clusters=136)
    start = time.process_time()
    resample_means(samples, num_resamples=9_999, seed=1)
    assert time.process_time() - start < 2.0

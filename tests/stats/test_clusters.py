"""Samples are validated, and the CR2 standard error is what its definition says."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.stats.clusters import ContextSample, PositionSample, check_same_contexts, linearise_mean

UNEQUAL = ["a", "a", "b", "c", "c", "c", "d", "e", "e", "f"]


def skewed(count: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(size=count))


def double_sum_variance(values: np.ndarray, clusters: list) -> float:
    """CR0 by its definition: sum over pairs of contexts of one cluster of e_i e_j, over n^2."""
    residuals = values - values.mean()
    total = 0.0
    for i, first in enumerate(clusters):
        for j, second in enumerate(clusters):
            if first == second:
                total += residuals[i] * residuals[j]
    return total / len(values) ** 2


def test_cr2_equals_cr1_double_sum_when_clusters_are_equal():
    values, clusters = skewed(24), [i // 3 for i in range(24)]
    cr1 = 8 / 7 * double_sum_variance(values, clusters)
    assert linearise_mean(ContextSample(values=values, clusters=clusters)).se == pytest.approx(
        math.sqrt(cr1), rel=1e-13
    )


def test_cr2_equals_matrix_definition_when_clusters_are_unequal():
    values, n = skewed(10), 10
    residuals, expected = values - values.mean(), 0.0
    for label in set(UNEQUAL):
        members = [i for i, cluster in enumerate(UNEQUAL) if cluster == label]
        hat = np.full((len(members), len(members)), 1 / n)
        eigenvalues, vectors = np.linalg.eigh(np.eye(len(members)) - hat)
        adjusted = vectors @ np.diag(eigenvalues**-0.5) @ vectors.T @ residuals[members]
        expected += adjusted.sum() ** 2
    se = linearise_mean(ContextSample(values=values, clusters=UNEQUAL)).se
    assert se == pytest.approx(math.sqrt(expected) / n, rel=1e-12)


def test_cr2_is_unbiased_for_iid_values_in_unequal_clusters_and_cr1_is_not():
    # E[u_g^2] = sigma^2 n_g (1 - n_g/N) for iid values, so both expectations are closed forms of the sizes.
    sizes = np.array([12, 1, 1, 1, 1, 2, 2])
    expected_squares = sizes * (1 - sizes / sizes.sum())
    truth = 1 / sizes.sum()
    clusters = np.repeat(np.arange(7), sizes)
    leverage = linearise_mean(ContextSample(values=skewed(20), clusters=clusters)).leverage_G
    assert np.sum(leverage * expected_squares) / sizes.sum() ** 2 == pytest.approx(truth, rel=1e-13)
    assert 7 / 6 * expected_squares.sum() / sizes.sum() ** 2 < 0.75 * truth


def test_singleton_clusters_give_the_textbook_standard_error():
    values = skewed(40)
    se = linearise_mean(ContextSample(values=values, clusters=range(40))).se
    assert se == pytest.approx(values.std(ddof=1) / math.sqrt(40), rel=1e-13)


@given(order=st.permutations(range(10)))
def test_order_of_contexts_changes_no_bit(order):
    values = skewed(10)
    straight = ContextSample(values=values, clusters=UNEQUAL)
    shuffled = ContextSample(values=values[order], clusters=[UNEQUAL[i] for i in order])
    first, second = linearise_mean(straight), linearise_mean(shuffled)
    assert (first.mean, first.se) == (second.mean, second.se)
    assert first.residual_sums_G.tobytes() == second.residual_sums_G.tobytes()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, -7.3e11])
def test_mean_of_equal_values_is_that_value(value):
    assert ContextSample(values=[value] * 7, clusters=range(7)).mean() == value


def test_one_cluster_has_no_standard_error():
    """P9: 0.0 for one cluster reports the unknown as certain."""
    with pytest.raises(UsageError, match="1 cluster is unknown"):
        linearise_mean(ContextSample(values=[1.0, 2.0], clusters=["a", "a"]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [ContextSample, PositionSample])
def test_values_that_are_not_finite_are_invalid(kind, bad):
    with pytest.raises(InvalidRunError, match=r"1 of 3 .* not finite, the first is .* at 1"):
        kind(values=[1.0, bad, 2.0], clusters=[0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": [], "clusters": []}, r"shape \[0\]"),
        ({"values": [[1.0]], "clusters": [0]}, r"shape \[1, 1\]"),
        ({"values": [1.0, 2.0], "clusters": [0]}, "2 context values came with 1 cluster ids"),
        ({"values": [1.0, 2.0], "clusters": [1, "1"]}, "mixed types"),
        ({"values": [1.0, 2.0], "clusters": [0.5, 1.5]}, "float64"),
        ({"values": [1.0, 2.0], "clusters": [0, 1], "strata": ["x"]}, "2 context values came with 1 strata"),
        ({"values": [1.0, 2.0], "clusters": [7, 7], "strata": ["x", "y"]}, "cluster 7 lies in 2 strata: x, y"),
    ],
)
def test_malformed_samples_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        ContextSample(**arguments)


def test_arms_must_hold_the_same_contexts():
    first = ContextSample(values=[1.0, 2.0], clusters=["a", "b"])
    check_same_contexts(first, first.replace_values(np.array([3.0, 4.0])))
    for clusters in (["b", "a"], ["a", "c"]):
        with pytest.raises(UsageError, match="same contexts in the same order"):
            check_same_contexts(first, ContextSample(values=[1.0, 2.0], clusters=clusters))


def test_a_sample_cannot_be_edited():
    source = np.array([1.0, 2.0])
    sample = ContextSample(values=source, clusters=[0, 1])
    source[0] = 9.0
    assert sample.values[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        sample.values[0] = 5.0

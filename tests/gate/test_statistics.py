"""Joint levels, Holm, spending and power against published figures and definitions."""

import numpy as np
import pytest
from scipy import stats

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.multiplicity import holm, joint_confidence
from exl3eval.stats.power import study_power
from exl3eval.stats.sequential import look_levels, spend_alpha

CLUSTERS = np.arange(60) // 2


def sample(values: np.ndarray) -> ContextSample:
    return ContextSample(values=values, clusters=CLUSTERS)


def test_one_arm_and_exact_arms_cost_nothing():
    values = np.random.default_rng(0).normal(size=60)
    still = sample(np.zeros(60))
    assert joint_confidence([sample(values)], seed=1, num_resamples=999) == 0.95
    assert joint_confidence([sample(values), still, still], seed=1, num_resamples=999) == 0.95


def test_copies_cost_nothing_and_independent_arms_cost_bonferroni():
    generator = np.random.default_rng(1)
    values = generator.normal(size=60)
    copies = joint_confidence([sample(values * scale) for scale in (1.0, 2.0, 5.0)], seed=1, num_resamples=9_999)
    assert copies == pytest.approx(0.95, abs=1e-3)
    independent = joint_confidence([sample(generator.normal(size=60)) for _ in range(8)], seed=1, num_resamples=9_999)
    assert 1 - 0.05 / 6 < independent <= 1 - 0.05 / 8 + 1e-12


def test_joint_level_refuses_a_confidence_out_of_range():
    with pytest.raises(UsageError, match=r"confidence = 1\.5"):
        joint_confidence([sample(np.arange(60.0))], confidence=1.5, seed=1)


def test_holm_is_the_textbook_step_down():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()
    assert holm([0.9, 0.8]) == (1.0, 1.0)


def test_boundaries_are_the_published_ones():
    # Lan-DeMets boundaries of O'Brien-Fleming type, four equal looks, one-sided 0.025: 4.333, 2.963, 2.359, 2.014.
    levels = look_levels([0.25, 0.5, 0.75, 1.0], 0.025)
    assert stats.norm.isf(levels) == pytest.approx([4.333, 2.963, 2.359, 2.014], abs=1.5e-3)


def test_boundaries_spend_exactly_alpha_on_a_random_walk():
    looks = np.array([32, 64, 96, 136])
    levels = look_levels(looks / 136, 0.05)
    steps = np.random.default_rng(0).normal(size=(200_000, 4)) * np.sqrt(np.diff(looks, prepend=0))
    scores = np.cumsum(steps, axis=1) / np.sqrt(looks)
    crossed = (scores > stats.norm.isf(levels)).any(axis=1).mean()
    assert crossed == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / 200_000) ** 0.5)
    assert list(levels) == sorted(levels)
    assert levels[0] == pytest.approx(spend_alpha(32 / 136, 0.05))


def test_one_look_spends_all():
    assert look_levels([1.0], 0.05) == pytest.approx((0.05,))


@pytest.mark.parametrize("fractions", [[], [0.5], [0.5, 0.5, 1.0], [0.6, 0.3, 1.0], [0.0, 1.0]])
def test_looks_that_do_not_increase_to_one_are_refused(fractions):
    with pytest.raises(UsageError, match="looks at fractions"):
        look_levels(fractions, 0.05)


def test_power_of_the_measured_kernel_route():
    # measurement.md section 4: sd 1.16e-4, margin 1 % of .0034: power .78 and .96 at 64 and 136, MDE at 136 of 2.6e-5.
    shape = {"sigma": 1.16e-4, "deff": 1.0, "num_clusters": 41, "margin": 3.4e-5, "alpha": 0.05, "target": 0.8}
    found = {n: study_power(num_contexts=n, **shape) for n in (64, 136)}
    assert found[64].power == pytest.approx(0.78, abs=0.03)
    assert found[136].power == pytest.approx(0.96, abs=0.01)
    assert found[136].mde == pytest.approx(2.5e-5, abs=1e-6)
    needed = found[64].contexts_needed
    assert study_power(num_contexts=needed, **shape).power >= 0.8
    assert study_power(num_contexts=needed - 1, **shape).power < 0.8


def test_power_of_identical_arms_is_certain():
    found = study_power(sigma=0.0, deff=1.0, num_contexts=32, num_clusters=20, margin=1e-5, alpha=0.05, target=0.8)
    assert (found.power, found.mde) == (1.0, 0.0)

"""Errors of statistics, made on small synthetic data beside what the functions here give."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats
from synthetic_runs import FLOOR, build_arms, build_table

from exl3eval.compare import Resampling, compare_arms, context_means, summarise_arm
from exl3eval.errors import UsageError
from exl3eval.gate.decide import decide_bounds, judge_delta
from exl3eval.gate.endpoints import Delta
from exl3eval.gate.policy import MarginRule, Policy
from exl3eval.gate.verdict import Margin, Outcome
from exl3eval.score.divergence import measure_divergences
from exl3eval.score.positions import split_arms
from exl3eval.stats.clusters import ContextSample, PositionSample
from exl3eval.stats.intervals import estimate_mean
from exl3eval.stats.paired import estimate_paired_difference, minimum_detectable_effect
from exl3eval.stats.resample import resample_means
from exl3eval.stats.signs import WinsTiesLosses, count_signs
from exl3eval.stats.tails import estimate_tails
from exl3eval.variant import differing_fields, load_variant

QUICK = {"num_resamples": 999, "seed": 1}
NUM_CONTEXTS = 136


def two_arms(shift: float = 0.01) -> tuple[ContextSample, ContextSample]:
    """Absolute divergences that vary tenfold between contexts, and a variant that is worse by `shift` everywhere."""
    generator = np.random.default_rng(7)
    base = 0.0034 * np.exp(0.8 * generator.normal(size=NUM_CONTEXTS))
    variant = base * (1.0 + shift * (1.0 + generator.normal(size=NUM_CONTEXTS)))
    return tuple(ContextSample(values=values, clusters=range(NUM_CONTEXTS)) for values in (base, variant))


def rows_of(arms) -> dict[str, pa.Table]:
    return dict(split_arms(build_table(arms)))


def test_intervals_that_overlap_hide_a_difference_that_the_pairs_show() -> None:
    """M28: eight changes were called neutral because two separate intervals overlapped."""
    base, variant = two_arms()
    apart = [estimate_mean(arm, **QUICK).interval for arm in (base, variant)]
    assert apart[1].low < base.mean() < variant.mean() < apart[0].high
    paired = estimate_paired_difference(base, variant, **QUICK)
    assert paired.delta.mean == pytest.approx(float(np.mean(variant.values - base.values)), rel=1e-12)
    assert paired.delta.interval.low > 0.0
    assert (paired.delta.interval.high - paired.delta.interval.low) * 20 < apart[0].high - apart[0].low


def test_two_changes_together_are_an_arm_of_their_own_not_a_sum() -> None:
    """M29: contributions solved from four runs were "confirmed" on the same four, and failed by 46 % on a fifth."""
    generator = torch.Generator().manual_seed(3)
    reference, step = (torch.randn(64, 200, generator=generator) for _ in range(2))
    arms = {"a": reference + step, "b": reference + 0.5 * step, "a+b": reference + 1.5 * step}
    kl = {n: float(d.kl.mean()) for n, d in measure_divergences(reference, arms, torch.zeros(64)).items()}
    assert kl["a+b"] > 1.4 * (kl["a"] + kl["b"])
    both = load_variant("int8-embed+bf16-logits")
    assert differing_fields(load_variant("base"), both) == ["embedding", "logits"]


def test_a_floor_stands_beside_a_divergence_and_is_never_taken_off() -> None:
    """M30: an engine's floor was subtracted, as if divergences added up; the remainder may have either sign."""
    generator = torch.Generator().manual_seed(5)
    reference, moved = (torch.randn(64, 200, generator=generator) for _ in range(2))
    arms = {"floor": reference + 0.3 * moved, "arm": reference + 0.2 * moved}
    kl = {n: float(d.kl.mean()) for n, d in measure_divergences(reference, arms, torch.zeros(64)).items()}
    between = measure_divergences(arms["floor"], {"arm": arms["arm"]}, torch.zeros(64))["arm"].kl.mean()
    assert kl["arm"] - kl["floor"] < 0.0 < float(between)
    arms = build_arms(num_contexts=16, num_positions=4)
    tables = rows_of(arms)
    summary = summarise_arm("variant", tables["variant"], Resampling(seed=1, num_resamples=99))
    assert tables[FLOOR]["kl"].to_numpy().mean() > 0.0
    assert summary.kl.mean == pytest.approx(arms["variant"]["kl"].mean(), rel=1e-12)


def test_ties_are_nobodys_wins() -> None:
    """M31: identical runs read as 0 wins of 512, because every tie was given to the other side."""
    same = np.zeros(512)
    assert int((same < 0).sum()) == 0 and len(same) - int((same < 0).sum()) == 512
    assert count_signs(same) == WinsTiesLosses(wins=0, ties=512, losses=0)
    assert count_signs(np.array([0.0, -1e-300, 2.0, 0.0])) == WinsTiesLosses(wins=1, ties=2, losses=1)
    rows = rows_of(build_arms(num_contexts=8, num_positions=4, noise=0.0))
    comparison = compare_arms(
        ("base", rows["base"]), ("variant", rows["variant"]), Resampling(seed=1, num_resamples=99)
    )
    assert comparison.identical and comparison.paired.by_context.ties == 8


def test_a_mean_below_the_threshold_with_a_bound_above_it_is_no_pass() -> None:
    """M32: 0.011534 lies below 0.012, its interval's end, 0.012203, does not."""
    mean, upper, threshold = 0.011534, 0.012203, 0.012
    assert mean < threshold
    assert decide_bounds(2 * mean - upper, upper, threshold, "non-inferiority") is Outcome.INCONCLUSIVE
    assert decide_bounds(2 * mean - upper, upper, 0.0123, "non-inferiority") is Outcome.PASS
    assert decide_bounds(2 * mean - upper, upper, 0.0108, "non-inferiority") is Outcome.FAIL


def test_a_repeat_that_agrees_measures_no_error() -> None:
    """M33: two runs with the same digits gave a standard deviation of 0, which was read as an error of 0."""
    base, _ = two_arms()
    repeat = estimate_paired_difference(base, base, **QUICK)
    assert repeat.delta.se == 0.0 and repeat.mde is None and "values are equal" in repeat.delta.why
    absolute = estimate_mean(base, **QUICK)
    assert absolute.se > 0.0 and absolute.interval.high > absolute.interval.low


def test_the_worst_percent_is_of_all_positions_pooled() -> None:
    """M40: a mean of per-context quantiles hides the one context that holds the tail."""
    quiet, loud = np.linspace(0.0, 1e-3, 900), np.linspace(0.0, 1.0, 100)
    values = np.concatenate([quiet, loud])
    clusters = np.repeat(np.arange(10), 100)
    averaged = np.mean([np.quantile(values[clusters == cluster], 0.99) for cluster in range(10)])
    tails = {t.name: t.value for t in estimate_tails(PositionSample(values=values, clusters=clusters), **QUICK)}
    assert averaged < 0.101
    assert tails["p99"] == pytest.approx(0.9, abs=0.02)
    assert tails["cvar1"] > tails["p99"] > 100 * tails["p50"] and tails["max"] == 1.0


def test_power_comes_from_the_spread_of_the_pairs() -> None:
    """M41: the spread within one arm was used to plan a paired comparison, and asked for 4,000 times the contexts."""
    base, variant = two_arms()
    paired = estimate_paired_difference(base, variant, **QUICK)
    z = stats.norm.isf(0.05) + stats.norm.ppf(0.8)
    sd = np.std(variant.values - base.values, ddof=1)
    assert paired.mde == pytest.approx(z * sd / math.sqrt(NUM_CONTEXTS), rel=1e-9)
    within = minimum_detectable_effect(sigma=base.sd(), deff=1.0, num_contexts=NUM_CONTEXTS)
    assert (within / paired.mde) ** 2 > 1_000


def test_the_spread_of_resampled_means_is_the_standard_error_as_it_is() -> None:
    """P1: divided by sqrt(B) once more, the standard error is 31.6 times too small at B = 1,000."""
    sample, _ = two_arms()
    textbook = np.std(sample.values, ddof=1) / math.sqrt(NUM_CONTEXTS)
    spread = resample_means([sample], num_resamples=1_000, seed=1).means_BA.std(ddof=1)
    assert spread == pytest.approx(textbook, rel=0.1)
    assert textbook / (spread / math.sqrt(1_000)) > 28
    interval = estimate_mean(sample, **QUICK).percentile
    assert interval.high - interval.low > 3.0 * textbook


def test_a_difference_that_an_unpaired_z_ticks_is_failed_by_its_bound() -> None:
    """P2: a harmful change, an unpaired p above 0.05, and a tick; and "not significant" is no pass on few contexts."""
    base, variant = two_arms(shift=0.05)
    ends = [estimate_mean(arm, **QUICK) for arm in (base, variant)]
    p_unpaired = 2.0 * stats.norm.sf((ends[1].mean - ends[0].mean) / math.hypot(ends[0].se, ends[1].se))
    assert p_unpaired > 0.5
    delta = estimate_paired_difference(base, variant, **QUICK).delta
    margin = 0.02 * base.mean()
    assert decide_bounds(delta.lower_bound, delta.upper_bound, margin, "non-inferiority") is Outcome.FAIL
    assert decide_bounds(-3 * margin, 5 * margin, margin, "non-inferiority") is Outcome.INCONCLUSIVE


def test_the_decision_names_its_bound_margin_and_power() -> None:
    """P2: a tick says neither what was ruled out nor what could have been seen."""
    policy = Policy(name="p", doc="", margins={"mean": MarginRule(absolute=1e-4)})
    delta = Delta(
        variant="v",
        endpoint="mean",
        baseline=3e-3,
        value=2e-5,
        lower=-3e-5,
        upper=2e-4,
        confidence=0.95,
        sigma=1e-3,
        deff=1.0,
        skew=0.0,
        num_contexts=64,
        num_clusters=64,
        why="",
    )
    margin = Margin(value=1e-4, fraction=0.0, absolute=1e-4, floors=0.0)
    found = judge_delta(delta, margin, policy, alpha=0.05)
    assert found.outcome is Outcome.INCONCLUSIVE and found.power.power < 0.2 and "contexts" in found.next_step
    assert judge_delta(replace(delta, upper=5e-5), margin, policy, alpha=0.05).outcome is Outcome.PASS


def test_one_cluster_has_no_standard_error() -> None:
    """P9: residuals of one cluster sum to 0, so the clustered formula calls what it cannot know certain."""
    values = np.random.default_rng(2).lognormal(size=40)
    assert math.sqrt(float(np.sum(values - values.mean())) ** 2) / 40 == pytest.approx(0.0, abs=1e-15)
    found = estimate_mean(ContextSample(values=values, clusters=["a"] * 40), **QUICK)
    assert found.mean == pytest.approx(values.mean())
    assert (found.se, found.interval, found.lower_bound, found.upper_bound) == (None, None, None, None)
    assert "1 cluster" in found.why
    assert decide_bounds(found.lower_bound, found.upper_bound, 1e9, "non-inferiority") is Outcome.INCONCLUSIVE


def test_no_position_is_no_mean() -> None:
    """M5, in numbers: nothing to average is an error, not a 0."""
    with pytest.raises(UsageError, match="no positions to average"):
        context_means(rows_of(build_arms(num_contexts=2, num_positions=2))["base"].slice(0, 0), "kl")

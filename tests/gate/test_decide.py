"""From deltas to outcomes: bounds against margins, refusals, looks, families and strata."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from synthetic_runs import build_arms, write_run

from exl3eval.gate.decide import decide, decide_bounds
from exl3eval.gate.endpoints import endpoint_value, estimate_deltas
from exl3eval.gate.evidence import read_run
from exl3eval.gate.policy import MarginRule, Policy, StrataRule, shipped_policies
from exl3eval.gate.verdict import Outcome, resolve_margin, worst
from exl3eval.stats.clusters import PositionSample
from exl3eval.stats.tails import estimate_tails

PASS, FAIL, INCONCLUSIVE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE
MEAN = Policy(name="mean", doc="", margins={"mean": MarginRule(fraction=0.02, absolute=1e-9)}, num_resamples=999)
ALL = replace(shipped_policies()["default"], num_resamples=999)


def judge(folder, arms, policy=MEAN, variants=("variant",), **options):
    runs = [read_run(write_run(folder / name, arms, name)) for name in variants]
    return decide(runs, policy, **options)


@pytest.mark.parametrize(
    ("lower", "upper", "one_sided", "two_sided"),
    [
        (-2.0, 0.9, PASS, INCONCLUSIVE),
        (-0.9, 0.9, PASS, PASS),
        (-0.9, 1.0, INCONCLUSIVE, INCONCLUSIVE),
        (1.0, 2.0, INCONCLUSIVE, INCONCLUSIVE),
        (1.1, 2.0, FAIL, FAIL),
        (-3.0, -1.1, PASS, FAIL),
        (0.0, 0.0, PASS, PASS),
        (None, 0.0, INCONCLUSIVE, INCONCLUSIVE),
        (0.0, None, INCONCLUSIVE, INCONCLUSIVE),
    ],
)
def test_bounds_decide(lower, upper, one_sided, two_sided):
    assert decide_bounds(lower, upper, 1.0, "non-inferiority") is one_sided
    assert decide_bounds(lower, upper, 1.0, "equivalence") is two_sided


def test_outcomes_combine_by_intersection_union():
    assert worst([PASS, PASS]) is PASS
    assert worst([PASS, INCONCLUSIVE]) is INCONCLUSIVE
    assert worst([INCONCLUSIVE, FAIL, PASS]) is FAIL
    assert [outcome.exit_code for outcome in Outcome] == [0, 1, 3, 4]


def test_a_margin_is_the_largest_of_its_parts():
    rule = MarginRule(fraction=0.02, absolute=1e-5, floors=0.5)
    assert resolve_margin(rule, baseline=1e-3, floor=0.0).value == 2e-5
    assert resolve_margin(rule, baseline=1e-4, floor=0.0).value == 1e-5
    assert resolve_margin(rule, baseline=1e-3, floor=1e-4).value == 5e-5


def test_endpoints_are_the_pooled_figures(tmp_path):
    run = read_run(write_run(tmp_path, build_arms(changes={"variant": 0.05})))
    rows = run.variant
    pooled = {
        t.name: t.value
        for t in estimate_tails(PositionSample(values=rows.kl_NP.ravel(), clusters=np.arange(1024)), seed=1)
    }
    assert endpoint_value(rows, "p99") == pooled["p99"]
    assert endpoint_value(rows, "cvar1") == pytest.approx(pooled["cvar1"], rel=1e-12)
    assert endpoint_value(rows, "ear") == pytest.approx(rows.tv_NP.mean(), rel=1e-12)
    deltas = estimate_deltas(run.baseline, [rows], list(ALL.margins), confidence=0.95, num_resamples=999, seed=1)
    for delta in deltas:
        expected = endpoint_value(rows, delta.endpoint) - endpoint_value(run.baseline, delta.endpoint)
        assert delta.value == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert delta.lower <= delta.value <= delta.upper


def test_an_identical_arm_passes_with_exactly_zero(tmp_path):
    verdict = judge(tmp_path, build_arms(noise=0.0), ALL)
    assert verdict.outcome is PASS
    assert verdict.identical == ("variant",)
    for endpoint in verdict.endpoints:
        assert (endpoint.delta.value, endpoint.delta.lower, endpoint.delta.upper) == (0.0, 0.0, 0.0)
        assert endpoint.power.power == 1.0


def test_harmless_passes_harmful_fails_between_is_inconclusive(tmp_path):
    outcomes = {
        change: judge(tmp_path / str(change), build_arms(changes={"variant": change}, noise=0.02)).outcome
        for change in (0.0, 0.02, 0.06)
    }
    assert outcomes == {0.0: PASS, 0.02: INCONCLUSIVE, 0.06: FAIL}


def test_one_bad_endpoint_fails_all(tmp_path):
    arms = build_arms(changes={"variant": 0.0}, noise=0.001)
    flips = np.random.default_rng(5).random(64 * 16) < 0.05
    arms["variant"]["top1"] = np.where(flips, 3, arms["variant"]["top1"]).astype(np.int8)
    verdict = judge(tmp_path, arms, ALL)
    assert {e.delta.endpoint: e.outcome for e in verdict.endpoints}["mean"] is PASS
    assert [e.delta.endpoint for e in verdict.endpoints if e.outcome is FAIL] == ["top1"]
    assert verdict.outcome is FAIL


def test_eight_contexts_are_refused_for_power_and_say_how_many_are_needed(tmp_path):
    for change in (0.0, 1.0):
        verdict = judge(tmp_path / str(change), build_arms(num_contexts=8, changes={"variant": change}))
        assert verdict.outcome is INCONCLUSIVE
        assert any("run with --num-contexts 32 or more" in reason for reason in verdict.refusals)
        assert any("16 more documents" in reason for reason in verdict.refusals)
    open_eyes = judge(
        tmp_path / "x", build_arms(num_contexts=8, contexts_per_cluster=1, changes={"variant": 2.0}), exploratory=True
    )
    assert open_eyes.outcome is FAIL
    assert open_eyes.refusals


def test_low_power_refuses_pass_and_not_fail(tmp_path):
    noisy = replace(MEAN, margins={"mean": MarginRule(fraction=0.02, absolute=1e-9)}, min_power=0.999999)
    verdict = judge(tmp_path / "pass", build_arms(changes={"variant": -0.02}, noise=0.03), noisy)
    assert verdict.endpoints[0].outcome is PASS
    assert verdict.outcome is INCONCLUSIVE
    assert "needs" in verdict.refusals[0]
    needed = verdict.endpoints[0].power.contexts_needed
    assert needed > 64
    assert f"needs {needed} contexts" in verdict.refusals[0]
    assert judge(tmp_path / "fail", build_arms(changes={"variant": 0.1}, noise=0.02), noisy).outcome is FAIL
    relaxed = judge(tmp_path / "x", build_arms(changes={"variant": -0.02}, noise=0.03), noisy, exploratory=True)
    assert relaxed.outcome is PASS
    assert relaxed.exploratory


def test_an_unrepeatable_arm_is_refused_by_its_floor(tmp_path):
    verdict = judge(tmp_path / "a", build_arms(noise=0.001))
    assert verdict.outcome is PASS
    folder = write_run(tmp_path / "b", build_arms(noise=0.001), repeat_difference=1e-4)
    verdict = decide([read_run(folder)], MEAN)
    assert verdict.outcome is INCONCLUSIVE
    assert "the repeat floor of `variant` is too high" in verdict.refusals[0]


def test_skewed_harm_needs_more_documents(tmp_path):
    arms = build_arms(noise=0.002)
    kl = arms["variant"]["kl"].reshape(64, 16).copy()
    kl[[5, 22, 41]] *= 1.3
    arms["variant"]["kl"] = kl.ravel()
    policy = replace(MEAN, margins={"mean": MarginRule(absolute=3.5e-4)})
    verdict = judge(tmp_path / "a", arms, policy)
    assert verdict.endpoints[0].delta.upper < 3.5e-4
    assert verdict.outcome is INCONCLUSIVE
    assert "documents to be trusted, not 32" in verdict.next_steps[0]
    assert judge(tmp_path / "b", arms, policy, exploratory=True).outcome is PASS
    far = replace(policy, margins={"mean": MarginRule(absolute=5e-3)})
    assert judge(tmp_path / "c", arms, far).outcome is PASS


def test_every_verdict_that_is_no_pass_says_what_next(tmp_path):
    for change, noise in ((0.02, 0.02), (0.025, 0.05), (0.1, 0.01), (0.0, 0.3)):
        verdict = judge(tmp_path / f"{change}{noise}", build_arms(changes={"variant": change}, noise=noise))
        assert verdict.outcome is not PASS
        assert verdict.next_steps
        for endpoint in verdict.endpoints:
            assert (endpoint.outcome is PASS) == (endpoint.next_step == "")


def test_looks_stop_early_and_their_levels_rise(tmp_path):
    policy = replace(MEAN, looks=(32, 64, 96, 136))
    verdict = judge(
        tmp_path / "bad", build_arms(num_contexts=136, contexts_per_cluster=1, changes={"variant": 0.3}), policy
    )
    assert verdict.outcome is FAIL
    assert [look.num_contexts for look in verdict.looks] == [32]
    assert verdict.endpoints[0].delta.num_contexts == 32
    near = build_arms(num_contexts=136, contexts_per_cluster=1, changes={"variant": 0.02}, noise=0.03)
    verdict = judge(tmp_path / "near", near, policy)
    assert [look.num_contexts for look in verdict.looks] == [32, 64, 96, 136]
    levels = [look.level for look in verdict.looks]
    assert levels == sorted(levels)
    assert levels[-1] < 0.05
    short = build_arms(num_contexts=64, contexts_per_cluster=1, changes={"variant": 0.02}, noise=0.03)
    verdict = judge(tmp_path / "short", short, policy)
    assert verdict.outcome is INCONCLUSIVE
    assert verdict.next_steps[0] == "extend the run to the next look: --num-contexts 96"
    assert [look.level for look in verdict.looks] == levels[:2]


def test_a_family_of_variants_is_judged_at_one_joint_level(tmp_path):
    names = tuple(f"v{i}" for i in range(8))
    arms = build_arms(changes=dict.fromkeys(names, 0.0), noise=0.02)
    verdict = judge(tmp_path, arms, ALL, names)
    assert verdict.variants == names
    by_endpoint = {e.delta.endpoint: e.delta.confidence for e in verdict.endpoints}
    assert 0.985 < by_endpoint["mean"] <= 1 - 0.05 / 8 + 1e-12
    assert by_endpoint["p99"] == pytest.approx(1 - 0.05 / 8)
    alone = judge(tmp_path / "alone", arms, ALL, names[:1])
    assert alone.endpoints[0].delta.confidence == 0.95
    assert alone.endpoints[0].delta.upper < verdict.endpoints[0].delta.upper
    assert verdict.endpoints[0].delta.sigma == alone.endpoints[0].delta.sigma


def test_threads_change_no_bit(tmp_path):
    arms = build_arms(changes={"a": 0.01, "b": 0.0})
    alone = judge(tmp_path / "1", arms, ALL, ("a", "b"))
    with ThreadPoolExecutor(3) as pool:
        assert judge(tmp_path / "2", arms, ALL, ("a", "b"), executor=pool) == alone


def test_the_worst_kind_of_text_can_fail_a_change_that_the_mean_hides(tmp_path):
    arms = build_arms(num_contexts=120, strata=("chat", "code", "math", "prose"), noise=0.0)
    kl = arms["base"]["kl"].reshape(120, 16)
    change = np.where(arms["base"]["stratum"].reshape(120, 16) == "math", 1.3, 0.9)
    noise = 1.0 + 0.01 * np.random.default_rng(1).normal(size=(120, 1))
    arms["variant"]["kl"] = (kl * change * noise).ravel()
    guarded = replace(MEAN, strata=StrataRule(fraction=0.1, absolute=1e-9), min_power=0.01)
    verdict = judge(tmp_path / "a", arms, guarded)
    assert verdict.strata[0].stratum == "math"
    assert verdict.strata[0].outcome is FAIL
    assert [s.outcome for s in verdict.strata[1:]] == [PASS] * 3
    assert verdict.outcome is FAIL
    assert any("hurts math" in step for step in verdict.next_steps)
    assert judge(tmp_path / "b", arms, replace(guarded, strata=None)).outcome is not FAIL
    few = replace(guarded, strata=StrataRule(fraction=0.1, absolute=1e-9, min_clusters=50))
    verdict = judge(tmp_path / "c", arms, few)
    assert {s.outcome for s in verdict.strata} == {INCONCLUSIVE}
    assert verdict.outcome is not FAIL


def test_equivalence_refuses_a_change_for_the_better(tmp_path):
    better = build_arms(changes={"variant": -0.06})
    assert judge(tmp_path / "a", better).outcome is PASS
    assert judge(tmp_path / "b", better, replace(MEAN, mode="equivalence")).outcome is FAIL

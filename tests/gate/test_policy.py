from dataclasses import replace

import pytest

from exl3eval.errors import UsageError
from exl3eval.gate.policy import MarginRule, Policy, load_policy, parse_policy, shipped_policies

GOOD = """
schema = "exl3eval/policy/1"
name = "mine"
doc = "A test."
alpha = 0.05
looks = [32, 64]

[margins.mean]
fraction = 0.02
absolute = 1e-5

[strata]
absolute = 1e-4
"""


def test_a_policy_is_read_and_its_digest_ignores_form_and_doc():
    policy = parse_policy(GOOD, where="mine.toml")
    assert policy.looks == (32, 64)
    assert policy.margins == {"mean": MarginRule(fraction=0.02, absolute=1e-5)}
    again = parse_policy("# words\n" + GOOD.replace("A test.", "Another.").replace("0.02", "2e-2"), where="x")
    assert again.digest == policy.digest
    assert parse_policy(GOOD.replace("0.02", "0.03"), where="x").digest != policy.digest
    assert replace(policy, seed=2).digest != policy.digest


def test_shipped_policies_load_and_differ():
    shipped = shipped_policies()
    assert {"default", "sequential", "equivalence", "quick"} <= set(shipped)
    assert len({policy.digest for policy in shipped.values()}) == len(shipped)
    assert set(shipped["default"].margins) == {"mean", "p99", "cvar1", "ear", "top1"}
    assert shipped["sequential"].looks == (32, 64, 96, 136)
    assert shipped["sequential"].margins == shipped["default"].margins


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[margins.mean]", "[margins.mode]", "margins for"),
        ("absolute = 1e-5", "absolute = 0.0", "out of range"),
        ("absolute = 1e-5", "", "missing 1 required keyword-only argument: 'absolute'"),
        ("fraction = 0.02", "fracton = 0.02", "unknown key `fracton`"),
        ("fraction = 0.02", "fraction = true", "`fraction` is True"),
        ("fraction = 0.02", "fraction = nan", "`fraction` is nan"),
        ("alpha = 0.05", "alpha = 0.5", "alpha = 0.5"),
        ("alpha = 0.05", "alpha = 'x'", "`alpha` is 'x'"),
        ("looks = [32, 64]", "looks = [64, 32]", "looks are"),
        ("looks = [32, 64]", "looks = [8, 64]", "looks are"),
        ("looks = [32, 64]", "looks = [32, 64.5]", "`looks` is"),
        ("looks = [32, 64]", "mode = 'superiority'", "mode is"),
        ("looks = [32, 64]", "min_contexts = 1", "min_contexts = 1"),
        ("looks = [32, 64]", "num_resamples = 99", "num_resamples = 99"),
        ('schema = "exl3eval/policy/1"', 'schema = "exl3eval/policy/9"', "schema is"),
        ("[strata]", "strata = 3\n[other]", "is not TOML|not a table|unknown key"),
        ("[margins.mean]", "margins = 1\n[x]", "not a table of tables|unknown"),
        ("[strata]", "[strata", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused_by_name(old, new, message):
    assert old in GOOD
    with pytest.raises(UsageError, match=message) as caught:
        parse_policy(GOOD.replace(old, new), where="mine.toml")
    assert caught.value.hint


def test_unknown_policies_suggest():
    with pytest.raises(UsageError, match="unknown policy 'defualt'") as caught:
        load_policy("defualt")
    assert "default" in caught.value.hint
    with pytest.raises(UsageError, match=r"cannot read policy file absent\.toml"):
        load_policy("absent.toml")


def test_margins_are_required():
    with pytest.raises(UsageError, match="margins for nothing"):
        Policy(name="x", doc="", margins={})

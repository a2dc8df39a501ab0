"""Needles: planted where they say, judged on whole secrets, and never passed without evidence."""

import numpy as np
import pytest
import torch

from exl3eval.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_OK, UsageError
from exl3eval.smoke.agreement import Agreement
from exl3eval.smoke.judge import EXIT_CODES, judge
from exl3eval.smoke.needle import AFTER, CUE, Retrieval, make_needles, make_secret, score_needles
from exl3eval.suite.tokens import TokenContext

DEPTHS = (0.0, 0.5, 1.0)
LENGTH = 200


def encode(text: str) -> list[int]:
    """One id per character: digits and punctuation keep theirs."""
    return [ord(character) for character in text]


def make_context(name: str, fill: int = 500, length: int = 400) -> TokenContext:
    ids = np.full(length, fill, dtype=np.int32) + np.arange(length, dtype=np.int32)
    return TokenContext(id=name, cluster=name, stratum="s", template="none", digest=name, ids=ids)


CONTEXTS = [make_context("a"), make_context("b", 1000)]


def plant(**changes: object):
    arguments = {"length": LENGTH, "seed": 1, "encode": encode, **changes}
    return make_needles(CONTEXTS, DEPTHS, **arguments)


def test_prompts_hold_text_secret_and_cue_at_the_length_asked_for() -> None:
    needles = plant()
    assert len(needles) == 2 * (len(DEPTHS) + 1)
    planted = CUE + " " + make_secret(1, "a") + AFTER
    for needle, depth in zip(needles[:3], DEPTHS, strict=True):
        text = "".join(map(chr, needle.prompt.tolist()))
        assert len(text) == LENGTH and text.endswith(CUE) and text.count(planted) == 1
        filler = LENGTH - len(planted) - len(CUE)
        assert text.index(planted) == max(1, round(depth * filler))
        assert "".join(map(chr, needle.secret.tolist())) == " " + make_secret(1, "a")
    control = needles[3]
    assert control.depth is None and len(control.prompt) == LENGTH
    assert make_secret(1, "a") not in "".join(map(chr, control.prompt.tolist()))
    assert needles[0].secret.tolist() != needles[4].secret.tolist()
    assert make_secret(1, "a") != make_secret(2, "a")


def test_prompts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UsageError, match="ids leave"):
        plant(length=60)
    with pytest.raises(UsageError, match="spells every secret alike"):
        plant(encode=lambda text: [0] * 5)
    with pytest.raises(UsageError, match="depths"):
        make_needles(CONTEXTS, (1.5,), length=LENGTH, seed=1, encode=encode)
    with pytest.raises(UsageError, match="depths"):
        make_needles(CONTEXTS, (), length=LENGTH, seed=1, encode=encode)
    own = make_context("a")
    secret = encode(" " + make_secret(1, "a"))
    text = own.ids.copy()
    text[5 : 5 + len(secret)] = secret
    told = TokenContext(id="a", cluster="a", stratum="s", template="none", digest="a", ids=text)
    with pytest.raises(UsageError, match="holds its own secret"):
        make_needles([told], DEPTHS, length=LENGTH, seed=1, encode=encode)


def test_a_hit_is_the_whole_secret() -> None:
    needles = plant()
    outputs = [needle.secret.clone() for needle in needles]
    outputs[1][-1] += 1
    outputs[4][0] += 1
    for control in (3, 7):
        outputs[control] = torch.zeros_like(outputs[control])
    found = score_needles("arm", needles, outputs)
    size = len(needles[0].secret)
    assert found.hits == (True, False, True, False, True, True)
    assert found.matched == (size, size - 1, size, 0, size, size)
    assert found.by_depth == {"0": 1, "0.5": 1, "1": 2}
    assert (found.control_hits, found.controls) == (0, 2)
    outputs[7] = needles[7].secret
    assert score_needles("arm", needles, outputs).control_hits == 1


def retrieval(arm: str, hits: int, of: int = 40, control_hits: int = 0) -> Retrieval:
    outcome = tuple(i < hits for i in range(of))
    return Retrieval(arm=arm, hits=outcome, matched=(0,) * of, control_hits=control_hits, controls=8, by_depth={})


def agreement(arm: str, agree: int = 90, contexts: int = 8) -> Agreement:
    counts = {"agree": agree, "tie": 0, "near tie": 0, "flip": 100 - agree}
    return Agreement(
        arm=arm, contexts=contexts, positions=100, counts=counts, prefixes=(), whole=0, first_difference={}
    )


def verdict(reference: int, base: int, variant: int, *, agree: int = 90, allow_lost: int = 0, **changes):
    hits = {"reference": reference, "base": base, "variant": variant}
    retrievals = {name: retrieval(name, count) for name, count in hits.items()}
    retrievals |= changes.pop("retrievals", {})
    agreements = {name: agreement(name, agree, changes.get("contexts", 8)) for name in hits}
    return judge("variant", retrievals, agreements, num_contexts=8, allow_lost=allow_lost)


def test_a_verdict_needs_evidence() -> None:
    good = verdict(40, 38, 39)
    assert (good.outcome, good.comparable, good.lost) == ("PASS", 38, 0)
    for reference, base, variant in ((0, 0, 0), (9, 9, 9), (19, 40, 40), (40, 19, 40)):
        poor = verdict(reference, base, variant)
        assert poor.outcome == "INCONCLUSIVE" and "too few" in poor.reasons[0]
    guessed = verdict(40, 40, 40, retrievals={"base": retrieval("base", 40, control_hits=1)})
    assert guessed.outcome == "INCONCLUSIVE" and "never planted" in guessed.reasons[0]
    dull = verdict(40, 40, 40, contexts=3)
    assert dull.outcome == "INCONCLUSIVE" and "5 of 8 contexts" in dull.reasons[0]


def test_a_verdict_fails_on_lost_secrets_and_on_a_broken_arm() -> None:
    lost = verdict(40, 38, 35)
    assert (lost.outcome, lost.lost) == ("FAIL", 3) and "loses 3 of 38" in lost.reasons[0]
    assert verdict(40, 38, 35, allow_lost=3).outcome == "PASS"
    broken = verdict(0, 0, 0, agree=49)
    assert broken.outcome == "FAIL" and "broken" in broken.reasons[0]
    assert [EXIT_CODES[name] for name in ("PASS", "FAIL", "INCONCLUSIVE")] == [
        EXIT_OK,
        EXIT_FAIL,
        EXIT_INCONCLUSIVE,
    ]

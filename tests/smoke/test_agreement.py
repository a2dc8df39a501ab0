"""Greedy agreement: classes, prefixes, and what is refused as evidence."""

import pytest
import torch

from exl3eval.errors import InvalidRunError
from exl3eval.smoke.agreement import compare_continuation, says_something, summarise

REFERENCE = torch.tensor([3, 1, 4, 1])
LOGITS = torch.zeros(4, 6)
LOGITS[torch.arange(4), REFERENCE] = 10.0
LOGITS[1, 2] = 10.0  # a tie of ids 1 and 2
LOGITS[2, 5] = 9.99  # within one BF16 ulp of id 4


def forced(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


def test_the_reference_agrees_with_itself() -> None:
    same = compare_continuation(REFERENCE, REFERENCE, REFERENCE, LOGITS)
    assert (same.prefix, same.classes) == (4, (0, 0, 0, 0))
    total = summarise("reference", [same, same])
    assert total.rate == 1.0 and total.whole == 2 and total.prefixes == (4, 4)
    assert total.first_difference == {"tie": 0, "near tie": 0, "flip": 0}


def test_the_first_difference_and_every_position_have_a_class() -> None:
    tie = compare_continuation(forced(3, 2, 0, 0), forced(3, 2, 5, 0), REFERENCE, LOGITS)
    assert (tie.prefix, tie.classes) == (1, (0, 1, 2, 3))
    flip = compare_continuation(forced(0, 0, 0, 0), forced(0, 1, 4, 1), REFERENCE, LOGITS)
    assert (flip.prefix, flip.classes) == (0, (3, 0, 0, 0))
    total = summarise("arm", [tie, flip])
    assert total.counts == {"agree": 4, "tie": 1, "near tie": 1, "flip": 2} and total.rate == 0.5
    assert total.first_difference == {"tie": 1, "near tie": 0, "flip": 1}
    assert total.whole == 0


def test_two_choices_after_the_same_ids_are_invalid() -> None:
    with pytest.raises(InvalidRunError, match="decoded twice differ at position 1"):
        compare_continuation(forced(3, 2, 0, 0), forced(3, 1, 4, 1), REFERENCE, LOGITS)
    with pytest.raises(InvalidRunError, match="decoded twice differ at position 1"):
        compare_continuation(forced(3, 2, 0, 0), forced(3, 5, 4, 1), REFERENCE, LOGITS)


def test_empty_outputs_are_no_evidence() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(InvalidRunError, match="empty or unequal"):
        compare_continuation(empty, empty, empty, torch.zeros(0, 6))
    with pytest.raises(InvalidRunError, match="empty or unequal"):
        compare_continuation(REFERENCE[:3], REFERENCE, REFERENCE, LOGITS)
    with pytest.raises(InvalidRunError, match="no text"):
        summarise("arm", [])


def test_one_id_repeated_says_nothing() -> None:
    assert says_something(REFERENCE)
    assert not says_something(torch.full((32,), 2))

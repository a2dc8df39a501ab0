"""Bits per linear: the average is kept, attention and the ends of the stack come first."""

import pytest

from exl3eval.quantizer.allocation import BitGroup, allocate_bits


def _stack(layers: int = 6) -> list[BitGroup]:
    groups = []
    for layer in range(layers):
        groups += [
            BitGroup(keys=(f"{layer}.q", f"{layer}.k"), num_weights=100, priority=2, layer=layer),
            BitGroup(keys=(f"{layer}.gate", f"{layer}.up"), num_weights=400, priority=0, layer=layer),
        ]
    return groups


def _average(groups: list[BitGroup], widths: dict[str, int]) -> float:
    return sum(g.num_weights * widths[g.keys[0]] for g in groups) / sum(g.num_weights for g in groups)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_whole_averages_are_uniform(bits: int) -> None:
    assert set(allocate_bits(_stack(), bits).values()) == {bits}


@pytest.mark.parametrize("bits", [2.1, 2.5, 3.37, 4.999, 7.9])
def test_the_average_is_approached_from_below(bits: float) -> None:
    groups = _stack()
    widths = allocate_bits(groups, bits)
    assert _average(groups, widths) <= bits + 1e-9
    assert _average(groups, widths) > bits - 400 / sum(g.num_weights for g in groups)
    assert set(widths) == {key for group in groups for key in group.keys}
    assert all(widths[group.keys[0]] == widths[group.keys[1]] for group in groups)


def test_attention_then_the_ends_gain_first() -> None:
    """2.2 bits of 3,000 weights leave 600: all six attention groups gain, then nothing."""
    widths = allocate_bits(_stack(), 2.2)
    assert all(widths[f"{layer}.q"] == 3 for layer in range(6))
    assert all(widths[f"{layer}.gate"] == 2 for layer in range(6))
    widths = allocate_bits(_stack(), 2.5)
    gained = [layer for layer in range(6) if widths[f"{layer}.gate"] == 3]
    assert gained == [0, 5]


def test_no_linear_exceeds_eight_bits() -> None:
    assert max(allocate_bits(_stack(), 8).values()) == 8
    assert max(allocate_bits(_stack(), 7.99).values()) == 8


@pytest.mark.parametrize("bits", [0.5, 8.1])
def test_impossible_averages_are_refused(bits: float) -> None:
    with pytest.raises(ValueError, match="expected 1 to 8"):
        allocate_bits(_stack(), bits)

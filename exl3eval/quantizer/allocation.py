"""How many bits each linear gets when the average is not a whole number.

Groups of linears that belong together (q, k, v; o; gate and up; down; all experts of a layer) start at
the whole part of the average. Groups are then walked in a fixed order, attention before MLP, ends of the
stack before its middle, and each gets one bit more while the average stays within what was asked for
(exl3-format.md, section 5.7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BitGroup:
    """Linears that share one width.

    Parameters
    ----------
    keys : tuple of str
        The linears.
    num_weights : int
        Together.
    priority : int
        Higher gains first: 2 attention, 0 gated MLP.
    layer : int
        Index in the stack.
    """

    keys: tuple[str, ...]
    num_weights: int
    priority: int
    layer: int


def allocate_bits(groups: Sequence[BitGroup], bits: float) -> dict[str, int]:
    """Give every linear a whole width so that the average does not exceed `bits`.

    Parameters
    ----------
    groups : sequence of BitGroup
        Every budgeted linear once.
    bits : float
        Average over weights, 1 to 8.

    Returns
    -------
    dict of str to int
        Key -> K.

    Raises
    ------
    ValueError
        If `bits` is outside 1..8.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits per weight, expected 1 to {MAX_BITS}")
    last = max((group.layer for group in groups), default=0)
    order = sorted(groups, key=lambda g: (-g.priority, min(g.layer, last - g.layer), g.layer, g.keys))
    widths = {group.keys: int(bits) for group in order}
    left = bits * sum(group.num_weights for group in order) - sum(int(bits) * group.num_weights for group in order)
    raised = True
    while raised:
        raised = False
        for group in order:
            if widths[group.keys] < MAX_BITS and group.num_weights <= left + 1e-6:
                widths[group.keys] += 1
                left -= group.num_weights
                raised = True
    return {key: width for keys, width in widths.items() for key in keys}

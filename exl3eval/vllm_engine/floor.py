"""The floor between engines: how far the same BF16 model is from itself when another engine runs it.

Two engines round in different orders, so a difference between arms of different engines means nothing below it.
Arms of one engine are compared without it: that is why candidates and reference share an engine by default.
"""

from __future__ import annotations

from exl3eval.errors import InvalidRunError


def check_cross_engine(left: str, right: str, *, delta_nats: float, floor_nats: float | None) -> None:
    """Refuse a difference between arms of two engines that the engines alone could explain.

    Parameters
    ----------
    left, right : str
        Engines of the two arms, as receipts name them.
    delta_nats : float
        Difference of their mean divergences.
    floor_nats : float or None
        Mean KL between the engines' references on the same contexts; None where it was not measured.

    Raises
    ------
    InvalidRunError
        If the engines differ and the floor is unknown, or not exceeded.
    """
    if left == right:
        return
    if floor_nats is None:
        raise InvalidRunError(
            f"the arms ran in two engines, {left} and {right}, and no floor between them was measured",
            hint="compare arms of one engine, or run the reference in both on the same contexts",
        )
    if not abs(delta_nats) > floor_nats:
        raise InvalidRunError(
            f"the difference of {delta_nats:.3g} nats between {left} and {right} is below the floor between these "
            f"engines, {floor_nats:.3g} nats",
            hint="compare arms of one engine: there the floor is rounding alone",
        )

"""The floor between engines: how far the same BF16 model is from itself when another engine runs it.

Two engines round in different orders, so a difference between arms of different engines means nothing below it.
Arms of one engine are compared without it: that is why candidates and reference share an engine by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3eval.engine.capture import Capture
from exl3eval.engine.head import Head
from exl3eval.errors import InvalidRunError
from exl3eval.score.positions import Placed
from exl3eval.score.scoring import ScoredArm, ScoredContext, score_arms

CROSS_ENGINE = "cross_engine"


def score_cross_engine(
    transformers: Capture,
    vllm: Capture,
    *,
    head: Head,
    device: torch.device,
    contexts: Sequence[ScoredContext],
    num_threads: int,
) -> list[Placed]:
    """Measure KL(transformers reference || vLLM reference) position by position, both through one head in FP32.

    Parameters
    ----------
    transformers, vllm : Capture
        The reference's hidden states in either engine, of the same lane, precision and ids.
    head : Head
        The reference's.
    device : device
        Where to score.
    contexts : sequence of ScoredContext
        In the order wanted.
    num_threads : int
        Contexts scored at a time.
    """
    scores = score_arms(
        ScoredArm(capture=transformers, head=head, device=device),
        {CROSS_ENGINE: ScoredArm(capture=vllm, head=head, device=device)},
        contexts,
        reference_name="reference",
        num_threads=num_threads,
        on_context=lambda count: None,
    )
    return scores.placed


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

"""Greedy agreement: how long an arm's text equals the reference's, how often it would choose the reference's next id.

Shapes: S decoded positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3eval.errors import InvalidRunError
from exl3eval.score.divergence import AGREE, FLIP, NEAR_TIE, TIE, classify_top1

CLASSES = {AGREE: "agree", TIE: "tie", NEAR_TIE: "near tie", FLIP: "flip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One arm after one context.

    Parameters
    ----------
    prefix : int
        Leading ids of its free greedy text that equal the reference's.
    classes : tuple of int
        [S] of AGREE, TIE, NEAR_TIE or FLIP: its choices along the reference's text.
    """

    prefix: int
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One arm over all contexts.

    Parameters
    ----------
    arm : str
        Its name.
    contexts, positions : int
        Compared.
    counts : mapping of str to int
        Positions that agree, tie, nearly tie or flip.
    prefixes : tuple of int
        Common prefix with the reference's text, by context.
    whole : int
        Contexts whose text is the reference's to the end.
    first_difference : mapping of str to int
        Class of the position where a text first leaves the reference's.
    """

    arm: str
    contexts: int
    positions: int
    counts: dict[str, int]
    prefixes: tuple[int, ...]
    whole: int
    first_difference: dict[str, int]

    @property
    def rate(self) -> float:
        """Share of positions that agree."""
        return self.counts[CLASSES[AGREE]] / self.positions


def compare_continuation(
    free_S: torch.Tensor, forced_S: torch.Tensor, reference_S: torch.Tensor, reference_logits_SV: torch.Tensor
) -> Continuation:
    """Compare an arm's text and choices with the reference's text.

    Parameters
    ----------
    free_S : Tensor
        int64 [S], the arm's own greedy text.
    forced_S : Tensor
        int64 [S], its choices along the reference's text.
    reference_S : Tensor
        int64 [S], the reference's greedy text.
    reference_logits_SV : Tensor
        float32 [S, V], the reference's logits along it.

    Raises
    ------
    InvalidRunError
        If there is nothing to compare, or the arm chose two ids after the same ids: free text and choices along the
        reference's must be equal as far as the texts are.
    """
    if not len(free_S) == len(forced_S) == len(reference_S) == len(reference_logits_SV) or not len(reference_S):
        raise InvalidRunError(
            f"outputs of {len(free_S)}, {len(forced_S)} and {len(reference_S)} ids: empty or unequal output is no "
            "evidence",
            hint="decode at least 1 id in every arm",
        )
    prefix = int((free_S == reference_S).long().cumprod(0).sum())
    along = int((forced_S == reference_S).long().cumprod(0).sum())
    if along != prefix or (prefix < len(free_S) and free_S[prefix] != forced_S[prefix]):
        raise InvalidRunError(
            f"the same ids decoded twice differ at position {min(along, prefix)}",
            hint="this arm does not decode deterministically; find out why before comparing anything",
        )
    classes_S = classify_top1(
        reference_logits_SV, reference_S.to(reference_logits_SV.device), forced_S.to(reference_logits_SV.device)
    )
    return Continuation(prefix=prefix, classes=tuple(classes_S.tolist()))


def summarise(arm: str, continuations: Sequence[Continuation]) -> Agreement:
    """Sum up one arm.

    Raises
    ------
    InvalidRunError
        If there is no context.
    """
    if not continuations:
        raise InvalidRunError(
            f"arm `{arm}` has no text to compare", hint="use contexts that the reference can continue"
        )
    classes = [each for continuation in continuations for each in continuation.classes]
    left = [c.classes[c.prefix] for c in continuations if c.prefix < len(c.classes)]
    return Agreement(
        arm=arm,
        contexts=len(continuations),
        positions=len(classes),
        counts={name: classes.count(value) for value, name in CLASSES.items()},
        prefixes=tuple(continuation.prefix for continuation in continuations),
        whole=len(continuations) - len(left),
        first_difference={name: left.count(value) for value, name in CLASSES.items() if value != AGREE},
    )


def says_something(ids_S: torch.Tensor) -> bool:
    """Whether a text is more than one id repeated, on which any broken arms would agree."""
    return len(ids_S.unique()) > 1

"""Needles: a short secret planted in held-out text, to be copied after its cue is repeated at the end.

Prompts are made of ids, so that the secret's ids after the cue are those that were planted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from exl3eval.errors import UsageError
from exl3eval.suite.tokens import TokenContext

CUE = "\n\nThe secret number of the harbour master is"
AFTER = ".\n\n"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """One prompt.

    Parameters
    ----------
    context : str
        Whose text is around the secret.
    depth : float or None
        Where it is planted, 0 at the start and 1 at the end; None for a control, which holds no secret.
    prompt : Tensor
        int64 [P].
    secret : Tensor
        int64 [S], the ids that must follow.
    """

    context: str
    depth: float | None
    prompt: torch.Tensor
    secret: torch.Tensor


def make_secret(seed: int, context: str) -> str:
    """Return the secret of a context, such as `483-917`."""
    generator = random.Random(f"{seed}:{context}")
    return "-".join(str(generator.randint(100, 999)) for _ in range(2))


def make_needles(
    contexts: Sequence[TokenContext], depths: Sequence[float], *, length: int, seed: int, encode: Encode
) -> tuple[Needle, ...]:
    """Plant a secret in every context at every depth, and none in one control per context.

    Parameters
    ----------
    contexts : sequence of TokenContext
        Held-out text, each at least `length` ids.
    depths : sequence of float
        0 to 1.
    length : int
        Ids of every prompt.
    seed : int
        Of the secrets.
    encode : callable
        Text to ids, without special tokens.

    Raises
    ------
    UsageError
        If a depth is outside 0 to 1, the prompt has no room for text, or the tokenizer cannot spell secrets.
    """
    if not depths or not all(0.0 <= depth <= 1.0 for depth in depths):
        raise UsageError(f"depths {list(depths)}", hint="give numbers from 0 to 1, such as 0,0.5,1")
    secrets = [encode(f" {make_secret(seed, context.id)}") for context in contexts]
    if len(contexts) > 1 and len({tuple(secret) for secret in secrets}) == 1:
        raise UsageError("this tokenizer spells every secret alike", hint="the needle test needs one that knows digits")
    cue, after = encode(CUE), encode(AFTER)
    needles = []
    for context, secret in zip(contexts, secrets, strict=True):
        planted = [*cue, *secret, *after]
        for depth in (*depths, None):
            insert = [] if depth is None else planted
            text = context.ids[: max(0, length - len(insert) - len(cue))].tolist()
            if len(text) < len(planted):
                raise UsageError(
                    f"{length} ids leave {len(text)} for text around a needle of {len(planted)}",
                    hint="give more --positions",
                )
            place = 0 if depth is None else max(1, round(depth * len(text)))
            prompt = [*text[:place], *insert, *text[place:], *cue]
            if _count(prompt, secret) != (depth is not None):
                raise UsageError(f"the text of {context.id} holds its own secret", hint="use another --seed")
            needles.append(
                Needle(context=context.id, depth=depth, prompt=torch.tensor(prompt), secret=torch.tensor(secret))
            )
    return tuple(needles)


def _count(ids: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(ids[start : start + len(part)]) == list(part) for start in range(len(ids) - len(part) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """What one arm made of the needles.

    Parameters
    ----------
    arm : str
        Its name.
    hits : tuple of bool
        By prompt with a secret: whether every id of it came back.
    matched : tuple of int
        By prompt with a secret: leading ids of it that came back.
    control_hits : int
        Secrets that came back although they were not planted.
    controls : int
        Prompts without a secret.
    by_depth : mapping of str to int
        Hits at each depth.
    """

    arm: str
    hits: tuple[bool, ...]
    matched: tuple[int, ...]
    control_hits: int
    controls: int
    by_depth: dict[str, int]


def score_needles(arm: str, needles: Sequence[Needle], outputs: Sequence[torch.Tensor]) -> Retrieval:
    """Compare decoded ids with the secrets.

    Parameters
    ----------
    arm : str
        Whose outputs.
    needles : sequence of Needle
        The prompts.
    outputs : sequence of Tensor
        int64 [S] each, in their order.
    """
    matched = [_leading(output, needle.secret) for needle, output in zip(needles, outputs, strict=True)]
    whole = [length == len(needle.secret) for length, needle in zip(matched, needles, strict=True)]
    planted = [i for i, needle in enumerate(needles) if needle.depth is not None]
    depths = sorted({needle.depth for needle in needles if needle.depth is not None})
    return Retrieval(
        arm=arm,
        hits=tuple(whole[i] for i in planted),
        matched=tuple(matched[i] for i in planted),
        control_hits=sum(whole) - sum(whole[i] for i in planted),
        controls=len(needles) - len(planted),
        by_depth={f"{depth:g}": sum(whole[i] for i in planted if needles[i].depth == depth) for depth in depths},
    )


def _leading(output: torch.Tensor, secret: torch.Tensor) -> int:
    return int((output == secret).long().cumprod(0).sum())

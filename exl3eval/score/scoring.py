"""Scoring: hidden states of several arms, through their heads, to positions.

Contexts are scored in parallel threads, each on its own core; a context's rows do not depend on which
others are scored beside it, nor on their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3eval.engine.capture import Capture
from exl3eval.engine.head import Head
from exl3eval.engine.parallel import map_contexts
from exl3eval.errors import InvalidRunError
from exl3eval.score.divergence import Divergences, cut_mass, logit_grid, measure_divergences
from exl3eval.score.positions import Placed

BLOCK_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    """What scoring needs of an arm: its hidden states and the head they go through.

    Parameters
    ----------
    capture : Capture
        Hidden states of the scored positions, or of more before them.
    head : Head
        What turns them into logits.
    device : device
        Where.
    head_rows : int or None
        Rows the head sees at a time; None for as many as fit.
    round_logits : bool
        Round logits to BF16, a control.
    """

    capture: Capture
    head: Head
    device: torch.device
    head_rows: int | None = None
    round_logits: bool = False

    def all_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return FP32 logits over the stored width, the head seeing `head_rows` rows at a time."""
        pieces = hidden_SH.to(self.device).split(self.head_rows or len(hidden_SH))
        logits_SW = torch.cat([self.head.all_logits(piece) for piece in pieces])
        return logits_SW.bfloat16().float() if self.round_logits else logits_SW


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredContext:
    """A context as scoring sees it: ids [T + 1], of which those after `first` are targets."""

    name: str
    cluster: str
    stratum: str
    ids_digest: str
    ids: np.ndarray
    first: int = 0

    @property
    def targets(self) -> np.ndarray:
        """True next ids of the scored positions, [S]."""
        return self.ids[self.first + 1 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Positions of every arm, and what was seen of their logits.

    Parameters
    ----------
    placed : list of Placed
        Arms in order, contexts in order within an arm.
    grids : mapping of str to str or None
        Arm -> the 16-bit grid on which all its logits sit, None for true FP32 logits.
    cut_mass : mapping of str to float
        Arm -> largest probability that any position gave to head columns beyond the vocabulary.
    launches : mapping of str to mapping
        Arm -> launches of its head.
    """

    placed: list[Placed]
    grids: Mapping[str, str | None]
    cut_mass: Mapping[str, float]
    launches: Mapping[str, dict[Launch, int]]


@dataclass(frozen=True, slots=True)
class _ContextScores:
    divergences: dict[str, Divergences]
    grids: dict[str, str | None]
    cut_mass: dict[str, float]
    launches: dict[str, Counter[Launch]]


@torch.inference_mode()
def _score_context(
    reference: ScoredArm, arms: Mapping[str, ScoredArm], context: ScoredContext, reference_name: str
) -> _ContextScores:
    everyone = {reference_name: reference, **arms}
    targets_T = torch.from_numpy(context.targets.astype(np.int64))
    hidden = {name: arm.capture.hidden_states(context.ids_digest)[-len(targets_T) :] for name, arm in everyone.items()}
    rows = max(1, BLOCK_LOGITS // reference.head.vocab_size)
    parts: dict[str, list[Divergences]] = {name: [] for name in arms}
    grids: dict[str, str | None] = {}
    mass = dict.fromkeys(everyone, 0.0)
    launches: dict[str, Counter[Launch]] = {name: Counter() for name in everyone}
    for start in range(0, len(targets_T), rows):
        block = slice(start, start + rows)
        logits = {}
        for name, arm in everyone.items():
            reset_launches()
            whole_TW = arm.all_logits(hidden[name][block])
            launches[name].update(read_launches())
            mass[name] = max(mass[name], float(cut_mass(whole_TW, arm.head.vocab_size).max()))
            logits[name] = whole_TW[:, : arm.head.vocab_size].to(reference.device)
            if start == 0:
                grids[name] = logit_grid(logits[name])
        reference_TV = logits.pop(reference_name)
        try:
            scored = measure_divergences(reference_TV, logits, targets_T[block].to(reference.device))
        except InvalidRunError as error:
            raise InvalidRunError(
                f"context {context.name}, positions from {start} on: {error.message}", hint=error.hint
            ) from error
        for name, divergences in scored.items():
            parts[name].append(divergences)
    joined = {
        name: Divergences(**{f.name: torch.cat([getattr(p, f.name) for p in pieces]) for f in fields(Divergences)})
        for name, pieces in parts.items()
    }
    return _ContextScores(joined, grids, mass, launches)


def score_arms(
    reference: ScoredArm,
    arms: Mapping[str, ScoredArm],
    contexts: Sequence[ScoredContext],
    *,
    reference_name: str,
    num_threads: int,
    on_context: Callable[[int], None],
) -> Scores:
    """Score every arm against the reference at every position.

    Parameters
    ----------
    reference : ScoredArm
        P_ref.
    arms : mapping of str to ScoredArm
        Candidates by name.
    contexts : sequence of ScoredContext
        In the order in which rows are wanted.
    reference_name : str
        Label of the reference in messages and in `Scores`.
    num_threads : int
        Contexts scored at a time.
    on_context : callable
        Receives the positions finished, after each context.

    Raises
    ------
    InvalidRunError
        Naming the context, if any position has no valid divergence.
    """
    results = []
    scored = map_contexts(
        lambda context: _score_context(reference, arms, context, reference_name), contexts, num_threads=num_threads
    )
    for result, context in zip(scored, contexts, strict=True):
        results.append(result)
        on_context(len(context.targets))
    placed = [
        Placed(
            arm=name,
            context=context.name,
            cluster=context.cluster,
            stratum=context.stratum,
            first=context.first,
            targets=context.targets,
            divergences=result.divergences[name],
        )
        for name in arms
        for context, result in zip(contexts, results, strict=True)
    ]
    names = [reference_name, *arms]
    return Scores(
        placed=placed,
        grids={name: _common_grid([result.grids[name] for result in results]) for name in names},
        cut_mass={name: max(result.cut_mass[name] for result in results) for name in names},
        launches={name: dict(sum((r.launches[name] for r in results), Counter())) for name in names},
    )


def _common_grid(grids: list[str | None]) -> str | None:
    return grids[0] if len(set(grids)) == 1 else None

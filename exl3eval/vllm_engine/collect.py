"""From finished rows to what the rest of a run works with: scores, candidates, and the floor of replay.

Everything here needs files alone: no model, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from exl3eval.score.candidates import ARROW_SCHEMA
from exl3eval.score.divergence import Divergences
from exl3eval.score.positions import Placed
from exl3eval.score.scoring import ScoredContext, Scores
from exl3eval.vllm_engine.arms import LaneOutcome, read_context


def collect_scores(arms: Mapping[str, LaneOutcome], contexts: Sequence[ScoredContext], *, reference: str) -> Scores:
    """Lay out the rows of several arms as scoring in this process would.

    Parameters
    ----------
    arms : mapping of str to LaneOutcome
        By name, in the order wanted; the reference gives no rows, only what was seen of its logits.
    contexts : sequence of ScoredContext
        In the order wanted.
    reference : str
        Name of P_ref among the arms.

    Returns
    -------
    Scores
        Without launches: those of an engine's head are counted with its body, in the outcome.

    Raises
    ------
    InvalidRunError
        If a context is missing or damaged.
    """
    placed: list[Placed] = []
    grids: dict[str, str | None] = {}
    mass: dict[str, float] = {}
    for name, outcome in arms.items():
        found = [read_context(outcome.rows, context.ids_digest) for context in contexts]
        seen = {rows.evidence.grid for rows in found}
        grids[name] = seen.pop() if len(seen) == 1 else None
        mass[name] = max(rows.evidence.cut_mass for rows in found)
        if name != reference:
            placed += [_place(name, context, rows.divergences) for context, rows in zip(contexts, found, strict=True)]
    return Scores(placed=placed, grids=grids, cut_mass=mass, launches={name: {} for name in arms})


def collect_replay_floor(outcome: LaneOutcome, contexts: Sequence[ScoredContext], *, label: str) -> list[Placed]:
    """Return the reference's own divergences, KL(replayed || emitted): the floor of scoring by replay."""
    return [_place(label, each, read_context(outcome.rows, each.ids_digest).divergences) for each in contexts]


def collect_candidates(arms: Mapping[str, LaneOutcome], contexts: Sequence[ScoredContext]) -> pa.Table:
    """List the ids that each arm holds most likely, as `exl3eval.score.candidates.list_candidates` does.

    Parameters
    ----------
    arms : mapping of str to LaneOutcome
        By name, the reference among them; its ids are those of the logits that it emitted.
    contexts : sequence of ScoredContext
        A few.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ARROW_SCHEMA.names}
    for name, outcome in arms.items():
        for context in contexts:
            rows, count = read_context(outcome.rows, context.ids_digest), len(context.targets)
            columns["arm"] += [name] * count
            columns["context"] += [context.name] * count
            columns["position"] += range(context.first, context.first + count)
            columns["ids"] += rows.candidate_ids[-count:].tolist()
            columns["log_probs"] += rows.candidate_log_probs[-count:].tolist()
    return pa.table(columns, schema=ARROW_SCHEMA)


def _place(arm: str, context: ScoredContext, divergences: Divergences) -> Placed:
    count = len(context.targets)
    return Placed(
        arm=arm,
        context=context.name,
        cluster=context.cluster,
        stratum=context.stratum,
        first=context.first,
        targets=context.targets,
        divergences=Divergences(**{f.name: getattr(divergences, f.name)[-count:] for f in fields(Divergences)}),
    )

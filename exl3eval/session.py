"""One measurement from rows to numbers, whichever engine the rows came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from exl3eval.arm import ArmRecord, check_engagement
from exl3eval.compare import ArmSummary, Comparison, Resampling, check_sanity, compare_arms, summarise_arm
from exl3eval.engine.lanes import Lane
from exl3eval.engine.vocabulary import Vocabulary
from exl3eval.progress import Reporter
from exl3eval.request import KldRequest, floor_name, lane_control_names
from exl3eval.score.positions import Placed, build_table, split_arms
from exl3eval.score.scoring import ScoredContext, Scores
from exl3eval.settings import Settings
from exl3eval.suite.load import Suite
from exl3eval.suite.tokens import TokenSuite


@dataclass(frozen=True, slots=True, kw_only=True)
class KldRun:
    """A finished measurement in one lane."""

    request: KldRequest
    lane: Lane
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    arms: dict[str, ArmRecord]
    scores: Scores
    table: pa.Table
    floors: pa.Table
    candidates: pa.Table
    summaries: dict[str, ArmSummary]
    comparison: Comparison
    resampling: Resampling
    code: dict[str, Any]
    device: dict[str, Any]

    @property
    def floor_arm(self) -> str:
        """Name of the reference at its other precision."""
        return floor_name(self.request)

    @property
    def lane_control(self) -> str | None:
        """Name of the reference in the baseline's lane; None in prefill."""
        return self._control_of(self.comparison.baseline)

    @property
    def graph_control(self) -> str | None:
        """Name of the reference in the variant's lane, where that is not the baseline's."""
        control = self._control_of(self.comparison.variant)
        return None if control == self.lane_control else control

    def _control_of(self, arm: str) -> str | None:
        return next((name for name in lane_control_names(self.arms[arm].lane) if name in self.arms), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every step of one call shares."""

    request: KldRequest
    settings: Settings
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    device: torch.device
    code: dict[str, Any]
    machine: dict[str, Any]
    reporter: Reporter

    @property
    def num_threads(self) -> int:
        """CPU threads."""
        return self.settings.num_threads

    def contexts(self, lane: Lane) -> list[ScoredContext]:
        """List the contexts with the positions that a lane scores."""
        first = lane.first_scored(self.request.num_positions)
        return [
            ScoredContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids_digest=c.digest, ids=c.ids, first=first)
            for c in self.tokens.contexts
        ]

    def reduce(
        self,
        lane: Lane,
        records: dict[str, ArmRecord],
        scores: Scores,
        floors: Sequence[Placed],
        *,
        candidates: tuple[str, str],
        list_worst: Callable[[list[ScoredContext]], pa.Table],
        check: Callable[[pa.Table], None] = lambda table: None,
    ) -> KldRun:
        """Turn the rows of one lane into numbers.

        Parameters
        ----------
        lane : Lane
            The lane.
        records : dict of str to ArmRecord
            What every arm was and did.
        scores : Scores
            Positions.
        floors : sequence of Placed
            Positions of floors, labelled by floor and arm.
        candidates : (str, str)
            Names of baseline and variant.
        list_worst : callable
            Lists what every arm holds most likely, over the contexts given.
        check : callable
            A further check of the table of positions.

        Raises
        ------
        InvalidRunError
            If an arm did not run what it declares, or is broken rather than lossy.
        """
        for record in records.values():
            check_engagement(record)
        table = build_table(scores.placed)
        check(table)
        resampling = Resampling(seed=self.request.seed)
        summaries, comparison = reduce_positions(
            table,
            baseline=candidates[0],
            variant=candidates[1],
            vocab_size=self.vocabulary.size,
            resampling=resampling,
            num_threads=self.num_threads,
            reporter=self.reporter,
        )
        worst = {each.context for name in candidates for each in summaries[name].worst}
        return KldRun(
            request=self.request,
            lane=lane,
            suite=self.suite,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            arms=records,
            scores=scores,
            table=table,
            floors=build_table(list(floors)),
            candidates=list_worst([context for context in self.contexts(lane) if context.name in worst]),
            summaries=summaries,
            comparison=comparison,
            resampling=resampling,
            code=self.code,
            device=self.machine,
        )


def reduce_positions(
    table: pa.Table,
    *,
    baseline: str,
    variant: str,
    vocab_size: int,
    resampling: Resampling,
    num_threads: int,
    reporter: Reporter,
) -> tuple[dict[str, ArmSummary], Comparison]:
    """Compute every headline from the positions table alone.

    Raises
    ------
    InvalidRunError
        If an arm is broken rather than lossy.
    """
    arms = split_arms(table)
    with (
        ThreadPoolExecutor(max_workers=num_threads) as pool,
        reporter.phase("resample", len(arms) + 1, "estimates") as advance,
    ):
        summaries = {}
        for name, rows in arms.items():
            summaries[name] = summarise_arm(name, rows, resampling, executor=pool)
            advance(1)
        check_sanity(list(summaries.values()), vocab_size)
        comparison = compare_arms((baseline, arms[baseline]), (variant, arms[variant]), resampling, executor=pool)
        advance(1)
    return summaries, comparison

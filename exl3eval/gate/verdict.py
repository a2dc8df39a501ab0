"""Verdicts: what was decided, on which evidence, with which power, and what to do next. Frozen, strict-JSON-able."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from exl3eval.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK
from exl3eval.gate.endpoints import Delta
from exl3eval.gate.policy import MarginRule
from exl3eval.records import canonical_json
from exl3eval.stats.power import Power

SCHEMA = "exl3eval/verdict/1"


class Outcome(StrEnum):
    """What a CI acts on."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"

    @property
    def exit_code(self) -> int:
        """The process's contract with CI."""
        return {"PASS": EXIT_OK, "FAIL": EXIT_FAIL, "INCONCLUSIVE": EXIT_INCONCLUSIVE, "INVALID": EXIT_INVALID}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A margin with the parts that it is the largest of, in the endpoint's unit."""

    value: float
    fraction: float
    absolute: float
    floors: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointVerdict:
    """One endpoint of one variant.

    Attributes
    ----------
    outcome : Outcome
    unit : str
    delta : Delta
    margin : Margin
    power : Power or None
        None when the spread is unknown.
    next_step : str
        What to do when it is not PASS.
    """

    outcome: Outcome
    unit: str
    delta: Delta
    margin: Margin
    power: Power | None
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumVerdict:
    """Mean KL of one variant on one kind of text.

    Attributes
    ----------
    outcome : Outcome
        FAIL when `p_holm` < alpha, PASS when judged and not failed, INCONCLUSIVE when too small to judge.
    value, upper : float or None
        Difference, and its one-sided upper bound without adjustment.
    p_harm, p_holm : float or None
        One-sided p-value of "worse than the margin", alone and adjusted for the number of strata.
    """

    variant: str
    stratum: str
    outcome: Outcome
    value: float
    upper: float | None
    margin: float
    num_contexts: int
    num_clusters: int
    p_harm: float | None
    p_holm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look of a sequential design, and what it decided on its contexts alone."""

    num_contexts: int
    level: float
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to "can this ship?".

    Attributes
    ----------
    outcome : Outcome
    lane : str
    endpoints : tuple of EndpointVerdict
        At the look that decided, or the last one.
    strata : tuple of StratumVerdict
    looks : tuple of Look
    identical : tuple of str
        Variants that agree with the baseline in every bit.
    refusals : tuple of str
        Why PASS was not given although the bounds allow it, or why nothing was judged; each says what to do.
    exploratory : bool
        Refusals were listed and not applied.
    next_steps : tuple of str
    """

    outcome: Outcome
    lane: str
    endpoints: tuple[EndpointVerdict, ...]
    strata: tuple[StratumVerdict, ...]
    looks: tuple[Look, ...]
    identical: tuple[str, ...]
    refusals: tuple[str, ...]
    exploratory: bool
    next_steps: tuple[str, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants judged, in order."""
        return tuple(dict.fromkeys(verdict.delta.variant for verdict in self.endpoints))


def resolve_margin(rule: MarginRule, *, baseline: float, floor: float) -> Margin:
    """Evaluate a margin rule on the figures of the baseline and floor arms."""
    parts = {"fraction": rule.fraction * baseline, "absolute": rule.absolute, "floors": rule.floors * floor}
    return Margin(value=max(parts.values()), **parts)


def invalid_verdict(message: str, hint: str) -> Verdict:
    """Record that evidence must not be read as a number."""
    return Verdict(
        outcome=Outcome.INVALID,
        lane="",
        endpoints=(),
        strata=(),
        looks=(),
        identical=(),
        refusals=(message,),
        exploratory=False,
        next_steps=(hint,) if hint else (),
    )


def refuse(verdict: Verdict, reason: str) -> Verdict:
    """Add a refusal: unless exploratory, a PASS or FAIL becomes INCONCLUSIVE."""
    outcome = verdict.outcome if verdict.exploratory else Outcome.INCONCLUSIVE
    return replace(verdict, outcome=outcome, refusals=(*verdict.refusals, reason))


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Combine by intersection-union: one FAIL fails, and only all PASS pass."""
    seen = set(outcomes)
    order = (Outcome.INVALID, Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS)
    return next(outcome for outcome in order if outcome in seen)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Lay a verdict out as strict JSON."""
    return json.loads(canonical_json({**asdict(verdict), "exit_code": verdict.outcome.exit_code}))

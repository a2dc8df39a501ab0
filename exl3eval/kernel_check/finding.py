"""What a property says about a route."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "not applicable", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a property measured.

    Parameters
    ----------
    checked : str
        What was compared with what, over which cases.
    cases : int
        How many comparisons.
    worst : float
        The worst value seen.
    bound : float
        The largest value that passes.
    measure : str
        What `worst` and `bound` count.
    reason : str
        Where the worst value was seen, or what is odd.
    """

    checked: str
    cases: int
    worst: float
    bound: float = 0.0
    measure: str = "differing values"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Why a property says nothing here: it has no meaning for the route, or it could not be run on this machine."""

    reason: str
    status: Literal["not applicable", "not run"] = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the receipt: a property's verdict on a route.

    Parameters
    ----------
    number : int
        1 to 22 are the suite's own properties; 23 and up are conditions under which they are repeated.
    name, route : str
        The property and what it was run on; `codec` is the reference codec itself.
    worst, bound : float or None
        See `Evidence`; None where nothing was measured or the value is not finite.
    """

    number: int
    name: str
    route: str
    status: Status
    checked: str
    cases: int
    worst: float | None
    bound: float | None
    measure: str
    reason: str


def judge(number: int, name: str, route: str, outcome: Evidence | Skipped | Exception) -> Finding:
    """Turn a property's outcome into a finding; a property that raised has failed, and so has a value that is NaN."""
    if isinstance(outcome, Evidence):
        return Finding(
            number=number,
            name=name,
            route=route,
            status="pass" if outcome.worst <= outcome.bound and outcome.cases > 0 else "fail",
            checked=outcome.checked,
            cases=outcome.cases,
            worst=outcome.worst if math.isfinite(outcome.worst) else None,
            bound=outcome.bound,
            measure=outcome.measure,
            reason=outcome.reason if math.isfinite(outcome.worst) else f"the worst value is {outcome.worst}",
        )
    skipped = outcome if isinstance(outcome, Skipped) else None
    return Finding(
        number=number,
        name=name,
        route=route,
        status=skipped.status if skipped else "fail",
        checked="",
        cases=0,
        worst=None,
        bound=None,
        measure="",
        reason=skipped.reason if skipped else f"raised {type(outcome).__name__}: {outcome}",
    )

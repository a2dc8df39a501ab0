"""The verdict of a smoke test: PASS needs evidence, and a model that cannot copy gives none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exl3eval.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_OK
from exl3eval.smoke.agreement import Agreement
from exl3eval.smoke.needle import Retrieval

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: EXIT_OK, FAIL: EXIT_FAIL, INCONCLUSIVE: EXIT_INCONCLUSIVE}
COMPARABLE_SHARE = 0.5
COMPARABLE_LEAST = 10
BROKEN_BELOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An outcome, its reasons, and the counts that it rests on.

    Parameters
    ----------
    outcome : str
        PASS, FAIL or INCONCLUSIVE.
    reasons : tuple of str
        One sentence each.
    prompts, comparable, lost : int
        Prompts with a secret; those that every other arm reproduces; those among them that the judged arm does not.
    """

    outcome: str
    reasons: tuple[str, ...]
    prompts: int
    comparable: int
    lost: int


def judge(
    arm: str,
    retrievals: Mapping[str, Retrieval],
    agreements: Mapping[str, Agreement],
    *,
    num_contexts: int,
    allow_lost: int,
) -> Verdict:
    """Judge one arm against all others.

    FAIL if it loses more than `allow_lost` of the secrets that every other arm reproduces, or chooses the reference's
    next id less than half of the time. INCONCLUSIVE if fewer than ten secrets, or fewer than half, are reproduced by
    every other arm, if secrets come back that were never planted, or if the reference's texts say nothing.

    Parameters
    ----------
    arm : str
        The arm judged.
    retrievals, agreements : mapping
        By arm.
    num_contexts : int
        Contexts that were to be continued.
    allow_lost : int
        Secrets that may be lost.
    """
    own = retrievals[arm]
    others = [retrieval for name, retrieval in retrievals.items() if name != arm]
    comparable = [i for i in range(len(own.hits)) if all(other.hits[i] for other in others)]
    lost = sum(not own.hits[i] for i in comparable)
    needed = max(COMPARABLE_LEAST, COMPARABLE_SHARE * len(own.hits))
    agreement = agreements.get(arm)
    failures, doubts = [], []
    if agreement is not None and agreement.rate < BROKEN_BELOW:
        failures.append(f"it chooses the reference's next id at {agreement.rate:.1%} of positions: it is broken")
    if lost > allow_lost:
        failures.append(f"it loses {lost} of {len(comparable)} secrets that every other arm reproduces")
    if len(comparable) < needed:
        doubts.append(
            f"{len(comparable)} of {len(own.hits)} secrets are reproduced by every other arm: too few to tell anything "
            "about retrieval; these models do not copy well enough at this length"
        )
    if guessed := [name for name, retrieval in retrievals.items() if retrieval.control_hits]:
        doubts.append(f"{', '.join(guessed)} reproduced secrets that were never planted")
    compared = 0 if agreement is None else agreement.contexts
    if compared < COMPARABLE_SHARE * num_contexts:
        doubts.append(f"the reference repeats one id after {num_contexts - compared} of {num_contexts} contexts")
    outcome = FAIL if failures else INCONCLUSIVE if doubts else PASS
    kept = f"it reproduces {len(comparable) - lost} of {len(comparable)} secrets that every other arm reproduces"
    return Verdict(
        outcome=outcome,
        reasons=(*failures, *doubts) or (kept,),
        prompts=len(own.hits),
        comparable=len(comparable),
        lost=lost,
    )

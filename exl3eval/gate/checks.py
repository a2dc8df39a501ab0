"""Checks that two things may be compared at all: positions, designs, and the suite's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exl3eval.errors import InvalidRunError
from exl3eval.gate.rows import RUN_AGAIN, ArmRows, Run
from exl3eval.suite.context import Suite


def check_same_positions(first: ArmRows, second: ArmRows) -> None:
    """Refuse to pair arms over other contexts, another order or other target tokens.

    Raises
    ------
    InvalidRunError
        Naming the field that differs and where.
    """
    for name in ("contexts", "clusters", "strata"):
        left, right = getattr(first, name), getattr(second, name)
        if left != right:
            at = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
            seen = f"{left[at]!r} against {right[at]!r} at context {at}" if at is not None else "other lengths"
            raise InvalidRunError(f"arms `{first.arm}` and `{second.arm}` differ in {name}: {seen}", hint=RUN_AGAIN)
    if not np.array_equal(first.targets_NP, second.targets_NP):
        same_shape = first.targets_NP.shape == second.targets_NP.shape
        at = int(np.flatnonzero((first.targets_NP != second.targets_NP).any(axis=1))[0]) if same_shape else 0
        raise InvalidRunError(
            f"arms `{first.arm}` and `{second.arm}` differ in target tokens, first in context {first.contexts[at]!r}",
            hint="the rows belong to other tokens: contexts were shuffled or cut; " + RUN_AGAIN,
        )


def check_one_design(runs: Sequence[Run]) -> None:
    """Refuse to judge several variants together unless their runs differ in the variant alone.

    Raises
    ------
    InvalidRunError
        Naming the field that differs.
    """
    first, *others = runs
    for other in others:
        check_same_positions(first.baseline, other.variant)
        left, right = (_without_variant(run) for run in (first, other))
        if differences := list_differences(left, right):
            raise InvalidRunError(
                f"the runs of `{first.variant.arm}` and `{other.variant.arm}` differ in what neither declares: "
                + "; ".join(differences[:3]),
                hint="run all variants with the same code, machine, tokens and baseline",
            )
        if not np.array_equal(first.baseline.kl_NP, other.baseline.kl_NP):
            raise InvalidRunError(
                f"the baseline `{first.baseline.arm}` reads other numbers beside `{other.variant.arm}`",
                hint="the baseline is not repeatable on this machine; find out why before judging variants against it",
            )


def _without_variant(run: Run) -> dict[str, Any]:
    """Return a run's identity with the variant's entry dropped from everything that is kept per arm."""
    return {
        key: {name: own for name, own in value.items() if name != run.variant.arm} if isinstance(value, dict) else value
        for key, value in run.identity.items()
    }


def check_context_order(run: Run, suite: Suite) -> None:
    """Check contexts, their documents and kinds, and the seeded balanced order, against the suite itself.

    Raises
    ------
    InvalidRunError
        If the suite is another one, or the run's contexts are not its draw.
    """
    declared = run.identity["suite"]
    if suite.digest != declared["digest"]:
        raise InvalidRunError(
            f"the run is over suite {declared['name']} {declared['digest'][:12]}, not {suite.name} {suite.digest[:12]}",
            hint="give the suite that the run was made with (--suite)",
        )
    drawn = suite.select(declared["split"], run.baseline.num_contexts, run.identity["seed"])
    for name, expected in (
        ("contexts", tuple(context.id for context in drawn)),
        ("clusters", tuple(context.cluster for context in drawn)),
        ("strata", tuple(context.stratum for context in drawn)),
    ):
        if getattr(run.baseline, name) != expected:
            raise InvalidRunError(
                f"the run's {name} are not the suite's draw for seed {run.identity['seed']}: shuffled or relabelled",
                hint=RUN_AGAIN,
            )


def list_differences(first: Any, second: Any, path: str = "") -> list[str]:
    """List the leaves in which two records differ, as `path: seen against seen`."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = sorted(set(first) | set(second))
        return [
            line
            for key in keys
            for line in list_differences(first.get(key), second.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if first == second else [f"{path}: {_short(first)} against {_short(second)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

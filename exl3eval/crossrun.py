"""Two runs against each other: what differs between them, and whether that was declared.

Two figures can be compared only when everything that may move them is the same or named. The identity of a
receipt lists it all; a field in which two runs differ is *declared* if the variants themselves differ in it,
or if the caller says so. Anything else refuses the comparison and is printed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from exl3eval.compare import Comparison, Resampling, compare_arms
from exl3eval.errors import InvalidRunError
from exl3eval.floors import ENGINES
from exl3eval.vllm_engine.floor import check_cross_engine

# Keyed by arm name; what they say of the variant arm is compared under `variant.` and `arm.`.
_BY_ARM = ("identity.arms", "identity.head_lane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which two runs differ.

    Parameters
    ----------
    field : str
        Dotted path in the receipt, `identity.device.name` for instance.
    left, right : object
        The two values, None where a side lacks the field.
    declared : bool
        Whether the variants or the caller say that it differs.
    """

    field: str
    left: Any
    right: Any
    declared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A verified run: its receipt and each arm's positions."""

    receipt: Mapping[str, Any]
    arms: Mapping[str, pa.Table]


def list_differences(left: StoredRun, right: StoredRun, *, declared: Collection[str] = ()) -> list[Difference]:
    """List every identity field in which the variant arms of two runs differ, in field order.

    Parameters
    ----------
    left, right : StoredRun
        The runs.
    declared : collection of str
        Dotted fields, or prefixes of them, that the caller declares.
    """
    flat = [_flatten({"identity": run.receipt["identity"]}) | _flatten(_variant_arm(run)) for run in (left, right)]
    fields = sorted(field for field in flat[0].keys() | flat[1].keys() if flat[0].get(field) != flat[1].get(field))
    return [
        Difference(
            field=field,
            left=flat[0].get(field),
            right=flat[1].get(field),
            declared=field.startswith("variant.") or any(f"{field}.".startswith(f"{name}.") for name in declared),
        )
        for field in fields
        if not field.startswith(_BY_ARM)
    ]


def _variant_arm(run: StoredRun) -> dict[str, Any]:
    arm = run.receipt["identity"]["arms"][run.receipt["variant"]]
    engine = arm.get("engine") or {}
    return {
        "variant": {key: value for key, value in arm["resolved"].items() if key not in ("name", "doc")},
        "arm": {key: arm[key] for key in ("checkpoint_sha256", "attention")}
        | {"engine": {key: engine.get(key) for key in ("mode", "effective", "interpreter")}},
    }


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{path}.{key}" if path else str(key))
        return flat
    return {path: value}


def compare_runs(
    left: StoredRun, right: StoredRun, *, declared: Collection[str] = ()
) -> tuple[list[Difference], Comparison]:
    """Pair the variant arms of two runs, context by context: right minus left.

    Returns
    -------
    differences : list of Difference
        All of them declared.
    comparison : Comparison
        Baseline is the left run's variant.

    Raises
    ------
    InvalidRunError
        If the runs differ in a field that nothing declares, were not scored on the same positions, or ran in two
        engines whose own difference was not measured or not exceeded.
    """
    differences = list_differences(left, right, declared=declared)
    undeclared = [difference for difference in differences if not difference.declared]
    if undeclared:
        first = undeclared[0]
        more = f" and {len(undeclared) - 1} more" if len(undeclared) > 1 else ""
        raise InvalidRunError(
            f"the runs differ in `{first.field}`{more}: {first.left!r} against {first.right!r}",
            hint=f"make it equal, or declare it: --declare {first.field}",
        )
    names = [run.receipt["variant"] for run in (left, right)]
    labels = names if names[0] != names[1] else [f"{names[0]} (first)", f"{names[1]} (second)"]
    comparison = compare_arms(
        (labels[0], left.arms[names[0]]),
        (labels[1], right.arms[names[1]]),
        Resampling(**left.receipt["resampling"]),
    )
    engines = [str(run.receipt["identity"]["engine"]) for run in (left, right)]
    floors = [run.receipt["results"]["floors"].get(ENGINES) for run in (left, right)]
    check_cross_engine(
        *engines,
        delta_nats=comparison.paired.delta.mean,
        floor_nats=max((value for floor in floors if floor for value in floor.values()), default=None),
    )
    return differences, comparison

"""Evidence: a stored run, read back and believed only as far as it can be checked.

No number of a receipt is used. Rows come from the positions file, whose digest, labels, order and targets are checked,
and the receipt's headline means are compared with what the rows give. What this does not claim: that the rows are what
the model produced; only running it again shows that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from exl3eval.compare import MIN_TOP1, NEAR_UNIFORM
from exl3eval.errors import InvalidRunError
from exl3eval.gate.checks import check_same_positions, list_differences
from exl3eval.gate.rows import LABEL_FIELDS, Run, arm_rows
from exl3eval.receipt import POSITIONS_FILE, RECEIPT_FILE
from exl3eval.verify import RUN_AGAIN, read_stored_run

FOREIGN_FILE = "foreign.json"
_ROUNDING = 1e-12


def read_run(folder: Path) -> Run:
    """Read a run and check all that can be checked without the model.

    Raises
    ------
    UsageError
        If the folder holds no run, or a run of another schema.
    InvalidRunError
        If it is foreign evidence, was altered, is not one design, or an arm is broken or ran no kernel.
    """
    if (folder / FOREIGN_FILE).exists():
        raise InvalidRunError(
            f"{folder.name} holds foreign evidence: another tool's numbers, by another protocol",
            hint="a gate judges runs of `exl3eval kld --out` only; foreign evidence can be shown beside them",
        )
    receipt, tables = read_stored_run(folder)
    try:
        return _check_run(receipt, tables)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRunError(f"{RECEIPT_FILE} lacks or misuses {error}", hint=RUN_AGAIN) from error


def _check_run(receipt: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> Run:
    names = [receipt[role] for role in ("baseline", "variant", "floor")]
    if missing := [name for name in names if name not in tables]:
        raise InvalidRunError(f"{POSITIONS_FILE} has no rows of arm `{missing[0]}`", hint=RUN_AGAIN)
    rows = {name: arm_rows(name, tables[name]) for name in names}
    run = Run(receipt=receipt, baseline=rows[names[0]], variant=rows[names[1]], floor=rows[names[2]])
    for other in (run.variant, run.floor):
        check_same_positions(run.baseline, other)
    _check_arms(run)
    _check_headlines(run)
    return run


def _check_arms(run: Run) -> None:
    arms, vocab_size = run.identity["arms"], run.identity["vocabulary"]["size"]
    for rows in (run.baseline, run.variant):
        if sum(launch["count"] for launch in arms[rows.arm]["launches"]) == 0:
            raise InvalidRunError(
                f"arm `{rows.arm}` launched no EXL3 kernel", hint="a claim about a route with zero launches is no zero"
            )
        agreement = 1.0 - float(rows.disagree_NP.mean())
        if agreement < MIN_TOP1 or rows.entropy > NEAR_UNIFORM * math.log(vocab_size):
            raise InvalidRunError(
                f"arm `{rows.arm}` is broken: top-1 agreement {agreement:.1%}, entropy {rows.entropy:.2f} of "
                f"{math.log(vocab_size):.2f} nats",
                hint="a broken model is no data point; find what broke it",
            )
    if _changed_no_launch(arms[run.baseline.arm], arms[run.variant.arm]):
        raise InvalidRunError(
            f"arms `{run.baseline.arm}` and `{run.variant.arm}` declare other dispatches and made the same launches",
            hint="choose a lane whose row counts reach what the variant changes: this one says nothing about it",
        )
    if differences := _undeclared_differences(arms[run.baseline.arm], arms[run.variant.arm]):
        raise InvalidRunError(
            f"arms `{run.baseline.arm}` and `{run.variant.arm}` differ in what the variants do not declare: "
            + "; ".join(differences),
            hint="declare it in the variant, or make it equal",
        )


def _changed_no_launch(baseline: Mapping[str, Any], variant: Mapping[str, Any]) -> bool:
    """Return whether a variant's dispatch differs from its baseline's and nothing else ran for it (lessons M3)."""
    other = baseline["resolved"]["linear"] != variant["resolved"]["linear"]
    return other and baseline["launches"] == variant["launches"]


def _undeclared_differences(baseline: Mapping[str, Any], variant: Mapping[str, Any]) -> list[str]:
    """List what differs between two arms although their variants declare the same."""
    apart = ("declared", "resolved", "launches", "engine")
    same = [
        name
        for name, value in baseline["declared"].items()
        if name not in LABEL_FIELDS and variant["declared"][name] == value
    ]
    left, right = (
        {key: value for key, value in arm.items() if key not in apart}
        | {"resolved": {name: arm["resolved"][name] for name in same}, "engine": _engine(arm, same)}
        for arm in (baseline, variant)
    )
    return list_differences(left, right)


def _engine(arm: Mapping[str, Any], same: Collection[str]) -> dict[str, Any]:
    """Return what must be equal in the engines of two arms whose variants declare some fields alike."""
    engine = arm.get("engine")
    if engine is None or "vllm" not in same:
        return {}
    apart = {"kv_blocks"} if "graphs" in same else {"kv_blocks", "cudagraph_mode", "capture_sizes"}
    effective = {name: value for name, value in engine["effective"].items() if name not in apart}
    return {"interpreter": engine["interpreter"], "effective": effective} | (
        {"mode": engine["mode"]} if "graphs" in same else {}
    )


def _check_headlines(run: Run) -> None:
    results, identity = run.receipt["results"], run.identity
    tokens = identity["tokens"]
    shape = [tokens["num_contexts"], tokens["positions_per_context"] - tokens.get("first_scored", 0)]
    if list(run.baseline.kl_NP.shape) != shape:
        raise InvalidRunError(
            f"{POSITIONS_FILE} holds {list(run.baseline.kl_NP.shape)} contexts x positions, the receipt says {shape}",
            hint=RUN_AGAIN,
        )
    means = {rows.arm: rows.average(rows.kl_NP) for rows in (run.baseline, run.variant, run.floor)}
    pairs = [(f"mean KL of `{arm}`", results["arms"][arm]["kl"]["mean"], mean.mean()) for arm, mean in means.items()]
    difference = means[run.variant.arm].values - means[run.baseline.arm].values
    computed = means[run.baseline.arm].replace_values(difference).mean()
    pairs.append(("mean difference", results["comparison"]["paired"]["delta"]["mean"], computed))
    for label, written, computed in pairs:
        if not math.isclose(written, computed, rel_tol=_ROUNDING, abs_tol=0.0):
            raise InvalidRunError(
                f"{label}: the receipt says {written!r}, its positions give {computed!r}", hint=RUN_AGAIN
            )

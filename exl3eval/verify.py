"""Believing a run folder: digests first, then every number of the results computed again from the positions.

What this does not claim: that the positions are what the model produced; only running it again shows that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from exl3eval.compare import ArmSummary, Resampling, check_sanity, compare_arms, summarise_arm
from exl3eval.errors import Exl3EvalError, InvalidRunError, UsageError
from exl3eval.floors import floor_means
from exl3eval.receipt import FLOORS_FILE, POSITIONS_FILE, RECEIPT_FILE, SCHEMA
from exl3eval.records import RECEIPT_DIGEST, canonical_json, digest_file, digest_value, read_json, read_receipt
from exl3eval.score.positions import read_positions, split_arms

RELATIVE, ABSOLUTE = 1e-9, 1e-15
DERIVED_FILES = ("verdict.json", "badge.json", "report.json")
RUN_AGAIN = "run `exl3eval kld --out` again; a stored run is never edited"


def read_stored_run(folder: Path) -> tuple[dict[str, Any], Mapping[str, pa.Table]]:
    """Read a run's receipt and each arm's positions, and check every digest.

    Raises
    ------
    UsageError
        If the folder holds no run, or a run of another schema.
    InvalidRunError
        If a file is damaged or a digest does not match.
    """
    for name in (RECEIPT_FILE, POSITIONS_FILE, FLOORS_FILE):
        if not (folder / name).is_file():
            raise UsageError(f"{folder.name} holds no {name}", hint="give a folder written by `exl3eval kld --out`")
    try:
        receipt = read_json(folder / RECEIPT_FILE)
    except UsageError as error:
        raise InvalidRunError(error.message, hint=RUN_AGAIN) from error
    schema = receipt.get("schema") if isinstance(receipt, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{RECEIPT_FILE} has schema {schema!r}, expected {SCHEMA!r}", hint=RUN_AGAIN)
    try:
        for field in ("identity", "results"):
            _check_digest(RECEIPT_FILE, f"`{field}`", receipt[f"{field}_digest"], digest_value(receipt[field]))
        for name in (POSITIONS_FILE, FLOORS_FILE):
            stored = receipt[f"{name.partition('.')[0]}_sha256"]
            _check_digest(name, "sha256", stored, digest_file(folder / name))
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRunError(f"{RECEIPT_FILE} lacks or misuses {error}", hint=RUN_AGAIN) from error
    read_receipt(folder / RECEIPT_FILE)
    try:
        return receipt, split_arms(read_positions(folder / POSITIONS_FILE))
    except Exl3EvalError as error:
        raise InvalidRunError(error.message, hint=error.hint) from error


def find_receipts(place: Path) -> list[Path]:
    """Return what there is to verify at a place: run folders and receipts, in path order.

    Raises
    ------
    UsageError
        If there is none.
    """
    if place.is_file():
        return [place]
    found = [path for path in place.rglob("*.json") if path.name not in DERIVED_FILES]
    runs = {path.parent for path in place.rglob(POSITIONS_FILE)}
    receipts = sorted(runs | {path for path in found if path.name != RECEIPT_FILE or path.parent not in runs})
    if not receipts:
        raise UsageError(f"{place.name} holds no receipt", hint="give a receipt, a run's folder, or a folder of them")
    return receipts


def verify_place(place: Path, *, executor: Executor | None = None) -> dict[str, Any]:
    """Verify a run folder from its positions, or a bare receipt by its digest; return what was found.

    Raises
    ------
    UsageError
        If there is nothing of the kind.
    InvalidRunError
        If a digest or a number does not match.
    """
    if place.is_dir():
        receipt, arms = verify_run(place, executor=executor)
        rows = {name: table.num_rows for name, table in arms.items()}
        return {"verified": "every number", "results_digest": receipt["results_digest"], "positions": rows}
    receipt = read_receipt(place)
    return {"verified": "the digest", "schema": receipt.get("schema"), RECEIPT_DIGEST: receipt[RECEIPT_DIGEST]}


def verify_run(folder: Path, *, executor: Executor | None = None) -> tuple[dict[str, Any], Mapping[str, pa.Table]]:
    """Read a run and compute every number of it again; return its receipt and each arm's positions.

    Raises
    ------
    UsageError
        If the folder holds no run, or a run of another schema.
    InvalidRunError
        If a digest does not match, or a number is not what the positions give.
    """
    receipt, arms = read_stored_run(folder)
    try:
        _check_rows(receipt, arms)
        stored = {
            "arms": receipt["results"]["arms"],
            "comparison": receipt["results"]["comparison"],
            "floors": {
                name: value for name, value in receipt["results"]["floors"].items() if name != "repeat_difference"
            },
        }
        fresh = recompute_results(receipt, arms, executor=executor)
        fresh["floors"] |= floor_means(split_arms(read_positions(folder / FLOORS_FILE)))
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRunError(f"{RECEIPT_FILE} lacks or misuses {error}", hint=RUN_AGAIN) from error
    if difference := first_difference(stored, fresh):
        raise InvalidRunError(f"{RECEIPT_FILE} is not what its positions give: {difference}", hint=RUN_AGAIN)
    return receipt, arms


def recompute_results(
    receipt: Mapping[str, Any], arms: Mapping[str, pa.Table], *, executor: Executor | None = None
) -> dict[str, Any]:
    """Compute every number of a receipt that comes from positions, as plain JSON values.

    With an executor, which must be of threads, arms are reduced side by side.

    Raises
    ------
    InvalidRunError
        If an arm is broken rather than lossy.
    """
    resampling = Resampling(**receipt["resampling"])
    baseline, variant, floor = receipt["baseline"], receipt["variant"], receipt["floor"]

    def summarise(name: str) -> ArmSummary:
        return summarise_arm(name, arms[name], resampling)

    reduced = map(summarise, arms) if executor is None else executor.map(summarise, arms)
    summaries = dict(zip(arms, reduced, strict=True))
    check_sanity(list(summaries.values()), receipt["identity"]["vocabulary"]["size"])
    comparison = compare_arms((baseline, arms[baseline]), (variant, arms[variant]), resampling, executor=executor)
    controls = {name: receipt["results"]["floors"].get(name) for name in ("lane_control", "graph_control")}
    floors = {"reference_rounding": floor} | {name: c["arm"] if c else None for name, c in controls.items()}
    results = {
        "arms": {name: asdict(summary) for name, summary in summaries.items()},
        "comparison": asdict(comparison),
        "floors": {name: {"arm": arm, "kl": summaries[arm].kl.mean} if arm else None for name, arm in floors.items()},
    }
    return json.loads(canonical_json(results))


def first_difference(stored: Any, fresh: Any, where: str = "results") -> str | None:
    """Name the first value that differs: numbers beyond rounding of another machine's sums, all else exactly."""
    if isinstance(stored, dict) and isinstance(fresh, dict):
        if odd := sorted(stored.keys() ^ fresh.keys()):
            return f"{where} has {odd[0]!r} on one side only"
        pairs = [(f"{where}.{key}", stored[key], fresh[key]) for key in stored]
    elif isinstance(stored, list) and isinstance(fresh, list):
        if len(stored) != len(fresh):
            return f"{where} has {len(stored)} entries, expected {len(fresh)}"
        pairs = [(f"{where}[{i}]", left, right) for i, (left, right) in enumerate(zip(stored, fresh, strict=True))]
    elif isinstance(stored, float) and isinstance(fresh, float):
        same = math.isclose(stored, fresh, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return None if same else f"{where} is {stored}, expected {fresh}"
    else:
        same = stored == fresh and type(stored) is type(fresh)
        return None if same else f"{where} is {stored!r}, expected {fresh!r}"
    return next((found for place, left, right in pairs if (found := first_difference(left, right, place))), None)


def _check_digest(file: str, what: str, stored: str, fresh: str) -> None:
    if stored != fresh:
        raise InvalidRunError(
            f"{file}: {what} was altered: digest {fresh[:16]}, the receipt says {stored[:16]}", hint=RUN_AGAIN
        )


def _check_rows(receipt: Mapping[str, Any], arms: Mapping[str, pa.Table]) -> None:
    tokens = receipt["identity"]["tokens"]
    expected = tokens["num_contexts"] * (tokens["positions_per_context"] - tokens.get("first_scored", 0))
    declared = set(receipt["identity"]["arms"]) - {receipt["reference"]}
    if set(arms) != declared:
        raise InvalidRunError(
            f"{POSITIONS_FILE} holds arms {sorted(arms)}, the receipt {sorted(declared)}", hint=RUN_AGAIN
        )
    for name, rows in arms.items():
        if rows.num_rows != expected:
            raise InvalidRunError(
                f"arm `{name}` has {rows.num_rows} positions, the receipt says {expected}", hint=RUN_AGAIN
            )

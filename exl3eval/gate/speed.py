"""Speed baselines: times of named cells on one platform, judged like everything else by a bound against a margin.

A record is strict JSON: {"schema": "exl3eval/speed/1", "platform": {...}, "cells": {"decode K4 M=1": [seconds, ...]}}.
The platform names everything that times depend on (GPU, driver, CUDA, clocks); records of two platforms are never
compared. A cell is slower when a Mann-Whitney test finds its times above the baseline's stretched by the margin, and no
slower when it finds them below; anything else is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.checks import list_differences
from exl3eval.gate.verdict import Outcome
from exl3eval.records import digest_value, read_json, write_json

SCHEMA, ENTRY_SCHEMA = "exl3eval/speed/1", "exl3eval/speed-baseline/1"
ENTRY_FILE = "speed.json"
MARGIN = 0.05
ALPHA = 0.05
MIN_TIMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRecord:
    """Times of cells on one platform; every cell holds at least `MIN_TIMES` positive seconds."""

    platform: Mapping[str, Any]
    cells: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellVerdict:
    """One cell against its baseline; `ratio` of medians above 1 is slower."""

    cell: str
    outcome: Outcome
    ratio: float
    p_slower: float
    p_no_slower: float


def read_speed(path: Path) -> SpeedRecord:
    """Read a speed record.

    Raises
    ------
    UsageError
        If the file is not a speed record of this schema.
    """
    return _parse(read_json(path), path.name)


def bless_speed(store: Path, record: SpeedRecord, *, who: str, why: str, now: datetime) -> str:
    """Add a speed record to the store; return its digest.

    Raises
    ------
    UsageError
        If name or reason is empty, or the entry exists.
    """
    if not who.strip() or not why.strip():
        raise UsageError("a baseline needs a name and a reason", hint="give --who and --why")
    entry = {
        "schema": ENTRY_SCHEMA,
        "who": who,
        "why": why,
        "created": now.isoformat(timespec="seconds"),
        "record": {
            "schema": SCHEMA,
            "platform": dict(record.platform),
            "cells": {cell: list(times) for cell, times in record.cells.items()},
        },
    }
    digest = digest_value(entry)
    write_json(store / digest / ENTRY_FILE, entry, exclusive=True)
    return digest


def check_speed(store: Path, record: SpeedRecord) -> list[CellVerdict]:
    """Hold a record against the newest baseline of its platform.

    Raises
    ------
    UsageError
        If there is none for the platform, or a cell of the baseline is missing.
    InvalidRunError
        If an entry was altered.
    """
    entries = []
    for file in sorted(store.glob(f"*/{ENTRY_FILE}")):
        entry = read_json(file)
        if digest_value(entry) != file.parent.name:
            raise InvalidRunError(
                f"speed baseline {file.parent.name[:12]} was altered", hint="restore the store from version control"
            )
        entries.append((entry["created"], file.parent.name, _parse(entry["record"], file.name)))
    matching = [entry for entry in entries if entry[2].platform == record.platform]
    if not matching:
        distances = [list_differences(entry[2].platform, record.platform) for entry in entries]
        nearest = f"; the nearest differs in {'; '.join(min(distances, key=len)[:3])}" if distances else ""
        raise UsageError(
            f"no speed baseline of {len(entries)} is for this platform{nearest}",
            hint="`exl3eval baseline bless FILE.json --who NAME --why REASON` adds one",
        )
    baseline = max(matching)[2]
    if missing := sorted(set(baseline.cells) - set(record.cells)):
        raise UsageError(f"the record lacks cell {missing[0]!r} of its baseline", hint="time every cell, or bless anew")
    return [compare_times(cell, times, record.cells[cell]) for cell, times in sorted(baseline.cells.items())]


def compare_times(cell: str, before: tuple[float, ...], after: tuple[float, ...]) -> CellVerdict:
    """Judge one cell: slower than the margin, surely not, or neither."""
    stretched = np.asarray(before) * (1.0 + MARGIN)
    p_slower, p_no_slower = (
        float(stats.mannwhitneyu(after, stretched, alternative=side).pvalue) for side in ("greater", "less")
    )
    outcome = Outcome.INCONCLUSIVE
    if p_slower < ALPHA:
        outcome = Outcome.FAIL
    elif p_no_slower < ALPHA:
        outcome = Outcome.PASS
    return CellVerdict(
        cell=cell,
        outcome=outcome,
        ratio=float(np.median(after) / np.median(before)),
        p_slower=p_slower,
        p_no_slower=p_no_slower,
    )


def _parse(value: Any, where: str) -> SpeedRecord:
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UsageError(f"{where} is not a speed record", hint=f'write {{"schema": "{SCHEMA}", "platform", "cells"}}')
    platform, cells = value.get("platform"), value.get("cells")
    if not isinstance(platform, dict) or not platform or not isinstance(cells, dict) or not cells:
        raise UsageError(f"{where} names no platform or no cell", hint="name the GPU, driver and CUDA, and time a cell")
    for cell, times in cells.items():
        numbers = isinstance(times, list) and all(type(t) in (int, float) and math.isfinite(t) and t > 0 for t in times)
        if not numbers or len(times) < MIN_TIMES:
            raise UsageError(
                f"{where}: cell {cell!r} is not a list of {MIN_TIMES} or more positive seconds",
                hint="repeat the measurement; a single time has no spread",
            )
    return SpeedRecord(platform=platform, cells={cell: tuple(map(float, times)) for cell, times in cells.items()})

"""The most likely tokens of each side in the worst contexts, where a run stored them.

`candidates.parquet` lies beside the positions and its digest in the receipt (`candidates_sha256`). Runs without it are
reported without the lists. What is believed is checked: each list starts with the most likely id of the positions file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from exl3eval.errors import InvalidRunError
from exl3eval.records import digest_file

CANDIDATES_FILE = "candidates.parquet"
SCHEMA = "exl3eval/candidates/1"
COLUMNS = ("arm", "context", "position", "ids", "log_probs")
_HINT = "run `exl3eval kld --out` again; a stored run is never edited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The most likely ids of one side at one position, most likely first, with natural log-probabilities."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


CandidateLists = Mapping[tuple[str, str, int], Candidates]


def read_candidates(folder: Path, receipt: Mapping[str, Any], arms: Mapping[str, pa.Table]) -> CandidateLists:
    """Read the lists by (arm, context, position); empty where the run stored none.

    Raises
    ------
    InvalidRunError
        If the file is missing, altered, of another schema, or contradicts the positions.
    """
    stored = receipt.get("candidates_sha256")
    path = folder / CANDIDATES_FILE
    if stored is None:
        return {}
    if not path.is_file() or digest_file(path) != stored:
        raise InvalidRunError(f"{CANDIDATES_FILE} is missing or was altered", hint=_HINT)
    table = pq.read_table(path)
    if (table.schema.metadata or {}).get(b"schema") != SCHEMA.encode() or set(table.column_names) != set(COLUMNS):
        raise InvalidRunError(f"{CANDIDATES_FILE} is not of schema {SCHEMA}", hint=_HINT)
    found = {
        (row["arm"], row["context"], row["position"]): Candidates(
            ids=tuple(row["ids"]), log_probs=tuple(row["log_probs"])
        )
        for row in table.to_pylist()
    }
    _check_first(found, receipt["reference"], arms)
    return found


def _check_first(found: CandidateLists, reference: str, arms: Mapping[str, pa.Table]) -> None:
    """Compare the first id of every list with the positions; equal log-probabilities may come in either order."""
    contexts = pa.array(sorted({context for _, context, _ in found}))
    for arm, rows in arms.items():
        part = rows.filter(pc.is_in(rows["context"].cast(pa.string()), value_set=contexts))
        names = ("context", "position", "top1_ref", "top1_arm")
        for context, position, first_ref, first_arm in zip(*(part[name].to_pylist() for name in names), strict=True):
            for side, first in ((reference, first_ref), (arm, first_arm)):
                listed = found.get((side, context, position))
                if listed is None or listed.ids[0] == first:
                    continue
                tied = [
                    token
                    for token, log_prob in zip(listed.ids, listed.log_probs, strict=True)
                    if log_prob == listed.log_probs[0]
                ]
                if first not in tied:
                    raise InvalidRunError(
                        f"{CANDIDATES_FILE}: `{side}` starts with id {listed.ids[0]} at position {position} of "
                        f"{context}, the positions say {first}",
                        hint=_HINT,
                    )

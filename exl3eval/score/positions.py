"""Positions: one row per scored prediction and arm, and the Parquet file that holds them.

Every figure of a report can be computed again from this file alone, on a CPU, without a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.records import write_atomic
from exl3eval.score.divergence import Divergences

SCHEMA = "exl3eval/positions/1"
LABELS = ("arm", "context", "cluster", "stratum")
_NARROW = {"top1": pa.int8(), "top1_ref": pa.int32(), "top1_arm": pa.int32()}
MEASURES = tuple(field.name for field in fields(Divergences))
ARROW_SCHEMA = pa.schema(
    [(name, pa.dictionary(pa.int32(), pa.string())) for name in LABELS]
    + [("position", pa.int32()), ("target", pa.int32())]
    + [(name, _NARROW.get(name, pa.float64())) for name in MEASURES],
    metadata={"schema": SCHEMA},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Divergences of one arm over one context, with where they come from."""

    arm: str
    context: str
    cluster: str
    stratum: str
    first: int
    targets: np.ndarray
    divergences: Divergences


def build_table(placed: list[Placed]) -> pa.Table:
    """Lay positions out as one table, in the order given."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("position", "target", *MEASURES)}
    labels: dict[str, list[np.ndarray]] = {name: [] for name in LABELS}
    for block in placed:
        count = len(block.targets)
        for name in LABELS:
            labels[name].append(np.repeat(getattr(block, name), count))
        columns["position"].append(np.arange(block.first, block.first + count))
        columns["target"].append(block.targets)
        for name in MEASURES:
            columns[name].append(getattr(block.divergences, name).numpy())
    arrays = [pa.array(np.concatenate(labels[name])).dictionary_encode() for name in LABELS]
    arrays += [
        pa.array(np.concatenate(columns[field.name])).cast(field.type) for field in list(ARROW_SCHEMA)[len(LABELS) :]
    ]
    return pa.Table.from_arrays(arrays, schema=ARROW_SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, atomically; the bytes depend on the rows alone.

    Raises
    ------
    UsageError
        If the file exists or the disk refuses the write.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=False)
    write_atomic(path, sink.getvalue().to_pybytes(), exclusive=True)


def read_positions(path: Path) -> pa.Table:
    """Read a positions file.

    Raises
    ------
    UsageError
        If the file is missing or is not a positions file of this schema.
    InvalidRunError
        If a measure is not finite.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path.name} cannot be read as Parquet", hint="restore the file") from error
    metadata = table.schema.metadata or {}
    if metadata.get(b"schema") != SCHEMA.encode() or set(table.column_names) != set(ARROW_SCHEMA.names):
        raise UsageError(f"{path.name} is not a positions file of {SCHEMA}", hint="score the run again")
    for name in MEASURES:
        # A sum is finite only if every term is: figures are far below the largest double.
        if not math.isfinite(pc.sum(table[name]).as_py() or 0.0):
            raise InvalidRunError(f"{path.name}: column {name} holds non-finite values", hint="the file was altered")
    return table


def split_arms(table: pa.Table) -> Mapping[str, pa.Table]:
    """Return each arm's rows, in the file's order of arms."""
    arms = table["arm"].combine_chunks()
    encoded = arms if pa.types.is_dictionary(arms.type) else arms.dictionary_encode()
    codes, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    order = codes[np.sort(np.unique(codes, return_index=True)[1])]
    return {names[code]: table.filter(pa.array(codes == code)) for code in order}

"""Foreign evidence: numbers of other tools, imported with their protocol's limits written beside them.

A gate refuses a folder that holds `foreign.json`: other tools use other tokens, positions and precisions, and cross-
protocol ratios have misled before (the same checkpoints read 2.2-3.1x apart between suites, lessons M38).

`rows` are per-context figures of any harness. `llama-kld` is llama.cpp's base-logits file, see
`exl3eval.gate.llama_kld`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.gate.evidence import FOREIGN_FILE
from exl3eval.gate.llama_kld import read_llama_kld, summarise_base, summarise_pair
from exl3eval.records import digest_file, parse_json, write_json
from exl3eval.stats.clusters import ContextSample
from exl3eval.stats.intervals import estimate_mean

SCHEMA = "exl3eval/foreign/1"
LABEL = "foreign evidence: measured by another tool under its own protocol; never gated, never mixed with ours"
FORMATS = ("llama-kld", "rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKeys:
    """What the fields of a per-context row are called. An empty `cluster` means that documents are unknown."""

    value: str = "kl"
    context: str = "context"
    cluster: str = ""


def import_llama(base: Path, candidate: Path | None, *, now: datetime, seed: int = 1) -> dict[str, Any]:
    """Import one base-logits file, or a pair over the same tokens.

    Raises
    ------
    UsageError
        If a file is not of the format or is cut short, or the pair differs in tokens or vocabulary.
    """
    first = read_llama_kld(base)
    files = [{"name": base.name, "sha256": digest_file(base)}]
    if candidate is None:
        measure, rows = "entropy", summarise_base(first)
        limits = ["one file holds one model's distribution: there is no divergence in it"]
    else:
        files.append({"name": candidate.name, "sha256": digest_file(candidate)})
        measure, rows = "kl_lower_bound", summarise_pair(first, read_llama_kld(candidate))
        limits = ["a lower bound of KL(base || candidate): what lies below the stored floor counts as little as it can"]
    limits += [
        "log-probabilities are steps of (max - floor) / 65535 nats, and code 0 means below the floor; nothing was "
        "renormalised",
        "only the second half of each chunk is scored",
        "chunks of one text are not independent: intervals that take each chunk as a document are too narrow",
    ]
    header = {"n_ctx": first.n_ctx, "n_vocab": first.n_vocab, "n_chunk": first.n_chunk, "tokens": first.tokens_digest}
    return _record("llama-kld", files, header, measure, rows, limits, clusters=None, now=now, seed=seed)


def import_rows(path: Path, keys: RowKeys, *, now: datetime, seed: int = 1) -> dict[str, Any]:
    """Import per-context rows: a JSON list of objects, or one object per line.

    Raises
    ------
    UsageError
        If a row is not an object, lacks a field, repeats a context or holds no finite number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path.name} as UTF-8 text", hint="check the file") from error
    if text.lstrip().startswith("["):
        found = parse_json(text, where=path.name)
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        found = [parse_json(line, where=f"{path.name}:{at}") for at, line in enumerate(lines, start=1)]
    rows = [_read_row(row, keys, f"{path.name}, row {at}") for at, row in enumerate(found, start=1)]
    if not rows:
        raise UsageError(f"{path.name} holds no row", hint="give one object per context")
    names = [row["context"] for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{path.name}: context {twice!r} appears twice", hint="give one row per context")
    clusters = [row["cluster"] for row in rows] if keys.cluster else None
    limits = [f"`{keys.value}` means what its tool says; direction, precision and token ids were not checked"]
    if clusters is None:
        limits.append("documents are unknown: the interval takes each context as one, which may be too narrow")
    files = [{"name": path.name, "sha256": digest_file(path)}]
    return _record("rows", files, asdict(keys), keys.value, rows, limits, clusters=clusters, now=now, seed=seed)


def write_foreign(folder: Path, record: Mapping[str, Any]) -> None:
    """Write foreign evidence into a folder of its own.

    Raises
    ------
    UsageError
        If the folder holds a run or foreign evidence already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder.name} is not empty", hint="foreign evidence gets a folder of its own")
    write_json(folder / FOREIGN_FILE, record, exclusive=True)


def _read_row(row: Any, keys: RowKeys, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not an object", hint="give one object per context")
    read = {"context": keys.context, "value": keys.value} | ({"cluster": keys.cluster} if keys.cluster else {})
    for field, key in read.items():
        if key not in row:
            raise UsageError(f"{where} has no {key!r}", hint=f"name the field with --{field}-key; it has {sorted(row)}")
    value = row[keys.value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{where}: {keys.value!r} is {value!r}, not a finite number", hint="correct the row")
    return {field: float(value) if field == "value" else str(row[key]) for field, key in read.items()}


def _record(
    form: str,
    files: Sequence[Mapping[str, str]],
    header: Mapping[str, Any],
    measure: str,
    rows: Sequence[Mapping[str, Any]],
    limits: Sequence[str],
    *,
    clusters: Sequence[str] | None,
    now: datetime,
    seed: int,
) -> dict[str, Any]:
    values = [row["value"] for row in rows]
    sample = ContextSample(values=values, clusters=clusters or [row["context"] for row in rows])  # type: ignore[arg-type]
    return {
        "schema": SCHEMA,
        "label": LABEL,
        "format": form,
        "imported": now.isoformat(timespec="seconds"),
        "files": list(files),
        "header": dict(header),
        "measure": measure,
        "limits": list(limits),
        "mean": asdict(estimate_mean(sample, seed=seed)),
        "contexts": list(rows),
    }

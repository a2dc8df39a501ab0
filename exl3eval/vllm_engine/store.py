"""Finished rows on disk: one file per context, with the digest of its bytes and the evidence of how it was made.

Shapes: S scored positions, C candidates kept per position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from exl3_kernels.routes import Launch
from exl3eval.records import digest_value, write_atomic
from exl3eval.score.divergence import Divergences

IDS, LOG_PROBS = "candidate_ids", "candidate_log_probs"
MEASURES = tuple(each.name for each in fields(Divergences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidenced:
    """How the rows of one batch came about; the batch's first context carries the counts of all of it.

    Parameters
    ----------
    launches : mapping of Launch to int
        Of this project's routes.
    head_rows : mapping of int to int
        Rows that the engine's head saw at a time -> calls, over scored steps.
    graph_replays : int
        CUDA graphs replayed in scored steps.
    grid : str or None
        16-bit grid on which all logits of the context sit.
    cut_mass : float
        Largest probability of columns beyond the vocabulary.
    """

    launches: Mapping[Launch, int] = field(default_factory=dict)
    head_rows: Mapping[int, int] = field(default_factory=dict)
    graph_replays: int = 0
    grid: str | None = None
    cut_mass: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRows:
    """One context of one arm and lane: divergences [S], its most likely ids [S, C], and evidence."""

    divergences: Divergences
    candidate_ids: torch.Tensor
    candidate_log_probs: torch.Tensor
    evidence: Evidenced


def context_path(folder: Path, ids_digest: str) -> Path:
    """Name the file of a context."""
    return folder / f"{ids_digest[:32]}.safetensors"


def write_rows(path: Path, rows: ContextRows) -> None:
    """Write one context, atomically."""
    tensors = {name: getattr(rows.divergences, name).contiguous() for name in MEASURES}
    tensors |= {IDS: rows.candidate_ids.int().contiguous(), LOG_PROBS: rows.candidate_log_probs.contiguous()}
    evidence = asdict(rows.evidence) | {
        "launches": [[*launch, count] for launch, count in sorted(rows.evidence.launches.items())],
        "head_rows": sorted(rows.evidence.head_rows.items()),
    }
    record = json.dumps(evidence, sort_keys=True, allow_nan=False)
    write_atomic(path, save(tensors, metadata={"evidence": record, "sha256": _digest(tensors, record)}))


def read_rows(path: Path) -> ContextRows | None:
    """Read a finished context, or None if the file is absent, damaged or not what it says."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError):
        return None
    record = metadata.get("evidence", "")
    if metadata.get("sha256") != _digest(tensors, record):
        return None
    found = json.loads(record)
    found["launches"] = {Launch(*key): count for *key, count in found["launches"]}
    found["head_rows"] = {int(rows): calls for rows, calls in found["head_rows"]}
    return ContextRows(
        divergences=Divergences(**{name: tensors[name] for name in MEASURES}),
        candidate_ids=tensors[IDS],
        candidate_log_probs=tensors[LOG_PROBS],
        evidence=Evidenced(**found),
    )


def _digest(tensors: Mapping[str, torch.Tensor], record: str) -> str:
    parts = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    return digest_value([parts, record])

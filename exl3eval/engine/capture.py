"""Capturing an arm: post-final-norm hidden states, one file per context, resumable.

A capture folder is named by the digest of everything that may change a bit of it (its *contract*). Each
context is written atomically with the digest of its bytes and the launches that made it, so a killed run
loses at most the context in flight, and a later run continues exactly where it stopped. A file whose
digest does not match is made again, never trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3eval.engine.model import ArmModel
from exl3eval.engine.parallel import map_contexts
from exl3eval.errors import UsageError
from exl3eval.records import digest_value, write_atomic, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The hidden states of one arm over all contexts.

    Parameters
    ----------
    directory : Path
        One `.safetensors` per context, named by the context's id digest.
    launches : mapping
        Launch -> count, over all contexts.
    resumed : int
        Contexts found finished.
    repeat_difference : float
        Largest absolute difference when the first context was run again: 0.0 means the same bits.
    """

    directory: Path
    launches: dict[Launch, int]
    resumed: int
    repeat_difference: float

    def hidden_states(self, ids_digest: str) -> torch.Tensor:
        """Read one context: [T, H]."""
        hidden_TH, _ = _read_context(_path(self.directory, ids_digest))  # type: ignore[misc]
        return hidden_TH


def _path(directory: Path, ids_digest: str) -> Path:
    return directory / f"{ids_digest[:32]}.safetensors"


def _digest_tensor(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _read_context(path: Path) -> tuple[torch.Tensor, dict[Launch, int]] | None:
    """Read a finished context, or None if the file is absent, damaged or not what it says."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            hidden_TH = file.get_tensor("hidden")
    except (SafetensorError, OSError):
        return None
    if metadata.get("sha256") != _digest_tensor(hidden_TH):
        return None
    return hidden_TH, {Launch(*key): count for key, count in json.loads(metadata["launches"])}


def capture_arm(
    model: ArmModel,
    contexts: list[tuple[str, torch.Tensor]],
    *,
    contract: dict[str, Any],
    cache_dir: Path,
    fresh: bool,
    num_threads: int,
    on_context: Callable[[int], None],
) -> Capture:
    """Run every context that is not captured yet.

    Parameters
    ----------
    model : ArmModel
        The loaded arm.
    contexts : list of (str, Tensor)
        Digest of the ids, and int ids [T] that go in (the last target is not among them).
    contract : dict
        Everything that may change a bit; its digest names the folder.
    cache_dir : Path
        Where capture folders live.
    fresh : bool
        Make every context again.
    num_threads : int
        Contexts run at a time; more than one only pays on a CPU.
    on_context : callable
        Receives the positions finished, after each context.

    Raises
    ------
    InvalidRunError
        If a hidden state is not finite.
    UsageError
        If the disk refuses a write; finished contexts stay.
    """
    directory = cache_dir / "captures" / digest_value(contract)[:32]
    launches: Counter[Launch] = Counter()
    resumed = 0
    if not (directory / "contract.json").exists():
        write_json(directory / "contract.json", contract)

    def run_context(context: tuple[str, torch.Tensor]) -> tuple[dict[Launch, int], bool]:
        ids_digest, ids_T = context
        path = _path(directory, ids_digest)
        found = None if fresh else _read_context(path)
        if found is not None:
            return found[1], True
        reset_launches()
        hidden_TH = model.hidden_states(ids_T).cpu().contiguous()
        counted = read_launches()
        metadata = {
            "sha256": _digest_tensor(hidden_TH),
            "launches": json.dumps([[list(key), count] for key, count in sorted(counted.items())]),
        }
        write_atomic(path, save({"hidden": hidden_TH}, metadata=metadata))
        return counted, False

    outcomes = map_contexts(run_context, contexts, num_threads=num_threads)
    for (_, ids_T), (counted, was_found) in zip(contexts, outcomes, strict=True):
        launches.update(counted)
        resumed += was_found
        on_context(len(ids_T))
    again_TH = model.hidden_states(contexts[0][1]).cpu()
    first = _read_context(_path(directory, contexts[0][0]))
    if first is None:
        raise UsageError(
            "a capture vanished while the run went on", hint="keep other processes out of the cache folder"
        )
    return Capture(
        directory=directory,
        launches=dict(launches),
        resumed=resumed,
        repeat_difference=float((again_TH.float() - first[0].float()).abs().max()),
    )

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
from exl3eval.engine.lanes import Lane
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
        hidden_TH, _ = read_hidden(_path(self.directory, ids_digest))  # type: ignore[misc]
        return hidden_TH


def _path(directory: Path, ids_digest: str) -> Path:
    return directory / f"{ids_digest[:32]}.safetensors"


def _digest_tensor(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_hidden(path: Path) -> tuple[torch.Tensor, dict[Launch, int]] | None:
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


def write_hidden(path: Path, hidden_SH: torch.Tensor, launches: dict[Launch, int]) -> None:
    """Write one context [S, H] atomically, with the digest of its bytes and the launches that made it."""
    hidden_SH = hidden_SH.contiguous()
    metadata = {
        "sha256": _digest_tensor(hidden_SH),
        "launches": json.dumps([[list(key), count] for key, count in sorted(launches.items())]),
    }
    write_atomic(path, save({"hidden": hidden_SH}, metadata=metadata))


def capture_arm(
    model: ArmModel,
    contexts: list[tuple[str, torch.Tensor]],
    *,
    lane: Lane,
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
    lane : Lane
        How they are fed. A decode lane whose last batch is short fills it with the first contexts again.
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

    def run_one_batch(batch: list[tuple[str, torch.Tensor]]) -> tuple[dict[Launch, int], bool]:
        paths = [_path(directory, ids_digest) for ids_digest, _ in batch]
        found = [None if fresh else read_hidden(path) for path in paths]
        if all(found):
            return dict(sum((Counter(each[1]) for each in found if each), Counter())), True
        reset_launches()
        filler = contexts * (lane.batch // len(contexts) + 1)
        whole = (batch + filler)[: lane.batch]
        hidden_BSH = model.run_lane(torch.stack([ids_T for _, ids_T in whole]), lane).cpu()
        counted = read_launches()
        for index, path in enumerate(paths):
            write_hidden(path, hidden_BSH[index], counted if index == 0 else {})
        return counted, False

    batches = [contexts[start : start + lane.batch] for start in range(0, len(contexts), lane.batch)]
    outcomes = map_contexts(run_one_batch, batches, num_threads=num_threads)
    for batch, (counted, was_found) in zip(batches, outcomes, strict=True):
        launches.update(counted)
        resumed += len(batch) * was_found
        on_context(sum(len(ids_T) for _, ids_T in batch))
    filled = (contexts * lane.batch)[: lane.batch]
    ids_BT = torch.stack([ids_T for _, ids_T in filled])
    (again_TH,) = map_contexts(lambda ids: model.run_lane(ids, lane)[0].cpu(), [ids_BT], num_threads=1)
    first = read_hidden(_path(directory, contexts[0][0]))
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

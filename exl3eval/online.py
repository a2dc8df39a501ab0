"""Quantizing at load: the 16-bit source of a run as an EXL3 checkpoint, made once per content and recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.identity import source_digest
from exl3eval.isolation import run_isolated
from exl3eval.progress import Reporter
from exl3eval.quantizer.quantize import QuantizeRequest, quantize_model
from exl3eval.records import digest_value

COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    request: QuantizeRequest
    device: str
    num_threads: int


def quantize_at_load(
    source: Checkpoint,
    source_sha256: str,
    recipe: str,
    *,
    seed: int,
    device: torch.device,
    cache_dir: Path,
    num_threads: int,
    reporter: Reporter,
) -> Checkpoint:
    """Return the source under a recipe, from the cache if the same content was quantized before.

    Parameters
    ----------
    source, source_sha256 : Checkpoint, str
        The 16-bit model and the digest of its tensors.
    recipe : str
        `<bits>-<codebook>`: every linear and the head at that width, encoded without calibration.
    seed : int
        Of the sign vectors.
    device : device
        Where to encode; a GPU's states equal a CPU's, their scales may differ in the last bit.
    cache_dir : Path
        Where the checkpoint is kept, in a folder named by what it was made from.
    num_threads : int
        CPU threads.
    reporter : Reporter
        Told about progress.

    Raises
    ------
    UsageError, CheckpointError, InvalidRunError
        As quantizing raises them.
    """
    bits, _, codebook = recipe.partition("-")
    made_from = {
        "source": source_sha256,
        "recipe": recipe,
        "seed": seed,
        "device": device.type,
        "quantizer": source_digest("exl3eval.quantizer"),
        "kernels": source_digest("exl3_kernels"),
    }
    out = cache_dir / "quantized" / digest_value(made_from)[:32]
    if not (out / "config.json").is_file():
        request = QuantizeRequest(
            model=source.directory,
            out=out,
            bits=float(bits),
            head_bits=int(bits),
            codebook=codebook,
            calibration=None,
            rows=0,
            columns=COLUMNS,
            seed=seed,
        )
        task = _Task(request=request, device=str(device), num_threads=num_threads)
        run_isolated(_quantize, task, reporter, label=f"quantizing {source.directory.name}")
    return open_checkpoint(out)


def _quantize(task: _Task, reporter: Reporter) -> None:
    quantize_model(task.request, device=torch.device(task.device), num_threads=task.num_threads, reporter=reporter)

"""What a model is calibrated on: token rows from text, or sampled from the model itself."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exl3eval.errors import UsageError

RANDOM_FRACTION = 0.1
SAMPLED_AT_ONCE = 64


def text_rows(source: Path, tokenizer: Any, *, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Cut calibration rows from text files.

    Parameters
    ----------
    source : Path
        A `.txt`, `.utf8` or `.xz` file, or a folder of them.
    tokenizer : object
        A transformers tokenizer.
    rows, columns : int
        Shape of the result.
    seed : int
        Draws the rows.

    Returns
    -------
    Tensor
        int64 [rows, columns].

    Raises
    ------
    UsageError
        If there is no text, or not enough of it.
    """
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    texts = [_read_text(file) for file in files if file.suffix in (".txt", ".utf8", ".xz", ".md")]
    if not texts:
        raise UsageError(f"{source.name}: no .txt, .utf8, .md or .xz file to calibrate on", hint="give a text file")
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64) for text in texts]
    pieces = torch.cat([each[: len(each) // columns * columns].view(-1, columns) for each in ids])
    if len(pieces) < rows:
        raise UsageError(
            f"{source.name}: {len(pieces)} rows of {columns} tokens, {rows} wanted",
            hint="give more text, or fewer or shorter rows",
        )
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    return pieces[order[:rows]]


def _read_text(file: Path) -> str:
    try:
        raw = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        return raw.decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"{file.name} cannot be read as UTF-8 text", hint="restore the file") from error


def sampled_rows(
    model: nn.Module, vocab_size: int, *, rows: int, columns: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Sample calibration rows from the model at temperature 1, a tenth of them uniformly random ids.

    Needs no text, and cannot overlap with any held-out one.

    Returns
    -------
    Tensor
        int64 [rows, columns].
    """
    from transformers import GenerationConfig

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (rows, columns), generator=generator)
    first = int(rows * RANDOM_FRACTION)
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=columns - 1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(first, rows, SAMPLED_AT_ONCE):
            prompt = ids[start : start + SAMPLED_AT_ONCE, :1].to(device)
            sampled = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=sampling)  # type: ignore[operator]
            ids[start : start + SAMPLED_AT_ONCE] = sampled.cpu().clamp_max(vocab_size - 1)
    return ids

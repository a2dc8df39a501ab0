"""Loading tensors of an opened checkpoint, one at a time, and the digest of all of them.

Bytes are read at the offsets that the headers gave when the directory was opened, so that a shard
with tens of thousands of tensors is not parsed again for each of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
import torch

from exl3_kernels.trellis import expand_signs
from exl3_kernels.weight import Exl3Weight
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.headers import TensorEntry
from exl3eval.errors import CheckpointError
from exl3eval.records import digest_parts, digest_value

_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_BLOCK_BYTES = 1 << 22


def load_weight(checkpoint: Checkpoint, key: str, device: torch.device | str = "cpu") -> Exl3Weight:
    """Load one EXL3 linear; legacy packed signs are expanded to float16.

    Raises
    ------
    CheckpointError
        If `key` is no EXL3 linear of the checkpoint, or if a file changed since it was opened.
    """
    module = checkpoint.modules.get(key)
    if module is None:
        raise CheckpointError(
            f"{checkpoint.directory.name}: {key} is no EXL3 linear", hint="`exl3eval inspect` lists the modules"
        )
    return Exl3Weight(
        trellis=_read_tensor(checkpoint, module.trellis).to(device),
        suh=_read_signs(checkpoint, module.input_signs).to(device),
        svh=_read_signs(checkpoint, module.output_signs).to(device),
        codebook=module.codebook,
        multiplier=module.multiplier,
        bias=None if module.bias is None else _read_tensor(checkpoint, module.bias).to(device),
    )


def load_plain(checkpoint: Checkpoint, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Load one tensor that belongs to no EXL3 linear, in its stored dtype and shape.

    Raises
    ------
    CheckpointError
        If there is no such tensor, torch has no such dtype, or a file changed since it was opened.
    """
    entry = checkpoint.plain.get(name)
    if entry is None:
        raise CheckpointError(
            f"{checkpoint.directory.name}: no plain tensor {name}", hint="`exl3eval inspect` lists the modules"
        )
    return _read_tensor(checkpoint, entry).to(device)


def _read_signs(checkpoint: Checkpoint, entry: TensorEntry) -> torch.Tensor:
    signs = _read_tensor(checkpoint, entry)
    return expand_signs(signs) if entry.dtype == "I16" else signs


def _read_tensor(checkpoint: Checkpoint, entry: TensorEntry) -> torch.Tensor:
    dtype = _TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise entry.refusal(f"dtype {entry.dtype} has no torch equivalent", hint="use a 16-bit copy of the model")
    try:
        raw = np.fromfile(checkpoint.directory / entry.file, np.uint8, count=entry.nbytes, offset=entry.start)
    except OSError as error:
        raise _changed(entry) from error
    if raw.size != entry.nbytes:
        raise _changed(entry)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(entry.shape)


def _changed(entry: TensorEntry) -> CheckpointError:
    return entry.refusal("can no longer be read: the file changed since it was opened", hint="run again")


def checkpoint_digest(checkpoint: Checkpoint, *, progress: Callable[[int], None] | None = None) -> str:
    """Digest what the model is, not how its files are laid out.

    The sha256 covers name, dtype, shape and bytes of every tensor and the content of `config.json`;
    sharding, file names, order, the index and side files do not enter.

    Parameters
    ----------
    checkpoint : Checkpoint
        An opened directory, plain or EXL3.
    progress : callable or None
        Receives the number of bytes read since its last call; the sum is the size of all tensors.

    Returns
    -------
    str
        64 hex digits.

    Raises
    ------
    CheckpointError
        If a file changed since it was opened.
    """
    parts = [("config", digest_value(checkpoint.config))]
    by_place = sorted(checkpoint.tensors, key=lambda entry: (entry.file, entry.start))
    for file_name in sorted({entry.file for entry in by_place}):
        entries = [entry for entry in by_place if entry.file == file_name]
        try:
            with (checkpoint.directory / file_name).open("rb") as file:
                for entry in entries:
                    content = _digest_bytes(file, entry, progress)
                    parts.append((f"tensor {entry.name}", digest_value([entry.dtype, entry.shape, content])))
        except OSError as error:
            raise _changed(entries[0]) from error
    return digest_parts(parts)


def _digest_bytes(file: BinaryIO, entry: TensorEntry, progress: Callable[[int], None] | None) -> str:
    sha = hashlib.sha256()
    file.seek(entry.start)
    left = entry.nbytes
    while left:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            raise _changed(entry)
        sha.update(block)
        left -= len(block)
        if progress is not None:
            progress(len(block))
    return sha.hexdigest()

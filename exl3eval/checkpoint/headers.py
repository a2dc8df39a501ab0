"""Safetensors headers: which tensors a directory holds and where their bytes lie.

Only headers are read here; no tensor is loaded or allocated. The index file is not consulted: a
stale index hides tensors, a header cannot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3eval.errors import CheckpointError, UsageError
from exl3eval.records import parse_json

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf"}
_REDOWNLOAD = "download or copy the file again"
_REWRITE = "write the file again with a safetensors library"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as its file's header declares it.

    Parameters
    ----------
    name : str
        Full tensor name.
    file : str
        Name of the safetensors file within the directory.
    dtype : str
        Safetensors dtype name, for instance `BF16`.
    shape : tuple of int
        Shape as stored.
    start : int
        Offset of the first data byte from the beginning of the file.
    nbytes : int
        Stored size in bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def refusal(self, reason: str, *, hint: str) -> CheckpointError:
        """Return the error that refuses this tensor, naming its file."""
        return CheckpointError(f"{self.file}: tensor {self.name}: {reason}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """Every header of a directory.

    Parameters
    ----------
    tensors : mapping of str to TensorEntry
        By tensor name, in the order of files and of names within a file.
    file_bytes : mapping of str to int
        Size of each weight file, header included.
    side_files : tuple of str
        Safetensors files that hold no module's tensor (no name has a dot), hence no part of the model.
    """

    tensors: Mapping[str, TensorEntry]
    file_bytes: Mapping[str, int]
    side_files: tuple[str, ...]


def read_headers(directory: Path) -> Headers:
    """Read the header of every `*.safetensors` file in `directory`.

    Raises
    ------
    CheckpointError
        If the directory holds no safetensors, a header is damaged or contradicts its file, or two
        files hold a tensor of the same name.
    """
    paths = _find_weight_files(directory)
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    side_files = []
    for path in paths:
        entries = read_header(path)
        if entries and not any("." in entry.name for entry in entries):
            side_files.append(path.name)
            continue
        file_bytes[path.name] = path.stat().st_size
        for entry in entries:
            if other := tensors.get(entry.name):
                raise entry.refusal(
                    f"is also in {other.file}", hint="delete the leftover file so that each tensor exists once"
                )
            tensors[entry.name] = entry
    if not tensors:
        raise CheckpointError(
            f"{', '.join(path.name for path in paths)}: no model tensor", hint="give the folder that holds the weights"
        )
    return Headers(tensors=tensors, file_bytes=file_bytes, side_files=tuple(side_files))


def _find_weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory.name} is not a folder", hint="give a model directory")
    paths = sorted(directory.glob("*.safetensors"))
    if paths:
        return paths
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_WEIGHTS)
    found = f"; found {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}" if others else ""
    raise CheckpointError(
        f"{directory.name} holds no *.safetensors file{found}",
        hint="only safetensors are read: convert the weights" if others else "give the folder that holds the weights",
    )


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Parse one safetensors header: an 8-byte little-endian length, then a JSON object.

    The data section must be covered exactly: no gap, no overlap, no byte left over.

    Returns
    -------
    tuple of TensorEntry
        In name order.

    Raises
    ------
    CheckpointError
        Naming the file, and the tensor where one is at fault.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            fits = len(prefix) == _LENGTH_BYTES and length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)
            raw = file.read(length if fits else len(_LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}", hint=_REDOWNLOAD) from error
    if (prefix + raw).startswith(_LFS_POINTER):
        raise CheckpointError(f"{path.name}: is a Git LFS pointer, not weights", hint="run `git lfs pull`")
    if not fits:
        raise CheckpointError(
            f"{path.name}: declares a header of {length} bytes, the file has {size}", hint=_REDOWNLOAD
        )
    header = _parse_object(path.name, raw)
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    entries = [_parse_entry(path.name, name, field, data_start) for name, field in header.items()]
    _check_coverage(path.name, entries, data_start, size)
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _parse_object(file: str, raw: bytes) -> dict[str, Any]:
    try:
        header = parse_json(raw.decode("utf-8"), where=f"{file}: header")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: header is not UTF-8", hint=_REDOWNLOAD) from error
    except RecursionError as error:
        raise CheckpointError(f"{file}: header is nested too deep", hint=_REWRITE) from error
    except UsageError as error:
        raise CheckpointError(error.message, hint=_REDOWNLOAD) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is a JSON {type(header).__name__}, not an object", hint=_REWRITE)
    return header


def _parse_entry(file: str, name: str, field: Any, data_start: int) -> TensorEntry:
    where = f"{file}: tensor {name}"
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: entry is not {{dtype, shape, data_offsets}}", hint=_REWRITE)
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: dtype {dtype!r} is unknown", hint="store it in a standard safetensors dtype")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes", hint=_REWRITE)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not [begin, end]", hint=_REWRITE)
    begin, end = offsets
    if math.prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise CheckpointError(
            f"{where}: {dtype} {shape} does not fit its {end - begin} bytes of data", hint=_REDOWNLOAD
        )
    return TensorEntry(
        name=name, file=file, dtype=dtype, shape=tuple(shape), start=data_start + begin, nbytes=end - begin
    )


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(file: str, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        end = entry.start + entry.nbytes
        if end > file_bytes:
            raise entry.refusal(f"ends at byte {end}, the file has {file_bytes} (truncated)", hint=_REDOWNLOAD)
        if entry.start < position:
            raise entry.refusal(f"overlaps the tensor before it by {position - entry.start} bytes", hint=_REWRITE)
        if entry.start > position:
            raise entry.refusal(f"leaves a gap of {entry.start - position} bytes before it", hint=_REWRITE)
        position = end
    if position != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - position} bytes belong to no tensor", hint=_REWRITE)


_SERIES = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


def missing_from_series(files: Mapping[str, int]) -> tuple[str, ...]:
    """Return the shards that names such as `model-00001-of-00003.safetensors` promise and `files` lacks."""
    missing = []
    for stem, total in sorted({(m["stem"], m["total"]) for m in map(_SERIES.fullmatch, files) if m}):
        shards = (f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        missing += [shard for shard in shards if shard not in files]
    return tuple(missing)

"""What the index, the storage list and the configuration claim, against the headers.

The headers always win. A difference is a note for the reader; only an index that proves a shard
was not fetched stops the opening.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exl3eval.checkpoint.headers import Headers, TensorEntry, missing_from_series
from exl3eval.checkpoint.modules import Exl3Module, slice_groups
from exl3eval.errors import CheckpointError, UsageError
from exl3eval.records import read_json

INDEX_FILE = "model.safetensors.index.json"
STORAGE_FILE = "quantization_config.json"
_FETCH = "fetch the missing file; if the weights are complete without it, delete the index"
_BITS_TOLERANCE = 0.05
_TORCH_NAMES = {"I16": "int16", "I32": "int32", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def read_object(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a model directory.

    Raises
    ------
    CheckpointError
        If the file is missing, is not strict JSON or is not an object.
    """
    try:
        value = read_json(directory / name)
    except UsageError as error:
        raise CheckpointError(error.message, hint=error.hint) from error
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deep", hint="restore the file") from error
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}", hint="restore the file") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} is a JSON {type(value).__name__}, not an object", hint="restore the file")
    return value


def check_index(directory: Path, headers: Headers) -> tuple[str, ...]:
    """Compare the shard index with the headers.

    Returns
    -------
    tuple of str
        One note per kind of difference.

    Raises
    ------
    CheckpointError
        If the index is malformed; or if a shard is absent whose tensors no other file holds. An
        index of which no shard exists belongs to another copy of the model and proves nothing, nor
        does a missing index: then only the numbering in the file names can show a missing shard.
    """
    placed = _read_index(directory)
    on_disk = {*headers.file_bytes, *headers.side_files}
    stale = placed is not None and on_disk.isdisjoint(placed.values())
    notes: list[str] = []
    if placed is not None:
        _refuse_absent_shards({} if stale else placed, headers, on_disk)
        notes += _describe_index(placed, headers.tensors)
    elif len(headers.file_bytes) > 1:
        notes.append(f"{INDEX_FILE}: absent; {len(headers.file_bytes)} files are read by their headers")
    if stale:
        notes.append(f"{INDEX_FILE}: none of its files is here; the headers are used instead")
    complete = placed is not None and not stale and placed.keys() <= headers.tensors.keys()
    if not complete and (absent := missing_from_series(headers.file_bytes)):
        raise CheckpointError(
            f"{absent[0]}: is missing, going by the names of the files here",
            hint="fetch the missing file, or rename the files if the weights are complete without it",
        )
    return tuple(notes)


def _read_index(directory: Path) -> dict[str, str] | None:
    if not (directory / INDEX_FILE).exists():
        return None
    placed = read_object(directory, INDEX_FILE).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(
            f"{INDEX_FILE}: weight_map does not map tensor names to file names",
            hint="restore the file or delete it: the headers are enough",
        )
    return placed


def _refuse_absent_shards(placed: Mapping[str, str], headers: Headers, on_disk: set[str]) -> None:
    quantized = {name.rpartition(".")[0] for name in headers.tensors if name.endswith(".trellis")}
    quantized |= {key.rpartition(".slice.")[0] for key in quantized}
    for name, file in placed.items():
        key, _, suffix = name.rpartition(".")
        replaced = suffix == "weight" and key in quantized
        if name not in headers.tensors and file not in on_disk and not replaced:
            raise CheckpointError(f"{file}: is missing; {INDEX_FILE} places tensor {name} in it", hint=_FETCH)


def _describe_index(placed: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    unlisted = [name for name in tensors if name not in placed]
    absent = [name for name in placed if name not in tensors]
    moved = [name for name, entry in tensors.items() if name in placed and placed[name] != entry.file]
    for names, reason in (
        (unlisted, "does not list"),
        (absent, "lists, though no file holds,"),
        (moved, "places in another file"),
    ):
        if names:
            yield f"{INDEX_FILE}: {reason} {_first_of(names)}"


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def storage_notes(storage: Any, modules: Mapping[str, Exl3Module]) -> tuple[str, ...]:
    """Describe where `tensor_storage` contradicts the EXL3 modules; its shape is never relied on."""
    if not isinstance(storage, dict):
        return (f"{STORAGE_FILE}: tensor_storage is not an object; ignored",)
    listed = {key for key, entry in storage.items() if isinstance(entry, dict) and "bits_per_weight" in entry}
    absent = sorted(listed - modules.keys())
    unlisted = sorted(modules.keys() - storage.keys())
    wrong = [(key, list(_contradictions(storage[key], module))) for key, module in modules.items() if key in storage]
    contradicted = [(key, found) for key, found in wrong if found]
    notes = []
    if unlisted:
        notes.append(f"{STORAGE_FILE}: tensor_storage does not list {_first_of(unlisted)}")
    if absent:
        notes.append(f"{STORAGE_FILE}: tensor_storage lists as EXL3, though no file holds, {_first_of(absent)}")
    if contradicted:
        names = _first_of([key for key, _ in contradicted])
        notes.append(f"{STORAGE_FILE}: tensor_storage contradicts {names}: {contradicted[0][1][0]}")
    return tuple(notes)


def _contradictions(entry: Any, module: Exl3Module) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield "its entry is not an object"
        return
    if entry.get("bits_per_weight") != module.bits:
        yield f"bits_per_weight {entry.get('bits_per_weight')}, stored {module.bits}"
    for codebook in ("mcg", "mul1"):
        claimed = entry.get(f"{codebook}_multiplier")
        stored = module.multiplier if module.codebook == codebook else None
        if claimed != stored:
            yield f"{codebook}_multiplier {claimed}, stored {stored}"
    claims = entry.get("stored_tensors")
    claims = claims if isinstance(claims, dict) else {}
    stored_tensors = {part.name: (list(part.shape), f"torch.{_TORCH_NAMES[part.dtype]}") for part in module.tensors}
    for name in sorted(claims.keys() | stored_tensors.keys()):
        claim = claims.get(name)
        claimed_tensor = (claim.get("shape"), claim.get("dtype")) if isinstance(claim, dict) else None
        if claimed_tensor != stored_tensors.get(name):
            yield f"{name} {claimed_tensor}, stored {stored_tensors.get(name)}"


def config_notes(quantization: Mapping[str, Any], modules: Mapping[str, Exl3Module]) -> tuple[str, ...]:
    """Describe where `bits`, `head_bits` or `codebook` disagree with what the modules store."""
    notes = []
    body = [module for module in modules.values() if module.role == "body"]
    bits = quantization.get("bits")
    if body and isinstance(bits, int | float):
        mean = sum(module.bits * module.num_weights for module in body) / sum(module.num_weights for module in body)
        if abs(mean - bits) > _BITS_TOLERANCE:
            notes.append(f"quantization_config: bits {bits}, the stored linears average {mean:.2f}")
    stored_head = next((module.bits for module in modules.values() if module.role == "head"), 16)
    head_bits = quantization.get("head_bits", stored_head)
    if head_bits != stored_head:
        notes.append(f"quantization_config: head_bits {head_bits}, the stored head has {stored_head}")
    codebook = quantization.get("codebook")
    others = [key for key, module in modules.items() if codebook is not None and module.codebook != codebook]
    if others:
        notes.append(
            f"quantization_config: codebook {codebook}, but {modules[others[0]].codebook} in {_first_of(others)}"
        )
    return tuple(notes)


def module_notes(modules: Mapping[str, Exl3Module]) -> tuple[str, ...]:
    """Describe what is unusual yet valid: foreign multipliers, packed signs, sliced linears."""
    notes = []
    foreign: dict[tuple[str, int], list[str]] = {}
    for key, module in modules.items():
        if not module.is_default_multiplier:
            foreign.setdefault((module.codebook, module.multiplier), []).append(key)
    for (codebook, multiplier), keys in sorted(foreign.items()):
        notes.append(
            f"{codebook} multiplier 0x{multiplier:08x} in {_first_of(keys)}: not the format's constant; "
            "honoured by the reference, refused by kernels that hard-code it"
        )
    packed = [key for key, module in modules.items() if module.has_packed_signs]
    if packed:
        notes.append(f"legacy packed signs in {_first_of(packed)}: expanded when loaded")
    sliced = list(slice_groups(modules))
    if sliced:
        notes.append(f"stored in slices: {_first_of(sliced)}")
    return tuple(notes)


def vocabulary_notes(vocab_size: Any, modules: Mapping[str, Exl3Module]) -> tuple[str, ...]:
    """Describe a quantized head whose width is not the vocabulary's; padding must leave the logits."""
    heads = [module for module in modules.values() if module.role == "head"]
    return tuple(
        f"{head.key}: {head.out_features} columns for a vocabulary of {vocab_size}"
        + (": the padding must be cut from the logits" if head.out_features > vocab_size else "")
        for head in heads
        if isinstance(vocab_size, int) and head.out_features != vocab_size
    )

"""Opening a model directory: every claim checked from headers, nothing allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3eval.checkpoint.crosscheck import (
    STORAGE_FILE,
    check_index,
    config_notes,
    module_notes,
    read_object,
    storage_notes,
    vocabulary_notes,
)
from exl3eval.checkpoint.headers import TensorEntry, read_headers
from exl3eval.checkpoint.modules import Exl3Module, find_modules, slice_groups
from exl3eval.errors import CheckpointError

CONFIG_FILE = "config.json"
_TIER_FILE = "tier_bitmap.json"
_DIALECT_FIELDS = {
    "hybrid_tr3_tail": "rank-sliced experts of mixed width",
    "rotation_layout": "rotations shared between linears",
    "tier_bitmap": "per-expert widths in a side file",
    _TIER_FILE: "per-expert widths in a side file",
}
_EXTRA_PACKS = {"ngram_bits": "n-gram embedding tables in EXL3 form", "vision_bits": "a quantized vision tower"}
_USE_PLAIN = "use a checkpoint that exllamav3 1.4 or older wrote without that option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model directory, understood but not loaded.

    Parameters
    ----------
    directory : Path
        The folder.
    config : dict
        Content of `config.json`.
    quantization : dict or None
        `quantization_config` of the model, or the separate file's content without its storage list.
    modules : mapping of str to Exl3Module
        EXL3 linears by key; empty for a plain directory.
    plain : mapping of str to TensorEntry
        Every other tensor, by name.
    file_bytes : mapping of str to int
        Size of each weight file.
    notes : tuple of str
        Differences and peculiarities worth a reader's eye, none of them fatal.
    """

    directory: Path
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    modules: Mapping[str, Exl3Module]
    plain: Mapping[str, TensorEntry]
    file_bytes: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def is_exl3(self) -> bool:
        """Whether any linear is stored as EXL3."""
        return bool(self.modules)

    @property
    def quant_method(self) -> str | None:
        """Declared quantization method in lower case, None where nothing is declared."""
        return _quant_method(self.quantization)

    @property
    def head_key(self) -> str | None:
        """Key of the quantized output head, None where the head is plain or tied."""
        return next((key for key, module in self.modules.items() if module.role == "head"), None)

    @property
    def has_quantized_head(self) -> bool:
        """Whether the head has its own EXL3 weights; look here before tying it to the embedding."""
        return self.head_key is not None

    @property
    def tie_word_embeddings(self) -> bool | None:
        """What the configuration says about tying; None where it does not say."""
        return _text_field(self.config, "tie_word_embeddings")

    @property
    def slices(self) -> dict[str, tuple[Exl3Module, ...]]:
        """Slices of each linear stored as `.slice.i`, in order, by the linear's own key."""
        return slice_groups(self.modules)

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor, modules' and plain, in name order."""
        stored = [entry for module in self.modules.values() for entry in module.tensors]
        return tuple(sorted([*stored, *self.plain.values()], key=lambda entry: entry.name))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a Hugging Face model directory, EXL3 or plain.

    Headers and small JSON files are read, plus 4 bytes per codebook marker.

    Raises
    ------
    CheckpointError
        Naming the file, the tensor or field, the reason and a remedy, if the directory is damaged,
        incomplete, in an unsupported dialect or contradicts itself.
    """
    directory = directory.absolute()
    headers = read_headers(directory)
    config = read_object(directory, CONFIG_FILE)
    stored = read_object(directory, STORAGE_FILE) if (directory / STORAGE_FILE).exists() else None
    quantization, quantization_notes = _find_quantization(config, stored)
    _refuse_dialect_fields(directory, {CONFIG_FILE: config, "quantization_config": quantization or {}})
    index_notes = check_index(directory, headers)
    modules = find_modules(directory, headers.tensors)
    _check_method(_quant_method(quantization), modules)
    owned = {entry.name for module in modules.values() for entry in module.tensors}
    notes = [f"{name}: no name in it has a module path; not part of the model" for name in headers.side_files]
    notes += [*index_notes, *quantization_notes, *module_notes(modules)]
    if modules:
        notes += config_notes(quantization or {}, modules)
        notes += storage_notes(stored["tensor_storage"], modules) if stored and "tensor_storage" in stored else ()
        notes += vocabulary_notes(_text_field(config, "vocab_size"), modules)
    return Checkpoint(
        directory=directory,
        config=config,
        quantization=quantization,
        modules=modules,
        plain={name: entry for name, entry in headers.tensors.items() if name not in owned},
        file_bytes=headers.file_bytes,
        notes=tuple(notes),
    )


def open_exl3(directory: Path) -> Checkpoint:
    """Open a directory that must be EXL3.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`; also if no linear is EXL3, naming the quantization found instead.
    """
    checkpoint = open_checkpoint(directory)
    if not checkpoint.is_exl3:
        found = f"is quantized as {checkpoint.quant_method}" if checkpoint.quant_method else "is not quantized"
        raise CheckpointError(
            f"{checkpoint.directory.name}: {found}: no tensor is called *.trellis",
            hint="give an EXL3 directory, or make one from the 16-bit model with `exl3eval quantize`",
        )
    return checkpoint


def _find_quantization(
    config: dict[str, Any], stored: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    declared = config.get("quantization_config")
    if declared is not None and not isinstance(declared, dict):
        raise CheckpointError(
            f"{CONFIG_FILE}: quantization_config is a JSON {type(declared).__name__}, not an object",
            hint="restore the file",
        )
    separate = None if stored is None else {key: stored[key] for key in stored if key != "tensor_storage"}
    if declared is None:
        return separate, ()
    if separate is None:
        return declared, ()
    fields = sorted(key for key in declared.keys() | separate.keys() if declared.get(key) != separate.get(key))
    if not fields:
        return declared, ()
    return declared, (f"{STORAGE_FILE}: differs from {CONFIG_FILE} in {', '.join(fields)}; the latter is used",)


def _refuse_dialect_fields(directory: Path, places: Mapping[str, Mapping[str, Any]]) -> None:
    for place, fields in places.items():
        for field, meaning in _DIALECT_FIELDS.items():
            if fields.get(field) is not None:
                raise CheckpointError(
                    f"{place}: field {field}: {meaning}, a third-party dialect of EXL3",
                    hint="only the layout that exllamav3 itself writes is read: use such a checkpoint",
                )
        for field, meaning in _EXTRA_PACKS.items():
            if fields.get(field) not in (None, 16):
                raise CheckpointError(
                    f"{place}: field {field} is {fields[field]!r}: {meaning} not supported", hint=_USE_PLAIN
                )
    if (directory / _TIER_FILE).exists():
        raise CheckpointError(
            f"{_TIER_FILE}: {_DIALECT_FIELDS[_TIER_FILE]}, a third-party dialect of EXL3",
            hint="only the layout that exllamav3 itself writes is read: use such a checkpoint",
        )


def _quant_method(quantization: Mapping[str, Any] | None) -> str | None:
    method = (quantization or {}).get("quant_method")
    return method.lower() if isinstance(method, str) else None


def _check_method(method: str | None, modules: Mapping[str, Exl3Module]) -> None:
    if modules and method not in (None, "exl3"):
        entry = next(iter(modules.values())).trellis
        raise entry.refusal(
            f"is EXL3, while {CONFIG_FILE} declares quant_method {method}",
            hint="put the configuration and the weights of one model together",
        )
    if not modules and method == "exl3":
        raise CheckpointError(
            f"{CONFIG_FILE}: declares quant_method exl3, but no tensor is called *.trellis",
            hint="fetch the quantized weights, or remove quantization_config from a 16-bit model",
        )


def _text_field(config: Mapping[str, Any], field: str) -> Any:
    """Return a field of the language model; multimodal configurations nest it in `text_config`."""
    nested = config.get("text_config")
    return config.get(field, nested.get(field) if isinstance(nested, dict) else None)

"""EXL3 modules: which tensors form one quantized linear, checked from headers alone.

Sizes and bits come from the trellis, the codebook from the marker that is present, never from the
configuration. The only data read is the marker itself (4 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE
from exl3eval.checkpoint.headers import TensorEntry
from exl3eval.errors import CheckpointError

EMBEDDING_NAMES = frozenset({"embed_tokens", "embed_tokens_per_layer", "tok_embeddings", "word_embeddings", "wte"})
_MARKERS = ("mcg", "mul1")
_PARTS = frozenset({"trellis", "suh", "svh", "su", "sv", "bias", *_MARKERS})
_NEED_TRELLIS = _PARTS - {"trellis", "bias"}
_RANK = re.compile(r"\.rank\d+\.[^.]+$")
_SLICE = re.compile(r"(?P<parent>.+)\.slice\.(?P<index>[^.]+)")
_SLICE_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_REQUANTIZE = "quantize the model again with a current exllamav3 or `exl3eval quantize`"
_UPSTREAM_ONLY = "only the layout that exllamav3 itself writes is read: use such a checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl3Module:
    """One EXL3 linear as stored.

    Parameters
    ----------
    key : str
        Module key: the tensor names without their last part.
    codebook : str
        `3inst`, `mcg` or `mul1`.
    multiplier : int
        Unsigned 32-bit multiplier read from the marker; the format's constant for `3inst`.
    bits : int
        K, bits per weight, from the trellis.
    in_features, out_features : int
        k and n, padded to multiples of 128, from the trellis.
    trellis, input_signs, output_signs : TensorEntry
        Codes; `suh` or packed `su`; `svh` or packed `sv`.
    marker, bias : TensorEntry or None
        Codebook marker; bias [n].
    slice_of : str or None
        Key of the linear that this module is a slice of.
    slice_index : int or None
        Its place among the slices, from 0.
    """

    key: str
    codebook: str
    multiplier: int
    bits: int
    in_features: int
    out_features: int
    trellis: TensorEntry
    input_signs: TensorEntry
    output_signs: TensorEntry
    marker: TensorEntry | None
    bias: TensorEntry | None
    slice_of: str | None
    slice_index: int | None

    @property
    def role(self) -> str:
        """`head`, `mtp` (multi-token prediction layer) or `body`."""
        if self.key.startswith("mtp."):
            return "mtp"
        return "head" if self.key.rpartition(".")[2] == "lm_head" else "body"

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every stored tensor of the module."""
        parts = (self.trellis, self.input_signs, self.output_signs, self.marker, self.bias)
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Stored bytes, marker and bias included."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def num_weights(self) -> int:
        """Logical weights k n, padding included."""
        return self.in_features * self.out_features

    @property
    def weight_bits(self) -> int:
        """Stored bits of codes and scales: K k n + 16 k + 16 n unless signs are packed."""
        return 8 * (self.trellis.nbytes + self.input_signs.nbytes + self.output_signs.nbytes)

    @property
    def has_packed_signs(self) -> bool:
        """Whether either side is in the legacy packed form (`su`, `sv`)."""
        return any(signs.dtype == "I16" for signs in (self.input_signs, self.output_signs))

    @property
    def is_default_multiplier(self) -> bool:
        """Whether the multiplier is the one that kernels hard-code."""
        return self.multiplier == MULTIPLIERS[self.codebook]


def find_modules(directory: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, Exl3Module]:
    """Group tensors into EXL3 modules and check every rule of the format.

    Parameters
    ----------
    directory : Path
        Model directory, for the 4 bytes of each marker.
    tensors : mapping of str to TensorEntry
        All headers, by tensor name.

    Returns
    -------
    dict of str to Exl3Module
        By key, in name order; empty when no tensor is called `*.trellis`.

    Raises
    ------
    CheckpointError
        Naming file, tensor, reason and remedy: an unknown dialect or suffix, a missing or
        contradictory part, a wrong dtype or shape, slices that do not follow each other.
    """
    _refuse_dialects(tensors)
    keys = sorted(name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis"))
    parts = _group_parts(keys, tensors)
    for entry in tensors.values():
        key, _, suffix = entry.name.rpartition(".")
        if suffix in _NEED_TRELLIS and key not in parts:
            raise entry.refusal(f"belongs to an EXL3 linear, but {key}.trellis is in no file", hint=_complete(key))
    markers = _read_markers(directory, [group[name] for group in parts.values() for name in _MARKERS if name in group])
    modules = {key: _build_module(key, group, markers) for key, group in parts.items()}
    _check_slices(modules, tensors)
    return modules


def _refuse_dialects(tensors: Mapping[str, TensorEntry]) -> None:
    for entry in tensors.values():
        key, _, suffix = entry.name.rpartition(".")
        if suffix in _PARTS and _RANK.search(entry.name):
            raise entry.refusal("rank-sliced EXL3 is a third-party dialect", hint=_UPSTREAM_ONLY)
        if suffix in ("shared_suh", "shared_svh"):
            raise entry.refusal("shared rotations (shared_h) are a third-party dialect", hint=_UPSTREAM_ONLY)
        if suffix == "trellis" and key.rpartition(".")[2] in EMBEDDING_NAMES:
            raise entry.refusal(
                "an embedding table in EXL3 form (n-gram pack) is not supported",
                hint="use a revision whose embeddings are not quantized",
            )
        if suffix.startswith("trellis") and suffix != "trellis":
            raise entry.refusal(f"unknown EXL3 suffix .{suffix}", hint=_UPSTREAM_ONLY)


def _group_parts(keys: list[str], tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Collect what lies under each key; anything the format does not name is refused."""
    groups: dict[str, dict[str, TensorEntry]] = {key: {} for key in keys}
    for name, entry in tensors.items():
        for dot in (match.start() for match in re.finditer(r"\.", name)):
            key, suffix = name[:dot], name[dot + 1 :]
            if key not in groups:
                continue
            if suffix == "scale":
                raise entry.refusal("the pre-release .scale layout is extinct", hint=_REQUANTIZE)
            if suffix == "weight":
                raise entry.refusal(f"lies beside {key}.trellis", hint="keep one of the two: delete or requantize")
            if suffix not in _PARTS:
                raise entry.refusal(f"unknown suffix .{suffix} under the EXL3 linear {key}", hint=_UPSTREAM_ONLY)
            groups[key][suffix] = entry
    return groups


def _build_module(key: str, parts: Mapping[str, TensorEntry], markers: Mapping[str, int]) -> Exl3Module:
    trellis = parts["trellis"]
    bits, in_features, out_features = _measure_trellis(trellis)
    present = [name for name in _MARKERS if name in parts]
    if len(present) == 2:
        raise parts["mul1"].refusal("has both codebook markers, mcg and mul1", hint=_REQUANTIZE)
    marker = parts[present[0]] if present else None
    bias = parts.get("bias")
    if bias is not None:
        _check_tensor(bias, ("F16", "BF16", "F32"), (out_features,))
    place = _SLICE.fullmatch(key)
    return Exl3Module(
        key=key,
        codebook=present[0] if present else "3inst",
        multiplier=markers[marker.name] if marker else MULTIPLIERS["3inst"],
        bits=bits,
        in_features=in_features,
        out_features=out_features,
        trellis=trellis,
        input_signs=_pick_signs(key, parts, ("suh", "su"), in_features),
        output_signs=_pick_signs(key, parts, ("svh", "sv"), out_features),
        marker=marker,
        bias=bias,
        slice_of=place["parent"] if place else None,
        slice_index=_slice_index(trellis, place["index"]) if place else None,
    )


def _measure_trellis(trellis: TensorEntry) -> tuple[int, int, int]:
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise trellis.refusal(
            f"is {trellis.dtype} {list(trellis.shape)}, expected I16 [in/16, out/16, 16 K]; "
            "row-wise (n-gram) packs are not supported",
            hint=_UPSTREAM_ONLY,
        )
    rows, columns, words = trellis.shape
    if words % TILE or not 1 <= words // TILE <= 8:
        raise trellis.refusal(
            f"has {words} words per tile, that is {words / TILE:g} bits per weight, expected a whole K of 1 to 8",
            hint=_REQUANTIZE,
        )
    in_features, out_features = rows * TILE, columns * TILE
    if in_features % BLOCK or out_features % BLOCK or not in_features or not out_features:
        raise trellis.refusal(
            f"is {in_features} x {out_features}, expected multiples of {BLOCK} (the Hadamard block)", hint=_REQUANTIZE
        )
    return words // TILE, in_features, out_features


def _pick_signs(key: str, parts: Mapping[str, TensorEntry], names: tuple[str, str], size: int) -> TensorEntry:
    full, packed = names
    if full in parts and packed in parts:
        raise parts[packed].refusal(f"lies beside {key}.{full}: two sign vectors for one side", hint=_REQUANTIZE)
    if full in parts:
        return _check_tensor(parts[full], ("F16",), (size,))
    if packed in parts:
        return _check_tensor(parts[packed], ("I16",), (size // TILE,))
    raise parts["trellis"].refusal(f"has neither {key}.{full} nor {key}.{packed} beside it", hint=_complete(key))


def _complete(key: str) -> str:
    return f"fetch the file that holds the rest of {key}, or quantize it again"


def _check_tensor(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorEntry:
    if entry.dtype not in dtypes or entry.shape != shape:
        raise entry.refusal(
            f"is {entry.dtype} {list(entry.shape)}, expected {' or '.join(dtypes)} {list(shape)}", hint=_REQUANTIZE
        )
    return entry


def _read_markers(directory: Path, entries: list[TensorEntry]) -> dict[str, int]:
    """Read each marker's 4 bytes, opening every file once."""
    values: dict[str, int] = {}
    for file_name in sorted({_check_tensor(entry, ("I32",), ()).file for entry in entries}):
        try:
            with (directory / file_name).open("rb") as file:
                for entry in (entry for entry in entries if entry.file == file_name):
                    file.seek(entry.start)
                    values[entry.name] = int.from_bytes(file.read(entry.nbytes), "little")
        except OSError as error:
            raise CheckpointError(f"{file_name}: cannot be read: {error.strerror}", hint="copy it again") from error
    return values


def _slice_index(entry: TensorEntry, index: str) -> int:
    if not _SLICE_INDEX.fullmatch(index):
        raise entry.refusal(f"slice {index!r} is not a number", hint=_REQUANTIZE)
    return int(index)


def _check_slices(modules: Mapping[str, Exl3Module], tensors: Mapping[str, TensorEntry]) -> None:
    groups = slice_groups(modules)
    for name, entry in tensors.items():
        key = name.rpartition(".")[0]
        place = _SLICE.fullmatch(key)
        if place and place["parent"] in groups and key not in modules:
            raise entry.refusal("is no EXL3 slice while its neighbours are", hint=_complete(key))
    for parent, slices in groups.items():
        indexes = [part.slice_index for part in slices]
        if indexes != list(range(len(slices))):
            raise slices[-1].trellis.refusal(
                f"slices of {parent} are {indexes}, expected 0 to {slices[-1].slice_index}", hint=_complete(parent)
            )
        if len({part.in_features for part in slices}) > 1 and len({part.out_features for part in slices}) > 1:
            raise slices[-1].trellis.refusal(
                f"slices of {parent} agree neither in input nor in output width", hint=_REQUANTIZE
            )


def slice_groups(modules: Mapping[str, Exl3Module]) -> dict[str, tuple[Exl3Module, ...]]:
    """Return the slices of each sliced linear, in slice order, by the linear's own key."""
    groups: dict[str, list[Exl3Module]] = {}
    for module in modules.values():
        if module.slice_of is not None:
            groups.setdefault(module.slice_of, []).append(module)
    return {
        parent: tuple(sorted(slices, key=lambda part: part.slice_index or 0))
        for parent, slices in sorted(groups.items())
    }

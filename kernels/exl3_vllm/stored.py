"""Which linears of a checkpoint are EXL3, from the headers of its safetensors files.

Sizes, bits and codebook come from the tensors that are there, never from the configuration: a checkpoint's bits differ
from layer to layer, and between the parts that vLLM fuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE

MARKERS = ("mcg", "mul1")
LEGACY = ("su", "sv")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """One EXL3 linear as a file holds it.

    Parameters
    ----------
    key : str
        Its name in the checkpoint, without the tensor's suffix.
    in_features, out_features : int
        Stored widths, multiples of 128.
    bits : int
        K.
    codebook : str
        `3inst`, or the marker that is stored beside the trellis.
    has_bias : bool
        Whether a bias is stored.
    """

    key: str
    in_features: int
    out_features: int
    bits: int
    codebook: str
    has_bias: bool

    @property
    def multiplier(self) -> int:
        """The usual multiplier of the codebook."""
        return MULTIPLIERS[self.codebook]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, see `tensor_shapes`."""
        return tensor_shapes(self.in_features, self.out_features, self.bits)


def tensor_shapes(k: int, n: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a trellis [k/16, n/16, 16 K], of suh [k] and of svh [n]."""
    return {"trellis": (k // TILE, n // TILE, TILE * bits), "suh": (k,), "svh": (n,)}


def find_linears(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredLinear]:
    """Find the EXL3 linears of a checkpoint.

    Parameters
    ----------
    shapes : mapping
        Every tensor's name to its shape.

    Returns
    -------
    dict
        By key, in key order.

    Raises
    ------
    ValueError
        If a layout is one that vLLM's loaders cannot take: a linear in slices, packed signs, or an incomplete one.
    """
    found = {}
    for name in sorted(shapes):
        key, _, suffix = name.rpartition(".")
        if suffix != "trellis":
            continue
        if ".slice." in key:
            raise ValueError(f"{key} is one slice of a linear: serve it with a checkpoint that stores it whole")
        if any(f"{key}.{legacy}" in shapes for legacy in LEGACY):
            raise ValueError(f"{key} stores packed signs (su, sv): quantize the model again with a current encoder")
        missing = [part for part in ("suh", "svh") if f"{key}.{part}" not in shapes]
        if missing:
            raise ValueError(f"{key}.{missing[0]} is missing: fetch the whole checkpoint")
        shape = shapes[name]
        if len(shape) != 3 or shape[2] % TILE or not 1 <= shape[2] // TILE <= 8:
            raise ValueError(f"{name} is {list(shape)}, expected [in/16, out/16, 16 K] with K of 1 to 8")
        rows, columns = shape[0] * TILE, shape[1] * TILE
        if rows % BLOCK or columns % BLOCK:
            raise ValueError(f"{name} is {rows} x {columns}, expected multiples of {BLOCK}")
        markers = [marker for marker in MARKERS if f"{key}.{marker}" in shapes]
        if len(markers) == 2:
            raise ValueError(f"{key} has both codebook markers, mcg and mul1")
        found[key] = StoredLinear(
            key=key,
            in_features=rows,
            out_features=columns,
            bits=shape[2] // TILE,
            codebook=markers[0] if markers else "3inst",
            has_bias=f"{key}.bias" in shapes,
        )
    return found

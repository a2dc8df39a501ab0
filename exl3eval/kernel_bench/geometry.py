"""The shapes that are timed, and where the user adds more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from exl3eval.errors import UsageError

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 144, 256, 512, 2048, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One weight's shape.

    Parameters
    ----------
    name : str
        As in tables.
    in_features, out_features : int
        k and n, multiples of 128.
    bits : int
        K.
    """

    name: str
    in_features: int
    out_features: int
    bits: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of the trellis."""
        return self.in_features * self.out_features * self.bits // 8

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weight in 16-bit floats."""
        return self.in_features * self.out_features * 2


GEOMETRIES = (
    Geometry(name="mlp", in_features=5120, out_features=17408, bits=5),
    Geometry(name="down", in_features=17408, out_features=5120, bits=6),
    Geometry(name="head", in_features=5120, out_features=248320, bits=6),
    Geometry(name="qkvz", in_features=5120, out_features=16384, bits=6),
    Geometry(name="small", in_features=4096, out_features=4096, bits=4),
    Geometry(name="moe", in_features=2048, out_features=768, bits=4),
)


def parse_geometry(text: str) -> Geometry:
    """Read a shipped geometry's name or `KxN:BITS`, for instance `4096x11008:4`.

    Raises
    ------
    UsageError
        If it is neither.
    """
    for geometry in GEOMETRIES:
        if geometry.name == text:
            return geometry
    match = re.fullmatch(r"(\d+)x(\d+):([1-8])", text)
    if match is None or int(match[1]) % 128 or int(match[2]) % 128 or not int(match[1]) * int(match[2]):
        raise UsageError(
            f"geometry {text!r} is neither a shipped one nor KxN:BITS with K and N multiples of 128",
            hint=f"shipped: {', '.join(g.name for g in GEOMETRIES)}; for instance 4096x11008:4",
        )
    return Geometry(name=text, in_features=int(match[1]), out_features=int(match[2]), bits=int(match[3]))

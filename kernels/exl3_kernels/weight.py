"""One EXL3 linear's stored tensors as a value.

Shapes: k input features, n output features, K bits per weight; `trellis` is [k/16, n/16, 16 K].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CODEBOOKS = ("3inst", "mcg", "mul1")
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
TILE = 16
BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl3Weight:
    """The tensors of one EXL3 linear, checked against each other.

    Parameters
    ----------
    trellis : Tensor
        int16 [k/16, n/16, 16 K], packed codes.
    suh : Tensor
        float16 [k], input sign times scale (legacy packed signs are expanded before this point).
    svh : Tensor
        float16 [n], output sign times scale.
    codebook : str
        `3inst`, `mcg` or `mul1`.
    multiplier : int
        Unsigned 32-bit multiplier of the codebook's hash, as stored in the file.
    bias : Tensor or None
        [n], added last.

    Raises
    ------
    ValueError
        If a dtype or shape contradicts the format.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str
    multiplier: int
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise ValueError(f"codebook {self.codebook!r} is not one of {', '.join(CODEBOOKS)}")
        if self.trellis.dtype != torch.int16 or self.trellis.dim() != 3 or self.trellis.shape[2] % TILE:
            raise ValueError(
                f"trellis is {self.trellis.dtype} {tuple(self.trellis.shape)}, expected int16 [k/16, n/16, 16 K]"
            )
        if not 1 <= self.bits <= 8:
            raise ValueError(f"trellis holds {self.bits} bits per weight, expected 1 to 8")
        for name, scale, size in (("suh", self.suh, self.in_features), ("svh", self.svh, self.out_features)):
            if scale.dtype != torch.float16 or tuple(scale.shape) != (size,):
                raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}, expected float16 ({size},)")
        if self.bias is not None and tuple(self.bias.shape) != (self.out_features,):
            raise ValueError(f"bias is {tuple(self.bias.shape)}, expected ({self.out_features},)")

    @property
    def bits(self) -> int:
        """K, bits per weight."""
        return self.trellis.shape[2] // TILE

    @property
    def in_features(self) -> int:
        """k, padded input features."""
        return self.trellis.shape[0] * TILE

    @property
    def out_features(self) -> int:
        """n, padded output features."""
        return self.trellis.shape[1] * TILE

"""The block-128 Hadamard transform, exact and in the staged precisions of upstream's kernels.

Every transform runs over the last dimension in blocks of 128, natural order, as seven radix-2 butterfly stages of
increasing stride. Butterflies rather than a matrix product: the order of additions is then fixed on every device, no
matrix-unit precision setting can change it, and the float32 stages are those of upstream's kernel.
"""

from __future__ import annotations

import torch

from exl3_kernels.weight import BLOCK

STRIDES = (1, 2, 4, 8, 16, 32, 64)
NORM = BLOCK**-0.5


def butterfly(x: torch.Tensor, stride: int) -> torch.Tensor:
    """One stage over the last dimension: (a, b) at distance `stride` becomes (a + b, a - b), in the dtype of `x`."""
    pairs = x.unflatten(-1, (-1, 2, stride))
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    return torch.stack((first + second, first - second), dim=-2).flatten(-3)


def hadamard_128(x: torch.Tensor) -> torch.Tensor:
    """Multiply by blockdiag(S, S, ...), S = Sylvester(128) / sqrt(128).

    Parameters
    ----------
    x : Tensor
        float32 or float64 [..., c], c a multiple of 128.

    Returns
    -------
    Tensor
        Same shape and dtype; computed in that dtype.

    Raises
    ------
    ValueError
        If the dtype is neither float32 nor float64, or c is not a multiple of 128.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.shape[-1] % BLOCK:
        raise ValueError(
            f"Hadamard input is {x.dtype} {tuple(x.shape)}, expected float32 or float64 with a last dimension"
            f" that is a multiple of {BLOCK}"
        )
    for stride in STRIDES:
        x = butterfly(x, stride)
    return x * NORM


def hadamard_half(
    x: torch.Tensor, *, pre_scale: torch.Tensor | None = None, post_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Transform float16 to float16 as upstream does: RN16 before, between and after, float32 butterflies inside.

    Parameters
    ----------
    x : Tensor
        float16 [..., c].
    pre_scale, post_scale : Tensor or None
        float16 [c]; each product is rounded to float16.

    Returns
    -------
    Tensor
        float16 [..., c]. Overflow gives infinities, as upstream does.
    """
    if pre_scale is not None:
        x = x * pre_scale
    return hadamard_epilogue(x.float(), post_scale)


def hadamard_epilogue(sums: torch.Tensor, post_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Transform float32 sums [..., c] to float16, then multiply by `post_scale`, float16 [c], rounding again."""
    y = hadamard_128(sums).half()
    return y if post_scale is None else y * post_scale

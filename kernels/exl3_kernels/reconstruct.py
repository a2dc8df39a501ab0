"""Dense weights and reference products of one EXL3 linear.

Exact algebra (k inputs, n outputs): y = (((x * suh) H) W H) * svh + bias, with W the inner matrix of raw codebook
values and H the block-128 Hadamard transform. The `staged` functions repeat upstream's roundings instead.
Padded columns are the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.hadamard import STRIDES, butterfly, hadamard_128, hadamard_epilogue, hadamard_half
from exl3_kernels.trellis import tiles_to_matrix, unpack_states
from exl3_kernels.weight import BLOCK, TILE, Exl3Weight

SLICE_ELEMENTS = 1 << 24


def inner_weight(w: Exl3Weight) -> torch.Tensor:
    """Return the inner matrix, float16 [k, n]: codebook values, no transform and no scale."""
    inner = torch.empty(w.in_features, w.out_features, dtype=torch.float16, device=w.trellis.device)
    for columns, part in inner_slices(w):
        inner[:, columns] = part
    return inner


def inner_slices(w: Exl3Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (columns, float16 [k, columns]) of the inner matrix in slices of at most about 2^24 elements.

    Slices are whole 128-column blocks, so that the output transform applies to each on its own.
    """
    values = codebook_values(w.codebook, w.multiplier, device=w.trellis.device)
    width = max(BLOCK, SLICE_ELEMENTS // max(w.in_features, 1) // BLOCK * BLOCK)
    for start in range(0, w.out_features, width):
        columns = slice(start, min(start + width, w.out_features))
        states = unpack_states(w.trellis[:, columns.start // TILE : columns.stop // TILE])
        yield columns, tiles_to_matrix(values[states])


def dense_weight(w: Exl3Weight, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return diag(suh) H W H diag(svh), computed in float64 and rounded once to `dtype`.

    Returns
    -------
    Tensor
        [k, n] of `dtype`.

    Raises
    ------
    ValueError
        If k or n is not a multiple of 128.
    """
    _require_blocks(w)
    dense = torch.empty(w.in_features, w.out_features, dtype=dtype, device=w.trellis.device)
    for columns, inner in inner_slices(w):
        rotated = hadamard_128(hadamard_128(inner.double()).T).T
        dense[:, columns] = rotated * w.suh.double()[:, None] * w.svh[columns].double()
    return dense


def dense_weight_fp16_staged(w: Exl3Weight, path: Literal["F", "H"] = "F") -> torch.Tensor:
    """Return the dense weight in the float16 arithmetic of one of upstream's paths.

    Parameters
    ----------
    w : Exl3Weight
        The linear.
    path : "F" or "H"
        F, the fused reconstruction for 1024 rows or more: float16 butterflies (float32 for the first two output
        stages) around one multiplication by RN16(1/sqrt(128)), then two float16 scalings; bit-exact.
        H, the offline dequantization: float32 transforms, each followed by RN16 and a float16 scaling. Upstream
        multiplies by a float32 matrix there, so last-bit agreement is not promised.

    Returns
    -------
    Tensor
        float16 [k, n].

    Raises
    ------
    ValueError
        If the path is unknown or k or n is not a multiple of 128.
    """
    if path not in ("F", "H"):
        raise ValueError(f"path {path!r} is not F or H")
    _require_blocks(w)
    dense = torch.empty(w.in_features, w.out_features, dtype=torch.float16, device=w.trellis.device)
    for columns, inner in inner_slices(w):
        svh = w.svh[columns]
        if path == "F":
            left = _half_stages(inner.T, exact_start=False).T
            dense[:, columns] = _half_stages(left, exact_start=True) * w.suh[:, None] * svh
        else:
            left = hadamard_half(inner.T.contiguous(), post_scale=w.suh).T
            dense[:, columns] = hadamard_half(left, post_scale=svh)
    return dense


def linear_reference(x: torch.Tensor, w: Exl3Weight) -> torch.Tensor:
    """Return y = (((x * suh) H) W H) * svh + bias in float64: the oracle that every kernel is measured against.

    Parameters
    ----------
    x : Tensor
        Floating point [..., k].
    w : Exl3Weight
        The linear; k and n multiples of 128.

    Returns
    -------
    Tensor
        float64 [..., n].

    Raises
    ------
    ValueError
        If x does not end in k features, or k or n is not a multiple of 128.
    """
    _require_input(x, w)
    y = hadamard_128(_product(hadamard_128(x.double() * w.suh.double()), w)) * w.svh.double()
    return y if w.bias is None else y + w.bias.double()


def linear_staged(
    x: torch.Tensor,
    w: Exl3Weight,
    *,
    out_dtype: torch.dtype = torch.float32,
    accumulate: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the product with upstream's float16 rotated input and its output transform on float32 sums.

    Parameters
    ----------
    x : Tensor
        float16 [..., k].
    w : Exl3Weight
        The linear; k and n multiples of 128.
    out_dtype : torch.dtype
        float32 (transform and scale in float32) or float16 (RN16 after the transform, again after svh).
    accumulate : torch.dtype
        float64 or float32, the precision of the inner product; its sums are rounded to float32.

    Returns
    -------
    Tensor
        [..., n] of `out_dtype`.

    Raises
    ------
    ValueError
        If x is not float16 [..., k], a dtype is not one of those named, or k or n is not a multiple of 128.
    """
    _require_input(x, w)
    if x.dtype != torch.float16:
        raise ValueError(f"staged input is {x.dtype}, expected torch.float16")
    if out_dtype not in (torch.float16, torch.float32) or accumulate not in (torch.float32, torch.float64):
        raise ValueError(
            f"output {out_dtype} and accumulation {accumulate}: expected float16 or float32, float32 or float64"
        )
    sums = _product(hadamard_half(x, pre_scale=w.suh).to(accumulate), w).float()
    y = hadamard_epilogue(sums, w.svh) if out_dtype == torch.float16 else hadamard_128(sums) * w.svh.float()
    return y if w.bias is None else y + w.bias.to(out_dtype)


def linear_rotated(x: torch.Tensor, w: Exl3Weight) -> torch.Tensor:
    """Return ((RN16(RN16(x suh) H) W) H) svh + bias in float32: what the GPU kernels compute, one product of the rows.

    Parameters and errors as in `linear_reference`; the result is float32.
    """
    _require_input(x, w)
    rotated = hadamard_half((x.float() * w.suh.float()).half())
    y = hadamard_128(_product(rotated.float(), w)) * w.svh.float()
    return y if w.bias is None else y + w.bias.float()


def _product(rotated: torch.Tensor, w: Exl3Weight) -> torch.Tensor:
    """Multiply rotated inputs [..., k] by the inner matrix in their own dtype."""
    return torch.cat([rotated @ inner.to(rotated.dtype) for _, inner in inner_slices(w)], dim=-1)


def _half_stages(x: torch.Tensor, *, exact_start: bool) -> torch.Tensor:
    """Path F's transform over the last dimension: two stages (float32 if `exact_start`), RN16(1/sqrt(128)), five."""
    x = x.float() if exact_start else x
    for stride in STRIDES[:2]:
        x = butterfly(x, stride)
    x = x.half() * torch.tensor(BLOCK**-0.5, dtype=torch.float16, device=x.device)
    for stride in STRIDES[2:]:
        x = butterfly(x, stride)
    return x


def _require_blocks(w: Exl3Weight) -> None:
    if w.in_features % BLOCK or w.out_features % BLOCK:
        raise ValueError(f"linear is {w.in_features} x {w.out_features}, expected multiples of {BLOCK}")


def _require_input(x: torch.Tensor, w: Exl3Weight) -> None:
    _require_blocks(w)
    if x.shape[-1] != w.in_features:
        raise ValueError(f"input has {x.shape[-1]} features, the linear takes {w.in_features}")

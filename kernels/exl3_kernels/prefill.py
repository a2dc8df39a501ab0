"""Prefill on NVIDIA GPUs: reconstruct a slice of the weight into a workspace, multiply with cuBLAS, next slice.

Four arithmetics. `prefill_reconstruct` stays in the rotated basis with the exact inner matrix, as the decode GEMM
does. `prefill_fused` reconstructs the original basis: fp32 transforms, one rounding to float16 per weight, raw rows.
`prefill_half` transforms the weight's wider side alone, likewise rounded once, and rotates rows or sums on the other.
`prefill_fp8` rounds the weight in the original basis and the rows to E4M3. Products are accumulated in fp32 everywhere.

A slice is whole 128-column blocks, stored transposed, [columns, k].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from exl3_kernels.cuda import load_library
from exl3_kernels.decode import OVERLAP
from exl3_kernels.operands import DTYPES, bias_operand, prepare_rows, require_primed
from exl3_kernels.weight import CODEBOOKS, Exl3Weight
from exl3_kernels.workspace import LOCK, slice_width, workspace

Kind = Literal["inner", "original", "e4m3", "outputs", "inputs"]
KINDS: tuple[Kind, ...] = ("inner", "original", "e4m3", "outputs", "inputs")
LARGEST_E4M3 = 448.0


def prefill_reconstruct(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear as RN((((RN16(RN16(x suh) H) W) H) svh + bias), with W bit-exact and sums in fp32.

    Parameters
    ----------
    x_Mk : Tensor
        float16, bfloat16 or float32 [M, k].
    weight : Exl3Weight
        On the same GPU; see `operands.rejects`.
    out_dtype : dtype
        float16, bfloat16 or float32: the fp32 result rounded once.

    Returns
    -------
    Tensor
        [M, n].

    Raises
    ------
    ValueError
        If an operand is not as stated.
    RuntimeError
        If the kernels cannot be built, CUDA reports an error, or the first call of its kind is inside a graph capture.
    """
    x_Mk = prepare_rows(x_Mk, weight, out_dtype)
    _require_primed("prefill-reconstruct", x_Mk, weight, out_dtype)
    y_Mn = torch.empty(x_Mk.shape[0], weight.out_features, dtype=out_dtype, device=x_Mk.device)
    with torch.cuda.device(x_Mk.device), LOCK:
        rotated_Mk = _rotate(x_Mk, weight)
        for columns, inner_nk in weight_slices(weight, "inner", after_rotation=True):
            sums = torch.mm(rotated_Mk, inner_nk.t(), out_dtype=torch.float32)
            _finish(sums, weight, columns, y_Mn[:, columns])
    return y_Mn


def prefill_half(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear with the transform of the weight's wider side in the weight, and the other outside it.

    With no more inputs than outputs RN(RN16(RN16(x suh) H) RN16(W H svh) + bias), else
    RN(((x RN16(suh H W)) H) svh + bias): transforms and sums in fp32, one rounding to float16 per weight. Rows that are
    not float16 are rounded to it where they are not rotated. Parameters, result and errors as in `prefill_reconstruct`.
    """
    x_Mk = prepare_rows(x_Mk, weight, out_dtype)
    _require_primed("prefill-half", x_Mk, weight, out_dtype)
    y_Mn = torch.empty(x_Mk.shape[0], weight.out_features, dtype=out_dtype, device=x_Mk.device)
    with torch.cuda.device(x_Mk.device), _full_precision_reduction(), LOCK:
        if rotates_rows(weight):
            rotated_Mk = _rotate(x_Mk, weight)
            for columns, weight_nk in weight_slices(weight, "outputs", after_rotation=True):
                _multiply(rotated_Mk, weight_nk, weight.bias, columns, y_Mn)
        else:
            x_Mk = x_Mk.half()
            for columns, weight_nk in weight_slices(weight, "inputs"):
                sums = torch.mm(x_Mk, weight_nk.t(), out_dtype=torch.float32)
                _finish(sums, weight, columns, y_Mn[:, columns])
    return y_Mn


def rotates_rows(weight: Exl3Weight) -> bool:
    """Return whether `prefill_half` rotates the rows rather than the sums: whichever is narrower."""
    return weight.in_features <= weight.out_features


def prefill_fused(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear as RN(x RN16(suh H W H svh) + bias), the weight's transforms and the sums in fp32.

    Rows that are not float16 are rounded to it: an activation beyond 65504 becomes infinite. Parameters, result and
    errors as in `prefill_reconstruct`.
    """
    x_Mk = prepare_rows(x_Mk, weight, out_dtype)
    _require_primed("prefill-fused", x_Mk, weight, out_dtype)
    x_Mk = x_Mk.half()
    y_Mn = torch.empty(x_Mk.shape[0], weight.out_features, dtype=out_dtype, device=x_Mk.device)
    with torch.cuda.device(x_Mk.device), _full_precision_reduction():
        for columns, weight_nk in weight_slices(weight, "original"):
            _multiply(x_Mk, weight_nk, weight.bias, columns, y_Mn)
    return y_Mn


def prefill_fp8(
    x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype, *, scaling: Literal["rows", "tensor"] = "rows"
) -> torch.Tensor:
    """Apply one linear with E4M3 weights and rows: about 3 % relative error per product, for comparison only.

    Weights are scaled by max |suh| and by |svh| (`rows`) or max |svh| (`tensor`). No weight can then saturate: an
    element of H W H is at most the norm of its 128 x 128 block, 128 times the codebook's largest value of 3.46, which
    is below 448; and E4M3 keeps its precision that far below its largest value. Rows are scaled by their own largest
    magnitude, or by that of the whole input.

    The product is rounded to bfloat16 and then to `out_dtype`: `torch._scaled_mm` returns wrong float16 results for
    row-wise scales. Parameters, result and errors as in `prefill_reconstruct`.
    """
    x_Mk = prepare_rows(x_Mk, weight, out_dtype)
    _require_primed(f"fp8 prefill ({scaling})", x_Mk, weight, out_dtype)
    rows, k, device = x_Mk.shape[0], weight.in_features, x_Mk.device
    library = load_library(device)
    y_Mn = torch.empty(rows, weight.out_features, dtype=out_dtype, device=device)
    x8_Mk = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=device)
    with torch.cuda.device(device):
        largest_suh, svh = weight.suh.abs().amax().float(), weight.svh
        if scaling == "rows":
            x_scale, given = torch.empty(rows, 1, device=device), None
            weight_scale, svh = (svh.float().abs() * largest_suh)[None, :], svh.sign()
            norm = torch.stack((1 / largest_suh, torch.ones_like(largest_suh)))
        else:
            x_scale = given = x_Mk.abs().amax().float() / LARGEST_E4M3
            largest_svh = svh.abs().amax().float()
            weight_scale = largest_suh * largest_svh
            norm = torch.stack((1 / largest_suh, 1 / largest_svh))
        library.call(
            "exl3_quantize", x_Mk.data_ptr(), DTYPES[x_Mk.dtype], x_Mk.stride(0),
            None if given is None else given.data_ptr(), x_scale.data_ptr(), x8_Mk.data_ptr(), rows, k,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        for columns, weight_nk in weight_slices(weight, "e4m3", svh=svh, norm=norm):
            scale = weight_scale[:, columns] if scaling == "rows" else weight_scale
            product = torch._scaled_mm(
                x8_Mk, weight_nk.t(), scale_a=x_scale, scale_b=scale.contiguous(), out_dtype=torch.bfloat16
            )
            y_Mn[:, columns] = product if weight.bias is None else product.float() + weight.bias[columns].float()
    return y_Mn


def weight_slices(
    weight: Exl3Weight,
    kind: Kind,
    *,
    svh: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    after_rotation: bool = False,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (columns, transposed weight [columns, k]) through one workspace: each slice overwrites the one before.

    Parameters
    ----------
    weight : Exl3Weight
        On the current CUDA device.
    kind : str
        `inner`: float16 codebook values, bit-exact. `original`: RN16 of diag(suh) H W H diag(svh). `e4m3`: the same
        product times norm[0] norm[1], in E4M3.
    svh : Tensor or None
        float16 [n], in place of the weight's own.
    norm : Tensor or None
        float32 [2], for `e4m3`.
    after_rotation : bool
        The launch before is the rotation of the rows: the first slice starts beside it and ends after it.
    """
    library, device = load_library(weight.trellis.device), weight.trellis.device
    k, n, dtype = weight.in_features, weight.out_features, torch.float8_e4m3fn if kind == "e4m3" else torch.float16
    width = slice_width(k, n, dtype.itemsize)
    svh = weight.svh if svh is None else svh
    with LOCK:
        buffer = workspace(device, k * width * dtype.itemsize).view(dtype)
        for first in range(0, n, width):
            columns = slice(first, min(first + width, n))
            out_nk = buffer[: (columns.stop - first) * k].view(-1, k)
            library.call(
                "exl3_reconstruct", weight.trellis.data_ptr(), weight.suh.data_ptr(), svh.data_ptr(),
                None if norm is None else norm.data_ptr(), out_nk.data_ptr(), KINDS.index(kind), first, len(out_nk), k,
                n, weight.bits, CODEBOOKS.index(weight.codebook), after_rotation and OVERLAP and first == 0,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            yield columns, out_nk


def _rotate(x_Mk: torch.Tensor, weight: Exl3Weight) -> torch.Tensor:
    """Return RN16(RN16(x suh) H)."""
    rotated_Mk = torch.empty(x_Mk.shape, dtype=torch.float16, device=x_Mk.device)
    load_library(x_Mk.device).call(
        "exl3_rotate_rows", x_Mk.data_ptr(), DTYPES[x_Mk.dtype], x_Mk.stride(0), weight.suh.data_ptr(),
        rotated_Mk.data_ptr(), *x_Mk.shape, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    return rotated_Mk


def _finish(sums: torch.Tensor, weight: Exl3Weight, columns: slice, y: torch.Tensor) -> None:
    """Write RN((sums H) svh + bias) into `y`, the columns of a slice."""
    bias = bias_operand(None if weight.bias is None else weight.bias[columns])
    load_library(sums.device).call(
        "exl3_unrotate", sums.data_ptr(), weight.svh[columns].data_ptr(), *bias, y.data_ptr(), DTYPES[y.dtype],
        y.stride(0), *y.shape, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip


def _multiply(
    x_Mk: torch.Tensor, weight_nk: torch.Tensor, bias: torch.Tensor | None, columns: slice, y_Mn: torch.Tensor
) -> None:
    """Write RN(x w + bias) into the columns of a slice, by cuBLAS itself where it can round the sums."""
    y = y_Mn[:, columns]
    if y.dtype == torch.float16 and bias is None:
        torch.mm(x_Mk, weight_nk.t(), out=y)
        return
    sums = torch.mm(x_Mk, weight_nk.t(), out_dtype=torch.float32)
    y.copy_(sums if bias is None else sums.add_(bias[columns]))


def _require_primed(what: str, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> None:
    bias = None if weight.bias is None else weight.bias.dtype
    key = (x.device, x.dtype, out_dtype, bias, weight.bits, weight.codebook)
    require_primed(f"{weight.bits}-bit {weight.codebook} {what}", *key)


@contextmanager
def _full_precision_reduction() -> Iterator[None]:
    """Keep cuBLAS from adding split sums of a float16 product in float16, which torch allows by default."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = allowed

"""Gathering rows of an int8 table: one opaque op, on a GPU one kernel that reads codes and writes finished rows.

Both implementations compute RN(RN32(code * scale)) and agree bit for bit, so which one serves is no part of a result.
"""

from __future__ import annotations

import torch

from exl3_kernels.cuda import load_library, unavailable
from exl3_kernels.operands import DTYPES, require_primed

ID_TYPES = (torch.int32, torch.int64)


@torch.library.custom_op("exl3::gather_int8", mutates_args=())
def gather_int8(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Gather and dequantize rows.

    Parameters
    ----------
    codes : Tensor
        int8 [V, H].
    scales : Tensor
        float32 [V].
    ids : Tensor
        Integers [...], -V to V - 1 (negative ones count from the end).
    out_dtype : dtype
        Of the result.

    Returns
    -------
    Tensor
        [..., H]: code * scale in float32, rounded once to `out_dtype`.

    Raises
    ------
    IndexError, RuntimeError
        If an id is outside the table; on a GPU as a failed launch, which ends the process's use of that GPU.
    RuntimeError
        If the kernels cannot be built, or the first call of its kind is inside a graph capture.
    """
    if rejects(codes, scales, ids, out_dtype):
        return gather_plain(codes, scales, ids, out_dtype)
    return gather_cuda(codes, scales, ids, out_dtype)


@gather_int8.register_fake
def _gather_int8_fake(
    codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty((*ids.shape, codes.shape[1]), dtype=out_dtype)


def rejects(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> str:
    """Return why the kernel cannot serve a gather, empty if it can."""
    if not codes.is_cuda:
        return f"needs a CUDA device, the table is on {codes.device.type}"
    if not (scales.device == ids.device == codes.device):
        return f"ids are on {ids.device}, scales on {scales.device}, codes on {codes.device}"
    if ids.dtype not in ID_TYPES or out_dtype not in DTYPES:
        return f"ids are {ids.dtype} and the output is {out_dtype}"
    if not (codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 4 == 0):
        return "codes or scales are not contiguous, or codes not aligned to 4 bytes"
    return unavailable(codes.device)


def gather_plain(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Gather and dequantize rows in torch, see `gather_int8`."""
    return (codes[ids].float() * scales[ids].unsqueeze(-1)).to(out_dtype)


def gather_cuda(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Gather and dequantize rows by the kernel, for operands that `rejects` lets pass; see `gather_int8`."""
    device, (table_rows, width) = codes.device, codes.shape
    out = torch.empty(*ids.shape, width, dtype=out_dtype, device=device)
    if not out.numel():
        return out
    require_primed("int8 gather", device, ids.dtype, out_dtype, width % 4 == 0)
    ids = ids.contiguous()
    library = load_library(device)
    with torch.cuda.device(device):
        library.call(
            "exl3_gather", codes.data_ptr(), scales.data_ptr(), ids.data_ptr(), ids.dtype == torch.int64,
            out.data_ptr(), DTYPES[out_dtype], ids.numel(), table_rows, width, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    return out

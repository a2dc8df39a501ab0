"""Two routes in Triton, for GPUs on a machine without nvcc, and for a CPU under Triton's interpreter.

Both compute y = RN(((RN16(RN16(x suh) H) W) H) svh + bias) with exact weights, sums and output transform in fp32.
`triton_decode` decodes weights inside the product, for few rows; `triton_reconstruct` writes slices of the inner matrix
into the workspace and multiplies with torch. How the decode's sums are cut depends on the weight's shape and the GPU
alone, and programs of 16 and of 32 rows sum in the same order: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from exl3_kernels.cuda import OLDEST, architecture
from exl3_kernels.decode import multiprocessors
from exl3_kernels.operands import on_device, prepare_rows, rejects_operands, require_primed
from exl3_kernels.weight import BLOCK, CODEBOOKS, TILE, Exl3Weight
from exl3_kernels.workspace import LOCK, slice_width, workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What one program does.

    Parameters
    ----------
    rows : int
        Of x that one decoding of the weights serves.
    down, across : int
        Tiles that are decoded at once.
    warps : int
        Triton's.
    programs : int
        Wanted for a whole device by a product of one group of rows; k is cut into segments until there are as many.
    """

    rows: int
    down: int
    across: int
    warps: int
    programs: int


NATURAL_RUN = 2
DECODE_ROWS = (16, 32)
PROGRAMS_PER_MULTIPROCESSOR = 8
INTERPRETED = Tiling(rows=64, down=8, across=8, warps=1, programs=2)


def triton_decode(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear to any number of rows, decoding the weights once for 16 of them, or for 32 if there are more.

    Parameters and result as in `decode.decode_gemm`, any M, on a device that `rejects_triton` takes.

    Raises
    ------
    ValueError
        If an operand is not as stated.
    RuntimeError
        If Triton cannot compile, or the first call of its kind is inside a graph capture.
    """
    x_Mk = _prepare("triton-decode", x_Mk, weight, out_dtype)
    rows, k, n, tiling = len(x_Mk), weight.in_features, weight.out_features, _tiling(x_Mk.device, len(x_Mk))
    parts = n // (TILE * tiling.across)
    segments = min(k // (TILE * tiling.down), -(-tiling.programs // parts))
    with on_device(x_Mk.device):
        rotated_Mk = _rotate(x_Mk, weight, _kernels().OPERAND_RUN)
        partial_SMn = torch.empty(segments, rows, n, dtype=torch.float32, device=x_Mk.device)
        groups = -(-rows // tiling.rows)
        _kernels().multiply[(parts * segments * groups,)](
            weight.trellis.view(torch.int32), rotated_Mk, partial_SMn, rows, k, n, segments, ROWS=tiling.rows,
            WARPS=tiling.warps, RUN=_kernels().OPERAND_RUN, **_decoding(weight, tiling),
        )  # fmt: skip
        y_Mn = torch.empty(rows, n, dtype=out_dtype, device=x_Mk.device)
        _fold(partial_SMn, weight.svh, weight.bias, y_Mn)
    return y_Mn


def triton_reconstruct(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear to any number of rows through slices of its inner matrix, multiplied by torch with fp32 sums.

    Parameters, result and errors as in `triton_decode`.
    """
    x_Mk = _prepare("triton-reconstruct", x_Mk, weight, out_dtype)
    y_Mn = torch.empty(len(x_Mk), weight.out_features, dtype=out_dtype, device=x_Mk.device)
    with on_device(x_Mk.device), LOCK:
        rotated_Mk = _rotate(x_Mk, weight, NATURAL_RUN)
        for columns, inner_kn in inner_slices(weight):
            bias = None if weight.bias is None else weight.bias[columns]
            _fold(_product(rotated_Mk, inner_kn)[None], weight.svh[columns], bias, y_Mn[:, columns])
    return y_Mn


def inner_slices(weight: Exl3Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (columns, inner matrix, float16 [k, columns]) through one workspace: each slice overwrites the last."""
    k, n, device = weight.in_features, weight.out_features, weight.trellis.device
    width, tiling = slice_width(k, n, torch.float16.itemsize), _tiling(device)
    with LOCK:
        buffer = workspace(device, k * width * torch.float16.itemsize).view(torch.float16)
        for first in range(0, n, width):
            columns = slice(first, min(first + width, n))
            inner_kn = buffer[: k * (columns.stop - first)].view(k, -1)
            _kernels().reconstruct[(inner_kn.numel() // (TILE * TILE * tiling.down * tiling.across),)](
                weight.trellis.view(torch.int32), inner_kn, n, first, inner_kn.shape[1], **_decoding(weight, tiling)
            )
            yield columns, inner_kn


def rejects_triton(weight: Exl3Weight, device_type: str) -> str:
    """Return why the Triton kernels cannot serve this weight, empty if they can."""
    if device_type not in ("cpu", "cuda"):
        return f"needs a CUDA device, the weight is on {device_type}"
    if not installed():
        return "Triton is not installed, and without nvcc no other kernel can be compiled"
    if device_type == "cpu" and not interpreted():
        return "needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter on a CPU"
    if reason := rejects_operands(weight):
        return reason
    device = weight.trellis.device
    if weight.trellis.is_cuda and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is {architecture(device)}, the kernels need sm_80 or later"
    return ""


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Return whether Triton, if it is there, was told to interpret kernels (TRITON_INTERPRET=1)."""
    if not installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=1)
def installed() -> bool:
    """Return whether Triton can be imported."""
    return find_spec("triton") is not None


def _kernels() -> Any:
    """Import the kernels at their first use: Triton takes a while, and most processes never need it."""
    from exl3_kernels import triton_kernels

    return triton_kernels


def _tiling(device: torch.device, rows: int = DECODE_ROWS[0]) -> Tiling:
    if device.type == "cpu":
        return INTERPRETED
    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
    return Tiling(rows=DECODE_ROWS[rows > DECODE_ROWS[0]], down=4, across=4, warps=4, programs=programs)


def _decoding(weight: Exl3Weight, tiling: Tiling) -> dict[str, int]:
    return {
        "BITS": weight.bits,
        "CODEBOOK": CODEBOOKS.index(weight.codebook),
        "DOWN": tiling.down,
        "ACROSS": tiling.across,
        "num_warps": tiling.warps,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def _prepare(route: str, x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    x_Mk = prepare_rows(x_Mk, weight, out_dtype, rejects_triton)
    if x_Mk.is_cuda:
        bias = None if weight.bias is None else weight.bias.dtype
        key = (x_Mk.device, x_Mk.dtype, out_dtype, bias, weight.bits, weight.codebook)
        require_primed(f"{weight.bits}-bit {weight.codebook} {route}", *key)
    return x_Mk


def _rotate(x_Mk: torch.Tensor, weight: Exl3Weight, run: int) -> torch.Tensor:
    """Return RN16(RN16(x suh) H), its columns in the order that the kernels' RUN means."""
    (rows, k), tiling = x_Mk.shape, _tiling(x_Mk.device)
    rotated_Mk = torch.empty(rows, k, dtype=torch.float16, device=x_Mk.device)
    _kernels().rotate[(-(-rows // tiling.rows) * (k // BLOCK),)](
        x_Mk, x_Mk.stride(0), weight.suh, rotated_Mk, rows, k, ROWS=tiling.rows, RUN=run, num_warps=tiling.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return rotated_Mk


def _fold(partial_SMn: torch.Tensor, svh: torch.Tensor, bias: torch.Tensor | None, y_Mn: torch.Tensor) -> None:
    """Write RN((sums over segments H) svh + bias) into `y_Mn`; no sum or product is fused with another."""
    (segments, rows, n), tiling = partial_SMn.shape, _tiling(y_Mn.device)
    # Where a GPU rounds to bfloat16, Triton's interpreter cuts: there torch rounds.
    cut = y_Mn.dtype == torch.bfloat16 and not y_Mn.is_cuda
    out_Mn = torch.empty_like(y_Mn, dtype=torch.float32) if cut else y_Mn
    _kernels().fold[(-(-rows // tiling.rows) * (n // BLOCK),)](
        partial_SMn, svh, svh if bias is None else bias, out_Mn, out_Mn.stride(0), rows, n, segments,
        HAS_BIAS=bias is not None, ROWS=tiling.rows, num_warps=tiling.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if cut:
        y_Mn.copy_(out_Mn)


def _product(rotated_Mk: torch.Tensor, inner_kn: torch.Tensor) -> torch.Tensor:
    if rotated_Mk.is_cuda:
        return torch.mm(rotated_Mk, inner_kn, out_dtype=torch.float32)
    return rotated_Mk.float() @ inner_kn.float()

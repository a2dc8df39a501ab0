"""The decode GEMM on NVIDIA GPUs: y = RN(((RN16(RN16(x suh) H) W) H) svh + bias), sums and output transform in fp32.

Three launches: rotate the rows, multiply by the inner matrix decoded on the fly, fold the segments and rotate the
result. Up to 128 rows share one decoding of the weights. How the product is cut into segments depends on the weight's
shape and the GPU alone (`csrc/plan.h`), never on the rows, so a row's bits do not depend on the rows beside it.

The wide variant, for Hopper, shares one decoding among up to 256 rows and sums with another tensor-core instruction;
two thread blocks of a cluster share the rows that they multiply (`csrc/wide.cu`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from exl3_kernels.cuda import Library, load_library
from exl3_kernels.operands import DTYPES, bias_operand, prepare_rows, require_primed
from exl3_kernels.weight import BLOCK, CODEBOOKS, Exl3Weight

GROUP_ROWS = 128
DECODE_ROWS = 16
WIDE_ROWS = 256
WIDE_ROW_GROUPS = (8, 16, 24, 32)
HOPPER = (9, 0)
BLOCKS_PER_MULTIPROCESSOR = 2
OVERLAP = 1  # launches start before their predecessor ends where the GPU can (sm_90 and later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One of the two kernels.

    Parameters
    ----------
    width : int
        Neighbouring column blocks that a team of as many thread blocks multiplies.
    teams : callable
        `(units, multiprocessors) -> teams`, which fixes the segments: no function of the rows.
    row_groups : callable
        Rows to the groups of eight that the kernel is specialised for.
    """

    width: int
    teams: Callable[[int, int], int]
    row_groups: Callable[[int], int]


def decode_gemm(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear to up to 16 rows.

    Parameters
    ----------
    x_Mk : Tensor
        float16, bfloat16 or float32 [M, k], 1 <= M <= 16.
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
    if x_Mk.shape[0] > DECODE_ROWS:
        raise ValueError(f"{x_Mk.shape[0]} rows, the decode GEMM takes at most {DECODE_ROWS}")
    return shared_decode_gemm(x_Mk, weight, out_dtype)


def shared_decode_gemm(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear to any number of rows, 128 at a time, each group decoding the weights once.

    Every row has the bits that `decode_gemm` gives it alone. Parameters, result and errors as there.
    """
    return _apply(x_Mk, weight, out_dtype, GROUP_ROWS, DECODE)


def wide_decode_gemm(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply one linear to any number of rows, in equal groups of up to 256, each decoding the weights once.

    Needs an sm_90 GPU. The arithmetic is that of `decode_gemm`, its fp32 sums in another order. Parameters, result and
    errors as there.
    """
    if x_Mk.is_cuda and (reason := rejects_wide(x_Mk.device)):
        raise ValueError(reason)
    parts = -(-max(1, x_Mk.shape[0]) // WIDE_ROWS)
    group_rows = -(-max(1, x_Mk.shape[0]) // parts)
    return _apply(x_Mk, weight, out_dtype, group_rows, WIDE)


def rejects_wide(device: torch.device) -> str:
    """Return why a GPU cannot run the wide variant, empty if it can."""
    capability = torch.cuda.get_device_capability(device)
    return "" if capability == HOPPER else f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (sm_90)"


def _apply(x_Mk: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype, group_rows: int, gemm: Gemm) -> torch.Tensor:
    x_Mk = prepare_rows(x_Mk, weight, out_dtype)
    device = x_Mk.device
    bias = None if weight.bias is None else weight.bias.dtype
    y_Mn = torch.empty(x_Mk.shape[0], weight.out_features, dtype=out_dtype, device=device)
    pairs = list(zip(x_Mk.split(group_rows), y_Mn.split(group_rows), strict=True))
    for x, _ in (pairs[0], pairs[-1]):
        key = (device, x.dtype, out_dtype, bias, gemm.width, gemm.row_groups(len(x)), weight.bits, weight.codebook)
        require_primed(f"{weight.bits}-bit {weight.codebook} decode of {len(x)} rows", *key)
    library = load_library(device)
    with torch.cuda.device(device):
        for x, y in pairs:
            _launch(library, x, weight, y, gemm)
    return y_Mn


def _launch(library: Library, x: torch.Tensor, weight: Exl3Weight, y: torch.Tensor, gemm: Gemm) -> None:
    rows, k, n, groups = x.shape[0], weight.in_features, weight.out_features, gemm.row_groups(x.shape[0])
    parts = -(-n // (gemm.width * BLOCK))
    teams = gemm.teams(parts * (k // BLOCK), multiprocessors(x.device))
    # The caching allocator hands a stream its own block back: nothing is allocated twice, two streams never share one,
    # and inside a capture the block belongs to the graph.
    rotated = torch.empty(8 * groups * k, dtype=torch.float16, device=x.device)
    partial = torch.empty((teams + parts) * gemm.width * rows * BLOCK, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream().cuda_stream
    library.call(
        "exl3_rotate", x.data_ptr(), DTYPES[x.dtype], x.stride(0), weight.suh.data_ptr(), rotated.data_ptr(), rows,
        groups, gemm.width > 1, k, stream,
    )  # fmt: skip
    library.call(
        "exl3_gemm", weight.trellis.data_ptr(), rotated.data_ptr(), partial.data_ptr(), rows, groups, k, n, weight.bits,
        CODEBOOKS.index(weight.codebook), teams, gemm.width, OVERLAP, stream,
    )  # fmt: skip
    library.call(
        "exl3_fold", partial.data_ptr(), weight.svh.data_ptr(), *bias_operand(weight.bias), y.data_ptr(),
        DTYPES[y.dtype], y.stride(0), rows, k, n, teams, gemm.width, OVERLAP, stream,
    )  # fmt: skip


def row_groups(rows: int) -> int:
    """Return how many groups of eight rows the kernel is specialised for: a power of two, for 1 to 128 rows."""
    return 1 << ((rows - 1) // 8).bit_length()


def wide_row_groups(rows: int) -> int:
    """Return how many groups of eight rows the wide kernel is specialised for, for 1 to 256 rows."""
    return next(groups for groups in WIDE_ROW_GROUPS if rows <= 8 * groups)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return the number of the GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


DECODE = Gemm(width=1, teams=lambda units, count: min(units, BLOCKS_PER_MULTIPROCESSOR * count), row_groups=row_groups)
WIDE = Gemm(width=2, teams=lambda units, count: min(units, count // 2), row_groups=wide_row_groups)

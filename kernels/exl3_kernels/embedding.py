"""The int8 input-embedding overlay: per-row symmetric int8, dequantized as rows are gathered."""

from __future__ import annotations

import torch
from torch import nn

from exl3_kernels.gather import gather_int8

CHUNK_ROWS = 4096
LEVELS = 127


def quantize_rows(table_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an embedding table row by row: scale = amax / 127, codes = round(row / scale).

    Works in chunks of 4,096 rows, so peak extra memory stays under two chunks. A row of zeros gets
    scale 0 and codes 0.

    Parameters
    ----------
    table_VH : Tensor
        [V, H] float.

    Returns
    -------
    codes : Tensor
        int8 [V, H].
    scales : Tensor
        float32 [V].

    Raises
    ------
    ValueError
        If a row holds a non-finite value; the message names the first rows.
    """
    num_rows, width = table_VH.shape
    codes = torch.empty((num_rows, width), dtype=torch.int8, device=table_VH.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=table_VH.device)
    scratch = torch.empty((min(CHUNK_ROWS, num_rows), width), dtype=torch.float32, device=table_VH.device)
    broken: list[int] = []
    for start in range(0, num_rows, CHUNK_ROWS):
        chunk = scratch[: min(CHUNK_ROWS, num_rows - start)].copy_(table_VH[start : start + CHUNK_ROWS])
        amax = torch.linalg.vector_norm(chunk, ord=float("inf"), dim=1)
        broken += (start + torch.nonzero(~torch.isfinite(amax)).flatten()).tolist()
        scale = amax / LEVELS
        chunk.div_(torch.where(scale > 0, scale, 1.0)[:, None]).round_().clamp_(-LEVELS, LEVELS)
        codes[start : start + CHUNK_ROWS] = chunk
        scales[start : start + CHUNK_ROWS] = scale
    if broken:
        raise ValueError(f"{len(broken)} embedding rows hold non-finite values, first at rows {broken[:5]}")
    return codes, scales


class Int8Embedding(nn.Module):
    """An input embedding stored as int8 rows and one float32 scale per row.

    Parameters
    ----------
    table_VH : Tensor
        [V, H] float, the checkpoint's table; not kept.
    out_dtype : dtype
        Of the gathered rows: round(code * scale) to this dtype, one rounding.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, table_VH: torch.Tensor, *, out_dtype: torch.dtype) -> None:
        super().__init__()
        codes, scales = quantize_rows(table_VH)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.out_dtype = out_dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + 4 * self.scales.numel()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Gather and dequantize rows: int [...] -> [..., H]."""
        return gather_int8(self.codes, self.scales, ids, self.out_dtype)

"""The three codebooks: a 16-bit trellis state to one float16 weight value."""

from __future__ import annotations

from functools import lru_cache

import torch

from exl3_kernels.weight import CODEBOOKS, MULTIPLIERS

STATES = 1 << 16
WORD = 0xFFFFFFFF
DEFAULT_OFFSET = 64248484
HALVES_KEPT = 0x8FFF8FFF
HALVES_FLIPPED = 0x3B603B60


def codebook_values(
    codebook: str, multiplier: int | None = None, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the value of every state.

    Parameters
    ----------
    codebook : str
        `3inst`, `mcg` or `mul1`.
    multiplier : int or None
        Unsigned 32-bit multiplier as stored in the file; None takes the codebook's usual one.
    device : torch.device or str
        Where the table lives.

    Returns
    -------
    Tensor
        float16 [65536]. The table is shared between callers: read it, never write to it.

    Raises
    ------
    ValueError
        If the codebook is unknown or the multiplier does not fit in 32 unsigned bits.
    """
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook {codebook!r} is not one of {', '.join(CODEBOOKS)}")
    multiplier = MULTIPLIERS[codebook] if multiplier is None else multiplier
    if not 0 <= multiplier <= WORD:
        raise ValueError(f"codebook multiplier {multiplier} is not an unsigned 32-bit number")
    return _table(codebook, multiplier, torch.device(device))


@lru_cache(maxsize=32)
def _table(codebook: str, multiplier: int, device: torch.device) -> torch.Tensor:
    states = torch.arange(STATES, dtype=torch.int64, device=device)
    # 65535 * (2^32 - 1) + offset < 2^48, so int64 holds the product before it is reduced modulo 2^32.
    hashed = states * multiplier
    if codebook == "mul1":
        return _sum_of_bytes(hashed & WORD)
    offset = DEFAULT_OFFSET if codebook == "3inst" else 0
    return _sum_of_halves((hashed + offset) & WORD)


def _sum_of_halves(hashed: torch.Tensor) -> torch.Tensor:
    """Add the two float16 numbers that the masked 32-bit word holds; the sum is exact before its one rounding."""
    word = (hashed & HALVES_KEPT) ^ HALVES_FLIPPED
    return (_half(word & 0xFFFF).float() + _half(word >> 16).float()).half()


def _sum_of_bytes(hashed: torch.Tensor) -> torch.Tensor:
    """Map the sum of the word's four bytes affinely: RN16((1774 (1024 + sum) - 2721792) / 2^18)."""
    total = (hashed & 0xFF) + ((hashed >> 8) & 0xFF) + ((hashed >> 16) & 0xFF) + (hashed >> 24)
    return ((1774 * (1024 + total) - 2721792).float() / (1 << 18)).half()


def _half(bits: torch.Tensor) -> torch.Tensor:
    """Reinterpret 16-bit patterns held in int64 as float16."""
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.float16)

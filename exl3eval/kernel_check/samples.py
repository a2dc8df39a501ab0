"""Weights and rows to check with: seeded, made on the CPU so that they are the same everywhere."""

from __future__ import annotations

import torch

from exl3_kernels.trellis import pack_states
from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE, Exl3Weight

LARGEST_ROW = 3e4


def make_weight(
    k: int,
    n: int,
    bits: int,
    codebook: str,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    bias: torch.dtype | None = None,
    unit_scales: bool = False,
) -> Exl3Weight:
    """Return a weight of random words; its scales are random too, or all 1."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 15), 1 << 15, (k // TILE, n // TILE, TILE * bits), generator=g, dtype=torch.int16)

    def signed(size: int) -> torch.Tensor:
        return (torch.randint(0, 2, (size,), generator=g) * 2 - 1) * (0.5 + torch.rand(size, generator=g))

    suh, svh = (torch.ones(k), torch.ones(n)) if unit_scales else (signed(k) * k**-0.5, signed(n))
    added = None if bias is None else torch.randn(n, generator=g).to(bias).to(device)
    return Exl3Weight(
        trellis=words.to(device),
        suh=suh.half().to(device),
        svh=svh.half().to(device),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
        bias=added,
    )


def plain_weight(trellis: torch.Tensor, codebook: str, device: torch.device) -> Exl3Weight:
    """Return a weight with the given words and scales of 1."""
    k, n = trellis.shape[0] * TILE, trellis.shape[1] * TILE
    return Exl3Weight(
        trellis=trellis.to(device),
        suh=torch.ones(k, dtype=torch.float16, device=device),
        svh=torch.ones(n, dtype=torch.float16, device=device),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
    )


def make_rows(rows: int, k: int, *, device: torch.device | str = "cpu", seed: int = 5) -> torch.Tensor:
    """Return float16 [rows, k], normal times a log-normal scale per row."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, k, generator=g) * torch.exp(torch.randn(rows, 1, generator=g))).half().to(device)


def wide_rows(rows: int, k: int, *, device: torch.device | str = "cpu", seed: int = 6) -> torch.Tensor:
    """Return float16 [rows, k] whose rows and channels have log-normal scales, up to 30,000."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.exp(2 * torch.randn(rows, 1, generator=g)) * torch.exp(2 * torch.randn(1, k, generator=g))
    return (torch.randn(rows, k, generator=g) * scales).clamp(-LARGEST_ROW, LARGEST_ROW).half().to(device)


def one_hot_rows(k: int, *, rotated: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return float16 [k, k]: row i is 1 at input i, or turns into a multiple of that under the input rotation."""
    if not rotated:
        return torch.eye(k, dtype=torch.float16, device=device)
    index = torch.arange(BLOCK)
    shared = index[:, None] & index
    parity = torch.stack([(shared >> bit) & 1 for bit in range(7)]).sum(0) % 2
    return torch.block_diag(*[(1 - 2 * parity).half()] * (k // BLOCK)).to(device)


def single_bit_words(bits: int) -> torch.Tensor:
    """Return the words of 256 x 256 K weights: every tile has one packed bit set, every bit of a tile in turn."""
    position = torch.arange(256 * bits)
    words = torch.zeros(256 * bits, TILE * bits, dtype=torch.int32)
    words[position, position // 16] = (1 << (position % 16)).to(torch.int32)
    return (words - ((words & 0x8000) << 1)).to(torch.int16).view(TILE, TILE * bits, TILE * bits)


def every_state_words() -> torch.Tensor:
    """Return the words of 256 x 256 weights at K = 8 in which each of the 65,536 states occurs once.

    A state at K = 8 is a pair of neighbouring symbols, a tile a closed walk of 256 of them. A tile that steps by an
    odd d visits all pairs (a, a + d). A tile that steps by 4 j and 4 j + 2 in turn visits those pairs of both steps
    whose first symbol has the parity of its start.
    """
    walks = [torch.arange(256) * step % 256 for step in range(1, 256, 2)]
    for first in range(0, 256, 4):
        steps = torch.tensor([first, first + 2]).repeat(128)
        walks += [(steps.cumsum(0) + start) % 256 for start in (0, 1)]
    symbols = torch.stack(walks)
    states = (symbols.roll(1, -1) << 8) | symbols
    return pack_states(states, 8).view(TILE, TILE, TILE * 8)

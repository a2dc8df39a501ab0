"""Packed codes to states and back, and the order of a tile's 256 positions.

A tile is one closed walk of 256 steps. Step p emits the weight at `TILE_ROWS[p], TILE_COLUMNS[p]` of a 16x16 block;
its state is the 16 stream bits that end with symbol p. The stream is read from little-endian 32-bit words, most
significant bit first.
"""

from __future__ import annotations

import torch

from exl3_kernels.weight import TILE

POSITIONS = TILE * TILE
STATE_BITS = 16

_position = torch.arange(POSITIONS, device="cpu")
_lane, _slot = _position >> 3, _position & 7
TILE_ROWS = 2 * (_lane & 3) + (_slot & 1) + 8 * ((_slot >> 1) & 1)
TILE_COLUMNS = (_lane >> 2) + 8 * (_slot >> 2)
_ROW_MAJOR = TILE_ROWS * TILE + TILE_COLUMNS
_STREAM_ORDER = torch.argsort(_ROW_MAJOR)


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """Read the 256 states of every tile.

    Parameters
    ----------
    trellis : Tensor
        int16 [..., 16 K].

    Returns
    -------
    Tensor
        int32 [..., 256], values 0 to 65535, in stream order.

    Raises
    ------
    ValueError
        If the dtype is not int16 or the last dimension is not 16 K with K from 1 to 8.
    """
    bits, extra = divmod(trellis.shape[-1], TILE)
    if trellis.dtype != torch.int16 or extra or not 1 <= bits <= 8:
        raise ValueError(f"trellis is {trellis.dtype} {tuple(trellis.shape)}, expected int16 [..., 16 K], K 1 to 8")
    halves = (trellis.to(torch.int64) & 0xFFFF).unflatten(-1, (8 * bits, 2))
    words = halves[..., 0] | (halves[..., 1] << 16)
    end = (torch.arange(POSITIONS, device=trellis.device) + 1) * bits
    last = (end - 1) // 32
    shift = 32 * (last + 1) - end
    window = ((words[..., last - 1] & 0xFFFF) << 32) | words[..., last]
    return ((window >> shift) & 0xFFFF).to(torch.int32)


def pack_states(states: torch.Tensor, bits: int) -> torch.Tensor:
    """Store the newest K bits of every state; the walk determines the rest.

    Parameters
    ----------
    states : Tensor
        Integers [..., 256] in stream order.
    bits : int
        K, 1 to 8.

    Returns
    -------
    Tensor
        int16 [..., 16 K].

    Raises
    ------
    ValueError
        If `bits` is out of range, the last dimension is not 256, or the states are not a closed walk, because the
        packed form could not give them back.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits per weight, expected 1 to 8")
    if states.shape[-1] != POSITIONS:
        raise ValueError(f"states are {tuple(states.shape)}, expected [..., {POSITIONS}]")
    states = states.to(torch.int64)
    kept = (1 << (STATE_BITS - bits)) - 1
    if bool(((states >> bits) != (states.roll(1, -1) & kept)).any()):
        raise ValueError(f"states are not a closed walk of the {bits}-bit trellis")
    symbol_bits = torch.arange(bits - 1, -1, -1, device=states.device)
    stream = ((states.unsqueeze(-1) >> symbol_bits) & 1).flatten(-2).unflatten(-1, (8 * bits, 32))
    words = (stream << torch.arange(31, -1, -1, device=states.device)).sum(-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2)
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16)


def tiles_to_matrix(tiles: torch.Tensor) -> torch.Tensor:
    """Lay tiles [k/16, n/16, 256] in stream order out as a matrix [k, n]."""
    rows, columns = tiles.shape[:2]
    blocks = tiles[..., _STREAM_ORDER.to(tiles.device)].view(rows, columns, TILE, TILE)
    return blocks.transpose(1, 2).reshape(rows * TILE, columns * TILE)


def matrix_to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """Cut a matrix [k, n] into tiles [k/16, n/16, 256] in stream order.

    Raises
    ------
    ValueError
        If a side is not a multiple of 16.
    """
    rows, columns = matrix.shape
    if rows % TILE or columns % TILE:
        raise ValueError(f"matrix is {rows} x {columns}, expected multiples of {TILE}")
    blocks = matrix.reshape(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2).flatten(-2)
    return blocks[..., _ROW_MAJOR.to(matrix.device)]


def expand_signs(words: torch.Tensor) -> torch.Tensor:
    """Expand legacy packed signs: channel 16 w + i is -1 where bit i of word w is set.

    Parameters
    ----------
    words : Tensor
        int16 [k/16].

    Returns
    -------
    Tensor
        float16 [k] of +1 and -1.

    Raises
    ------
    ValueError
        If the words are not a one-dimensional int16 tensor.
    """
    if words.dtype != torch.int16 or words.dim() != 1:
        raise ValueError(f"sign words are {words.dtype} {tuple(words.shape)}, expected int16 [k/16]")
    negative = (words.to(torch.int32).unsqueeze(-1) >> torch.arange(TILE, device=words.device)) & 1
    return (1 - 2 * negative).flatten().to(torch.float16)

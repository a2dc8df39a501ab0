"""Bring a weight into the shape the trellis encodes well: equal scales, Hadamard rotations, one global factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.encode import encode_tiles
from exl3_kernels.hadamard import hadamard_128
from exl3_kernels.trellis import matrix_to_tiles

TARGET_RMS = 1.24371088
COARSE_SCALES = tuple(0.1 + 0.2 * step for step in range(10))
FINE_STEP = 0.075
DIAGONAL_WIDTH = 3


def regularise(
    weight: torch.Tensor, *, balance_columns: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split W [k, n] into V, su and sv with W = D(su) Hd V Hd D(sv) and V of RMS 1.24371088.

    Parameters
    ----------
    weight : Tensor
        float32 [k, n], sides multiples of 128.
    balance_columns : bool
        Give every column its own scale; otherwise sv is a sign.
    seed : int
        Draws the signs, on the CPU, so that every device gets the same ones.

    Returns
    -------
    tuple of Tensor
        V float32 [k, n], su float32 [k], sv float32 [n]. All-zero rows of W have su = 0, all-zero columns sv = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    row_signs, column_signs = (
        (2 * torch.randint(2, (size,), generator=generator) - 1).to(weight) for size in weight.shape
    )
    column_rms = _rms(weight, 0)
    live = column_rms > 0
    relative = column_rms / column_rms[live].mean() if balance_columns and bool(live.any()) else live.double()
    sv = column_signs * relative.float()
    half_rotated = hadamard_128(_divide(weight, sv))
    su = row_signs * _rms(half_rotated, 1).float() / -TARGET_RMS
    regular = hadamard_128(_divide(half_rotated.T, su)).T.contiguous()
    return regular, su, sv


def search_global_scale(regular: torch.Tensor, bits: int, codebook: str) -> float:
    """Return the factor on V that minimises the mean squared error of plain encoding on sample tiles.

    A coarse grid 0.1, 0.3 .. 1.9 on every third sample, five points 0.075 apart around its best on all samples, then
    the vertex of the parabola through the best of these and its neighbours, at most half a step away.

    Returns
    -------
    float
        The scale; 1 for a zero matrix.
    """
    tiles = sample_tiles(matrix_to_tiles(regular))
    if not bool(tiles.any()):
        return 1.0
    coarse = _scale_errors(tiles[::3], COARSE_SCALES, bits, codebook)
    centre = COARSE_SCALES[coarse.index(min(coarse))]
    fine = [scale for step in range(-2, 3) if (scale := centre + step * FINE_STEP) > 0]
    errors = _scale_errors(tiles, fine, bits, codebook)
    best = errors.index(min(errors))
    if best in (0, len(fine) - 1):
        return fine[best]
    before, here, after = errors[best - 1 : best + 2]
    curvature = before - 2 * here + after
    shift = 0.5 * (before - after) / curvature if curvature > 0 else 0.0
    return fine[best] + FINE_STEP * min(0.5, max(-0.5, shift))


def sample_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Choose sample tiles [S, 256] from the grid [k/16, n/16, 256].

    A wrapped diagonal three tiles wide, which meets every tile row and column, plus the tiles of largest and smallest
    RMS, each a sixteenth of the diagonal's count and at least 8.
    """
    rows, columns = tiles.shape[:2]
    along = torch.arange(max(rows, columns), device=tiles.device)
    offsets = torch.arange(min(DIAGONAL_WIDTH, columns), device=tiles.device)
    diagonal = ((along % rows)[:, None] * columns + (along[:, None] + offsets) % columns).flatten()
    flat = tiles.flatten(0, 1)
    extremes = min(max(8, len(diagonal) // 16), len(flat))
    order = flat.square().sum(-1).argsort(stable=True)
    return flat[torch.cat((diagonal, order[:extremes], order[-extremes:])).unique()]


def _rms(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the float64 root mean square along `dim`; squares of float32 numbers neither overflow nor vanish."""
    return torch.linalg.vector_norm(matrix, dim=dim, dtype=torch.float64) / matrix.shape[dim] ** 0.5


def _divide(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide columns by their scales; columns of scale 0 hold zeros and stay so."""
    return matrix / torch.where(scales == 0, 1.0, scales)


def _scale_errors(tiles: torch.Tensor, scales: Sequence[float], bits: int, codebook: str) -> list[float]:
    """Return the mean squared error of encoding `scale * tiles`, measured after dividing the scale out again."""
    factors = torch.tensor(scales, dtype=torch.float32, device=tiles.device)[:, None, None]
    states = encode_tiles((factors * tiles).flatten(0, 1), bits, codebook)
    decoded = codebook_values(codebook, device=tiles.device)[states.long()].float().view(len(scales), *tiles.shape)
    return (decoded / factors - tiles).double().square().mean((1, 2)).tolist()

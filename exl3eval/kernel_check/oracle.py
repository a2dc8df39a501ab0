"""An independent decoder, written from the format and bit by bit, and how far a product may lie from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from exl3_kernels.hadamard import butterfly, hadamard_128, hadamard_half
from exl3_kernels.prefill import rotates_rows
from exl3_kernels.weight import BLOCK, MULTIPLIERS, Exl3Weight
from exl3eval.kernel_check.subject import Arithmetic

UNIT = 2.0**-24
UNIT_HALF = 2.0**-11
UNIT_E4M3 = 2.0**-4
# Rounding w is off by at most u |w| / m, where m in [1, 2) is its significand and u the unit above. With logarithms
# spread evenly over an octave 1 / m^2 averages 3 / (8 ln 2), and the mean square of a uniform error is a third of its
# largest: this is the root mean square of a rounding, in units of u |w|.
MEAN_ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 3)
ROUNDED_WEIGHTS = 6 * UNIT_HALF


@lru_cache(maxsize=8)
def codebook_table(codebook: str) -> np.ndarray:
    """Return float16 [65536], each value from the codebook's definition in float64, rounded once."""
    hashed = np.arange(1 << 16, dtype=np.uint64) * np.uint64(MULTIPLIERS[codebook])
    if codebook == "3inst":
        hashed += np.uint64(64248484)
    word = (hashed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    if codebook == "mul1":
        total = 1024.0 + word.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.float64)
        scale, shift = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        return (total * scale + shift).astype(np.float16)
    halves = ((word & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).astype(np.float64)
    return halves.reshape(-1, 2).sum(axis=1).astype(np.float16)


def decode_states(trellis: torch.Tensor) -> np.ndarray:
    """Read int16 [..., 16 K] one bit at a time: uint16 [..., 256], the states in stream order."""
    words = np.ascontiguousarray(trellis.cpu().numpy()).astype("<i2")
    return _decode_words(words.tobytes(), words.shape)


@lru_cache(maxsize=256)
def _decode_words(packed: bytes, shape: tuple[int, ...]) -> np.ndarray:
    words = np.frombuffer(packed, dtype="<u4").reshape(*shape[:-1], -1)
    bits = shape[-1] // 16
    stream = [((words[..., i // 32] >> np.uint32(31 - i % 32)) & np.uint32(1)) for i in range(256 * bits)]
    states = np.zeros((256, *shape[:-1]), dtype=np.uint32)
    for position in range(256):
        for i in range((position + 1) * bits - 16, (position + 1) * bits):
            states[position] = 2 * states[position] + stream[i % (256 * bits)]
    return np.moveaxis(states, 0, -1).astype(np.uint16)


def decode_weight(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """Return the inner matrix, float16 [k, n], on the CPU."""
    values = codebook_table(codebook)[decode_states(trellis)]
    down, across = values.shape[:2]
    inner = np.empty((down, 16, across, 16), dtype=np.float16)
    for position in range(256):
        lane, slot = divmod(position, 8)
        row = 2 * (lane % 4) + slot % 2 + 8 * (slot // 2 % 2)
        inner[:, row, :, lane // 4 + 8 * (slot // 4)] = values[:, :, position]
    return torch.from_numpy(inner.reshape(down * 16, across * 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact product of what a route multiplies, and how far a correct route may lie from it.

    Parameters
    ----------
    rows : Tensor
        float64 [M, k], the operand of the inner product: rotated rows rounded to float16, or the rows.
    y, bound : Tensor
        float64 [M, n].
    """

    rows: torch.Tensor
    y: torch.Tensor
    bound: torch.Tensor


def exact_product(x: torch.Tensor, weight: Exl3Weight, arithmetic: Arithmetic) -> Exact:
    """Multiply in float64 with weights decoded by the oracle.

    In the rotated basis a sum z of K products is allowed the `chain` of its products. The output transform turns that
    into its root mean square over the block times |svh|, plus 4 u |y| + 8 u rms(z) |svh| for the transform's own
    rounding. A dense product is allowed the chain of its own products and 4 u |y|. Weights rounded to float16 add
    6 x 2^-11 s, s^2 = sum (x w)^2. Half of that is what a correct route must keep: a sum of roundings, each uniform
    within h_i, exceeds t with a probability of at most 2 exp(-3 t^2 / (2 sum h_i^2)), and sum h_i^2 is about
    3 / (8 ln 2) x 2^-22 s^2 = 0.54 x 2^-22 s^2. So t = 3 x 2^-11 s is passed by 3 in 10^11 correct results.
    """
    inner = decode_weight(weight.trellis, weight.codebook).to(x.device).double()
    bias = 0.0 if weight.bias is None else weight.bias.double()
    per_product = chain(weight.in_features) + (ROUNDED_WEIGHTS if arithmetic in ("dense16", "half16") else 0.0)
    turns_rows = arithmetic == "rotated" or (arithmetic == "half16" and rotates_rows(weight))
    turns_sums = arithmetic == "rotated" or (arithmetic == "half16" and not rotates_rows(weight))
    rows = hadamard_half(x.half(), pre_scale=weight.suh).double() if turns_rows else x.double()
    matrix = inner if turns_rows else hadamard_128(inner.T).T * weight.suh.double()[:, None]
    matrix = matrix if turns_sums else hadamard_128(matrix) * weight.svh.double()
    z = rows @ matrix
    allowed = per_product * (rows.square() @ matrix.square()).sqrt()
    plain = z
    if turns_sums:
        scale = weight.svh.double()
        plain = hadamard_128(z) * scale
        allowed = (_block_rms(allowed) + 8 * UNIT * _block_rms(z)) * scale.abs()
    y = plain + bias
    return Exact(rows=rows, y=y, bound=allowed + 4 * UNIT * (plain.abs() + y.abs()))


def chain(products: int) -> float:
    """Return what an fp32 sum of K products is allowed, in units of sqrt(sum (x w)^2): u (8 sqrt(K) + K / 4).

    Roundings to nearest add up like a random walk; tensor cores truncate, which adds up linearly.
    """
    return UNIT * (8 * math.sqrt(products) + products / 4)


def dense_of(inner: torch.Tensor, weight: Exl3Weight) -> torch.Tensor:
    """Return diag(suh) H W H diag(svh) in float64 from an inner matrix in float64."""
    rotated = hadamard_128(hadamard_128(inner).T).T
    return rotated * weight.suh.double()[:, None] * weight.svh.double()


def without_one_stage(transformed: torch.Tensor) -> torch.Tensor:
    """Return what the transform gives when its last stage is left out: applying a stage twice doubles."""
    return butterfly(transformed, 64) / 2


def _block_rms(values: torch.Tensor) -> torch.Tensor:
    blocks = values.unflatten(-1, (-1, BLOCK))
    return blocks.square().mean(-1, keepdim=True).sqrt().expand_as(blocks).flatten(-2)

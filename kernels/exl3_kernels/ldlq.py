"""Quantize whole linears: regularise, search the global scale, encode with error feedback.

A weight W [k, n] is written as D(su) Hd V Hd D(sv) with Hd the block-128 Hadamard transform, D diagonal and V nearly
Gaussian with one RMS everywhere; V is what the trellis encodes. Strips of 16 input rows are encoded from the bottom
up, and each strip first absorbs the errors of the strips below it, weighted by the block LDL factor of the inputs'
second moments in V's basis (LDLQ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.encode import encode_tiles
from exl3_kernels.hadamard import hadamard_128
from exl3_kernels.regularise import regularise, search_global_scale
from exl3_kernels.trellis import matrix_to_tiles, pack_states, tiles_to_matrix
from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE, Exl3Weight

DAMPING = 0.025
RETRY_DAMPING = 0.05
CHOLESKY_RETRIES = 10
MIN_DIAGONAL = 1e-20

OutScales = Literal["always", "never", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """One quantized linear and how it went.

    Parameters
    ----------
    weight : Exl3Weight
        Stored tensors, sides padded to multiples of 128; padded and all-zero rows and columns decode to exactly 0.
    proxy_error : float
        tr(E' H E) / tr(V' H V) in V's basis with the damped H (the identity after a fallback); 0 for a zero weight.
    fallback : str or None
        Why the strips were encoded without error feedback; None when they were not.
    global_scale : float
        Factor between V at its target RMS and the values that were encoded.
    """

    weight: Exl3Weight
    proxy_error: float
    fallback: str | None
    global_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A regularised weight on its way through the encoder."""

    target: torch.Tensor  # float32 [k, n], V times the global scale
    su: torch.Tensor  # float32 [k], the global scale divided out
    sv: torch.Tensor  # float32 [n]
    moments: torch.Tensor | None  # float32 [k, k], damped second moments in V's basis
    feedback: torch.Tensor | None  # float32 [k, k], strictly lower block factor L
    fallback: str | None
    global_scale: float


def quantize_linear(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    *,
    bits: int,
    codebook: str,
    seed: int,
    out_scales: OutScales = "always",
    global_scale: float | None = None,
) -> QuantizedLinear:
    """Quantize one linear; see `quantize_linears`."""
    return quantize_linears(
        [weight],
        [hessian],
        bits=[bits],
        codebook=codebook,
        seed=seed,
        out_scales=out_scales,
        global_scale=global_scale,
    )[0]


def quantize_linears(
    weights: Sequence[torch.Tensor],
    hessians: Sequence[torch.Tensor | None],
    *,
    bits: Sequence[int],
    codebook: str,
    seed: int,
    out_scales: OutScales = "always",
    global_scale: float | None = None,
) -> list[QuantizedLinear]:
    """Quantize linears of the same input width, encoding those with the same K together.

    The result of each linear is the one that `quantize_linear` gives: company only makes the encoder's batches larger.

    Parameters
    ----------
    weights : sequence of Tensor
        Floating point [k, n_i]; k and n_i are padded with zeros to multiples of 128. All on one device, which does
        the work.
    hessians : sequence of (Tensor or None)
        Mean of x' x over calibration inputs, [k, k]; the same tensor may serve several weights. None, a non-finite
        or a vanishing matrix (mean diagonal below 1e-20), or one that stays indefinite after 10 dampings means plain
        encoding without error feedback, and `fallback` says so.
    bits : sequence of int
        K of each weight, 1 to 8.
    codebook : str
        `3inst`, `mcg` or `mul1`, with its usual multiplier.
    seed : int
        Draws the signs of input and output channels.
    out_scales : "always", "never" or "auto"
        Per-column output scales. "auto" uses them unless the top 2 % of sqrt(diag H) holds 15 % of the sum or more.
    global_scale : float or None
        None searches it per weight.

    Returns
    -------
    list of QuantizedLinear
        In the order of `weights`.

    Raises
    ------
    ValueError
        If a weight is not finite, a shape or an option is wrong, or a scale does not fit in float16.
    """
    if not len(weights) == len(hessians) == len(bits):
        raise ValueError(f"{len(weights)} weights, {len(hessians)} Hessians and {len(bits)} bit widths: counts differ")
    if out_scales not in ("always", "never", "auto"):
        raise ValueError(f"out_scales is {out_scales!r}, expected always, never or auto")
    if len({len(weight) for weight in weights}) > 1:
        raise ValueError(f"weights have different input widths: {[len(weight) for weight in weights]}")
    plans = [
        _plan(weight, hessian, own_bits, codebook, seed, out_scales, global_scale)
        for weight, hessian, own_bits in zip(weights, hessians, bits, strict=True)
    ]
    results: dict[int, QuantizedLinear] = {}
    for shared_bits in sorted(set(bits)):
        members = [index for index, own_bits in enumerate(bits) if own_bits == shared_bits]
        states = _encode_strips([plans[index] for index in members], shared_bits, codebook)
        for index, own_states in zip(members, states, strict=True):
            results[index] = _finish(plans[index], own_states, shared_bits, codebook)
    return [results[index] for index in range(len(weights))]


def _plan(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    bits: int,
    codebook: str,
    seed: int,
    out_scales: OutScales,
    global_scale: float | None,
) -> _Plan:
    rows, columns = weight.shape
    if not weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"weight {rows} x {columns} {weight.dtype} holds values that are not finite numbers")
    if hessian is not None and tuple(hessian.shape) != (rows, rows):
        raise ValueError(f"Hessian is {tuple(hessian.shape)}, the weight takes {rows} inputs")
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    second_moments, fallback = _usable_hessian(hessian, len(padded), padded.device)
    balance = out_scales == "always" or (out_scales == "auto" and not _has_outlier_inputs(second_moments))
    regular, su, sv = regularise(padded, balance_columns=balance, seed=seed)
    moments, feedback = None, None
    if second_moments is not None:
        exact_moments = _rotated_moments(second_moments, su)
        feedback, fallback = _feedback(exact_moments)
        moments = exact_moments.float() if fallback is None else None
    scale = search_global_scale(regular, bits, codebook) if global_scale is None else global_scale
    su = su / scale
    if not bool(torch.isfinite(su.half()).all() and torch.isfinite(sv.half()).all()):
        raise ValueError("a channel scale exceeds float16: the weight is larger than the format can store")
    return _Plan(
        target=regular * scale,
        su=su,
        sv=sv,
        moments=moments,
        feedback=feedback,
        fallback=fallback,
        global_scale=scale,
    )


def _usable_hessian(
    hessian: torch.Tensor | None, size: int, device: torch.device
) -> tuple[torch.Tensor | None, str | None]:
    """Return the Hessian as float64 [size, size] padded with zeros, or None and the reason it cannot be used."""
    if hessian is None:
        return None, "no Hessian"
    if not bool(torch.isfinite(hessian).all()):
        return None, "Hessian is not finite"
    if not bool(hessian.diagonal().double().mean() >= MIN_DIAGONAL):
        return None, f"Hessian's mean diagonal is below {MIN_DIAGONAL:g}"
    padding = size - len(hessian)
    return torch.nn.functional.pad(hessian.to(device, torch.float64), (0, padding, 0, padding)), None


def _has_outlier_inputs(second_moments: torch.Tensor | None) -> bool:
    """Say whether the top 2 % of input channels hold at least 15 % of the summed input RMS."""
    if second_moments is None:
        return False
    rms = second_moments.diagonal().clamp_min(0).sqrt().sort(descending=True).values
    return bool(rms[: max(1, round(0.02 * len(rms)))].sum() >= 0.15 * rms.sum())


def _rotated_moments(second_moments: torch.Tensor, su: torch.Tensor) -> torch.Tensor:
    """Return Hd D(su) H D(su) Hd, the second moments of V's inputs (x * su) Hd, damped by 2.5 % of the mean diagonal.

    Normalised to mean diagonal 1 before the damping; the identity when H vanishes on every live input.
    """
    rotated = hadamard_128(hadamard_128(second_moments * su.double() * su.double()[:, None]).T)
    mean = rotated.diagonal().mean()
    identity = torch.eye(len(rotated), dtype=torch.float64, device=rotated.device)
    return rotated / mean + DAMPING * identity if bool(mean > 0) else identity


def _feedback(moments: torch.Tensor) -> tuple[torch.Tensor | None, str | None]:
    """Return the strictly lower block factor L as float32, or None and the reason."""
    identity = torch.eye(len(moments), dtype=torch.float64, device=moments.device)
    for attempt in range(CHOLESKY_RETRIES + 1):
        factor, info = torch.linalg.cholesky_ex(moments + RETRY_DAMPING * attempt * identity)
        if not bool(info.any()):
            return _block_factor(factor).float(), None
    return None, f"Hessian is not positive definite after {CHOLESKY_RETRIES} dampings"


def _block_factor(cholesky: torch.Tensor) -> torch.Tensor:
    """Return L from the Cholesky factor C [k, k]: block column i is C[:, i] C_ii^-1, its diagonal block zeroed."""
    size = len(cholesky)
    columns = cholesky.view(size, size // TILE, TILE).transpose(0, 1)
    blocks = cholesky.view(size // TILE, TILE, size // TILE, TILE)
    diagonal = torch.stack([blocks[i, :, i] for i in range(size // TILE)])
    factor = torch.linalg.solve_triangular(diagonal, columns, upper=False, left=False)
    factor = factor.transpose(0, 1).reshape(size, size // TILE, TILE).clone()
    for i in range(size // TILE):
        factor[i * TILE : (i + 1) * TILE, i] = 0
    return factor.view(size, size)


def _encode_strips(plans: Sequence[_Plan], bits: int, codebook: str) -> list[torch.Tensor]:
    """Encode strips of 16 rows from the bottom up, all plans at once; return states [k/16, n/16, 256] of each.

    The target of strip i is V_i + sum over lower strips j of L[j, i]' (V_j - Q_j).
    """
    values = codebook_values(codebook, device=plans[0].target.device).float()
    rows = len(plans[0].target)
    widths = [plan.target.shape[1] // TILE for plan in plans]
    errors = [torch.zeros_like(plan.target) for plan in plans]
    strips: list[torch.Tensor] = []
    for start in range(rows - TILE, -1, -TILE):
        strip, below = slice(start, start + TILE), slice(start + TILE, rows)
        wanted = [
            plan.target[strip]
            if plan.feedback is None
            else plan.target[strip] + plan.feedback[below, strip].T @ error[below]
            for plan, error in zip(plans, errors, strict=True)
        ]
        states = encode_tiles(torch.cat([matrix_to_tiles(part)[0] for part in wanted]), bits, codebook)
        decoded = values[states.long()]
        for plan, error, part in zip(plans, errors, decoded.split(widths), strict=True):
            error[strip] = plan.target[strip] - tiles_to_matrix(part[None])
        strips.append(states)
    stacked = torch.stack(strips[::-1])
    return list(stacked.split(widths, dim=1))


def _finish(plan: _Plan, states: torch.Tensor, bits: int, codebook: str) -> QuantizedLinear:
    decoded = tiles_to_matrix(codebook_values(codebook, device=states.device)[states.long()])
    return QuantizedLinear(
        weight=Exl3Weight(
            trellis=pack_states(states, bits),
            suh=plan.su.half(),
            svh=plan.sv.half(),
            codebook=codebook,
            multiplier=MULTIPLIERS[codebook],
        ),
        proxy_error=_proxy_error(plan.target, decoded.float() - plan.target, plan.moments),
        fallback=plan.fallback,
        global_scale=plan.global_scale,
    )


def _proxy_error(target: torch.Tensor, error: torch.Tensor, moments: torch.Tensor | None) -> float:
    """Return tr(E' H E) / tr(V' H V) in float64."""

    def power(matrix: torch.Tensor) -> float:
        matrix = matrix.double()
        return float((matrix * (matrix if moments is None else moments.double() @ matrix)).sum())

    total = power(target)
    return power(error) / total if total > 0 else 0.0

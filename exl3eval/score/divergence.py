"""Exact full-vocabulary divergences between two rows of FP32 logits, in FP64.

Shapes: T positions, V vocabulary, C columns of one vocabulary chunk.

The headline is the phi form (measurement.md, section 2),

    KL(P || Q) = sum_v p_v phi(log q_v - log p_v),   phi(x) = expm1(x) - x,

whose terms are all >= 0, which is exactly 0 for identical rows, and in which an error of a normaliser
enters at second order only. With d = log q - log p the two directions share their work:

    p phi(d)  = p d^2 (A + d B)          and   q phi(-d) = q d^2 (A - d B)      for |d| < 0.05,
    p phi(d)  = (q - p) - p d            and   q phi(-d) = (p - q) + q d        otherwise,

with A, B the even and odd parts of (expm1(d) - d) / d^2. The Jensen-Shannon divergence is
sum [(p log p + q log q) / 2 - m log m] with m = (p + q) / 2, to an absolute 1e-14.

Sums over a row are taken chunk by chunk in FP64: a result depends on the chunk width to a few 1e-16 of
its largest partial sum, and not at all on the batch of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exl3eval.errors import InvalidRunError

SERIES_BELOW = 0.05
TOP_K = 10
LN2 = 0.6931471805599453
CHECK = 1e-12
_CPU_BLOCK = 1 << 16
_GPU_BLOCK = 1 << 24

AGREE, TIE, NEAR_TIE, FLIP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """Per-position results of one candidate against the reference; every tensor is [T] on the CPU.

    Nats unless said otherwise. `kl` is KL(P_ref || Q), `kl_reverse` KL(Q || P_ref), `js` the
    Jensen-Shannon divergence, `tv` the total variation in [0, 1] (expected acceptance rate is 1 - tv),
    `top1` one of AGREE, TIE (the two candidates are less than one FP32 ulp apart in the reference),
    NEAR_TIE (less than one BF16 ulp) or FLIP, `top_k_overlap` the shared fraction of the ten most likely
    ids, `nll_ref` and `delta_nll` the loss of the true token and the candidate's excess over it,
    `entropy_ref` and `confidence_ref` the reference's entropy and top probability, `entropy_arm` the
    candidate's entropy, `top1_ref` and `top1_arm` the most likely ids.
    """

    kl: torch.Tensor
    kl_reverse: torch.Tensor
    js: torch.Tensor
    tv: torch.Tensor
    top1: torch.Tensor
    top_k_overlap: torch.Tensor
    nll_ref: torch.Tensor
    delta_nll: torch.Tensor
    entropy_ref: torch.Tensor
    entropy_arm: torch.Tensor
    confidence_ref: torch.Tensor
    top1_ref: torch.Tensor
    top1_arm: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """One arm's logits at a block of positions, [T, V] FP32, with FP64 normalisers [T]."""

    logits: torch.Tensor
    peak: torch.Tensor
    logz: torch.Tensor
    finite: bool


def _prepare(logits_TV: torch.Tensor, who: str, vocab_chunk: int) -> _Rows:
    if logits_TV.dtype != torch.float32:
        raise InvalidRunError(
            f"{who} logits are {logits_TV.dtype}, expected torch.float32",
            hint="emit FP32 logits: rounded ones put a floor of 7e-5 nats and more under the divergence",
        )
    peak_T = logits_TV.amax(dim=1)
    if not bool(torch.isfinite(peak_T).all()):
        row = int(torch.nonzero(~torch.isfinite(peak_T))[0])
        raise InvalidRunError(
            f"{who} logits hold NaN, +inf or nothing but -inf at position {row} of the block",
            hint="the arm is broken: no number is reported",
        )
    finite = bool((logits_TV.amin(dim=1) > float("-inf")).all())
    return _Rows(logits_TV, peak_T.double(), log_normalisers(logits_TV, vocab_chunk=vocab_chunk), finite)


def log_normalisers(logits_TV: torch.Tensor, *, vocab_chunk: int | None = None) -> torch.Tensor:
    """Return log sum_v exp(logit) in FP64: [T, V] -> [T]."""
    peak_T = logits_TV.amax(dim=1).double()
    total_T = torch.zeros_like(peak_T)
    for chunk_TC in logits_TV.split(vocab_chunk or logits_TV.shape[1], dim=1):
        total_T += chunk_TC.double().sub_(peak_T[:, None]).exp_().sum(dim=1)
    return peak_T + total_T.log()


class _Sums:
    """Running row sums over vocabulary chunks, each [T] FP64."""

    def __init__(self, like_T: torch.Tensor) -> None:
        self.kl, self.direct, self.kl_reverse, self.js = (torch.zeros_like(like_T) for _ in range(4))
        self.l1, self.mass, self.entropy = (torch.zeros_like(like_T) for _ in range(3))


def _xlogx(p: torch.Tensor, logp: torch.Tensor, finite: bool) -> torch.Tensor:
    return p * logp if finite else torch.where(p == 0, 0.0, p * logp)


def _select(far: torch.Tensor, near: torch.Tensor, weight: torch.Tensor, finite: bool) -> torch.Tensor:
    return torch.lerp(far, near, weight) if finite else torch.where(weight == 1, near, far)


def _add_chunk(
    sums: _Sums, p: torch.Tensor, logp: torch.Tensor, plogp: torch.Tensor, logq: torch.Tensor, finite: bool
) -> None:
    q = logq.exp()
    d = logq - logp
    if not finite:
        # -inf on both sides contributes nothing; p = 0 < q leaves its mass in the phi form; p > 0 = q is +inf.
        d = torch.where((logp == float("-inf")) & (logq == float("-inf")), 0.0, d)
    diff = q - p
    near = d.clamp(-SERIES_BELOW, SERIES_BELOW)
    u = near * near
    even = u.mul(1 / 3628800).add_(1 / 40320).mul_(u).add_(1 / 720).mul_(u).add_(1 / 24).mul_(u).add_(0.5)
    odd = u.mul(1 / 362880).add_(1 / 5040).mul_(u).add_(1 / 120).mul_(u).add_(1 / 6).mul_(near)
    pd, qd = p * d, q * d
    if not finite:
        pd, qd = torch.where(p == 0, 0.0, pd), torch.where(q == 0, 0.0, qd)
    sums.direct -= pd.sum(dim=1)
    # A weight of exactly 0 or 1 makes lerp a selection, ten times cheaper than torch.where.
    small = (near == d).double()
    sums.kl += _select(diff - pd, (even + odd).mul_(u).mul_(p), small, finite).sum(dim=1)
    sums.kl_reverse += _select(qd - diff, even.sub_(odd).mul_(u).mul_(q), small, finite).sum(dim=1)
    middle = (p + q).mul_(0.5)
    js = _xlogx(q, logq, finite)
    sums.entropy -= js.sum(dim=1)
    js.add_(plogp).mul_(0.5)
    js -= _xlogx(middle, middle.log(), finite)
    sums.js += js.masked_fill_(diff == 0, 0.0).sum(dim=1)
    sums.l1 += diff.abs_().sum(dim=1)
    sums.mass += q.sum(dim=1)


def _check_sums(sums: _Sums) -> None:
    infinite = torch.isinf(sums.kl)
    if infinite.any():
        raise InvalidRunError(
            f"the candidate gives probability 0 to ids that the reference allows at {int(infinite.sum())} positions "
            f"of the block, first at {int(torch.nonzero(infinite)[0])}: the divergence is infinite",
            hint="the arm masks logits; compare distributions before any mask",
        )
    checks = {
        "the candidate's probabilities do not sum to 1": (sums.mass - 1).abs() < CHECK,
        "a divergence is negative": (sums.kl >= 0) & (sums.kl_reverse >= 0) & (sums.js >= -1e-13),
        "phi form and direct form disagree": (sums.kl - sums.direct).abs() < CHECK * (1 + sums.kl),
        "the Jensen-Shannon divergence exceeds ln 2": sums.js <= LN2 + CHECK,
        "Pinsker's inequality fails": 0.5 * sums.l1 <= (sums.kl / 2).sqrt() + CHECK,
    }
    for what, holds in checks.items():
        if not bool(holds.all()):
            row = int(torch.nonzero(~holds)[0])
            raise InvalidRunError(f"{what} at position {row} of the block", hint="this is a defect: please report it")


def classify_top1(logits_ref_TV: torch.Tensor, top_ref_T: torch.Tensor, top_arm_T: torch.Tensor) -> torch.Tensor:
    """Classify agreement of the most likely ids: [T, V], [T], [T] -> int8 [T] of AGREE..FLIP.

    A disagreement is a TIE where the two ids are less than one FP32 ulp of the top logit apart in the
    reference, a NEAR_TIE below one BF16 ulp, else a FLIP.
    """
    best_T = logits_ref_TV.gather(1, top_ref_T[:, None]).squeeze(1)
    other_T = logits_ref_TV.gather(1, top_arm_T[:, None]).squeeze(1)
    gap_T = (best_T - other_T).double()
    exponent_T = torch.frexp(best_T.abs().clamp_min(torch.finfo(torch.float32).tiny)).exponent.double() - 1
    classes_T = torch.full_like(top_ref_T, FLIP, dtype=torch.int8)
    classes_T[gap_T < torch.exp2(exponent_T - 7)] = NEAR_TIE
    classes_T[gap_T < torch.exp2(exponent_T - 23)] = TIE
    classes_T[top_ref_T == top_arm_T] = AGREE
    return classes_T


def _score_block(
    logits_ref_TV: torch.Tensor, logits_arms: Mapping[str, torch.Tensor], targets_T: torch.Tensor, vocab_chunk: int
) -> dict[str, dict[str, torch.Tensor]]:
    ref = _prepare(logits_ref_TV, "reference", vocab_chunk)
    arms = {name: _prepare(logits, f"arm `{name}`", vocab_chunk) for name, logits in logits_arms.items()}
    sums = {name: _Sums(ref.logz) for name in arms}
    mass, entropy = torch.zeros_like(ref.logz), torch.zeros_like(ref.logz)
    for start in range(0, logits_ref_TV.shape[1], vocab_chunk):
        columns = slice(start, start + vocab_chunk)
        logp = ref.logits[:, columns].double().sub_(ref.logz[:, None])
        p = logp.exp()
        plogp = _xlogx(p, logp, ref.finite)
        mass += p.sum(dim=1)
        entropy -= plogp.sum(dim=1)
        for name, arm in arms.items():
            logq = arm.logits[:, columns].double().sub_(arm.logz[:, None])
            _add_chunk(sums[name], p, logp, plogp, logq, ref.finite and arm.finite)
    if not bool(((mass - 1).abs() < CHECK).all()):
        raise InvalidRunError(
            "the reference's probabilities do not sum to 1", hint="this is a defect: please report it"
        )
    k = min(TOP_K, logits_ref_TV.shape[1])
    ids_ref = logits_ref_TV.topk(k, dim=1).indices
    target = targets_T[:, None].long()
    nll_ref = ref.logz - logits_ref_TV.gather(1, target).squeeze(1).double()
    scored = {}
    for name, arm in arms.items():
        _check_sums(sums[name])
        ids_arm = arm.logits.topk(k, dim=1).indices
        overlap = (ids_ref[:, :, None] == ids_arm[:, None, :]).any(dim=2).double().mean(dim=1)
        nll_arm = arm.logz - arm.logits.gather(1, target).squeeze(1).double()
        scored[name] = {
            "kl": sums[name].kl,
            "kl_reverse": sums[name].kl_reverse,
            "js": sums[name].js.clamp_min_(0.0),
            "tv": 0.5 * sums[name].l1,
            "top1": classify_top1(logits_ref_TV, ids_ref[:, 0], ids_arm[:, 0]),
            "top_k_overlap": overlap,
            "nll_ref": nll_ref,
            "delta_nll": nll_arm - nll_ref,
            "entropy_ref": entropy,
            "entropy_arm": sums[name].entropy,
            "confidence_ref": (ref.peak - ref.logz).exp(),
            "top1_ref": ids_ref[:, 0],
            "top1_arm": ids_arm[:, 0],
        }
    return scored


def measure_divergences(
    logits_ref_TV: torch.Tensor,
    logits_arms: Mapping[str, torch.Tensor],
    targets_T: torch.Tensor,
    *,
    vocab_chunk: int = 16_384,
) -> dict[str, Divergences]:
    """Compare arms' logits with the reference's at the same positions.

    Parameters
    ----------
    logits_ref_TV : Tensor
        float32 [T, V], padded columns already cut.
    logits_arms : mapping of str to Tensor
        Arm name -> float32 [T, V] on the same device.
    targets_T : Tensor
        int [T], the true next ids.
    vocab_chunk : int
        Columns held in FP64 at a time.

    Returns
    -------
    dict of str to Divergences

    Raises
    ------
    InvalidRunError
        If the shapes differ, a logit is NaN or +inf, a divergence is infinite, or an invariant fails.
    """
    for name, logits_TV in logits_arms.items():
        if logits_TV.shape != logits_ref_TV.shape:
            raise InvalidRunError(
                f"the reference's logits are {list(logits_ref_TV.shape)} and arm `{name}`'s {list(logits_TV.shape)}",
                hint="compare models with one vocabulary at the same positions",
            )
    num_rows, vocab_size = logits_ref_TV.shape
    width = min(vocab_chunk, vocab_size)
    block = max(1, (_CPU_BLOCK if logits_ref_TV.device.type == "cpu" else _GPU_BLOCK) // width)
    parts = []
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        arms = {name: logits[rows] for name, logits in logits_arms.items()}
        parts.append(_score_block(logits_ref_TV[rows], arms, targets_T[rows], width))
    return {
        name: Divergences(**{key: torch.cat([part[name][key] for part in parts]).cpu() for key in parts[0][name]})
        for name in logits_arms
    }


def cut_mass(logits_TV: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the probability that columns from `vocab_size` on would hold: [T, V'] -> [T]."""
    if logits_TV.shape[1] == vocab_size:
        return logits_TV.new_zeros(logits_TV.shape[0], dtype=torch.float64)
    kept, whole = log_normalisers(logits_TV[:, :vocab_size]), log_normalisers(logits_TV)
    return -torch.expm1(kept - whole)


def logit_grid(logits_TV: torch.Tensor) -> str | None:
    """Name the 16-bit grid on which all logits sit (`bfloat16` or `float16`), or None.

    Rounded logits are the commonest unnoticed floor: an FP32 logit sits on the BF16 grid by chance once in 65,536.
    """
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if bool((logits_TV == logits_TV.to(dtype).to(torch.float32)).all()):
            return name
    return None

"""Exact divergences: against 80-bit arithmetic, their invariants, and every way a logit can be wrong."""

from dataclasses import fields

import mpmath
import numpy as np
import pytest
import torch

from exl3eval.errors import InvalidRunError
from exl3eval.score.divergence import (
    AGREE,
    FLIP,
    NEAR_TIE,
    TIE,
    Divergences,
    classify_top1,
    cut_mass,
    log_normalisers,
    logit_grid,
    measure_divergences,
)

VOCAB = 248_320


def _logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _measure(ref: torch.Tensor, arm: torch.Tensor, **options: int) -> Divergences:
    targets = torch.arange(ref.shape[0]) % ref.shape[1]
    return measure_divergences(ref, {"arm": arm}, targets, **options)["arm"]


def _oracle(ref: torch.Tensor, arm: torch.Tensor) -> tuple[np.longdouble, np.longdouble]:
    """Both directions of one row in 80-bit arithmetic, by the textbook formula on normalised terms."""
    a, b = ref.numpy().astype(np.longdouble), arm.numpy().astype(np.longdouble)
    logp = a - a.max() - np.log(np.exp(a - a.max()).sum())
    logq = b - b.max() - np.log(np.exp(b - b.max()).sum())
    d = logq - logp
    forward = np.exp(logp) * (np.expm1(d) - d)
    backward = np.exp(logq) * (np.expm1(-d) + d)
    return forward.sum(), backward.sum()


@pytest.mark.parametrize("kld", [1e-8, 1e-6, 1e-3, 1e-2])
def test_error_at_production_vocabulary_is_below_1e14(kld: float) -> None:
    ref = _logits(2, VOCAB, 1)
    arm = ref + float(np.sqrt(2 * kld)) * _logits(2, VOCAB, 2, 1.0)
    seen = _measure(ref, arm)
    for row in range(2):
        forward, backward = _oracle(ref[row], arm[row])
        assert 0.2 * kld < forward < 5 * kld
        assert abs(np.longdouble(seen.kl[row].item()) - forward) < 1e-14
        assert abs(np.longdouble(seen.kl_reverse[row].item()) - backward) < 1e-14


def test_every_measure_matches_50_digit_arithmetic() -> None:
    ref, arm = _logits(1, 40, 3), _logits(1, 40, 4)
    seen = _measure(ref, arm)
    with mpmath.workdps(50):
        p = [mpmath.e ** mpmath.mpf(float(v)) for v in ref[0]]
        q = [mpmath.e ** mpmath.mpf(float(v)) for v in arm[0]]
        p, q = [v / mpmath.fsum(p) for v in p], [v / mpmath.fsum(q) for v in q]
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

        def kl(a: list, b: list) -> mpmath.mpf:
            return mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(a, b, strict=True))

        expected = {
            "kl": kl(p, q),
            "kl_reverse": kl(q, p),
            "js": (kl(p, m) + kl(q, m)) / 2,
            "tv": mpmath.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
            "nll_ref": -mpmath.log(p[0]),
            "delta_nll": mpmath.log(p[0]) - mpmath.log(q[0]),
            "entropy_ref": -mpmath.fsum(v * mpmath.log(v) for v in p),
            "entropy_arm": -mpmath.fsum(v * mpmath.log(v) for v in q),
            "confidence_ref": max(p),
        }
        for name, value in expected.items():
            assert abs(mpmath.mpf(getattr(seen, name)[0].item()) - value) < 1e-14, name


def test_identical_logits_read_exactly_zero() -> None:
    ref = _logits(64, 1000, 5, 8.0)
    seen = _measure(ref, ref.clone())
    for name in ("kl", "kl_reverse", "js", "tv", "delta_nll"):
        assert torch.equal(getattr(seen, name), torch.zeros(64, dtype=torch.float64)), name
    assert (seen.top1 == AGREE).all()
    assert (seen.top_k_overlap == 1).all()


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.049, 0.051, 1.0, 30.0])
def test_never_negative_and_bounded(size: float) -> None:
    ref = _logits(32, 500, 6)
    seen = _measure(ref, ref + size * _logits(32, 500, 7, 1.0))
    assert (seen.kl >= 0).all()
    assert (seen.kl_reverse >= 0).all()
    assert ((seen.js >= 0) & (seen.js <= np.log(2) + 1e-12)).all()
    assert (seen.tv**2 <= seen.kl / 2 + 1e-12).all()


@pytest.mark.parametrize("chunk", [64, 999, 1000, 4096, 16_384])
def test_the_vocabulary_chunk_moves_at_most_a_rounding(chunk: int) -> None:
    """Chunked sums round in another order: 1e-15 of the sum of moduli, below 0.1 for a divergence and 10 elsewhere."""
    ref = _logits(4, 5000, 8)
    arm = ref + 0.1 * _logits(4, 5000, 9, 1.0)
    whole, chunked = _measure(ref, arm, vocab_chunk=5000), _measure(ref, arm, vocab_chunk=chunk)
    for field in fields(Divergences):
        a, b = getattr(whole, field.name).double(), getattr(chunked, field.name).double()
        atol = 1e-15 if field.name in ("kl", "kl_reverse") else 1e-14
        assert torch.allclose(a, b, rtol=0, atol=atol), field.name


def test_a_row_does_not_depend_on_its_batch() -> None:
    ref, arm = _logits(50, 3000, 10), _logits(50, 3000, 11)
    targets = torch.arange(50)
    whole = measure_divergences(ref, {"a": arm}, targets)["a"]
    alone = measure_divergences(ref[37:38], {"a": arm[37:38], "b": ref[37:38]}, targets[37:38])["a"]
    for field in fields(Divergences):
        assert torch.equal(getattr(whole, field.name)[37:38], getattr(alone, field.name)), field.name


def test_masked_on_both_sides_contributes_nothing() -> None:
    ref, arm = _logits(3, 100, 12), _logits(3, 100, 13)
    padded = [torch.cat([x, torch.full((3, 28), float("-inf"))], dim=1) for x in (ref, arm)]
    bare, masked = _measure(ref, arm), _measure(*padded)
    assert torch.allclose(bare.kl, masked.kl, rtol=0, atol=1e-14)
    assert torch.allclose(bare.entropy_ref, masked.entropy_ref, rtol=0, atol=1e-14)


def test_probability_that_the_reference_does_not_have_is_finite() -> None:
    """P = 0 < Q contributes Q's mass through the normaliser only: KL stays finite and exact."""
    ref, arm = _logits(1, 50, 14), _logits(1, 50, 15)
    ref[0, 7] = float("-inf")
    p, q = torch.softmax(ref[0].double(), 0), torch.softmax(arm[0].double(), 0)
    expected = torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum()
    assert abs(_measure(ref, arm).kl[0] - expected) < 1e-14


def test_probability_that_the_candidate_loses_fails_the_run() -> None:
    ref, arm = _logits(2, 50, 16), _logits(2, 50, 17)
    arm[1, 3] = float("-inf")
    with pytest.raises(InvalidRunError, match=r"probability 0 .* at 1 positions .* first at 1"):
        _measure(ref, arm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("who", ["reference", "arm"])
def test_non_finite_logits_fail_the_run(value: float, who: str) -> None:
    ref, arm = _logits(3, 50, 18), _logits(3, 50, 19)
    (ref if who == "reference" else arm)[2, 4] = value
    with pytest.raises(InvalidRunError, match=f"{who}.* at position 2"):
        _measure(ref, arm)


def test_a_wholly_masked_row_fails_the_run() -> None:
    ref, arm = _logits(2, 50, 20), torch.full((2, 50), float("-inf"))
    with pytest.raises(InvalidRunError, match="nothing but -inf"):
        _measure(ref, arm)


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(InvalidRunError, match="one vocabulary"):
        _measure(_logits(2, 50, 21), _logits(2, 51, 22))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_must_be_fp32(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidRunError, match="expected torch"):
        _measure(_logits(1, 50, 23), _logits(1, 50, 24).to(dtype))


def test_a_shift_of_all_logits_changes_nothing() -> None:
    ref = _logits(4, 300, 25)
    assert (_measure(ref, ref + 4.0).kl < 1e-12).all()


def test_a_renormalisation_error_of_peers_tools_would_show() -> None:
    """Summing p |log p - log q| instead of p (log p - log q) reads a small divergence hundreds of times too large."""
    ref = _logits(1, 2000, 26)
    arm = ref + 4e-3 * _logits(1, 2000, 27, 1.0)
    p, q = torch.log_softmax(ref[0].double(), 0), torch.log_softmax(arm[0].double(), 0)
    absolute = (p.exp() * (p - q).abs()).sum()
    assert absolute > 100 * _measure(ref, arm).kl[0]


def test_grids_of_rounded_logits_are_named() -> None:
    logits = _logits(8, 500, 28)
    assert logit_grid(logits) is None
    assert logit_grid(logits.bfloat16().float()) == "bfloat16"
    assert logit_grid(logits.half().float()) == "float16"


def test_top1_classes() -> None:
    ref = torch.tensor([[20.0, 20.0, 0.0], [20.0, 19.95, 0.0], [20.0, 15.0, 0.0], [20.0, 1.0, 0.0]])
    classes = classify_top1(ref, torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 0]))
    assert classes.tolist() == [TIE, NEAR_TIE, FLIP, AGREE]


def test_cut_mass_is_what_padding_would_take() -> None:
    logits = _logits(5, 128, 29)
    expected = torch.softmax(logits.double(), dim=1)[:, 100:].sum(dim=1)
    assert torch.allclose(cut_mass(logits, 100), expected, rtol=1e-12, atol=0)
    assert (cut_mass(logits, 128) == 0).all()


def test_normalisers_survive_large_logits() -> None:
    logits = _logits(3, 200, 30) + 5e4
    assert torch.allclose(log_normalisers(logits), torch.logsumexp(logits.double(), 1), rtol=1e-15, atol=0)

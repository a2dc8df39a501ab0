"""Bugs of other tools: their formula and ours, on the same numbers."""

import numpy as np
import pytest
import torch

from exl3_kernels.linear import Exl3Linear
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3eval.engine.vocabulary import Vocabulary, check_same_vocabulary
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.llama_kld import LlamaKld, summarise_base
from exl3eval.kernel_check.oracle import exact_product
from exl3eval.score.divergence import Divergences, measure_divergences
from exl3eval.score.scoring import ScoredContext

ROWS, VOCAB = 16, 500


def two_logits(size: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = 2.0 * torch.randn(ROWS, VOCAB, generator=generator)
    return reference, reference + size * torch.randn(ROWS, VOCAB, generator=generator)


def measure(reference: torch.Tensor, arm: torch.Tensor) -> Divergences:
    return measure_divergences(reference, {"arm": arm}, torch.zeros(len(reference)))["arm"]


def logs(*logits: torch.Tensor) -> list[torch.Tensor]:
    return [each.double().log_softmax(dim=1) for each in logits]


def test_a_sum_of_absolute_log_ratios_is_no_divergence() -> None:
    """P3: sum p |log p - log q| reads 1e-5 as some 4e-3: it is of first order in the difference, KL of second."""
    reference, arm = two_logits(0.005)
    log_p, log_q = logs(reference, arm)
    theirs = (log_p.exp() * (log_p - log_q).abs()).sum(dim=1)
    exact = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    ours = measure(reference, arm).kl
    assert torch.allclose(ours, exact, rtol=1e-9, atol=1e-16)
    assert 5e-6 < float(ours.mean()) < 3e-5
    assert float(theirs.mean() / ours.mean()) > 200


def test_sorted_values_without_ids_agree_while_every_id_is_wrong() -> None:
    """P4: a permuted vocabulary has the same sorted log-probabilities, and is another distribution."""
    reference, _ = two_logits(0.0)
    arm = reference.roll(1, dims=1)
    assert torch.equal(reference.sort(dim=1).values, arm.sort(dim=1).values)
    found = measure(reference, arm)
    assert float(found.kl.min()) > 0.5
    assert bool((found.top1_ref != found.top1_arm).all()) and float(found.top_k_overlap.mean()) < 0.2


def test_every_position_up_to_the_last_has_a_target() -> None:
    """P5: the last position of every window went unscored."""
    ids = np.arange(11, dtype=np.int32)
    context = ScoredContext(name="c", cluster="d", stratum="s", ids_digest="0", ids=ids)
    assert context.targets.tolist() == list(range(1, 11))
    late = ScoredContext(name="c", cluster="d", stratum="s", ids_digest="0", ids=ids, first=7)
    assert late.targets.tolist() == [8, 9, 10]


def test_the_smaller_vocabulary_is_not_what_is_left_to_compare() -> None:
    """P5: two vocabularies were cut to the shorter one, which takes mass away and reads as agreement."""
    reference, _ = two_logits(0.0)
    arm = torch.cat([reference, torch.full((ROWS, 20), 9.0)], dim=1)
    assert torch.equal(arm[:, :VOCAB], reference)
    with pytest.raises(InvalidRunError, match=rf"\[{ROWS}, {VOCAB}\] and arm `arm`'s \[{ROWS}, {VOCAB + 20}\]"):
        measure(reference, arm)
    short, long = (
        Vocabulary(size=n, digest=str(n), tokens={f"t{i}": i for i in range(n)}) for n in (VOCAB, VOCAB + 20)
    )
    check_same_vocabulary(short, short)
    with pytest.raises(UsageError, match="20 differ, first 't500'"):
        check_same_vocabulary(short, long)


def test_the_headline_is_the_divergence_from_the_reference_to_the_arm() -> None:
    """P6: a label said KL(quant || base) over numbers that were KL(base || quant)."""
    reference, arm = two_logits(1.0)
    log_p, log_q = logs(reference, arm)
    forward = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    backward = (log_q.exp() * (log_q - log_p)).sum(dim=1)
    assert float((forward / backward - 1.0).abs().max()) > 0.1
    found = measure(reference, arm)
    assert torch.allclose(found.kl, forward, rtol=1e-11) and torch.allclose(found.kl_reverse, backward, rtol=1e-11)


def test_masks_half_precision_and_lost_positions_are_told_apart() -> None:
    """P7: NaN for a mask on both sides, FP16 logits taken as they are, positions that are not finite left out."""
    reference, arm = two_logits(0.02)
    masked = [logits.clone() for logits in (reference, arm)]
    for logits in masked:
        logits[:, ::5] = float("-inf")
    log_p, log_q = logs(*masked)
    assert bool((log_p.exp() * (log_p - log_q)).sum(dim=1).isnan().all())
    kept = torch.arange(VOCAB) % 5 != 0
    alone = measure(reference[:, kept], arm[:, kept]).kl
    assert torch.allclose(measure(*masked).kl, alone, rtol=1e-10, atol=1e-16)
    rounded = measure(*(logits.half().float() for logits in (reference, arm))).kl
    assert float((rounded - measure(reference, arm).kl).abs().max()) > 1e-6
    with pytest.raises(InvalidRunError, match=r"logits are torch\.float16, expected torch\.float32"):
        measure(reference, arm.half())
    arm[3, 7] = float("nan")
    with pytest.raises(InvalidRunError, match="NaN, \\+inf or nothing but -inf at position 3"):
        measure(reference, arm)


def test_a_tolerance_of_0_05_passes_a_wrong_kernel() -> None:
    """P7: one weight in 256 read a bit off stays below 0.05, and lies far beyond what FP32 sums may differ by."""
    generator = torch.Generator().manual_seed(1)
    weight = Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, (16, 8, 64), generator=generator, dtype=torch.int16),
        suh=(0.05 * torch.sign(torch.randn(256, generator=generator))).half(),
        svh=(0.05 * torch.sign(torch.randn(128, generator=generator))).half(),
        codebook="mcg",
        multiplier=MULTIPLIERS["mcg"],
    )
    x = torch.randn(8, 256, generator=generator).half()
    exact = exact_product(x, weight, "rotated")
    wrong, right = (
        Exl3Linear(weight, dispatch=f"1-:{route}", out_dtype=torch.float32)(x).double()
        for route in ("broken-window", "fp16-staged")
    )
    assert float((wrong - exact.y).abs().max()) < 0.05
    assert float(((wrong - exact.y).abs() / exact.bound).max()) > 10.0
    assert float(((right - exact.y).abs() / exact.bound).max()) <= 1.0


def test_a_file_that_ends_16_nats_down_is_not_filled_up() -> None:
    """P8: each of 248,320 codes below the floor, taken for the floor itself, adds 2.8 % of mass that nobody gave."""
    vocab, n_ctx = 248_320, 4
    step = np.float32(16.0 / 65535.0)
    codes = np.zeros((1, 1, 4 + vocab), dtype=np.uint16)
    codes[0, 0, :4] = np.array([step, -16.0], dtype="<f4").view("<u2")
    codes[0, 0, 4] = 65535
    base = LlamaKld(name="x", n_ctx=n_ctx, n_vocab=vocab, n_chunk=1, tokens=np.zeros((1, n_ctx), np.int32), codes=codes)
    filled = -16.0 + float(step) * codes[0, 0, 4:].astype(np.float64)
    mass = np.exp(filled).sum()
    assert 0.027 < 1.0 - 1.0 / mass < 0.028
    assert 0.027 < float(np.log(mass)) < 0.028
    (row,) = summarise_base(base)
    assert row["value"] == pytest.approx(0.0, abs=1e-4)
    assert row["missing_mass"] == pytest.approx(0.0, abs=1e-4)

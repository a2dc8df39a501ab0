"""Properties 1 to 5: every weight, through every production decoder, has the bits of the oracle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.hadamard import NORM, hadamard_128
from exl3_kernels.prefill import rotates_rows
from exl3_kernels.reconstruct import inner_weight
from exl3_kernels.weight import BLOCK, CODEBOOKS, Exl3Weight
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.oracle import UNIT, UNIT_HALF, codebook_table, decode_weight, dense_of
from exl3eval.kernel_check.samples import (
    every_state_words,
    make_weight,
    one_hot_rows,
    plain_weight,
    single_bit_words,
)
from exl3eval.kernel_check.subject import Scope, Subject

TABLE_SHA256 = {
    "3inst": "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
    "mcg": "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
    "mul1": "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
}
# Values of mcg and 3inst are multiples of 2^-13 below 4, so fp32 sums of up to 2^9 of them are exact: of the fourteen
# stages the last five round, and so do the two multiplications by the scales. Of equal words every sum runs into one
# weight, and each of the seven is off by at most u of it; of random words they are smaller and independent.
FUSED_SLACK = 8 * UNIT
ROUNDED_TO_E4M3 = Skipped(reason="its weights are rounded to E4M3: bits are not promised")


def decoder_against_oracle(device: torch.device, scope: Scope) -> Evidence:
    """Property 1: the reference codec reads random tiles as the bit-by-bit oracle does."""
    differ = cases = 0
    for bits in scope.bits:
        for codebook in CODEBOOKS:
            weight = make_weight(256, 256, bits, codebook, device=device, seed=bits)
            inner = inner_weight(weight).cpu()
            differ += count_differing(inner, decode_weight(weight.trellis, codebook))
            cases += inner.numel()
    return Evidence(
        checked=f"reference codec against the bit-by-bit oracle, K {scope.bits}, three codebooks, 256 tiles each",
        cases=cases,
        worst=differ,
    )


def oracle_against_upstream(vectors: Path | None) -> Evidence | Skipped:
    """Property 2: the oracle agrees with weights that upstream reconstructed, `<codebook>.K<bits>.{trellis,inner}`."""
    if vectors is None:
        return Skipped(reason="no tensors of upstream were given (--upstream)", status="not run")
    from safetensors.torch import load_file

    tensors = load_file(vectors)
    differ = cases = 0
    for name in sorted(tensors):
        group, _, field = name.rpartition(".")
        if field != "inner" or f"{group}.trellis" not in tensors:
            continue
        expected = tensors[name]
        got = decode_weight(tensors[f"{group}.trellis"], group.split(".")[0])
        differ += count_differing(got[: expected.shape[0], : expected.shape[1]], expected)
        cases += expected.numel()
    return Evidence(checked=f"oracle against upstream's reconstruction in {vectors.name}", cases=cases, worst=differ)


def codebook_tables(device: torch.device, scope: Scope) -> Evidence:
    """Property 5: all 65,536 values of each codebook, by definition, by digest, and mul1's known range and spread."""
    differ = cases = 0
    for codebook in CODEBOOKS:
        table = codebook_values(codebook, device=device).cpu()
        oracle = codebook_table(codebook)
        differ += count_differing(table, torch.from_numpy(oracle))
        differ += hashlib.sha256(oracle.astype("<f2").tobytes()).hexdigest() != TABLE_SHA256[codebook]
        cases += table.numel()
    mul1 = codebook_table("mul1").astype(np.float64)
    found = (round(mul1.min(), 3), round(mul1.max(), 3), round(mul1.std(), 4))
    differ += found != (-3.453, 3.348, 1.0003)
    return Evidence(
        checked=f"three tables against their definitions in float64 and pinned SHA-256; mul1 spans {found[:2]},"
        f" standard deviation {found[2]}",
        cases=cases,
        worst=differ,
    )


def one_hot_decode(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 3: one-hot rows through the route, at every row count, give back every weight."""
    if subject.traits.arithmetic == "e4m3":
        return ROUNDED_TO_E4M3
    k, n = scope.one_hot
    shapes = ((k, n), (n, k)) if subject.traits.arithmetic == "half16" and k != n else ((k, n),)
    worst, cases, where = 0.0, 0, ""
    counts = subject.one_hot_rows(scope)
    for bits in scope.bits:
        for codebook in CODEBOOKS:
            for k, n in shapes:
                weight = make_weight(k, n, bits, codebook, device=subject.device, seed=bits, unit_scales=True)
                inner = decode_weight(weight.trellis, codebook).to(subject.device)
                for rows in subject.rows(counts, weight):
                    differ = one_hot_differences(subject, weight, inner, rows)
                    if differ > worst:
                        worst, where = differ, f"{k} x {n}, K {bits}, {codebook}, {rows} rows"
                    cases += inner.numel()
    return _decoded(
        subject,
        f"one-hot rows, {' and '.join(f'{k} x {n}' for k, n in shapes)}, K {scope.bits}, three codebooks,"
        f" rows {compact(counts)}",
        cases,
        worst,
        where,
    )


def directed_patterns(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 4: words of zeros, of ones, and every single packed bit of a tile, which also crosses the ring's end."""
    if subject.traits.arithmetic == "e4m3":
        return ROUNDED_TO_E4M3
    worst, cases, where = 0.0, 0, ""
    for bits in scope.bits:
        singles = single_bit_words(bits)
        patterns = {
            "zeros": torch.zeros_like(singles[:8, :8]),
            "ones": torch.full_like(singles[:8, :8], -1),
            "one bit": singles,
        }
        for codebook in scope.directed_codebooks:
            for name, words in patterns.items():
                weight = plain_weight(words.contiguous(), codebook, subject.device)
                inner = decode_weight(words, codebook).to(subject.device)
                for rows in subject.rows((16, 128), weight)[-1:]:
                    differ = one_hot_differences(subject, weight, inner, rows)
                    if differ > worst:
                        worst, where = differ, f"{name}, K {bits}, {codebook}"
                    cases += inner.numel()
    checked = f"zeros, ones, each of a tile's 256 K bits alone; K {scope.bits}, {', '.join(scope.directed_codebooks)}"
    return _decoded(subject, checked, cases, worst, where)


def every_state(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 5: each of the 65,536 states once, K = 8, decoded by the route."""
    if subject.traits.arithmetic == "e4m3":
        return ROUNDED_TO_E4M3
    words = every_state_words()
    worst, cases, where = 0.0, 0, ""
    for codebook in CODEBOOKS:
        weight = plain_weight(words, codebook, subject.device)
        inner = decode_weight(words, codebook).to(subject.device)
        for rows in subject.rows((16, 128), weight)[-1:]:
            differ = one_hot_differences(subject, weight, inner, rows)
            if differ > worst:
                worst, where = differ, codebook
            cases += inner.numel()
    return _decoded(subject, "256 x 256 weights that hold every state once, three codebooks", cases, worst, where)


def one_hot_differences(subject: Subject, weight: Exl3Weight, inner: torch.Tensor, rows: int) -> float:
    """Decode a weight of unit scales through a route and compare it with the oracle's.

    In the rotated basis the row c H e_i turns into one nonzero input c = RN16(128 / sqrt(128)), products and sums are
    exact, and the result has the bits of the fp32 transform of c W: the count of others is returned, and likewise for
    a dense weight in fp32. A dense weight in float16 may round a tie of its fp32 transform the other way: returned is
    then the worst error over half a unit in the last place plus the transform's own error, 8 u of the largest weight.
    So it is for a weight transformed on one side, once its rotated sums are rotated back.
    """
    k, arithmetic = weight.in_features, subject.traits.arithmetic
    turned = arithmetic == "rotated" or (arithmetic == "half16" and rotates_rows(weight))
    x = one_hot_rows(k, rotated=turned, device=subject.device)
    index = torch.arange(-(-k // rows) * rows, device=subject.device) % k
    got = torch.cat([subject.run(x[part], weight, torch.float32) for part in index.split(rows)])
    peak = (torch.tensor(float(BLOCK), device=subject.device) * NORM).half().float()
    if arithmetic == "rotated":
        return count_differing(got, hadamard_128(peak * inner.float())[index])
    if arithmetic == "half16":
        expected = peak * hadamard_128(inner.double()) if turned else hadamard_128(inner.double().T).T
        got = got.double() if turned else hadamard_128(got.double())
    else:
        expected = dense_of(inner.double(), weight)
    expected = expected[index]
    if arithmetic == "dense32":
        return count_differing(got, expected.float())
    allowed = UNIT_HALF * expected.abs() + FUSED_SLACK * expected.abs().max()
    return float(((got.double() - expected).abs() / allowed).nan_to_num(nan=float("inf")).max())


def count_differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Count values that are not equal; NaN equals nothing, zeros of both signs are equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(f"{got.dtype} {tuple(got.shape)} cannot equal {expected.dtype} {tuple(expected.shape)}")
    return int((got != expected).sum())


def compact(counts: tuple[int, ...]) -> str:
    """Write row counts with runs shortened: `1-17, 24`."""
    runs: list[list[int]] = []
    for count in sorted(set(counts)):
        if runs and count == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], count]
        else:
            runs.append([count])
    return ", ".join("-".join(str(end) for end in run) for run in runs)


def _decoded(subject: Subject, checked: str, cases: int, worst: float, where: str) -> Evidence:
    if subject.traits.arithmetic in ("dense16", "half16"):
        return Evidence(
            checked=checked, cases=cases, worst=worst, bound=1.0, measure="error / half a unit in the last place"
        )
    return Evidence(checked=checked, cases=cases, worst=worst, reason=where)

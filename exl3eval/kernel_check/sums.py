"""Properties 14 and 15: products against float64, with a bound tight enough that one wrong weight is seen."""

from __future__ import annotations

import math

import torch

from exl3_kernels.decode import DECODE, multiprocessors
from exl3_kernels.weight import BLOCK, Exl3Weight
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.oracle import (
    MEAN_ROUNDING,
    UNIT_E4M3,
    UNIT_HALF,
    Exact,
    chain,
    codebook_table,
    exact_product,
)
from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import Scope, Shape, Subject

CORRECT = 0.5
TRIALS = 40
MOST_MISSED = 0.10
# What rounded operands add to a row's relative error, root mean square: one float16 rounding a product, or two of E4M3.
ROUNDED_OPERANDS = {
    "dense16": MEAN_ROUNDING * UNIT_HALF,
    "half16": MEAN_ROUNDING * UNIT_HALF,
    "e4m3": MEAN_ROUNDING * UNIT_E4M3 * math.sqrt(2),
}
ABOVE_MEAN = 1.5  # rows of 256 results and more scatter about the root mean square by 1 / sqrt(2 x 256) = 4 %
NO_BOUND = Skipped(reason="weights rounded to E4M3 have no useful bound; see the relative error")
SPLIT_SHAPES: tuple[Shape, ...] = (
    (128, 128, 4, "mcg"),
    (1024, 128, 4, "mcg"),
    (5120, 128, 4, "mcg"),
    (2432, 1152, 4, "mcg"),
    (128, 5120, 4, "mcg"),
)


def error_over_bound(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 14: the worst error over the bound; a correct route stays below half of it."""
    if subject.traits.arithmetic == "e4m3":
        return NO_BOUND
    return _errors(subject, scope.shapes, "fp32 results of random weights and bias")


def relative_error(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 14: the relative error of the worst row, over half of the fp32 chain and the operands' roundings."""
    worst, cases = 0.0, 0
    for shape in scope.shapes:
        weight, x, exact = _problem(subject, shape, _most_rows(subject, shape))
        error = subject.run(x, weight, torch.float32).double() - exact.y
        relative = error.norm(dim=1) / exact.y.norm(dim=1)
        explained = CORRECT * chain(shape[0]) + ABOVE_MEAN * ROUNDED_OPERANDS.get(subject.traits.arithmetic, 0.0)
        worst = max(worst, float((relative / explained).nan_to_num(nan=float("inf")).max()))
        cases += error.numel()
    return Evidence(
        checked="fp32 results of random weights against float64",
        cases=cases,
        worst=worst,
        bound=1.0,
        measure="relative error of a row / what its roundings explain",
    )


def one_wrong_weight(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 14: the bound notices one wrong weight in a whole product.

    The route's result is compared with the exact product of a weight that differs in one value: the change of the
    inner product is (row value) x (change of the weight) in one column, spread over its block by the transform.
    """
    if subject.traits.arithmetic != "rotated":
        return Skipped(reason="its weights are rounded: one wrong value is the one-hot property's to find")
    k, n, _, codebook = scope.wrong_weight
    weight, x, exact = _problem(subject, scope.wrong_weight, 16)
    error = subject.run(x, weight, torch.float32).double() - exact.y
    values = torch.from_numpy(codebook_table(codebook)).double()
    g = torch.Generator().manual_seed(11)
    missed = 0
    for _ in range(TRIALS):
        row, column = (int(torch.randint(0, size, (1,), generator=g)) for size in (k, n))
        one, other = values[torch.randint(0, len(values), (2,), generator=g)]
        block = slice(column // BLOCK * BLOCK, column // BLOCK * BLOCK + BLOCK)
        signs = _hadamard_row(column % BLOCK).to(subject.device)
        change = exact.rows[:, row, None] * float(other - one) * signs * weight.svh[block].double()
        missed += not bool(((error[:, block] - change).abs() > exact.bound[:, block]).any())
    return Evidence(
        checked=f"{TRIALS} times one wrong weight of {k} x {n}, 16 rows; caught {TRIALS - missed}",
        cases=TRIALS,
        worst=missed / TRIALS,
        bound=MOST_MISSED,
        measure="share missed",
    )


def other_splits(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 15: shapes whose sums are cut into different numbers of segments stay within the bound, not the bits."""
    if subject.traits.arithmetic == "e4m3":
        return NO_BOUND
    if subject.device.type != "cuda":
        return Skipped(reason="the torch routes do not split their sums")
    units = [
        f"{k} x {n} on {DECODE.teams((k // BLOCK) * (n // BLOCK), multiprocessors(subject.device))} thread blocks"
        for k, n, _, _ in SPLIT_SHAPES
    ]
    return _errors(subject, SPLIT_SHAPES, f"decode GEMM cuts: {'; '.join(units)}")


def _errors(subject: Subject, shapes: tuple[Shape, ...], checked: str) -> Evidence:
    worst, cases, where = 0.0, 0, ""
    for shape in shapes:
        weight, x, exact = _problem(subject, shape, _most_rows(subject, shape))
        for rows in sorted({1, min(17, len(x)), len(x)}):
            error = (subject.run(x[:rows], weight, torch.float32).double() - exact.y[:rows]).abs()
            ratio = float((error / exact.bound[:rows]).nan_to_num(nan=float("inf")).max())
            if ratio > worst:
                worst, where = ratio, f"{shape[0]} x {shape[1]} K {shape[2]} {shape[3]}, {rows} rows"
            cases += error.numel()
    return Evidence(
        checked=checked,
        cases=cases,
        worst=worst,
        bound=CORRECT,
        measure="error / fp64 bound",
        reason=f"worst at {where}",
    )


def _problem(subject: Subject, shape: Shape, rows: int) -> tuple[Exl3Weight, torch.Tensor, Exact]:
    k, n, bits, codebook = shape
    weight = make_weight(k, n, bits, codebook, device=subject.device, seed=7, bias=torch.float16)
    x = make_rows(rows, k, device=subject.device)
    return weight, x, exact_product(x, weight, subject.traits.arithmetic)


def _most_rows(subject: Subject, shape: Shape) -> int:
    weight = make_weight(128, 128, shape[2], shape[3], device=subject.device)
    return subject.rows((1, 15, 33, 145), weight)[-1]


def _hadamard_row(index: int) -> torch.Tensor:
    signs = [1 - 2 * ((index & column).bit_count() % 2) for column in range(BLOCK)]
    return torch.tensor(signs, dtype=torch.float64) * BLOCK**-0.5

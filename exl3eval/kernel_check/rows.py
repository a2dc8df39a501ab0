"""Properties 6 to 9, 20, 21 and 27: a row's result depends on that row alone, in every shape, type and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import Exl3Weight
from exl3eval.kernel_check.decoding import compact, count_differing
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.oracle import exact_product
from exl3eval.kernel_check.samples import make_rows, make_weight, wide_rows
from exl3eval.kernel_check.subject import Scope, Subject, subjects_on

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDE_COUNTS = (1, 2, 3, 16, 17, 64, 128)
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def row_invariance(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 6: every row count, and single rows, against the same rows in one large call."""
    return _against_whole(subject, scope, scope.rows, make_rows, "normal rows")


def tile_edges(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 7: row counts around tiles and dispatch thresholds."""
    return _against_whole(subject, scope, scope.edge_rows, make_rows, "normal rows")


def wide_range_rows(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 9: rows and channels of log-normal scales up to 30,000."""
    return _against_whole(subject, scope, WIDE_COUNTS, wide_rows, "rows of scales up to 30,000")


def family_equality(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 8: routes that promise each other's bits."""
    others = [
        other
        for other in subjects_on(subject.device)
        if other.traits.family == subject.traits.family and other.name != subject.name
    ]
    if not subject.traits.family or not others:
        return Skipped(reason="no other route promises its bits")
    differ = cases = 0
    for k, n, bits, codebook in scope.shapes:
        weight = make_weight(k, n, bits, codebook, device=subject.device, bias=torch.float16)
        for make in (make_rows, wide_rows):
            x = make(scope.whole_rows, k, device=subject.device)
            for other in others:
                for rows in other.rows(subject.rows(scope.rows, weight), weight):
                    ours, theirs = (s.run(x[:rows], weight, torch.float32) for s in (subject, other))
                    differ += count_differing(ours, theirs)
                    cases += ours.numel()
    names = ", ".join(other.name for other in others)
    return Evidence(checked=f"bits of {names}, normal and wide-range rows", cases=cases, worst=differ)


def dtype_matrix(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 20: rows given in any type, a result in any type, is the rounded fp32 result."""
    k, n, bits, codebook = scope.shapes[0]
    worst, cases = 0.0, 0
    for bias in (None, *DTYPES):
        weight = make_weight(k, n, bits, codebook, device=subject.device, bias=bias)
        for rows in subject.rows(scope.typed_rows, weight):
            x = make_rows(rows, k, device=subject.device).bfloat16()  # eight bits: exact in all three types
            expected = subject.run(x.half(), weight, torch.float32)
            for given in DTYPES:
                for wanted in DTYPES:
                    got = subject.run(x.half().to(given), weight, wanted)
                    worst = max(worst, _unlike(got, expected, wanted, exact=subject.traits.rounds_once))
                    cases += got.numel()
    return Evidence(
        checked="float16, bfloat16, float32 rows, results and biases against the rounded float32 result",
        cases=cases,
        worst=worst,
        bound=0.0 if subject.traits.rounds_once else 1.0,
        measure="differing values" if subject.traits.rounds_once else "error / one unit in the last place",
    )


def finite_outputs(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 21: finite results for wide-range rows, and padded columns that hold NaN are cut off."""
    broken = cases = 0
    for k, n, bits, codebook in scope.shapes:
        weight = make_weight(k, n, bits, codebook, device=subject.device)
        for rows in subject.rows((1, 16, 130), weight):
            y = subject.run(wide_rows(rows, k, device=subject.device), weight, torch.float32)
            broken += int((~y.isfinite()).sum())
            cases += y.numel()
    k, n, bits, codebook = scope.shapes[0]
    weight = make_weight(k, n, bits, codebook, device=subject.device)
    padded = weight.svh.clone()
    padded[-27:] = float("nan")
    if subject.traits.arithmetic != "e4m3" and subject.name in ROUTES:
        linear = Exl3Linear(replace(weight, svh=padded), dispatch=f"1-:{subject.name}", out_features=n - 27)
        y = linear(make_rows(3, k, device=subject.device))
        broken += int((~y.isfinite()).sum()) + (y.shape[-1] != n - 27)
        cases += y.numel()
    return Evidence(
        checked="wide-range rows; 27 padded columns with NaN scales",
        cases=cases,
        worst=broken,
        measure="values not finite",
    )


def strides_and_alignment(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 27: rows that are cut from a wider matrix, transposed, or start at an odd address."""
    k, n, bits, codebook = scope.shapes[0]
    weight = make_weight(k, n, bits, codebook, device=subject.device)
    worst, cases, where = 0.0, 0, ""
    for rows in subject.rows((1, 16, 130), weight):
        for dtype in DTYPES:
            x = make_rows(rows, k, device=subject.device).to(dtype)
            expected = subject.run(x, weight, torch.float32)
            for layout, view in _layouts(x).items():
                got = subject.run(view, weight, torch.float32)
                differ = _differ(subject, got, expected, x, weight)
                if differ > worst:
                    worst, where = differ, f"{layout}, {rows} rows, {dtype}"
                cases += got.numel()
    return _rows_evidence(subject, "cut from wider rows, odd row stride, odd address, transposed", cases, worst, where)


def _layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, k = x.shape
    wide, odd = x.new_full((rows, k + 64), float("nan")), x.new_full((rows, k + 3), float("nan"))
    wide[:, 32 : 32 + k] = x
    odd[:, 1 : 1 + k] = x
    shifted = x.new_empty(rows * k + 1)[1:].view(rows, k)
    shifted.copy_(x)
    return {
        "cut from wider rows": wide[:, 32 : 32 + k],
        "odd row stride": odd[:, 1 : 1 + k],
        "odd address": shifted,
        "transposed": x.t().contiguous().t(),
    }


def _against_whole(
    subject: Subject,
    scope: Scope,
    counts: Sequence[int],
    make: Callable[..., torch.Tensor],
    what: str,
) -> Evidence | Skipped:
    """Compare the rows of calls of several sizes with those of the largest call that the route serves."""
    if subject.traits.arithmetic == "e4m3":
        return Skipped(reason="the bits of its products are cuBLAS's choice; its error is measured by property 14")
    worst, cases, where = 0.0, 0, ""
    for at, (k, n, bits, codebook) in enumerate(scope.shapes):
        weight = make_weight(k, n, bits, codebook, device=subject.device, bias=DTYPES[at % 3])
        largest = subject.rows((16, scope.whole_rows), weight)[-1]
        served = [rows for rows in counts if rows <= largest]
        if not served:
            return Skipped(reason=f"it takes at most {largest} rows")
        if not subject.traits.specialised:
            served = sorted({*served[:: max(1, len(served) // 6)], served[-1]})
        x = make(max(largest, *served), k, device=subject.device)
        whole, bound = subject.run(x, weight, torch.float32), None
        pieces = [slice(0, rows) for rows in served]
        pieces += [slice(row, row + 1) for row in {0, 7, 8, 15, 16, 17, 63, 127, 128, len(x) - 1} if row < len(x)]
        for piece in pieces:
            got = subject.run(x[piece], weight, torch.float32)
            differ: float = count_differing(got, whole[piece])
            if differ and not subject.traits.row_bits:
                bound = exact_product(x, weight, subject.traits.arithmetic).bound if bound is None else bound
                differ = _over(got - whole[piece], bound[piece])
            if differ > worst:
                worst, where = differ, f"rows {piece.start} to {piece.stop - 1} of {k} x {n} K {bits} {codebook}"
            cases += got.numel()
    return _rows_evidence(subject, f"{what}, {compact(tuple(counts))} and single rows", cases, worst, where)


def _differ(subject: Subject, got: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: Exl3Weight) -> float:
    """Count differing values; where the order of sums may depend on the row count, the difference over the bound."""
    differ = count_differing(got, expected)
    if not differ or subject.traits.row_bits:
        return differ
    if subject.traits.arithmetic == "e4m3":
        return float((got - expected).norm() / expected.norm()) / ROUNDING[torch.bfloat16]
    return _over(got - expected, exact_product(x, weight, subject.traits.arithmetic).bound)


def _over(difference: torch.Tensor, bound: torch.Tensor) -> float:
    return float((difference.abs() / bound).nan_to_num(nan=float("inf")).max())


def _rows_evidence(subject: Subject, checked: str, cases: int, worst: float, where: str) -> Evidence:
    exact = subject.traits.row_bits
    return Evidence(
        checked=checked,
        cases=cases,
        worst=worst,
        bound=0.0 if exact else 1.0,
        measure="differing values" if exact else "difference / fp64 bound",
        reason=where if worst else "",
    )


def _unlike(got: torch.Tensor, expected: torch.Tensor, wanted: torch.dtype, *, exact: bool) -> float:
    if got.dtype != wanted:
        return float("inf")
    if exact or wanted == torch.float32:
        return count_differing(got, expected.to(wanted))
    unit = ROUNDING[wanted]
    scale = expected.abs().clamp(min=float(expected.square().mean().sqrt()) * 2.0**-4)
    return float(((got.float() - expected).abs() / (unit * scale)).nan_to_num(nan=float("inf")).max())

"""Properties 19 and 28: what a route does not serve it refuses, what it serves is counted, and large shapes work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from exl3_kernels.dispatch import PORTABLE, UNMEASURED
from exl3_kernels.hadamard import NORM, hadamard_128
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import ROUTES, Launch, bucket_rows, read_launches, select_route
from exl3_kernels.weight import BLOCK, TILE, Exl3Weight
from exl3eval.kernel_check.decoding import ROUNDED_TO_E4M3, count_differing, one_hot_differences
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.oracle import decode_weight
from exl3eval.kernel_check.samples import make_rows, make_weight, one_hot_rows
from exl3eval.kernel_check.subject import Scope, Subject

COUNTED_ROWS = (1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 144, 257)
WIDEST_GRID = 32768
MANY_ELEMENTS = 1 << 31


def guards(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 19: what a route cannot serve is refused with a reason when asked, when loaded and when called."""
    route = ROUTES.get(subject.name)
    if route is None:
        return Skipped(reason="not a registered route")
    if subject.device.type != "cuda" or not route.rejects(make_weight(128, 128, 4, "mcg"), 1, "cpu"):
        narrow = make_weight(144, 128, 4, "mcg", device=subject.device)
        return Evidence(
            checked="a side that is not a multiple of 128 raises",
            cases=1,
            worst=float(
                not _raises(partial(subject.run, make_rows(1, 144, device=subject.device), narrow, torch.float32))
            ),
            measure="ineligible calls served",
        )
    served, checked = 0, []
    for name, weight in _ineligible(subject.device).items():
        x = make_rows(1, weight.in_features, device=weight.trellis.device)
        loads = [
            not subject.rejects(weight, 1),
            not _raises(partial(Exl3Linear, weight, dispatch=f"1-:{subject.name}")),
            not _raises(partial(subject.run, x, weight, torch.float32)),
        ]
        served += sum(loads)
        checked.append(name)
    plain = make_weight(128, 128, 4, "mcg", device=subject.device)
    for rows in (17, 300):
        if subject.rejects(plain, rows):
            x = make_rows(rows, 128, device=subject.device)
            served += not _raises(partial(subject.run, x, plain, torch.float32))
            checked.append(f"{rows} rows")
    return Evidence(
        checked=f"refused: {', '.join(checked)}",
        cases=len(checked),
        worst=served,
        measure="ineligible calls served",
    )


def counters(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 19: the op's counters show this route, once per call, for every row count, and no other."""
    if subject.name not in ROUTES:
        return Skipped(reason="not a registered route")
    weight = make_weight(128, 256, 4, "mcg", device=subject.device)
    wrong = cases = 0
    alone = f"1-:{subject.name}"
    dispatches = [alone, *(shared for shared in (UNMEASURED, PORTABLE) if f":{subject.name}" in shared)]
    for dispatch in dispatches:
        linear = Exl3Linear(weight, dispatch=dispatch)
        for rows in subject.rows(COUNTED_ROWS, weight) if dispatch == alone else COUNTED_ROWS:
            before = read_launches()
            linear(make_rows(rows, 128, device=subject.device))
            after = read_launches()
            seen = {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key, 0)}
            name = select_route(dispatch, rows).name
            wrong += seen != {Launch(name, bucket_rows(rows), 128, 256, 4, "mcg"): 1}
            cases += 1
    return Evidence(
        checked=f"dispatches {'; '.join(dispatches)}", cases=cases, worst=wrong, measure="calls counted wrongly"
    )


def wide_output(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 28: more than 32,768 columns, decoded one-hot."""
    if subject.traits.arithmetic == "e4m3":
        return ROUNDED_TO_E4M3
    if not subject.traits.specialised:
        return Skipped(reason="torch indexes with 64 bits")
    if subject.device.type != "cuda":
        return Skipped(reason="interpreted, it would take hours")
    weight = make_weight(BLOCK, WIDEST_GRID + 5 * BLOCK, 4, "mcg", device=subject.device, unit_scales=True)
    inner = decode_weight(weight.trellis, "mcg").to(subject.device)
    counts = subject.rows((1, 16, 128), weight)
    worst = max(one_hot_differences(subject, weight, inner, rows) for rows in counts)
    dense = subject.traits.arithmetic in ("dense16", "half16")
    return Evidence(
        checked=f"128 x {weight.out_features}, rows {counts}",
        cases=inner.numel() * len(counts),
        worst=worst,
        bound=float(dense),
        measure="error / half a unit in the last place" if dense else "differing values",
    )


def large_offsets(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 28: packed words and results that lie more than 2^31 elements from their tensor's start."""
    if subject.traits.arithmetic != "rotated" or not subject.traits.specialised:
        return Skipped(
            reason="an exact comparison of single weights needs the rotated basis; torch indexes with 64 bits"
        )
    if subject.device.type != "cuda" or torch.cuda.mem_get_info(subject.device)[0] < 48 << 30:
        return Skipped(reason="48 GiB of free device memory are needed", status="not run")
    differ, cases, checked = _far_words(subject)
    many = MANY_ELEMENTS // WIDEST_GRID + 7
    if not subject.rejects(make_weight(BLOCK, BLOCK, 4, "mcg", device=subject.device), many):
        weight = make_weight(BLOCK, WIDEST_GRID, 4, "mcg", device=subject.device, unit_scales=True)
        x = make_rows(many, BLOCK, device=subject.device)
        tail = 64
        y = subject.run(x, weight, torch.float16)[-tail:]
        differ += count_differing(y, subject.run(x[-tail:], weight, torch.float16)) if subject.traits.row_bits else 0
        near = subject.run(x[-tail:], weight, torch.float32)
        off = (y.float() - near).abs() > 2.0**-10 * near.abs() + 2.0**-10 * near.square().mean().sqrt()
        differ += int(off.sum())
        cases += y.numel()
        checked += f"; {many} rows of {WIDEST_GRID} results, the last {tail}"
    return Evidence(checked=checked, cases=cases, worst=differ)


def _far_words(subject: Subject) -> tuple[int, int, str]:
    k, n, bits = 1 << 16, (1 << 16) + BLOCK, 8
    words = torch.randint(
        -(1 << 15), 1 << 15, (k // TILE, n // TILE, TILE * bits), dtype=torch.int16, device=subject.device
    )
    ones = torch.ones(n, dtype=torch.float16, device=subject.device)
    weight = Exl3Weight(
        trellis=words, suh=ones[:k], svh=ones, codebook="mcg", multiplier=make_weight(128, 128, 1, "mcg").multiplier
    )
    inner = decode_weight(words[-BLOCK // TILE :, -BLOCK // TILE :], "mcg").to(subject.device)
    x = torch.zeros(16, k, dtype=torch.float16, device=subject.device)
    x[:, -BLOCK:] = one_hot_rows(BLOCK, rotated=True, device=subject.device)[-16:]
    peak = (torch.tensor(float(BLOCK), device=subject.device) * NORM).half().float()
    got = subject.run(x, weight, torch.float32)[:, -BLOCK:]
    expected = hadamard_128(peak * inner[-16:].float())
    return (
        count_differing(got, expected),
        got.numel(),
        f"last weights of {k} x {n} K {bits} ({words.numel()} packed words)",
    )


def _ineligible(device: torch.device) -> dict[str, Exl3Weight]:
    plain = make_weight(128, 128, 4, "mcg", device=device)
    room = torch.empty(plain.trellis.numel() + 1, dtype=torch.int16, device=device)
    shifted = room[1:].view_as(plain.trellis)
    shifted.copy_(plain.trellis)
    return {
        "another multiplier": replace(plain, multiplier=plain.multiplier ^ 2),
        "144 inputs": make_weight(144, 128, 4, "mcg", device=device),
        "144 outputs": make_weight(128, 144, 4, "mcg", device=device),
        "words at an odd address": replace(plain, trellis=shifted),
        "words with gaps": replace(plain, trellis=plain.trellis.repeat(1, 2, 1)[:, ::2]),
        "an integer bias": replace(plain, bias=torch.zeros(128, dtype=torch.int32, device=device)),
        "a weight on the CPU": make_weight(128, 128, 4, "mcg"),
    }


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False

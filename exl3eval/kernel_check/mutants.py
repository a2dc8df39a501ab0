"""Property 22: routes with a deliberate fault, each of which the suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from exl3_kernels.reconstruct import linear_staged
from exl3_kernels.weight import CODEBOOKS, MULTIPLIERS, Exl3Weight
from exl3eval.kernel_check.decoding import one_hot_decode
from exl3eval.kernel_check.finding import Evidence, Skipped, judge
from exl3eval.kernel_check.oracle import without_one_stage
from exl3eval.kernel_check.rows import tile_edges
from exl3eval.kernel_check.samples import make_weight
from exl3eval.kernel_check.subject import CONTROLS, Scope, Subject, altered
from exl3eval.kernel_check.sums import error_over_bound, relative_error

Run = Callable[[torch.Tensor, Exl3Weight, torch.dtype], torch.Tensor]
GATES = (one_hot_decode, error_over_bound, relative_error, tile_edges)


def suite_catches_mutants(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 22: every fault turns at least one exactness property red, and without a fault none is."""
    if subject.name in CONTROLS:
        return Skipped(reason="a control is at fault already")
    counts = (15,) if subject.rejects(make_weight(128, 128, 4, "mcg", device=subject.device), 100) else (100,)
    small = replace(
        scope,
        one_hot=(128, 128),
        one_hot_rows=counts,
        one_hot_few=counts,
        bits=(4,),
        shapes=scope.shapes[:1],
        edge_rows=(7, 15, 31, 33),
        whole_rows=40,
    )
    catchers = {fault: _catcher(altered(subject, fault, run), small) for fault, run in faults(subject).items()}
    survived = [fault for fault, gate in catchers.items() if not gate]
    if gate := _catcher(subject, small):
        survived.append(f"nothing, yet {gate} fails")
    return Evidence(
        checked="; ".join(f"{fault}: {gate}" for fault, gate in catchers.items() if gate),
        cases=len(catchers) + 1,
        worst=len(survived),
        measure="faults that survived",
        reason="; ".join(survived),
    )


def faults(subject: Subject) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the faults that can be put into a route, by name."""
    found: dict[str, Callable[..., torch.Tensor]] = {
        "swapped codebooks": swapped_codebooks,
        "a dropped Hadamard stage": dropped_stage,
        "an off-by-one window": off_by_one_window,
        "a skipped tail row": skipped_tail_row,
    }
    if subject.traits.arithmetic == "rotated":
        found["a flipped multiplier bit"] = flipped_multiplier
    if subject.traits.arithmetic != "e4m3":
        found["one flipped weight bit"] = flipped_word_bit
    return found


def swapped_codebooks(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Decode with the next codebook."""
    other = CODEBOOKS[(CODEBOOKS.index(weight.codebook) + 1) % len(CODEBOOKS)]
    return run(x, replace(weight, codebook=other, multiplier=MULTIPLIERS[other]), out_dtype)


def flipped_multiplier(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Decode with one bit of the codebook's multiplier flipped, in staged arithmetic: kernels refuse such a weight."""
    return linear_staged(x.half(), replace(weight, multiplier=weight.multiplier ^ 2), accumulate=torch.float32).to(
        out_dtype
    )


def dropped_stage(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Leave the last stage of the output transform out."""
    bias = 0.0 if weight.bias is None else weight.bias.float()
    svh = weight.svh.float()
    plain = (run(x, weight, torch.float32) - bias) / svh
    return (without_one_stage(plain) * svh + bias).to(out_dtype)


def off_by_one_window(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Read every window one bit late: the stream turned by one bit."""
    halves = (weight.trellis.to(torch.int64) & 0xFFFF).unflatten(-1, (-1, 2))
    words = halves[..., 0] | (halves[..., 1] << 16)
    turned = ((words << 1) & 0xFFFFFFFF) | (words.roll(-1, -1) >> 31)
    split = torch.stack((turned & 0xFFFF, turned >> 16), dim=-1).flatten(-2)
    return run(x, replace(weight, trellis=(split - ((split & 0x8000) << 1)).to(torch.int16)), out_dtype)


def skipped_tail_row(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Leave the last row of a group of eight that is not full at zero."""
    y = run(x, weight, out_dtype)
    if len(x) % 8:
        y[-1] = 0
    return y


def flipped_word_bit(run: Run, x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Flip one bit of one packed word."""
    words = weight.trellis.clone()
    words[0, 0, 0] ^= 1
    return run(x, replace(weight, trellis=words), out_dtype)


def _catcher(subject: Subject, scope: Scope) -> str:
    """Return the first gate that fails, empty if none does."""
    for gate in GATES:
        try:
            outcome: Evidence | Skipped | Exception = gate(subject, scope)
        except (RuntimeError, ValueError) as error:
            outcome = error
        if judge(22, "", subject.name, outcome).status == "fail":
            return gate.__name__
    return ""

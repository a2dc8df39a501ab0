"""Properties 10 to 13: layouts, grouped launches and routing plans."""

from __future__ import annotations

import torch

from exl3_kernels.experts import Exl3Experts, Expert
from exl3_kernels.linear import Exl3Linear, FusedExl3Linear
from exl3_kernels.routes import ROUTES
from exl3eval.kernel_check.decoding import count_differing
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import Scope, Subject

TOKENS = 12
EXPERTS = ((4, "mcg"), (3, "mul1"), (6, "mcg"), (4, "3inst"), (5, "mul1"))
NOBODYS_EXPERT = 2


def layout_equality(subject: Subject, scope: Scope) -> Skipped:
    """Property 10."""
    return Skipped(reason="the packed words are read where they are stored: there is no second layout")


def routing_plan(subject: Subject, scope: Scope) -> Skipped:
    """Property 13."""
    return Skipped(reason="experts are served one by one: there is no routing plan to compare with an oracle")


def together_and_alone(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 11: linears that share an input, and experts in a batch, give what each gives alone."""
    if reason := _not_served(subject):
        return reason
    x = make_rows(TOKENS, 256, device=subject.device, seed=3)
    parts = [_linear(subject, 256, 128 * (1 + i), bits, codebook, i) for i, (bits, codebook) in enumerate(EXPERTS)]
    together = FusedExl3Linear(parts)(x)
    differ = count_differing(together, torch.cat([part(x) for part in parts], dim=-1))
    cases, checked = together.numel(), "five linears side by side"
    if subject.traits.row_bits:
        experts, ids, scales = _experts(subject)
        batch = experts(x, ids, scales)
        for token in range(TOKENS):
            alone = experts(x[token : token + 1], ids[token : token + 1], scales[token : token + 1])
            differ += count_differing(batch[token : token + 1], alone)
        cases += batch.numel()
        checked += f"; {TOKENS} tokens through {len(EXPERTS)} experts of mixed K and codebook, one without tokens"
    return Evidence(checked=checked, cases=cases, worst=differ)


def combined_and_separate(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 12: experts combined in slot order, with unrouted slots, are the sum of their separate launches."""
    if reason := _not_served(subject):
        return reason
    if not subject.traits.row_bits:
        return Skipped(reason="an expert's bits depend on how many tokens it is given")
    experts, ids, scales = _experts(subject)
    ids[0, 1] = ids[5, 0] = -1
    x = make_rows(TOKENS, 256, device=subject.device, seed=3)
    combined = experts(x, ids, scales)
    expected = torch.zeros(TOKENS, 256, device=subject.device)
    for token in range(TOKENS):
        row = x[token : token + 1]
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                inner = torch.nn.functional.silu(experts.gate[expert](row)) * experts.up[expert](row)
                expected[token] += (experts.down[expert](inner).float() * scales[token, slot])[0]
    return Evidence(
        checked="two slots per token, two of them unrouted",
        cases=combined.numel(),
        worst=count_differing(combined, expected.to(combined.dtype)),
    )


def _not_served(subject: Subject) -> Skipped | None:
    if subject.name not in ROUTES:
        return Skipped(reason="not a registered route")
    if subject.traits.arithmetic == "e4m3":
        return Skipped(reason="it is offered for single products only")
    return None


def _linear(subject: Subject, k: int, n: int, bits: int, codebook: str, seed: int) -> Exl3Linear:
    weight = make_weight(k, n, bits, codebook, device=subject.device, seed=seed)
    return Exl3Linear(weight, dispatch=f"1-:{subject.name}")


def _experts(subject: Subject) -> tuple[Exl3Experts, torch.Tensor, torch.Tensor]:
    experts = [
        Expert(
            gate=_linear(subject, 256, 384, bits, codebook, 10 * i),
            up=_linear(subject, 256, 384, bits, codebook, 10 * i + 1),
            down=_linear(subject, 384, 256, bits, codebook, 10 * i + 2),
        )
        for i, (bits, codebook) in enumerate(EXPERTS)
    ]
    g = torch.Generator().manual_seed(1)
    served = torch.tensor([i for i in range(len(EXPERTS)) if i != NOBODYS_EXPERT])
    ids = torch.stack([served[torch.randperm(len(served), generator=g)[:2]] for _ in range(TOKENS)])
    scales = torch.rand(TOKENS, 2, generator=g)
    module = Exl3Experts(experts, activation=torch.nn.functional.silu)
    return module, ids.to(subject.device), scales.to(subject.device)

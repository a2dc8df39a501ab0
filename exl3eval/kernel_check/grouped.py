"""Properties 10 to 14 and 16 of routed experts and fused linears: layouts, grouped launches and routing plans.

A layer of experts is served by the loop over its experts, each projection through the route under test; for routes
that promise the decode GEMM's bits also by the grouped routes, which promise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from exl3_kernels.experts import Exl3Experts, Expert
from exl3_kernels.grouped import plan_items
from exl3_kernels.hadamard import hadamard_128
from exl3_kernels.linear import Exl3Linear, FusedExl3Linear
from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3eval.kernel_check.decoding import count_differing
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.oracle import decode_weight, dense_of
from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import Scope, Subject

TOKENS = 12
HIDDEN, INNER = 256, 384
EXPERTS = ((4, "mcg"), (3, "mul1"), (6, "mcg"), (4, "3inst"), (5, "mul1"))
NOBODYS_EXPERT = 2
GROUPED = ("grouped-decode", "grouped-prefill")
LARGEST_RELATIVE = 1e-3
PLANS = ((1, 1, 8), (7, 3, 8), (300, 8, 32), (2000, 8, 64))  # tokens, slots, rows of an item


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of experts through one of its routes, and a call: tokens, their experts, their scales."""

    name: str
    module: Exl3Experts
    x: torch.Tensor
    ids: torch.Tensor
    scales: torch.Tensor

    def run(self, chosen: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Serve all tokens or the chosen ones: [T, H]."""
        return self.module(self.x[chosen], self.ids[chosen], self.scales[chosen])


def layout_equality(subject: Subject, scope: Scope) -> Skipped:
    """Property 10."""
    return Skipped(reason="the packed words are read where they are stored: there is no second layout")


def routing_plan(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 13: the pairs that the GPU sorts and the items that it cuts are those of a sort on the host."""
    if not _grouped(subject):
        return Skipped(reason="only grouped experts have a routing plan")
    differ = cases = 0
    for tokens, slots, rows in PLANS:
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, len(EXPERTS) + 1, (tokens, slots), generator=g)
        order, items = (t.tolist() for t in plan_items(ids.to(subject.device), len(EXPERTS), rows))
        flat, first = ids.flatten().tolist(), 0
        expected = [[-1, -1, 0] for _ in items]
        for expert in range(len(EXPERTS)):
            members = [pair for pair, routed in enumerate(flat) if routed == expert]
            differ += order[first : first + len(members)] != members
            for number, start in enumerate(range(0, len(members), rows), first // rows + expert):
                expected[number] = [expert, first + start, min(rows, len(members) - start)]
            first += len(members)
        differ += sum(item != wanted for item, wanted in zip(items, expected, strict=True) if item[2] or wanted[2])
        cases += len(items) + len(EXPERTS)
    return Evidence(
        checked=f"order and items of {len(PLANS)} routings with unrouted slots",
        cases=cases,
        worst=differ,
        measure="differing items and experts",
    )


def together_and_alone(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 11: linears that share an input, and experts in a batch, give what each gives alone."""
    if reason := _not_served(subject):
        return reason
    x = make_rows(TOKENS, HIDDEN, device=subject.device, seed=3)
    parts = [_linear(subject, HIDDEN, 128 * (1 + i), bits, codebook, i) for i, (bits, codebook) in enumerate(EXPERTS)]
    together = FusedExl3Linear(parts)(x)
    differ = count_differing(together, torch.cat([part(x) for part in parts], dim=-1))
    cases, checked = together.numel(), "five linears side by side"
    if subject.traits.row_bits:
        backwards = torch.arange(TOKENS - 1, -1, -1, device=subject.device)
        copies = torch.full((TOKENS,), 5, device=subject.device)
        layers = _layers(subject)
        for layer in layers:
            batch = layer.run()
            for token in range(TOKENS):
                differ += count_differing(layer.run(slice(token, token + 1)), batch[token : token + 1])
            differ += count_differing(layer.run(backwards), batch[backwards])
            differ += count_differing(layer.run(copies), batch[copies])
            cases += 4 * batch.numel()
        checked += f"; {TOKENS} tokens through {len(EXPERTS)} experts of mixed K and codebook, alone, in another order"
        checked += f" and beside copies, by {_names(layers)}"
    return Evidence(checked=checked, cases=cases, worst=differ)


def combined_and_separate(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 12: experts combined in slot order, with unrouted slots, are the sum of their separate launches."""
    if reason := _not_served(subject):
        return reason
    if not subject.traits.row_bits:
        return Skipped(reason="an expert's bits depend on how many tokens it is given")
    differ = cases = 0
    layers = _layers(subject)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for layer in layers:
            layer = replace(layer, x=layer.x.to(dtype))
            layer.ids[0, 1] = layer.ids[5, 0] = -1
            expected = torch.zeros(TOKENS, HIDDEN, device=subject.device)
            for token in range(TOKENS):
                row = layer.x[token : token + 1]
                for slot, expert in enumerate(layer.ids[token].tolist()):
                    if expert >= 0:
                        gate, up, down = (layer.module.get_submodule(f"{p}.{expert}") for p in ("gate", "up", "down"))
                        y = down(silu(gate(row)) * up(row))
                        expected[token] += (y.float() * layer.scales[token, slot])[0]
            differ += count_differing(layer.run(), expected.to(dtype))
            cases += expected.numel()
    return Evidence(
        checked=f"two slots per token, two of them unrouted, three types, by {_names(layers)}",
        cases=cases,
        worst=differ,
    )


def experts_relative_error(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 14: the relative error of a token's result against float64 with weights decoded by the oracle."""
    if subject.traits.arithmetic not in ("rotated", "dense32"):
        return Skipped(reason="its weights are rounded: its products have bounds of their own")
    if reason := _not_served(subject):
        return reason
    layers = _layers(subject)
    worst = max(float(_relative(layer, _exact(layer, subject)).max()) for layer in layers)
    return Evidence(
        checked=f"fp32 results of {TOKENS} tokens by {_names(layers)}",
        cases=TOKENS * len(layers),
        worst=worst,
        bound=LARGEST_RELATIVE,
        measure="relative error of a token",
    )


def experts_wrong_weight(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 14: one flipped bit of a routed expert moves its tokens beyond that bound, and no other token at all."""
    if subject.traits.arithmetic != "rotated":
        return Skipped(reason="its weights are rounded: one wrong value is the one-hot property's to find")
    if reason := _not_served(subject):
        return reason
    g = torch.Generator().manual_seed(11)
    missed = moved = 0
    layers = _layers(subject)
    for layer in layers:
        exact, before = _exact(layer, subject), layer.run()
        for _ in range(scope.expert_flips):
            expert = int(layer.ids.flatten()[torch.randint(0, layer.ids.numel(), (1,), generator=g)])
            projection = ("gate", "up", "down")[int(torch.randint(0, 3, (1,), generator=g))]
            linear = layer.module.get_submodule(f"{projection}.{expert}")
            words = linear.trellis.view(-1)  # type: ignore[operator]
            at, bit = (
                int(torch.randint(0, len(words), (1,), generator=g)),
                1 << int(torch.randint(0, 15, (1,), generator=g)),
            )
            words[at] ^= bit
            hit = (layer.ids == expert).any(dim=1)
            missed += not bool((_relative(layer, exact)[hit] > LARGEST_RELATIVE).any())
            moved += count_differing(layer.run()[~hit], before[~hit])
            words[at] ^= bit
    return Evidence(
        checked=f"{scope.expert_flips} flipped bits each by {_names(layers)}",
        cases=scope.expert_flips * len(layers),
        worst=missed + moved,
        measure="flips missed and values of other tokens changed",
    )


def experts_without_tokens(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 23: an expert without tokens is not read: the grouped kernels find no address of it."""
    if not _grouped(subject):
        return Skipped(reason="only grouped experts are found through addresses")
    differ = cases = 0
    for layer in _layers(subject)[1:]:
        expected = layer.run()
        layer.module.table().stored[NOBODYS_EXPERT] = 0
        y = layer.run()
        differ += count_differing(y, expected)
        cases += y.numel()
    return Evidence(checked=f"expert {NOBODYS_EXPERT} at address 0", cases=cases, worst=differ)


def experts_replay(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 16: a captured layer of experts, replayed with new tokens and routing, has the bits of an eager call."""
    if not _grouped(subject):
        return Skipped(reason="the loop over experts waits for the routing: it cannot be captured")
    differ = cases = 0
    for layer in _layers(subject)[1:]:
        layer.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.run()
        for seed in (5, 6):
            fresh = replace(
                layer,
                x=make_rows(TOKENS, HIDDEN, device=subject.device, seed=seed).to(layer.x.dtype),
                ids=layer.ids.roll(seed, 0),
                scales=layer.scales.flip(0),
            )
            expected = fresh.run()
            for held, new in ((layer.x, fresh.x), (layer.ids, fresh.ids), (layer.scales, fresh.scales)):
                held.copy_(new)
            captured.fill_(float("nan"))
            graph.replay()
            differ += count_differing(captured, expected)
            cases += captured.numel()
    return Evidence(checked="two new routings each, captured result NaN before", cases=cases, worst=differ)


def _not_served(subject: Subject) -> Skipped | None:
    if subject.name not in ROUTES:
        return Skipped(reason="not a registered route")
    if subject.traits.arithmetic == "e4m3":
        return Skipped(reason="it is offered for single products only")
    return None


def _grouped(subject: Subject) -> bool:
    return subject.device.type == "cuda" and subject.traits.family == "decode" and subject.name in ROUTES


def _names(layers: list[Layer]) -> str:
    return ", ".join(layer.name for layer in layers)


def _linear(subject: Subject, k: int, n: int, bits: int, codebook: str, seed: int) -> Exl3Linear:
    weight = make_weight(k, n, bits, codebook, device=subject.device, seed=seed)
    return Exl3Linear(weight, dispatch=f"1-:{subject.name}")


def _layers(subject: Subject) -> list[Layer]:
    """Return the layer served by the loop, then by the grouped routes where the subject promises their bits."""
    experts = [
        Expert(
            gate=_linear(subject, HIDDEN, INNER, bits, codebook, 10 * i),
            up=_linear(subject, HIDDEN, INNER, *EXPERTS[(i + 1) % len(EXPERTS)], 10 * i + 1),
            down=_linear(subject, INNER, HIDDEN, *EXPERTS[(i + 2) % len(EXPERTS)], 10 * i + 2),
        )
        for i, (bits, codebook) in enumerate(EXPERTS)
    ]
    g = torch.Generator().manual_seed(1)
    served = torch.tensor([i for i in range(len(EXPERTS)) if i != NOBODYS_EXPERT])
    ids = torch.stack([served[torch.randperm(len(served), generator=g)[:2]] for _ in range(TOKENS)])
    scales = torch.rand(TOKENS, 2, generator=g)
    return [
        Layer(
            name=route,
            module=Exl3Experts(experts, activation=silu, dispatch=f"1-:{route}"),
            x=make_rows(TOKENS, HIDDEN, device=subject.device, seed=3),
            ids=ids.to(subject.device, copy=True),
            scales=scales.to(subject.device, copy=True),
        )
        for route in ("experts-loop", *(GROUPED if _grouped(subject) else ()))
    ]


def _exact(layer: Layer, subject: Subject) -> torch.Tensor:
    """Return the layer's result in float64 from fp32 tokens, rotated rows rounded to float16 where the route does."""
    rotated = subject.traits.arithmetic == "rotated"
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device=subject.device)
    for expert in layer.ids.unique().tolist():
        token, slot = torch.where(layer.ids == expert)
        gate, up, down = (
            _weight_of(layer.module.get_submodule(f"{p}.{expert}"))  # type: ignore[arg-type]
            for p in ("gate", "up", "down")
        )
        x = layer.x[token].float()
        inner = silu(_product(x, gate, rotated)) * _product(x, up, rotated)
        y[token] += _product(inner.float(), down, rotated) * layer.scales[token, slot, None].double()
    return y


def _product(x: torch.Tensor, weight: Exl3Weight, rotated: bool) -> torch.Tensor:
    inner = decode_weight(weight.trellis, weight.codebook).to(x.device).double()
    if not rotated:
        return x.double() @ dense_of(inner, weight)
    rows = hadamard_128((x * weight.suh.float()).half().float()).half().double()
    return hadamard_128(rows @ inner) * weight.svh.double()


def _weight_of(linear: Exl3Linear) -> Exl3Weight:
    return Exl3Weight(
        trellis=linear.trellis,
        suh=linear.suh,
        svh=linear.svh,
        codebook=linear.codebook,
        multiplier=MULTIPLIERS[linear.codebook],
    )


def _relative(layer: Layer, exact: torch.Tensor) -> torch.Tensor:
    error = replace(layer, x=layer.x.float()).run().double() - exact
    return (error.norm(dim=1) / exact.norm(dim=1)).nan_to_num(nan=float("inf"))

"""Routed experts whose gate, up and down projections are stored per expert in EXL3: one opaque op per layer.

`exl3::experts` is opaque to tracing, as `exl3::linear` is: which route runs is decided inside, from the token count of
the call, and the loop's walk over the experts that were hit never meets a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from exl3_kernels.dispatch import dispatch_on
from exl3_kernels.grouped import (
    ExpertTable,
    build_table,
    check_grouped,
    grouped_decode,
    grouped_prefill,
    rejects_experts,
)
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import RowRange, count_launch, parse_dispatch
from exl3_kernels.weight import Exl3Weight

LOOP_ROUTE = "experts-loop"
LOOP = f"1-:{LOOP_ROUTE}"
GROUPED = "1-16:grouped-decode,17-:grouped-prefill"


class Expert(NamedTuple):
    """The three projections of one expert."""

    gate: Exl3Linear
    up: Exl3Linear
    down: Exl3Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRoute:
    """One way to serve a layer of experts.

    Parameters
    ----------
    name : str
        The word used in dispatches and counters.
    doc : str
        One sentence: what it computes and in which arithmetic.
    run : callable
        `(layer, hidden_states [T, H], top_k_index [T, S], top_k_weights [T, S]) -> [T, H]`.
    """

    name: str
    doc: str
    run: Callable[[Exl3Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Exl3Experts(nn.Module):
    """Drop-in for the fused 3-D expert modules of transformers 5.

    Results are combined per token in slot order, so the output does not depend on which other tokens are in the batch:
    by the grouped routes not at all, by the loop not beyond the row count of each expert's products.

    Parameters
    ----------
    experts : list of Expert
        Index = expert id. Bits and codebooks may differ between experts.
    activation : callable
        Applied to the gate projection.
    dispatch : str or None
        Token ranges and routes: `experts-loop`, `grouped-decode`, `grouped-prefill`. None takes the grouped routes if
        the kernels can serve the layer and every projection follows its GPU's measured dispatch; where a variant
        declares a route for linears, the loop applies that.

    Raises
    ------
    ValueError
        If the dispatch is malformed, or names a grouped route that cannot serve this layer.
    """

    def __init__(
        self,
        experts: list[Expert],
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        dispatch: str | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.ModuleList([expert.gate for expert in experts])
        self.up = nn.ModuleList([expert.up for expert in experts])
        self.down = nn.ModuleList([expert.down for expert in experts])
        self.activation = activation
        reason = self._rejects_grouped(experts)
        if dispatch is None:
            dispatch = GROUPED if not reason and _follows_measured(experts) else LOOP
        elif any(row_range.route != LOOP_ROUTE for row_range in parse_experts_dispatch(dispatch)) and reason:
            raise ValueError(f"dispatch {dispatch!r} cannot serve these experts: {reason}")
        self.dispatch = dispatch
        self._table: ExpertTable | None = None
        self._enter()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Route tokens through their experts.

        Parameters
        ----------
        hidden_states : Tensor
            [T, H].
        top_k_index : Tensor
            int64 [T, S], expert ids per token and slot; a number that is no expert leaves the slot out.
        top_k_weights : Tensor
            [T, S], combination weights.

        Returns
        -------
        Tensor
            [T, H], in the dtype of `hidden_states`.
        """
        return exl3_experts(hidden_states, top_k_index, top_k_weights, self.number, self.dispatch)

    def table(self) -> ExpertTable:
        """Return the layer as the grouped kernels find it, made and checked at the first call."""
        if self._table is None:
            weights = [(_weight(g), _weight(u), _weight(d)) for g, u, d in self._experts()]
            table = build_table(weights, self.gate[0].out_features)  # type: ignore[arg-type]
            for weight in table.classes:
                check_grouped(weight.trellis.device, weight.bits, weight.codebook)
            self._table = table
        return self._table

    def count(self, route: str, tokens: int) -> None:
        """Count one launch of a grouped route for every kind of projection in the layer."""
        for weight in self.table().classes:
            count_launch(route, tokens, weight)

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{len(self.gate)} experts, {self.dispatch}"

    def reads_routing(self) -> bool:
        """Return whether any token count is served by the loop, which no CUDA graph can hold."""
        return any(row_range.route == LOOP_ROUTE for row_range in parse_experts_dispatch(self.dispatch))

    def _experts(self) -> Iterable[tuple[Any, Any, Any]]:
        return zip(self.gate, self.up, self.down, strict=True)

    def _enter(self) -> None:
        self.number = next(_numbers)
        _layers[self.number] = self

    def _rejects_grouped(self, experts: list[Expert]) -> str:
        if not _is_silu(self.activation):
            return "their activation is not SiLU"
        widths = {(e.gate.in_features, e.gate.out_features, e.up.in_features, e.up.out_features) for e in experts}
        (hidden, inner, *up), *others = widths
        if (
            others
            or up != [hidden, inner]
            or {(e.down.in_features, e.down.out_features) for e in experts} != {(inner, hidden)}
        ):
            return "their projections differ in the widths that the model sees"
        if any(linear.out_dtype is not None for expert in experts for linear in expert):
            return "a projection has an output type of its own"
        weights = [(_weight(e.gate), _weight(e.up), _weight(e.down)) for e in experts]
        return rejects_experts(weights, weights[0][0].trellis.device.type)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Exl3Experts:
        self._table = None  # it holds addresses, and `fn` may move what lies there
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()  # a copy is a layer of its own


_layers: WeakValueDictionary[int, Exl3Experts] = WeakValueDictionary()
_numbers = count()


@torch.library.custom_op("exl3::experts", mutates_args=())
def exl3_experts(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, layer: int, dispatch: str
) -> torch.Tensor:
    """Apply one layer of routed experts.

    Parameters
    ----------
    hidden_states, top_k_index, top_k_weights : Tensor
        As in `Exl3Experts.forward`.
    layer : int
        `Exl3Experts.number`: thousands of operands per call would cost more than the call.
    dispatch : str
        Token ranges and routes.

    Returns
    -------
    Tensor
        [T, H], in the dtype of `hidden_states`.
    """
    if not top_k_index.numel():
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    route = select_experts_route(dispatch, len(hidden_states))
    return route.run(_layers[layer], hidden_states, top_k_index, top_k_weights)


@exl3_experts.register_fake
def _exl3_experts_fake(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, layer: int, dispatch: str
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _run_loop(
    layer: Exl3Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{LOOP_ROUTE} waits for the routing, which a graph capture does not allow")
    num_tokens, num_slots = top_k_index.shape
    slots_TSH = hidden_states.new_zeros(num_tokens, num_slots, hidden_states.shape[-1], dtype=torch.float32)
    for expert in torch.unique(top_k_index).tolist():
        if not 0 <= expert < len(layer.gate):
            continue
        token, slot = torch.where(top_k_index == expert)
        x = hidden_states[token]
        y = layer.down[expert](layer.activation(layer.gate[expert](x)) * layer.up[expert](x))
        slots_TSH[token, slot] = y.float() * top_k_weights[token, slot, None].float()
    total_TH = torch.zeros_like(slots_TSH[:, 0])
    for slot_TH in slots_TSH.unbind(dim=1):
        total_TH += slot_TH
    return total_TH.to(hidden_states.dtype)


def _grouped(
    name: str, serve: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertTable], torch.Tensor]
) -> Callable[[Exl3Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(
        layer: Exl3Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        table = layer.table()
        hidden = hidden_states.shape[-1]
        x_TH = nn.functional.pad(hidden_states, (0, table.weights[0][0].in_features - hidden))
        y_TH = serve(x_TH, top_k_index, top_k_weights, table)
        layer.count(name, len(x_TH))
        return y_TH[:, :hidden].contiguous()

    return run


EXPERTS_ROUTES = {
    route.name: route
    for route in (
        ExpertsRoute(
            name=LOOP_ROUTE,
            doc="One expert after the other, each projection by its own dispatch; any device.",
            run=_run_loop,
        ),
        ExpertsRoute(
            name="grouped-decode",
            doc="All experts in three launches, up to eight rows per decoding of the weights; the bits of decode-gemm.",
            run=_grouped("grouped-decode", grouped_decode),
        ),
        ExpertsRoute(
            name="grouped-prefill",
            doc="Pairs sorted by expert, up to 64 rows per decoding of the weights; the bits of decode-gemm.",
            run=_grouped("grouped-prefill", grouped_prefill),
        ),
    )
}


def parse_experts_dispatch(dispatch: str) -> tuple[RowRange, ...]:
    """Parse `first-last:route,...` over token counts, see `routes.parse_dispatch`.

    Raises
    ------
    ValueError
        On a malformed range, a gap, an overlap, or an unknown route.
    """
    return parse_dispatch(dispatch, tuple(EXPERTS_ROUTES))


def select_experts_route(dispatch: str, tokens: int) -> ExpertsRoute:
    """Return the route that serves `tokens`."""
    for row_range in parse_experts_dispatch(dispatch):
        if row_range.last is None or tokens <= row_range.last:
            return EXPERTS_ROUTES[row_range.route]
    raise AssertionError("parse_experts_dispatch guarantees an open last range")


def _weight(linear: Exl3Linear) -> Exl3Weight:
    return Exl3Weight(
        trellis=linear.trellis,
        suh=linear.suh,
        svh=linear.svh,
        bias=linear.bias,
        codebook=linear.codebook,
        multiplier=linear.multiplier,
    )


def _follows_measured(experts: list[Expert]) -> bool:
    """Return whether every projection's dispatch is the one that its GPU's table gives its shape."""
    device = experts[0].gate.trellis.device
    given = {
        (weight.in_features, weight.out_features, weight.bits, linear.dispatch)
        for expert in experts
        for linear in expert
        for weight in (_weight(linear),)
    }
    return all(dispatch_on(device, k, n, bits) == dispatch for k, n, bits, dispatch in given)


def _is_silu(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether a function is SiLU, told by its values: models wrap it in modules of many names."""
    probe = torch.linspace(-20, 20, 257)
    return torch.equal(activation(probe), nn.functional.silu(probe))

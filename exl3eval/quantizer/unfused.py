"""Routed experts as separate linears, so that each projection can be calibrated and quantized on its own."""

from __future__ import annotations

import torch
from torch import nn

from exl3eval.errors import CheckpointError


class UnfusedExperts(nn.Module):
    """The experts of one layer, split out of transformers' 3-D parameters.

    While `everyone` is set, every expert sees every token (as upstream calibrates), though only the routed
    ones enter the output. Children are named as EXL3 stores them: `{expert}.gate_proj` and so on.
    """

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        gate_up, down = getattr(fused, "gate_up_proj", None), getattr(fused, "down_proj", None)
        usual = isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor) and gate_up.dim() == 3
        if not usual or getattr(fused, "has_bias", False) or getattr(fused, "is_transposed", False):
            raise CheckpointError(
                f"{type(fused).__name__} does not hold plain gate, up and down projections",
                hint="this architecture cannot be quantized here",
            )
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        self.activation = fused.act_fn
        self.everyone = False
        self.num_experts = len(gate_up)
        for expert in range(self.num_experts):
            gate, up = gate_up[expert].chunk(2, dim=0)
            child = nn.Module()
            child.gate_proj, child.up_proj = _linear(gate), _linear(up)
            child.down_proj = _linear(down[expert])
            self.add_module(str(expert), child)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Route tokens: [T, H], [T, S], [T, S] -> [T, H]."""
        output = torch.zeros_like(hidden, dtype=torch.float32)
        for index in range(self.num_experts):
            expert = self.get_submodule(str(index))
            token, slot = torch.where(top_k_index == index)
            x = hidden if self.everyone else hidden[token]
            y = expert.down_proj(self.activation(expert.gate_proj(x)) * expert.up_proj(x))  # type: ignore[operator]
            routed = y[token] if self.everyone else y
            output.index_add_(0, token, routed.float() * top_k_weights[token, slot, None].float())
        return output.to(hidden.dtype)


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear

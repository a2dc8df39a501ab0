"""Routed experts whose gate, up and down projections are stored per expert in EXL3."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from exl3_kernels.linear import Exl3Linear


class Expert(NamedTuple):
    """The three projections of one expert."""

    gate: Exl3Linear
    up: Exl3Linear
    down: Exl3Linear


class Exl3Experts(nn.Module):
    """Drop-in for the fused 3-D expert modules of transformers 5.

    Each expert sees its own tokens in token order; results are combined per token in slot order, so the
    output does not depend on which other tokens are in the batch beyond the row count of each product.

    Parameters
    ----------
    experts : list of Expert
        Index = expert id. Bits and codebooks may differ between experts.
    activation : callable
        Applied to the gate projection.
    """

    def __init__(self, experts: list[Expert], *, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate = nn.ModuleList([expert.gate for expert in experts])
        self.up = nn.ModuleList([expert.up for expert in experts])
        self.down = nn.ModuleList([expert.down for expert in experts])
        self.activation = activation

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Route tokens through their experts.

        Parameters
        ----------
        hidden_states : Tensor
            [T, H].
        top_k_index : Tensor
            int64 [T, S], expert ids per token and slot.
        top_k_weights : Tensor
            [T, S], combination weights.

        Returns
        -------
        Tensor
            [T, H], in the dtype of `hidden_states`.
        """
        num_tokens, num_slots = top_k_index.shape
        slots_TSH = hidden_states.new_zeros(num_tokens, num_slots, hidden_states.shape[-1], dtype=torch.float32)
        for expert in torch.unique(top_k_index).tolist():
            if not 0 <= expert < len(self.gate):
                continue
            token, slot = torch.where(top_k_index == expert)
            x = hidden_states[token]
            y = self.down[expert](self.activation(self.gate[expert](x)) * self.up[expert](x))
            slots_TSH[token, slot] = y.float() * top_k_weights[token, slot, None].float()
        return slots_TSH.sum(dim=1).to(hidden_states.dtype)

"""Hidden states to FP32 logits: the head's product, accumulated and emitted in FP32.

Shapes: T positions, H hidden size, V scored vocabulary, W width of the stored head (>= V).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from exl3_kernels.linear import Exl3Linear
from exl3eval.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An output head that scores exactly `vocab_size` ids.

    Parameters
    ----------
    module : Module
        `nn.Linear` or `Exl3Linear`.
    vocab_size : int
        Ids scored; later columns are padding or unused rows.
    scale : float
        Factor on the logits (Cohere multiplies, Granite divides).
    softcap : float or None
        Gemma's tanh cap.
    """

    module: nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    @torch.inference_mode()
    def all_logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return FP32 logits over the whole stored width: [T, H] -> [T, W]."""
        hidden_TH = hidden_TH.float()
        if isinstance(self.module, Exl3Linear):
            logits_TW = self.module.forward_padded(hidden_TH)
        else:
            assert isinstance(self.module, nn.Linear)
            bias = self.module.bias
            logits_TW = nn.functional.linear(
                hidden_TH, self.module.weight.float(), None if bias is None else bias.float()
            )
        if self.scale != 1.0:
            logits_TW = logits_TW * self.scale
        if self.softcap is not None:
            logits_TW = torch.tanh(logits_TW / self.softcap) * self.softcap
        return logits_TW

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return FP32 logits of the scored ids: [T, H] -> [T, V]."""
        return self.all_logits(hidden_TH)[:, : self.vocab_size]


def make_head(model: nn.Module, *, vocab_size: int) -> Head:
    """Take the output head of a loaded model.

    Raises
    ------
    CheckpointError
        If there is none, or it has fewer columns than ids to score.
    """
    module = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(module, nn.Linear | Exl3Linear):
        raise CheckpointError(f"{type(model).__name__} has no linear output head", hint="give a causal LM directory")
    if module.out_features < vocab_size:
        raise CheckpointError(
            f"the head has {module.out_features} columns, the tokenizer {vocab_size} ids",
            hint="tokenizer and weights belong to different models",
        )
    config = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        module=module,
        vocab_size=vocab_size,
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
    )

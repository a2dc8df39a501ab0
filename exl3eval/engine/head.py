"""Hidden states to FP32 logits: the head's product, accumulated and emitted in FP32.

Shapes: T positions, H hidden size, V scored vocabulary, W width of the stored head (>= V).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from exl3_kernels.linear import Exl3Linear
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import load_plain
from exl3eval.engine.placement import Placement, cut_padding, model_name
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """Where a model's head lies in its checkpoint, so that the head can be had without the model.

    Parameters
    ----------
    key : str
        Name of the EXL3 module, or of the 16-bit table [W, H]; a tied head names the embedding.
    bias_key : str or None
        Name of a 16-bit head's bias [W].
    in_features, out_features : int
        H, and the width W that the model sees.
    """

    key: str
    bias_key: str | None
    in_features: int
    out_features: int


def find_head(model: nn.Module, checkpoint: Checkpoint, head: Head) -> HeadSource:
    """Find the head of a loaded model in its checkpoint.

    Raises
    ------
    CheckpointError
        If no stored tensor has its name.
    """
    own, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    name = names[id(own)]
    tied = isinstance(own, nn.Linear) and own.weight is getattr(table, "weight", None)
    stored = {model_name(key): key for key in checkpoint.modules if not isinstance(own, nn.Linear)}
    plain = {model_name(key): key for key in checkpoint.plain}
    key = stored.get(name) or plain.get(f"{names[id(table)] if tied else name}.weight")
    if key is None:
        raise CheckpointError(f"{name}: no stored tensor has the name of the head", hint="fetch the whole checkpoint")
    return HeadSource(
        key=key,
        bias_key=plain.get(f"{name}.bias") if isinstance(own, nn.Linear) and own.bias is not None else None,
        in_features=int(head.module.in_features),  # type: ignore[arg-type]
        out_features=int(head.module.out_features),  # type: ignore[arg-type]
    )


def load_head(like: Head, source: HeadSource, placement: Placement, dtype: torch.dtype) -> Head:
    """Load a head from its checkpoint alone.

    Parameters
    ----------
    like : Head
        Its vocabulary, scale and cap; its module is not used.
    source : HeadSource
        Where it lies.
    placement : Placement
        How it is loaded.
    dtype : dtype
        In which a 16-bit head ran.

    Raises
    ------
    CheckpointError
        If what lies there does not fit.
    """
    widths = {"in_features": source.in_features, "out_features": source.out_features}
    if source.key in placement.checkpoint.modules:
        return replace(like, module=placement.linear(source.key, **widths))
    module = nn.Linear(**widths, bias=source.bias_key is not None, device="meta")
    for name, key in (("weight", source.key), ("bias", source.bias_key)):
        if key is not None:
            tensor = cut_padding(load_plain(placement.checkpoint, key, placement.device), getattr(module, name).shape)
            setattr(module, name, nn.Parameter(tensor.to(dtype), requires_grad=False))
    return replace(like, module=module)


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

"""The reference's head, from its checkpoint alone: what turns its hidden states into FP32 logits in every process."""

from __future__ import annotations

import torch
from torch import nn

from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import load_plain
from exl3eval.engine.head import Head
from exl3eval.engine.placement import Placement
from exl3eval.errors import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def load_reference_head(checkpoint: Checkpoint, *, vocab_size: int, device: torch.device) -> Head:
    """Load the head of a model directory, its weight in FP32.

    Parameters
    ----------
    checkpoint : Checkpoint
        The reference; an EXL3 head runs its reference route.
    vocab_size : int
        Ids scored; later columns are cut.
    device : device
        Where to.

    Raises
    ------
    CheckpointError
        If there is no head, or it has fewer rows than ids to score.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    module: nn.Module
    if checkpoint.head_key is not None:
        placement = Placement(checkpoint=checkpoint, dispatch="1-:reference", device=device)
        module = placement.linear(checkpoint.head_key)
    else:
        module = _plain_head(checkpoint, device)
    if module.out_features < vocab_size:  # type: ignore[operator]
        raise CheckpointError(
            f"the head has {module.out_features} columns, the tokenizer {vocab_size} ids",
            hint="tokenizer and weights belong to different models",
        )
    return Head(module=module, vocab_size=vocab_size, scale=scale, softcap=text.get("final_logit_softcapping"))


def _plain_head(checkpoint: Checkpoint, device: torch.device) -> nn.Linear:
    names = [name for suffix in (HEAD, EMBEDDING) for name in checkpoint.plain if name.endswith(suffix)]
    if not names or (names[0].endswith(EMBEDDING) and checkpoint.tie_word_embeddings is False):
        raise CheckpointError(f"{checkpoint.directory.name} stores no output head", hint="give a causal LM directory")
    weight_WH = load_plain(checkpoint, names[0], device).float()
    bias_name = names[0].removesuffix("weight") + "bias"
    linear = nn.Linear(weight_WH.shape[1], weight_WH.shape[0], bias=bias_name in checkpoint.plain, device="meta")
    linear.weight = nn.Parameter(weight_WH, requires_grad=False)
    if bias_name in checkpoint.plain:
        linear.bias = nn.Parameter(load_plain(checkpoint, bias_name, device).float(), requires_grad=False)
    return linear

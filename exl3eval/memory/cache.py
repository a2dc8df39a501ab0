"""The key-value cache: bytes counted from its tensors, and bytes by the formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Bytes of the cache's tensors.

    Parameters
    ----------
    per_token : float
        Growth per token of one context, over the decoded tokens.
    per_prefilled_token : float
        All bytes after the prefill over its tokens; larger where layers also keep a state of fixed size.
    total : int
        After the last token.
    """

    per_token: float
    per_prefilled_token: float
    total: int


def cache_bytes(cache: Any) -> int:
    """Sum the storages of every tensor in a cache's layers, each once."""
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for value in vars(layer).values()
        for tensor in (value if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def formula_bytes(config: Mapping[str, Any], activations: str) -> tuple[int | None, str]:
    """Return 2 x layers x key-value heads x head width x bytes per element, or None and the reason.

    Parameters
    ----------
    config : mapping
        Content of `config.json`.
    activations : str
        Dtype of the cache.
    """
    text = {**config, **(config.get("text_config") or {})}
    if text.get("kv_lora_rank"):
        return None, "the model caches a latent vector instead of keys and values"
    layers = text.get("num_hidden_layers")
    kinds = text.get("layer_types") or [ATTENTION] * (layers or 0)
    if "sliding_attention" in kinds or (text.get("sliding_window") and text.get("use_sliding_window", True)):
        return None, "some layers stop growing at their window"
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    width = text.get("head_dim")
    if width is None and text.get("hidden_size") and text.get("num_attention_heads"):
        width = text["hidden_size"] // text["num_attention_heads"]
    if not kinds or not heads or not width:
        return None, "config.json does not tell layers, key-value heads and head width"
    element = getattr(torch, activations).itemsize
    return 2 * kinds.count(ATTENTION) * heads * width * element, ""

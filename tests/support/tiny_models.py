"""Tiny model directories made on the spot: random weights in upstream's EXL3 layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exl3_kernels.weight import MULTIPLIERS

VOCAB = 256


def tiny_config(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **changes,
    }


def exl3_tensors(
    key: str, k: int, n: int, *, bits: int = 4, codebook: str = "mcg", seed: int = 0
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed + len(key))
    tensors = {
        f"{key}.trellis": torch.randint(
            -(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=g, dtype=torch.int16
        ),
        f"{key}.suh": (torch.sign(torch.randn(k, generator=g)) * 0.05).half(),
        f"{key}.svh": torch.sign(torch.randn(n, generator=g)).half(),
    }
    if codebook != "3inst":
        signed = int(np.uint32(MULTIPLIERS[codebook]).astype(np.int32))
        tensors[f"{key}.{codebook}"] = torch.tensor(signed, dtype=torch.int32)
    return tensors


def llama_tensors(config: dict[str, object], *, seed: int = 0) -> dict[str, torch.Tensor]:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])  # type: ignore[call-overload]
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=g).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    layer = "model.layers.0"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    for name, k, n in (
        ("self_attn.q_proj", hidden, 128),
        ("self_attn.k_proj", hidden, 64),
        ("self_attn.v_proj", hidden, 64),
        ("self_attn.o_proj", 128, hidden),
        ("mlp.gate_proj", hidden, inner),
        ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ):
        tensors |= exl3_tensors(f"{layer}.{name}", _pad(k), _pad(n), seed=seed)
    return tensors | exl3_tensors("lm_head", _pad(hidden), _pad(VOCAB), bits=6, seed=seed)


def _pad(size: int) -> int:
    return -(-size // 128) * 128


def write_tokenizer(directory: Path, size: int = VOCAB) -> None:
    vocabulary = {f"t{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(directory)


def write_model(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], *, exl3: bool = True
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    quantization = {"quantization_config": {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}} if exl3 else {}
    (directory / "config.json").write_text(json.dumps({**config, **quantization}))
    write_tokenizer(directory)
    return directory

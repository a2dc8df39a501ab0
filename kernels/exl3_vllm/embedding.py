"""The int8 overlay of the input embedding, for any vLLM model, EXL3 or not.

Most of vLLM's models build their embedding without naming a quantization, so a quantization method is not asked. The
overlay therefore replaces the class that the models build.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from exl3_kernels.embedding import quantize_rows
from exl3_vllm.ops import embedding_int8
from exl3_vllm.priming import prime_embedding
from exl3_vllm.readback import begin_model, forget_embeddings, note_embedding
from exl3_vllm.settings import load_variant

NAME = "VocabParallelEmbedding"


class Int8EmbeddingMethod(UnquantizedEmbeddingMethod):
    """The table as int8 rows with one scale each; a head that is tied to it keeps the stored table.

    Parameters
    ----------
    prefix : str
        The layer's name.
    tied : bool
        Whether the output head is this table.
    """

    def __init__(self, prefix: str, *, tied: bool) -> None:
        super().__init__()
        self.prefix, self.tied = prefix, tied

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the loaded table, and drop it unless a head is tied to it.

        Raises
        ------
        ValueError
            If a row holds a non-finite value.
        """
        table = layer.weight.data
        codes, scales = quantize_rows(table)
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales, persistent=False)
        self.out_dtype = table.dtype
        # vLLM's fused gather for several ranks reads the stored table by itself.
        layer.use_fused_embedding = False
        note_embedding(
            self.prefix,
            rows=table.shape[0],
            stored_bytes=table.nbytes,
            run_bytes=codes.nbytes + scales.nbytes + (table.nbytes if self.tied else 0),
        )
        if self.tied:
            super().process_weights_after_loading(layer)
        else:
            del layer.weight
        prime_embedding(codes, scales, self.out_dtype)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Gather and dequantize rows: int [...] -> [..., H]."""
        return embedding_int8(layer.codes, layer.scales, input_, self.out_dtype)


class _OverlayConfig:
    """What an embedding asks for its method; it stands in for a quantization configuration at that one place."""

    online_quantization_config = None

    def __init__(self, *, tied: bool) -> None:
        self._tied = tied

    def get_quant_method(self, layer: Any, prefix: str) -> Int8EmbeddingMethod:
        return Int8EmbeddingMethod(prefix or "embed_tokens", tied=self._tied)


class Exl3VocabEmbedding(VocabParallelEmbedding):
    """vLLM's vocabulary embedding, with the overlay where it is the model's input embedding.

    Raises
    ------
    ValueError
        If a drafter would share the model's configuration: its acceptance would change with no number to show for it.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        forget_embeddings()
        variant, vllm_config = load_variant(), get_current_vllm_config()
        if variant.embedding == "stored":
            super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
            return
        if vllm_config.speculative_config is not None:
            raise ValueError(
                'embedding "int8" with speculative decoding: drafters build or share tables under the same '
                "configuration; serve without a drafter, or with the stored embedding"
            )
        text_config = vllm_config.model_config.hf_config.get_text_config()
        if (num_embeddings, embedding_dim) == (text_config.vocab_size, text_config.hidden_size):
            kwargs["quant_config"] = _OverlayConfig(tied=bool(text_config.tie_word_embeddings))
            begin_model(vllm_config, variant)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)


def register_overlay() -> None:
    """Make vLLM build `Exl3VocabEmbedding` for every vocabulary embedding; a second call does nothing.

    Raises
    ------
    ValueError
        If another plugin has replaced that class already.
    """
    registered = op_registry_oot.get(NAME)
    if registered is None:
        PluggableLayer.register_oot(Exl3VocabEmbedding, name=NAME)
    elif registered is not Exl3VocabEmbedding:
        raise ValueError(
            f"another plugin replaces {NAME} by {registered.__module__}.{registered.__qualname__}: "
            "choose one with VLLM_PLUGINS"
        )

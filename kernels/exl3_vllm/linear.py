"""EXL3 linears of a vLLM model: parallel linears, fused or not, and the quantized head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.utils import set_weight_attrs

from exl3_kernels.linear import Exl3Linear
from exl3_vllm.ops import fused_linear
from exl3_vllm.priming import prime_linear
from exl3_vllm.readback import note_linear
from exl3_vllm.routing import resolve_dispatch
from exl3_vllm.settings import ServedVariant
from exl3_vllm.shards import Shard, columns_of, group_widths, window
from exl3_vllm.store import ShardStore
from exl3_vllm.stored import StoredLinear

QKV = {"q": 0, "k": 1, "v": 2}


class Exl3LinearMethod(LinearMethodBase):
    """One layer's EXL3 linears behind one op.

    Parameters
    ----------
    stored : sequence of StoredLinear
        In the order of the layer's outputs.
    prefix : str
        The layer's name.
    variant : ServedVariant
        Which routes serve.
    graph_rows : sequence of int
        Row counts that will be captured as graphs.
    out_dtype : dtype or None
        None for the dtype of the activations; the head writes float32 logits.
    """

    def __init__(
        self,
        stored: Sequence[StoredLinear],
        *,
        prefix: str,
        variant: ServedVariant,
        graph_rows: Sequence[int] = (),
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.stored, self.prefix, self.variant = tuple(stored), prefix, variant
        self.graph_rows, self.out_dtype = tuple(graph_rows), out_dtype

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters, see `LinearMethodBase.create_weights`.

        Raises
        ------
        ValueError
            If the stored widths are not the model's, or a rank would hold part of a 128-block.
        """
        ranks = getattr(layer, "tp_size", 1)
        rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
        in_ranks = 1 if input_size_per_partition == input_size else ranks
        out_ranks = 1 if sum(output_partition_sizes) == output_size else ranks
        sizes = [stored.out_features for stored in self.stored]
        self.groups = group_widths(sizes, output_partition_sizes, out_ranks, self.prefix)
        shards = []
        for stored, group in zip(self.stored, self.groups, strict=True):
            widths = [output_partition_sizes[index] for index in group]
            rows = window(stored.in_features, input_size_per_partition, rank, in_ranks, f"{stored.key} inputs")
            columns = columns_of(stored.out_features, widths, rank, out_ranks, f"{stored.key} outputs")
            shards.append(
                Shard(
                    stored=stored,
                    rows=rows,
                    columns=columns,
                    in_width=input_size_per_partition,
                    out_width=sum(widths),
                )
            )
        self.params_dtype = params_dtype
        self.biases: list[torch.Tensor | None] = [None] * len(shards)
        self.store = ShardStore(layer, shards)
        for suffix in self.store.suffixes:
            set_weight_attrs(self.store.parameter(suffix), {"weight_loader": self._loader(suffix)})
        # The layer registers its bias after this, with whatever loader it then has.
        layer.weight_loader = self._load_bias

    def _part_of(self, shard_id: Any) -> int:
        if shard_id is None:
            if len(self.groups) > 1:
                raise ValueError(f"{self.prefix}: a stored tensor came without the name of its part")
            return 0
        first = shard_id[0] if isinstance(shard_id, tuple | list) else shard_id
        output = QKV.get(first, first)
        return next(part for part, group in enumerate(self.groups) if output in group)

    def _loader(self, suffix: str) -> Any:
        def load(param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: Any = None) -> None:
            self.store.load(suffix, self._part_of(shard_id), loaded_weight)

        return load

    def _load_bias(self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: Any = None) -> None:
        """Keep a bias as stored, padding included, and give the layer its own copy."""
        part = self._part_of(shard_id)
        bias = self.store.shards[part].cut("bias", loaded_weight).to(param.device)
        self.biases[part] = bias
        start = sum(shard.out_width for shard in self.store.shards[:part])
        width = self.store.shards[part].out_width
        param.data[start : start + width].copy_(bias[:width])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the parameters into modules, and run them once per row count that a graph will capture.

        Raises
        ------
        ValueError
            If something was not loaded, or a route rejects a linear.
        """
        parts = [
            Exl3Linear(
                weight,
                dispatch=resolve_dispatch(self.variant, weight),
                in_features=shard.in_width,
                out_features=shard.out_width,
            )
            for weight, shard in zip(self.store.weights(self.biases), self.store.shards, strict=True)
        ]
        if any((part.bias is None) != (layer.bias is None) for part in parts) or any(
            shard.stored.has_bias and bias is None for shard, bias in zip(self.store.shards, self.biases, strict=True)
        ):
            raise ValueError(f"{self.prefix}: the model and the checkpoint do not agree that there is a bias")
        self.store.release()
        layer.exl3 = nn.ModuleList(parts)
        out_dtype = self.out_dtype or self.params_dtype
        note_linear(
            self.prefix, [(shard.stored.key, part) for shard, part in zip(self.store.shards, parts, strict=True)]
        )
        prime_linear(parts, self.params_dtype, out_dtype, self.graph_rows)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer: [..., in] -> [..., out]; the bias added is the stored one, in its stored precision."""
        return fused_linear(x, list(layer.exl3), with_bias=bias is not None, out_dtype=self.out_dtype or x.dtype)

"""Routed experts of a vLLM model, each projection of each expert an EXL3 linear of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from exl3_kernels.experts import Expert
from exl3_vllm.ops import TalliedExperts, TalliedLinear
from exl3_vllm.priming import prime_experts
from exl3_vllm.readback import note_experts, note_linear
from exl3_vllm.routing import resolve_dispatch
from exl3_vllm.settings import ServedVariant
from exl3_vllm.shards import Shard, window
from exl3_vllm.store import ShardStore
from exl3_vllm.stored import StoredLinear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
}
SPECIAL = ("apply_router_weight_on_input", "swiglu_limit", "swiglu_alpha", "swiglu_beta")


class Exl3ExpertsMethod(FusedMoEMethodBase):
    """Experts of one layer behind one op: grouped where the GPU's kernels can serve them, else one after another.

    Parameters
    ----------
    moe : FusedMoEConfig
        vLLM's description of the layer.
    stored : mapping
        (expert id, `w1` for gate, `w2` for down or `w3` for up) to the stored linear.
    prefix : str
        The layer's name.
    variant : ServedVariant
        Which routes serve.
    graph_rows : sequence of int
        Token counts that will be captured as graphs.

    Raises
    ------
    ValueError
        If the layer has biases, or experts are spread over ranks.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        stored: Mapping[tuple[int, str], StoredLinear],
        *,
        prefix: str,
        variant: ServedVariant,
        graph_rows: Sequence[int],
    ) -> None:
        super().__init__(moe)
        if moe.has_bias or moe.moe_parallel_config.use_ep:
            raise ValueError(f"{prefix}: EXL3 experts have no biases and are not spread over ranks by expert")
        self.stored, self.prefix, self.variant, self.graph_rows = stored, prefix, variant, graph_rows

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters, see `FusedMoEMethodBase.create_weights`.

        Raises
        ------
        ValueError
            If an expert is missing, the widths are not the model's, a rank would hold part of a 128-block, or the
            layer's activation is not a plain gated one.
        """
        activation = ACTIVATIONS.get(layer.activation.value)
        special = [name for name in SPECIAL if getattr(layer, name, None)]
        if activation is None or special:
            raise ValueError(
                f"{self.prefix}: EXL3 experts serve gated {' and '.join(ACTIVATIONS)}, "
                f"this layer has {layer.activation.value} {' '.join(special)}".rstrip()
            )
        self.activation = activation
        _flatten_trellises(layer)
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        hidden, inner = hidden_size, intermediate_size_per_partition
        self.stores = {}
        for prefix, projections in (("w13_", ("w1", "w3")), ("w2_", ("w2",))):
            shards = []
            for expert in range(num_experts):
                for projection in projections:
                    down = projection == "w2"
                    stored = self.stored.get((expert, projection))
                    if stored is None:
                        raise ValueError(f"{self.prefix}: expert {expert} has no {projection} in the checkpoint")
                    k, n = (inner, hidden) if down else (hidden, inner)
                    rows = window(stored.in_features, k, rank, ranks if down else 1, f"{stored.key} inputs")
                    columns = window(stored.out_features, n, rank, 1 if down else ranks, f"{stored.key} outputs")
                    shards.append(Shard(stored=stored, rows=rows, columns=(columns,), in_width=k, out_width=n))
            store = ShardStore(layer, shards, prefix=prefix)
            for suffix in store.suffixes:
                loader = self._loader(store, suffix, projections)
                set_weight_attrs(store.parameter(suffix), {"weight_loader": loader})
            self.stores[prefix] = store

    @staticmethod
    def _loader(store: ShardStore, suffix: str, projections: tuple[str, ...]) -> Any:
        def load(
            param: nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            index = expert_id * len(projections) + projections.index(shard_id)
            store.load(suffix, index, loaded_weight.reshape(store.shards[index].stored.shapes.get(suffix, ())))
            return True if return_success else None

        return load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the parameters into experts.

        Raises
        ------
        ValueError
            If something was not loaded, a route rejects a linear, or the loop over experts would be captured.
        """
        linears: dict[str, list[TalliedLinear]] = {}
        described = []
        for prefix, store in self.stores.items():
            weights = store.weights([None] * len(store.shards))
            linears[prefix] = [
                TalliedLinear(
                    weight,
                    dispatch=resolve_dispatch(self.variant, weight),
                    in_features=shard.in_width,
                    out_features=shard.out_width,
                )
                for weight, shard in zip(weights, store.shards, strict=True)
            ]
            described += [
                (shard.stored.key, linear) for shard, linear in zip(store.shards, linears[prefix], strict=True)
            ]
            store.release()
        gate, up = linears["w13_"][0::2], linears["w13_"][1::2]
        experts = [Expert(*triple) for triple in zip(gate, up, linears["w2_"], strict=True)]
        layer.exl3 = TalliedExperts(experts, activation=self.activation)
        note_linear(self.prefix, described)
        note_experts(self.prefix, layer.exl3)
        if not self.graph_rows:
            return
        if layer.exl3.reads_routing():
            raise ValueError(
                f"{self.prefix}: these EXL3 experts are served one after another, by routing read on the host, which "
                "no CUDA graph can replay: start with --enforce-eager or cudagraph_mode NONE"
            )
        prime_experts(layer.exl3, self.moe.in_dtype, self.moe.experts_per_token, self.graph_rows)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: vLLM's own expert kernels are not used."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route [T, H] rows through their experts; shared experts are run by vLLM, before or after."""
        return layer.exl3(x, topk_ids.long(), topk_weights)


def _flatten_trellises(layer: Any) -> None:
    """Give vLLM's loader matrices: 0.26 takes any tensor of three dimensions for all experts of a layer at once."""
    load = layer.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        return load((name, tensor.flatten(1) if tensor.dim() == 3 else tensor) for name, tensor in weights)

    layer.load_weights = load_weights

"""The quantization configuration that vLLM reads from a checkpoint of `quant_method` exl3."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata

from exl3_vllm.experts import Exl3ExpertsMethod
from exl3_vllm.linear import Exl3LinearMethod
from exl3_vllm.priming import captured_rows
from exl3_vllm.readback import begin_model, forget_built
from exl3_vllm.settings import load_variant
from exl3_vllm.stored import StoredLinear, find_linears

FORMAT = "exl3"
ALIAS = "exl3-kernels"
FUSIONS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = "lm_head"
ROUTED = ".routed_experts"


class Exl3Config(QuantizationConfig):
    """EXL3 as upstream and `exl3eval quantize` write it.

    What is quantized, with how many bits and in which codebook is read from the headers of the safetensors files; the
    block in `config.json` only says that it is EXL3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variant = load_variant()
        self.linears: dict[str, StoredLinear] = {}
        self._original: dict[str, StoredLinear] = {}

    def get_name(self) -> str:
        """Return `exl3`."""
        return FORMAT

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that every route takes."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 80: the CUDA kernels need Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file that repeats the block of `config.json`."""
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        """Return the configuration; the block's figures are averages and not used."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Serve an EXL3 checkpoint under the alias when the user asks for it: another plugin may own `exl3`."""
        return ALIAS if user_quant == ALIAS and (hf_quant_cfg or {}).get("quant_method") == FORMAT else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers, and untie a head that is stored quantized beside a tied embedding.

        Raises
        ------
        ValueError
            If the checkpoint holds no EXL3 linear, or one in a layout that cannot be served.
        """
        forget_built()
        metadata = get_safetensors_params_metadata(model_name, revision=revision)
        shapes = {name: tuple(info["shape"]) for name, info in metadata.items() if "shape" in info}
        self._original = self.linears = find_linears(shapes)
        if not self.linears:
            raise ValueError(f"{model_name}: no EXL3 linear in its safetensors files: fetch the whole checkpoint")
        if hf_config is not None and any(key.rpartition(".")[2] == HEAD for key in self.linears):
            for config in (hf_config, hf_config.get_text_config()):
                config.tie_word_embeddings = False

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Add the names that vLLM's model gives the stored linears, those that it fuses still apart."""
        renames = dataclasses.replace(hf_to_vllm_mapper, orig_to_new_stacked={})
        named = renames.apply_dict({f"{key}.trellis": stored for key, stored in self._original.items()})
        self.linears = {**self.linears, **{key.removesuffix(".trellis"): stored for key, stored in named.items()}}

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Return the EXL3 method of a layer, or vLLM's own for a layer that is not stored as EXL3.

        Raises
        ------
        ValueError
            If only some parts of a fused layer are EXL3.
        """
        vllm_config = get_current_vllm_config()
        begin_model(vllm_config, self.variant)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix, vllm_config)
        is_head = isinstance(layer, ParallelLMHead)
        if not is_head and not isinstance(layer, LinearBase):
            return None
        stored = self._stored_parts(prefix)
        if not stored:
            return None if is_head else UnquantizedLinearMethod()
        return Exl3LinearMethod(
            stored,
            prefix=prefix,
            variant=self.variant,
            graph_rows=captured_rows(vllm_config),
            out_dtype=torch.float32 if is_head else None,
        )

    def _stored_parts(self, prefix: str) -> list[StoredLinear]:
        if prefix in self.linears:
            return [self.linears[prefix]]
        parent, _, name = prefix.rpartition(".")
        parts = {**FUSIONS, **self.packed_modules_mapping}.get(name, [])
        keys = [f"{parent}.{part}" for part in parts]
        present = [key for key in keys if key in self.linears]
        if present and len(present) != len(keys):
            missing = next(key for key in keys if key not in self.linears)
            raise ValueError(f"{prefix}: {present[0]} is EXL3 and {missing} is not, vLLM fuses them into one layer")
        return [self.linears[key] for key in present]

    def _experts_method(self, layer: Any, prefix: str, vllm_config: Any) -> Exl3ExpertsMethod | None:
        parent = prefix.removesuffix(ROUTED)
        names = {"w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name, "w3": layer.ckpt_up_proj_name}
        stored = {
            (expert, projection): self.linears[key]
            for expert in range(layer.global_num_experts)
            for projection, name in names.items()
            if (key := f"{parent}.{expert}.{name}") in self.linears
        }
        if not stored:
            return None
        return Exl3ExpertsMethod(
            layer.moe_config,
            stored,
            prefix=prefix,
            variant=self.variant,
            graph_rows=captured_rows(vllm_config) if current_platform.is_cuda() else (),
        )

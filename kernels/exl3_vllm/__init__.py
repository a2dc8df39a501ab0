"""EXL3 checkpoints in vLLM: the kernels of `exl3_kernels` behind vLLM's own quantization interface.

vLLM finds `register` by its entry point (group `vllm.general_plugins`) and calls it in every process. What is served is
said by one environment variable, see `exl3_vllm.settings`.
"""

from __future__ import annotations

from exl3_vllm.readback import effective_config, read_counts, reset_counts

__all__ = ["effective_config", "read_counts", "register", "reset_counts"]


def register() -> None:
    """Register the quantization method `exl3`, its alias `exl3-kernels`, and the overlay that the variant asks for.

    A stack that brings an `exl3` of its own keeps it; the alias then serves this one. A second call does nothing.

    Raises
    ------
    ValueError
        If the variant is malformed, or another plugin owns the embedding that the overlay replaces.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from exl3_vllm.config import ALIAS, FORMAT, Exl3Config
    from exl3_vllm.settings import load_variant

    variant = load_variant()
    for name in (FORMAT, ALIAS):
        if name not in QUANTIZATION_METHODS:
            register_quantization_config(name)(Exl3Config)
    if variant.embedding == "int8":
        from exl3_vllm.embedding import register_overlay

        register_overlay()

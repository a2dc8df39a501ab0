"""The worker extension: every row of logits that the engine emits, and what the engine says of itself.

vLLM mixes this class into its worker. `compute_logits` is shadowed on the model instance: it runs outside every
compiled or graph-replayed region, in both model runners, with post-final-norm hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


class EmittedRows:
    """Methods that `collective_rpc` calls by name on the worker."""

    model_runner: Any
    vllm_config: Any
    _exl3eval_calls: list[tuple[torch.Tensor, torch.Tensor]]
    _exl3eval_replays: int

    def exl3eval_watch(self) -> None:
        """Start keeping what `compute_logits` gets and gives, and counting replays of CUDA graphs."""
        self._exl3eval_calls, self._exl3eval_replays = [], 0
        model = self.model_runner.model
        inner = model.compute_logits

        def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = inner(hidden_states, *args, **kwargs)
            if logits is not None:
                # Copies: a sampler may write into logits, and a graph replays into the same hidden states.
                self._exl3eval_calls.append((hidden_states.clone(), logits.to(torch.float32, copy=True)))
            return logits

        model.compute_logits = compute_logits
        if torch.cuda.is_available():
            replay = torch.cuda.CUDAGraph.replay

            def counted_replay(graph: torch.cuda.CUDAGraph) -> None:
                self._exl3eval_replays += 1
                replay(graph)

            torch.cuda.CUDAGraph.replay = counted_replay  # type: ignore[assignment,method-assign]

    def exl3eval_take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return and forget the calls since the last time: (hidden [R, H], FP32 logits [R, V]) each."""
        calls, self._exl3eval_calls = self._exl3eval_calls, []
        return calls

    def exl3eval_replays(self) -> int:
        """Return and forget the number of CUDA graphs replayed."""
        replays, self._exl3eval_replays = self._exl3eval_replays, 0
        return replays

    def exl3eval_embedding_bytes(self) -> int | None:
        """Bytes of the input embedding's tensors, None where it cannot be told."""
        model: nn.Module = self.model_runner.model
        found = [m for m in model.modules() if hasattr(m, "num_embeddings") and "LMHead" not in type(m).__name__]
        if not found:
            return None
        tensors = [*found[0].parameters(), *found[0].buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def exl3eval_readback(self) -> dict[str, Any]:
        """Describe the effective configuration, without paths."""
        return read_back(self.vllm_config, self.model_runner)


class HeldBytes:
    """The extension of a memory account: what the worker holds once it is ready."""

    model_runner: Any
    vllm_config: Any

    def exl3eval_held(self) -> dict[str, Any]:
        """Return bytes of weights and of the key-value cache, tokens that the cache holds, and the configuration."""
        model, cache = self.model_runner.model, self.vllm_config.cache_config
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = [tensor for layer in layers for tensor in _tensors(getattr(layer, "kv_cache", None))]
        return {
            "weights": _storage_bytes([*model.parameters(), *model.buffers()]),
            "kv_cache": _storage_bytes(caches),
            "kv_tokens": cache.num_gpu_blocks * cache.block_size,
            "effective": read_back(self.vllm_config, self.model_runner),
        }


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Add up storages, each once: tied weights and views share theirs."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def read_back(config: Any, runner: Any) -> dict[str, Any]:
    """Describe the effective configuration of a worker, without paths."""
    model, cache, scheduler, compilation = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.compilation_config,
    )
    layers = compilation.static_forward_context.values()
    backends = {_backend_name(layer) for layer in layers if hasattr(layer, "get_attn_backend")}
    kind = type(runner)
    sizes = compilation.cudagraph_capture_sizes
    mode, graphs = compilation.mode, compilation.cudagraph_mode
    return {
        "model_class": type(getattr(runner.model, "runnable", runner.model)).__name__,
        "attention": sorted(backends),
        "runner": {"class": kind.__name__, "version": _runner_version(kind)},
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_blocks": cache.num_gpu_blocks,
        "kv_block_size": cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "compile_mode": getattr(mode, "name", None) if mode is not None else None,
        "cudagraph_mode": getattr(graphs, "name", None) if graphs is not None else None,
        "capture_sizes": sorted(sizes) if sizes else [],
    }


def _backend_name(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name())


def _runner_version(runner: type) -> str:
    """Name vLLM's generation of model runner: V2 lives in `vllm.v1.worker.gpu` and `.cpu.model_runner`."""
    modules = [base.__module__ for base in runner.__mro__]
    return "V2" if any(module.startswith("vllm.v1.worker.gpu.") for module in modules) else "V1"

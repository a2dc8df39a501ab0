"""One captured decode step: what a server replays, run over held-out contexts.

Shapes: B contexts of a batch, T input ids, S scored positions, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from exl3eval.errors import UsageError


def cache_argument(decoder: nn.Module) -> str:
    """Name the key-value cache argument, which transformers renamed in 5.24."""
    parameters = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def static_cache(decoder: nn.Module, num_tokens: int) -> Any:
    """Return an empty key-value cache of fixed size, in the dtype of the activations."""
    from transformers import StaticCache

    config: Any = decoder.config
    return StaticCache(config=config, max_cache_len=num_tokens)


class DecodeGraph:
    """A CUDA graph of one decode step for B contexts, replayed for every scored position.

    Parameters
    ----------
    decoder : Module
        A transformers base model on a GPU.
    ids_BT : Tensor
        int64 [B, T]: a batch as it will be run; its first token primes every kernel of the step.

    Raises
    ------
    UsageError
        If the model's cache cannot be replayed.
    """

    WARM_UPS = 3

    def __init__(self, decoder: nn.Module, ids_BT: torch.Tensor) -> None:
        self._decoder = decoder
        self._cache = static_cache(decoder, ids_BT.shape[1])
        if any(self._cache.is_sliding) or not self._cache.is_compileable:
            raise UsageError(
                f"{type(decoder).__name__} keeps a cache whose lengths a replay cannot follow (sliding windows)",
                hint="measure it without graphs",
            )
        self._ids_B1 = ids_BT[:, :1].clone()
        stream = torch.cuda.Stream(ids_BT.device)
        stream.wait_stream(torch.cuda.current_stream(ids_BT.device))
        with torch.cuda.stream(stream):
            for _ in range(min(self.WARM_UPS, ids_BT.shape[1])):
                self._step()
        torch.cuda.current_stream(ids_BT.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph):
                self._state_B1H = self._step()
        except RuntimeError as error:
            raise UsageError(
                f"a decode step of {type(decoder).__name__} cannot be captured: {str(error).strip().splitlines()[0]}",
                hint="measure it without graphs, or with routes that do not wait for the GPU",
            ) from error

    def _step(self) -> torch.Tensor:
        cache = {cache_argument(self._decoder): self._cache, "use_cache": True}
        return self._decoder(input_ids=self._ids_B1, **cache).last_hidden_state

    def run(self, ids_BT: torch.Tensor, first: int) -> torch.Tensor:
        """Prefill the ids before `first`, then replay the step once per later id: int64 [B, T] -> [B, S, H]."""
        self._cache.reset()
        cache = {cache_argument(self._decoder): self._cache, "use_cache": True}
        self._decoder(input_ids=ids_BT[:, :first], **cache)
        states = []
        for step_B1 in ids_BT[:, first:].split(1, dim=1):
            self._ids_B1.copy_(step_B1)
            self._graph.replay()
            states.append(self._state_B1H.clone())
        return torch.cat(states, dim=1)

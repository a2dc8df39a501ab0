"""Parameters of one vLLM layer that hold several stored linears, and how a loader finds the place of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from exl3_kernels.weight import Exl3Weight
from exl3_vllm.shards import Shard
from exl3_vllm.stored import MARKERS

DTYPES = {"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16, **dict.fromkeys(MARKERS, torch.int32)}


class ShardStore:
    """Parameters of one layer that hold several stored linears end to end, and how a loader finds its place.

    vLLM loads by the name of the fused layer and a shard's id, one parameter per suffix; stored linears differ in bits,
    so each parameter is flat and every linear has a view of its own.
    """

    def __init__(self, layer: nn.Module, shards: Sequence[Shard], *, prefix: str = "") -> None:
        self.shards = tuple(shards)
        self.prefix = prefix
        self._layer = layer
        self._loaded: set[tuple[str, int]] = set()
        self._starts: dict[str, list[int]] = {}
        self.suffixes = ("trellis", "suh", "svh", *sorted({s.stored.codebook for s in shards} & set(MARKERS)))
        for suffix in self.suffixes:
            starts = [0, *accumulate(self._numel(suffix, index) for index in range(len(shards)))]
            self._starts[suffix] = starts
            parameter = nn.Parameter(torch.empty(starts[-1], dtype=DTYPES[suffix]), requires_grad=False)
            layer.register_parameter(prefix + suffix, parameter)

    def parameter(self, suffix: str) -> nn.Parameter:
        """Return the flat parameter of a suffix."""
        return self._layer.get_parameter(self.prefix + suffix)

    def _numel(self, suffix: str, index: int) -> int:
        return 1 if suffix in MARKERS else torch.Size(self.shards[index].shapes[suffix]).numel()

    def view(self, suffix: str, index: int) -> torch.Tensor:
        """Return the place of one stored linear's tensor."""
        start, end = self._starts[suffix][index : index + 2]
        flat = self.parameter(suffix).data[start:end]
        return flat.view(() if suffix in MARKERS else self.shards[index].shapes[suffix])

    def load(self, suffix: str, index: int, tensor: torch.Tensor) -> None:
        """Copy this rank's part of a stored tensor to its place."""
        part = tensor if suffix in MARKERS else self.shards[index].cut(suffix, tensor)
        self.view(suffix, index).copy_(part)
        self._loaded.add((suffix, index))

    def weights(self, biases: Sequence[torch.Tensor | None]) -> list[Exl3Weight]:
        """Return the loaded linears, sharing memory with the parameters.

        Raises
        ------
        ValueError
            If a stored tensor was never loaded.
        """
        weights = []
        for index, shard in enumerate(self.shards):
            stored = shard.stored
            marker = stored.codebook if stored.codebook in MARKERS else None
            for suffix in filter(None, ("trellis", "suh", "svh", marker)):
                if (suffix, index) not in self._loaded:
                    raise ValueError(f"{stored.key}.{suffix} was not loaded: vLLM's model has no place for it")
            weights.append(
                Exl3Weight(
                    trellis=self.view("trellis", index),
                    suh=self.view("suh", index),
                    svh=self.view("svh", index),
                    codebook=stored.codebook,
                    multiplier=int(self.view(marker, index)) & 0xFFFFFFFF if marker else stored.multiplier,
                    bias=biases[index],
                )
            )
        return weights

    def release(self) -> None:
        """Take the parameters off the layer; views of them live on."""
        for suffix in self.suffixes:
            delattr(self._layer, self.prefix + suffix)

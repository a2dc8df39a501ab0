"""Bytes by kind: as stored in the files, and as resident in the tensors of a loaded arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from exl3_kernels.embedding import Int8Embedding
from exl3_kernels.linear import Exl3Linear
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.inspect import inventory
from exl3eval.engine.model import ArmModel

KINDS = {
    "trellis": "packed codes of the body",
    "scales": "suh and svh of the body",
    "bias": "biases of the body",
    "linear": "16-bit linears of the body",
    "norms": "norm weights",
    "embedding": "input embedding",
    "head": "output head; a tied one is counted as embedding",
    "dense": "dense matrices that a route keeps ready",
    "mtp": "multi-token prediction layers, not loaded",
    "other": "anything else",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    """One kind of weight: bytes in the files and in memory."""

    kind: str
    stored: int
    resident: int


def weight_bytes(checkpoint: Checkpoint, arm: ArmModel) -> tuple[KindBytes, ...]:
    """Account for every stored tensor and every resident one, in the order of `KINDS`."""
    stored, resident = stored_bytes(checkpoint), resident_bytes(arm)
    return tuple(KindBytes(kind=kind, stored=stored[kind], resident=resident[kind]) for kind in KINDS)


def stored_bytes(checkpoint: Checkpoint) -> Counter[str]:
    """Sum the tensors of a directory by kind, from its headers."""
    sums: Counter[str] = Counter()
    for module in checkpoint.modules.values():
        if module.role != "body":
            sums[module.role] += module.nbytes
            continue
        sums["trellis"] += module.trellis.nbytes
        sums["scales"] += module.input_signs.nbytes + module.output_signs.nbytes
        sums["bias"] += 0 if module.bias is None else module.bias.nbytes
        sums["other"] += 0 if module.marker is None else module.marker.nbytes
    for row in inventory(checkpoint).rows:
        if row.kind == "plain":
            sums[row.role if row.role != "other" else _plain_kind(row.key, len(row.shape))] += row.size_bytes
    return sums


def resident_bytes(arm: ArmModel) -> Counter[str]:
    """Sum the storages that an arm's modules hold, each once, by kind."""
    sums: Counter[str] = Counter()
    seen: set[tuple[torch.device, int]] = set()
    for kind, tensor in (*_tensors(arm.decoder, is_head=False), *_tensors(arm.head.module, is_head=True)):
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        if place not in seen:
            seen.add(place)
            sums[kind] += storage.nbytes()
    return sums


def _tensors(module: nn.Module, *, is_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, owner in module.named_modules():
        own = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        for name, tensor in own:
            if isinstance(owner, Exl3Linear) and name == "dense":
                yield "dense", tensor
            elif is_head:
                yield "head", tensor
            elif isinstance(owner, nn.Embedding | Int8Embedding):
                yield "embedding", tensor
            elif isinstance(owner, Exl3Linear):
                yield {"suh": "scales", "svh": "scales"}.get(name, name), tensor
            else:
                yield _plain_kind(f"{path}.{name}", tensor.dim()), tensor


def _plain_kind(name: str, dimensions: int) -> str:
    owner, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return "bias"
    if leaf == "weight" and "norm" in owner.rpartition(".")[2].lower():
        return "norms"
    return "linear" if dimensions >= 2 else "other"

"""What was really built, for whoever has to prove what was served."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from exl3_kernels.experts import Exl3Experts
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3_vllm.settings import ServedVariant, load_variant
from exl3_vllm.tally import TALLY

IDENTITY_KEY = "exl3_vllm"


@dataclass(slots=True, kw_only=True)
class _Built:
    """What the last model of this process was built from, by layer name."""

    linears: dict[str, list[str]] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    embeddings: dict[str, dict[str, int]] = field(default_factory=dict)
    dispatches: set[str] = field(default_factory=set)
    primed_rows: tuple[int, ...] = ()


_built = _Built()


def forget_built() -> None:
    """Start the account of a new model."""
    _built.linears.clear()
    _built.experts.clear()
    _built.dispatches.clear()
    _built.primed_rows = ()


def forget_embeddings() -> None:
    """Start the account of embeddings again: a model is being built."""
    _built.embeddings.clear()


def note_linear(layer: str, parts: Iterable[tuple[str, Exl3Linear]]) -> None:
    """Note an EXL3 layer: the checkpoint's keys and the modules that serve them."""
    described = []
    for key, part in parts:
        described.append(f"{key} {part.extra_repr()}")
        _built.dispatches.add(part.dispatch)
    _built.linears[layer] = described


def note_experts(layer: str, experts: Exl3Experts) -> None:
    """Note how a layer of routed experts is served."""
    _built.experts[layer] = experts.dispatch


def note_embedding(layer: str, *, rows: int, stored_bytes: int, run_bytes: int) -> None:
    """Note an int8 embedding and what it takes in place of what is stored."""
    _built.embeddings[layer] = {"rows": rows, "stored_bytes": stored_bytes, "run_bytes": run_bytes}


def note_primed(rows: Iterable[int]) -> None:
    """Note the row counts that every kind of linear was run with before any graph capture."""
    _built.primed_rows = tuple(sorted({*_built.primed_rows, *rows}))


def effective_config() -> dict[str, Any]:
    """Return what the last model built in this process runs, as a JSON object.

    Returns
    -------
    dict
        `variant` (as requested), `dispatches` (as resolved, sorted), `linears` (vLLM's layer to its stored parts),
        `experts` (layer of routed experts to its dispatch), `embeddings` (layer to rows and bytes; empty without the
        overlay), `primed_rows`, `tally` (whether counting on the device is on) and `code_sha256` of this plugin and
        the kernels.
    """
    return {
        "variant": load_variant().as_json(),
        "dispatches": sorted(_built.dispatches),
        "linears": {layer: list(parts) for layer, parts in sorted(_built.linears.items())},
        "experts": dict(sorted(_built.experts.items())),
        "embeddings": dict(sorted(_built.embeddings.items())),
        "primed_rows": list(_built.primed_rows),
        "tally": TALLY.started,
        "code_sha256": code_digest(),
    }


def read_counts() -> dict[Launch, int]:
    """Return launches since the last reset: the tally's where it is on, else those that Python saw on this thread."""
    return TALLY.read() if TALLY.started else read_launches()


def reset_counts() -> None:
    """Set the tally and Python's counters to zero."""
    TALLY.reset()
    reset_launches()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return the SHA-256 of every source file of the plugin and the kernels."""
    digest = hashlib.sha256()
    for package in ("exl3_vllm", "exl3_kernels", "exl3_kernels.csrc", "exl3_kernels.tables"):
        for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
            if file.is_file():
                digest.update(f"{package}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def begin_model(vllm_config: Any, variant: ServedVariant) -> None:
    """Put variant and code into vLLM's own digest of a configuration, and start the tally if it is asked for.

    Dispatches are constants of the compiled graph, and vLLM's compile cache knows nothing of plugins: without this a
    second variant would be served from the first one's cache.
    """
    if isinstance(vllm_config.additional_config, dict):
        text = json.dumps(variant.as_json(), sort_keys=True) + code_digest() + torch.__version__
        vllm_config.additional_config[IDENTITY_KEY] = hashlib.sha256(text.encode()).hexdigest()
    if variant.tally:
        kind = vllm_config.device_config.device.type
        TALLY.start(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))

"""Writing an EXL3 directory by upstream's loader rules, and keeping finished layers on the way there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from exl3_kernels.ldlq import QuantizedLinear
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3eval import __version__
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.checkpoint.load import load_plain
from exl3eval.errors import UsageError
from exl3eval.records import digest_value, write_atomic, write_json

WORK_FOLDER = ".unfinished"
SHARD_BYTES = 8 << 30
_NOT_COPIED = (".safetensors", ".bin", ".ckpt", ".pth", ".pt", ".gguf")


class LayerStore:
    """Finished parts of a quantization in progress, under the output folder.

    Parameters
    ----------
    out : Path
        Output folder.
    contract : dict
        What the parts depend on; another contract's parts are not used.

    Raises
    ------
    UsageError
        If `out` already holds a model, or parts of another request.
    """

    def __init__(self, out: Path, contract: dict[str, Any]) -> None:
        self.folder = out / WORK_FOLDER
        stamp = self.folder / "contract.json"
        wanted = digest_value(contract)
        if stamp.exists():
            if json.loads(stamp.read_text())["digest"] != wanted:
                raise UsageError(
                    f"{out.name} holds an unfinished quantization of another request",
                    hint="finish that one, remove the folder, or choose another --out",
                )
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out.name} is not an empty folder", hint="choose another --out")
        else:
            write_json(stamp, {"digest": wanted})

    def save(self, part: str, results: dict[str, QuantizedLinear]) -> None:
        """Keep a finished part."""
        tensors: dict[str, torch.Tensor] = {}
        facts = {}
        for key, result in results.items():
            tensors |= weight_tensors(key, result.weight)
            facts[key] = {
                "proxy_error": result.proxy_error,
                "fallback": result.fallback,
                "global_scale": result.global_scale,
                "codebook": result.weight.codebook,
            }
        write_atomic(self.folder / f"{part}.safetensors", save(tensors, metadata={"facts": json.dumps(facts)}))

    def load(self, part: str, device: torch.device) -> dict[str, QuantizedLinear] | None:
        """Return a finished part, or None."""
        try:
            with safe_open(self.folder / f"{part}.safetensors", framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
        return {
            key: QuantizedLinear(
                weight=Exl3Weight(
                    trellis=tensors[f"{key}.trellis"],
                    suh=tensors[f"{key}.suh"],
                    svh=tensors[f"{key}.svh"],
                    codebook=fact["codebook"],
                    multiplier=MULTIPLIERS[fact["codebook"]],
                    bias=tensors.get(f"{key}.bias"),
                ),
                proxy_error=fact["proxy_error"],
                fallback=fact["fallback"],
                global_scale=fact["global_scale"],
            )
            for key, fact in facts.items()
        }

    def parts(self) -> list[Path]:
        """Return the finished parts in order: the head, then the layers."""
        return sorted(self.folder.glob("*.safetensors"))


def weight_tensors(key: str, weight: Exl3Weight) -> dict[str, torch.Tensor]:
    """Return the tensors that store one linear, by full name."""
    tensors = {f"{key}.trellis": weight.trellis, f"{key}.suh": weight.suh, f"{key}.svh": weight.svh}
    if weight.codebook != "3inst":
        signed = np.uint32(weight.multiplier).astype(np.int32)
        tensors[f"{key}.{weight.codebook}"] = torch.tensor(int(signed), dtype=torch.int32)
    if weight.bias is not None:
        tensors[f"{key}.bias"] = weight.bias
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def write_directory(
    out: Path,
    store: LayerStore,
    source: Checkpoint,
    settings: dict[str, Any],
    results: list[QuantizedLinear],
) -> dict[str, Any]:
    """Write shards, configurations and copied files; remove the parts; return a summary.

    Raises
    ------
    UsageError
        If the disk refuses a write; finished parts stay.
    """
    quantized: dict[str, torch.Tensor] = {}
    for part in store.parts():
        with safe_open(part, framework="pt") as file:
            quantized |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    keys = {name.rpartition(".")[0] for name in quantized}
    plain = {name: load_plain(source, name) for name in source.plain if not _is_replaced(name, keys)}
    shards = _cut_shards({**plain, **quantized})
    for name, tensors in shards.items():
        write_atomic(out / name, save(tensors, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        total = sum(t.numel() * t.element_size() for tensors in shards.values() for t in tensors.values())
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    body = [r.weight for r in results[: len(results) - (settings["head_bits"] != 16)]]
    reached = sum(w.bits * w.trellis.shape[0] * w.trellis.shape[1] for w in body) / sum(
        w.trellis.shape[0] * w.trellis.shape[1] for w in body
    )
    quantization = {
        "quant_method": "exl3",
        "version": f"exl3eval {__version__}",
        "bits": round(reached, 2),
        "head_bits": settings["head_bits"],
        "calibration": settings["calibration"],
        "out_scales": "always",
        "codebook": settings["codebook"],
    }
    for file in sorted(source.directory.iterdir()):
        if (
            file.is_file()
            and file.suffix not in _NOT_COPIED
            and file.name not in ("config.json",)
            and "index" not in file.name
        ):
            shutil.copyfile(file, out / file.name)
    write_json(out / "quantization_config.json", {**quantization, "tensor_storage": _storage(quantized, plain)})
    write_json(out / "config.json", {**source.config, "quantization_config": quantization})
    shutil.rmtree(store.folder)
    written = open_checkpoint(out)
    fallbacks = sorted({result.fallback for result in results if result.fallback})
    return {
        "modules": len(written.modules),
        "bits": round(reached, 4),
        "head_bits": settings["head_bits"],
        "codebook": settings["codebook"],
        "mean_proxy_error": sum(result.proxy_error for result in results) / len(results),
        "fallbacks": fallbacks,
        "file_bytes": sum(written.file_bytes.values()),
    }


def _is_replaced(name: str, keys: set[str]) -> bool:
    """Say whether a source tensor is stored as EXL3 now, under its own or its parts' names."""
    parent, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return any(key.startswith(f"{parent}.") for key in keys) and leaf in ("gate_up_proj", "down_proj")
    stem, _, fused = parent.rpartition(".")
    first_part = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}.get(fused, fused)
    return parent in keys or f"{stem}.{first_part}" in keys


def _cut_shards(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        num_bytes = tensor.numel() * tensor.element_size()
        if size + num_bytes > SHARD_BYTES and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _storage(quantized: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in sorted({**plain, **quantized}.items()):
        key, _, leaf = name.rpartition(".")
        entry = entries.setdefault(key, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.numel() * tensor.element_size(),
            "dtype": str(tensor.dtype),
        }
        if leaf == "trellis":
            entry |= {"quant_format": "exl3", "bits_per_weight": tensor.shape[2] // 16}
        if leaf in ("mcg", "mul1") and name in quantized:
            entry[f"{leaf}_multiplier"] = int(tensor) & 0xFFFFFFFF
    return entries

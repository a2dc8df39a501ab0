"""Checkpoints that upstream's own tools wrote open cleanly and sum to what upstream declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.checkpoint.inspect import inventory
from exl3eval.checkpoint.load import load_plain, load_weight

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "checkpoints"
EXL3 = sorted(SHARED.glob("*/exl3-*"))
PLAIN = sorted(SHARED.glob("*/bf16"))

pytestmark = pytest.mark.skipif(not EXL3, reason="the shared checkpoints are not here")


def name_of(directory: Path) -> str:
    return f"{directory.parent.name}-{directory.name}"


@pytest.fixture(params=EXL3, ids=name_of)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return open_checkpoint(request.param)


def test_nothing_is_noted_but_the_captured_logits(checkpoint: Checkpoint) -> None:
    assert [note.split(":")[0] for note in checkpoint.notes] == ["upstream_logits.safetensors"]


def test_modules_and_totals_are_what_tensor_storage_lists(checkpoint: Checkpoint) -> None:
    stored = json.loads((checkpoint.directory / "quantization_config.json").read_text())
    storage = stored["tensor_storage"]
    rows = {row.key: row for row in inventory(checkpoint).rows}
    quantized = {key: entry for key, entry in storage.items() if entry.get("quant_format") == "exl3"}
    assert quantized.keys() == checkpoint.modules.keys()
    for key, entry in quantized.items():
        assert rows[key].bits == entry["bits_per_weight"]
        assert rows[key].size_bytes == sum(tensor["n_bytes"] for tensor in entry["stored_tensors"].values())
    listed = {name: tensor for entry in storage.values() for name, tensor in entry["stored_tensors"].items()}
    assert {entry.name: (list(entry.shape), entry.nbytes) for entry in checkpoint.tensors} == {
        name: (tensor["shape"], tensor["n_bytes"]) for name, tensor in listed.items()
    }
    totals = inventory(checkpoint)
    assert totals.body_bits == pytest.approx(stored["bits"], abs=0.005)
    assert checkpoint.head_key is not None
    assert rows[checkpoint.head_key].bits == stored["head_bits"]
    assert totals.exl3_bytes + totals.plain_bytes == sum(tensor["n_bytes"] for tensor in listed.values())
    assert {codebook for codebook, _, _ in totals.codebook_counts} == {stored["codebook"]}


def test_loaded_bytes_are_those_of_the_safetensors_library(checkpoint: Checkpoint) -> None:
    with safe_open(checkpoint.directory / "model.safetensors", framework="pt") as file:
        for key in checkpoint.modules:
            weight = load_weight(checkpoint, key)
            assert torch.equal(weight.trellis, file.get_tensor(f"{key}.trellis"))
            assert torch.equal(weight.suh, file.get_tensor(f"{key}.suh"))
            assert torch.equal(weight.svh, file.get_tensor(f"{key}.svh"))
            if weight.bias is not None:
                assert torch.equal(weight.bias, file.get_tensor(f"{key}.bias"))
        for name in checkpoint.plain:
            assert torch.equal(load_plain(checkpoint, name), file.get_tensor(name))


@pytest.mark.parametrize("directory", PLAIN, ids=name_of)
def test_plain_directories_open(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert not checkpoint.is_exl3
    assert checkpoint.tie_word_embeddings is (directory.parent.name == "qwen2-tied")
    assert inventory(checkpoint).embedding_bytes == 1024 * 256 * 2

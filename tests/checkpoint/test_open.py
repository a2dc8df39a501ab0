"""Every valid layout opens, loads the tensors that were stored, and keeps its digest across layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exl3_kernels.weight import MULTIPLIERS
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint, open_exl3
from exl3eval.checkpoint.inspect import INVENTORY_COLUMNS, inventory, inventory_json, inventory_rows
from exl3eval.checkpoint.load import checkpoint_digest, load_plain, load_weight
from exl3eval.errors import CheckpointError

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = dict[str, torch.Tensor]


def linear(
    key: str, *, bits: int = 4, size_in: int = 128, size_out: int = 128, marker: str | None = "mcg", seed: int = 0
) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    words = (size_in // 16, size_out // 16, 16 * bits)
    tensors = {
        f"{key}.trellis": torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, generator=random),
        f"{key}.suh": torch.randn(size_in, generator=random).half(),
        f"{key}.svh": torch.randn(size_out, generator=random).half(),
    }
    if marker:
        tensors[f"{key}.{marker}"] = signed(MULTIPLIERS[marker])
    return tensors


def signed(multiplier: int) -> torch.Tensor:
    return torch.tensor(multiplier - (1 << 32) if multiplier >> 31 else multiplier, dtype=torch.int32)


def plain() -> Tensors:
    random = torch.Generator().manual_seed(9)
    return {
        EMBED: torch.randn(64, 128, generator=random).bfloat16(),
        NORM: torch.randn(128, generator=random).bfloat16(),
    }


def write(directory: Path, *shards: Tensors, index: Mapping[str, str] | None = None, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    names = SHARDS if len(shards) == 2 else ("model.safetensors",)
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, directory / name)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **config}))
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(index)}))
    return directory


def open_with(directory: Path, *shards: Tensors, **config: Any) -> Checkpoint:
    return open_exl3(write(directory, *shards, quantization_config={"quant_method": "exl3"}, **config))


def right_index() -> dict[str, str]:
    return {**dict.fromkeys(plain(), SHARDS[0]), **dict.fromkeys(linear(Q), SHARDS[1])}


def test_a_single_file_opens_without_notes_and_loads_what_was_stored(tmp_path: Path) -> None:
    stored = linear(Q, bits=3, size_in=256)
    checkpoint = open_with(tmp_path, {**plain(), **stored})
    weight = load_weight(checkpoint, Q)
    assert (checkpoint.notes, checkpoint.is_exl3, list(checkpoint.plain)) == ((), True, [EMBED, NORM])
    assert (weight.bits, weight.in_features, weight.out_features) == (3, 256, 128)
    assert (weight.codebook, weight.multiplier) == ("mcg", 0xCBAC1FED)
    assert torch.equal(weight.trellis, stored[f"{Q}.trellis"])
    assert torch.equal(weight.suh, stored[f"{Q}.suh"])
    assert torch.equal(weight.svh, stored[f"{Q}.svh"])
    assert weight.bias is None
    assert torch.equal(load_plain(checkpoint, EMBED), plain()[EMBED])


@pytest.mark.parametrize("codebook", [None, "mcg", "mul1"])
def test_the_marker_that_is_present_names_the_codebook(codebook: str | None, tmp_path: Path) -> None:
    module = open_with(tmp_path, linear(Q, marker=codebook)).modules[Q]
    assert module.codebook == (codebook or "3inst")
    assert module.multiplier == MULTIPLIERS[module.codebook]
    assert module.is_default_multiplier


@pytest.mark.parametrize("multiplier", [0xFF7A83E5, 0x00000003])
def test_a_foreign_multiplier_is_honoured_and_noted(multiplier: int, tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, {**linear(Q), f"{Q}.mcg": signed(multiplier)})
    assert load_weight(checkpoint, Q).multiplier == multiplier
    assert not checkpoint.modules[Q].is_default_multiplier
    assert f"0x{multiplier:08x} in {Q}" in " ".join(checkpoint.notes)


@pytest.mark.parametrize("packed", [("su",), ("sv",), ("su", "sv")])
def test_legacy_packed_signs_expand_on_either_side(packed: tuple[str, ...], tmp_path: Path) -> None:
    tensors = linear(Q, size_in=256)
    for name in packed:
        size = tensors.pop(f"{Q}.{name}h").numel()
        words = torch.zeros(size // 16, dtype=torch.int16)
        words[0], words[-1] = 0b101, -(1 << 15)
        tensors[f"{Q}.{name}"] = words
    checkpoint = open_with(tmp_path, tensors)
    weight = load_weight(checkpoint, Q)
    for name, loaded in (("su", weight.suh), ("sv", weight.svh)):
        if name in packed:
            expected = torch.ones_like(loaded)
            expected[[0, 2, -1]] = -1
            assert torch.equal(loaded, expected)
        else:
            assert torch.equal(loaded, tensors[f"{Q}.{name}h"])
    assert checkpoint.modules[Q].has_packed_signs
    assert "legacy packed signs" in " ".join(checkpoint.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_bias_keeps_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    bias = torch.linspace(-1, 1, 128).to(dtype)
    loaded = load_weight(open_with(tmp_path, {**linear(Q), f"{Q}.bias": bias}), Q).bias
    assert loaded is not None
    assert loaded.dtype == dtype
    assert torch.equal(loaded, bias)


def test_bits_and_sizes_come_from_the_trellis_when_the_configuration_lies(tmp_path: Path) -> None:
    quantization = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6, "codebook": "mul1"}
    write(tmp_path, {**plain(), **linear(Q, bits=7)}, quantization_config=quantization, hidden_size=4096)
    entry = {"bits_per_weight": 4, "mcg_multiplier": 0xCBAC1FED, "stored_tensors": {}}
    storage = {"tensor_storage": {Q: entry, DOWN: entry}, **quantization, "version": "0.0.1"}
    (tmp_path / "quantization_config.json").write_text(json.dumps(storage))
    checkpoint = open_exl3(tmp_path)
    notes = "\n".join(checkpoint.notes)
    assert (checkpoint.modules[Q].bits, checkpoint.modules[Q].in_features) == (7, 128)
    assert "bits 4.0, the stored linears average 7.00" in notes
    assert "head_bits 6, the stored head has 16" in notes
    assert f"codebook mul1, but mcg in {Q}" in notes
    assert f"contradicts {Q}: bits_per_weight 4, stored 7" in notes
    assert f"lists as EXL3, though no file holds, {DOWN}" in notes
    assert "differs from config.json in version" in notes
    assert checkpoint.quantization == quantization


def test_the_separate_quantization_file_serves_when_the_configuration_has_none(tmp_path: Path) -> None:
    write(tmp_path, linear(Q))
    (tmp_path / "quantization_config.json").write_text(json.dumps({"quant_method": "EXL3", "tensor_storage": {}}))
    checkpoint = open_exl3(tmp_path)
    assert checkpoint.quantization == {"quant_method": "EXL3"}
    assert checkpoint.quant_method == "exl3"


def test_slices_are_grouped_in_order_and_experts_are_ordinary_keys(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.11.up_proj"
    tensors = linear(expert)
    for index in range(11):
        tensors |= linear(f"{DOWN}.slice.{index}", size_in=128 if index < 10 else 256, seed=index)
    checkpoint = open_with(tmp_path, tensors)
    groups = checkpoint.slices
    assert list(groups) == [DOWN]
    assert [part.slice_index for part in groups[DOWN]] == list(range(11))
    assert groups[DOWN][10].in_features == 256
    assert (checkpoint.modules[expert].slice_of, checkpoint.modules[expert].slice_index) == (None, None)


def test_a_tied_model_with_its_own_quantized_head_says_so(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, {**plain(), **linear("lm_head", bits=6)}, tie_word_embeddings=True)
    assert (checkpoint.has_quantized_head, checkpoint.head_key) == (True, "lm_head")
    assert checkpoint.tie_word_embeddings is True
    assert "lm_head: 128 columns for a vocabulary of 64: the padding must be cut" in " ".join(checkpoint.notes)


def test_a_plain_head_of_an_exl3_model(tmp_path: Path) -> None:
    head = {"lm_head.weight": torch.ones(64, 128).half()}
    checkpoint = open_with(tmp_path, {**plain(), **linear(Q), **head}, text_config={"tie_word_embeddings": False})
    assert not checkpoint.has_quantized_head
    assert checkpoint.tie_word_embeddings is False
    assert inventory(checkpoint).head_bpw == 16
    assert torch.equal(load_plain(checkpoint, "lm_head.weight"), head["lm_head.weight"])


def test_a_plain_directory_opens_and_is_not_exl3(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, plain()))
    assert (checkpoint.is_exl3, checkpoint.quantization, checkpoint.quant_method) == (False, None, None)
    assert checkpoint.tie_word_embeddings is None
    assert inventory(checkpoint).body_bpw is None


def test_a_file_without_module_paths_is_no_part_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, {**plain(), **linear(Q)})
    digest = checkpoint_digest(open_exl3(tmp_path))
    save_file({"logits": torch.zeros(4)}, tmp_path / "captured.safetensors")
    checkpoint = open_exl3(tmp_path)
    assert "captured.safetensors" in checkpoint.notes[0]
    assert list(checkpoint.file_bytes) == ["model.safetensors"]
    assert checkpoint_digest(checkpoint) == digest


# the index


def test_two_shards_with_a_right_index_give_no_note(tmp_path: Path) -> None:
    assert open_exl3(write(tmp_path, plain(), linear(Q), index=right_index())).notes == ()


def test_a_missing_index_is_noted(tmp_path: Path) -> None:
    checkpoint = open_exl3(write(tmp_path, plain(), linear(Q)))
    assert checkpoint.notes == (f"{INDEX}: absent; 2 files are read by their headers",)


def test_a_stale_index_loses_against_the_headers(tmp_path: Path) -> None:
    index = {**right_index(), NORM: SHARDS[1], f"{Q}.weight": SHARDS[1], "model.gone.weight": SHARDS[0]}
    del index[f"{Q}.trellis"], index[f"{Q}.suh"]
    checkpoint = open_exl3(write(tmp_path, plain(), linear(Q), index=index))
    notes = "\n".join(checkpoint.notes)
    assert list(checkpoint.modules) == [Q]
    assert f"does not list {Q}.suh and 1 more" in notes
    assert f"lists, though no file holds, {Q}.weight and 1 more" in notes
    assert f"places in another file {NORM}" in notes


def test_an_index_of_the_source_model_is_noted_and_ignored(tmp_path: Path) -> None:
    index = dict.fromkeys((EMBED, NORM, f"{Q}.weight"), "model-00001-of-00030.safetensors")
    checkpoint = open_exl3(write(tmp_path, {**plain(), **linear(Q)}, index=index))
    assert "none of its files is here" in " ".join(checkpoint.notes)


def test_an_absent_shard_is_harmless_when_its_tensors_are_elsewhere_or_were_quantized(tmp_path: Path) -> None:
    index = {**right_index(), EMBED: "old.safetensors", f"{Q}.weight": "old.safetensors"}
    assert open_exl3(write(tmp_path, plain(), linear(Q), index=index)).is_exl3


@pytest.mark.parametrize("lost", ["svh", "trellis"])
def test_a_module_left_incomplete_by_an_absent_shard_names_the_shard(lost: str, tmp_path: Path) -> None:
    tensors = linear(Q)
    del tensors[f"{Q}.{lost}"]
    index = {**right_index(), f"{Q}.{lost}": "model-00003-of-00003.safetensors"}
    with pytest.raises(CheckpointError, match=rf"model-00003-of-00003.*{lost}"):
        open_exl3(write(tmp_path, plain(), tensors, index=index))


# loading and digest


def test_only_the_file_of_the_tensor_asked_for_is_read(tmp_path: Path) -> None:
    checkpoint = open_exl3(write(tmp_path, plain(), linear(Q), index=right_index()))
    (tmp_path / SHARDS[0]).unlink()
    assert load_weight(checkpoint, Q).bits == 4
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: tensor {NORM}: .*changed"):
        load_plain(checkpoint, NORM)
    with pytest.raises(CheckpointError, match="changed"):
        checkpoint_digest(checkpoint)


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, linear(Q))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(CheckpointError, match="changed"):
        checkpoint_digest(checkpoint)


def test_names_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, {**plain(), **linear(Q)})
    with pytest.raises(CheckpointError, match=f"{EMBED} is no EXL3 linear"):
        load_weight(checkpoint, EMBED)
    with pytest.raises(CheckpointError, match=f"no plain tensor {Q}.suh"):
        load_plain(checkpoint, f"{Q}.suh")


def test_every_dtype_that_torch_can_store_loads(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.int32, torch.int64]
    dtypes += [torch.float8_e5m2, torch.float8_e4m3fn, torch.float32, torch.float64, torch.complex64]
    tensors = {f"model.{number}": torch.arange(6).reshape(2, 3).to(dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"model.scalar": torch.tensor(2.5), "model.empty": torch.empty(0, 3)}
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    for name, tensor in tensors.items():
        loaded = load_plain(checkpoint, name)
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_digest_ignores_layout(tmp_path: Path) -> None:
    tensors = {**plain(), **linear(Q)}
    one = open_exl3(write(tmp_path / "one", tensors))
    two = open_exl3(write(tmp_path / "two", linear(Q), plain(), index={"stale.weight": SHARDS[0]}))
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    steps: list[int] = []
    assert checkpoint_digest(one) == checkpoint_digest(two, progress=steps.append)
    assert sum(steps) == sum(tensor.nbytes for tensor in tensors.values())


def flip_a_bit(tensors: Tensors) -> None:
    tensors[f"{Q}.trellis"][0, 0, 0] ^= 1


def rename_a_tensor(tensors: Tensors) -> None:
    tensors["model.final_norm.weight"] = tensors.pop(NORM)


def reshape_a_tensor(tensors: Tensors) -> None:
    tensors[EMBED] = tensors[EMBED].reshape(128, 64)


def reinterpret_a_tensor(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].view(torch.float16)


@pytest.mark.parametrize("change", [flip_a_bit, rename_a_tensor, reshape_a_tensor, reinterpret_a_tensor])
def test_the_digest_sees_the_payload(change: Any, tmp_path: Path) -> None:
    tensors = {**plain(), **linear(Q)}
    before = checkpoint_digest(open_exl3(write(tmp_path / "before", tensors)))
    change(tensors)
    assert checkpoint_digest(open_exl3(write(tmp_path / "after", tensors))) != before


def test_the_digest_sees_the_configuration(tmp_path: Path) -> None:
    before = checkpoint_digest(open_exl3(write(tmp_path, linear(Q), rope_theta=10000.0)))
    assert checkpoint_digest(open_exl3(write(tmp_path, linear(Q), rope_theta=500000.0))) != before


# inventory


def test_the_inventory_counts_every_stored_bit(tmp_path: Path) -> None:
    body = {**linear(Q, bits=2, size_in=256, size_out=128), **linear(DOWN, bits=5, size_in=512, size_out=256)}
    head = linear("lm_head", bits=6, marker="mul1")
    draft = linear("mtp.layers.0.mlp.up_proj", bits=8)
    checkpoint = open_with(tmp_path, {**plain(), **body, **head, **draft})
    listed = inventory(checkpoint)
    weights = 256 * 128, 512 * 256
    scale_bits = 16 * (256 + 128), 16 * (512 + 256)
    assert listed.body_bits == (2 * weights[0] + 5 * weights[1]) / sum(weights)
    assert listed.body_bpw == listed.body_bits + sum(scale_bits) / sum(weights)
    assert listed.head_bpw == 6 + 16 / 128 + 16 / 128
    assert listed.embedding_bytes == 64 * 128 * 2
    assert listed.exl3_bytes == sum(tensor.nbytes for tensor in {**body, **head, **draft}.values())
    assert listed.plain_bytes == sum(tensor.nbytes for tensor in plain().values())
    assert listed.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (listed.num_exl3, listed.num_plain) == (4, 2)
    assert listed.codebook_counts == (("mcg", 2, 1), ("mcg", 5, 1), ("mcg", 8, 1), ("mul1", 6, 1))
    roles = {row.key: row.role for row in listed.rows}
    assert roles == {
        Q: "body",
        DOWN: "body",
        "lm_head": "head",
        "mtp.layers.0.mlp.up_proj": "mtp",
        EMBED: "embedding",
        NORM: "other",
    }


def test_the_inventory_renders_as_cells_and_as_strict_json_without_paths(tmp_path: Path) -> None:
    listed = inventory(open_with(tmp_path, {**plain(), **linear(Q, bits=4, size_in=256)}))
    rows = inventory_rows(listed)
    assert {len(row) for row in rows} == {len(INVENTORY_COLUMNS)}
    assert (Q, "body", "exl3", "4", "mcg", "256 x 128", "17,156") in rows
    text = json.dumps(inventory_json(listed), allow_nan=False)
    assert json.loads(text)["rows"][0]["key"] == EMBED
    assert str(tmp_path) not in text

"""Every malformed directory is refused from its headers, with file, tensor or field, reason and remedy."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from exl3eval.checkpoint.directory import open_checkpoint, open_exl3
from exl3eval.errors import CheckpointError

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
EMBED = "model.embed_tokens.weight"
BYTES = {"I8": 1, "BF16": 2, "F16": 2, "I16": 2, "I32": 4, "F32": 4, "U32": 4, "F64": 8}
Declared = tuple[str, tuple[int, ...]]


def linear(key: str, *, rows: int = 8, columns: int = 8, words: int = 32) -> dict[str, Declared]:
    return {
        f"{key}.trellis": ("I16", (rows, columns, words)),
        f"{key}.suh": ("F16", (rows * 16,)),
        f"{key}.svh": ("F16", (columns * 16,)),
        f"{key}.mcg": ("I32", ()),
    }


BASE: dict[str, Declared] = {EMBED: ("BF16", (64, 128)), "model.norm.weight": ("BF16", (128,)), **linear(Q)}


def header_of(tensors: Mapping[str, Declared]) -> tuple[dict[str, Any], int]:
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header, position


def write_raw(path: Path, header: Any, data_bytes: int) -> None:
    """Write a file whose data section is a hole: only a reader of headers can be fast on it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data_bytes)


def write_model(directory: Path, tensors: Mapping[str, Declared], *, file: str = MODEL) -> None:
    write_raw(directory / file, *header_of(tensors))


def write_config(directory: Path, quantization: Any, **fields: Any) -> None:
    config = {"model_type": "llama", "vocab_size": 64, "quantization_config": quantization, **fields}
    (directory / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True, kw_only=True)
class Case:
    names: tuple[str, ...]
    reason: str
    edits: Mapping[str, Declared | None] = field(default_factory=dict)
    quantization: Any = field(default_factory=lambda: {"quant_method": "exl3"})
    config: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[Path], object] = lambda directory: None


def header_edit(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        header, size = header_of(BASE)
        edit(header)
        write_raw(directory / MODEL, header, size)

    return rewrite


def file_edit(edit: Callable[[bytes], bytes], name: str = MODEL) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        path = directory / name
        path.write_bytes(edit(path.read_bytes() if path.exists() else b""))

    return rewrite


def with_index(placed: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / INDEX).write_text(json.dumps({"weight_map": placed}))


def only(name: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / MODEL).rename(directory / name)

    return replace


def lose_second_shard(directory: Path) -> None:
    (directory / MODEL).rename(directory / "model-00001-of-00002.safetensors")
    placed = dict.fromkeys(BASE, "model-00001-of-00002.safetensors")
    with_index({**placed, f"{DOWN}.trellis": "model-00002-of-00002.safetensors"})(directory)


def slices(*indexes: str) -> dict[str, Declared]:
    return {name: shape for index in indexes for name, shape in linear(f"{DOWN}.slice.{index}").items()}


def moved(start: int, end: int) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["model.norm.weight"].update(data_offsets=[start, end])


def declared(name: str, **change: Any) -> Callable[[Path], None]:
    return header_edit(lambda header: header[name].update(change))


FOREIGN = {"quant_method": "gptq", "bits": 4}
NO_LINEAR = dict.fromkeys(linear(Q))

CASES = {
    # files and headers
    "empty file": Case(names=(MODEL,), reason="header of 0 bytes", after=file_edit(lambda raw: b"")),
    "header cut": Case(names=(MODEL,), reason="declares a header", after=file_edit(lambda raw: raw[:100])),
    "length beyond file": Case(
        names=(MODEL,), reason="the file has", after=file_edit(lambda raw: b"\xff" * 7 + b"\x7f" + raw[8:])
    ),
    "lfs pointer": Case(
        names=(MODEL,),
        reason="Git LFS pointer",
        after=file_edit(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"),
    ),
    "header not JSON": Case(
        names=(MODEL,), reason="not strict JSON", after=file_edit(lambda raw: raw[:8] + b"!" + raw[9:])
    ),
    "header not UTF-8": Case(
        names=(MODEL,), reason="not UTF-8", after=file_edit(lambda raw: raw.replace(b"embed", b"\xff\xfe\xff\xfe\xff"))
    ),
    "header is a list": Case(names=(MODEL,), reason="JSON list", after=lambda d: write_raw(d / MODEL, [], 0)),
    "header too deep": Case(
        names=(MODEL,), reason="nested too deep", after=lambda d: write_raw(d / MODEL, b"[" * 100_000, 0)
    ),
    "tensor twice in a header": Case(
        names=(MODEL, EMBED),
        reason="duplicate key",
        after=lambda d: write_raw(d / MODEL, f'{{"{EMBED}":0,"{EMBED}":0}}'.encode(), 0),
    ),
    "entry without shape": Case(
        names=(MODEL, EMBED), reason="data_offsets", after=header_edit(lambda header: header[EMBED].pop("shape"))
    ),
    "unknown dtype": Case(names=(MODEL, EMBED), reason="'Q4'", after=declared(EMBED, dtype="Q4")),
    "dtype is no text": Case(names=(MODEL, EMBED), reason="dtype", after=declared(EMBED, dtype=["BF16"])),
    "negative shape": Case(names=(MODEL, EMBED), reason="list of sizes", after=declared(EMBED, shape=[-64, -128])),
    "shape of booleans": Case(names=(MODEL, EMBED), reason="list of sizes", after=declared(EMBED, shape=[True])),
    "offsets reversed": Case(names=(MODEL, EMBED), reason="begin, end", after=declared(EMBED, data_offsets=[16384, 0])),
    "shape against bytes": Case(names=(MODEL, EMBED), reason="does not fit", after=declared(EMBED, shape=[64, 127])),
    "overlap": Case(names=(MODEL, "model.norm.weight"), reason="overlaps", after=header_edit(moved(16000, 16256))),
    "gap": Case(names=(MODEL, "model.norm.weight"), reason="gap of 128", after=header_edit(moved(16512, 16768))),
    "data truncated": Case(names=(MODEL, f"{Q}.mcg"), reason="truncated", after=file_edit(lambda raw: raw[:-1])),
    "bytes left over": Case(names=(MODEL,), reason="belong to no tensor", after=file_edit(lambda raw: raw + b"xy")),
    "shard is a folder": Case(
        names=("extra.safetensors",), reason="cannot be read", after=lambda d: (d / "extra.safetensors").mkdir()
    ),
    "no safetensors": Case(names=("pytorch_model.bin",), reason="no .*safetensors", after=only("pytorch_model.bin")),
    "no weights at all": Case(names=("model",), reason="no .*safetensors", after=lambda d: (d / MODEL).unlink()),
    "no model tensor": Case(
        names=(MODEL,), reason="no model tensor", after=lambda d: write_model(d, {"logits": ("F32", (4,))})
    ),
    "tensor in two shards": Case(
        names=("extra.safetensors", "model.norm.weight", MODEL),
        reason="is also in",
        after=lambda d: write_model(d, {"model.norm.weight": ("BF16", (128,))}, file="extra.safetensors"),
    ),
    # index and shards
    "index not JSON": Case(names=(INDEX,), reason="strict JSON", after=file_edit(lambda raw: b"{", INDEX)),
    "index without a map": Case(names=(INDEX,), reason="weight_map", after=with_index(["model.norm.weight"])),
    "shard of the index missing": Case(
        names=("model-00002-of-00002.safetensors", f"{DOWN}.trellis"), reason="is missing", after=lose_second_shard
    ),
    "shard of the series missing": Case(
        names=("model-00001-of-00003.safetensors",),
        reason="is missing",
        after=only("model-00002-of-00003.safetensors"),
    ),
    # configuration
    "no config": Case(names=("config.json",), reason="not exist", after=lambda d: (d / "config.json").unlink()),
    "config not strict": Case(
        names=("config.json",), reason="NaN", after=lambda d: (d / "config.json").write_text('{"a": NaN}')
    ),
    "config is a list": Case(
        names=("config.json",), reason="JSON list", after=lambda d: (d / "config.json").write_text("[]")
    ),
    "quantization is text": Case(names=("config.json", "quantization_config"), reason="JSON str", quantization="exl3"),
    "storage list not JSON": Case(
        names=("quantization_config.json",),
        reason="strict JSON",
        after=lambda d: (d / "quantization_config.json").write_text("{'bits': 4}"),
    ),
    "foreign method over trellis": Case(
        names=(MODEL, f"{Q}.trellis"), reason="quant_method gptq", quantization=FOREIGN
    ),
    "exl3 without trellis": Case(names=("config.json",), reason=r"\*\.trellis", edits=NO_LINEAR),
    "foreign quantization": Case(names=("model",), reason="gptq", edits=NO_LINEAR, quantization=FOREIGN),
    "plain directory": Case(names=("model",), reason="not quantized", edits=NO_LINEAR, quantization=None),
    # dialects
    "rank-sliced": Case(names=(MODEL, f"{DOWN}.rank0."), reason="rank-sliced", edits=linear(f"{DOWN}.rank0")),
    "shared rotations": Case(
        names=(MODEL, f"{Q}.shared_suh"), reason="shared_h", edits={f"{Q}.shared_suh": ("F16", (128,))}
    ),
    "hybrid tail field": Case(
        names=("config.json", "hybrid_tr3_tail"), reason="third-party", config={"hybrid_tr3_tail": {"bits": 3}}
    ),
    "rotation layout field": Case(
        names=("quantization_config", "rotation_layout"),
        reason="third-party",
        quantization={"quant_method": "exl3", "rotation_layout": "shared_h_v1"},
    ),
    "tier bitmap": Case(
        names=("tier_bitmap.json",), reason="third-party", after=lambda d: (d / "tier_bitmap.json").write_text("{}")
    ),
    "n-gram field": Case(
        names=("quantization_config", "ngram_bits"),
        reason="not supported",
        quantization={"quant_method": "exl3", "ngram_bits": 5},
    ),
    "vision field": Case(
        names=("quantization_config", "vision_bits"),
        reason="is 4: .*not supported",
        quantization={"quant_method": "exl3", "vision_bits": 4, "ngram_bits": 16},
    ),
    "row-wise trellis": Case(
        names=(MODEL, "model.ngram.trellis"), reason="row-wise", edits={"model.ngram.trellis": ("I16", (64, 640))}
    ),
    "embedding trellis": Case(
        names=(MODEL, "embed_tokens.trellis"),
        reason="embedding",
        edits={"model.embed_tokens.trellis": ("I16", (8, 8, 32))},
    ),
    "unknown trellis suffix": Case(
        names=(MODEL, "model.ngram.trellis_rows"),
        reason="unknown EXL3 suffix",
        edits={"model.ngram.trellis_rows": ("I16", (64, 640))},
    ),
    "unknown suffix": Case(
        names=(MODEL, f"{Q}.zeros"), reason="unknown suffix .zeros", edits={f"{Q}.zeros": ("I32", (8,))}
    ),
    "extinct scale": Case(names=(MODEL, f"{Q}.scale"), reason="extinct", edits={f"{Q}.scale": ("F16", ())}),
    # modules
    "weight beside trellis": Case(
        names=(MODEL, f"{Q}.weight"), reason="lies beside", edits={f"{Q}.weight": ("F16", (128, 128))}
    ),
    "both markers": Case(names=(MODEL, f"{Q}.mul1"), reason="both codebook markers", edits={f"{Q}.mul1": ("I32", ())}),
    "marker dtype": Case(names=(MODEL, f"{Q}.mcg"), reason="expected I32", edits={f"{Q}.mcg": ("U32", ())}),
    "marker shape": Case(names=(MODEL, f"{Q}.mcg"), reason="expected I32", edits={f"{Q}.mcg": ("I32", (2,))}),
    "no input signs": Case(names=(MODEL, f"{Q}.suh", f"{Q}.su"), reason="neither", edits={f"{Q}.suh": None}),
    "no output signs": Case(names=(MODEL, f"{Q}.svh", f"{Q}.sv"), reason="neither", edits={f"{Q}.svh": None}),
    "signs twice": Case(names=(MODEL, f"{Q}.su", f"{Q}.suh"), reason="two sign", edits={f"{Q}.su": ("I16", (8,))}),
    "signs without trellis": Case(
        names=(MODEL, f"{DOWN}.suh", f"{DOWN}.trellis"), reason="in no file", edits={f"{DOWN}.suh": ("F16", (128,))}
    ),
    "scale dtype": Case(names=(MODEL, f"{Q}.suh"), reason="expected F16", edits={f"{Q}.suh": ("F32", (128,))}),
    "scale size": Case(names=(MODEL, f"{Q}.svh"), reason=r"F16 \[64\]", edits={f"{Q}.svh": ("F16", (64,))}),
    "packed signs unpacked": Case(
        names=(MODEL, f"{Q}.sv"), reason=r"expected I16 \[8\]", edits={f"{Q}.svh": None, f"{Q}.sv": ("I16", (128,))}
    ),
    "trellis dtype": Case(
        names=(MODEL, f"{Q}.trellis"), reason="expected I16", edits={f"{Q}.trellis": ("F16", (8, 8, 32))}
    ),
    "fractional width": Case(
        names=(MODEL, f"{Q}.trellis"), reason="2.5 bits", edits={f"{Q}.trellis": ("I16", (8, 8, 40))}
    ),
    "nine bits": Case(names=(MODEL, f"{Q}.trellis"), reason="9 bits", edits={f"{Q}.trellis": ("I16", (8, 8, 144))}),
    "zero bits": Case(names=(MODEL, f"{Q}.trellis"), reason="0 bits", edits={f"{Q}.trellis": ("I16", (8, 8, 0))}),
    "input not padded": Case(names=(MODEL, f"{Q}.trellis"), reason="144 x 128", edits=linear(Q, rows=9)),
    "output not padded": Case(names=(MODEL, f"{Q}.trellis"), reason="128 x 192", edits=linear(Q, columns=12)),
    "no rows": Case(names=(MODEL, f"{Q}.trellis"), reason="0 x 128", edits=linear(Q, rows=0)),
    "bias size": Case(names=(MODEL, f"{Q}.bias"), reason=r"F16 \[64\]", edits={f"{Q}.bias": ("F16", (64,))}),
    "bias dtype": Case(names=(MODEL, f"{Q}.bias"), reason="is F64", edits={f"{Q}.bias": ("F64", (128,))}),
    "slice missing": Case(names=(MODEL, f"{DOWN}.slice.2.trellis"), reason=r"\[0, 2\]", edits=slices("0", "2")),
    "slices from one": Case(names=(MODEL, f"{DOWN}.slice.1.trellis"), reason=r"\[1\]", edits=slices("1")),
    "slice not a number": Case(names=(MODEL, f"{DOWN}.slice.01"), reason="not a number", edits=slices("0", "01")),
    "slice not quantized": Case(
        names=(MODEL, f"{DOWN}.slice.1.weight"),
        reason="no EXL3 slice",
        edits={**slices("0"), f"{DOWN}.slice.1.weight": ("F16", (128, 128))},
    ),
    "slices of unrelated shapes": Case(
        names=(MODEL, f"{DOWN}.slice.1.trellis"),
        reason="neither in input nor",
        edits={**slices("0"), **linear(f"{DOWN}.slice.1", rows=16, columns=16)},
    ),
    "slices beside the whole": Case(
        names=(MODEL, f"{Q}.slice.0."), reason="unknown suffix", edits=linear(f"{Q}.slice.0")
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_malformed_directory_is_refused_with_place_reason_and_remedy(case: Case, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    tensors = {name: shape for name, shape in {**BASE, **case.edits}.items() if shape is not None}
    write_model(directory, tensors)
    write_config(directory, case.quantization, **case.config)
    case.after(directory)

    with pytest.raises(CheckpointError, match=case.reason) as caught:
        open_exl3(directory)

    assert [name for name in case.names if name not in caught.value.message] == []
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_the_table_starts_from_a_directory_that_opens(tmp_path: Path) -> None:
    write_model(tmp_path, BASE)
    write_config(tmp_path, {"quant_method": "exl3"})
    assert list(open_exl3(tmp_path).modules) == [Q]


@pytest.mark.parametrize("flaw", [{}, {f"{Q}.mul1": ("I32", ())}, {f"{Q}.bias": ("F64", (1 << 19,))}])
def test_nothing_is_allocated_before_the_verdict(flaw: dict[str, Declared], tmp_path: Path) -> None:
    write_model(tmp_path, {**BASE, **linear(Q, rows=1 << 14, columns=1 << 15, words=64), **flaw})
    write_config(tmp_path, {"quant_method": "exl3"})
    assert (tmp_path / MODEL).stat().st_size > 1 << 36
    tracemalloc.start()
    try:
        if flaw:
            with pytest.raises(CheckpointError, match=next(iter(flaw)).replace(".", r"\.")):
                open_checkpoint(tmp_path)
        else:
            assert open_checkpoint(tmp_path).modules[Q].bits == 4
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_header_is_refused_or_harmless_but_never_a_crash(tmp_path: Path) -> None:
    write_model(tmp_path, BASE)
    write_config(tmp_path, {"quant_method": "exl3"})
    path = tmp_path / MODEL
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    random = Random(20)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[random.randrange(header_end)] = random.randrange(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")

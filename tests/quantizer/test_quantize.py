"""Quantizing whole directories: what is written reads back, scores close to its source, and resumes."""

import json
import lzma
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_config, write_model
from transformers import AutoConfig, AutoModelForCausalLM

import exl3_kernels.ldlq
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.checkpoint.inspect import inventory
from exl3eval.engine.model import load_arm
from exl3eval.errors import UsageError
from exl3eval.quantizer.quantize import QuantizeRequest, quantize_model
from exl3eval.score.divergence import measure_divergences
from exl3eval.variant import Variant

CPU = torch.device("cpu")
BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


class _Silent:
    def phase(self, label: str, total: int, unit: str):
        from contextlib import nullcontext

        return nullcontext(lambda count: None)


@pytest.fixture(autouse=True)
def _fixed_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale search has its own tests; here it would only take time."""
    monkeypatch.setattr(exl3_kernels.ldlq, "search_global_scale", lambda *_: 0.9)


def source(directory: Path, **changes: object) -> Path:
    config = tiny_config(intermediate_size=128, **changes)
    write_model(directory, {"model.norm.weight": torch.ones(1)}, config, exl3=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.08)
    model.save_pretrained(directory)
    return directory


def request(model: Path, out: Path, **changes: object) -> QuantizeRequest:
    defaults = {
        "bits": 6.0,
        "head_bits": 8,
        "codebook": "mcg",
        "calibration": None,
        "rows": 3,
        "columns": 24,
        "seed": 1,
    }
    return QuantizeRequest(model=model, out=out, **{**defaults, **changes})  # type: ignore[arg-type]


def quantize(*arguments: object, **changes: object) -> dict[str, object]:
    return quantize_model(request(*arguments, **changes), device=CPU, num_threads=1, reporter=_Silent())  # type: ignore[arg-type]


def mean_kl(source_dir: Path, quantized: Path) -> float:
    ids = torch.arange(60) * 7 % VOCAB
    reference, arm = (load_arm(open_checkpoint(d), BASE, vocab_size=VOCAB, device=CPU) for d in (source_dir, quantized))
    logits = [a.head.logits(a.hidden_states(ids)) for a in (reference, arm)]
    return measure_divergences(logits[0], {"arm": logits[1]}, ids)["arm"].kl.mean().item()


def test_a_llama_reads_back_and_stays_close(tmp_path: Path) -> None:
    model = source(tmp_path / "bf16")
    summary = quantize(model, tmp_path / "exl3")
    checkpoint = open_checkpoint(tmp_path / "exl3")
    found = inventory(checkpoint)
    assert summary["modules"] == found.num_exl3 == 8
    assert found.body_bits == 6 == summary["bits"]
    assert summary["fallbacks"] == []
    assert {row.bits for row in found.rows if row.key == "lm_head"} == {8}
    assert checkpoint.notes == ()
    assert 0 < mean_kl(model, tmp_path / "exl3") < 0.02
    assert {f.name for f in (tmp_path / "exl3").iterdir()} >= {"tokenizer.json", "quantization_config.json"}
    assert not (tmp_path / "exl3" / ".unfinished").exists()
    config = json.loads((tmp_path / "exl3" / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 6.0
    assert config["hidden_size"] == 128


def test_experts_are_stored_one_by_one(tmp_path: Path) -> None:
    model = source(tmp_path / "bf16", **MOE)
    quantize(model, tmp_path / "exl3", head_bits=16, codebook="mul1")
    checkpoint = open_checkpoint(tmp_path / "exl3")
    experts = [key for key in checkpoint.modules if ".mlp.experts." in key]
    assert len(experts) == 6
    assert "model.layers.0.mlp.gate.weight" in checkpoint.plain
    assert "lm_head.weight" in checkpoint.plain
    assert mean_kl(model, tmp_path / "exl3") < 0.05


def test_an_interrupted_run_continues_and_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = source(tmp_path / "bf16", num_hidden_layers=2, tie_word_embeddings=True)
    whole = quantize(model, tmp_path / "whole", bits=8.0)
    import exl3eval.quantizer.quantize as module

    real = module._quantize_projections
    calls = []

    def stop_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "_quantize_projections", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "parts", bits=8.0)
    with pytest.raises(UsageError, match="unfinished quantization of another request"):
        quantize(model, tmp_path / "parts", bits=7.0)
    assert quantize(model, tmp_path / "parts", bits=8.0) == whole
    assert len(calls) == 4, "two layers, one of them again, and the head"
    names = ["model.safetensors", "config.json", "quantization_config.json"]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name
    assert open_checkpoint(tmp_path / "whole").has_quantized_head


def test_calibration_text_may_be_compressed_and_must_suffice(tmp_path: Path) -> None:
    from exl3eval.quantizer.calibration import text_rows

    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(word) for word in text.split()]

    text = "one three seventeen " * 40
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.xz").write_bytes(lzma.compress(text.encode()))
    rows = text_rows(tmp_path, Words(), rows=6, columns=30, seed=0)
    assert rows.shape == (6, 30)
    assert torch.equal(rows, text_rows(tmp_path, Words(), rows=6, columns=30, seed=0))
    with pytest.raises(UsageError, match="8 rows of 30 tokens, 9 wanted"):
        text_rows(tmp_path, Words(), rows=9, columns=30, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \.txt"):
        text_rows(tmp_path / "empty", Words(), rows=1, columns=30, seed=0)
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match=r"a\.txt cannot be read"):
        text_rows(tmp_path / "a.txt", Words(), rows=1, columns=30, seed=0)

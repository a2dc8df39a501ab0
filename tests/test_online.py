"""Quantizing at load: made once per content and recipe, run as a checkpoint of its own."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_config, write_model

import exl3_kernels.ldlq
from exl3eval import online
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.errors import UsageError
from exl3eval.online import quantize_at_load
from exl3eval.progress import TerminalReporter
from exl3eval.quantizer.quantize import QuantizeRequest
from exl3eval.variant import Variant, load_variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
CPU = torch.device("cpu")
DATA = Path(__file__).parent / "data" / "qwen2-tied"


def _plain(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = tiny_config(intermediate_size=128)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "quantization_config"}))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    return write_model(tmp_path, tensors, config, exl3=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in this process, and take a scale instead of searching one, which needs a GPU to be quick."""
    monkeypatch.setattr(exl3_kernels.ldlq, "search_global_scale", lambda *_: 0.9)
    monkeypatch.setattr(online, "run_isolated", lambda work, task, reporter, label: work(task, reporter))


def _quantize(source: Checkpoint, recipe: str, cache: Path) -> Checkpoint:
    return quantize_at_load(
        source,
        "5" * 64,
        recipe,
        seed=1,
        device=CPU,
        cache_dir=cache,
        num_threads=1,
        reporter=TerminalReporter(quiet=True),
    )


@pytest.mark.usefixtures("here")
def test_a_source_is_quantized_once_per_recipe_without_calibration(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def quantize(request: QuantizeRequest, **_: object) -> None:
        asked.append(request)
        shutil.copytree(DATA / "exl3-mcg-5bpw", request.out)

    monkeypatch.setattr(online, "quantize_model", quantize)
    source = open_checkpoint(DATA / "bf16")
    made = [_quantize(source, recipe, tmp_path) for recipe in ("6-mcg", "6-mcg", "3-mul1")]
    assert made[0].directory == made[1].directory != made[2].directory
    assert [(r.bits, r.head_bits, r.codebook, r.rows) for r in asked] == [(6.0, 6, "mcg", 0), (3.0, 3, "mul1", 0)]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_source_becomes_a_checkpoint_close_to_it(tmp_path: Path) -> None:
    source = open_checkpoint(_plain(tmp_path / "source"))
    made = _quantize(source, "4-mcg", tmp_path / "cache")
    assert made.is_exl3
    assert {module.bits for module in made.modules.values()} == {4}
    ids = torch.arange(12) * 7 % VOCAB
    arms = [load_arm(checkpoint, BASE, vocab_size=VOCAB, device=CPU) for checkpoint in (source, made)]
    exact, coded = (arm.hidden_states(ids) for arm in arms)
    error = float((coded - exact).norm() / exact.norm())
    assert 0.0 < error < 0.3


def test_the_variant_names_a_recipe() -> None:
    assert load_variant("online-k6").quantize == "6-mcg"
    with pytest.raises(UsageError, match="`quantize` is '9-mcg'"):
        Variant(name="x", doc="x", activations="auto", linear="auto", embedding="stored", quantize="9-mcg")

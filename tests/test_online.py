"""Quantizing at load: made once per content and recipe, run as a checkpoint of its own."""

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_config, write_model

import exl3_kernels.ldlq
from exl3eval import online
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.errors import UsageError
from exl3eval.online import quantize_at_load
from exl3eval.progress import TerminalReporter
from exl3eval.variant import Variant, load_variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
CPU = torch.device("cpu")


def _plain(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = tiny_config()
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "quantization_config"}))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    return write_model(tmp_path, tensors, config, exl3=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in this process, and take a scale instead of searching one, which needs a GPU to be quick."""
    monkeypatch.setattr(exl3_kernels.ldlq, "search_global_scale", lambda *_: 0.9)
    monkeypatch.setattr(online, "run_isolated", lambda work, task, reporter, label: work(task, reporter))


@pytest.mark.usefixtures("quick")
def test_the_source_becomes_a_checkpoint_once(tmp_path: Path) -> None:
    source = open_checkpoint(_plain(tmp_path / "source"))

    def quantize(recipe: str):
        return quantize_at_load(
            source,
            "5" * 64,
            recipe,
            seed=1,
            device=CPU,
            cache_dir=tmp_path / "cache",
            num_threads=1,
            reporter=TerminalReporter(quiet=True),
        )

    made = quantize("4-mcg")
    assert made.is_exl3
    assert {module.bits for module in made.modules.values()} == {4}
    stamp = (made.directory / "config.json").stat().st_mtime_ns
    assert quantize("4-mcg").directory == made.directory
    assert (made.directory / "config.json").stat().st_mtime_ns == stamp
    ids = torch.arange(12) * 7 % VOCAB
    arms = [load_arm(checkpoint, BASE, vocab_size=VOCAB, device=CPU) for checkpoint in (source, made)]
    exact, coded = (arm.hidden_states(ids) for arm in arms)
    error = float((coded - exact).norm() / exact.norm())
    assert 0.0 < error < 0.3


def test_the_variant_names_a_recipe() -> None:
    assert load_variant("online-k6").quantize == "6-mcg"
    with pytest.raises(UsageError, match="`quantize` is '9-mcg'"):
        Variant(name="x", doc="x", activations="auto", linear="auto", embedding="stored", quantize="9-mcg")

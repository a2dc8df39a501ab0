"""Checkpoints that exllamav3 wrote, against the logits that exllamav3 computed with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.score.divergence import measure_divergences
from exl3eval.variant import load_variant, resolve_variant

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "checkpoints"
SUMMARY = SHARED / "upstream_summary.json"
ALL = sorted(json.loads(SUMMARY.read_text())) if SUMMARY.exists() else []
BASE = resolve_variant(load_variant("base"), "cpu")
VOCAB = 1024


def _check(architecture: Path, name: str, mean_kld_upstream: float) -> None:
    exl3 = architecture / f"exl3-{name}"
    upstream = load_file(exl3 / "upstream_logits.safetensors")
    reference = load_file(architecture / "bf16" / "reference_logits.safetensors")
    weights = load_file(architecture / "bf16" / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    arm = load_arm(open_checkpoint(exl3), BASE, vocab_size=VOCAB, device=torch.device("cpu"))
    to_upstream, to_reference = [], []
    for ids, theirs_TV, hidden_TH in zip(
        upstream["input_ids"], upstream["logits_recon_256rows_first64"], reference["hidden"], strict=True
    ):
        ours_TV = arm.head.logits(arm.hidden_states(ids))
        targets = ids.roll(-1)
        to_upstream.append(measure_divergences(theirs_TV.float(), {"ours": ours_TV[:64]}, targets[:64])["ours"].kl)
        to_reference.append(measure_divergences(hidden_TH.float() @ head.T, {"ours": ours_TV}, targets)["ours"].kl)
    assert torch.cat(to_upstream).mean() <= 1e-5
    tolerance = 0.02 if architecture.name == "qwen3moe" else 0.005
    assert torch.cat(to_reference).mean().item() == pytest.approx(mean_kld_upstream, rel=tolerance)


def test_a_tied_qwen2_reproduces_upstream() -> None:
    kld = load_file(DATA / "qwen2-tied" / "exl3-mcg-5bpw" / "upstream_logits.safetensors")["kld_vs_bf16_recon"]
    _check(DATA / "qwen2-tied", "mcg-5bpw", kld.mean().item())


@pytest.mark.skipif(not ALL, reason="the upstream checkpoints are not beside the repository")
@pytest.mark.parametrize("key", ALL)
def test_every_upstream_checkpoint_is_reproduced(key: str) -> None:
    architecture, name = key.split("/")
    _check(SHARED / architecture, name, json.loads(SUMMARY.read_text())[key]["mean_kld_recon"])


def test_a_slightly_wrong_head_column_is_seen() -> None:
    """The bound of 1e-5 has teeth: one head column of 1,024 off by 20 % breaks it."""
    exl3 = DATA / "qwen2-tied" / "exl3-mcg-5bpw"
    arm = load_arm(open_checkpoint(exl3), BASE, vocab_size=VOCAB, device=torch.device("cpu"))
    ids = load_file(exl3 / "upstream_logits.safetensors")["input_ids"][0]
    theirs = load_file(exl3 / "upstream_logits.safetensors")["logits_recon_256rows_first64"][0].float()
    head = arm.head.module
    head.dense[:, 5] *= 1.2
    ours = arm.head.logits(arm.hidden_states(ids))[:64]
    assert measure_divergences(theirs, {"ours": ours}, ids[1:65])["ours"].kl.mean() > 1e-5

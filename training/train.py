"""Train the bundled model on the tokens that `corpus.py` wrote, on one GPU, within a wall-clock budget.

    PYTHONPATH=. python -m training.train --tokens .corpus/tokens --out OUT --minutes 4

Writes a Hugging Face directory (BF16, one safetensors file, tokenizer) and `training.json`. With
`--minutes` the learning-rate schedule follows the clock, which starts after the first step so that
compilation is not charged; with `--steps` it follows the step count and a rerun takes the same steps.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from exl3eval.errors import UsageError
from exl3eval.records import digest_file, read_json, write_json

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, apart from the data and the clock."""

    length: int = 512
    batch: int = 256
    peak_rate: float = 3e-3
    final_rate_frac: float = 0.02
    warmup_steps: int = 150
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    family_power: float = 0.7
    """A family is drawn with probability proportional to its tokens to this power."""
    seed: int = 20_261


def load_stream(folder: Path, split: str, family: str, sha256: str) -> Tensor:
    """Read one family's token ids, shape (num_tokens,), int32.

    Raises
    ------
    UsageError
        If the bytes are not those that `corpus.json` declares.
    """
    raw = lzma.decompress((folder / f"{split}-{family}.u16.xz").read_bytes())
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise UsageError(f"{split}-{family}.u16.xz differs from corpus.json", hint="build the corpus again")
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.int32))


def build_model(seed: int) -> LlamaForCausalLM:
    """Return the untrained FP32 model."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **ids))


class Windows:
    """Random training windows; every window starts with BOS, as every scored context does."""

    def __init__(self, streams: list[Tensor], recipe: Recipe, device: torch.device) -> None:
        sizes = torch.tensor([len(stream) for stream in streams], dtype=torch.float64)
        if int(sizes.min()) <= recipe.length:
            raise UsageError("a family has fewer tokens than one window", hint="give it a larger share")
        self.recipe = recipe
        self.tokens = torch.cat(streams).to(device)
        self.starts = (sizes.cumsum(0) - sizes).long()
        self.spans = sizes.long() - recipe.length
        self.weights = sizes**recipe.family_power
        self.steps = torch.arange(recipe.length + 1, device=device)
        self.random = torch.Generator().manual_seed(recipe.seed)

    def draw(self) -> Tensor:
        """Return token ids of shape (batch, length + 1), int64."""
        families = torch.multinomial(self.weights, self.recipe.batch, replacement=True, generator=self.random)
        fractions = torch.rand(self.recipe.batch, dtype=torch.float64, generator=self.random)
        starts = self.starts[families] + (fractions * self.spans[families]).long()
        ids = self.tokens[starts.to(self.tokens.device)[:, None] + self.steps].long()
        ids[:, 0] = BOS_ID
        return ids


def next_token_loss(model: LlamaForCausalLM, ids_BT: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of every token after the first, in nats, in FP32."""
    logits = model(input_ids=ids_BT[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def rate_at(step: int, progress: float, recipe: Recipe) -> float:
    """Return the learning rate: linear warm-up by steps, cosine decay by `progress` in [0, 1]."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decayed = recipe.final_rate_frac + (1 - recipe.final_rate_frac) * cosine
    return recipe.peak_rate * decayed * min(1.0, (step + 1) / recipe.warmup_steps)


def build_optimizer(model: LlamaForCausalLM, recipe: Recipe, *, fused: bool) -> torch.optim.AdamW:
    """Return AdamW that decays matrices but not norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=recipe.betas, fused=fused)


def train(
    model: LlamaForCausalLM,
    windows: Windows,
    recipe: Recipe,
    *,
    progress_at: Callable[[int, float], float],
    compiled: bool,
) -> list[dict[str, float]]:
    """Train in place until `progress_at(step, seconds)` reaches 1; return the sampled loss curve."""
    device = windows.tokens.device
    optimizer = build_optimizer(model, recipe, fused=device.type == "cuda")
    loss_of = torch.compile(next_token_loss) if compiled else next_token_loss
    curve: list[dict[str, float]] = []
    started = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, progress, recipe)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, windows.draw())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            loss.item()
            started = time.monotonic()
        step += 1
        if step % 50 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # without it the clock runs ahead of the queued work
        progress = progress_at(step, time.monotonic() - started)
        if step % 200 == 0 or step in (1, 20) or progress >= 1:
            seconds = time.monotonic() - started
            curve.append({"step": step, "seconds": round(seconds, 1), "loss_nats": round(loss.item(), 4)})
            print(f"step {step:6} {seconds:6.1f} s  loss {loss.item():.4f}", flush=True)
            if not math.isfinite(curve[-1]["loss_nats"]):
                raise UsageError(f"the loss is not finite at step {step}", hint="lower the peak learning rate")
    return curve


@torch.inference_mode()
def held_out_nll(model: LlamaForCausalLM, stream: Tensor, length: int, device: torch.device) -> float:
    """Return the mean NLL in nats per token over disjoint windows of one held-out stream."""
    windows = stream[: (len(stream) - 1) // length * length + 1].to(device).long()
    ids = windows.unfold(0, length + 1, length).clone()
    ids[:, 0] = BOS_ID
    losses = [next_token_loss(model, part).double() * len(part) for part in ids.split(32)]
    return float(torch.stack(losses).sum() / len(ids))


def main() -> None:
    """Parse the command line, train, evaluate and save."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face directory")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="wall-clock budget after the first step")
    budget.add_argument("--steps", type=int, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=Recipe().batch, help="windows per step")
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    arguments = parser.parse_args()
    recipe = Recipe(batch=arguments.batch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = read_json(arguments.tokens / "corpus.json")
    streams = {
        split: {
            name: load_stream(arguments.tokens, split, name, f[split]["sha256"])
            for name, f in corpus["families"].items()
        }
        for split in ("train", "heldout")
    }
    windows = Windows(list(streams["train"].values()), recipe, device)
    model = build_model(recipe.seed).to(device)

    def progress_at(step: int, seconds: float) -> float:
        return step / arguments.steps if arguments.steps else seconds / (60 * arguments.minutes)

    compiled = device.type == "cuda" and not arguments.eager
    curve = train(model, windows, recipe, progress_at=progress_at, compiled=compiled)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    for file in sorted((arguments.tokens / "tokenizer").iterdir()):
        shutil.copy(file, arguments.out / file.name)
    record = describe(model.float(), recipe, corpus, streams, curve, compiled=compiled)
    record["weights_sha256"] = digest_file(arguments.out / "model.safetensors")
    write_json(arguments.out / "training.json", record)


def describe(
    model: LlamaForCausalLM,
    recipe: Recipe,
    corpus: dict[str, Any],
    streams: dict[str, dict[str, Tensor]],
    curve: list[dict[str, float]],
    *,
    compiled: bool,
) -> dict[str, Any]:
    """Measure the saved weights on the held-out text and gather the record of the run."""
    device = model.device
    model.eval()
    held_out: dict[str, dict[str, float]] = {}
    for name, stream in streams["heldout"].items():
        nats = held_out_nll(model, stream, recipe.length, device)
        part = corpus["families"][name]["heldout"]
        bits = nats * part["tokens"] / part["bytes"] / math.log(2)
        held_out[name] = {"nll_nats": round(nats, 4), "bits_per_byte": round(bits, 4), "tokens": part["tokens"]}
        print(f"held out {name:12} {nats:.4f} nats/token  {bits:.4f} bits/byte", flush=True)
    steps = int(curve[-1]["step"])
    return {
        "schema": "exl3eval/training/1",
        "corpus": {key: corpus[key] for key in ("digest", "suite", "exclusion", "sources")},
        "train_bytes": sum(f["train"]["bytes"] for f in corpus["families"].values()),
        "train_tokens": sum(f["train"]["tokens"] for f in corpus["families"].values()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe),
        "steps": steps,
        "seen_tokens": steps * recipe.batch * recipe.length,
        "seconds": curve[-1]["seconds"],
        "curve": curve,
        "held_out": held_out,
        "compiled": compiled,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    }


if __name__ == "__main__":
    main()

"""Why one prefill differs between CPU and GPU: a router near tie.

python reports/h200/near_tie.py CHECKPOINTS

Runs `qwen3moe/exl3-mul1-4bpw` on the CPU twice over the contexts of upstream.py: in the FP32 arithmetic of its default
route, and with rows rounded to FP16 before and after the rotation, as the GPU kernels round them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.score.divergence import measure_divergences
from exl3eval.suite.load import load_suite
from exl3eval.suite.tokens import tokenize_suite
from exl3eval.variant import load_variant, resolve_variant

CONTEXTS, POSITIONS, VOCABULARY = 16, 64, 1024
CONTEXT, POSITION, ROUTER = 1, 26, "model.layers.0.mlp.gate"


def main() -> None:
    """Print the mean divergence and the router's gap in both arithmetics."""
    folder = Path(sys.argv[1]) / "qwen3moe"
    source = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.float32)
    tokens = tokenize_suite(
        load_suite(), folder / "bf16", num_contexts=CONTEXTS, num_tokens=POSITIONS + 1, seed=1
    ).contexts
    ids = [torch.tensor(context.ids.copy()).long() for context in tokens]
    with torch.no_grad():
        references = [source(context[None, :-1]).logits[0] for context in ids]
        for name, what in (("base", "rows in FP32"), ("rotated-fp16", "rows rounded to FP16 twice")):
            variant = resolve_variant(load_variant(name), "cpu")
            arm = load_arm(
                open_checkpoint(folder / "exl3-mul1-4bpw"), variant, vocab_size=VOCABULARY, device=torch.device("cpu")
            )
            print(f"{what}: mean KL {mean_kl(arm, ids, references):.6f}, gap {router_gap(arm, ids[CONTEXT]):.1e}")


def mean_kl(arm: ArmModel, ids: list[torch.Tensor], references: list[torch.Tensor]) -> float:
    """Return KL(reference || arm) over every position, in nats."""
    found = [
        measure_divergences(reference, {"arm": arm.head.logits(arm.hidden_states(context[:-1]))}, context[1:])["arm"].kl
        for context, reference in zip(ids, references, strict=True)
    ]
    return float(torch.cat(found).mean())


def router_gap(arm: ArmModel, context: torch.Tensor) -> float:
    """Return how far the first layer's second expert is from its third, at the position in question, in logits."""
    seen: list[torch.Tensor] = []
    router = arm.model.get_submodule(ROUTER)
    hook = router.register_forward_hook(lambda module, args, _: seen.append(args[0].flatten(0, -2) @ module.weight.T))
    arm.hidden_states(context[:-1])
    hook.remove()
    second, third = seen[0][POSITION].sort(descending=True).values[1:3].tolist()
    return second - third


if __name__ == "__main__":
    main()

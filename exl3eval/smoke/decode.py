"""Decoding one token at a time over a key-value cache, freely or along given tokens.

Shapes: P prompt ids, S decoded positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl3eval.engine.graphs import cache_argument, static_cache
from exl3eval.engine.head import Head
from exl3eval.engine.model import ArmModel
from exl3eval.errors import InvalidRunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """An arm as the smoke test runs it.

    Parameters
    ----------
    arm : ArmModel
        The loaded arm.
    head : Head
        Its own, or the reference's for a variant that is scored through it.
    round_logits : bool
        Round logits to BF16, as a known-bad control declares.
    """

    arm: ArmModel
    head: Head
    round_logits: bool = False

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return FP32 logits: [S, H] -> [S, V]."""
        logits_SV = self.head.logits(hidden_SH.to(self.arm.device))
        return logits_SV.bfloat16().float() if self.round_logits else logits_SV


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The most likely id at each position, int64 [S], and the hidden states behind them, [S, H]; both on the CPU."""

    ids: torch.Tensor
    hidden: torch.Tensor


@torch.inference_mode()
def decode(decoder: Decoder, prompt_P: torch.Tensor, steps: int, *, along: torch.Tensor | None = None) -> Decoded:
    """Prefill a prompt, then decode greedily. End-of-text ids end nothing, so every output has `steps` ids.

    Parameters
    ----------
    decoder : Decoder
        Which arm.
    prompt_P : Tensor
        int64 [P], P >= 1.
    steps : int
        S, 1 or more.
    along : Tensor or None
        int64 [S]: ids to feed in place of the arm's own choices (teacher forcing).

    Raises
    ------
    InvalidRunError
        If nothing is to be decoded, or a hidden state is not finite.
    """
    if steps < 1 or len(prompt_P) < 1 or (along is not None and len(along) != steps):
        raise InvalidRunError(
            f"{steps} ids decoded after a prompt of {len(prompt_P)}: empty output is no evidence",
            hint="decode at least 1 id after at least 1",
        )
    arm = decoder.arm
    cache = {
        cache_argument(arm.decoder): static_cache(arm.decoder, len(prompt_P) + steps),
        "use_cache": True,
    }
    inputs_1T = prompt_P[None].to(arm.device)
    ids, states = [], []
    for step in range(steps):
        hidden_1H = arm.decoder(input_ids=inputs_1T, **cache).last_hidden_state[0, -1:]
        top_1 = decoder.logits(hidden_1H).argmax(dim=1)
        states.append(hidden_1H)
        ids.append(top_1)
        inputs_1T = (top_1 if along is None else along[step : step + 1].to(arm.device))[None]
    hidden_SH = torch.cat(states)
    if not bool(torch.isfinite(hidden_SH).all()):
        raise InvalidRunError(
            "a hidden state is not finite while decoding", hint="the checkpoint or a kernel is broken"
        )
    return Decoded(ids=torch.cat(ids).cpu(), hidden=hidden_SH.cpu())

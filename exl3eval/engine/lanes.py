"""Lanes: how a context is fed to a model, and so how many rows its linears see.

A prefill forward never runs the kernels that serve one token at a time. Each lane is teacher-forced on the
same ids:

- `prefill`: the whole context in one forward;
- `chunked[C]`: in forwards of C tokens over a key-value cache;
- `decode[M]`: M contexts in lock step, one token each per forward, after a prefix that is prefilled: the
  linears see exactly M rows.

Shapes: B contexts of a batch, T input ids, S scored positions (the last S of T), H hidden size.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import torch
from torch import nn

from exl3eval.errors import UsageError

KINDS = ("prefill", "chunked", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One forward regime.

    Parameters
    ----------
    kind : str
        `prefill`, `chunked` or `decode`.
    rows : int or None
        Tokens per forward of `chunked`, contexts per forward of `decode`; None for `prefill`.
    scored : int or None
        Positions scored at the end of each context; None for all of them.
    """

    kind: str
    rows: int | None = None
    scored: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown lane {self.kind!r}", hint=f"use one of: {', '.join(KINDS)}")
        if (self.rows is None) != (self.kind == "prefill"):
            raise UsageError(f"lane {self.kind!r} with rows {self.rows}", hint="chunked and decode lanes have rows")
        for value in (self.rows, self.scored):
            if value is not None and value < 1:
                raise UsageError(f"lane {self.kind!r} with {value} rows or positions", hint="use 1 or more")

    @property
    def name(self) -> str:
        """As in reports: `prefill`, `chunked[128]`, `decode[4]`."""
        return self.kind if self.rows is None else f"{self.kind}[{self.rows}]"

    @property
    def slug(self) -> str:
        """As a folder name."""
        return self.kind if self.rows is None else f"{self.kind}-{self.rows}"

    @property
    def batch(self) -> int:
        """Contexts per forward."""
        return self.rows or 1 if self.kind == "decode" else 1

    @property
    def head_rows(self) -> int | None:
        """Rows that the output head sees at a time; None for as many as fit."""
        return self.rows if self.kind == "decode" else None

    def first_scored(self, num_inputs: int) -> int:
        """Index of the first scored position among `num_inputs`.

        Raises
        ------
        UsageError
            If a decode lane has no prefix left, or more is to be scored than there is.
        """
        first = 0 if self.scored is None else num_inputs - self.scored
        if first < 0 or (self.kind == "decode" and first < 1):
            raise UsageError(
                f"lane {self.name} scores {self.scored} of {num_inputs} positions",
                hint="give more --positions, or fewer --decode-positions",
            )
        return first


def parse_lanes(kinds: list[str], *, rows: str, chunks: str, decode_positions: int) -> list[Lane]:
    """Turn command line words into lanes: every chunk size and every row count is a lane of its own.

    Raises
    ------
    UsageError
        On unknown kinds, repeated lanes, or lists that are not positive integers.
    """
    lanes: list[Lane] = []
    for kind in kinds:
        if kind == "chunked":
            lanes += [Lane(kind=kind, rows=size) for size in _integers(chunks, "--chunks")]
        elif kind == "decode":
            lanes += [Lane(kind=kind, rows=m, scored=decode_positions) for m in _integers(rows, "--rows")]
        else:
            lanes.append(Lane(kind=kind))
    if len({lane.name for lane in lanes}) != len(lanes):
        raise UsageError("a lane is asked for twice", hint="name each lane once")
    return lanes


def _integers(text: str, option: str) -> list[int]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"{option} is {text!r}", hint="give whole numbers, such as 1,4,16")
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def run_batch(decoder: nn.Module, ids_BT: torch.Tensor, lane: Lane) -> torch.Tensor:
    """Run a batch of contexts through one lane.

    Parameters
    ----------
    decoder : Module
        A transformers base model.
    ids_BT : Tensor
        int [B, T] on the decoder's device; B is 1 except in decode lanes.
    lane : Lane
        The regime.

    Returns
    -------
    Tensor
        Post-final-norm hidden states of the scored positions, [B, S, H].
    """
    num_inputs = ids_BT.shape[1]
    first = lane.first_scored(num_inputs)
    ids_BT = ids_BT.long()
    if lane.kind == "prefill":
        return decoder(input_ids=ids_BT, use_cache=False).last_hidden_state[:, first:]
    from transformers import DynamicCache

    cache = {_cache_argument(decoder): DynamicCache(), "use_cache": True}
    widths = [lane.rows or 1] * -(-num_inputs // (lane.rows or 1)) if lane.kind == "chunked" else [first]
    widths += [1] * (num_inputs - first) if lane.kind == "decode" else []
    states, start = [], 0
    for width in widths:
        states.append(decoder(input_ids=ids_BT[:, start : start + width], **cache).last_hidden_state)
        start += width
    if lane.kind == "decode":
        states = states[1:]
    return torch.cat(states, dim=1)[:, -(num_inputs - first) :]


def _cache_argument(decoder: nn.Module) -> str:
    """Name the key-value cache argument, which transformers renamed in 5.24."""
    parameters = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"

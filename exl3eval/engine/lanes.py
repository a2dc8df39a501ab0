"""Lanes: how a context is fed to a model, and so how many rows its linears see.

A prefill forward never runs the kernels that serve one token at a time. Each lane is teacher-forced on the
same ids:

- `prefill`: the whole context in one forward;
- `chunked[C]`: in forwards of C tokens over a key-value cache;
- `decode[M]`: M contexts in lock step, one token each per forward, after a prefix that is prefilled: the
  linears see exactly M rows. The cache is static, so that `decode[M,graph]`, which replays one captured step,
  differs from it by the replay alone.

Shapes: B contexts of a batch, T input ids, S scored positions (the last S of T), H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from exl3_kernels.routes import parse_dispatch
from exl3eval.engine.graphs import DecodeGraph, cache_argument, static_cache
from exl3eval.errors import UsageError

KINDS = ("prefill", "chunked", "decode")
CHUNKS, DECODE_POSITIONS = "128", 64  # where a lane's option is not given
USUAL_ROWS = (1, 2, 4, 8, 16)
MOST_ROWS = 256


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
    graph : bool
        Replay a CUDA graph of the decode step instead of running it eagerly.
    """

    kind: str
    rows: int | None = None
    scored: int | None = None
    graph: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown lane {self.kind!r}", hint=f"use one of: {', '.join(KINDS)}")
        if (self.rows is None) != (self.kind == "prefill"):
            raise UsageError(f"lane {self.kind!r} with rows {self.rows}", hint="chunked and decode lanes have rows")
        if self.graph and self.kind != "decode":
            raise UsageError(f"lane {self.kind!r} under CUDA graphs", hint="graphs replay decode steps: --lane decode")
        for value in (self.rows, self.scored):
            if value is not None and value < 1:
                raise UsageError(f"lane {self.kind!r} with {value} rows or positions", hint="use 1 or more")

    @property
    def name(self) -> str:
        """As in reports: `prefill`, `chunked[128]`, `decode[4]`, `decode[4,graph]`."""
        return self.kind if self.rows is None else f"{self.kind}[{self.rows}{',graph' if self.graph else ''}]"

    @property
    def slug(self) -> str:
        """As a folder name."""
        return self.kind if self.rows is None else f"{self.kind}-{self.rows}{'-graph' if self.graph else ''}"

    @property
    def kv_cache(self) -> str | None:
        """What keys and values are kept in: it grows in chunked lanes and is static in decode lanes."""
        return None if self.kind == "prefill" else "activation dtype"

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


def parse_lanes(
    kinds: list[str], *, rows: Sequence[int] | None, chunks: str | None, decode_positions: int | None
) -> list[Lane]:
    """Turn command line words into lanes: every chunk size and every row count is a lane of its own.

    Parameters
    ----------
    kinds : list of str
        `prefill`, `chunked`, `decode`.
    rows : sequence of int or None
        Contexts of a decode step; given if and only if there are decode lanes.
    chunks : str or None
        Tokens per forward of chunked lanes; None for the default.
    decode_positions : int or None
        Positions that decode lanes score; None for the default.

    Raises
    ------
    UsageError
        On unknown kinds, repeated lanes, lists that are not positive integers, or an option of a lane not asked for.
    """
    lanes: list[Lane] = []
    for kind in kinds:
        if kind == "chunked":
            lanes += [Lane(kind=kind, rows=size) for size in parse_integers(chunks or CHUNKS, "--chunks")]
        elif kind == "decode":
            scored = DECODE_POSITIONS if decode_positions is None else decode_positions
            lanes += [Lane(kind=kind, rows=count, scored=scored) for count in rows or ()]
        else:
            lanes.append(Lane(kind=kind))
    if len({lane.name for lane in lanes}) != len(lanes):
        raise UsageError("a lane is asked for twice", hint="name each lane once")
    for option, given, kind in (
        ("--rows", rows, "decode"),
        ("--decode-positions", decode_positions, "decode"),
        ("--chunks", chunks, "chunked"),
    ):
        if given is not None and kind not in kinds:
            raise UsageError(f"{option} is for {kind} lanes, and none is asked for", hint=f"add --lane {kind}")
    return lanes


def threshold_rows(dispatches: Iterable[str]) -> list[int]:
    """Return the decode row counts that reach every route: 1, 2, 4, 8, 16 and both sides of each threshold.

    Parameters
    ----------
    dispatches : iterable of str
        Of the variants to be compared. Thresholds above 256 rows belong to prefill and are left to that lane.
    """
    edges = {r.last for dispatch in dispatches for r in parse_dispatch(dispatch) if r.last and r.last < MOST_ROWS}
    return sorted({*USUAL_ROWS, *edges, *(edge + 1 for edge in edges)})


def parse_integers(text: str, option: str) -> list[int]:
    """Parse `1,4,16`.

    Raises
    ------
    UsageError
        On anything else.
    """
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"{option} is {text!r}", hint="give whole numbers, such as 1,4,16")
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def run_batch(decoder: nn.Module, ids_BT: torch.Tensor, lane: Lane, graph: DecodeGraph | None = None) -> torch.Tensor:
    """Run a batch of contexts through one lane.

    Parameters
    ----------
    decoder : Module
        A transformers base model.
    ids_BT : Tensor
        int [B, T] on the decoder's device; B is 1 except in decode lanes.
    lane : Lane
        The regime.
    graph : DecodeGraph or None
        The captured step of a lane under graphs.

    Returns
    -------
    Tensor
        Post-final-norm hidden states of the scored positions, [B, S, H].
    """
    first = lane.first_scored(ids_BT.shape[1])
    ids_BT = ids_BT.long()
    if lane.kind == "prefill":
        return decoder(input_ids=ids_BT, use_cache=False).last_hidden_state[:, first:]
    if lane.kind == "chunked":
        from transformers import DynamicCache

        cache = {cache_argument(decoder): DynamicCache(), "use_cache": True}
        chunks = ids_BT.split(lane.rows or 1, dim=1)
        states = [decoder(input_ids=chunk, **cache).last_hidden_state for chunk in chunks]
        return torch.cat(states, dim=1)[:, first:]
    if graph is not None:
        return graph.run(ids_BT, first)
    cache = {cache_argument(decoder): static_cache(decoder, ids_BT.shape[1]), "use_cache": True}
    decoder(input_ids=ids_BT[:, :first], **cache)
    steps = ids_BT[:, first:].split(1, dim=1)
    return torch.cat([decoder(input_ids=step, **cache).last_hidden_state for step in steps], dim=1)

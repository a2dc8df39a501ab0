"""Floors: how far an arm is from itself when nothing that matters was changed.

Each is the exact divergence between two runs of one arm on the same ids, over the first few contexts: another batch
shape, another split into chunks, graph replay against eager, replayed against live logits, and the reference with its
input moved by rounding. A floor stands beside an effect; it is never subtracted, because KL is not additive.

Shapes: B contexts of a batch, T input ids, S scored positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import torch

from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import ArmModel
from exl3eval.engine.parallel import map_contexts
from exl3eval.score.divergence import Divergences, measure_divergences
from exl3eval.score.positions import Placed

NUM_CONTEXTS = 4
SPLIT = 128
BLOCK_LOGITS = 1 << 25
NOISE_SEED = 20_481

BATCH_SHAPE, CHUNK_SPLIT, EAGER_GRAPH = "batch_shape", "chunk_split", "eager_graph"
REPLAY_LIVE, SELF_NOISE, ENGINES = "replay_live", "self_noise", "engines"
FLOORS = {
    BATCH_SHAPE: "the same contexts in a batch of another size",
    CHUNK_SPLIT: f"one prefill against chunks of at most {SPLIT}",
    EAGER_GRAPH: "eager decode steps against replayed ones",
    REPLAY_LIVE: "logits replayed from stored hidden states against live ones",
    SELF_NOISE: "the reference with its input embeddings moved by one rounding",
    ENGINES: "the reference in another engine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorContext:
    """A context as a floor sees it: names, and ids [T + 1]."""

    name: str
    cluster: str
    stratum: str
    ids: np.ndarray

    @property
    def inputs(self) -> torch.Tensor:
        """What goes in, int64 [T]."""
        return torch.from_numpy(self.ids[:-1].astype(np.int64))


def measure_floors(
    arm: ArmModel, contexts: Sequence[FloorContext], *, lane: Lane, is_reference: bool, num_threads: int
) -> list[Placed]:
    """Measure the floors that mean something in a lane.

    Parameters
    ----------
    arm : ArmModel
        The loaded arm.
    contexts : sequence of FloorContext
        Few; at least one.
    lane : Lane
        The lane under test.
    is_reference : bool
        Whether to add the reference's own noise, in prefill.
    num_threads : int
        Contexts run at a time; more than one only pays on a CPU.

    Returns
    -------
    list of Placed
        Divergences of the benign run from the plain one, at the scored positions, labelled by floor.
    """
    first = lane.first_scored(len(contexts[0].inputs))
    plain = replace(lane, graph=False)
    runs: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {}

    def states(index: int, lane: Lane, batch: int) -> torch.Tensor:
        ids = [contexts[(index + offset) % len(contexts)].inputs for offset in range(batch)]
        return arm.run_lane(torch.stack(ids), lane)[0]

    def other_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = lane.batch
        other = 2 if rows == 1 else 1
        moved = replace(plain, rows=other) if lane.kind == "decode" else plain
        return states(index, plain, rows), states(index, moved, other)

    def other_split(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = min(SPLIT, max(1, len(contexts[0].inputs) // 2))
        whole, split = Lane(kind="prefill", scored=lane.scored), Lane(kind="chunked", rows=size, scored=lane.scored)
        return states(index, whole, 1), states(index, lane if lane.kind == "chunked" else split, 1)

    def replayed(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return states(index, plain, lane.batch), states(index, replace(lane, graph=True), lane.batch)

    def moved_input(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        still = states(index, plain, 1)
        with _rounding_noise(arm):
            return still, states(index, plain, 1)

    runs[BATCH_SHAPE] = other_batch
    if lane.kind != "decode":
        runs[CHUNK_SPLIT] = other_split
    if lane.kind == "decode" and arm.can_replay(torch.stack([c.inputs for c in contexts])):
        runs[EAGER_GRAPH] = replayed

    def measure(each: tuple[str, int]) -> Placed:
        floor, index = each
        context = contexts[index]
        if floor == REPLAY_LIVE:
            live = arm.live_logits(context.inputs)[first:]
            again = arm.head.logits(arm.hidden_states(context.inputs)[first:])
            return _place(floor, context, first, _against(live, again, context, first))
        return _place(floor, context, first, _divergences(arm, *runs[floor](index), context, first))

    noisy = [SELF_NOISE] if is_reference and lane.kind == "prefill" else []
    still = [*runs, *([REPLAY_LIVE] if lane.kind == "prefill" else [])]
    indices = range(len(contexts))
    found = list(map_contexts(measure, [(f, i) for f in still for i in indices], num_threads=num_threads))
    runs[SELF_NOISE] = moved_input
    return found + list(map_contexts(measure, [(f, i) for f in noisy for i in indices], num_threads=1))


def _place(label: str, context: FloorContext, first: int, divergences: Divergences) -> Placed:
    return Placed(
        arm=label,
        context=context.name,
        cluster=context.cluster,
        stratum=context.stratum,
        first=first,
        targets=context.ids[first + 1 :],
        divergences=divergences,
    )


def _divergences(
    arm: ArmModel, left_SH: torch.Tensor, right_SH: torch.Tensor, context: FloorContext, first: int
) -> Divergences:
    rows = max(1, BLOCK_LOGITS // arm.head.vocab_size)
    pieces = [
        _against(arm.head.logits(left), arm.head.logits(right), context, first + start)
        for start, left, right in zip(
            range(0, len(left_SH), rows), left_SH.split(rows), right_SH.split(rows), strict=True
        )
    ]
    return Divergences(**{f.name: torch.cat([getattr(p, f.name) for p in pieces]) for f in fields(Divergences)})


def _against(left_SV: torch.Tensor, right_SV: torch.Tensor, context: FloorContext, first: int) -> Divergences:
    targets = torch.from_numpy(context.ids[first + 1 : first + 1 + len(left_SV)].astype(np.int64))
    return measure_divergences(left_SV, {"moved": right_SV}, targets.to(left_SV.device))["moved"]


@contextmanager
def _rounding_noise(arm: ArmModel) -> Iterator[None]:
    """While open, every element of the input embedding's output is moved by one rounding, up or down."""
    generator = torch.Generator().manual_seed(NOISE_SEED)

    def move(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.double() * (1.0 + torch.finfo(output.dtype).eps / 2 * signs)).to(output.dtype)

    hook = arm.model.get_input_embeddings().register_forward_hook(move)  # type: ignore[operator]
    try:
        yield
    finally:
        hook.remove()


def label_floor(floor: str, arm: str) -> str:
    """Name one floor of one arm, as the table of floors does."""
    return f"{floor}:{arm}"


def floor_means(floors: Mapping[str, pa.Table]) -> dict[str, dict[str, float]]:
    """Average each floor: floor -> arm -> mean KL in nats per position.

    Parameters
    ----------
    floors : mapping of str to Table
        Positions by `label_floor`.
    """
    means: dict[str, dict[str, float]] = {}
    for label, rows in floors.items():
        floor, _, arm = label.partition(":")
        means.setdefault(floor, {})[arm] = float(rows["kl"].to_numpy().mean())
    return means

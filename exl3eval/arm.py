"""One arm, start to end: loaded, checked, run through its lanes, its floors measured, in a process of its own.

What comes back is on disk (captures) or small: launch counters, floors, and a probe by which the process that scores
proves that its head is the arm's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3_kernels.routes import Launch
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.engine.capture import Capture, capture_arm
from exl3eval.engine.device import pin_arithmetic
from exl3eval.engine.head import Head, HeadSource, load_head
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import PROBE_TOKENS, EmbeddingBytes, load_arm
from exl3eval.engine.placement import Placement
from exl3eval.errors import InvalidRunError
from exl3eval.floors import FloorContext, measure_floors
from exl3eval.progress import Reporter
from exl3eval.score.positions import Placed
from exl3eval.variant import Variant

HEAD_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm to run.

    Parameters
    ----------
    name : str
        Of the arm in every table.
    checkpoint : Checkpoint
        Its model directory.
    checkpoint_sha256 : str
        Of the directory's tensors.
    declared, resolved : Variant
        As written, and as it runs on this device.
    lanes : tuple of Lane
        What it runs through.
    is_reference : bool
        Whether it is the BF16 model.
    """

    name: str
    checkpoint: Checkpoint
    checkpoint_sha256: str
    declared: Variant
    resolved: Variant
    lanes: tuple[Lane, ...]
    is_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTask:
    """An arm and everything it needs to run.

    Parameters
    ----------
    spec : ArmSpec
        Which arm.
    contexts : tuple of (str, Tensor)
        Digest of the ids, and the ids that go in.
    floor_contexts : tuple of FloorContext
        Those on which floors are measured; none for an arm without floors.
    contract : mapping
        What may change a bit of a capture, beside the lane.
    vocab_size : int
        Ids to score.
    device : str
        Where to run.
    cache_dir : Path
        Where captures live.
    num_threads : int
        CPU threads.
    trust_remote_code, fresh : bool
        As asked for.
    """

    spec: ArmSpec
    contexts: tuple[tuple[str, torch.Tensor], ...]
    floor_contexts: tuple[FloorContext, ...]
    contract: Mapping[str, Any]
    vocab_size: int
    device: str
    cache_dir: Path
    num_threads: int
    trust_remote_code: bool
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProbe:
    """Where an arm's head lies, and the FP32 logits [P, V] that it made of a few hidden states [P, H]."""

    source: HeadSource
    scale: float
    softcap: float | None
    hidden_PH: torch.Tensor
    logits_PV: torch.Tensor

    def load(self, spec: ArmSpec, *, vocab_size: int, device: torch.device) -> Head:
        """Load the head without the model, and prove that it is the one that ran.

        Raises
        ------
        CheckpointError
            If the checkpoint no longer holds it.
        InvalidRunError
            If its logits differ by more than the order of FP32 sums can.
        """
        head = load_head(
            Head(module=torch.nn.Identity(), vocab_size=vocab_size, scale=self.scale, softcap=self.softcap),
            self.source,
            Placement(checkpoint=spec.checkpoint, dispatch=spec.resolved.linear, device=device),
            getattr(torch, spec.resolved.activations),
        )
        logits_PV = head.logits(self.hidden_PH.to(device)).cpu()
        scale = float(self.logits_PV.abs().amax().clamp_min(1.0))
        if not float((logits_PV - self.logits_PV).abs().amax()) <= HEAD_TOLERANCE * scale:
            raise InvalidRunError(
                f"arm `{spec.name}`: the head that scores gives other logits than the head of the running model",
                hint="this architecture changes its head after loading; please report it",
            )
        return head


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutcome:
    """What an arm did.

    Parameters
    ----------
    captures : mapping of str to Capture
        By lane name.
    floors : mapping of str to list of Placed
        By lane name.
    embedding_bytes : EmbeddingBytes
        Stored and run.
    attention : str
        Attention implementation, as read back from the model.
    probe : HeadProbe
        Of its head.
    """

    captures: Mapping[str, Capture]
    floors: Mapping[str, list[Placed]]
    embedding_bytes: EmbeddingBytes
    attention: str
    probe: HeadProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """One arm in one lane; `launches` counts its body and its head, `engine` is what a foreign engine resolved."""

    spec: ArmSpec
    lane: Lane
    capture: Capture
    launches: dict[Launch, int]
    embedding_bytes: EmbeddingBytes
    attention: str
    engine: Mapping[str, Any] | None = None


def run_arm(task: ArmTask, reporter: Reporter) -> ArmOutcome:
    """Run one arm through its lanes.

    Raises
    ------
    CheckpointError, InvalidRunError, UsageError
        As loading and running raise them.
    """
    spec, device = task.spec, torch.device(task.device)
    torch.set_num_threads(1)
    pin_arithmetic()
    num_threads = task.num_threads if device.type == "cpu" else 1
    arm = load_arm(
        spec.checkpoint,
        spec.resolved,
        vocab_size=task.vocab_size,
        device=device,
        trust_remote_code=task.trust_remote_code,
    )
    captures, floors = {}, {}
    for lane in spec.lanes:
        contract = {**task.contract, "attention": arm.attention, "lane": lane.name, "scored": lane.scored}
        label = f"run {spec.name}" if len(spec.lanes) == 1 else f"run {spec.name}, {lane.name}"
        positions = sum(len(ids) for _, ids in task.contexts)
        with reporter.phase(label, positions, "positions") as advance:
            captures[lane.name] = capture_arm(
                arm,
                list(task.contexts),
                lane=lane,
                contract=contract,
                cache_dir=task.cache_dir,
                fresh=task.fresh,
                num_threads=num_threads,
                on_context=advance,
            )
        if task.floor_contexts:
            floors[lane.name] = measure_floors(
                arm, task.floor_contexts, lane=lane, is_reference=spec.is_reference, num_threads=num_threads
            )
    hidden_PH = arm.hidden_states(task.contexts[0][1][:PROBE_TOKENS])
    return ArmOutcome(
        captures=captures,
        floors=floors,
        embedding_bytes=arm.embedding_bytes,
        attention=arm.attention,
        probe=HeadProbe(
            source=arm.head_source,
            scale=arm.head.scale,
            softcap=arm.head.softcap,
            hidden_PH=hidden_PH.cpu(),
            logits_PV=arm.head.logits(hidden_PH).cpu(),
        ),
    )


def arm_contract(spec: ArmSpec, *, tokens: str, engine: str, device: Mapping[str, Any]) -> dict[str, Any]:
    """List what may change a bit of an arm's captures, beside its lane: the name of a capture folder is its digest."""
    return {
        "arm": spec.name,
        "checkpoint": spec.checkpoint_sha256,
        "variant": spec.resolved.identity,
        "tokens": tokens,
        "engine": engine,
        "device": dict(device),
    }


def check_engagement(record: ArmRecord) -> None:
    """Prove from counters that an arm ran what its variant declares in its lane, see `check_routes_ran`."""
    check_routes_ran(record.spec.name, record.spec.resolved, record.launches, where=f"lane {record.lane.name}")


def check_routes_ran(arm: str, variant: Variant, launches: Mapping[Launch, int], *, where: str) -> None:
    """Prove from counters that what a variant requires ran, and that nothing did that it forbids.

    Parameters
    ----------
    arm : str
        For messages.
    variant : Variant
        What is declared.
    launches : mapping of Launch to int
        As counted.
    where : str
        What was run, for messages.

    Raises
    ------
    InvalidRunError
        If a required route never launched, or a forbidden one did.
    """
    counts = Counter[str]()
    for launch, count in launches.items():
        counts[launch.route] += count
    seen = ", ".join(f"{route} x {count}" for route, count in sorted(counts.items())) or "no EXL3 launch"
    for route in variant.requires:
        if not counts[route]:
            raise InvalidRunError(
                f"arm `{arm}` declares route `{route}`, which launched 0 times in {where} ({seen})",
                hint="choose a lane whose row counts reach the route; a claim about a route that never ran is void",
            )
    for route in variant.forbids:
        if counts[route]:
            raise InvalidRunError(
                f"arm `{arm}` forbids route `{route}`, which launched {counts[route]} times in {where} ({seen})",
                hint="the dispatch sends rows there: change the variant",
            )

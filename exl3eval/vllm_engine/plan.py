"""Which processes a run needs: every arm in the modes of its lanes, and an unquantized control for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exl3eval.arm import ArmSpec
from exl3eval.engine.lanes import Lane
from exl3eval.request import PREFILL, REFERENCE
from exl3eval.vllm_engine.stack import VllmStack

CROSS_ENGINE_ARM = f"{REFERENCE}-vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArm:
    """One process.

    Parameters
    ----------
    name : str
        Of the arm in every table; `{lane}` stands for the lane's slug.
    spec : ArmSpec
        Model directory and variant.
    mode : str
        Of execution.
    lanes : tuple of Lane
        Run in this order in one engine.
    stack : VllmStack or None
        Someone else's.
    is_reference : bool
        Whether this is P_ref, whose hidden states the others are scored against.
    """

    name: str
    spec: ArmSpec
    mode: str
    lanes: tuple[Lane, ...]
    stack: VllmStack | None = None
    is_reference: bool = False


def execution_mode(*, compiled: bool, graph: bool) -> str:
    """Name the mode of a process: graphs replay compiled steps, or the eager ones."""
    if graph:
        return "graphs" if compiled else "graphs-uncompiled"
    return "compiled" if compiled else "eager"


def plan_arms(
    specs: Sequence[ArmSpec], *, stacks: Mapping[str, VllmStack], compiled: bool, own_reference: bool = True
) -> list[VllmArm]:
    """Turn the arms of a run into processes, the reference first.

    Parameters
    ----------
    specs : sequence of ArmSpec
        The reference, the reference at its other precision, then the candidates.
    stacks : mapping of str to VllmStack
        By name of the candidates that declare one.
    compiled : bool
        Whether candidates run under torch.compile.
    own_reference : bool
        Whether vLLM's reference is P_ref. If not, another engine's is, and vLLM's becomes the floor between engines:
        its rows are KL(that reference || vLLM reference).

    Returns
    -------
    list of VllmArm
        The yardstick is eager prefill. Every lane and mode in which a candidate runs has an unquantized control,
        in the candidates' activations where a reference has them.
    """
    reference, floor, *candidates = specs
    arms = [
        VllmArm(
            name=reference.name if own_reference else CROSS_ENGINE_ARM,
            spec=reference,
            mode="eager",
            lanes=(PREFILL,),
            is_reference=own_reference,
        ),
        VllmArm(name=floor.name, spec=floor, mode="eager", lanes=(PREFILL,)),
    ]
    wanted = candidates[0].resolved.activations
    control = next((spec for spec in (reference, floor) if spec.resolved.activations == wanted), reference)
    for mode, lanes in _by_mode((lane for spec in candidates for lane in spec.lanes), compiled).items():
        controls = tuple(lane for lane in lanes if mode != "eager" or lane != PREFILL)
        if controls:
            suffix = "-compiled" if compiled else ""
            arms.append(VllmArm(name=f"{REFERENCE}-{{lane}}{suffix}", spec=control, mode=mode, lanes=controls))
    for spec in candidates:
        for mode, lanes in _by_mode(spec.lanes, compiled).items():
            arms.append(VllmArm(name=spec.name, spec=spec, mode=mode, lanes=lanes, stack=stacks.get(spec.name)))
    return arms


def _by_mode(lanes: Iterable[Lane], compiled: bool) -> dict[str, tuple[Lane, ...]]:
    """Group lanes by the mode of their process. Decode graphs are captured beside plain prefill in one engine."""
    grouped: dict[str, tuple[Lane, ...]] = {}
    for lane in dict.fromkeys(lanes):
        mode = execution_mode(compiled=compiled, graph=lane.graph)
        grouped[mode] = (*grouped.get(mode, ()), lane)
    return grouped

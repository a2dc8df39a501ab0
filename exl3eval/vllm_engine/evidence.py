"""Looking for a stack's evidence inside its process: counters of its packages, and kernels that a profiler saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from exl3eval.errors import UsageError
from exl3eval.vllm_engine.drive import Engine
from exl3eval.vllm_engine.request import ChildRequest
from exl3eval.vllm_engine.stack import Evidence, Finding, find_lines


def read_counter(evidence: Evidence) -> Finding:
    """Read a stack's own counter: an int, a mapping to ints, or a function that returns either.

    Raises
    ------
    UsageError
        If there is no such name, or it holds no numbers.
    """
    module, _, path = evidence.pattern.partition(":")
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"evidence counter {evidence.pattern!r}: {error}", hint="check the dotted name") from error
    value = value() if callable(value) else value
    counts = {str(key): count for key, count in value.items()} if isinstance(value, Mapping) else {path: value}
    try:
        total = sum(int(count) for count in counts.values())
    except (TypeError, ValueError) as error:
        message = f"evidence counter {evidence.pattern!r} holds no numbers"
        raise UsageError(message, hint="name an int or a mapping to ints") from error
    first = next((f"{key}: {int(count)}" for key, count in counts.items() if int(count)), None)
    return Finding(kind=evidence.kind, pattern=evidence.pattern, minimum=evidence.minimum, count=total, first=first)


def find_kernels(
    engine: Engine, request: ChildRequest, ids_NT1: torch.Tensor, declared: Sequence[Evidence]
) -> list[Finding]:
    """Profile one batch of the last lane and look for the kernels declared; on a CPU, for operators."""
    from torch.profiler import ProfilerActivity, profile

    lane = request.lanes[-1].lane
    activities = [ProfilerActivity.CUDA if request.device_type == "cuda" else ProfilerActivity.CPU]
    batch = ids_NT1[torch.arange(lane.batch) % len(ids_NT1)]
    with profile(activities=activities) as profiler:
        for _ in engine.run_lane(batch, lane, style=request.style):
            pass
    names = [event.key for event in profiler.key_averages() for _ in range(event.count)]
    return [find_lines(evidence, names) for evidence in declared]

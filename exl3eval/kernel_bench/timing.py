"""Timing on a GPU: launches captured in graphs, contestants interleaved, medians with spread.

After every sample the GPU rests for as long as the sample took. Without it dense products of seconds in a row hold the
GPU at its power limit, and a contestant is charged for the heat of those before it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

REPETITIONS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds per launch: the median over repetitions, and the least and the most."""

    median_us: float
    least_us: float
    most_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Launches captured once and replayed together; they own what the graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    launches: Sequence[Callable[[], object]]


def capture(launches: Sequence[Callable[[], object]]) -> Contestant:
    """Capture the launches, after one of them has run outside the capture."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return Contestant(graph=graph, launches=launches)


def time_interleaved(contestants: Mapping[str, Contestant], repetitions: int = REPETITIONS) -> dict[str, Timing]:
    """Time every contestant once per repetition, in turn, after a warm-up of each."""
    for contestant in contestants.values():
        contestant.graph.replay()
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, contestant in contestants.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            contestant.graph.replay()
            stop.record()
            stop.synchronize()
            taken_ms = start.elapsed_time(stop)
            samples[name].append(taken_ms * 1e3 / len(contestant.launches))
            time.sleep(taken_ms / 1e3)
    return {
        name: Timing(median_us=statistics.median(taken), least_us=min(taken), most_us=max(taken))
        for name, taken in samples.items()
    }

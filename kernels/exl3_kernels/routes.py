"""Routes: named implementations of one EXL3 linear, chosen by row count and counted.

A *dispatch* is a string such as `1-16:decode,17-:reconstruct`: row ranges that tile 1..infinity, each
served by one route. It travels through the op as data, so a compiler cannot bake in a branch that
belongs to the row count of the call (one served stack lost 60 % of its decode speed to that).

A route's entry point is called with the op's operands and returns fp32 or `out_dtype` rows; whoever adds
a route registers it here and every harness, test and report finds it by name.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from exl3_kernels.weight import Exl3Weight


class Launch(NamedTuple):
    """What one launch was: the key of the launch counters."""

    route: str
    rows_bucket: int
    in_features: int
    out_features: int
    bits: int
    codebook: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One implementation that can serve a linear.

    Parameters
    ----------
    name : str
        The word used in variants, counters and reports.
    doc : str
        One sentence: what it computes and in which arithmetic.
    rejects : callable
        `(weight, rows, device_type) -> str`; empty when the route accepts, else the reason.
    run : callable
        `(x [M, k], weight, dense [k, n] | None, out_dtype) -> [M, n]`, bias included.
    needs_dense : bool
        Whether the module should keep the dense matrix ready (`Exl3Linear.prepare`).
    """

    name: str
    doc: str
    rejects: Callable[[Exl3Weight, int, str], str]
    run: Callable[[torch.Tensor, Exl3Weight, torch.Tensor | None, torch.dtype], torch.Tensor]
    needs_dense: bool = False


class RowRange(NamedTuple):
    """Rows `first..last` (inclusive; `last` None = no limit) served by `route`."""

    first: int
    last: int | None
    route: str


ROUTES: dict[str, Route] = {}
GRAPH_LAUNCH_KINDS = 4096


class _ThreadLaunches(threading.local):
    """Counters of one thread, so that work done in parallel is attributed to whoever asked for it."""

    def __init__(self) -> None:
        self.counts: Counter[Launch] = Counter()


class _GraphLaunches:
    """Counters of captured launches on one GPU: an increment is part of the graph and ticks at every replay."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.counts = torch.zeros(GRAPH_LAUNCH_KINDS, dtype=torch.int64, device=device)
        self.slots: dict[Launch, int] = {}

    def capture_increment(self, key: Launch) -> None:
        slot = self.slots.setdefault(key, len(self.slots))
        if slot >= GRAPH_LAUNCH_KINDS:
            raise RuntimeError(f"more than {GRAPH_LAUNCH_KINDS} kinds of launches were captured")
        self.counts[slot].add_(1)


_launches = _ThreadLaunches()
_graph_launches: dict[torch.device, _GraphLaunches] = {}


def register_route(route: Route) -> Route:
    """Add a route under its name.

    Raises
    ------
    ValueError
        If the name is taken.
    """
    if route.name in ROUTES:
        raise ValueError(f"route {route.name!r} is registered twice")
    ROUTES[route.name] = route
    return route


@lru_cache(maxsize=256)
def parse_dispatch(dispatch: str, known: tuple[str, ...] | None = None) -> tuple[RowRange, ...]:
    """Parse `first-last:route,...` and check that it tiles 1..infinity with known routes.

    Parameters
    ----------
    dispatch : str
        Row ranges in order.
    known : tuple of str or None
        Names of routes, None for those of linears.

    Raises
    ------
    ValueError
        On a malformed range, a gap, an overlap, or an unknown route.
    """
    ranges = []
    expected: int | None = 1
    for part in dispatch.split(","):
        match = re.fullmatch(r"\s*(\d+)-(\d*):([a-z0-9_-]+)\s*", part)
        if match is None:
            raise ValueError(f"dispatch {dispatch!r}: {part!r} is not `first-last:route`")
        first, last, route = int(match[1]), int(match[2]) if match[2] else None, match[3]
        if route not in (known or ROUTES):
            names = ", ".join(sorted(known or ROUTES))
            raise ValueError(f"dispatch {dispatch!r}: unknown route {route!r}; known: {names}")
        if first != expected or (last is not None and last < first):
            raise ValueError(f"dispatch {dispatch!r}: rows must tile 1..infinity; at {part.strip()!r}")
        ranges.append(RowRange(first, last, route))
        expected = None if last is None else last + 1
    if expected is not None:
        raise ValueError(f"dispatch {dispatch!r}: rows from {expected} on are not served")
    return tuple(ranges)


def select_route(dispatch: str, rows: int) -> Route:
    """Return the route that serves `rows` (zero rows count as one)."""
    for row_range in parse_dispatch(dispatch):
        if row_range.last is None or rows <= row_range.last:
            return ROUTES[row_range.route]
    raise AssertionError("parse_dispatch guarantees an open last range")


def bucket_rows(rows: int) -> int:
    """Bucket a row count: exact up to 16, the next power of two above."""
    return rows if rows <= 16 else 1 << (rows - 1).bit_length()


def count_launch(route: str, rows: int, weight: Exl3Weight) -> None:
    """Count one launch of `route` on `rows` rows, for the calling thread.

    Inside a CUDA graph capture nothing runs yet: the increment is captured with the launch, on the device, and counts
    replays. `rows` is then the row count that was captured, padding included.

    Raises
    ------
    RuntimeError
        If the first launch on a GPU lies inside a capture: the counters need memory that outlives the graph.
    """
    key = Launch(route, bucket_rows(rows), weight.in_features, weight.out_features, weight.bits, weight.codebook)
    device = weight.trellis.device
    if device.type == "cuda":
        captured = torch.cuda.is_current_stream_capturing()
        if device not in _graph_launches:
            if captured:
                raise RuntimeError("the first EXL3 launch on a GPU is inside a graph capture: run once before")
            _graph_launches[device] = _GraphLaunches(device)
        if captured:
            _graph_launches[device].capture_increment(key)
            return
    _launches.counts[key] += 1


def read_launches() -> dict[Launch, int]:
    """Return a copy of the calling thread's launch counters, with every replayed launch; waits for the GPU."""
    total = Counter(_launches.counts)
    for captured in _graph_launches.values():
        if captured.slots:
            counts = captured.counts.tolist()
            total.update({key: counts[slot] for key, slot in captured.slots.items() if counts[slot]})
    return dict(total)


def reset_launches() -> None:
    """Set the calling thread's launch counters and those of replayed launches to zero."""
    _launches.counts.clear()
    for captured in _graph_launches.values():
        captured.counts.zero_()

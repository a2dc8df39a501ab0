"""Which route serves how many rows: measured crossovers, one table per GPU, read as data.

A table is a TOML file that `exl3eval kernels tune` writes. It is looked up when a model is loaded and never during a
run. Where no CUDA kernel can be built, the routes in Triton serve every row count instead. What travels into the op is
the dispatch string of `exl3_kernels.routes`, so the choice is part of a run's identity and no timing happens while
scoring.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

import torch

from exl3_kernels.cuda import unavailable

SCHEMA = "exl3_kernels/dispatch/1"
UNMEASURED = "1-16:decode-gemm,17-128:shared-decode,129-:prefill-reconstruct"
PORTABLE = "1-32:triton-decode,33-:triton-reconstruct"
WORTH_SWITCHING = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape:
    """The dispatch that was fastest for one shape of weight."""

    in_features: int
    out_features: int
    bits: int
    dispatch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchTable:
    """The measured dispatches of one GPU.

    Parameters
    ----------
    gpu : str
        As `torch.cuda.get_device_name` spells it.
    shapes : tuple of MeasuredShape
        At least one.
    sha256 : str
        Of the file's bytes: the table's identity.
    """

    gpu: str
    shapes: tuple[MeasuredShape, ...]
    sha256: str

    def dispatch_for(self, in_features: int, out_features: int, bits: int) -> str:
        """Return the dispatch of the measured shape nearest in weights (by ratio), then in bits, then in k."""

        def distance(shape: MeasuredShape) -> tuple[float, int, float]:
            weights = shape.in_features * shape.out_features / (in_features * out_features)
            inputs = shape.in_features / in_features
            return abs(math.log2(weights)), abs(shape.bits - bits), abs(math.log2(inputs))

        return min(self.shapes, key=distance).dispatch


def parse_table(content: bytes, *, where: str) -> DispatchTable:
    """Read a table.

    Raises
    ------
    ValueError
        If the content is not a table of this schema; `where` is named.
    """
    try:
        raw = tomllib.loads(content.decode())
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema {raw['schema']!r}, expected {SCHEMA!r}")
        shapes = tuple(MeasuredShape(**shape) for shape in raw["shape"])
        if not shapes:
            raise ValueError("no shapes")
        return DispatchTable(gpu=raw["gpu"], shapes=shapes, sha256=hashlib.sha256(content).hexdigest())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a dispatch table: {error}") from error


def shipped_table(gpu: str) -> DispatchTable | None:
    """Return the table that this package carries for a GPU, None if it was never measured."""
    for file in sorted(resources.files("exl3_kernels").joinpath("tables").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            table = parse_table(file.read_bytes(), where=file.name)
            if table.gpu == gpu:
                return table
    return None


def dispatch_for(gpu: str, in_features: int, out_features: int, bits: int, table: DispatchTable | None = None) -> str:
    """Return the dispatch of a weight on a GPU: by the given table, else the shipped one, else `UNMEASURED`."""
    table = table or shipped_table(gpu)
    return UNMEASURED if table is None else table.dispatch_for(in_features, out_features, bits)


def dispatch_on(device: torch.device, in_features: int, out_features: int, bits: int) -> str:
    """Return the dispatch of a weight on a GPU: `dispatch_for`, or `PORTABLE` where no CUDA kernel can be built."""
    if unavailable(device):
        return PORTABLE
    return dispatch_for(torch.cuda.get_device_name(device), in_features, out_features, bits)


def measured_on(device: torch.device) -> str:
    """Name what `dispatch_on` goes by, for a run's identity: a table's digest, `unmeasured-gpu` or `portable`.

    Empty on a CPU, where nothing is measured.
    """
    if device.type != "cuda":
        return ""
    if unavailable(device):
        return "portable"
    table = shipped_table(torch.cuda.get_device_name(device))
    return table.sha256[:16] if table else "unmeasured-gpu"


def choose_dispatch(times: Mapping[int, Mapping[str, float]]) -> str:
    """Turn measured times into a dispatch.

    Parameters
    ----------
    times : mapping
        Rows to (route to time); routes that cannot serve a row count are absent there. Between two measured row
        counts the lower one decides. Of routes within 2 % at the least row count the one listed first is taken.

    Returns
    -------
    str
        The fastest route at each measured row count, keeping the route of the row count below where switching would
        save less than 2 %.

    Raises
    ------
    ValueError
        If nothing was measured.
    """
    if not times:
        raise ValueError("no times to choose a dispatch from")
    rows = sorted(times)
    chosen: list[tuple[int, str]] = []
    for count in rows:
        least = min(times[count].values())
        near = [route for route, time in times[count].items() if time * (1 - WORTH_SWITCHING) <= least]
        held = chosen[-1][1] if chosen else ""
        chosen.append((count, held if held in near else near[0]))
    switches = [(1, chosen[0][1])]
    for (below, held), (_, route) in pairwise(chosen):
        if route != held:
            switches.append((below + 1, route))
    lasts = [str(first - 1) for first, _ in switches[1:]] + [""]
    return ",".join(f"{first}-{last}:{route}" for (first, route), last in zip(switches, lasts, strict=True))


def render_table(gpu: str, shapes: tuple[MeasuredShape, ...]) -> str:
    """Render a table as the TOML that `parse_table` reads."""
    lines = [f'schema = "{SCHEMA}"', f'gpu = "{gpu}"']
    for shape in shapes:
        lines += [
            "",
            "[[shape]]",
            f"in_features = {shape.in_features}",
            f"out_features = {shape.out_features}",
            f"bits = {shape.bits}",
            f'dispatch = "{shape.dispatch}"',
        ]
    return "\n".join(lines) + "\n"

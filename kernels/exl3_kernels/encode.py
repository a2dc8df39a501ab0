"""The tile encoder: the closed trellis walk nearest to 256 given values.

Trellis with K new bits per step: E = 2^(16-K) nodes and R = 2^K branches. State s = c E + e arrives at node e by
branch c from node s >> K and costs (value(s) - x)^2. A closed walk is found in two Viterbi passes: the first starts
at position 128 with every node free and goes once round, which settles the node that positions 255 and 0 share; the
second starts at position 0 from that node and must return to it.

Only path costs are stored, not branches: a minimum without its index is several times faster, and the trace back
needs the branch of one node per step, which it finds again from the costs. Costs are float32: a subtraction, then one
fused multiply-add.

Two encoders find the same states: `torch` runs anywhere, `cuda` is a kernel for NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3_kernels.codebook import STATES, codebook_values
from exl3_kernels.cuda import unavailable
from exl3_kernels.encode_cuda import encode_on_gpu
from exl3_kernels.trellis import POSITIONS, STATE_BITS

CPU_BATCH = 8  # eight candidate rows are 2 MiB: near enough to the cores, few enough calls
CUDA_BATCH = 1024
CUDA_MEMORY_SHARE = 0.3
MAX_MAGNITUDE = 1e6
ENCODERS = ("auto", "cuda", "torch")


def encode_tiles(
    tiles: torch.Tensor,
    bits: int,
    codebook: str,
    multiplier: int | None = None,
    *,
    batch: int | None = None,
    encoder: str = "auto",
) -> torch.Tensor:
    """Return the closed walks whose values are nearest to the tiles.

    Parameters
    ----------
    tiles : Tensor
        Floating point [T, 256] in stream order, in the scale of the codebook; encoded in float32.
    bits : int
        K, 1 to 8.
    codebook : str
        `3inst`, `mcg` or `mul1`.
    multiplier : int or None
        The codebook's 32-bit multiplier; None takes the usual one.
    batch : int or None
        Tiles in flight; None chooses by device and free memory. It does not change the result.
    encoder : str
        `auto`, `cuda` or `torch`, see `choose_encoder`. It does not change the result.

    Returns
    -------
    Tensor
        int32 [T, 256] states. Deterministic; of equal costs the smallest branch wins.

    Raises
    ------
    ValueError
        If a value is not finite or exceeds 1e6 in magnitude, a shape or option is wrong.
    RuntimeError
        If the `cuda` encoder is asked for and cannot run, or its build fails.
    """
    if tiles.dim() != 2 or tiles.shape[1] != POSITIONS or not tiles.is_floating_point():
        raise ValueError(f"tiles are {tiles.dtype} {tuple(tiles.shape)}, expected floating point [T, {POSITIONS}]")
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits per weight, expected 1 to 8")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}, expected at least 1")
    encoder = choose_encoder(tiles.device, encoder)
    table = codebook_values(codebook, multiplier, device=tiles.device)
    states = torch.empty(tiles.shape, dtype=torch.int32, device=tiles.device)
    if not len(tiles):
        return states
    targets = tiles.float()
    if not bool(targets.abs().amax() <= MAX_MAGNITUDE):
        raise ValueError(f"tiles hold a value that is not finite or exceeds {MAX_MAGNITUDE:g} in magnitude")
    if encoder == "cuda":
        return encode_on_gpu(targets, table, bits, batch=batch)
    values = table.float()
    nodes = STATES >> bits
    batch = min(batch or _batch(nodes, tiles.device), len(tiles))
    candidates = torch.empty(batch, STATES, device=tiles.device)
    costs = torch.empty(POSITIONS + 1, batch, nodes, device=tiles.device)
    for start in range(0, len(tiles), batch):
        part = targets[start : start + batch]
        size = len(part)
        states[start : start + size] = _closed_walks(part, bits, values, candidates[:size], costs[:, :size])
    return states


def choose_encoder(device: torch.device, encoder: str = "auto") -> str:
    """Return the encoder that serves a device: `cuda` or `torch`.

    Parameters
    ----------
    device : device
        Where the tiles are.
    encoder : str
        `auto` takes the kernel where it can run; `cuda` and `torch` insist.

    Raises
    ------
    ValueError
        If the encoder is unknown.
    RuntimeError
        If `cuda` is asked for and cannot run there.
    """
    if encoder not in ENCODERS:
        raise ValueError(f"encoder {encoder!r} is not one of {', '.join(ENCODERS)}")
    if encoder == "torch":
        return encoder
    reason = unavailable(device) if device.type == "cuda" else f"needs a CUDA device, the tiles are on {device.type}"
    if reason and encoder == "cuda":
        raise RuntimeError(f"the cuda encoder cannot run: {reason}")
    return "torch" if reason else "cuda"


def _closed_walks(
    tiles: torch.Tensor, bits: int, values: torch.Tensor, candidates: torch.Tensor, costs: torch.Tensor
) -> torch.Tensor:
    """Encode one batch [B, 256] through scratch `candidates` [B, 65536] and `costs` [257, B, E]."""
    targets = tiles.T.contiguous()
    history = costs.unbind()
    half = POSITIONS // 2

    rolled = targets.roll(-half, 0)
    history[0].zero_()
    _forward(rolled, bits, values, candidates, history)
    end = history[-1].argmin(dim=1)
    first = _trace_back(rolled[half:], bits, values, history[half:], end)[0]
    shared = first >> bits

    history[0].fill_(torch.inf).scatter_(1, shared[:, None], 0.0)
    _forward(targets, bits, values, candidates, history)
    return _trace_back(targets, bits, values, history, shared).T


def _forward(
    targets: torch.Tensor,
    bits: int,
    values: torch.Tensor,
    candidates: torch.Tensor,
    history: Sequence[torch.Tensor],
) -> None:
    """Fill `history[1:]` with the least cost [B, E] of reaching each node; `history[0]` holds the start."""
    by_source = candidates.view(len(candidates), -1, 1 << bits)
    by_branch = candidates.view(len(candidates), 1 << bits, -1)
    for step, target in enumerate(targets.unsqueeze(-1).unbind()):
        torch.sub(values, target, out=candidates)
        torch.addcmul(history[step].unsqueeze(-1), by_source, by_source, out=by_source)
        torch.amin(by_branch, dim=1, out=history[step + 1])


def _trace_back(
    targets: torch.Tensor, bits: int, values: torch.Tensor, history: Sequence[torch.Tensor], end: torch.Tensor
) -> torch.Tensor:
    """Return the states int64 [steps, B] of the cheapest walks that end in nodes `end` [B]."""
    branches = torch.arange(1 << bits, device=values.device) << (STATE_BITS - bits)
    states = torch.empty(targets.shape, dtype=torch.int64, device=values.device)
    node = end
    for step in range(len(targets) - 1, -1, -1):
        arrivals = node.unsqueeze(-1) + branches
        errors = values[arrivals].sub_(targets[step].unsqueeze(-1))
        candidates = torch.addcmul(history[step].gather(1, arrivals >> bits), errors, errors)
        torch.add(node, candidates.argmin(dim=1), alpha=STATES >> bits, out=states[step])
        node = states[step] >> bits
    return states


def _batch(nodes: int, device: torch.device) -> int:
    """Return how many tiles fit in flight: one candidate row and 257 cost rows of float32 each."""
    if device.type != "cuda":
        return CPU_BATCH
    bytes_per_tile = 4 * (STATES + (POSITIONS + 1) * nodes)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(CUDA_BATCH, int(free * CUDA_MEMORY_SHARE) // bytes_per_tile))

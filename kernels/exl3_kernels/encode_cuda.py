"""The tile encoder on an NVIDIA GPU: the walks of `encode.encode_tiles`, state by state, from one kernel per pass."""

from __future__ import annotations

import torch

from exl3_kernels.cuda import load_library
from exl3_kernels.trellis import POSITIONS, STATE_BITS

MEMORY_SHARE = 0.3
WAVES = 8  # tiles in flight per multiprocessor: the walks back, which run side by side, are then a small part


def encode_on_gpu(targets: torch.Tensor, values: torch.Tensor, bits: int, *, batch: int | None = None) -> torch.Tensor:
    """Return the closed walks nearest to the tiles.

    Parameters
    ----------
    targets : Tensor
        float32 [T, 256] on a GPU, in stream order; finite, at most 1e6 in magnitude.
    values : Tensor
        float16 [65536] on the same GPU, the value of every state.
    bits : int
        K, 1 to 8.
    batch : int or None
        Tiles in flight; None chooses by the GPU's size and free memory. It does not change the result.

    Returns
    -------
    Tensor
        int32 [T, 256] states, equal to those of the torch encoder.

    Raises
    ------
    RuntimeError
        If the kernels cannot be built or CUDA reports an error.
    """
    library, device, count = load_library(targets.device), targets.device, len(targets)
    targets, values = targets.contiguous(), values.contiguous()
    states = torch.empty(count, POSITIONS, dtype=torch.int32, device=device)
    nodes = (1 << STATE_BITS) >> bits
    batch = min(batch or tiles_in_flight(nodes, device), count)
    history = torch.empty(batch, POSITIONS + 1, nodes, device=device)
    shared = torch.empty(batch, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        for start in range(0, count, batch):
            part = targets[start : start + batch]
            library.call(
                "exl3_encode", part.data_ptr(), values.data_ptr(), history.data_ptr(), shared.data_ptr(),
                states[start : start + batch].data_ptr(), len(part), bits, stream,
            )  # fmt: skip
    return states


def tiles_in_flight(nodes: int, device: torch.device) -> int:
    """Return how many tiles to encode at a time: whole waves, within a share of the free memory.

    A tile in flight holds 257 rows of `nodes` float32 costs.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fits = int((torch.cuda.mem_get_info(device)[0] + unused) * MEMORY_SHARE) // (4 * (POSITIONS + 1) * nodes)
    wave = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(WAVES, fits // wave) * wave if fits >= wave else fits)

"""The memory into which prefill reconstructs slices of a weight: one buffer per GPU and stream, kept between calls."""

from __future__ import annotations

import threading

import torch

from exl3_kernels.weight import BLOCK

WORKSPACE_BYTES = 256 << 20

_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}
# Held from the rotation to the last slice: two threads on one stream would overwrite each other's weights between a
# reconstruction and its product; and one that starts beside the launch before it must not find a product there.
LOCK = threading.RLock()


def slice_width(k: int, n: int, item_bytes: int) -> int:
    """Return the columns of a slice: multiples of 128, slices of about equal width that fit the workspace."""
    blocks = n // BLOCK
    most = max(1, WORKSPACE_BYTES // (k * BLOCK * item_bytes))
    slices = -(-blocks // most)
    return -(-blocks // slices) * BLOCK


def workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Return at least `num_bytes` of this stream's buffer, allocated once; inside a capture the graph owns its own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _workspaces or _workspaces[key].numel() < num_bytes:
        _workspaces[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return _workspaces[key]


def workspace_bytes() -> int:
    """Return the memory that the workspaces of this process hold."""
    return sum(buffer.numel() for buffer in _workspaces.values())


def release_workspaces() -> None:
    """Give the workspaces back to the caching allocator; the next prefill allocates again."""
    _workspaces.clear()

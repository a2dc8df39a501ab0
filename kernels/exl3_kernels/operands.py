"""What the kernels ask of their operands, and of the calls that come before a graph capture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from exl3_kernels.cuda import unavailable
from exl3_kernels.weight import BLOCK, MULTIPLIERS, Exl3Weight

ALIGNMENT = 16
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

_launched: set[tuple[object, ...]] = set()


def rejects(weight: Exl3Weight, device_type: str) -> str:
    """Return why the CUDA kernels cannot serve this weight, empty if they can."""
    if device_type != "cuda":
        return f"needs a CUDA device, the weight is on {device_type}"
    if reason := rejects_operands(weight):
        return reason
    return unavailable(weight.trellis.device) if weight.trellis.is_cuda else ""


def rejects_operands(weight: Exl3Weight) -> str:
    """Return what in a weight no kernel serves, whatever the device; empty if nothing."""
    if weight.multiplier != MULTIPLIERS[weight.codebook]:
        return f"{weight.codebook} multiplier 0x{weight.multiplier:08X} is not the usual one, which the kernels assume"
    if weight.in_features % BLOCK or weight.out_features % BLOCK:
        return f"{weight.in_features} x {weight.out_features} is not a multiple of {BLOCK} on both sides"
    if weight.bias is not None and weight.bias.dtype not in DTYPES:
        return f"the bias is {weight.bias.dtype}, expected float16, bfloat16 or float32"
    for name in ("trellis", "suh", "svh", "bias"):
        operand: torch.Tensor | None = getattr(weight, name)
        if operand is not None and not (operand.is_contiguous() and operand.data_ptr() % ALIGNMENT == 0):
            return f"{name} is not contiguous and aligned to {ALIGNMENT} bytes"
    return ""


def prepare_rows(
    x_Mk: torch.Tensor,
    weight: Exl3Weight,
    out_dtype: torch.dtype,
    rejects_weight: Callable[[Exl3Weight, str], str] = rejects,
) -> torch.Tensor:
    """Return the rows, copied if their stride or address does not suit the kernels' wide loads.

    Raises
    ------
    ValueError
        If the weight, the rows or the output type is not what the kernels serve.
    """
    if reason := rejects_weight(weight, weight.trellis.device.type):
        raise ValueError(f"the kernels cannot serve this weight: {reason}")
    if (
        x_Mk.dim() != 2
        or x_Mk.shape[0] == 0
        or x_Mk.shape[1] != weight.in_features
        or x_Mk.dtype not in DTYPES
        or x_Mk.device != weight.trellis.device
    ):
        raise ValueError(
            f"x is {x_Mk.dtype} {tuple(x_Mk.shape)} on {x_Mk.device}, expected float16, bfloat16 or float32"
            f" [M >= 1, {weight.in_features}] on {weight.trellis.device}"
        )
    if out_dtype not in DTYPES:
        raise ValueError(f"output is {out_dtype}, expected float16, bfloat16 or float32")
    suits = x_Mk.stride(1) == 1 and x_Mk.stride(0) % 8 == 0 and x_Mk.data_ptr() % ALIGNMENT == 0
    return x_Mk if suits else x_Mk.clone(memory_format=torch.contiguous_format)


def require_primed(what: str, *key: object) -> None:
    """Remember a kind of launch; refuse the first of its kind inside a graph capture, where nothing may be set up.

    Raises
    ------
    RuntimeError
        If a capture is in progress and no such launch came before it.
    """
    if (what, *key) in _launched:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first {what} launch is inside a graph capture: run the linear once before capturing")
    _launched.add((what, *key))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; a CPU needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def bias_operand(bias: torch.Tensor | None) -> tuple[int | None, int]:
    """Return the address and the type number that the kernels take for a bias; no bias is a null address."""
    return (None, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])

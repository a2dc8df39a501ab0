"""Which device arms run on."""

from __future__ import annotations

import torch

from exl3eval.errors import UsageError


def resolve_device(name: str) -> torch.device:
    """Turn a device name into a device that exists.

    Raises
    ------
    UsageError
        If it does not.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}", hint="use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name!r} does not exist ({torch.cuda.device_count()} CUDA devices)", hint="see `exl3eval doctor`"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported", hint="use auto, cpu, cuda or cuda:N")
    return device


def pin_arithmetic() -> None:
    """Switch off every shortcut that rounds more than the dtypes say: TF32 and 16-bit partial sums."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

"""Which routes serve a weight on its device."""

from __future__ import annotations

from exl3_kernels.dispatch import dispatch_on
from exl3_kernels.weight import Exl3Weight
from exl3_vllm.settings import AUTO, MEASURED, ServedVariant

CPU_DEFAULT = "1-:reference"


def resolve_dispatch(variant: ServedVariant, weight: Exl3Weight) -> str:
    """Return the dispatch of one weight: what the variant says, or this device's default.

    Raises
    ------
    ValueError
        If `measured` is asked for on a device that has no table.
    """
    device = weight.trellis.device
    linear = variant.linear
    if linear == AUTO:
        linear = MEASURED if device.type == "cuda" else CPU_DEFAULT
    if linear != MEASURED:
        return linear
    if device.type != "cuda":
        raise ValueError(f"`linear` is {MEASURED!r}, which needs a GPU: the weight is on {device.type}")
    return dispatch_on(device, weight.in_features, weight.out_features, weight.bits)

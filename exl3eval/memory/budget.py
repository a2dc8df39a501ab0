"""A hard cap on the allocator, and whose limit it was when memory ran out.

The cap is the engine's own: torch refuses to reserve more, however much the card has free. What lies outside the
allocator (the CUDA context, loaded kernels, other processes) does not count against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from exl3eval.errors import UsageError

OWN_CAP, CARD = "engine budget", "physical memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """An enforced cap.

    Parameters
    ----------
    bytes : int
        What the allocator may reserve.
    device_bytes, free_bytes : int
        The device's memory, and what the driver had free of it when the cap was set.
    """

    bytes: int
    device_bytes: int
    free_bytes: int

    @property
    def binds_first(self) -> bool:
        """Whether the cap is reached before the card is full."""
        return self.bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether the arm fitted; if not, in which phase memory ran out and whose limit it was."""

    fits: bool
    phase: str | None
    limit: str | None
    message: str


@contextmanager
def enforce_budget(budget: int | None, device: torch.device) -> Iterator[Budget | None]:
    """Cap the allocator while the block runs; None caps nothing.

    Raises
    ------
    UsageError
        If the device is no GPU, or has less memory than the budget.
    """
    if budget is None:
        yield None
        return
    if device.type != "cuda":
        raise UsageError(
            "a budget needs a GPU: torch cannot cap CPU memory", hint="leave --budget out, or --device cuda"
        )
    free, total = torch.cuda.mem_get_info(device)
    if budget > total:
        raise UsageError(
            f"the budget of {budget / (1 << 30):.2f} GiB exceeds the {total / (1 << 30):.2f} GiB of {device}",
            hint="give a smaller --budget, or none",
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.empty_cache()
    torch.cuda.memory.set_per_process_memory_fraction(budget / total, index)
    try:
        yield Budget(bytes=budget, device_bytes=total, free_bytes=free)
    finally:
        torch.cuda.memory.set_per_process_memory_fraction(1.0, index)


def judge_failure(phase: str, failure: Exception | None, budget: Budget | None) -> Outcome:
    """Say whether an arm fitted.

    Parameters
    ----------
    phase : str
        The last phase that ran.
    failure : Exception or None
        The allocator's refusal, if it refused.
    budget : Budget or None
        The cap in force.
    """
    if failure is None:
        under = "no budget was set" if budget is None else f"under an allocator cap of {_gib(budget.bytes)}"
        return Outcome(fits=True, phase=None, limit=None, message=f"every phase fitted; {under}")
    if budget is not None and budget.binds_first:
        limit = OWN_CAP
        cause = f"our own cap of {_gib(budget.bytes)} was reached; the card had {_gib(budget.free_bytes)} free"
    elif budget is not None:
        limit = CARD
        cause = f"the card had {_gib(budget.free_bytes)} free, less than the budget of {_gib(budget.bytes)}"
    else:
        limit, cause = CARD, "the card was full; no budget was set"
    return Outcome(fits=False, phase=phase, limit=limit, message=f"out of memory in phase {phase}: {cause}")


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"

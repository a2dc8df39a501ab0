"""Launch counters that tick on the device.

Python counts what Python runs: a graph that is captured once and replayed a thousand times is counted once. The tally
adds one on the device inside the op, so the addition is captured with the launch and replayed with it.
"""

from __future__ import annotations

import torch

from exl3_kernels.routes import Launch

CAPACITY = 1 << 14


class Tally:
    """Counts of launches by route, rows (as captured, padding included) and shape; does nothing until started."""

    def __init__(self) -> None:
        self._slots: dict[Launch, int] = {}
        self._counts: torch.Tensor | None = None

    @property
    def started(self) -> bool:
        """Whether launches are being counted."""
        return self._counts is not None

    def start(self, device: torch.device) -> None:
        """Begin to count on a device; counting already there goes on."""
        if self._counts is None or self._counts.device != device:
            self._slots.clear()
            with torch.inference_mode(False):
                self._counts = torch.zeros(CAPACITY, dtype=torch.int64, device=device)

    def add(self, launch: Launch) -> None:
        """Count one launch, in stream order.

        Raises
        ------
        RuntimeError
            If there are more kinds of launch than counters.
        """
        if self._counts is None:
            return
        slot = self._slots.setdefault(launch, len(self._slots))
        if slot >= CAPACITY:
            raise RuntimeError(f"more than {CAPACITY} kinds of launch: the tally cannot count them apart")
        self._counts[slot].add_(1)

    def read(self) -> dict[Launch, int]:
        """Return the counts that are not zero; waits for the device."""
        if self._counts is None:
            return {}
        counts = self._counts[: len(self._slots)].tolist()
        return {launch: counts[slot] for launch, slot in self._slots.items() if counts[slot]}

    def reset(self) -> None:
        """Set every count to zero, keeping the addresses that graphs captured."""
        if self._counts is not None:
            self._counts.zero_()


TALLY = Tally()

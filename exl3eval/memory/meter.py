"""Reading memory: torch's allocator and the driver on a GPU, resident pages on a CPU.

A reading counts only what is left after the garbage is collected and the allocator's cache is emptied. Read before
that, the table that an int8 embedding replaces is still counted, and the saving appears to be nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

_STATUS, _CLEAR, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"
NO_CPU_ALLOCATOR = "torch keeps no statistics of CPU tensors; see the resident tensors and the resident pages"
NO_DRIVER_PEAK = "the driver keeps no peak; its figure at the end of a phase still holds what the allocator cached"
NO_PAGES = "this operating system does not tell a process its resident pages"
NO_PAGE_PEAK = "this operating system does not let a process reset the peak of its resident pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Memory at one moment, in bytes; None where it cannot be known (the meter's `unknown` says why).

    Parameters
    ----------
    held, reserved : int or None
        What the allocator has handed out, and what it holds of the device.
    peak_held, peak_reserved : int or None
        The largest of each since the meter last settled.
    process : int or None
        GPU: what the driver counts as used on the whole device, other processes included. CPU: this process's resident
        pages.
    process_peak : int or None
        The largest of these since the meter last settled.
    """

    held: int | None
    reserved: int | None
    peak_held: int | None
    peak_reserved: int | None
    process: int | None
    process_peak: int | None


class Meter(Protocol):
    """A source of readings."""

    @property
    def unknown(self) -> Mapping[str, str]:
        """Fields of a reading that stay None here, each with its reason."""

    def settle(self) -> None:
        """Finish pending work, collect garbage, give cached memory back, start new peaks."""

    def read(self) -> Reading:
        """Read, garbage included."""


class CudaMeter:
    """The caching allocator's statistics and the driver's count of one GPU."""

    unknown: Mapping[str, str] = {"process_peak": NO_DRIVER_PEAK}

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()

    def settle(self) -> None:
        """Finish pending work, collect garbage, give cached memory back, start new peaks."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> Reading:
        """Read the allocator and the driver."""
        torch.cuda.synchronize(self._device)
        statistics = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return Reading(
            held=statistics.get("allocated_bytes.all.current", 0),
            reserved=statistics.get("reserved_bytes.all.current", 0),
            peak_held=statistics.get("allocated_bytes.all.peak", 0),
            peak_reserved=statistics.get("reserved_bytes.all.peak", 0),
            process=total - free,
            process_peak=None,
        )


class CpuMeter:
    """Resident pages of this process, where the operating system tells them."""

    def __init__(self) -> None:
        unknown = dict.fromkeys(("held", "reserved", "peak_held", "peak_reserved"), NO_CPU_ALLOCATOR)
        if _pages("VmRSS") is None:
            unknown |= {"process": NO_PAGES, "process_peak": NO_PAGES}
        elif not _reset_page_peak():
            unknown["process_peak"] = NO_PAGE_PEAK
        self.unknown: Mapping[str, str] = unknown

    def settle(self) -> None:
        """Collect garbage and start a new peak."""
        gc.collect()
        _reset_page_peak()

    def read(self) -> Reading:
        """Read the resident pages."""
        return Reading(
            held=None,
            reserved=None,
            peak_held=None,
            peak_reserved=None,
            process=_pages("VmRSS"),
            process_peak=None if "process_peak" in self.unknown else _pages("VmHWM"),
        )


def _pages(field: str) -> int | None:
    """Return a size that Linux tells in KiB, in bytes."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def _reset_page_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True

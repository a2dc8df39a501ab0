"""Progress of long work on stderr: throughput and time left on a terminal, one line per phase elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class Reporter(Protocol):
    """Told about phases of long work."""

    def phase(self, label: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Open a phase of `total` units; the value takes the units finished."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "")


class TerminalReporter:
    """Progress bars on a terminal; silent when `quiet`; a line per phase when stderr is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)

    @contextmanager
    def phase(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Open a phase."""
        if not self._console.is_terminal:
            self._console.print(f"{label}: {total:,} {unit}", highlight=False)
            yield lambda count: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(label, total=total, unit=unit)
            yield lambda count: progress.advance(task, count)

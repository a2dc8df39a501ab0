"""Work for `exl3eval.isolation`: functions that another process can import by name."""

import os

from exl3eval.errors import InvalidRunError

CACHE: dict[str, int] = {}


def remember(task: int, reporter) -> tuple[int, int, int]:
    """Leave something behind; return the size of what was there before and after, and the process."""
    before = len(CACHE)
    CACHE[str(task)] = task
    with reporter.phase("count", task, "steps") as advance:
        for _ in range(task):
            advance(1)
    return before, len(CACHE), os.getpid()


def refuse(task: str, reporter) -> None:
    """Refuse as a broken arm does."""
    raise InvalidRunError(task, hint="do this")


def divide(task: int, reporter) -> float:
    """Fail on 0 in a way that nobody foresaw."""
    return 1 / task


def die(task: int, reporter) -> None:
    """End by a signal."""
    os.kill(os.getpid(), task)

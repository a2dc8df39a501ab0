"""Work in a process of its own: nothing is inherited, every ending is told apart."""

import os
import signal
from contextlib import contextmanager

import pytest
from isolated_work import CACHE, die, divide, refuse, remember

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.isolation import run_isolated


class Listener:
    """Writes down the phases that it is told of."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @contextmanager
    def phase(self, label, total, unit):
        self.seen.append((label, total, unit))
        yield self.seen.append
        self.seen.append("closed")


def test_a_process_meets_nothing_of_another() -> None:
    listener = Listener()
    first, second = (run_isolated(remember, 3, listener, label="x") for _ in range(2))
    assert first[:2] == second[:2] == (0, 1)
    assert len({first[2], second[2], os.getpid()}) == 3
    assert listener.seen == [("count", 3, "steps"), 1, 1, 1, "closed"] * 2
    assert not CACHE


def test_a_refusal_keeps_its_kind_and_its_hint() -> None:
    with pytest.raises(InvalidRunError, match="no number") as caught:
        run_isolated(refuse, "no number", Listener(), label="x")
    assert (caught.value.hint, caught.value.exit_code) == ("do this", 4)


def test_another_failure_brings_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"the process of arm `a` failed:[\s\S]*ZeroDivisionError"):
        run_isolated(divide, 0, Listener(), label="arm `a`")


def test_a_killed_process_is_said_to_be_killed() -> None:
    with pytest.raises(UsageError, match=r"the process of arm `a` ended without a result \(killed by SIGKILL\)"):
        run_isolated(die, signal.SIGKILL, Listener(), label="arm `a`")

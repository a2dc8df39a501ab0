"""Work in a process of its own: no arm can meet caches, workspaces or settings that another arm left behind.

The process is forked from a clean server that has imported libraries and never loaded a model, where the platform
can; elsewhere it is started anew. Progress and errors come back through a pipe.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from exl3eval.errors import Exl3EvalError, UsageError
from exl3eval.progress import Reporter

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOAD = ["exl3eval.arm", "accelerate", "transformers.models.llama.modeling_llama"]

Task = TypeVar("Task")
Result = TypeVar("Result")


class _PipeReporter:
    """Sends progress to the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextmanager
    def phase(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        _send(self._pipe, "open", (label, total, unit))
        yield lambda count: _send(self._pipe, "advance", count)
        _send(self._pipe, "close", None)


def start_server() -> None:
    """Begin to import libraries in the clean server, while the caller does other things; once is enough."""
    if METHOD == "forkserver":
        multiprocessing.get_context(METHOD).set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def run_isolated(work: Callable[[Task, Reporter], Result], task: Task, reporter: Reporter, *, label: str) -> Result:
    """Run `work(task, reporter)` in a fresh process and return its result.

    Parameters
    ----------
    work : callable
        A function at the top level of a module.
    task : object
        Picklable, as must be the result.
    reporter : Reporter
        Told about the phases that the process opens.
    label : str
        What it is, for messages.

    Raises
    ------
    Exl3EvalError
        As raised in the process.
    UsageError
        If the process was killed.
    RuntimeError
        With the traceback of any other failure there.
    """
    start_server()
    context: Any = multiprocessing.get_context(METHOD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, pickle.dumps((work, task))), daemon=True)
    process.start()
    theirs.close()
    finished = False
    try:
        kind, value = _follow(ours, reporter)
        finished = True
    except EOFError:
        process.join()
        raise UsageError(
            f"the process of {label} ended without a result ({_ending(process.exitcode)})",
            hint="most often memory ran out; finished contexts are kept, the same command continues",
        ) from None
    finally:
        if not finished:
            process.terminate()
        process.join()
        ours.close()
    if kind == "refused":
        error_type, message, hint = value
        raise error_type(message, hint=hint)
    if kind == "failed":
        raise RuntimeError(f"the process of {label} failed:\n{value}")
    result: Result = value
    return result


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Send one message: pickled here, so that tensors travel by value and outlive the process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _follow(pipe: Connection, reporter: Reporter) -> tuple[str, Any]:
    """Pass progress on until the last message, and return that."""

    def ignore(count: int) -> None:
        pass

    with ExitStack() as phases:
        advance: Callable[[int], None] = ignore
        while True:
            kind, value = pickle.loads(pipe.recv_bytes())
            if kind == "open":
                advance = phases.enter_context(reporter.phase(*value))
            elif kind == "advance":
                advance(value)
            elif kind == "close":
                phases.close()
            else:
                return kind, value


def _ending(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _serve(pipe: Connection, work: bytes) -> None:
    """Run in the process: every outcome is one message. An interrupt is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        function, task = pickle.loads(work)
        _send(pipe, "done", function(task, _PipeReporter(pipe)))
    except Exl3EvalError as error:
        _send(pipe, "refused", (type(error), error.message, error.hint))
    except Exception:
        _send(pipe, "failed", traceback.format_exc())
    pipe.close()

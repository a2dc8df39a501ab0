"""A child process from both ends: its whole environment, its log, and what comes back through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from exl3eval import errors
from exl3eval.errors import Exl3EvalError, UsageError
from exl3eval.records import write_atomic

LOG_FILE = "log.txt"
GO = b"go\n"
CURES = {
    "Error in memory profiling": "vLLM profiles the whole card while it starts: run nothing else there meanwhile",
}


def write_ids(path: Path, ids_NT1: Any) -> None:
    """Write the token ids that children read, int64 [N, T + 1]."""
    write_atomic(path, save({"ids": ids_NT1.contiguous()}))


def run_process(
    python: Path,
    module: str,
    request: Path,
    *,
    arm: str,
    environment: Mapping[str, str],
    on_positions: Callable[[int], None],
    on_started: Callable[[], object] = lambda: None,
) -> list[str]:
    """Run `python -m module REQUEST PIPE` in a fresh process; its log lies beside the request.

    Parameters
    ----------
    python : Path
        Interpreter that has vLLM.
    module : str
        Whose `main` reads the request.
    request : Path
        A record that is already written.
    arm : str
        For messages.
    environment : mapping
        All that the process sees.
    on_positions : callable
        Receives positions finished.
    on_started : callable
        Called when the process is ready to work; it goes on once this returns.

    Returns
    -------
    list of str
        Lines of the process's output.

    Raises
    ------
    Exl3EvalError
        As the process refused.
    UsageError
        If it ended in any other way; the log stays.
    """
    reader, writer = os.pipe()
    command = [str(python), "-P", "-m", module, str(request), str(writer)]
    log_path = request.parent / LOG_FILE
    try:
        with log_path.open("wb") as log:
            child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
            )
    except OSError as error:
        os.close(reader)
        raise UsageError(f"cannot start {python.name}: {error.strerror}", hint="check EXL3EVAL_VLLM_PYTHON") from error
    finally:
        os.close(writer)
    try:
        refusal = _follow(reader, child, on_positions, on_started)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if refusal is not None:
        raise refusal
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    if code != 0:
        last = _last_error(lines)
        log_hint = f"its log: vllm/{request.parent.name}/{LOG_FILE} in the cache folder; finished contexts are kept"
        raise UsageError(
            f"arm `{arm}`: vLLM's process ended with code {code}: {last}",
            hint=next((cure for sign, cure in CURES.items() if sign in last), log_hint),
        )
    return lines


def _follow(
    descriptor: int,
    child: subprocess.Popen[bytes],
    on_positions: Callable[[int], None],
    on_started: Callable[[], object],
) -> Exl3EvalError | None:
    """Read the pipe until the process closes it; return the refusal, if any."""
    refusal: Exl3EvalError | None = None
    with open(descriptor, encoding="utf-8") as stream:
        for line in stream:
            message = json.loads(line)
            if "advance" in message:
                on_positions(message["advance"])
            elif "started" in message:
                on_started()
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError), child.stdin as answer:
                    answer.write(GO)
            else:
                refusal = getattr(errors, message["error"])(message["message"], hint=message["hint"])
    return refusal


def _last_error(lines: list[str]) -> str:
    """Pick the line of a log that says what went wrong: the last that names an exception, else the last."""
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return (named or [line for line in lines if line.strip()] or ["no output"])[-1].strip()[:300]


class Locked:
    """A counter's callback that several threads may call."""

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback, self._lock = callback, threading.Lock()

    def __call__(self, count: int) -> None:
        """Pass a count on, one thread at a time."""
        with self._lock:
            self._callback(count)


def wait_to_work(tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell the parent that a child is ready, and wait for its word; a parent that is gone ends the child."""
    tell({"started": True})
    if sys.stdin.buffer.readline() != GO:
        raise SystemExit(1)


def serve(work: Callable[[Callable[[dict[str, Any]], None]], None], descriptor: int) -> int:
    """Run `work` in a child and return its exit code; a refusal travels through the pipe with its type and hint.

    Parameters
    ----------
    work : callable
        Receives what tells the parent of progress.
    descriptor : int
        Of the pipe.
    """
    with open(descriptor, "w", encoding="utf-8", buffering=1) as stream:

        def tell(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=stream, flush=True)

        try:
            work(tell)
        except Exl3EvalError as error:
            tell({"error": type(error).__name__, "message": error.message, "hint": error.hint})
            return error.exit_code
    return 0

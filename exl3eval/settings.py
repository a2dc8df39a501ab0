"""The only reader of environment variables.

| variable | meaning |
|---|---|
| `EXL3EVAL_CACHE` | folder for token ids and reference captures; default: the user's cache folder + `exl3eval` |
| `EXL3EVAL_THREADS` | CPU threads for torch; default: the cores this process may run on |
| `EXL3EVAL_VLLM_PYTHON` | interpreter of an environment with vLLM, for `--engine vllm`; default: this one |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl3eval.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A snapshot of the environment, taken once per process; arms under vLLM inherit a few names of it."""

    cache_dir: Path
    num_threads: int
    vllm_python: Path | None
    environment: Mapping[str, str]


def load_settings() -> Settings:
    """Read the environment.

    Raises
    ------
    UsageError
        If `EXL3EVAL_THREADS` is not a positive integer.
    """
    cache = os.environ.get("EXL3EVAL_CACHE")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    threads = os.environ.get("EXL3EVAL_THREADS", "")
    if threads and not (threads.isdigit() and int(threads) > 0):
        raise UsageError(
            f"EXL3EVAL_THREADS is {threads!r}, expected a positive integer", hint="unset it to use every core"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Settings(
        cache_dir=Path(cache) if cache else user_cache / "exl3eval",
        num_threads=int(threads) if threads else cores,
        vllm_python=Path(os.environ["EXL3EVAL_VLLM_PYTHON"]) if os.environ.get("EXL3EVAL_VLLM_PYTHON") else None,
        environment=dict(os.environ),
    )

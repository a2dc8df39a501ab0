"""The interpreter that runs an arm, and the only variables its process sees.

A child inherits a short list of names that say where the machine's programs and devices are, gets what the
harness sets for every arm, and what its variant declares; nothing else of the caller's shell can reach it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.vllm_engine import probe
from exl3eval.vllm_engine.stack import VllmStack

FIRST, LAST = (0, 26), (0, 33)
SUPPORTED = ">=0.26,<0.33 (tested: 0.26 on a GPU, 0.32 on a CPU)"
INSTALL = "make an environment with `tools/vllm/install.sh DIR`, then set EXL3EVAL_VLLM_PYTHON=DIR/bin/python"
PACKAGES = ("vllm", "torch", "transformers", "exl3eval", "exl3_kernels", "exl3_vllm")
INHERITED = (
    "CC",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
)
PLUGIN, PLUGIN_PACKAGE = "exl3", "exl3_vllm"
PLUGIN_VARIABLE = "EXL3_VLLM_VARIANT"
_EVERY_ARM = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",
    "USE_HUB_KERNELS": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_CPU_ARM = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that can run vLLM.

    Parameters
    ----------
    python : Path
        Its executable.
    packages : mapping
        Import name -> distribution, version and the sha256 over its sources and shared objects.
    version : str
        Of Python.
    """

    python: Path
    packages: Mapping[str, Mapping[str, str | None]]
    version: str

    @property
    def identity(self) -> dict[str, Any]:
        """What a receipt says of it: no path."""
        return {"python": self.version, "packages": {name: dict(found) for name, found in self.packages.items()}}


def check_version(version: str) -> None:
    """Refuse a vLLM outside the supported range.

    Raises
    ------
    UsageError
        Naming the range.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < LAST:
        raise UsageError(f"vLLM {version} is not supported: {SUPPORTED}", hint=INSTALL)


def find_interpreter(python: Path | None, *, packages: tuple[str, ...], timeout_s: float = 300) -> Interpreter:
    """Examine the interpreter that arms run under, without importing vLLM.

    Parameters
    ----------
    python : Path or None
        Its executable; None for the current one.
    packages : tuple of str
        Import names whose files are digested besides vLLM's and ours.
    timeout_s : float
        Seconds to wait for it.

    Raises
    ------
    UsageError
        If there is none, or it lacks vLLM, a package named, or this project.
    """
    if python is None:
        if find_spec("vllm") is None:
            raise UsageError("--engine vllm needs vLLM, which this interpreter does not have", hint=INSTALL)
        python = Path(sys.executable)
    names = tuple(dict.fromkeys((*PACKAGES, *packages)))
    command = [str(python), "-P", probe.__file__, *names]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=timeout_s, text=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"{python.name}: not a Python that runs", hint="check EXL3EVAL_VLLM_PYTHON") from error
    missing = [name for name in names if found["packages"][name] is None]
    if missing:
        raise UsageError(
            f"the vLLM interpreter has no package {missing[0]!r}",
            hint=INSTALL if missing[0] == "vllm" else f"install {missing[0]!r} beside vLLM (`pip install --no-deps`)",
        )
    check_version(found["packages"]["vllm"]["version"] or "unknown")
    if found["packages"]["exl3eval"]["sha256"] != probe.digest_folder(Path(str(resources.files("exl3eval")))):
        raise UsageError(
            "the vLLM interpreter has another exl3eval than this one", hint="install this one there, or run from there"
        )
    return Interpreter(python=python, packages=found["packages"], version=found["python"])


def declared_environment(
    *, device_type: str, mode: str, plugin: Mapping[str, Any] | None, stack: VllmStack | None
) -> dict[str, str]:
    """Return every variable that the harness or the variant sets: part of an arm's identity.

    Parameters
    ----------
    device_type : str
        `cpu` or `cuda`.
    mode : str
        Of execution; an eager arm on a CPU runs no compiler.
    plugin : mapping or None
        What this project's plugin is asked for; None leaves it out of the process.
    stack : VllmStack or None
        Someone else's stack, which then decides which plugins load.
    """
    declared = dict(_EVERY_ARM)
    if device_type == "cpu":
        declared |= _CPU_ARM
        if mode == "eager":
            declared["TORCHDYNAMO_DISABLE"] = "1"
    declared["VLLM_PLUGINS"] = PLUGIN if plugin is not None else ""
    if plugin is not None:
        declared[PLUGIN_VARIABLE] = json.dumps(dict(plugin), sort_keys=True)
    if stack is not None:
        declared["VLLM_PLUGINS"] = ",".join(stack.plugins)
        declared |= stack.environment
    return declared


def child_environment(
    inherited: Mapping[str, str], declared: Mapping[str, str], *, cache_dir: Path, device_index: int | None = None
) -> dict[str, str]:
    """Return the whole environment of a child process.

    Parameters
    ----------
    inherited : mapping
        The caller's environment; only the names in `INHERITED` are taken.
    declared : mapping
        What `declared_environment` returned; it wins.
    cache_dir : Path
        Where vLLM keeps what it learns of model classes.
    device_index : int or None
        The one GPU that the child may see, among the caller's.
    """
    environment = {name: inherited[name] for name in INHERITED if name in inherited}
    if device_index is not None:
        visible = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        environment["CUDA_VISIBLE_DEVICES"] = visible[device_index] if visible else str(device_index)
    return environment | {"VLLM_CACHE_ROOT": str(cache_dir / "vllm")} | dict(declared)

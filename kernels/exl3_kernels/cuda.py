"""Build and load the CUDA kernels of `csrc/` once per GPU architecture.

The sources are compiled by nvcc into one shared library with a C interface: no torch headers, so a build takes a
minute rather than ten, and the same binary serves every torch version. The library lands in the user's cache under the
digest of everything that went into it; its own digest is part of a run's identity.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path.home() / ".cache" / "exl3_kernels"
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC")
OLDEST = (8, 0)
UNITS = (
    *(
        (f"{source}{bits}.o", f"{source}.cu", (f"-DEXL3_BITS={bits}",))
        for source in ("gemm", "wide", "reconstruct")
        for bits in range(1, 9)
    ),
    *((f"experts{groups}.o", "experts.cu", (f"-DEXL3_ROW_GROUPS={groups}",)) for groups in (1, 4, 8)),
    ("routing.o", "routing.cu", ()),
    ("linear.o", "linear.cu", ()),
    ("prefill.o", "prefill.cu", ()),
    ("encode.o", "encode.cu", ()),
    ("gather.o", "gather.cu", ()),
)

pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
SIGNATURES = {
    "exl3_rotate": (pointer, integer, wide, pointer, pointer) + (integer,) * 4 + (pointer,),
    "exl3_rotate_rows": (pointer, integer, wide, pointer, pointer, integer, integer, pointer),
    "exl3_gemm": (pointer,) * 3 + (integer,) * 9 + (pointer,),
    "exl3_fold": (pointer,) * 3 + (integer, pointer, integer, wide) + (integer,) * 6 + (pointer,),
    "exl3_reconstruct": (pointer,) * 5 + (integer,) * 8 + (pointer,),
    "exl3_unrotate": (pointer,) * 3 + (integer, pointer, integer, wide, integer, integer, pointer),
    "exl3_quantize": (pointer, integer, wide) + (pointer,) * 3 + (integer, integer, pointer),
    "exl3_encode": (pointer,) * 5 + (integer, integer, pointer),
    "exl3_experts_plan": (pointer,) + (integer,) * 4 + (pointer,) * 3,
    "exl3_experts_rotate": (pointer,) * 3
    + (integer, pointer, integer, wide, integer, pointer, integer, integer, pointer),
    "exl3_experts": (pointer,) * 4
    + (integer,) * 4
    + (pointer, integer, wide, pointer, pointer)
    + (integer,) * 7
    + (pointer,),
    "exl3_experts_combine": (pointer, integer, pointer, pointer, integer, pointer) + (integer,) * 4 + (pointer,),
    "exl3_gather": (pointer,) * 3 + (integer, pointer, integer, wide, integer, integer, pointer),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded kernels.

    Parameters
    ----------
    functions : CDLL
        The C entry points.
    architecture : str
        For instance `sm_80`.
    source_sha256 : str
        Of the sources, the flags and the compiler's version.
    binary_sha256 : str
        Of the shared library itself.
    """

    functions: ctypes.CDLL
    architecture: str
    source_sha256: str
    binary_sha256: str

    def call(self, function: str, *arguments: object) -> None:
        """Call an entry point.

        Raises
        ------
        RuntimeError
            If CUDA reports an error.
        """
        code = getattr(self.functions, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} failed: {self.functions.exl3_error(code).decode()}")


def unavailable(device: torch.device) -> str:
    """Return why the kernels cannot run on a GPU, empty if they can."""
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is {architecture(device)}, the kernels need sm_80 or later"
    return "" if find_nvcc() else "the kernels are compiled at first use and nvcc is not on the PATH"


def load_library(device: torch.device) -> Library:
    """Return the kernels for a GPU, building them at the first call.

    Raises
    ------
    RuntimeError
        If the GPU is older than Ampere, nvcc is missing, or the build fails.
    """
    if reason := unavailable(device):
        raise RuntimeError(reason)
    return _load(architecture(device))


@lru_cache(maxsize=16)
def architecture(device: torch.device) -> str:
    """Return the GPU's architecture as nvcc spells it; Hopper with its own instructions, `sm_90a`."""
    major, minor = torch.cuda.get_device_capability(device)
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@lru_cache(maxsize=8)
def _load(architecture: str) -> Library:
    nvcc = str(find_nvcc())
    digest = source_digest(nvcc, architecture)
    path = CACHE / f"{architecture}-{digest[:16]}" / "libexl3.so"
    if not path.exists():
        build(nvcc, architecture, path)
    functions = ctypes.CDLL(str(path))
    functions.exl3_error.restype = ctypes.c_char_p
    for name, arguments in SIGNATURES.items():
        getattr(functions, name).argtypes = list(arguments)
    binary = hashlib.sha256(path.read_bytes()).hexdigest()
    return Library(functions=functions, architecture=architecture, source_sha256=digest, binary_sha256=binary)


@lru_cache(maxsize=1)
def find_nvcc() -> str | None:
    """Return the path of nvcc, on the PATH or in the CUDA installation that torch finds; None without one."""
    if found := shutil.which("nvcc"):
        return found
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")) if CUDA_HOME else None


def source_digest(nvcc: str, architecture: str) -> str:
    """Return the SHA-256 of the sources, the flags, the architecture and the compiler's version."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{version}\n{architecture}\n{FLAGS}\n{UNITS}".encode())
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in {".cu", ".cuh", ".h"}):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def build(nvcc: str, architecture: str, path: Path) -> None:
    """Compile every unit in parallel and link them into `path`, which appears complete or not at all.

    Raises
    ------
    RuntimeError
        With nvcc's message, if a unit does not compile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        jobs = [
            [nvcc, *FLAGS, f"-arch={architecture}", *defines, "-c", str(SOURCES / source), "-o", f"{scratch}/{target}"]
            for target, source, defines in UNITS
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        linked = f"{scratch}/linked.so"
        _run([nvcc, "-shared", "-o", linked, *(job[-1] for job in jobs)])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")

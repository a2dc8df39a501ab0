"""What a run was: code, packages and machine, in words that hold on any machine.

Paths never enter; what a field cannot know is null, not a guess.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from exl3eval import __version__
from exl3eval.records import digest_parts, digest_value

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "pyarrow",
    "accelerate",
    "triton",
    "exllamav3",
)


def package_versions() -> dict[str, str | None]:
    """Return the installed versions that can change a number; None where absent."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def source_digest(package: str) -> str:
    """Digest the source files of an import package: names and bytes, whatever folder they lie in."""
    root = Path(str(resources.files(package)))
    files = [file for file in root.rglob("*") if file.suffix in (".py", ".cu", ".cuh", ".h", ".toml")]
    return digest_parts(
        (file.relative_to(root).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files
    )


def git_state() -> dict[str, str | None]:
    """Return commit and a digest of uncommitted changes of the checkout the package runs from, if it is one."""
    root = Path(str(resources.files("exl3eval"))).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace")

    top = git("ls-files", "--error-unmatch", "exl3eval/__init__.py")
    if top is None:
        return {"commit": None, "diff_sha256": None}
    commit, diff = git("rev-parse", "HEAD"), git("diff", "HEAD")
    return {
        "commit": commit.strip() if commit else None,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def device_identity(device: Any) -> dict[str, Any]:
    """Describe the device that arms run on, and on a GPU the kernels that were built for it."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
            "kernels": built_kernels(device),
        }
    return {
        "type": "cpu",
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def built_kernels(device: Any) -> dict[str, str] | None:
    """Digest the CUDA library that arms load: what ran, not what its sources say; None where it cannot be built."""
    from exl3_kernels.cuda import load_library, unavailable

    if unavailable(device):
        return None
    library = load_library(device)
    return {
        "architecture": library.architecture,
        "source_sha256": library.source_sha256,
        "binary_sha256": library.binary_sha256,
    }


def _driver_version() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode().split("\n")[0].strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def code_identity() -> dict[str, Any]:
    """Return everything about the code that can change a number."""
    return {
        "exl3eval": __version__,
        "exl3eval_source_sha256": source_digest("exl3eval"),
        "exl3_kernels_source_sha256": source_digest("exl3_kernels"),
        "packages": package_versions(),
        "python": platform.python_version(),
        "git": git_state(),
    }


def engine_contract_digest(code: dict[str, Any]) -> str:
    """Digest the part of the code identity that captured hidden states depend on."""
    return digest_value(
        {key: code[key] for key in ("exl3_kernels_source_sha256", "packages", "python")}
        | {
            "engine": source_digest("exl3eval.engine"),
            "checkpoint": source_digest("exl3eval.checkpoint"),
        }
    )

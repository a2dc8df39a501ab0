"""What this machine can run, and what is missing for the rest."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from exl3eval.bundled import bundled_model
from exl3eval.errors import Exl3EvalError
from exl3eval.settings import Settings

NEEDED_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding.

    Parameters
    ----------
    name : str
        What was looked at.
    ok : bool
        Whether it is there and usable.
    required : bool
        Whether the main job needs it.
    finding : str
        What was seen, or what to do.
    """

    name: str
    ok: bool
    required: bool
    finding: str


def examine_machine(settings: Settings) -> list[Check]:
    """Look at packages, devices, the bundled model, the suite and the cache folder."""
    return [
        *(_package(name, required=True) for name in ("torch", "transformers", "scipy", "pyarrow", "datasets")),
        _package("triton", required=False, extra="cuda"),
        _package("vllm", required=False, extra="vllm"),
        _package("ray", required=False, extra="ray"),
        _package("matplotlib", required=False, extra="report"),
        _gpu(),
        _kernels(),
        _hub_kernels(),
        _bundled(),
        _suite(),
        _cache(settings.cache_dir),
        Check(name="CPU threads", ok=True, required=True, finding=str(settings.num_threads)),
    ]


def _package(name: str, *, required: bool, extra: str = "") -> Check:
    try:
        return Check(name=name, ok=True, required=required, finding=metadata.version(name))
    except metadata.PackageNotFoundError:
        what = f"pip install 'exl3eval[{extra}]'" if extra else "pip install exl3eval"
        return Check(name=name, ok=False, required=required, finding=f"not installed: {what}")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(name="GPU", ok=False, required=False, finding="no CUDA device: arms run on the CPU")
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / (1 << 30)
    return Check(
        name="GPU",
        ok=True,
        required=False,
        finding=f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB",
    )


def _kernels() -> Check:
    """Say which kernels serve EXL3 weights: CUDA where nvcc is, else Triton, on a CPU the reference codec."""
    import torch

    from exl3_kernels.cuda import unavailable
    from exl3_kernels.portable import installed

    if not torch.cuda.is_available():
        return Check(name="kernels", ok=True, required=False, finding="the reference codec, on the CPU")
    missing = unavailable(torch.device("cuda", 0))
    if not missing:
        return Check(name="kernels", ok=True, required=False, finding="CUDA, compiled by nvcc at the first use")
    if installed():
        return Check(name="kernels", ok=True, required=False, finding=f"the slower routes in Triton: {missing}")
    return Check(name="kernels", ok=False, required=False, finding=f"{missing}: pip install 'exl3eval[cuda]'")


def _hub_kernels() -> Check:
    """transformers probes for a package called `kernels`; a stray folder of that name confuses it."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return Check(name="hub kernels", ok=True, required=True, finding="no package `kernels`: nothing is swapped in")
    try:
        return Check(name="hub kernels", ok=True, required=True, finding=f"kernels {metadata.version('kernels')}")
    except metadata.PackageNotFoundError:
        return Check(
            name="hub kernels",
            ok=False,
            required=True,
            finding="a folder named `kernels` is importable and shadows the package: run from another folder",
        )


def _bundled() -> Check:
    try:
        bundled_model("bf16"), bundled_model("exl3")
    except Exl3EvalError as error:
        return Check(name="bundled model", ok=False, required=True, finding=str(error))
    return Check(name="bundled model", ok=True, required=True, finding="present")


def _suite() -> Check:
    from exl3eval.suite.load import load_suite

    try:
        suite = load_suite()
    except Exl3EvalError as error:
        return Check(name="contexts", ok=False, required=True, finding=str(error))
    return Check(name="contexts", ok=True, required=True, finding=f"{suite.name}, {len(suite.contexts)} documents")


def _cache(directory: Path) -> Check:
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Check(name="cache folder", ok=False, required=True, finding="not writable: set EXL3EVAL_CACHE")
    return Check(
        name="cache folder",
        ok=free > NEEDED_FREE_BYTES,
        required=True,
        finding=f"{free / (1 << 30):.1f} GiB free" + ("" if free > NEEDED_FREE_BYTES else ": free some space"),
    )

"""exllamav3's own kernels as routes, where a user has it installed: the same op, counters and scores as ours.

Upstream chooses between four implementations by row count; each is a route of its own here:

- `exllamav3`: its fused GEMM or GEMV (`exl3_gemm`), which it uses up to 144 rows;
- `exllamav3-int8`: its GEMV on int8 activations, which `exl3_gemm` takes by itself for 1 or 2 rows of a mul1 weight;
- `exllamav3-reconstruct`: rotated rows times the reconstructed inner matrix, 145 to 1,023 rows;
- `exllamav3-fused`: rows times the matrix reconstructed in the original basis, from 1,024 rows.

The int8 arithmetic is up to 0.9 % off and nothing but `EXL3_INT8_GEMV` turns it off inside a process. It serves at most
two rows, so the route `exllamav3` gives a mul1 weight three, and both routes check which kernel reports to have run.

Which tile shape `exl3_gemm` runs is tuned at the first call of a shape and kept in a file of the user's: results agree
between processes to rounding only. Its locks belong to the device: one stream at a time. The extension's arguments are
positional and none has a default; they are those of version 1.4.1. It is imported at the first launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module, metadata, util
from typing import Any

import torch

from exl3_kernels.operands import require_primed
from exl3_kernels.routes import Route, register_route
from exl3_kernels.weight import BLOCK, MULTIPLIERS, Exl3Weight

PACKAGE = "exllamav3"
SLICE_COLUMNS = 32_768
AUTOMATIC_SHAPE = -1
ALL_MULTIPROCESSORS = 0
RAN_INT8 = 0
INT8_ROWS = 2
INT8_COLUMNS = 256
INT8_BITS, INT8_BITS_BEFORE_HOPPER = 6, 5
HOPPER = (9, 0)
_SLICES_SINCE, _FUSED_GEMM_SINCE, _INT8_SINCE, _FUSED_MATRIX_SINCE = (0, 0, 35), (0, 0, 32), (1, 0, 0), (1, 4, 0)

Linear = Callable[[Any, torch.Tensor, Exl3Weight, torch.Tensor], None]
"""`(extension, x float16 [M, k], weight, y [M, n])`: fills y, without the bias."""


def _gemm(extension: Any, x_Mk: torch.Tensor, weight: Exl3Weight, y_Mn: torch.Tensor) -> int:
    return int(
        extension.exl3_gemm(
            x_Mk, weight.trellis, y_Mn, weight.suh, torch.empty_like(x_Mk), weight.svh, AUTOMATIC_SHAPE,
            weight.codebook == "mcg", weight.codebook == "mul1", ALL_MULTIPROCESSORS,
        )
    )  # fmt: skip


def _fp16_gemm(extension: Any, x_Mk: torch.Tensor, weight: Exl3Weight, y_Mn: torch.Tensor) -> None:
    rows = len(x_Mk)
    if weight.codebook == "mul1" and rows <= INT8_ROWS:
        x_Mk = torch.nn.functional.pad(x_Mk, (0, 0, 0, INT8_ROWS + 1 - rows))
        taller = y_Mn.new_empty(len(x_Mk), y_Mn.shape[1])
    else:
        taller = y_Mn
    if _gemm(extension, x_Mk, weight, taller) == RAN_INT8:
        raise RuntimeError(f"exllamav3 ran its int8 GEMV for {rows} rows, which route `exllamav3` must not")
    if taller is not y_Mn:
        y_Mn.copy_(taller[:rows])


def _int8_gemv(extension: Any, x_Mk: torch.Tensor, weight: Exl3Weight, y_Mn: torch.Tensor) -> None:
    shape = _gemm(extension, x_Mk, weight, y_Mn)
    if shape != RAN_INT8:
        raise RuntimeError(
            f"exllamav3 ran kernel {shape} instead of its int8 GEMV for {len(x_Mk)} rows: EXL3_INT8_GEMV turns it off"
        )


def _reconstruct(extension: Any, x_Mk: torch.Tensor, weight: Exl3Weight, y_Mn: torch.Tensor) -> None:
    rotated_Mk = torch.empty_like(x_Mk)
    extension.had_r_128(x_Mk, rotated_Mk, weight.suh, None, 1.0)
    for first, inner in _slices(weight):
        extension.reconstruct_slice(inner, weight.trellis, weight.bits, *_codebook(weight), first)
        extension.hgemm(rotated_Mk, inner, y_Mn[:, first : first + inner.shape[1]])
    extension.had_r_128(y_Mn, y_Mn, None, weight.svh, 1.0)


def _fused(extension: Any, x_Mk: torch.Tensor, weight: Exl3Weight, y_Mn: torch.Tensor) -> None:
    for first, matrix in _slices(weight):
        svh = weight.svh[first : first + matrix.shape[1]]
        extension.reconstruct_had_slice(matrix, weight.trellis, weight.suh, svh, weight.bits, *_codebook(weight), first)
        extension.hgemm(x_Mk, matrix, y_Mn[:, first : first + matrix.shape[1]])


def _codebook(weight: Exl3Weight) -> tuple[bool, bool]:
    return weight.codebook == "mcg", weight.codebook == "mul1"


def _slices(weight: Exl3Weight) -> list[tuple[int, torch.Tensor]]:
    """Return (first column, empty float16 [k, columns]) of slices of at most 32,768 columns, in one buffer."""
    k, n = weight.in_features, weight.out_features
    buffer = torch.empty(k * min(n, SLICE_COLUMNS), dtype=torch.float16, device=weight.trellis.device)
    widths = [(first, min(SLICE_COLUMNS, n - first)) for first in range(0, n, SLICE_COLUMNS)]
    return [(first, buffer[: k * width].view(k, width)) for first, width in widths]


def installed_version() -> str | None:
    """Return the installed version of exllamav3, None where it is absent or carries no version; nothing is imported."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def rejects_peer(weight: Exl3Weight, device_type: str, since: tuple[int, int, int]) -> str:
    """Return why exllamav3's kernels cannot serve a weight here, empty if they can; nothing is imported."""
    if util.find_spec(PACKAGE) is None:
        return "exllamav3 is not installed"
    version = installed_version() or ""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < since:
        return f"exllamav3 is {version}, the route needs {'.'.join(map(str, since))} or later"
    if device_type != "cuda":
        return f"needs a CUDA device, the weight is on {device_type}"
    if weight.multiplier != MULTIPLIERS[weight.codebook]:
        return f"{weight.codebook} multiplier 0x{weight.multiplier:08X} is not the usual one, which exllamav3 assumes"
    if weight.in_features % BLOCK or weight.out_features % BLOCK:
        return f"{weight.in_features} x {weight.out_features} is not a multiple of {BLOCK} on both sides"
    loose = [name for name in ("trellis", "suh", "svh") if not getattr(weight, name).is_contiguous()]
    return f"{loose[0]} is not contiguous" if loose else ""


def _rejects_int8(weight: Exl3Weight, rows: int) -> str:
    trellis = weight.trellis
    before_hopper = trellis.is_cuda and torch.cuda.get_device_capability(trellis.device) < HOPPER
    most = INT8_BITS_BEFORE_HOPPER if before_hopper else INT8_BITS
    if weight.codebook != "mul1":
        return f"the int8 GEMV serves codebook mul1, not {weight.codebook}"
    if rows > INT8_ROWS:
        return f"{rows} rows, the int8 GEMV takes at most {INT8_ROWS}"
    if weight.out_features % INT8_COLUMNS or weight.bits > most:
        return (
            f"{weight.out_features} columns at {weight.bits} bits: the int8 GEMV takes multiples of {INT8_COLUMNS} "
            f"at up to {most} bits"
        )
    return ""


def _register(
    name: str,
    doc: str,
    linear: Linear,
    since: tuple[int, int, int],
    rejects_also: Callable[[Exl3Weight, int], str] = lambda weight, rows: "",
) -> None:
    def run(
        x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        c_dtype = torch.float16 if out_dtype == torch.float16 else torch.float32
        if x_Mk.is_cuda:
            require_primed(f"{name} of {len(x_Mk)} rows", x_Mk.device, weight.trellis.shape, weight.codebook, c_dtype)
        extension = import_module(f"{PACKAGE}.ext").exllamav3_ext
        with torch.cuda.device_of(x_Mk):
            y_Mn = torch.empty(len(x_Mk), weight.out_features, dtype=c_dtype, device=x_Mk.device)
            linear(extension, x_Mk.half().contiguous(), weight, y_Mn)
        return (y_Mn if weight.bias is None else y_Mn.add_(weight.bias)).to(out_dtype)

    register_route(
        Route(
            name=name,
            doc=doc,
            rejects=lambda weight, rows, device: rejects_peer(weight, device, since) or rejects_also(weight, rows),
            run=run,
        )
    )


_register(
    "exllamav3",
    "exllamav3's fused GEMM and FP16 GEMV, shape tuned by exllamav3; its int8 GEMV is kept out.",
    _fp16_gemm,
    _FUSED_GEMM_SINCE,
)
_register(
    "exllamav3-int8",
    "exllamav3's GEMV on int8 activations, one or two rows of mul1 weights: up to 0.9 % off by itself.",
    _int8_gemv,
    _INT8_SINCE,
    _rejects_int8,
)
_register(
    "exllamav3-reconstruct",
    "exllamav3's rotated rows times its reconstructed inner matrix, dense product in its own GEMM.",
    _reconstruct,
    _SLICES_SINCE,
)
_register(
    "exllamav3-fused",
    "exllamav3's rows times its matrix in the original basis, transformed in FP16: 0.02 % low by itself.",
    _fused,
    _FUSED_MATRIX_SINCE,
)

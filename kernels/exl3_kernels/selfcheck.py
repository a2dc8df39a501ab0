"""The check that a provider of kernels decodes what the reference codec decodes, before its first result is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from exl3_kernels.decode import decode_gemm
from exl3_kernels.hadamard import hadamard_128, hadamard_half
from exl3_kernels.operands import on_device
from exl3_kernels.portable import inner_slices, triton_decode
from exl3_kernels.prefill import weight_slices
from exl3_kernels.reconstruct import inner_weight
from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE, Exl3Weight

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Kernels that are built together.

    Parameters
    ----------
    name : str
        For messages.
    slices : callable
        `weight -> (columns, inner matrix of those columns)`, float16 [k, columns] or its transpose.
    transposed : bool
        Whether `slices` gives the transpose.
    decode : callable
        `(x [M, k], weight, out_dtype) -> [M, n]`, the decode GEMM.
    """

    name: str
    slices: Callable[[Exl3Weight], Iterator[tuple[slice, torch.Tensor]]]
    transposed: bool
    decode: Callable[[torch.Tensor, Exl3Weight, torch.dtype], torch.Tensor]


CUDA = Provider(name="CUDA", slices=partial(weight_slices, kind="inner"), transposed=True, decode=decode_gemm)
TRITON = Provider(name="Triton", slices=inner_slices, transposed=False, decode=triton_decode)


@lru_cache(maxsize=512)
def check_kernels(device: torch.device, bits: int, codebook: str, provider: Provider = CUDA) -> None:
    """Compare one 128 x 128 block of a width and codebook with the reference codec, once per process and device.

    Raises
    ------
    RuntimeError
        If a reconstructed value differs, if the decode GEMM is off by more than fp32 sums can be, or if the first call
        is inside a graph capture.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first {bits}-bit {codebook} launch is inside a graph capture: run the linear once before capturing"
        )
    generator = torch.Generator().manual_seed(bits)
    trellis = torch.randint(
        -(1 << 15), 1 << 15, (BLOCK // TILE, BLOCK // TILE, TILE * bits), generator=generator, dtype=torch.int16
    )
    scale, x_Mk = torch.ones(BLOCK, dtype=torch.float16), torch.randn(3, BLOCK, generator=generator).half()
    expected = inner_weight(_weight(trellis, scale, bits, codebook))
    weight = _weight(trellis.to(device), scale.to(device), bits, codebook)
    with on_device(device):
        ((_, inner),) = provider.slices(weight)
        inner = (inner.t() if provider.transposed else inner).cpu()
        y = provider.decode(x_Mk.to(device), weight, torch.float32).cpu().double()
    where = torch.cuda.get_device_name(device) if on_gpu else "this CPU"
    if not torch.equal(inner, expected):
        raise RuntimeError(
            f"the {bits}-bit {codebook} {provider.name} kernel on {where} decodes"
            f" {int((inner != expected).sum())} of {inner.numel()} values wrong"
        )
    exact = hadamard_128(hadamard_half(x_Mk).double() @ expected.double())
    if not float((y - exact).norm() / exact.norm()) < TOLERANCE:
        raise RuntimeError(
            f"the {bits}-bit {codebook} {provider.name} decode GEMM on {where} is wrong by"
            f" {float((y - exact).norm() / exact.norm()):.1e}, at most {TOLERANCE:.0e} is rounding"
        )


def _weight(trellis: torch.Tensor, scale: torch.Tensor, bits: int, codebook: str) -> Exl3Weight:
    return Exl3Weight(trellis=trellis, suh=scale, svh=scale, codebook=codebook, multiplier=MULTIPLIERS[codebook])

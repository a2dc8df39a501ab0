"""The check that a freshly built library decodes what the reference codec decodes, before its first result is used."""

from __future__ import annotations

from functools import lru_cache

import torch

from exl3_kernels.decode import decode_gemm
from exl3_kernels.hadamard import hadamard_128, hadamard_half
from exl3_kernels.prefill import weight_slices
from exl3_kernels.reconstruct import inner_weight
from exl3_kernels.weight import BLOCK, MULTIPLIERS, TILE, Exl3Weight

TOLERANCE = 1e-5


@lru_cache(maxsize=256)
def check_kernels(device: torch.device, bits: int, codebook: str) -> None:
    """Compare one 128 x 128 block of a width and codebook with the reference codec, once per process and GPU.

    Raises
    ------
    RuntimeError
        If a reconstructed value differs, if the decode GEMM is off by more than fp32 sums can be, or if the first call
        is inside a graph capture.
    """
    if torch.cuda.is_current_stream_capturing():
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
    with torch.cuda.device(device):
        ((_, inner_nk),) = weight_slices(weight, "inner")
        inner = inner_nk.t().cpu()
        y = decode_gemm(x_Mk.to(device), weight, torch.float32).cpu().double()
    if not torch.equal(inner, expected):
        raise RuntimeError(
            f"the {bits}-bit {codebook} kernel on {torch.cuda.get_device_name(device)} decodes"
            f" {int((inner != expected).sum())} of {inner.numel()} values wrong"
        )
    exact = hadamard_128(hadamard_half(x_Mk).double() @ expected.double())
    if not float((y - exact).norm() / exact.norm()) < TOLERANCE:
        raise RuntimeError(
            f"the {bits}-bit {codebook} decode GEMM on {torch.cuda.get_device_name(device)} is wrong by"
            f" {float((y - exact).norm() / exact.norm()):.1e}, at most {TOLERANCE:.0e} is rounding"
        )


def _weight(trellis: torch.Tensor, scale: torch.Tensor, bits: int, codebook: str) -> Exl3Weight:
    return Exl3Weight(trellis=trellis, suh=scale, svh=scale, codebook=codebook, multiplier=MULTIPLIERS[codebook])

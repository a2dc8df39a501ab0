"""The routes that CUDA and Triton kernels add: importing this registers them, nothing is compiled before a launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from exl3_kernels.decode import DECODE_ROWS, decode_gemm, rejects_wide, shared_decode_gemm, wide_decode_gemm
from exl3_kernels.operands import rejects
from exl3_kernels.portable import interpreted, rejects_triton, triton_decode, triton_reconstruct
from exl3_kernels.prefill import prefill_fp8, prefill_fused, prefill_half, prefill_reconstruct
from exl3_kernels.routes import Route, register_route
from exl3_kernels.selfcheck import CUDA, TRITON, Provider, check_kernels
from exl3_kernels.weight import Exl3Weight

FP8_CAPABILITY = (8, 9)
Linear = Callable[[torch.Tensor, Exl3Weight, torch.dtype], torch.Tensor]


def _rejects_any_rows(weight: Exl3Weight, rows: int, device_type: str) -> str:
    return rejects(weight, device_type)


def _rejects_without_triton(weight: Exl3Weight, rows: int, device_type: str) -> str:
    return rejects_triton(weight, device_type)


def _rejects_many_rows(weight: Exl3Weight, rows: int, device_type: str) -> str:
    if rows > DECODE_ROWS:
        return f"{rows} rows, it takes at most {DECODE_ROWS}"
    return rejects(weight, device_type)


def _rejects_without_wgmma(weight: Exl3Weight, rows: int, device_type: str) -> str:
    if reason := rejects(weight, device_type):
        return reason
    return rejects_wide(weight.trellis.device) if weight.trellis.is_cuda else ""


def _rejects_without_fp8(weight: Exl3Weight, rows: int, device_type: str) -> str:
    if reason := rejects(weight, device_type):
        return reason
    device = weight.trellis.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no E4M3 products, which need sm_89 or later"
    return ""


def _register(
    name: str,
    doc: str,
    linear: Linear,
    rejects_rows: Callable[[Exl3Weight, int, str], str],
    provider: Provider = CUDA,
) -> None:
    def run(
        x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        if weight.trellis.is_cuda or (provider is TRITON and interpreted()):
            check_kernels(weight.trellis.device, weight.bits, weight.codebook, provider)
        return linear(x_Mk, weight, out_dtype)

    register_route(Route(name=name, doc=doc, rejects=rejects_rows, run=run))


_register(
    "decode-gemm",
    "Up to 16 rows: float16 rotated rows, weights decoded inside the product, fp32 sums in a fixed order.",
    decode_gemm,
    _rejects_many_rows,
)
_register(
    "shared-decode",
    "Any rows, 128 per decoding of the weights; every row has the bits of decode-gemm.",
    shared_decode_gemm,
    _rejects_any_rows,
)
_register(
    "wide-decode",
    "Any rows, up to 256 per decoding of the weights, on Hopper: decode-gemm's arithmetic, fp32 sums in another order.",
    wide_decode_gemm,
    _rejects_without_wgmma,
)
_register(
    "prefill-reconstruct",
    "Float16 rotated rows times the exact inner matrix in a workspace: cuBLAS with fp32 sums, fp32 output transform.",
    prefill_reconstruct,
    _rejects_any_rows,
)
_register(
    "prefill-fused",
    "Float16 rows times the dense weight, transformed in fp32 and rounded once to float16: cuBLAS with fp32 sums.",
    prefill_fused,
    _rejects_any_rows,
)
_register(
    "prefill-half",
    "Float16 weight, transformed in fp32 on its wider side and rounded once: cuBLAS on rotated rows, or rotated sums.",
    prefill_half,
    _rejects_any_rows,
)
_register(
    "fp8-prefill",
    "E4M3 weights and rows with row-wise scales, bfloat16 products; much less exact, for comparison.",
    prefill_fp8,
    _rejects_without_fp8,
)
_register(
    "fp8-prefill-tensor",
    "E4M3 weights and rows with one scale each, bfloat16 products; much less exact, for comparison.",
    lambda x_Mk, weight, out_dtype: prefill_fp8(x_Mk, weight, out_dtype, scaling="tensor"),
    _rejects_without_fp8,
)
_register(
    "triton-decode",
    "Any rows, 16 or 32 per decoding of the weights, in Triton: decode-gemm's arithmetic, fp32 sums in another order.",
    triton_decode,
    _rejects_without_triton,
    TRITON,
)
_register(
    "triton-reconstruct",
    "Float16 rotated rows times the exact inner matrix in a workspace, in Triton: torch's product with fp32 sums.",
    triton_reconstruct,
    _rejects_without_triton,
    TRITON,
)

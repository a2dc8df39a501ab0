"""Running every kind of launch once before a graph is captured: nothing may be built or allocated inside a capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exl3_kernels.experts import Exl3Experts
from exl3_kernels.linear import Exl3Linear
from exl3_vllm.ops import embedding_int8, fused_linear
from exl3_vllm.readback import note_primed

_primed: set[tuple[object, ...]] = set()


def captured_rows(vllm_config: Any) -> tuple[int, ...]:
    """Return the row counts that vLLM will capture as graphs, none if it captures none."""
    compilation = vllm_config.compilation_config
    return tuple(compilation.cudagraph_capture_sizes or ()) if compilation.cudagraph_mode else ()


@torch.inference_mode()
def prime_linear(
    parts: Sequence[Exl3Linear], x_dtype: torch.dtype, out_dtype: torch.dtype, graph_rows: Sequence[int]
) -> None:
    """Run each part that is of a new kind with every row count that will be captured, on a GPU."""
    device = parts[0].trellis.device
    rows = tuple(graph_rows) if device.type == "cuda" else ()
    for part in parts:
        bias = None if part.bias is None else part.bias.dtype
        kind = (device, tuple(part.trellis.shape), part.codebook, part.dispatch, bias, x_dtype, out_dtype, rows)
        if kind in _primed:
            continue
        for count in rows:
            x = torch.zeros(count, part.in_features, dtype=x_dtype, device=device)
            fused_linear(x, [part], with_bias=part.bias is not None, out_dtype=out_dtype)
        _primed.add(kind)
    note_primed(rows)


@torch.inference_mode()
def prime_experts(experts: Exl3Experts, x_dtype: torch.dtype, num_slots: int, graph_rows: Sequence[int]) -> None:
    """Serve every token count that will be captured once, which also makes and checks the layer's table."""
    gate = experts.gate[0]
    assert isinstance(gate, Exl3Linear)
    device = gate.trellis.device
    for count in graph_rows:
        experts(
            torch.zeros(count, gate.in_features, dtype=x_dtype, device=device),
            torch.zeros(count, num_slots, dtype=torch.int64, device=device),
            torch.ones(count, num_slots, device=device),
        )
    note_primed(graph_rows)


@torch.inference_mode()
def prime_embedding(codes: torch.Tensor, scales: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Gather one row with either type of ids, on a GPU."""
    if codes.is_cuda:
        for id_type in (torch.int32, torch.int64):
            embedding_int8(codes, scales, torch.zeros(1, dtype=id_type, device=codes.device), out_dtype)

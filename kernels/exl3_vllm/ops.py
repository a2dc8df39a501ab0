"""The opaque ops of the served model: one per layer of vLLM, whatever it fuses.

Which route serves which rows is decided inside, from the rows of the call. A branch on the row count in Python, outside
an op, would be taken once while the model is traced and then served to every batch.
"""

from __future__ import annotations

import torch
from torch import nn

from exl3_kernels.experts import Exl3Experts
from exl3_kernels.gather import gather_int8
from exl3_kernels.linear import Exl3Linear, exl3_linear
from exl3_kernels.routes import Launch, bucket_rows, select_route
from exl3_vllm.tally import TALLY


@torch.library.custom_op("exl3_vllm::linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    trellis: list[torch.Tensor],
    suh: list[torch.Tensor],
    svh: list[torch.Tensor],
    bias: list[torch.Tensor],
    dense: list[torch.Tensor],
    codebooks: str,
    multipliers: list[int],
    dispatches: str,
    widths: list[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    outputs = []
    for part, (codebook, dispatch) in enumerate(zip(codebooks.split(";"), dispatches.split(";"), strict=True)):
        k = trellis[part].shape[0] * 16
        y = exl3_linear(
            x if x.shape[-1] == k else nn.functional.pad(x, (0, k - x.shape[-1])),
            trellis[part],
            suh[part],
            svh[part],
            bias[part] if bias else None,
            dense[part] if dense else None,
            codebook,
            multipliers[part],
            dispatch,
            out_dtype,
        )
        _count_linear(x, trellis[part], codebook, dispatch)
        outputs.append(y if y.shape[-1] == widths[part] else y[..., : widths[part]])
    return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0].contiguous()


@_linear.register_fake
def _linear_fake(
    x: torch.Tensor,
    trellis: list[torch.Tensor],
    suh: list[torch.Tensor],
    svh: list[torch.Tensor],
    bias: list[torch.Tensor],
    dense: list[torch.Tensor],
    codebooks: str,
    multipliers: list[int],
    dispatches: str,
    widths: list[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(widths)), dtype=out_dtype)


def _count_linear(x: torch.Tensor, trellis: torch.Tensor, codebook: str, dispatch: str) -> None:
    rows = x.shape[:-1].numel()
    if rows:
        k, n, words = trellis.shape
        route = select_route(dispatch, rows).name
        TALLY.add(Launch(route, bucket_rows(rows), 16 * k, 16 * n, words // 16, codebook))


def fused_linear(x: torch.Tensor, parts: list[Exl3Linear], *, with_bias: bool, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply every part to the same rows and put the outputs side by side, in one op.

    Parameters
    ----------
    x : Tensor
        [..., k'], k' at most the parts' stored input width.
    parts : list of Exl3Linear
        Bits, codebooks and routes may differ.
    with_bias : bool
        Whether to add the parts' biases; every part has one then.
    out_dtype : dtype
        Of the result: the fp32 sums rounded once.

    Returns
    -------
    Tensor
        [..., sum of the parts' out_features].
    """
    return _linear(
        x,
        [part.trellis for part in parts],
        [part.suh for part in parts],
        [part.svh for part in parts],
        [part.bias for part in parts if part.bias is not None] if with_bias else [],
        [part.dense for part in parts if part.dense is not None],
        ";".join(part.codebook for part in parts),
        [part.multiplier for part in parts],
        ";".join(part.dispatch for part in parts),
        [part.out_features for part in parts],
        out_dtype,
    )


class TalliedLinear(Exl3Linear):
    """An EXL3 linear that is called as a module: by the loop over routed experts."""

    def forward_padded(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear and keep the padded output columns: [..., k'] -> [..., n]."""
        y = super().forward_padded(x)
        _count_linear(x, self.trellis, self.codebook, self.dispatch)
        return y


class TalliedExperts(Exl3Experts):
    """Routed experts whose grouped launches are counted as the plugin counts."""

    def count(self, route: str, tokens: int) -> None:
        """Count one launch of a grouped route for every kind of projection in the layer."""
        super().count(route, tokens)
        for weight in self.table().classes:
            TALLY.add(
                Launch(
                    route, bucket_rows(tokens), weight.in_features, weight.out_features, weight.bits, weight.codebook
                )
            )


@torch.library.custom_op("exl3_vllm::embedding", mutates_args=())
def embedding_int8(
    codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Gather and dequantize rows of an int8 table, counted; see `exl3_kernels.gather.gather_int8`."""
    rows = gather_int8(codes, scales, ids, out_dtype)
    if ids.numel():
        TALLY.add(Launch("int8-gather", bucket_rows(ids.numel()), codes.shape[0], codes.shape[1], 8, "int8"))
    return rows


@embedding_int8.register_fake
def _embedding_int8_fake(
    codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty((*ids.shape, codes.shape[1]), dtype=out_dtype)

"""The EXL3 linear: one opaque op, and the module that owns its operands.

`exl3::linear` is opaque to tracing: which route runs is decided inside, from the row count of the call.
"""

from __future__ import annotations

import torch
from torch import nn

from exl3_kernels import gpu_routes as _gpu_routes  # noqa: F401  registers the routes of NVIDIA GPUs
from exl3_kernels import peer as _peer  # noqa: F401  registers exllamav3's routes
from exl3_kernels.codebook import codebook_values
from exl3_kernels.hadamard import hadamard_128
from exl3_kernels.reconstruct import dense_weight, linear_rotated, linear_staged
from exl3_kernels.routes import Route, count_launch, parse_dispatch, register_route, select_route
from exl3_kernels.trellis import tiles_to_matrix, unpack_states
from exl3_kernels.weight import Exl3Weight

BROKEN_POSITION = 37


def _run_reference(
    x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if dense_kn is None:
        dense_kn = dense_weight(weight, dtype=torch.float32)
    y_Mn = x_Mk.float() @ dense_kn
    if weight.bias is not None:
        y_Mn += weight.bias.float()
    return y_Mn.to(out_dtype)


register_route(
    Route(
        name="reference",
        doc="FP32 product with the dense matrix that the reference codec reconstructs in FP64; any device.",
        rejects=lambda weight, rows, device: "",
        run=_run_reference,
        needs_dense=True,
    )
)


def _run_fp16_staged(
    x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return linear_staged(x_Mk.half(), weight, out_dtype=torch.float32, accumulate=torch.float32).to(out_dtype)


register_route(
    Route(
        name="fp16-staged",
        doc="Upstream's stages in torch: rotated input rounded to FP16, FP32 sums, FP32 output transform; any device.",
        rejects=lambda weight, rows, device: "",
        run=_run_fp16_staged,
    )
)


def _run_rotated_fp16(
    x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return linear_rotated(x_Mk, weight).to(out_dtype)


register_route(
    Route(
        name="rotated-fp16",
        doc="The GPU kernels' arithmetic in torch: rows rounded to FP16 before and after their rotation; any device.",
        rejects=lambda weight, rows, device: "",
        run=_run_rotated_fp16,
    )
)


def _run_broken_window(
    x_Mk: torch.Tensor, weight: Exl3Weight, dense_kn: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    states = unpack_states(weight.trellis)
    states[..., BROKEN_POSITION] = (states[..., BROKEN_POSITION] << 1) & 0xFFFF
    values = codebook_values(weight.codebook, weight.multiplier, device=states.device)[states.long()]
    rotated = hadamard_128(x_Mk.float() * weight.suh.float())
    y_Mn = hadamard_128(rotated @ tiles_to_matrix(values).float()) * weight.svh.float()
    return (y_Mn if weight.bias is None else y_Mn + weight.bias.float()).to(out_dtype)


register_route(
    Route(
        name="broken-window",
        doc="A control that must be caught: position 37 of every tile reads a window that is off by one bit.",
        rejects=lambda weight, rows, device: "",
        run=_run_broken_window,
    )
)


@torch.library.custom_op("exl3::linear", mutates_args=())
def exl3_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    dense: torch.Tensor | None,
    codebook: str,
    multiplier: int,
    dispatch: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Apply one EXL3 linear to rows.

    Parameters
    ----------
    x : Tensor
        [..., k] activations; k is the padded input width.
    trellis, suh, svh, bias, codebook, multiplier
        The fields of `Exl3Weight`.
    dense : Tensor or None
        [k, n] fp32, for routes that keep the matrix ready.
    dispatch : str
        Row ranges and routes, see `exl3_kernels.routes`.
    out_dtype : dtype
        Of the result.

    Returns
    -------
    Tensor
        [..., n], n the padded output width.
    """
    weight = Exl3Weight(trellis=trellis, suh=suh, svh=svh, bias=bias, codebook=codebook, multiplier=multiplier)
    x_Mk = x.reshape(-1, x.shape[-1])
    rows = x_Mk.shape[0]
    if rows == 0:
        return x.new_empty((*x.shape[:-1], weight.out_features), dtype=out_dtype)
    route = select_route(dispatch, rows)
    y_Mn = route.run(x_Mk, weight, dense, out_dtype)
    count_launch(route.name, rows, weight)
    return y_Mn.reshape(*x.shape[:-1], weight.out_features)


@exl3_linear.register_fake
def _exl3_linear_fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    dense: torch.Tensor | None,
    codebook: str,
    multiplier: int,
    dispatch: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], trellis.shape[1] * 16), dtype=out_dtype)


class Exl3Linear(nn.Module):
    """A linear layer whose weight is stored in EXL3.

    Parameters
    ----------
    weight : Exl3Weight
        Padded to multiples of 128 as stored.
    dispatch : str
        Row ranges and routes.
    in_features, out_features : int
        The widths that the surrounding model sees; inputs are zero-extended and padded outputs cut.
    out_dtype : dtype or None
        None keeps the dtype of the input.

    Raises
    ------
    ValueError
        If the logical widths exceed the stored ones, or a route rejects this weight.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    bias: torch.Tensor | None
    dense: torch.Tensor | None

    def __init__(
        self,
        weight: Exl3Weight,
        *,
        dispatch: str,
        in_features: int | None = None,
        out_features: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features or weight.in_features
        self.out_features = out_features or weight.out_features
        if self.in_features > weight.in_features or self.out_features > weight.out_features:
            raise ValueError(
                f"the model expects {self.in_features} -> {self.out_features}, "
                f"the trellis holds {weight.in_features} -> {weight.out_features}"
            )
        device = weight.trellis.device.type
        for row_range in parse_dispatch(dispatch):
            from_rows, route = row_range.first, select_route(dispatch, row_range.first)
            if reason := route.rejects(weight, from_rows, device):
                raise ValueError(f"route {route.name!r} rejects {from_rows} rows: {reason}")
        self.codebook, self.multiplier = weight.codebook, weight.multiplier
        self.dispatch, self.out_dtype = dispatch, out_dtype
        self.register_buffer("trellis", weight.trellis)
        self.register_buffer("suh", weight.suh)
        self.register_buffer("svh", weight.svh)
        self.register_buffer("bias", weight.bias)
        needs_dense = any(select_route(dispatch, r.first).needs_dense for r in parse_dispatch(dispatch))
        self.register_buffer("dense", dense_weight(weight, dtype=torch.float32) if needs_dense else None, False)

    @property
    def padded_out_features(self) -> int:
        """The stored n."""
        return self.trellis.shape[1] * 16

    def forward_padded(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear and keep the padded output columns: [..., k'] -> [..., n]."""
        missing = self.trellis.shape[0] * 16 - x.shape[-1]
        if missing:
            x = nn.functional.pad(x, (0, missing))
        return exl3_linear(
            x,
            self.trellis,
            self.suh,
            self.svh,
            self.bias,
            self.dense,
            self.codebook,
            self.multiplier,
            self.dispatch,
            self.out_dtype or x.dtype,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear: [..., in_features] -> [..., out_features]."""
        return self.forward_padded(x)[..., : self.out_features]

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        bits = self.trellis.shape[2] // 16
        return f"{self.in_features} -> {self.out_features}, K={bits}, {self.codebook}, {self.dispatch}"


class FusedExl3Linear(nn.Module):
    """Several EXL3 linears that share an input, where the model has one: outputs side by side."""

    def __init__(self, parts: list[Exl3Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply every part to `x` and concatenate: [..., k] -> [..., sum of n]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class SummedExl3Linear(nn.Module):
    """A down projection stored in slices along its input: partial outputs are summed in slice order."""

    def __init__(self, parts: list[Exl3Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply slice i to its columns of `x` and sum: [..., sum of k] -> [..., n]."""
        widths = [int(part.in_features) for part in self.parts]  # type: ignore[arg-type]
        outputs = [part(piece) for part, piece in zip(self.parts, x.split(widths, dim=-1), strict=True)]
        return torch.stack(outputs).sum(dim=0) if len(outputs) > 1 else outputs[0]

"""Routed experts on NVIDIA GPUs: all experts of a layer in a few launches, whatever their widths and codebooks.

Gate, up and SwiGLU of every routed (token, slot) pair are one launch, down is one, combining a token's slots is one.
The host never learns the routing: a captured graph replays any. An expert without tokens is not read. For few tokens
(`grouped_decode`) thread blocks find the pairs of their expert by themselves and rotate rows on the spot; for many
(`grouped_prefill`) two launches before sort the pairs by expert and rotate every row once per projection.

Both give a token the bits that `decode.decode_gemm` gives it expert by expert, in any batch: the same products in the
same order, float16 rotated rows, fp32 sums, every projection's result and both steps of SwiGLU rounded to the type of
activations, slots added in order in fp32. Nothing is added atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from exl3_kernels.cuda import load_library
from exl3_kernels.decode import DECODE, decode_gemm, multiprocessors
from exl3_kernels.operands import ALIGNMENT, DTYPES, rejects, require_primed
from exl3_kernels.selfcheck import check_kernels
from exl3_kernels.weight import BLOCK, CODEBOOKS, MULTIPLIERS, TILE, Exl3Weight

GROUP = 8
MOST_BLOCKS = 65_535  # of a launch in one direction
ROW_GROUPS_UP_TO = ((4, 1), (16, 4))  # average rows of an expert, row groups of an item
MOST_ROW_GROUPS = 8
SHARED_FOR_MOST = 140_000  # bytes of shared memory that items of eight groups need at K = 8
TOLERANCE = 1e-4  # of the first check: an ulp of SiLU may turn a rounding to float16, one wrong weight is 50 times this


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTable:
    """The experts of one layer as the kernels find them.

    Parameters
    ----------
    stored : Tensor
        int64 [E, 3, 4] on the GPU: of gate, up and down the addresses of trellis, suh and svh, and K + 16 x codebook.
    weights : tuple
        (gate, up, down) of every expert, which keeps what `stored` points at.
    inner : int
        Activations between the projections; columns of gate and up from there on are padding.
    most_bits : int
        The largest K of any projection.
    """

    stored: torch.Tensor
    weights: tuple[tuple[Exl3Weight, Exl3Weight, Exl3Weight], ...]
    inner: int
    most_bits: int

    @property
    def classes(self) -> tuple[Exl3Weight, ...]:
        """One weight of every kind of projection: shape, K and codebook."""
        found: dict[tuple[int, int, int, str], Exl3Weight] = {}
        for expert in self.weights:
            for w in expert:
                found.setdefault((w.in_features, w.out_features, w.bits, w.codebook), w)
        return tuple(found.values())


def rejects_experts(weights: Sequence[tuple[Exl3Weight, Exl3Weight, Exl3Weight]], device_type: str) -> str:
    """Return why the grouped kernels cannot serve a layer's (gate, up, down), empty if they can."""
    gate, up, down = weights[0]
    if (gate.in_features, gate.out_features) != (up.in_features, up.out_features) or (
        (down.in_features, down.out_features) != (gate.out_features, gate.in_features)
    ):
        return "gate, up and down do not lead from the hidden size to an inner one and back"
    shapes = [(w.in_features, w.out_features) for w in weights[0]]
    for number, expert in enumerate(weights):
        if [(w.in_features, w.out_features) for w in expert] != shapes:
            return f"expert {number} has other shapes than expert 0"
        for weight in expert:
            if weight.bias is not None:
                return f"expert {number} has a bias"
            if reason := rejects(weight, device_type):
                return f"expert {number}: {reason}"
    return ""


def build_table(weights: Sequence[tuple[Exl3Weight, Exl3Weight, Exl3Weight]], inner: int) -> ExpertTable:
    """Write a layer's table to its GPU.

    Raises
    ------
    ValueError
        If the kernels cannot serve these experts.
    RuntimeError
        Inside a graph capture, where nothing may be copied from the host.
    """
    device = weights[0][0].trellis.device
    if reason := rejects_experts(weights, device.type):
        raise ValueError(f"the grouped kernels cannot serve these experts: {reason}")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first grouped launch is inside a graph capture: run the layer once before capturing")
    rows = [
        [
            (w.trellis.data_ptr(), w.suh.data_ptr(), w.svh.data_ptr(), w.bits + 16 * CODEBOOKS.index(w.codebook))
            for w in expert
        ]
        for expert in weights
    ]
    with torch.inference_mode(False):
        stored = torch.tensor(rows, dtype=torch.int64, device=device)
    most_bits = max(w.bits for expert in weights for w in expert)
    return ExpertTable(stored=stored, weights=tuple(weights), inner=inner, most_bits=most_bits)


def grouped_decode(
    x_TH: torch.Tensor, ids_TS: torch.Tensor, scales_TS: torch.Tensor, table: ExpertTable
) -> torch.Tensor:
    """Serve few tokens: three launches, the work of an expert shared by up to eight of its pairs.

    Parameters
    ----------
    x_TH : Tensor
        float16, bfloat16 or float32 [T, H], H the padded hidden size.
    ids_TS : Tensor
        int64 [T, S], experts; a number that is none leaves the slot out.
    scales_TS : Tensor
        float16, bfloat16 or float32 [T, S].
    table : ExpertTable
        Of the same GPU.

    Returns
    -------
    Tensor
        [T, H] in the type of `x_TH`: the fp32 sum over slots of scale times the expert's rounded result.

    Raises
    ------
    ValueError
        If an operand is not as stated, or there are more than 65,535 pairs.
    RuntimeError
        If the kernels cannot be built, CUDA reports an error, or the first call of its kind is inside a graph capture.
    """
    x_TH, ids_TS, scales_TS = _prepare(x_TH, ids_TS, scales_TS, table)
    if ids_TS.numel() > MOST_BLOCKS:
        raise ValueError(f"{ids_TS.numel()} pairs of token and slot, grouped decode takes at most {MOST_BLOCKS}")
    return _serve(x_TH, ids_TS, scales_TS, table, row_groups=1, planned=False)


def grouped_prefill(
    x_TH: torch.Tensor, ids_TS: torch.Tensor, scales_TS: torch.Tensor, table: ExpertTable
) -> torch.Tensor:
    """Serve many tokens: five launches, the work of an expert shared by up to 8, 32 or 64 of its pairs.

    How many share depends on the average rows of an expert and does not reach the bits. Parameters, result and errors
    as in `grouped_decode`.
    """
    x_TH, ids_TS, scales_TS = _prepare(x_TH, ids_TS, scales_TS, table)
    groups = row_groups(ids_TS.numel(), len(table.weights), _most_row_groups(x_TH.device))
    return _serve(x_TH, ids_TS, scales_TS, table, row_groups=groups, planned=True)


def row_groups(pairs: int, experts: int, most: int = MOST_ROW_GROUPS) -> int:
    """Return how many groups of eight pairs share an item in prefill: 1, 4 or 8, at most `most`."""
    average = pairs / experts
    return min(most, next((groups for rows, groups in ROW_GROUPS_UP_TO if average <= rows), MOST_ROW_GROUPS))


def plan_items(ids_TS: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert and cut them into items, on the GPU.

    Parameters
    ----------
    ids_TS : Tensor
        int64 [T, S], contiguous on a GPU; numbers that are no expert are left out.
    experts, rows : int
        Experts of the layer, most pairs of an item.

    Returns
    -------
    order : Tensor
        int32 [T S], pairs (token S + slot) by expert, ascending within one; what follows the last is undefined.
    items : Tensor
        int32 [T S // rows + experts, 3]: expert, first place in `order`, count. Expert e's start at number
        (pairs of smaller experts) // rows + e; numbers between have count 0.
    """
    pairs, device = ids_TS.numel(), ids_TS.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    items = torch.empty(pairs // rows + experts, 3, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        load_library(device).call(
            "exl3_experts_plan", ids_TS.data_ptr(), pairs, experts, rows, len(items), order.data_ptr(),
            items.data_ptr(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    return order, items


@lru_cache(maxsize=16)
def _most_row_groups(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return MOST_ROW_GROUPS if memory >= SHARED_FOR_MOST else MOST_ROW_GROUPS // 2


def _prepare(
    x_TH: torch.Tensor, ids_TS: torch.Tensor, scales_TS: torch.Tensor, table: ExpertTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, hidden = table.stored.device, table.weights[0][0].in_features
    shape = (len(x_TH), ids_TS.shape[-1])
    for name, operand, expected, dtypes in (
        ("x", x_TH, (len(x_TH), hidden), tuple(DTYPES)),
        ("ids", ids_TS, shape, (torch.int64,)),
        ("scales", scales_TS, shape, tuple(DTYPES)),
    ):
        if operand.shape != expected or operand.dtype not in dtypes or operand.device != device or not operand.numel():
            raise ValueError(
                f"{name} is {operand.dtype} {tuple(operand.shape)} on {operand.device}, expected"
                f" {' or '.join(str(dtype) for dtype in dtypes)} {expected} on {device}, not empty"
            )
    suits = x_TH.stride(1) == 1 and x_TH.stride(0) % 8 == 0 and x_TH.data_ptr() % ALIGNMENT == 0
    x_TH = x_TH if suits else x_TH.clone(memory_format=torch.contiguous_format)
    return x_TH, ids_TS.contiguous(), scales_TS.contiguous()


def _serve(
    x_TH: torch.Tensor,
    ids_TS: torch.Tensor,
    scales_TS: torch.Tensor,
    table: ExpertTable,
    *,
    row_groups: int,
    planned: bool,
) -> torch.Tensor:
    device, dtype, experts = x_TH.device, x_TH.dtype, len(table.weights)
    require_primed(f"grouped {'prefill' if planned else 'decode'}", device, dtype, scales_TS.dtype, row_groups)
    library = load_library(device)
    (tokens, hidden), slots, pairs = x_TH.shape, ids_TS.shape[1], ids_TS.numel()
    padded_inner = table.weights[0][0].out_features
    units_hidden, units_inner = hidden // BLOCK, padded_inner // BLOCK
    teams = DECODE.teams(units_hidden * units_inner, multiprocessors(device))
    rows, bits = GROUP * row_groups, table.most_bits
    items = pairs // rows + experts if planned else pairs

    def scratch(count: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=kind, device=device)

    rotated_inner = scratch(items * rows * padded_inner, torch.float16)
    results = scratch(pairs * hidden, dtype)
    y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        stored, ids = table.stored.data_ptr(), ids_TS.data_ptr()
        x: tuple[int | None, int, int] = (x_TH.data_ptr(), DTYPES[dtype], x_TH.stride(0))
        plan: tuple[int | None, int | None] = (None, None)
        rotated = None
        if planned:
            order, listed = plan_items(ids_TS, experts, rows)
            plan = (order.data_ptr(), listed.data_ptr())
            rotated_rows = scratch(2 * items * rows * hidden, torch.float16)
            rotated = rotated_rows.data_ptr()
            library.call(
                "exl3_experts_rotate", stored, *plan, items, *x, slots, rotated, row_groups, hidden, stream
            )  # fmt: skip
            x = (None, DTYPES[dtype], 0)
        shared = (stored, ids, *plan, items, pairs, slots, experts)
        library.call(
            "exl3_experts", *shared, *x, rotated, rotated_inner.data_ptr(), table.inner, bits, 0, row_groups, hidden,
            padded_inner, teams, stream,
        )  # fmt: skip
        library.call(
            "exl3_experts", *shared, None, DTYPES[dtype], 0, rotated_inner.data_ptr(), results.data_ptr(), hidden, bits,
            1, row_groups, padded_inner, hidden, teams, stream,
        )  # fmt: skip
        library.call(
            "exl3_experts_combine", results.data_ptr(), DTYPES[dtype], ids, scales_TS.data_ptr(),
            DTYPES[scales_TS.dtype], y_TH.data_ptr(), tokens, slots, experts, hidden, stream,
        )  # fmt: skip
    return y_TH


@lru_cache(maxsize=256)
def check_grouped(device: torch.device, bits: int, codebook: str) -> None:
    """Compare every grouped kernel with the decode GEMM, itself checked, on one expert of a width and codebook.

    Raises
    ------
    RuntimeError
        If a result is off by more than rounding, or the first call is inside a graph capture.
    """
    check_kernels(device, bits, codebook)
    generator = torch.Generator().manual_seed(bits)
    shape = (BLOCK // TILE, BLOCK // TILE, TILE * bits)
    weight = Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16).to(device),
        suh=torch.full((BLOCK,), BLOCK**-0.5, dtype=torch.float16, device=device),
        svh=torch.ones(BLOCK, dtype=torch.float16, device=device),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
    )
    table = build_table([(weight, weight, weight)], BLOCK)
    x = torch.randn(3, BLOCK, generator=generator).to(device)
    call = (x, torch.zeros(3, 1, dtype=torch.int64, device=device), torch.ones(3, 1, device=device), table)
    inner = decode_gemm(x, weight, torch.float32)
    expected = decode_gemm(torch.nn.functional.silu(inner) * inner, weight, torch.float32)
    results = [_serve(*call, row_groups=1, planned=False)]
    results += [_serve(*call, row_groups=groups, planned=True) for groups in (1, 4, _most_row_groups(device))]
    for y in results:
        error = float((y - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            raise RuntimeError(
                f"the grouped {bits}-bit {codebook} kernels on {torch.cuda.get_device_name(device)} are wrong by"
                f" {error:.1e}, at most {TOLERANCE:.0e} is rounding"
            )

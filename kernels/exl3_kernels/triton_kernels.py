"""The kernels of the portable routes, in Triton: rotate rows, multiply by weights decoded on the fly, fold and rotate.

Importing this module needs Triton; with TRITON_INTERPRET=1 in the environment the kernels run on a CPU, one program
after the other. Shapes: M rows, k inputs, n outputs, K bits per weight, S segments of the sum; `words` is the trellis
as int32 [k/16, n/16, 8 K].
"""

from __future__ import annotations

import triton
import triton.language as tl

# How many rows of the weights a thread holds running in the operand that Triton prepares: a matter of speed alone.
OPERAND_RUN = 4 if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8) else 2
NORM = tl.constexpr(128**-0.5)
MCG, MUL1 = tl.constexpr(1), tl.constexpr(2)  # numbers of codebooks, as in `CODEBOOKS`


@triton.jit
def _hadamard(x, ROWS: tl.constexpr):
    """Multiply [ROWS, 128] by S: butterflies of stride 1, 2, ... 64, each stage turning the next bit to the front."""
    for _ in tl.static_range(7):
        first, second = tl.split(tl.reshape(x, (ROWS, 64, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, 128))
    return x * NORM


@triton.jit
def _value(state, CODEBOOK: tl.constexpr):
    """Return float16 values of uint32 states, see `codebook.codebook_values`; sums are exact before their rounding."""
    if CODEBOOK == MUL1:
        hashed = state * 0x83DCD12D
        pairs = (hashed & 0x00FF00FF) + ((hashed >> 8) & 0x00FF00FF)
        total = (pairs & 0xFFFF) + (pairs >> 16)
        number = (total | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2^23 + total has these bits
        return tl.fma(number, 1774.0 / 262144.0, -905216.0 / 262144.0).to(tl.float16)
    hashed = state * 0xCBAC1FED if CODEBOOK == MCG else state * 89226354 + 64248484
    word = (hashed & 0x8FFF8FFF) ^ 0x3B603B60
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low + high


@triton.jit
def _word(here, pitch, AHEAD: tl.constexpr, BITS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Load for every lane of DOWN x ACROSS tiles the word in which its first window starts, or one AHEAD of it."""
    lane, tile = tl.arange(0, 32 * DOWN * ACROSS) % 32, tl.arange(0, 32 * DOWN * ACROSS) // 32
    at = ((8 * lane + 1) * BITS - 16 + 256 * BITS) // 32 + AHEAD
    offset = (tile // ACROSS) * pitch + (tile % ACROSS) * (8 * BITS) + at % (8 * BITS)
    return tl.load(here + offset).to(tl.uint32, bitcast=True)


@triton.jit
def _decode(
    a,
    b,
    c,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Decode DOWN x ACROSS tiles from every lane's three words (c only above K = 4): float16 [16 DOWN, 16 ACROSS].

    Lane l of a tile holds positions 8 l to 8 l + 7. Their windows lie within 64 bits of the first one's start, all but
    the eighth at K = 7 and 8.

    A tile is what a warp holds of a tensor core's operand. Where neighbouring tiles belong to WARPS warps in turn and a
    thread holds RUN rows running, every weight stays in the thread that decoded it: the rows of the result lie where
    `_place` puts them, its columns are those that `_column` names. With WARPS = 1 and RUN = 2 that is their own order.
    """
    lane = tl.arange(0, 32 * DOWN * ACROSS) % 32
    skip = (((8 * lane + 1) * BITS - 16 + 256 * BITS) % 32).to(tl.uint64)
    a, b = a.to(tl.uint64), b.to(tl.uint64)
    stream = ((a << 32) | b) << skip
    if BITS > 4:
        c = c.to(tl.uint64)
        stream = stream | (c >> (32 - skip))
    w0 = _value((stream >> 48).to(tl.uint32), CODEBOOK)
    w1 = _value(((stream >> (48 - BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    w2 = _value(((stream >> (48 - 2 * BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    w3 = _value(((stream >> (48 - 3 * BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    w4 = _value(((stream >> (48 - 4 * BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    w5 = _value(((stream >> (48 - 5 * BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    w6 = _value(((stream >> (48 - 6 * BITS)) & 0xFFFF).to(tl.uint32), CODEBOOK)
    eighth = ((b << 32) | c) >> (80 - 7 * BITS - skip) if BITS > 6 else stream >> (48 - 7 * BITS)
    w7 = _value((eighth & 0xFFFF).to(tl.uint32), CODEBOOK)
    # Bits 0 and 1 of a slot are bits 0 and 3 of the weight's row, bit 2 is bit 3 of its column; bits 0 and 1 of a lane
    # are bits 1 and 2 of the row, the others the rest of the column.
    slots = tl.join(tl.join(tl.join(w0, w1), tl.join(w2, w3)), tl.join(tl.join(w4, w5), tl.join(w6, w7)))
    bits = tl.reshape(slots, (DOWN, ACROSS // WARPS, WARPS, 8, 4, 2, 2, 2))
    bits = tl.permute(bits, (0, 4, 6, 5, 1, 7, 2, 3) if RUN == 4 else (0, 6, 4, 5, 1, 7, 2, 3))
    return tl.reshape(bits, (16 * DOWN, 16 * ACROSS))


@triton.jit
def _place(row, RUN: tl.constexpr):
    """Return where a row of the weights lies: in runs of 2 where it is, in runs of 4 at its bits 0, 3, 1, 2."""
    return row // 16 * 16 + row % 2 + row // 8 % 2 * 2 + row // 2 % 4 * 4 if RUN == 4 else row


@triton.jit
def _column(place, WARPS: tl.constexpr):
    """Return which column of the weights lies at a place: its bit 3 is above the bits that name the tile's warp."""
    tile = place // (16 * WARPS) * WARPS + place // 8 % WARPS
    return tile * 16 + place // (8 * WARPS) % 2 * 8 + place % 8


@triton.jit(do_not_specialize=["rows", "stride"])
def rotate(x, stride, suh, rotated, rows, k, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Write RN16(RN16(x suh) H), float16 [M, k], placed as `_place` says; one program per ROWS rows and 128 columns."""
    blocks = k // 128
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks) * 128 + tl.arange(0, 128)[None, :]
    given = tl.load(x + row.to(tl.int64) * stride + column, mask=row < rows, other=0.0).to(tl.float32)
    scaled = (given * tl.load(suh + column).to(tl.float32)).to(tl.float16).to(tl.float32)
    turned = _hadamard(scaled, ROWS).to(tl.float16)
    tl.store(rotated + row.to(tl.int64) * k + _place(column, RUN), turned, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "segments"])
def multiply(
    words,
    rotated,
    partial,
    rows,
    k,
    n,
    segments,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ROWS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write the sums of one segment of k, fp32 [S, M, n]; one program per ROWS rows, segment and ACROSS tiles.

    `rotated` is from `rotate` with the same RUN. What a step needs is loaded while the tiles before it are decoded.
    """
    parts, steps, pitch = n // (16 * ACROSS), k // (16 * DOWN), (n // 16) * (8 * BITS)
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    segment, group = rest % segments, rest // segments
    row = group * ROWS + tl.arange(0, ROWS)[:, None]
    first, last = segment * steps // segments, (segment + 1) * steps // segments
    here = words + first.to(tl.int64) * DOWN * pitch + part * ACROSS * (8 * BITS)
    x = rotated + row.to(tl.int64) * k + first * (16 * DOWN) + tl.arange(0, 16 * DOWN)[None, :]
    a = _word(here, pitch, 0, BITS, DOWN, ACROSS)
    b = _word(here, pitch, 1, BITS, DOWN, ACROSS)
    c = _word(here, pitch, 2, BITS, DOWN, ACROSS) if BITS > 4 else b
    rows_here = tl.load(x, mask=row < rows, other=0.0)
    sums = tl.full((ROWS, 16 * ACROSS), 0.0, tl.float32)
    for step in range(first, last):
        more = tl.where(step + 1 < last, 1, 0)
        here += more * DOWN * pitch
        x += more * 16 * DOWN
        next_a = _word(here, pitch, 0, BITS, DOWN, ACROSS)
        next_b = _word(here, pitch, 1, BITS, DOWN, ACROSS)
        next_c = _word(here, pitch, 2, BITS, DOWN, ACROSS) if BITS > 4 else next_b
        next_rows = tl.load(x, mask=row < rows, other=0.0)
        sums = tl.dot(rows_here, _decode(a, b, c, BITS, CODEBOOK, DOWN, ACROSS, WARPS, RUN), sums)
        a, b, c, rows_here = next_a, next_b, next_c, next_rows
    column = part * (16 * ACROSS) + _column(tl.arange(0, 16 * ACROSS)[None, :], WARPS)
    tl.store(partial + (segment.to(tl.int64) * rows + row) * n + column, sums, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "stride", "segments"])
def fold(partial, svh, bias, y, stride, rows, n, segments, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Write RN((sum over segments, in order, H) svh + bias); one program per ROWS rows and 128 columns."""
    blocks = n // 128
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks) * 128 + tl.arange(0, 128)[None, :]
    here = partial + row.to(tl.int64) * n + column
    sums = tl.load(here, mask=row < rows, other=0.0)
    for _ in range(1, segments):
        here += rows.to(tl.int64) * n
        sums += tl.load(here, mask=row < rows, other=0.0)
    result = _hadamard(sums, ROWS) * tl.load(svh + column).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column).to(tl.float32)
    tl.store(y + row.to(tl.int64) * stride + column, result.to(y.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["first"])
def reconstruct(
    words,
    inner,
    n,
    first,
    width,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Write columns `first` on of the inner matrix, float16 [k, width]; one program per DOWN x ACROSS tiles."""
    parts, pitch = width // (16 * ACROSS), (n // 16) * (8 * BITS)
    down, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    here = words + down.to(tl.int64) * DOWN * pitch + (first // 16 + part * ACROSS) * (8 * BITS)
    row = down.to(tl.int64) * (16 * DOWN) + tl.arange(0, 16 * DOWN)[:, None]
    column = part * (16 * ACROSS) + tl.arange(0, 16 * ACROSS)[None, :]
    a = _word(here, pitch, 0, BITS, DOWN, ACROSS)
    b = _word(here, pitch, 1, BITS, DOWN, ACROSS)
    c = _word(here, pitch, 2, BITS, DOWN, ACROSS) if BITS > 4 else b
    tl.store(inner + row * width + column, _decode(a, b, c, BITS, CODEBOOK, DOWN, ACROSS, 1, 2))

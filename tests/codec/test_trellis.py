"""Bits, states, tile order, signs and the transform, each against its written definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.hadamard import hadamard_128, hadamard_epilogue, hadamard_half
from exl3_kernels.reconstruct import (
    dense_weight,
    dense_weight_fp16_staged,
    inner_weight,
    linear_reference,
    linear_rotated,
    linear_staged,
)
from exl3_kernels.trellis import (
    TILE_COLUMNS,
    TILE_ROWS,
    expand_signs,
    matrix_to_tiles,
    pack_states,
    tiles_to_matrix,
    unpack_states,
)
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight

CHECK_STATES = {
    1: ("6654 cca8 9951 32a3", "9872", "332a", 8519550),
    2: ("a268 89a3 268d 9a37", "332a", "689a", 8497705),
    3: ("f051 828d 146f a37b", "cde2", "9e0a", 8603813),
    4: ("37a3 7a37 a37b 37bf", "689a", "d37a", 8397218),
    5: ("1d46 a8de 1bdf 7bf2", "0352", "08ea", 7991042),
    6: ("968d a37b defc bf24", "9e0a", "3e5a", 8461294),
    7: ("e51b 8def f7e4 f246", "38c2", "73ca", 8491163),
    8: ("3a37 37bf bf24 2468", "d37a", "a93a", 8371775),
}


def as_int16(words: torch.Tensor) -> torch.Tensor:
    return (words - ((words & 0x8000) << 1)).to(torch.int16)


def random_trellis(bits: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return as_int16(torch.randint(65536, (*shape, 16 * bits), generator=generator))


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_of_the_check_pattern(bits):
    words = (0x1357 * torch.arange(16 * bits) + 0x2468) & 0xFFFF
    states = unpack_states(as_int16(words)[None, None])[0, 0]
    first, middle, last, total = CHECK_STATES[bits]
    assert [f"{int(state):04x}" for state in states[:4]] == first.split()
    assert f"{int(states[127]):04x}" == middle
    assert f"{int(states[255]):04x}" == last
    assert int(states.sum()) == total


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_equal_the_stream_definition(bits):
    """State p is the 16 stream bits that end with symbol p, the stream taken as a circle."""
    trellis = random_trellis(bits, 2, 3)
    words = [int(word) & 0xFFFF for word in trellis[1, 2]]
    stream = "".join(f"{words[i + 1]:016b}{words[i]:016b}" for i in range(0, len(words), 2))
    expected = [int((stream + stream)[end - 16 + len(stream) :][:16], 2) for end in range(bits, 256 * bits, bits)]
    states = unpack_states(trellis)
    assert states.dtype == torch.int32 and states.shape == (2, 3, 256)
    assert states[1, 2, :255].tolist() == expected
    assert states[1, 2, 255] == int(stream[-16:], 2)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_undoes_unpack(bits):
    trellis = random_trellis(bits, 3, 2)
    assert torch.equal(pack_states(unpack_states(trellis), bits), trellis)


@pytest.mark.parametrize("bits", range(1, 9))
def test_open_walk_is_refused(bits):
    states = unpack_states(random_trellis(bits, 1, 1))
    states[0, 0, 100] ^= 1 << bits
    with pytest.raises(ValueError, match="closed walk"):
        pack_states(states, bits)


def test_tile_order_impulses():
    """The first positions and the landmarks of the documented order, one impulse each."""
    documented = {0: (0, 0), 1: (1, 0), 2: (8, 0), 3: (9, 0), 4: (0, 8), 5: (1, 8), 6: (8, 8), 7: (9, 8)}
    documented |= {8: (2, 0), 24: (6, 0), 32: (0, 1), 255: (15, 15)}
    for position, place in documented.items():
        tiles = torch.zeros(2, 3, 256)
        tiles[1, 2, position] = 1
        assert tiles_to_matrix(tiles).nonzero().tolist() == [[16 + place[0], 32 + place[1]]]


def test_tile_order_is_a_permutation_equal_to_its_formula():
    for p in range(256):
        g, j = p >> 3, p & 7
        row, column = 2 * (g & 3) + (j & 1) + 8 * ((j >> 1) & 1), (g >> 2) + 8 * (j >> 2)
        assert (int(TILE_ROWS[p]), int(TILE_COLUMNS[p])) == (row, column)
    assert len(set(zip(TILE_ROWS.tolist(), TILE_COLUMNS.tolist(), strict=True))) == 256


@pytest.mark.parametrize("bits", range(1, 9))
def test_one_symbol_moves_the_weights_at_its_coordinates(bits):
    """Flip the lowest bit of symbol 40: the states of positions 40, 41, .. that still hold it change, no others."""
    states = unpack_states(random_trellis(bits, 1, 1))
    packed = pack_states(states, bits)
    flipped = packed.clone()
    stream_bit = 41 * bits - 1
    flipped[0, 0, 2 * (stream_bit // 32) + (stream_bit % 32 < 16)] ^= as_int16(
        torch.tensor(1 << (15 - stream_bit % 16))
    )
    moved = (tiles_to_matrix(unpack_states(flipped)) != tiles_to_matrix(states)).nonzero().tolist()
    expected = [[int(TILE_ROWS[p]), int(TILE_COLUMNS[p])] for p in range(40, 40 + math.ceil(16 / bits))]
    assert sorted(moved) == sorted(expected)


def test_matrix_and_tiles_are_inverse():
    matrix = torch.arange(48 * 32).view(48, 32)
    tiles = matrix_to_tiles(matrix)
    assert tiles.shape == (3, 2, 256)
    assert torch.equal(tiles_to_matrix(tiles), matrix)


def test_sign_words():
    words = torch.tensor([0b1000000000000001, 0, 0b10], dtype=torch.int32)
    signs = expand_signs(as_int16(words))
    assert signs.dtype == torch.float16 and signs.shape == (48,)
    assert (signs < 0).nonzero().flatten().tolist() == [0, 15, 33]
    assert bool((signs.abs() == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hadamard_impulse_gives_popcount_signs(dtype):
    signs = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=dtype)
    assert torch.equal(hadamard_128(torch.eye(128, dtype=dtype)), signs * 128**-0.5)


def test_hadamard_is_its_own_inverse_and_local_to_blocks():
    x = torch.randn(3, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard_128(hadamard_128(x)), x, rtol=0, atol=1e-14)
    x[:, 128:256] = 0
    assert bool((hadamard_128(x)[:, 128:256] == 0).all())


def test_half_transform_rounds_where_upstream_does():
    """Pre-scale in float16, float32 butterflies, float16 result, float16 post-scale; overflow stays visible."""
    generator = torch.Generator().manual_seed(1)
    x, scale = (torch.randn(4, 256, generator=generator).half(), torch.randn(256, generator=generator).half())
    rotated = hadamard_128((x * scale).float()).half()
    assert torch.equal(hadamard_half(x, pre_scale=scale), rotated)
    assert torch.equal(hadamard_half(x, post_scale=scale), hadamard_half(x) * scale)
    assert torch.equal(hadamard_epilogue(x.float(), scale), hadamard_half(x, post_scale=scale))
    assert bool(torch.isinf(hadamard_half(torch.full((1, 128), 60000.0).half())[0, 0]))


def linear(bits: int = 4, rows: int = 8, columns: int = 8) -> Exl3Weight:
    return Exl3Weight(
        trellis=random_trellis(bits, rows, columns),
        suh=torch.ones(rows * 16, dtype=torch.float16),
        svh=torch.ones(columns * 16, dtype=torch.float16),
        codebook="mcg",
        multiplier=MULTIPLIERS["mcg"],
    )


def test_rotated_product_rounds_rows_after_the_scale_and_after_the_rotation_only():
    generator = torch.Generator().manual_seed(2)
    weight = replace(linear(), suh=(0.1 + torch.rand(128, generator=generator)).half(), bias=torch.full((128,), 0.5))
    rows = torch.randn(5, 128, generator=generator)
    halves = rows.half()
    assert torch.equal(linear_rotated(halves, weight), linear_staged(halves, weight, accumulate=torch.float32))
    assert not torch.equal(linear_rotated(rows, weight), linear_rotated(halves, weight))
    rotated = hadamard_128((rows * weight.suh.float()).half().float()).half()
    exact = hadamard_128(rotated.double() @ inner_weight(weight).double()) + 0.5
    torch.testing.assert_close(linear_rotated(rows, weight).double(), exact, rtol=0, atol=1e-4)
    once = hadamard_128(hadamard_128((rows * weight.suh.float()).double()) @ inner_weight(weight).double()) + 0.5
    assert (linear_rotated(rows, weight) - once).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: codebook_values("2mad"), "'2mad' is not one of"),
        (lambda: codebook_values("mcg", -877912083), "unsigned 32-bit"),
        (lambda: unpack_states(torch.zeros(1, 1, 24, dtype=torch.int16)), "16 K"),
        (lambda: unpack_states(torch.zeros(1, 1, 144, dtype=torch.int16)), "16 K"),
        (lambda: unpack_states(torch.zeros(1, 1, 64, dtype=torch.int32)), "int16"),
        (lambda: pack_states(torch.zeros(1, 255), 4), "256"),
        (lambda: pack_states(torch.zeros(1, 256), 9), "9 bits"),
        (lambda: matrix_to_tiles(torch.zeros(16, 24)), "multiples of 16"),
        (lambda: expand_signs(torch.zeros(4)), "int16"),
        (lambda: hadamard_128(torch.zeros(2, 130)), "multiple of 128"),
        (lambda: hadamard_128(torch.zeros(2, 128).half()), "float32 or float64"),
        (lambda: dense_weight(linear(columns=4)), "128 x 64"),
        (lambda: dense_weight_fp16_staged(linear(), "E"), "'E'"),
        (lambda: linear_reference(torch.zeros(1, 127), linear()), "127 features"),
        (lambda: linear_staged(torch.zeros(1, 128), linear()), "float32"),
        (lambda: linear_rotated(torch.zeros(1, 64), linear()), "64 features"),
        (lambda: linear_staged(torch.zeros(1, 128).half(), linear(), out_dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

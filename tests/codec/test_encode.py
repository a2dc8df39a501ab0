"""The tile encoder: closed walks, lossless on valid walks, near the optimum, and as good as published figures."""

from __future__ import annotations

import pytest
import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.encode import _closed_walks, encode_tiles
from exl3_kernels.trellis import pack_states, unpack_states
from exl3_kernels.weight import CODEBOOKS

PAIRS = [(codebook, bits) for codebook in CODEBOOKS for bits in range(1, 9)]
RMS = {"3inst": 1.24371088, "mcg": 1.24371088, "mul1": 1.0}
# NMSE on unit Gaussian by K at the best source scale of a coarse grid (48 tiles; about 1.3 % sampling error).
PUBLISHED_NMSE = {
    "3inst": (0.27125, 0.06943, 0.01778, 0.004613, 0.001180, 0.000311, 0.000080, 0.000021),
    "mcg": (0.27078, 0.06881, 0.01747, 0.004538, 0.001167, 0.000303, 0.000080, 0.000021),
    "mul1": (0.27534, 0.06852, 0.01735, 0.004435, 0.001128, 0.000291, 0.000076, 0.000020),
}
PUBLISHED_SCALE = {
    "3inst": (1.05, 1.05, 0.92, 0.88, 0.88, 0.84, 0.84, 0.84),
    "mcg": (1.05, 0.96, 1.00, 0.88, 0.88, 0.88, 0.84, 0.84),
    "mul1": (1.05, 0.96, 0.92, 0.92, 0.92, 0.92, 0.88, 0.78),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors gain nothing from threads, and tests that run side by side lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decode(states: torch.Tensor, codebook: str) -> torch.Tensor:
    return codebook_values(codebook)[states.long()].double()


def gaussian_tiles(count: int, seed: int = 1) -> torch.Tensor:
    """Unit Gaussian tiles [count, 256] whose values are the quantiles (i + 1/2) / N in random order.

    With the exact tails a high-rate NMSE does not hang on whether a 4-sigma value was drawn.
    """
    size = count * 256
    quantiles = torch.special.ndtri((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    return quantiles[torch.randperm(size, generator=torch.Generator().manual_seed(seed))].float().view(count, 256)


def random_walks(count: int, bits: int) -> torch.Tensor:
    words = torch.randint(-32768, 32768, (1, count, 16 * bits), generator=torch.Generator().manual_seed(bits))
    return unpack_states(words.to(torch.int16))[0]


def is_closed(states: torch.Tensor, bits: int) -> bool:
    return torch.equal(states >> bits, states.roll(1, -1) & ((1 << (16 - bits)) - 1))


@pytest.mark.parametrize(("codebook", "bits"), PAIRS)
def test_a_valid_walk_is_encoded_without_loss(codebook, bits):
    walks = random_walks(2, bits)
    states = encode_tiles(decode(walks, codebook), bits, codebook)
    assert is_closed(states, bits)
    assert torch.equal(decode(states, codebook), decode(walks, codebook))


@pytest.mark.parametrize(("codebook", "bits"), PAIRS)
def test_walks_of_gaussian_tiles_are_closed_and_pack(codebook, bits):
    states = encode_tiles(gaussian_tiles(2, seed=bits), bits, codebook)
    assert states.dtype == torch.int32 and is_closed(states, bits)
    assert torch.equal(unpack_states(pack_states(states, bits)), states)


def check_nmse(codebook: str, bits: int) -> None:
    """At the published scale; from 6 bits also one grid step below, since saturated tails then decide the best one."""
    source = gaussian_tiles(32)
    scale = PUBLISHED_SCALE[codebook][bits - 1]
    errors = []
    for own in (scale, scale - 0.04) if bits >= 6 else (scale,):
        tiles = source * (own * RMS[codebook])
        decoded = decode(encode_tiles(tiles, bits, codebook), codebook)
        errors.append(float((decoded - tiles).square().sum() / tiles.double().square().sum()))
    assert min(errors) == pytest.approx(PUBLISHED_NMSE[codebook][bits - 1], rel=0.05)
    assert min(errors) > 4.0**-bits, "below the rate-distortion bound"


@pytest.mark.parametrize(("codebook", "bits"), [*(("mcg", bits) for bits in range(1, 9)), ("3inst", 4), ("mul1", 5)])
def test_nmse_is_within_5_percent_of_the_published_figure(codebook, bits):
    check_nmse(codebook, bits)


@pytest.mark.slow
@pytest.mark.parametrize(("codebook", "bits"), [pair for pair in PAIRS if pair[0] != "mcg"])
def test_nmse_is_within_5_percent_of_the_published_figure_for_the_other_codebooks(codebook, bits):
    check_nmse(codebook, bits)


def least_costs(tile: torch.Tensor, values: torch.Tensor, bits: int, start: torch.Tensor) -> torch.Tensor:
    """Least cost of reaching every node from the start costs [S, E], textbook Viterbi: [S, E]."""
    cost, by_source = start, values.view(65536 >> bits, 1 << bits)
    for target in tile:
        arrivals = cost.unsqueeze(-1) + (by_source - target) ** 2
        cost = arrivals.view(len(cost), 1 << bits, -1).amin(1)
    return cost


def test_closed_walk_is_nearly_the_best_of_all_closed_walks():
    """At 8 bits a closed walk may start in 256 nodes: solve each and take the best."""
    tile = gaussian_tiles(1) * RMS["mcg"] * 0.85
    values = codebook_values("mcg").float()
    start = torch.full((256, 256), torch.inf).fill_diagonal_(0)
    best = min(
        float(least_costs(tile[0], values, 8, start[node : node + 4]).diagonal(node).min()) for node in range(0, 256, 4)
    )
    cost = float((decode(encode_tiles(tile, 8, "mcg"), "mcg") - tile).square().sum())
    assert best * (1 - 1e-5) <= cost <= best * 1.01


@pytest.mark.parametrize(("codebook", "bits"), [("3inst", 2), ("mcg", 4), ("mul1", 6)])
def test_closing_the_walk_costs_no_more_than_its_bits(codebook, bits):
    """No closed walk beats the best free walk, and closing spends 16 - K of 256 K bits: a factor 4^((16-K)/256)."""
    tiles = gaussian_tiles(4) * RMS[codebook] * 0.85
    values = codebook_values(codebook).float()
    free = sum(float(least_costs(tile, values, bits, torch.zeros(1, 65536 >> bits)).min()) for tile in tiles)
    cost = float((decode(encode_tiles(tiles, bits, codebook), codebook) - tiles).square().sum())
    assert free * (1 - 1e-5) <= cost <= free * 4 ** ((16 - bits) / 256) * 1.02


def test_equal_costs_take_the_smallest_branch():
    """With every value 0 all walks cost the same, and the walk of smallest branches is all zeros."""
    bits = 4
    candidates, costs = torch.empty(2, 65536), torch.empty(257, 2, 65536 >> bits)
    states = _closed_walks(torch.ones(2, 256), bits, torch.zeros(65536), candidates, costs)
    assert not bool(states.any())


@pytest.mark.parametrize("bits", [4, 7])
def test_batch_and_repetition_do_not_change_the_walks(bits):
    tiles = gaussian_tiles(5)
    whole = encode_tiles(tiles, bits, "mcg")
    assert torch.equal(encode_tiles(tiles, bits, "mcg"), whole)
    for batch in (1, 3, 100):
        assert torch.equal(encode_tiles(tiles, bits, "mcg", batch=batch), whole)


def test_a_foreign_multiplier_is_encoded_with_its_own_values():
    multiplier = 0xFF7A83E5
    table = codebook_values("mcg", multiplier)
    walks = random_walks(2, 4)
    tiles = table[walks.long()].float()
    assert torch.equal(table[encode_tiles(tiles, 4, "mcg", multiplier).long()].float(), tiles)
    usual = decode(encode_tiles(tiles, 4, "mcg"), "mcg")
    assert float((usual - tiles).square().mean()) > 1e-3


def test_no_tiles():
    assert encode_tiles(torch.empty(0, 256), 4, "mcg").shape == (0, 256)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
def test_values_that_cannot_be_encoded_are_refused(value):
    tiles = torch.zeros(2, 256)
    tiles[1, 200] = value
    with pytest.raises(ValueError, match="not finite or exceeds"):
        encode_tiles(tiles, 4, "mcg")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode_tiles(torch.zeros(2, 255), 4, "mcg"), "255"),
        (lambda: encode_tiles(torch.zeros(2, 256, dtype=torch.int32), 4, "mcg"), "floating point"),
        (lambda: encode_tiles(torch.zeros(2, 256), 0, "mcg"), "0 bits"),
        (lambda: encode_tiles(torch.zeros(2, 256), 4, "mcg", batch=0), "batch is 0"),
        (lambda: encode_tiles(torch.zeros(2, 256), 4, "2mad"), "2mad"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

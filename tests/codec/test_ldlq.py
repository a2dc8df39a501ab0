"""Whole linears: what is stored decodes to the weight, error feedback helps, degenerate input stays finite."""

from __future__ import annotations

import pytest
import torch

from exl3_kernels.hadamard import hadamard_128
from exl3_kernels.ldlq import QuantizedLinear, _block_factor, quantize_linear, quantize_linears
from exl3_kernels.reconstruct import dense_weight, linear_reference
from exl3_kernels.regularise import TARGET_RMS, _scale_errors, regularise, sample_tiles, search_global_scale
from exl3_kernels.trellis import matrix_to_tiles
from exl3_kernels.weight import MULTIPLIERS

SIZE = 128


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors gain nothing from threads, and tests that run side by side lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixing(rank: int) -> torch.Tensor:
    """A map from white noise to correlated inputs: `rank` strong directions over a weak floor."""
    return 0.3 * torch.eye(SIZE) + gaussian(SIZE, rank, seed=2) @ gaussian(rank, SIZE, seed=3) / SIZE**0.5


WEIGHT = 0.02 * gaussian(SIZE, SIZE, seed=1)


def quantize(weight: torch.Tensor = WEIGHT, hessian: torch.Tensor | None = None, **options) -> QuantizedLinear:
    options = {"bits": 8, "codebook": "mcg", "seed": 5, "global_scale": 0.84} | options
    return quantize_linear(weight, hessian, **options)


def output_nmse(result: QuantizedLinear, weight: torch.Tensor, x: torch.Tensor) -> float:
    exact = x.double() @ weight.double()
    return float((linear_reference(x, result.weight) - exact).square().sum() / exact.square().sum())


@pytest.fixture(scope="module")
def plain() -> QuantizedLinear:
    return quantize()


def test_stored_tensors_decode_to_the_weight(plain):
    """8 bits and float16 scales: an NMSE of about 2e-5, which the proxy error without a Hessian equals."""
    weight = plain.weight
    assert (weight.bits, weight.in_features, weight.out_features) == (8, SIZE, SIZE)
    assert (weight.codebook, weight.multiplier) == ("mcg", MULTIPLIERS["mcg"])
    nmse = float((dense_weight(weight) - WEIGHT).square().sum() / WEIGHT.double().square().sum())
    assert 4.0**-8 < nmse < 4e-5
    assert nmse == pytest.approx(plain.proxy_error, rel=0.05)
    assert plain.fallback == "no Hessian" and plain.global_scale == 0.84
    assert float(weight.svh.double().abs().mean()) == pytest.approx(1, abs=1e-3)
    assert 0.4 < float((weight.suh > 0).float().mean()) < 0.6


def test_feedback_improves_the_true_output_error():
    """On fresh inputs of the calibration's covariance, not on the proxy alone."""
    mix = mixing(rank=6)
    x = gaussian(512, SIZE, seed=4) @ mix.T
    without = quantize(bits=4, global_scale=0.9)
    with_feedback = quantize(hessian=mix @ mix.T, bits=4, global_scale=0.9)
    assert with_feedback.fallback is None
    assert output_nmse(without, WEIGHT, x) == pytest.approx(4.5e-3, rel=0.15)
    assert output_nmse(with_feedback, WEIGHT, x) < 0.5 * output_nmse(without, WEIGHT, x)
    assert with_feedback.proxy_error < 0.5 * without.proxy_error
    elementwise = [float((dense_weight(r.weight) - WEIGHT).square().sum()) for r in (without, with_feedback)]
    assert elementwise[1] > elementwise[0], "feedback trades elementwise error for output error"


def test_feedback_uses_the_input_scales():
    """Rows of very different size: the second moments must be taken after suh, or feedback aims at the wrong inputs."""
    weight = (
        WEIGHT * torch.logspace(-1, 1, SIZE)[torch.randperm(SIZE, generator=torch.Generator().manual_seed(6))][:, None]
    )
    mix = mixing(rank=6)
    x = gaussian(512, SIZE, seed=4) @ mix.T
    errors = [output_nmse(quantize(weight, h), weight, x) for h in (None, mix @ mix.T)]
    assert errors[1] < 0.6 * errors[0]


def test_rank_one_hessian(plain):
    direction = gaussian(SIZE, 1, seed=7)
    result = quantize(hessian=direction @ direction.T)
    assert result.fallback is None
    assert bool(torch.isfinite(dense_weight(result.weight)).all())
    assert output_nmse(result, WEIGHT, direction.T) < 0.25 * output_nmse(plain, WEIGHT, direction.T)


def indefinite() -> torch.Tensor:
    hessian = torch.eye(SIZE)
    hessian[0, 1] = hessian[1, 0] = 1000
    return hessian


@pytest.mark.parametrize(
    ("hessian", "reason"),
    [
        (torch.zeros(SIZE, SIZE), "mean diagonal is below 1e-20"),
        (torch.eye(SIZE).index_fill(0, torch.tensor(3), torch.inf), "not finite"),
        (torch.eye(SIZE).index_fill(0, torch.tensor(3), torch.nan), "not finite"),
        (indefinite(), "not positive definite after 10 dampings"),
    ],
    ids=["zero", "inf", "nan", "indefinite"],
)
def test_unusable_hessian_falls_back_to_plain_encoding(plain, hessian, reason):
    result = quantize(hessian=hessian)
    assert reason in result.fallback
    assert torch.equal(result.weight.trellis, plain.weight.trellis)
    assert result.proxy_error == plain.proxy_error


def test_padding_and_zero_channels_decode_to_exact_zeros():
    """100 x 120 becomes 128 x 128; row 7 and column 11 hold zeros."""
    weight = WEIGHT[:100, :120].clone()
    weight[7], weight[:, 11] = 0, 0
    mix = mixing(rank=6)[:100]
    result = quantize(weight, mix @ mix.T)
    assert (result.weight.in_features, result.weight.out_features) == (128, 128)
    assert result.fallback is None
    dead_rows, dead_columns = (result.weight.suh == 0).nonzero(), (result.weight.svh == 0).nonzero()
    assert dead_rows.flatten().tolist() == [7, *range(100, 128)]
    assert dead_columns.flatten().tolist() == [11, *range(120, 128)]
    dense = dense_weight(result.weight)
    assert not bool(dense[dead_rows.flatten()].any()) and not bool(dense[:, dead_columns.flatten()].any())
    assert float((dense[:100, :120] - weight).square().sum() / weight.double().square().sum()) < 2e-4


@pytest.mark.parametrize("hessian", [None, torch.eye(SIZE)], ids=["no hessian", "identity"])
def test_zero_weight(hessian):
    result = quantize(torch.zeros(SIZE, SIZE), hessian, global_scale=None)
    assert not bool(dense_weight(result.weight).any())
    assert (result.proxy_error, result.global_scale) == (0.0, 1.0)


def test_company_does_not_change_a_linear():
    """Three linears, two bit widths, with and without a Hessian: encoded together and alone, bit for bit."""
    weights = [WEIGHT, 3 * gaussian(SIZE, 100, seed=8), WEIGHT]
    mix = mixing(rank=6)
    hessians, bits = [None, mix @ mix.T, mix @ mix.T], [8, 8, 7]
    options = {"codebook": "mul1", "seed": 5, "global_scale": 0.7}
    together = quantize_linears(weights, hessians, bits=bits, **options)
    assert [result.weight.bits for result in together] == bits
    for index in (1, 2):
        alone = quantize_linear(weights[index], hessians[index], bits=bits[index], **options)
        stored, expected = together[index].weight, alone.weight
        assert torch.equal(stored.trellis, expected.trellis)
        assert torch.equal(stored.suh, expected.suh) and torch.equal(stored.svh, expected.svh)
        assert together[index].proxy_error == alone.proxy_error


def test_output_scales_follow_the_option():
    """ "never" leaves signs; "auto" looks at how much the largest inputs hold."""
    outliers = torch.eye(SIZE)
    outliers[0, 0] = 1e6
    uneven = WEIGHT * torch.linspace(0.5, 2, SIZE)
    magnitudes = {
        name: quantize(uneven, hessian, out_scales=option).weight.svh.abs()
        for name, option, hessian in (
            ("never", "never", None),
            ("auto with outliers", "auto", outliers),
            ("auto without", "auto", torch.eye(SIZE)),
        )
    }
    assert bool((magnitudes["never"] == 1).all()) and bool((magnitudes["auto with outliers"] == 1).all())
    assert float(magnitudes["auto without"][-8:].mean() / magnitudes["auto without"][:8].mean()) > 3


def test_regularised_weight_is_the_weight():
    weight = gaussian(256, SIZE, seed=10) * torch.logspace(-2, 2, 256)[:, None]
    regular, su, sv = regularise(weight, balance_columns=True, seed=3)
    back = su[:, None] * hadamard_128(hadamard_128(regular).T).T * sv
    torch.testing.assert_close(back, weight, rtol=1e-4, atol=1e-4)
    assert float(regular.square().mean().sqrt()) == pytest.approx(TARGET_RMS, rel=1e-5)
    assert float(hadamard_128(regular.T).square().mean(1).sqrt().std()) < 1
    again = regularise(weight, balance_columns=True, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(again, (regular, su, sv), strict=True))
    assert not torch.equal(regularise(weight, balance_columns=True, seed=4)[1], su)


def test_block_factor_is_the_block_ldl_of_the_matrix():
    """(L + I) D (L + I)' with D block diagonal gives the matrix back, and L is strictly block lower."""
    root = gaussian(64, 64, seed=11).double()
    matrix = root @ root.T + torch.eye(64)
    cholesky = torch.linalg.cholesky(matrix)
    factor = _block_factor(cholesky)
    blocks = factor.view(4, 16, 4, 16)
    assert all(not bool(blocks[i, :, j].any()) for i in range(4) for j in range(i, 4))
    diagonal = torch.block_diag(*(cholesky[i : i + 16, i : i + 16] for i in range(0, 64, 16)))
    unit = factor + torch.eye(64)
    torch.testing.assert_close(unit @ diagonal @ diagonal.T @ unit.T, matrix)


def test_sample_tiles_meet_every_row_and_column_of_the_grid():
    rows, columns = 5, 11
    grid = torch.arange(rows * columns).view(rows, columns, 1).expand(-1, -1, 256).float()
    chosen = sample_tiles(grid)[:, 0].long()
    assert len(chosen.unique()) == len(chosen) < rows * columns
    assert set((chosen // columns).tolist()) == set(range(rows))
    assert set((chosen % columns).tolist()) == set(range(columns))
    assert {0, rows * columns - 1} <= set(chosen.tolist()), "the extremes of RMS belong to the sample"


@pytest.mark.parametrize(("codebook", "published"), [("mcg", 0.88), ("mul1", 0.92 / TARGET_RMS)])
def test_global_scale_search_finds_the_published_scale(codebook, published):
    """At 4 bits; mul1 has RMS 1, so its factor is smaller by 1.2437. The optimum is flat: 2 % of error over +-0.1."""
    regular = TARGET_RMS * gaussian(48, 48, seed=12)
    found = search_global_scale(regular, 4, codebook)
    assert found == pytest.approx(published, abs=0.1)
    at_found, at_published, far = _scale_errors(
        matrix_to_tiles(regular).flatten(0, 1), (found, published, published + 0.3), 4, codebook
    )
    assert at_found < 1.01 * at_published < far


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(WEIGHT.index_fill(0, torch.tensor(3), torch.inf)), "not finite"),
        (lambda: quantize(WEIGHT.index_fill(0, torch.tensor(3), torch.nan)), "not finite"),
        (lambda: quantize(hessian=torch.eye(64)), r"\(64, 64\)"),
        (lambda: quantize(1e9 * WEIGHT), "float16"),
        (lambda: quantize(out_scales="sometimes"), "sometimes"),
        (lambda: quantize(bits=9), "9 bits"),
        (lambda: quantize(codebook="2mad"), "2mad"),
        (
            lambda: quantize_linears([WEIGHT], [], bits=[4], codebook="mcg", seed=0),
            "1 weights, 0 Hessians and 1 bit widths",
        ),
        (
            lambda: quantize_linears(
                [WEIGHT, WEIGHT[:64]], [None, None], bits=[8, 8], codebook="mcg", seed=0, global_scale=1.0
            ),
            "different input widths",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Dispatch inside the op: ranges, counters, padding, and what tracing sees."""

import pytest
import torch

from exl3_kernels.linear import Exl3Linear, FusedExl3Linear, SummedExl3Linear, exl3_linear
from exl3_kernels.reconstruct import dense_weight
from exl3_kernels.routes import (
    ROUTES,
    Launch,
    Route,
    bucket_rows,
    parse_dispatch,
    read_launches,
    register_route,
    reset_launches,
    select_route,
)
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight

REFERENCE = "1-:reference"


def make_weight(k: int = 256, n: int = 128, bits: int = 4, codebook: str = "mcg", seed: int = 0) -> Exl3Weight:
    g = torch.Generator().manual_seed(seed)
    shape = (k // 16, n // 16, 16 * bits)
    return Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, shape, generator=g, dtype=torch.int16),
        suh=(torch.randn(k, generator=g) * 0.02).half(),
        svh=(1 + 0.1 * torch.randn(n, generator=g)).half(),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
        bias=torch.randn(n, generator=g).half(),
    )


@pytest.fixture
def probe():
    """A second route that returns a constant, so that a test sees which one ran."""
    route = Route(
        name="probe",
        doc="Constant.",
        rejects=lambda weight, rows, device: "K = 3" if weight.bits == 3 else "",
        run=lambda x, weight, dense, dtype: torch.full((x.shape[0], weight.out_features), 7.0, dtype=dtype),
    )
    register_route(route)
    yield route
    del ROUTES["probe"]
    parse_dispatch.cache_clear()


@pytest.mark.parametrize(
    ("dispatch", "reason"),
    [
        ("", "is not"),
        ("1-:nonsense", "unknown route 'nonsense'"),
        ("2-:reference", "must tile"),
        ("1-8:reference,10-:reference", "must tile"),
        ("1-8:reference,8-:reference", "must tile"),
        ("1-8:reference", "rows from 9 on are not served"),
        ("1-:reference,9-:reference", "must tile"),
        ("9-1:reference", "must tile"),
        ("1-8;reference", "is not"),
    ],
)
def test_malformed_dispatch_says_why(dispatch: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_dispatch(dispatch)


def test_the_row_count_selects_the_route(probe: Route) -> None:
    dispatch = "1-16:probe,17-:reference"
    assert [select_route(dispatch, rows).name for rows in (1, 16, 17, 5000)] == ["probe"] * 2 + ["reference"] * 2
    linear = Exl3Linear(make_weight(), dispatch=dispatch)
    assert (linear(torch.randn(16, 256)) == 7).all()
    assert (linear(torch.randn(17, 256)) != 7).all()


def test_launches_are_counted_by_route_rows_shape_bits_and_codebook(probe: Route) -> None:
    linear = Exl3Linear(make_weight(bits=5, codebook="mul1"), dispatch="1-2:probe,3-:reference")
    reset_launches()
    for rows in (1, 1, 3, 100, 128, 129):
        linear(torch.randn(rows, 256))
    assert read_launches() == {
        Launch("probe", 1, 256, 128, 5, "mul1"): 2,
        Launch("reference", 3, 256, 128, 5, "mul1"): 1,
        Launch("reference", 128, 256, 128, 5, "mul1"): 2,
        Launch("reference", 256, 256, 128, 5, "mul1"): 1,
    }


def test_buckets_keep_both_sides_of_a_threshold_apart() -> None:
    assert [bucket_rows(rows) for rows in (1, 5, 16, 17, 127, 128, 129)] == [1, 5, 16, 32, 128, 128, 256]


def test_no_rows_launch_nothing() -> None:
    linear = Exl3Linear(make_weight(), dispatch=REFERENCE)
    reset_launches()
    assert linear(torch.randn(2, 0, 256)).shape == (2, 0, 128)
    assert read_launches() == {}


def test_a_route_that_rejects_a_weight_is_refused_when_built(probe: Route) -> None:
    with pytest.raises(ValueError, match="route 'probe' rejects 1 rows: K = 3"):
        Exl3Linear(make_weight(bits=3), dispatch="1-:probe")


def test_reference_equals_the_dense_product() -> None:
    weight = make_weight()
    x = torch.randn(3, 5, 256)
    expected = x.double() @ dense_weight(weight, dtype=torch.float64) + weight.bias.double()
    seen = Exl3Linear(weight, dispatch=REFERENCE)(x).double()
    assert torch.allclose(seen, expected, rtol=0, atol=1e-5 * expected.abs().max())


def test_padding_is_invisible() -> None:
    """Inputs narrower than the trellis are zero-extended; padded outputs are cut, or kept on request."""
    weight = make_weight()
    linear = Exl3Linear(weight, dispatch=REFERENCE, in_features=200, out_features=100)
    x = torch.randn(4, 200)
    whole = Exl3Linear(weight, dispatch=REFERENCE)(torch.cat([x, torch.zeros(4, 56)], dim=1))
    assert torch.equal(linear(x), whole[:, :100])
    assert linear.forward_padded(x).shape == (4, 128)
    with pytest.raises(ValueError, match="the model expects 300 -> 128"):
        Exl3Linear(weight, dispatch=REFERENCE, in_features=300)


def test_fused_and_summed_parts() -> None:
    parts = [Exl3Linear(make_weight(seed=seed), dispatch=REFERENCE) for seed in (1, 2)]
    x = torch.randn(3, 256)
    assert torch.equal(FusedExl3Linear(parts)(x), torch.cat([part(x) for part in parts], dim=-1))
    wide = torch.randn(3, 512)
    summed = SummedExl3Linear(parts)(wide)
    assert torch.allclose(summed, parts[0](wide[:, :256]) + parts[1](wide[:, 256:]))


def test_the_op_is_opaque_to_tracing_and_keeps_its_branch(probe: Route) -> None:
    """A traced program must pick its route at run time, from the rows of that call."""
    linear = Exl3Linear(make_weight(), dispatch="1-4:probe,5-:reference")
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(linear, (torch.randn(8, 256),), dynamic_shapes=({0: rows},)).module()
    assert (program(torch.randn(3, 256)) == 7).all()
    assert (program(torch.randn(9, 256)) != 7).all()
    weight = make_weight()
    torch.library.opcheck(
        exl3_linear,
        (torch.randn(2, 256), weight.trellis, weight.suh, weight.svh, weight.bias, None)
        + ("mcg", weight.multiplier, REFERENCE, torch.float32),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_route_names_are_unique() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register_route(ROUTES["reference"])

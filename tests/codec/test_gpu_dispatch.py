"""The routes of NVIDIA GPUs as a CPU sees them: what they refuse, and how measured times become a dispatch."""

import pytest
import torch

from exl3_kernels import gpu_routes  # noqa: F401  registers the routes
from exl3_kernels.dispatch import (
    UNMEASURED,
    MeasuredShape,
    choose_dispatch,
    dispatch_for,
    parse_table,
    render_table,
    shipped_table,
)
from exl3_kernels.routes import ROUTES, parse_dispatch
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3_kernels.workspace import WORKSPACE_BYTES, slice_width

GPU_ROUTES = (
    "decode-gemm",
    "shared-decode",
    "wide-decode",
    "prefill-reconstruct",
    "prefill-fused",
    "prefill-half",
    "fp8-prefill",
    "fp8-prefill-tensor",
)


def make_weight(k=256, n=128, multiplier=MULTIPLIERS["mcg"], bias=None):
    return Exl3Weight(
        trellis=torch.zeros(k // 16, n // 16, 64, dtype=torch.int16),
        suh=torch.ones(k, dtype=torch.float16),
        svh=torch.ones(n, dtype=torch.float16),
        codebook="mcg",
        multiplier=multiplier,
        bias=bias,
    )


@pytest.mark.parametrize("name", GPU_ROUTES)
def test_every_gpu_route_gives_its_reasons(name):
    rejects = ROUTES[name].rejects
    assert "needs a CUDA device" in rejects(make_weight(), 1, "cpu")
    assert "not the usual one" in rejects(make_weight(multiplier=0xFF7A83E5), 1, "cuda")
    assert "multiple of 128" in rejects(make_weight(k=272), 1, "cuda")
    assert "bias is torch.float64" in rejects(make_weight(bias=torch.zeros(128, dtype=torch.float64)), 1, "cuda")
    assert "aligned" in rejects(make_weight(bias=torch.zeros(129)[1:]), 1, "cuda")
    assert rejects(make_weight(), 1, "cuda") == ""


def test_the_decode_gemm_refuses_more_rows_than_it_serves():
    assert ROUTES["decode-gemm"].rejects(make_weight(), 16, "cuda") == ""
    assert "17 rows" in ROUTES["decode-gemm"].rejects(make_weight(), 17, "cuda")
    assert ROUTES["shared-decode"].rejects(make_weight(), 17, "cuda") == ""


@pytest.mark.parametrize("name", GPU_ROUTES)
def test_a_gpu_route_refuses_cpu_operands(name):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        ROUTES[name].run(torch.zeros(2, 256, dtype=torch.float16), make_weight(), None, torch.float16)


def test_dispatch_follows_the_fastest_route_and_the_lower_row_count_decides():
    times = {
        1: {"decode-gemm": 10.0, "shared-decode": 10.0, "prefill-fused": 90.0},
        16: {"decode-gemm": 12.0, "shared-decode": 12.0, "prefill-fused": 90.0},
        32: {"shared-decode": 20.0, "prefill-fused": 90.0},
        128: {"shared-decode": 60.0, "prefill-fused": 95.0},
        256: {"shared-decode": 120.0, "prefill-fused": 100.0},
    }
    assert choose_dispatch(times) == "1-16:decode-gemm,17-128:shared-decode,129-:prefill-fused"


def test_a_route_is_kept_where_switching_saves_less_than_two_per_cent():
    times = {1: {"shared-decode": 10.0, "prefill-fused": 20.0}, 2: {"shared-decode": 10.1, "prefill-fused": 10.0}}
    assert choose_dispatch(times) == "1-:shared-decode"
    times[2]["shared-decode"] = 10.3
    assert choose_dispatch(times) == "1-1:shared-decode,2-:prefill-fused"


def test_a_table_survives_its_file_and_names_what_is_wrong_with_a_bad_one():
    shapes = (
        MeasuredShape(in_features=5120, out_features=17408, bits=5, dispatch="1-:shared-decode"),
        MeasuredShape(in_features=17408, out_features=5120, bits=5, dispatch="1-:prefill-fused"),
        MeasuredShape(in_features=2048, out_features=768, bits=4, dispatch="1-:prefill-reconstruct"),
    )
    content = render_table("Some GPU", shapes).encode()
    table = parse_table(content, where="here.toml")
    assert (table.gpu, table.shapes) == ("Some GPU", shapes)
    assert table.dispatch_for(5120, 16384, 6) == "1-:shared-decode"
    assert table.dispatch_for(17408, 5120, 5) == "1-:prefill-fused"
    assert table.dispatch_for(2048, 1024, 4) == "1-:prefill-reconstruct"
    assert table.sha256 != parse_table(content + b"\n", where="here.toml").sha256
    for bad in (b"", b"schema = 1", content.replace(b"bits", b"bats"), content.replace(b"/1", b"/2")):
        with pytest.raises(ValueError, match=r"here\.toml is not a dispatch table"):
            parse_table(bad, where="here.toml")


def test_shipped_tables_hold_valid_dispatches_and_an_unknown_gpu_gets_the_unmeasured_one():
    table = shipped_table("NVIDIA H200")
    assert table is not None
    for shape in table.shapes:
        ranges = parse_dispatch(shape.dispatch)
        for row_range in ranges:
            last = row_range.last or 1 << 20
            for rows in (row_range.first, last):
                assert ROUTES[row_range.route].rejects(make_weight(), rows, "cuda") == ""
    assert dispatch_for("NVIDIA H200", 5120, 17408, 5) == table.dispatch_for(5120, 17408, 5)
    assert dispatch_for("A GPU that nobody measured", 5120, 17408, 5) == UNMEASURED
    parse_dispatch(UNMEASURED)


@pytest.mark.parametrize("n", [128, 17408, 248320])
@pytest.mark.parametrize("k", [128, 5120, 17408])
def test_slices_are_whole_blocks_that_fit_the_workspace_and_are_about_equal(k, n):
    width = slice_width(k, n, 2)
    slices = -(-n // width)
    assert width % 128 == 0 and width * k * 2 <= WORKSPACE_BYTES
    assert (slices - 1) * width < n <= slices * width
    assert slices == 1 or width * k * 2 > WORKSPACE_BYTES / 2

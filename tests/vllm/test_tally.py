"""The tally counts what the op ran, apart by route, rows and shape."""

import pytest
import torch

from exl3_kernels.embedding import quantize_rows
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3_vllm import ops
from exl3_vllm.tally import Tally

DISPATCH = "1-4:fp16-staged,5-:reference"


@pytest.fixture
def tally(monkeypatch):
    fresh = Tally()
    monkeypatch.setattr(ops, "TALLY", fresh)
    return fresh


def part(bits, n, *, width=None, bias=False):
    generator = torch.Generator().manual_seed(bits)
    weight = Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, (8, n // 16, 16 * bits), generator=generator, dtype=torch.int16),
        suh=torch.randn(128, generator=generator).half(),
        svh=torch.randn(n, generator=generator).half(),
        codebook="mul1",
        multiplier=MULTIPLIERS["mul1"],
        bias=torch.randn(n, generator=generator).half() if bias else None,
    )
    return Exl3Linear(weight, dispatch=DISPATCH, in_features=100, out_features=width)


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_a_fused_op_has_the_bits_of_its_parts_and_counts_each(tally, rows):
    tally.start(torch.device("cpu"))
    parts = [part(3, 256, bias=True), part(5, 128, width=90, bias=True)]
    x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(rows))
    reset_launches()
    y = ops.fused_linear(x, parts, with_bias=True, out_dtype=torch.float32)
    assert read_launches() == tally.read()
    assert {launch.route for launch in tally.read()} == {"fp16-staged" if rows <= 4 else "reference"}
    assert sorted(tally.read().values()) == [1, 1]
    assert torch.equal(y, torch.cat([one(x) for one in parts], dim=-1))
    without = ops.fused_linear(x, parts, with_bias=False, out_dtype=torch.float32)
    torch.testing.assert_close(y - without, torch.cat([parts[0].bias, parts[1].bias[:90]]).expand(rows, -1).float())


def test_compiled_code_takes_the_branch_of_the_call_not_of_the_trace(tally):
    tally.start(torch.device("cpu"))
    parts = [part(2, 128)]
    compiled = torch.compile(
        lambda x: ops.fused_linear(x, parts, with_bias=False, out_dtype=x.dtype), backend="eager", dynamic=True
    )
    for rows in (40, 1, 40, 1):
        compiled(torch.ones(rows, 100))
    assert {(launch.route, launch.rows_bucket): count for launch, count in tally.read().items()} == {
        ("reference", 64): 2,
        ("fp16-staged", 1): 2,
    }


def test_the_overlay_is_counted_and_a_reset_keeps_the_counters_in_place(tally):
    tally.start(torch.device("cpu"))
    codes, scales = quantize_rows(torch.randn(32, 16))
    ids = torch.tensor([3, 5, 31])
    rows = ops.embedding_int8(codes, scales, ids, torch.bfloat16)
    assert rows.dtype == torch.bfloat16 and rows.shape == (3, 16)
    assert tally.read() == {Launch("int8-gather", 3, 32, 16, 8, "int8"): 1}
    address = tally._counts.data_ptr()
    tally.reset()
    tally.start(torch.device("cpu"))
    assert tally.read() == {} and tally._counts.data_ptr() == address


def test_nothing_is_counted_before_the_start(tally):
    ops.fused_linear(torch.ones(1, 100), [part(2, 128)], with_bias=False, out_dtype=torch.float32)
    assert not tally.started and tally.read() == {}


def test_op_is_well_formed(tally):
    parts = [part(2, 128)]
    arguments = (
        torch.ones(3, 100), [parts[0].trellis], [parts[0].suh], [parts[0].svh], [], [parts[0].dense], "mul1",
        [parts[0].multiplier], DISPATCH, [128], torch.float32,
    )  # fmt: skip
    torch.library.opcheck(ops._linear, arguments)

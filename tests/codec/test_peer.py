"""The adapter to exllamav3: arguments in its order, its int8 kernel never by accident, and a clear refusal without it.

The extension here is a fake with exllamav3's positional signatures that computes with the reference codec.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from exl3_kernels import peer
from exl3_kernels.hadamard import hadamard_128, hadamard_half
from exl3_kernels.reconstruct import dense_weight_fp16_staged, inner_weight, linear_reference, linear_staged
from exl3_kernels.routes import ROUTES, read_launches, reset_launches
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight

NAMES = ("exllamav3", "exllamav3-int8", "exllamav3-reconstruct", "exllamav3-fused")
SHAPE_INDEX, GEMV = 2, 90


def make_weight(k=128, n=256, bits=4, codebook="mcg", multiplier=None, bias=True):
    g = torch.Generator().manual_seed(bits)
    return Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=g, dtype=torch.int16),
        suh=(torch.randn(k, generator=g) * 0.02).half(),
        svh=(1 + 0.1 * torch.randn(n, generator=g)).half(),
        codebook=codebook,
        multiplier=multiplier or MULTIPLIERS[codebook],
        bias=torch.randn(n, generator=g).half() if bias else None,
    )


def rows_of(count, k=128, dtype=torch.float32):
    return torch.randn(count, k, generator=torch.Generator().manual_seed(count), dtype=torch.float32).to(dtype)


def expect(tensor, dtype, *shape):
    assert tensor.dtype in (dtype if isinstance(dtype, tuple) else (dtype,))
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()


class FakeExtension:
    """exllamav3_ext as the adapter sees it; `int8` is what EXL3_INT8_GEMV would have set."""

    def __init__(self, int8: bool = True) -> None:
        self.int8 = int8
        self.calls: list[str] = []

    def _weight(self, trellis, suh, svh, mcg, mul1):
        assert type(mcg) is bool and type(mul1) is bool and not (mcg and mul1)
        codebook = "mcg" if mcg else "mul1" if mul1 else "3inst"
        return Exl3Weight(trellis=trellis, suh=suh, svh=svh, codebook=codebook, multiplier=MULTIPLIERS[codebook])

    def exl3_gemm(self, a, b, c, suh, a_had, svh, force_shape_idx, mcg, mul1, force_num_sms, /):
        rows, k, n = a.shape[0], b.shape[0] * 16, b.shape[1] * 16
        expect(a, torch.float16, rows, k)
        expect(a_had, torch.float16, rows, k)
        expect(c, (torch.float16, torch.float32), rows, n)
        expect(suh, torch.float16, k)
        expect(svh, torch.float16, n)
        assert a_had.data_ptr() != a.data_ptr(), "the input would be destroyed"
        assert (force_shape_idx, force_num_sms) == (-1, 0)
        self.calls.append(f"gemm {rows}")
        weight = self._weight(b, suh, svh, mcg, mul1)
        a_had.copy_(hadamard_half(a, pre_scale=suh))
        if self.int8 and mul1 and rows <= 2 and n % 256 == 0 and weight.bits <= 6:
            step = a_had.float().abs().amax(dim=1, keepdim=True) / 127
            coarse = (a_had.float() / step).round() * step
            c.copy_(hadamard_128(coarse @ inner_weight(weight).float()) * svh.float())
            return 0
        c.copy_(linear_staged(a, weight, out_dtype=torch.float32))
        return GEMV if rows <= 8 and weight.bits <= 4 else SHAPE_INDEX

    def had_r_128(self, source, out, pre_scale, post_scale, scale, /):
        assert source.is_contiguous() and out.dtype == source.dtype and out.shape == source.shape
        assert pre_scale is None or post_scale is None, "post_scale would be ignored"
        assert scale == 1.0
        self.calls.append("had_r_128")
        x = source.float() if pre_scale is None else (source * pre_scale).float()
        y = hadamard_128(x)
        out.copy_(y if post_scale is None else y * post_scale.float())

    def reconstruct_slice(self, out, trellis, bits, mcg, mul1, first, /):
        weight = self._whole(out, trellis, bits, mcg, mul1, first)
        self.calls.append(f"reconstruct_slice {first}")
        out.copy_(inner_weight(weight)[:, first : first + out.shape[1]])

    def reconstruct_had_slice(self, out, trellis, suh, svh, bits, mcg, mul1, first, /):
        whole = self._whole(out, trellis, bits, mcg, mul1, first)
        assert len(svh) >= out.shape[1]
        self.calls.append(f"reconstruct_had_slice {first}")
        columns = slice(first // 16, (first + out.shape[1]) // 16)
        part = self._weight(trellis[:, columns].contiguous(), suh, svh[: out.shape[1]], mcg, mul1)
        assert part.bits == whole.bits
        out.copy_(dense_weight_fp16_staged(part, "F"))

    def _whole(self, out, trellis, bits, mcg, mul1, first):
        k, n = trellis.shape[0] * 16, trellis.shape[1] * 16
        expect(out, torch.float16, k, out.shape[1])
        assert first % 128 == 0 and first + out.shape[1] <= n and bits == trellis.shape[2] // 16
        return self._weight(trellis, torch.ones(k).half(), torch.ones(n).half(), mcg, mul1)

    def hgemm(self, a, b, c, /):
        assert a.dtype == b.dtype == torch.float16 and c.dtype in (torch.float16, torch.float32)
        assert a.is_contiguous() and b.is_contiguous() and c.stride(1) == 1 and c.stride(0) >= c.shape[1]
        self.calls.append("hgemm")
        c.copy_(a.float() @ b.float())


@pytest.fixture
def extension(monkeypatch):
    """Install a fake exllamav3 1.4.1."""
    fake = FakeExtension()
    package, module = ModuleType("exllamav3"), ModuleType("exllamav3.ext")
    package.__spec__ = ModuleSpec("exllamav3", None, is_package=True)
    package.__path__ = []
    module.exllamav3_ext = fake
    monkeypatch.setitem(sys.modules, "exllamav3", package)
    monkeypatch.setitem(sys.modules, "exllamav3.ext", module)
    monkeypatch.setattr(peer, "installed_version", lambda: "1.4.1+cu128")
    return fake


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", NAMES)
def test_without_exllamav3_every_route_is_registered_and_says_so(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "exllamav3", None)
    monkeypatch.setattr(peer.util, "find_spec", lambda package: None)
    assert ROUTES[name].rejects(make_weight(codebook="mul1"), 1, "cuda") == "exllamav3 is not installed"


def test_registering_the_routes_imports_nothing_of_exllamav3():
    assert not any(name.partition(".")[0] == "exllamav3" for name in sys.modules)


def test_reasons_for_what_exllamav3_cannot_serve(extension, monkeypatch):
    rejects = ROUTES["exllamav3"].rejects
    assert rejects(make_weight(), 1, "cuda") == ""
    assert "needs a CUDA device" in rejects(make_weight(), 1, "cpu")
    assert "not the usual one" in rejects(make_weight(multiplier=0xFF7A83E5), 1, "cuda")
    assert "multiple of 128" in rejects(make_weight(k=144), 1, "cuda")
    int8 = ROUTES["exllamav3-int8"].rejects
    assert int8(make_weight(codebook="mul1"), 2, "cuda") == ""
    assert "at most 2" in int8(make_weight(codebook="mul1"), 3, "cuda")
    assert "mul1, not mcg" in int8(make_weight(), 1, "cuda")
    assert "128 columns" in int8(make_weight(n=128, codebook="mul1"), 1, "cuda")
    assert "7 bits" in int8(make_weight(bits=7, codebook="mul1"), 1, "cuda")
    monkeypatch.setattr(peer, "installed_version", lambda: "1.3.9")
    assert "is 1.3.9, the route needs 1.4.0" in ROUTES["exllamav3-fused"].rejects(make_weight(), 1, "cuda")
    assert rejects(make_weight(), 1, "cuda") == ""


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["exllamav3", "exllamav3-reconstruct", "exllamav3-fused"])
def test_every_route_computes_the_linear(extension, name, out_dtype, codebook):
    weight, x = make_weight(codebook=codebook), rows_of(5)
    y = ROUTES[name].run(x, weight, None, out_dtype)
    assert y.dtype == out_dtype and y.shape == (5, 256)
    bound = 6e-3 if out_dtype == torch.bfloat16 else 2e-3
    assert relative_error(y, linear_reference(x.double(), weight)) < bound
    assert torch.equal(x, rows_of(5))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_int8_kernel_serves_no_row_of_the_plain_route(extension, rows):
    weight, x = make_weight(codebook="mul1", bias=False), rows_of(rows, dtype=torch.float16)
    exact = linear_reference(x.double(), weight)
    plain = ROUTES["exllamav3"].run(x, weight, None, torch.float32)
    assert extension.calls == ["gemm 3"] and plain.shape == (rows, 256)
    assert relative_error(plain, exact) < 1e-3
    if rows <= 2:
        int8 = ROUTES["exllamav3-int8"].run(x, weight, None, torch.float32)
        assert extension.calls[1:] == [f"gemm {rows}"]
        assert 3e-3 < relative_error(int8, exact) < 3e-2


def test_rows_of_other_codebooks_are_not_padded(extension):
    ROUTES["exllamav3"].run(rows_of(1), make_weight(), None, torch.float16)
    assert extension.calls == ["gemm 1"]


def test_a_kernel_other_than_the_one_named_is_an_error(extension):
    weight, x = make_weight(codebook="mul1"), rows_of(1)
    extension.int8 = False
    with pytest.raises(RuntimeError, match=r"kernel 90 instead of its int8 GEMV.*EXL3_INT8_GEMV"):
        ROUTES["exllamav3-int8"].run(x, weight, None, torch.float32)
    extension.exl3_gemm = lambda *arguments: 0
    with pytest.raises(RuntimeError, match="must not"):
        ROUTES["exllamav3"].run(x, weight, None, torch.float32)


@pytest.mark.parametrize("name", ["exllamav3-reconstruct", "exllamav3-fused"])
def test_wide_weights_are_taken_slice_by_slice(extension, monkeypatch, name):
    whole = ROUTES[name].run(rows_of(4), make_weight(n=384), None, torch.float32)
    extension.calls.clear()
    monkeypatch.setattr(peer, "SLICE_COLUMNS", 256)
    sliced = ROUTES[name].run(rows_of(4), make_weight(n=384), None, torch.float32)
    starts = [call.split()[1] for call in extension.calls if call.startswith("reconstruct")]
    assert starts == ["0", "256"]
    assert torch.allclose(sliced, whole, rtol=0, atol=1e-5)


def test_the_op_dispatches_to_a_peer_and_counts_it(extension):
    from exl3_kernels.linear import exl3_linear

    weight, x = make_weight(), rows_of(4)
    operands = (weight.trellis, weight.suh, weight.svh, weight.bias, None, weight.codebook, weight.multiplier)
    reset_launches()
    y = exl3_linear(x, *operands, "1-2:exllamav3,3-:exllamav3-reconstruct", torch.float32)
    assert relative_error(y, linear_reference(x.double(), weight)) < 2e-3
    assert [(launch.route, count) for launch, count in read_launches().items()] == [("exllamav3-reconstruct", 1)]

"""The CUDA kernels against the reference codec, on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from exl3_kernels import gpu_routes, selfcheck, workspace  # noqa: F401  registers the routes
from exl3_kernels.decode import decode_gemm, rejects_wide, shared_decode_gemm, wide_decode_gemm
from exl3_kernels.hadamard import hadamard_128, hadamard_half
from exl3_kernels.prefill import prefill_fp8, prefill_fused, prefill_half, prefill_reconstruct, weight_slices
from exl3_kernels.reconstruct import dense_weight, inner_weight, linear_reference
from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import CODEBOOKS, MULTIPLIERS, Exl3Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

SHAPES = [(1024, 768, 4, "mul1"), (5120, 1024, 5, "mcg"), (2048, 768, 6, "mcg"), (384, 256, 3, "3inst")]
ROWS = 300


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and rejects_wide(torch.device("cuda", 0)) != "", reason="not a Hopper GPU"
)
WIDE = pytest.param(wide_decode_gemm, marks=needs_hopper)
PREFILL = (prefill_reconstruct, prefill_half, prefill_fused, prefill_fp8)


def make_weight(k, n, bits, codebook, *, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def signed(size):
        return (torch.randint(0, 2, (size,), generator=g) * 2 - 1) * (0.5 + torch.rand(size, generator=g))

    return Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=g, dtype=torch.int16),
        suh=(signed(k) * k**-0.5).half(),
        svh=signed(n).half(),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
        bias=torch.randn(n, generator=g).half() if bias else None,
    )


def on_gpu(weight):
    tensors = {name: getattr(weight, name) for name in ("trellis", "suh", "svh", "bias")}
    moved = {name: None if tensor is None else tensor.cuda() for name, tensor in tensors.items()}
    return Exl3Weight(**moved, codebook=weight.codebook, multiplier=weight.multiplier)


def make_rows(rows, k, seed=5):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, k, generator=g) * torch.exp(torch.randn(rows, 1, generator=g))).half()


def relative(got, expected):
    return float((got.cpu().double() - expected).norm() / expected.norm())


def whole(weight, kind, **options):
    return torch.cat([part.clone() for _, part in weight_slices(weight, kind, **options)]).t().cpu()


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_reconstructed_inner_matrix_is_bit_exact(bits, codebook):
    weight = make_weight(256, 384, bits, codebook)
    assert torch.equal(whole(on_gpu(weight), "inner"), inner_weight(weight))


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_original_basis_is_the_rounded_float64_weight_without_a_gain(bits, codebook):
    weight = make_weight(1024, 1024, bits, codebook)
    expected, got = dense_weight(weight), whole(on_gpu(weight), "original")
    differ = (got != expected.half()).float().mean()
    gain = float((got.double() * expected).sum() / expected.square().sum() - 1)
    assert differ < 3e-4 and relative(got, expected) < 3e-4
    assert abs(gain) < 2e-6


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_transformed_side_is_the_rounded_float64_weight_without_a_gain(bits, codebook):
    weight = make_weight(1024, 1024, bits, codebook)
    inner = inner_weight(weight).double()
    sides = {
        "outputs": hadamard_128(inner) * weight.svh.double(),
        "inputs": hadamard_128(inner.T).T * weight.suh.double()[:, None],
    }
    for side, expected in sides.items():
        got = whole(on_gpu(weight), side)
        differ = (got != expected.half()).float().mean()
        gain = float((got.double() * expected).sum() / expected.square().sum() - 1)
        assert differ < 3e-4 and relative(got, expected) < 3e-4
        assert abs(gain) < 2e-6


@pytest.mark.parametrize("bits", [1, 4, 7])
def test_e4m3_weights_never_saturate(bits):
    weight = on_gpu(make_weight(256, 256, bits, "mcg"))
    norm = torch.stack((1 / weight.suh.abs().amax().float(), 1 / weight.svh.abs().amax().float()))
    eight = whole(weight, "e4m3", norm=norm).double() / norm.double().prod().cpu()
    assert relative(eight, dense_weight(on_cpu(weight))) < 0.035


def on_cpu(weight):
    tensors = {name: getattr(weight, name) for name in ("trellis", "suh", "svh", "bias")}
    moved = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
    return Exl3Weight(**moved, codebook=weight.codebook, multiplier=weight.multiplier)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_and_prefill_reconstruct_meet_the_staged_reference(shape):
    weight, x = make_weight(*shape), make_rows(ROWS, shape[0])
    rotated = hadamard_half(x, pre_scale=weight.suh).double()
    expected = hadamard_128(rotated @ inner_weight(weight).double()) * weight.svh.double() + weight.bias.double()
    assert relative(shared_decode_gemm(x.cuda(), on_gpu(weight), torch.float32), expected) < 1e-6
    assert relative(prefill_reconstruct(x.cuda(), on_gpu(weight), torch.float32), expected) < 5e-6


@pytest.mark.parametrize(
    ("route", "tolerance"),
    [
        pytest.param("wide-decode", 4e-4, marks=needs_hopper),
        ("prefill-reconstruct", 4e-4),
        ("prefill-fused", 4e-4),
        ("prefill-half", 5e-4),
        ("fp8-prefill", 0.05),
        ("fp8-prefill-tensor", 0.06),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_routes_meet_the_exact_product(route, tolerance, shape):
    weight, x = make_weight(*shape), make_rows(ROWS, shape[0])
    expected = linear_reference(x, weight)
    for out_dtype, rounding in ((torch.float32, 0.0), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)):
        for rows in (1, 129, ROWS):
            got = ROUTES[route].run(x[:rows].cuda(), on_gpu(weight), None, out_dtype)
            assert got.dtype == out_dtype
            assert relative(got, expected[:rows]) < tolerance + rounding


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_whatever_rows_it_travels_with(shape):
    weight, x = on_gpu(make_weight(*shape)), make_rows(ROWS, shape[0]).cuda()
    together = shared_decode_gemm(x, weight, torch.float32)
    for rows in (*range(1, 130), 144, 145, 256, 257):
        assert torch.equal(shared_decode_gemm(x[:rows], weight, torch.float32), together[:rows])
    for row in (0, 7, 8, 15, 16, 63, 64, 127, 128, ROWS - 1):
        assert torch.equal(decode_gemm(x[row : row + 1], weight, torch.float32)[0], together[row])


@needs_hopper
@pytest.mark.parametrize("shape", [*SHAPES, (256, 128, 8, "mcg")])
def test_a_row_has_the_same_bits_in_every_size_of_the_wide_gemm(shape):
    weight, x = on_gpu(make_weight(*shape)), make_rows(ROWS, shape[0]).cuda()
    together = wide_decode_gemm(x[:256], weight, torch.float32)
    for rows in (1, 16, 31, 32, 33, 64, 65, 127, 128, 129, 191, 192, 193, 255):
        assert torch.equal(wide_decode_gemm(x[:rows], weight, torch.float32), together[:rows])
    assert torch.equal(wide_decode_gemm(x, weight, torch.float32)[:150], together[:150])


@needs_hopper
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_wide_gemm_multiplies_by_the_exact_inner_matrix(bits, codebook):
    weight, x = make_weight(512, 384, bits, codebook, bias=False), make_rows(257, 512)
    rotated = hadamard_half(x, pre_scale=weight.suh).double()
    expected = hadamard_128(rotated @ inner_weight(weight).double()) * weight.svh.double()
    for rows in (1, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257):
        assert relative(wide_decode_gemm(x[:rows].cuda(), on_gpu(weight), torch.float32), expected[:rows]) < 5e-6


def test_outputs_are_the_rounded_fp32_result_and_repeats_are_identical():
    weight, x = on_gpu(make_weight(*SHAPES[0])), make_rows(20, SHAPES[0][0]).cuda()
    exact = shared_decode_gemm(x, weight, torch.float32)
    for out_dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(shared_decode_gemm(x, weight, out_dtype), exact.to(out_dtype))
    for _ in range(100):
        assert torch.equal(shared_decode_gemm(x, weight, torch.float32), exact)


@pytest.mark.parametrize(
    "linear", [shared_decode_gemm, WIDE, prefill_reconstruct, prefill_half, prefill_fused, prefill_fp8]
)
def test_strides_and_alignment_do_not_change_a_result(linear):
    weight, wide = on_gpu(make_weight(*SHAPES[0])), make_rows(40, SHAPES[0][0] + 3).cuda()
    odd = wide[:, 3:]
    assert torch.equal(linear(odd, weight, torch.bfloat16), linear(odd.contiguous(), weight, torch.bfloat16))
    turned = odd.t().contiguous().t()
    assert torch.equal(linear(turned, weight, torch.bfloat16), linear(odd.contiguous(), weight, torch.bfloat16))


@pytest.mark.parametrize("linear", PREFILL)
def test_slices_give_the_result_of_the_whole(linear, monkeypatch):
    shape = SHAPES[1]
    weight, x = on_gpu(make_weight(*shape)), make_rows(64, shape[0]).cuda()
    expected = linear(x, weight, torch.float32).cpu().double()
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 3 * 128 * shape[0] * 2)
    assert relative(linear(x, weight, torch.float32), expected) < 5e-6


@pytest.mark.parametrize(
    "linear", [shared_decode_gemm, WIDE, prefill_reconstruct, prefill_half, prefill_fused, prefill_fp8]
)
def test_a_replayed_graph_gives_the_eager_bits_on_new_inputs(linear):
    weight, x = on_gpu(make_weight(*SHAPES[0])), make_rows(400, SHAPES[0][0]).cuda()
    captured = x[:200].clone()
    linear(captured, weight, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(captured, weight, torch.bfloat16)
    captured.copy_(x[200:])
    graph.replay()
    assert torch.equal(y, linear(x[200:], weight, torch.bfloat16))


def test_the_first_launch_of_its_kind_inside_a_capture_fails_loudly():
    weight, x = on_gpu(make_weight(256, 128, 7, "3inst", bias=False)), make_rows(3, 256).cuda()
    with (
        pytest.raises(RuntimeError, match="first 7-bit 3inst prefill-fused launch is inside a graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        prefill_fused(x, weight, torch.bfloat16)


def test_two_streams_at_once_do_not_share_scratch():
    weight, x = on_gpu(make_weight(*SHAPES[1])), make_rows(ROWS, SHAPES[1][0]).cuda()
    for linear in (shared_decode_gemm, prefill_reconstruct, prefill_half, prefill_fused):
        expected = [linear(part, weight, torch.float32) for part in (x[:100], x[100:200])]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        got = []
        for _ in range(5):
            for stream, part in zip(streams, (x[:100], x[100:200]), strict=True):
                with torch.cuda.stream(stream):
                    got.append(linear(part, weight, torch.float32))
        torch.cuda.synchronize()
        for i, y in enumerate(got):
            assert torch.equal(y, expected[i % 2])


@pytest.mark.parametrize(
    "linear", [shared_decode_gemm, WIDE, prefill_reconstruct, prefill_half, prefill_fused, prefill_fp8]
)
def test_threads_on_one_stream_do_not_share_scratch(linear):
    """Found by a run: heads scored from several threads read each other's reconstructed weights."""
    weights = [on_gpu(make_weight(1024, 768, bits, "mcg", seed=bits)) for bits in (3, 4, 5, 6)]
    x = make_rows(ROWS, 1024).cuda()
    expected = [linear(x, weight, torch.float32) for weight in weights]
    with ThreadPoolExecutor(max_workers=len(weights)) as pool:
        got = list(pool.map(lambda i: linear(x, weights[i % 4], torch.float32), range(200)))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i % 4]) for i, y in enumerate(got))


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_self_check_passes_and_refuses_a_wrong_codebook(bits, codebook, monkeypatch):
    device = torch.device("cuda", 0)
    selfcheck.check_kernels.cache_clear()
    selfcheck.check_kernels(device, bits, codebook)
    selfcheck.check_kernels.cache_clear()
    monkeypatch.setattr(selfcheck, "inner_weight", lambda weight: -inner_weight(weight))
    with pytest.raises(RuntimeError, match="values wrong"):
        selfcheck.check_kernels(device, bits, codebook)
    selfcheck.check_kernels.cache_clear()


def test_the_workspace_is_allocated_once():
    weight, x = on_gpu(make_weight(*SHAPES[0])), make_rows(64, SHAPES[0][0]).cuda()
    prefill_reconstruct(x, weight, torch.float16)
    held = workspace.workspace_bytes()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    prefill_reconstruct(x, weight, torch.float16)
    assert workspace.workspace_bytes() == held > 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 4

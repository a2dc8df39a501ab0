"""The routes in Triton: where they serve, that they compile from Ampere to Blackwell, and their bits, interpreted."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl3_kernels import dispatch, portable, selfcheck
from exl3_kernels.dispatch import PORTABLE, UNMEASURED, dispatch_on, measured_on
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.portable import inner_slices, interpreted, rejects_triton, triton_decode, triton_reconstruct
from exl3_kernels.reconstruct import inner_weight, linear_rotated
from exl3_kernels.routes import ROUTES, parse_dispatch
from exl3_kernels.weight import CODEBOOKS, MULTIPLIERS
from exl3eval.doctor import _kernels
from exl3eval.kernel_check import samples
from exl3eval.kernel_check.finding import judge
from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import INTERPRETED, scope_of, subject_of
from exl3eval.kernel_check.suite import PROPERTIES
from exl3eval.variant import load_variant, resolve_variant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROUTE_NAMES = ("triton-decode", "triton-reconstruct")
GOLDEN = Path(__file__).parents[1] / "data" / "golden_small.safetensors"
on_a_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"))
compiles = pytest.mark.skipif(interpreted() or not portable.installed(), reason="needs Triton, not interpreted")


# ------------------------------------------------------------------------------------------------ where they serve
@pytest.mark.skipif(interpreted(), reason="a CPU serves them interpreted")
def test_a_cpu_and_other_devices_are_refused_with_what_to_do(monkeypatch):
    assert "TRITON_INTERPRET=1" in rejects_triton(make_weight(128, 128, 4, "mcg"), "cpu")
    assert "needs a CUDA device, the weight is on mps" in rejects_triton(make_weight(128, 128, 4, "mcg"), "mps")
    for name in ROUTE_NAMES:
        with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
            ROUTES[name].run(make_rows(1, 128), make_weight(128, 128, 4, "mcg"), None, torch.float32)
    monkeypatch.setattr(portable, "installed", lambda: False)
    assert "Triton is not installed" in rejects_triton(make_weight(128, 128, 4, "mcg"), "cuda")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (replace(make_weight(128, 128, 4, "mcg"), multiplier=MULTIPLIERS["mcg"] ^ 2), "not the usual one"),
        (make_weight(144, 128, 4, "mcg"), "not a multiple of 128"),
        (replace(make_weight(128, 128, 4, "mcg"), bias=torch.zeros(128, dtype=torch.int32)), "the bias is"),
    ],
)
def test_weights_that_no_kernel_serves_are_refused(weight, reason):
    assert reason in rejects_triton(weight, "cuda")


def test_they_serve_where_no_cuda_kernel_can_be_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(dispatch, "unavailable", lambda device: "nvcc is not on the PATH")
    assert dispatch_on(GPU, 5120, 17408, 5) == PORTABLE and measured_on(GPU) == "portable"
    base = resolve_variant(load_variant("base"), "cuda", measured=measured_on(GPU))
    assert base.linear == "measured:portable"
    monkeypatch.setattr(dispatch, "unavailable", lambda device: "")
    assert "decode-gemm" in dispatch_on(GPU, 5120, 17408, 5) and len(measured_on(GPU)) == 16
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU that nobody measured")
    assert dispatch_on(GPU, 5120, 17408, 5) == UNMEASURED and measured_on(GPU) == "unmeasured-gpu"
    assert measured_on(CPU) == ""


def test_the_variant_is_the_portable_dispatch():
    assert load_variant("triton").linear == PORTABLE
    assert {row_range.route for row_range in parse_dispatch(PORTABLE)} == set(ROUTE_NAMES)


def test_doctor_says_which_kernels_serve(monkeypatch):
    assert "reference codec" in _kernels().finding
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("exl3_kernels.cuda.unavailable", lambda device: "nvcc is not on the PATH")
    monkeypatch.setattr(portable, "installed", lambda: True)
    assert _kernels().ok and "Triton" in _kernels().finding and "nvcc" in _kernels().finding
    monkeypatch.setattr(portable, "installed", lambda: False)
    assert not _kernels().ok and "exl3eval[cuda]" in _kernels().finding
    monkeypatch.setattr("exl3_kernels.cuda.unavailable", lambda device: "")
    assert _kernels().ok and "compiled by nvcc" in _kernels().finding


@pytest.mark.skipif(interpreted(), reason="needs a process that has not imported Triton")
def test_importing_the_routes_does_not_import_triton():
    import subprocess

    code = "import exl3_kernels.linear, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------ they compile
SIGNATURES = {
    "rotate": {"x": "*bf16", "stride": "i32", "suh": "*fp16", "rotated": "*fp16", "rows": "i32", "k": "i32"},
    "multiply": {
        "words": "*i32",
        "rotated": "*fp16",
        "partial": "*fp32",
        "rows": "i32",
        "k": "i32",
        "n": "i32",
        "segments": "i32",
    },
    "fold": {
        "partial": "*fp32",
        "svh": "*fp16",
        "bias": "*fp16",
        "y": "*bf16",
        "stride": "i32",
        "rows": "i32",
        "n": "i32",
        "segments": "i32",
    },
    "reconstruct": {"words": "*i32", "inner": "*fp16", "n": "i32", "first": "i32", "width": "i32"},
}


def compiled(monkeypatch, folder, name, capability, bits=5, codebook="mcg", rows=16):
    """Compile a kernel as `portable` launches it, for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from exl3_kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 1)
    tiling = portable._tiling(GPU, rows)
    constants = {"ROWS": tiling.rows, "RUN": triton_kernels.OPERAND_RUN, "HAS_BIAS": True, "WARPS": tiling.warps}
    constants |= {"BITS": bits, "CODEBOOK": CODEBOOKS.index(codebook), "DOWN": tiling.down, "ACROSS": tiling.across}
    kernel, given = getattr(triton_kernels, name), SIGNATURES[name]
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    aligned = [at for at, kind in enumerate(given.values()) if kind.startswith("*")]
    aligned += [at for at, argument in enumerate(given) if argument in ("k", "n", "width")]
    source = ASTSource(
        fn=kernel,
        signature=given | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    options = {"num_warps": tiling.warps, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


@compiles
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("name", SIGNATURES)
def test_a_kernel_compiles(name, capability, monkeypatch, tmp_path):
    assert len(compiled(monkeypatch, tmp_path, name, capability, bits=8, codebook="mul1")["cubin"]) > 1000


@compiles
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_decoded_weights_stay_in_their_threads(bits, codebook, monkeypatch, tmp_path):
    """From packed words to the tensor core no weight passes through a shuffle or shared memory, only rows of x do."""
    asm = compiled(monkeypatch, tmp_path, "multiply", 90, bits, codebook, rows=32 if bits == 5 else 16)
    assert "mma.sync" in asm["ptx"] and "shfl" not in asm["ptx"]
    staged = [line for line in asm["ttgir"].splitlines() if "ttg.local_alloc" in line]
    assert len(staged) <= 1 and all(f"tensor<{32 if bits == 5 else 16}x64xf16" in line for line in staged)


@compiles
def test_every_step_of_the_tiling_divides_a_block(monkeypatch):
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 132)
    for tiling in (portable._tiling(GPU, 1), portable._tiling(GPU, 17), portable.INTERPRETED):
        assert 128 % (16 * tiling.down) == 0 and 128 % (16 * tiling.across) == 0 and tiling.across % tiling.warps == 0
    assert (portable._tiling(GPU, 16).rows, portable._tiling(GPU, 17).rows) == portable.DECODE_ROWS


# ------------------------------------------------------------------------------------------------ their bits
SMALL = replace(INTERPRETED, bits=(5,), shapes=((128, 128, 3, "3inst"),), typed_rows=(3,), repeats=1)
# `kernels check` has these too; the loop over experts is torch's, and tested with other routes.
LONG = (
    "every state",
    "launch contract",
    "repeats",
    "two processes",
    "together and alone",
    "combined and separate",
    "experts: relative error",
    "experts: one wrong weight is caught",
)


@pytest.mark.parametrize(
    "device", [pytest.param(CPU, marks=pytest.mark.interpreter), pytest.param(GPU, marks=on_a_gpu)]
)
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_weights_have_upstreams_bits_and_products_the_declared_arithmetic(bits, codebook, device):
    golden = load_file(GOLDEN)
    group = f"{codebook}.K{bits}"
    words, expected = golden[f"{group}.trellis"], golden[f"{group}.inner"]
    weight = samples.plain_weight(words[:8, :8].contiguous(), codebook, device)
    ((_, inner),) = inner_slices(weight)
    assert torch.equal(inner, inner_weight(weight))
    corner = inner[: expected.shape[0], : expected.shape[1]].cpu()
    assert torch.equal(corner.view(torch.int16), expected.view(torch.int16))
    scaled = make_weight(256, 128, bits, codebook, seed=bits, bias=torch.bfloat16, device=device)
    x = make_rows(70, 256, device=device).float() * 1.001
    declared = linear_rotated(x, scaled)
    for product in (triton_decode, triton_reconstruct):
        assert float((product(x, scaled, torch.float32) - declared).norm() / declared.norm()) < 1e-6


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ROUTE_NAMES)
@pytest.mark.parametrize("check", [p.check for p in PROPERTIES if p.name not in LONG])
def test_the_exactness_suite_passes(name, check):
    finding = judge(0, "", name, check(subject_of(ROUTES[name], CPU), SMALL))
    assert finding.status != "fail", finding


@pytest.mark.interpreter
def test_the_scope_of_the_command_is_the_interpreters():
    assert scope_of(CPU, quick=False) == INTERPRETED and scope_of(CPU, quick=True).bits == (1, 3, 8)


@pytest.mark.interpreter
def test_a_slice_of_the_workspace_is_whole_blocks(monkeypatch):
    weight = make_weight(128, 512, 4, "mcg", bias=torch.float16)
    expected = triton_reconstruct(make_rows(3, 128), weight, torch.float16)
    monkeypatch.setattr("exl3_kernels.workspace.WORKSPACE_BYTES", 2 * 128 * 128 * 2)
    assert [columns.stop - columns.start for columns, _ in inner_slices(weight)] == [256, 256]
    assert torch.equal(triton_reconstruct(make_rows(3, 128), weight, torch.float16), expected)


@pytest.mark.interpreter
def test_the_self_check_refuses_kernels_that_decode_wrong(monkeypatch):
    selfcheck.check_kernels.cache_clear()
    selfcheck.check_kernels(CPU, 3, "mcg", selfcheck.TRITON)
    selfcheck.check_kernels.cache_clear()
    monkeypatch.setattr(selfcheck, "inner_weight", lambda weight: -inner_weight(weight))
    with pytest.raises(RuntimeError, match=r"Triton kernel on this CPU decodes .* values wrong"):
        selfcheck.check_kernels(CPU, 3, "mcg", selfcheck.TRITON)
    monkeypatch.undo()
    wrong = replace(selfcheck.TRITON, decode=lambda x, weight, dtype: 1.001 * triton_decode(x, weight, dtype))
    with pytest.raises(RuntimeError, match="Triton decode GEMM on this CPU is wrong by"):
        selfcheck.check_kernels(CPU, 3, "mcg", wrong)
    selfcheck.check_kernels.cache_clear()


@pytest.mark.interpreter
def test_the_op_serves_and_counts_the_portable_dispatch():
    weight = make_weight(128, 256, 4, "mcg")
    linear = Exl3Linear(weight, dispatch=PORTABLE, in_features=100, out_features=250)
    x = torch.randn(2, 20, 100, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, 28))
    y = linear(x)
    assert y.shape == (2, 20, 250)
    assert torch.allclose(y, linear_rotated(padded, weight)[..., :250], rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@on_a_gpu[1]
def test_a_row_has_its_bits_beside_any_others_and_in_either_tiling():
    weight = make_weight(5120, 1024, 5, "mcg", bias=torch.float16, device=GPU)
    x = make_rows(64, 5120, device=GPU)
    whole = triton_decode(x, weight, torch.float32)
    for rows in range(1, 65):
        assert torch.equal(triton_decode(x[:rows], weight, torch.float32), whole[:rows]), rows
    for row in range(64):
        assert torch.equal(triton_decode(x[row : row + 1], weight, torch.float32), whole[row : row + 1]), row


@pytest.mark.gpu
@on_a_gpu[1]
@pytest.mark.parametrize("product", [triton_decode, triton_reconstruct])
def test_replay_has_the_eager_bits_and_the_first_call_in_a_capture_is_refused(product):
    weight = make_weight(1024, 768, 4, "mul1", bias=torch.float16, device=GPU)
    held, other = make_rows(5, 1024, device=GPU), make_rows(5, 1024, device=GPU, seed=9)
    expected = product(other, weight, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(held, weight, torch.bfloat16)
    held.copy_(other)
    graph.replay()
    assert torch.equal(captured, expected)
    never, x = make_weight(128, 128, 7, "3inst", bias=torch.float32, device=GPU), make_rows(1, 128, device=GPU).float()
    with (
        pytest.raises(RuntimeError, match=r"first 7-bit 3inst triton-.* launch is inside a graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        product(x, never, torch.float16)

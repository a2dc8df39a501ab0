"""The encoder and gather kernels: chosen openly, compiled without a warning, and equal to torch bit for bit."""

import subprocess

import pytest
import torch

from exl3_kernels import encode
from exl3_kernels.codebook import codebook_values
from exl3_kernels.cuda import FLAGS, SOURCES, find_nvcc
from exl3_kernels.embedding import Int8Embedding
from exl3_kernels.encode import choose_encoder, encode_tiles
from exl3_kernels.encode_cuda import encode_on_gpu, tiles_in_flight
from exl3_kernels.gather import gather_cuda, gather_int8, gather_plain, rejects
from exl3_kernels.trellis import unpack_states
from exl3_kernels.weight import CODEBOOKS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALE = {"3inst": 1.09, "mcg": 1.09, "mul1": 0.92}
FOREIGN = 0xFF7A83E5

nvcc = find_nvcc()
needs_nvcc = pytest.mark.skipif(nvcc is None, reason="nvcc is not on the PATH")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")


def on_gpu(test):
    return pytest.mark.gpu(no_gpu(test))


def gaussian(count, codebook, seed=0):
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * SCALE[codebook]


def random_walks(count, bits, codebook):
    """Values of closed walks: encoded without loss, so costs of 0 and ties are common."""
    words = torch.randint(-32768, 32768, (count, 16 * bits), generator=torch.Generator().manual_seed(bits))
    return codebook_values(codebook)[unpack_states(words.to(torch.int16)).long()].float()


def make_table(rows, width):
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    return Int8Embedding(table * torch.logspace(-6, 4, rows)[:, None], out_dtype=torch.float16)


# On any machine.


def test_the_cpu_is_served_by_torch_and_says_so():
    assert choose_encoder(CPU) == "torch"
    assert choose_encoder(CPU, "torch") == "torch"


@pytest.mark.parametrize("encoder", ["cuda", "fast"])
def test_an_encoder_that_cannot_run_is_refused_not_replaced(encoder):
    with pytest.raises((RuntimeError, ValueError), match=r"needs a CUDA device|not one of auto, cuda, torch"):
        encode_tiles(torch.zeros(1, 256), 4, "mcg", encoder=encoder)


@pytest.mark.parametrize(("reason", "expected"), [("", "cuda"), ("no nvcc", "torch")])
def test_auto_takes_the_kernel_exactly_where_it_can_run(monkeypatch, reason, expected):
    monkeypatch.setattr(encode, "unavailable", lambda device: reason)
    assert choose_encoder(GPU) == expected
    assert choose_encoder(GPU, "torch") == "torch"
    if reason:
        with pytest.raises(RuntimeError, match="no nvcc"):
            choose_encoder(GPU, "cuda")


@pytest.mark.parametrize(
    ("free_gib", "bits", "expected"), [(130, 4, 8 * 132), (10, 4, 5 * 132), (40, 1, 2 * 132), (10, 1, 95), (0, 4, 1)]
)
def test_tiles_in_flight_are_whole_waves_in_a_share_of_the_memory(monkeypatch, free_gib, bits, expected):
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib << 30, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert tiles_in_flight(65536 >> bits, GPU) == expected


def test_the_gather_kernel_says_what_it_cannot_serve():
    embedding = make_table(10, 16)
    assert "needs a CUDA device" in rejects(embedding.codes, embedding.scales, torch.tensor([1]), torch.float16)


def test_the_gather_is_one_opaque_op():
    embedding = make_table(50, 12)
    ids = torch.tensor([[3, -1, 49], [0, 3, 7]])
    arguments = (embedding.codes, embedding.scales, ids, torch.bfloat16)
    torch.library.opcheck(gather_int8, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(gather_int8(*arguments), gather_plain(*arguments))


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("source", ["gather.cu", pytest.param("encode.cu", marks=pytest.mark.slow)])
def test_the_sources_compile_without_a_warning(source, architecture, tmp_path):
    command = [nvcc, *FLAGS, "-Werror", "all-warnings", f"-arch={architecture}", "-c", str(SOURCES / source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "unit.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# On a GPU.


@on_gpu
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_kernel_finds_the_states_of_the_torch_encoder(bits, codebook):
    tiles = torch.cat((gaussian(300, codebook, bits), random_walks(20, bits, codebook))).to(GPU)
    expected = encode_tiles(tiles, bits, codebook, encoder="torch")
    assert torch.equal(encode_tiles(tiles, bits, codebook, encoder="cuda"), expected)


@on_gpu
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_kernel_finds_the_states_of_the_cpu(bits):
    tiles = gaussian(2, "mcg", bits)
    assert torch.equal(encode_tiles(tiles.to(GPU), bits, "mcg", encoder="cuda").cpu(), encode_tiles(tiles, bits, "mcg"))


@on_gpu
@pytest.mark.parametrize("bits", range(1, 9))
def test_ties_and_extremes_agree_too(bits):
    kinds = [torch.full((256,), value) for value in (0.0, -0.0, 1.0, -3.5, 1e6, -1e6, 1e-40, 0.125)]
    steps = torch.linspace(-4, 4, 256)
    tiles = torch.stack([*kinds, steps, steps.round(), steps.sign(), steps * 1e5]).to(GPU)
    for codebook in CODEBOOKS:
        expected = encode_tiles(tiles, bits, codebook, encoder="torch")
        assert torch.equal(encode_tiles(tiles, bits, codebook, encoder="cuda"), expected)


@on_gpu
@pytest.mark.parametrize("bits", range(1, 9))
def test_of_equal_costs_the_smallest_branch_wins(bits):
    """With every value 0 all walks cost the same, and the walk of smallest branches is all zeros."""
    values = torch.zeros(65536, dtype=torch.float16, device=GPU)
    assert not encode_on_gpu(torch.ones(3, 256, device=GPU), values, bits).any()


@on_gpu
def test_a_foreign_multiplier_is_encoded_with_its_own_values():
    tiles = gaussian(40, "mcg").to(GPU)
    kernel, plain = (encode_tiles(tiles, 4, "mcg", FOREIGN, encoder=encoder) for encoder in ("cuda", "torch"))
    assert torch.equal(kernel, plain)
    assert not torch.equal(kernel, encode_tiles(tiles, 4, "mcg", encoder="cuda"))


@on_gpu
@pytest.mark.parametrize("bits", [2, 4, 7])
def test_batch_layout_and_repetition_do_not_change_the_walks(bits):
    tiles = gaussian(150, "mcg").to(GPU)
    whole = encode_tiles(tiles, bits, "mcg", encoder="cuda")
    for batch in (1, 7, 149, 1000):
        assert torch.equal(encode_tiles(tiles, bits, "mcg", batch=batch, encoder="cuda"), whole)
    assert torch.equal(encode_tiles(tiles.t().contiguous().t(), bits, "mcg", encoder="cuda"), whole)
    for _ in range(20):
        assert torch.equal(encode_tiles(tiles, bits, "mcg", encoder="cuda"), whole)


@on_gpu
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 6, 24, 2048])
def test_gathered_rows_have_the_bits_of_the_cpu(width, out_dtype):
    embedding = make_table(300, width)
    codes, scales = embedding.codes.to(GPU), embedding.scales.to(GPU)
    draw = torch.randint(-300, 300, (2, 3, 50), generator=torch.Generator().manual_seed(1))
    for ids in (draw, draw[0, 0, :1], draw[0, 0, 0], draw.transpose(0, 2), draw[:0], draw.int()):
        assert rejects(codes, scales, ids.to(GPU), out_dtype) == ""
        expected = gather_plain(embedding.codes, embedding.scales, ids, out_dtype)
        got = gather_cuda(codes, scales, ids.to(GPU), out_dtype)
        assert got.shape == expected.shape and torch.equal(got.cpu(), expected)
        assert torch.equal(gather_int8(codes, scales, ids.to(GPU), out_dtype), got)


@on_gpu
def test_the_embedding_module_compiles_whole_and_replays_in_a_graph():
    embedding = make_table(300, 2048).to(GPU)
    ids = torch.arange(16, device=GPU)
    expected = embedding(ids + 7)
    assert torch.equal(torch.compile(embedding, fullgraph=True, backend="eager")(ids + 7), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = embedding(ids)
    ids += 7
    graph.replay()
    assert torch.equal(out, expected)

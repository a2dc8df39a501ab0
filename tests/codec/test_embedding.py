"""The int8 embedding overlay: its arithmetic, its edges, and how much memory making it takes."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exl3_kernels.embedding import CHUNK_ROWS, Int8Embedding, quantize_rows


def _table(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)).to(dtype)


def test_codes_are_the_rounded_quotients_of_each_row() -> None:
    table = _table(5000, 64)
    codes, scales = quantize_rows(table)
    for row in (0, 1, 4095, 4096, 4999):
        scale = table[row].float().abs().max() / 127
        assert scales[row] == scale
        assert torch.equal(codes[row].float(), torch.round(table[row].float() / scale))
        assert codes[row].abs().max() == 127


def test_error_is_at_most_half_a_step() -> None:
    table = _table(600, 128)
    embedding = Int8Embedding(table, out_dtype=torch.float32)
    error = (embedding(torch.arange(600)) - table.float()).abs()
    assert (error <= 0.5001 * embedding.scales[:, None]).all()
    assert error.max() > 0.4 * embedding.scales.max()


def test_chunks_do_not_change_a_row() -> None:
    table = _table(CHUNK_ROWS + 3, 16)
    whole, alone = quantize_rows(table), quantize_rows(table[CHUNK_ROWS:])
    assert torch.equal(whole[0][CHUNK_ROWS:], alone[0])
    assert torch.equal(whole[1][CHUNK_ROWS:], alone[1])


def test_zero_rows_stay_zero() -> None:
    table = _table(10, 32)
    table[3] = 0
    embedding = Int8Embedding(table, out_dtype=torch.bfloat16)
    assert embedding.scales[3] == 0
    assert (embedding(torch.tensor([3])) == 0).all()
    assert (embedding(torch.tensor([4])) != 0).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_are_refused_by_number(value: float) -> None:
    table = _table(CHUNK_ROWS + 10, 8)
    table[5, 3] = table[CHUNK_ROWS + 4, 0] = value
    with pytest.raises(
        ValueError, match=rf"2 embedding rows hold non-finite values, first at rows \[5, {CHUNK_ROWS + 4}\]"
    ):
        quantize_rows(table)


def test_gathers_any_shape_of_ids_with_one_rounding() -> None:
    table = _table(100, 24)
    embedding = Int8Embedding(table, out_dtype=torch.bfloat16)
    ids = torch.tensor([[1, 7, 7], [99, 0, 3]])
    rows = embedding(ids)
    assert rows.shape == (2, 3, 24)
    expected = (embedding.codes[ids].float() * embedding.scales[ids][..., None]).bfloat16()
    assert torch.equal(rows, expected)


def test_it_halves_a_16_bit_table() -> None:
    table = _table(1000, 256)
    stored = table.numel() * table.element_size()
    assert 0.5 <= Int8Embedding(table, out_dtype=torch.float32).num_bytes / stored < 0.51


class _PeakBytes(TorchDispatchMode):
    """Tracks bytes of live tensors made inside, `known` excepted."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = known.untyped_storage().data_ptr()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            key = storage.data_ptr()
            if key not in self.live and key != self.known:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key, None)
            self.peak = max(self.peak, sum(self.live.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_extra_memory_is_under_two_chunks(dtype: torch.dtype) -> None:
    """Beyond input and output, at most two FP32 chunks of 4,096 rows are alive, however long the table."""
    table = _table(8 * CHUNK_ROWS, 64, dtype)
    with _PeakBytes(table) as tracker:
        codes, scales = quantize_rows(table)
    kept = codes.numel() + 4 * scales.numel()
    chunk = CHUNK_ROWS * 64 * 4
    assert kept + chunk <= tracker.peak < kept + 2 * chunk

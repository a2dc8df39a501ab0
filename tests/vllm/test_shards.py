"""A rank's shard is the same columns and rows of the whole matrix, for every cut that is not refused."""

import pytest
import torch

from exl3_kernels.reconstruct import dense_weight
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3_vllm.shards import Shard, columns_of, group_widths, window
from exl3_vllm.stored import StoredLinear, find_linears


def stored_linear(k, n, bits=3):
    return StoredLinear(key="layers.0.q_proj", in_features=k, out_features=n, bits=bits, codebook="mcg", has_bias=False)


def random_tensors(stored):
    generator = torch.Generator().manual_seed(7)
    k, n, bits = stored.in_features, stored.out_features, stored.bits
    return {
        "trellis": torch.randint(
            -(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=generator, dtype=torch.int16
        ),
        "suh": torch.randn(k, generator=generator).half(),
        "svh": torch.randn(n, generator=generator).half(),
    }


def dense(tensors):
    weight = Exl3Weight(**tensors, codebook="mcg", multiplier=MULTIPLIERS["mcg"])
    return dense_weight(weight, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_shards_are_columns_of_the_whole(ranks):
    stored = stored_linear(256, 512)
    tensors = random_tensors(stored)
    whole, width = dense(tensors), 512 // ranks
    for rank in range(ranks):
        shard = Shard(
            stored=stored,
            rows=window(256, 256, rank, 1, "in"),
            columns=columns_of(512, [width], rank, ranks, "out"),
            in_width=256,
            out_width=width,
        )
        part = {suffix: shard.cut(suffix, tensor) for suffix, tensor in tensors.items()}
        assert {suffix: tuple(tensor.shape) for suffix, tensor in part.items()} == shard.shapes
        assert torch.equal(dense(part), whole[:, rank * width : (rank + 1) * width])


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_shards_sum_to_the_whole_product(ranks):
    stored = stored_linear(512, 256)
    tensors = random_tensors(stored)
    width = 512 // ranks
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = torch.zeros(3, 256, dtype=torch.float64)
    for rank in range(ranks):
        rows = window(512, width, rank, ranks, "in")
        shard = Shard(stored=stored, rows=rows, columns=(slice(0, 256),), in_width=width, out_width=256)
        part = {suffix: shard.cut(suffix, tensor) for suffix, tensor in tensors.items()}
        assert torch.equal(dense(part), dense(tensors)[rows])
        total += x[:, rows] @ dense(part)
    torch.testing.assert_close(total, x @ dense(tensors), rtol=1e-12, atol=1e-9)


def test_neighbouring_ranks_share_a_kv_head_when_there_are_fewer_heads_than_ranks():
    assert [window(256, 128, rank, 4, "k") for rank in range(4)] == [slice(0, 128)] * 2 + [slice(128, 256)] * 2
    assert [window(128, 128, rank, 4, "k") for rank in range(4)] == [slice(0, 128)] * 4


def test_a_linear_that_provides_several_outputs_is_cut_in_each():
    stored = stored_linear(128, 1024)
    tensors = random_tensors(stored)
    columns = columns_of(1024, [128, 128, 256], 1, 2, "in_proj_qkv")
    assert columns == (slice(128, 256), slice(384, 512), slice(768, 1024))
    shard = Shard(stored=stored, rows=slice(0, 128), columns=columns, in_width=128, out_width=512)
    part = {suffix: shard.cut(suffix, tensor) for suffix, tensor in tensors.items()}
    assert torch.equal(dense(part), torch.cat([dense(tensors)[:, piece] for piece in columns], dim=1))


@pytest.mark.parametrize(
    ("stored", "width", "ranks", "reason"),
    [
        (384, 192, 2, "not a multiple of 128"),
        (128, 64, 2, "not a multiple of 128"),
        (384, 256, 2, "do not divide"),
        (1024, 128, 4, "do not divide"),
        (768, 256, 4, "do not divide"),
        (512, 256, 1, "are stored"),
        (256, 384, 1, "are stored"),
    ],
)
def test_what_does_not_fit_whole_blocks_is_refused(stored, width, ranks, reason):
    with pytest.raises(ValueError, match=reason):
        window(stored, width, 0, ranks, "x")


def test_padding_is_accepted_on_one_rank_only():
    assert window(256, 192, 0, 1, "x") == slice(0, 256)
    with pytest.raises(ValueError, match="use fewer ranks"):
        window(256, 96, 0, 2, "x")


def test_outputs_line_up_with_stored_linears():
    assert group_widths([256, 128, 128], [256, 128, 128], 1, "qkv") == [[0], [1], [2]]
    assert group_widths([512], [256, 128, 128], 1, "qkv") == [[0, 1, 2]]
    assert group_widths([1024, 256], [128, 128, 256, 128], 2, "qkvz") == [[0, 1, 2], [3]]
    with pytest.raises(ValueError, match="line up"):
        group_widths([512, 512], [256, 128, 128], 1, "qkv")


SHAPES = {
    "m.q_proj.trellis": (16, 8, 48),
    "m.q_proj.suh": (256,),
    "m.q_proj.svh": (128,),
    "m.q_proj.mcg": (),
    "m.q_proj.bias": (128,),
    "m.norm.weight": (256,),
}


def test_linears_are_read_from_headers():
    (linear,) = find_linears(SHAPES).values()
    assert (linear.key, linear.in_features, linear.out_features, linear.bits) == ("m.q_proj", 256, 128, 3)
    assert linear.codebook == "mcg" and linear.has_bias and linear.multiplier == MULTIPLIERS["mcg"]
    assert (
        find_linears({key: value for key, value in SHAPES.items() if "mcg" not in key})["m.q_proj"].codebook == "3inst"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"m.q_proj.mul1": ()}, "both codebook markers"),
        ({"m.q_proj.su": (16,)}, "packed signs"),
        ({"m.q_proj.suh": None}, "suh is missing"),
        ({"m.q_proj.trellis": (16, 8, 40)}, "expected"),
        ({"m.q_proj.trellis": (16, 4, 48)}, "multiples of 128"),
        ({"m.d.slice.0.trellis": (16, 8, 48)}, "slice"),
    ],
)
def test_layouts_that_cannot_be_served_are_refused_by_name(change, reason):
    shapes = {key: value for key, value in {**SHAPES, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=reason):
        find_linears(shapes)

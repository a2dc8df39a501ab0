"""Bytes by kind against sizes known by arithmetic, and the key-value cache against its formula."""

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.memory.account import KINDS, stored_bytes, weight_bytes
from exl3eval.memory.cache import cache_bytes, formula_bytes
from exl3eval.variant import Variant

TIED = Path(__file__).parents[1] / "data" / "qwen2-tied"
HIDDEN = 128


def make_variant(embedding: str = "stored", activations: str = "float32", linear: str = "1-:fp16-staged") -> Variant:
    return Variant(name="v", doc="V.", activations=activations, linear=linear, embedding=embedding)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_model(tmp_path_factory.mktemp("tiny"), llama_tensors(config), config)


def account(directory: Path, variant: Variant) -> dict[str, tuple[int, int]]:
    checkpoint = open_checkpoint(directory)
    arm = load_arm(checkpoint, variant, vocab_size=VOCAB, device=torch.device("cpu"))
    return {each.kind: (each.stored, each.resident) for each in weight_bytes(checkpoint, arm)}


def test_every_byte_of_the_files_is_accounted_for(directory: Path) -> None:
    for path in (directory, TIED / "bf16", TIED / "exl3-mcg-5bpw"):
        checkpoint = open_checkpoint(path)
        sums = stored_bytes(checkpoint)
        assert sum(sums.values()) == sum(entry.nbytes for entry in checkpoint.tensors)
        assert set(sums) <= set(KINDS)


def test_kinds_have_the_sizes_that_shapes_give(directory: Path) -> None:
    found = account(directory, make_variant())
    padded = [(128, 128), (128, 128), (128, 128), (128, 128), (128, 256), (128, 256), (256, 128)]
    trellis, scales = sum(k * n * 4 // 8 for k, n in padded), sum(2 * (k + n) for k, n in padded)
    assert found["trellis"] == (trellis, trellis)
    assert found["scales"] == (scales, scales)
    assert found["norms"] == (3 * HIDDEN * 2, 3 * HIDDEN * 4)
    assert found["embedding"] == (VOCAB * HIDDEN * 2, VOCAB * HIDDEN * 4)
    head = HIDDEN * VOCAB * 6 // 8 + 2 * (HIDDEN + VOCAB)
    assert found["head"] == (head + 4, head)
    assert found["dense"] == (0, 0)


def test_the_dense_matrices_of_a_route_are_counted(directory: Path) -> None:
    weights = 4 * 128 * 128 + 3 * 128 * 256 + HIDDEN * VOCAB
    assert account(directory, make_variant(linear="1-:reference"))["dense"] == (0, 4 * weights)


def test_the_int8_overlay_replaces_the_table(directory: Path) -> None:
    assert account(directory, make_variant("int8"))["embedding"][1] == VOCAB * HIDDEN + 4 * VOCAB


def test_a_tied_head_is_counted_once() -> None:
    checkpoint = open_checkpoint(TIED / "bf16")
    vocab = next(entry.shape[0] for entry in checkpoint.tensors if "embed_tokens" in entry.name)
    arm = load_arm(checkpoint, make_variant(), vocab_size=vocab, device=torch.device("cpu"))
    found = {each.kind: each for each in weight_bytes(checkpoint, arm)}
    assert found["head"].stored == found["head"].resident == 0
    assert found["embedding"].resident == 2 * found["embedding"].stored
    assert found["linear"].resident == 2 * found["linear"].stored > 0


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_the_cache_grows_as_the_formula_says(directory: Path, activations: str) -> None:
    from transformers import DynamicCache

    from exl3eval.engine.graphs import cache_argument

    checkpoint = open_checkpoint(directory)
    arm = load_arm(checkpoint, make_variant(activations=activations), vocab_size=VOCAB, device=torch.device("cpu"))
    cache, sizes = DynamicCache(), []
    for width in (5, 1, 1):
        ids = torch.arange(width)[None]
        with torch.inference_mode():
            arm.decoder(input_ids=ids, use_cache=True, **{cache_argument(arm.decoder): cache})
        sizes.append(cache_bytes(cache))
    per_token, why = formula_bytes(checkpoint.config, activations)
    assert per_token == 2 * 1 * 1 * 64 * getattr(torch, activations).itemsize and not why
    assert sizes == [5 * per_token, 6 * per_token, 7 * per_token]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent"),
        ({"sliding_window": 4096}, "window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "window"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "does not tell"),
    ],
)
def test_where_the_formula_does_not_hold_it_says_why(changes: dict[str, object], reason: str) -> None:
    count, why = formula_bytes({**tiny_config(), **changes}, "float32")
    assert count is None and reason in why


def test_layers_without_a_growing_cache_are_left_out_of_the_formula() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = {"text_config": tiny_config(layer_types=kinds, num_hidden_layers=4)}
    assert formula_bytes(config, "bfloat16") == (2 * 1 * 64 * 2, "")
    unused = {**tiny_config(), "sliding_window": 4096, "use_sliding_window": False}
    assert formula_bytes(unused, "bfloat16") == (2 * 1 * 64 * 2, "")

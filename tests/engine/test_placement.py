"""Every stored tensor finds its place, every parameter gets a value, or the error says which does not."""

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, exl3_tensors, llama_tensors, tiny_config, write_model

from exl3_kernels.linear import Exl3Linear, FusedExl3Linear, SummedExl3Linear
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.errors import CheckpointError, InvalidRunError
from exl3eval.variant import Variant

CPU = torch.device("cpu")
BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
INT8 = Variant(name="int8", doc="x", activations="float32", linear="1-:reference", embedding="int8")
LAYER = "model.layers.0"


def _load(directory: Path, variant: Variant = BASE, vocab_size: int = VOCAB):
    return load_arm(open_checkpoint(directory), variant, vocab_size=vocab_size, device=CPU)


def test_every_linear_is_replaced_and_runs(tmp_path: Path) -> None:
    arm = _load(write_model(tmp_path, llama_tensors(tiny_config()), tiny_config()))
    linears = [module for module in arm.decoder.modules() if isinstance(module, Exl3Linear)]
    assert len(linears) == 7
    assert not [module for module in arm.decoder.modules() if isinstance(module, torch.nn.Linear)]
    hidden = arm.hidden_states(torch.arange(20))
    assert hidden.shape == (20, 128)
    logits = arm.head.logits(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (20, VOCAB)


def test_padded_widths_are_hidden_from_the_model(tmp_path: Path) -> None:
    """k and v have 64 outputs in a trellis of 128; an inner size of 200 is padded to 256."""
    config = tiny_config(intermediate_size=200)
    arm = _load(write_model(tmp_path, llama_tensors(config), config))
    assert arm.decoder.layers[0].self_attn.k_proj.out_features == 64
    assert arm.decoder.layers[0].mlp.down_proj.in_features == 200
    assert torch.isfinite(arm.hidden_states(torch.arange(9))).all()


def test_a_padded_head_is_cut_to_the_vocabulary(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=200)
    tensors = llama_tensors(config)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:200]
    arm = _load(write_model(tmp_path, tensors, config), vocab_size=200)
    hidden = arm.hidden_states(torch.arange(5))
    assert arm.head.logits(hidden).shape == (5, 200)
    assert arm.head.all_logits(hidden).shape == (5, 256)


def test_a_tied_head_that_is_quantized_is_not_tied(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    arm = _load(write_model(tmp_path, llama_tensors(config), config))
    assert isinstance(arm.head.module, Exl3Linear)


def test_a_tied_head_without_its_own_weights_is_the_embedding_and_keeps_it_under_the_overlay(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = {name: t for name, t in llama_tensors(config).items() if not name.startswith("lm_head")}
    directory = write_model(tmp_path, tensors, config)
    stored, overlaid = _load(directory), _load(directory, INT8)
    table = tensors["model.embed_tokens.weight"].float()
    assert torch.equal(stored.head.module.weight, table)
    assert torch.equal(overlaid.head.module.weight, table)
    ids = torch.arange(8)
    assert not torch.equal(stored.decoder.embed_tokens(ids), overlaid.decoder.embed_tokens(ids))


def test_the_overlay_halves_the_table_and_says_so(tmp_path: Path) -> None:
    arm = _load(write_model(tmp_path, llama_tensors(tiny_config()), tiny_config()), INT8)
    assert arm.embedding_bytes.stored == VOCAB * 128 * 2
    assert arm.embedding_bytes.run == VOCAB * (128 + 4)


def test_the_overlay_refuses_a_damaged_table(tmp_path: Path) -> None:
    tensors = llama_tensors(tiny_config())
    tensors["model.embed_tokens.weight"][7, 3] = float("nan")
    with pytest.raises(InvalidRunError, match=r"embed_tokens: 1 embedding rows .* rows \[7\]"):
        _load(write_model(tmp_path, tensors, tiny_config()), INT8)


def test_head_bits_16_keeps_a_plain_head(tmp_path: Path) -> None:
    tensors = {name: t for name, t in llama_tensors(tiny_config()).items() if not name.startswith("lm_head")}
    tensors["lm_head.weight"] = torch.randn(VOCAB, 128).half()
    arm = _load(write_model(tmp_path, tensors, tiny_config()))
    assert isinstance(arm.head.module, torch.nn.Linear)


def test_slices_are_joined(tmp_path: Path) -> None:
    config = tiny_config(intermediate_size=512)
    tensors = {name: t for name, t in llama_tensors(config).items() if ".mlp." not in name}
    for index in range(2):
        for projection, k, n in (("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)):
            tensors |= exl3_tensors(f"{LAYER}.mlp.{projection}.slice.{index}", k, n, seed=index)
    arm = _load(write_model(tmp_path, tensors, config))
    mlp = arm.decoder.layers[0].mlp
    assert isinstance(mlp.gate_proj, FusedExl3Linear)
    assert isinstance(mlp.down_proj, SummedExl3Linear)
    assert torch.isfinite(arm.hidden_states(torch.arange(9))).all()


def test_fused_projections_take_their_stored_parts(tmp_path: Path) -> None:
    config = tiny_config(
        model_type="phi3", architectures=["Phi3ForCausalLM"], num_key_value_heads=2, pad_token_id=0, head_dim=64
    )
    tensors = {name: t for name, t in llama_tensors(config).items() if ".self_attn." not in name}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors |= exl3_tensors(f"{LAYER}.self_attn.{name}", 128, 128)
    arm = _load(write_model(tmp_path, tensors, config))
    assert isinstance(arm.decoder.layers[0].self_attn.qkv_proj, FusedExl3Linear)
    assert isinstance(arm.decoder.layers[0].mlp.gate_up_proj, FusedExl3Linear)
    assert torch.isfinite(arm.hidden_states(torch.arange(9))).all()


def _moe(tmp_path: Path, *, without: str = "") -> Path:
    config = tiny_config(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    tensors = {name: t for name, t in llama_tensors(config).items() if ".mlp." not in name}
    tensors[f"{LAYER}.mlp.gate.weight"] = torch.randn(4, 128).half()
    for norm in ("q_norm", "k_norm"):
        tensors[f"{LAYER}.self_attn.{norm}.weight"] = torch.ones(64).bfloat16()
    for expert in range(4):
        for name in ("gate_proj", "up_proj", "down_proj"):
            key = f"{LAYER}.mlp.experts.{expert}.{name}"
            tensors |= exl3_tensors(
                key, 128, 128, bits=3 + expert % 2, codebook="mcg" if expert else "mul1", seed=expert
            )
    tensors = {name: t for name, t in tensors.items() if not (without and name.startswith(f"{LAYER}.mlp.{without}"))}
    return write_model(tmp_path, tensors, config)


def test_experts_of_different_widths_equal_a_dense_sum(tmp_path: Path) -> None:
    arm = _load(_moe(tmp_path))
    experts = arm.decoder.layers[0].mlp.experts
    hidden = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 3], [1, 0]])
    weights = torch.rand(6, 2)
    dense = torch.zeros(6, 128)
    for token in range(6):
        for slot in range(2):
            e = int(index[token, slot])
            x = hidden[token]
            inner = experts.activation(experts.gate[e](x)) * experts.up[e](x)
            dense[token] += weights[token, slot] * experts.down[e](inner)
    assert torch.allclose(experts(hidden, index, weights), dense, rtol=0, atol=1e-5 * dense.abs().max())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj is missing"):
        _load(_moe(tmp_path, without="experts.2.up_proj"))


@pytest.mark.parametrize(
    ("drop", "reason"),
    [
        (f"{LAYER}.mlp.up_proj", r"mlp\.up_proj\.weight is in no file"),
        (f"{LAYER}.input_layernorm", r"input_layernorm\.weight is in no file"),
        ("model.embed_tokens", r"embed_tokens\.weight is in no file"),
        ("lm_head", r"lm_head\.weight is in no file"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, drop: str, reason: str) -> None:
    tensors = {name: t for name, t in llama_tensors(tiny_config()).items() if not name.startswith(drop)}
    with pytest.raises(CheckpointError, match=reason):
        _load(write_model(tmp_path, tensors, tiny_config()))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            exl3_tensors(f"{LAYER}.mlp.other_proj", 128, 128),
            r"mlp\.other_proj: stored as EXL3, but Llama",
        ),
        (exl3_tensors(f"{LAYER}.input_layernorm", 128, 128), "the model has a LlamaRMSNorm there"),
        (exl3_tensors(f"{LAYER}.self_attn.o_proj", 256, 256), None),
        ({"model.extra.weight": torch.ones(3)}, r"model\.extra\.weight: stored, but LlamaForCausalLM has no such"),
        ({"model.norm.weight": torch.ones(64)}, r"model\.norm\.weight is \[64\], the model expects \[128\]"),
        (
            exl3_tensors(f"{LAYER}.mlp.gate_proj", 128, 128),
            r"model expects 128 -> 256, the trellis holds 128 -> 128",
        ),
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, extra: dict[str, torch.Tensor], reason: str | None) -> None:
    tensors = llama_tensors(tiny_config())
    tensors = {
        name: t for name, t in tensors.items() if name.rpartition(".")[0] not in {e.rpartition(".")[0] for e in extra}
    }
    directory = write_model(tmp_path, tensors | extra, tiny_config())
    if reason is None:
        assert torch.isfinite(_load(directory).hidden_states(torch.arange(4))).all()
        return
    with pytest.raises(CheckpointError, match=reason):
        _load(directory)


def test_remote_code_is_refused(tmp_path: Path) -> None:
    config = tiny_config(auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(CheckpointError, match="asks to run code"):
        _load(write_model(tmp_path, llama_tensors(tiny_config()), config))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"transformers cannot read config\.json"):
        _load(write_model(tmp_path, llama_tensors(tiny_config()), tiny_config(model_type="no_such_model")))


def test_a_head_narrower_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the head has 256 columns, the tokenizer 300 ids"):
        _load(write_model(tmp_path, llama_tensors(tiny_config()), tiny_config()), vocab_size=300)


def test_overflowing_activations_are_invalid(tmp_path: Path) -> None:
    tensors = llama_tensors(tiny_config())
    tensors["model.norm.weight"][:] = float("inf")
    with pytest.raises(InvalidRunError, match="not finite from position 0"):
        _load(write_model(tmp_path, tensors, tiny_config())).hidden_states(torch.arange(4))


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path: Path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(InvalidRunError, match="the model's logits differ from its head"):
        _load(write_model(tmp_path, llama_tensors(tiny_config()), tiny_config()))

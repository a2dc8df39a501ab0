"""What the plugin refuses, and what it leaves alone, against vLLM's own registries; runs where vLLM is installed."""

import json
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: test_plugin.py runs this in its environment")

from torch import nn  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.model_executor import custom_op  # noqa: E402
from vllm.model_executor.layers import quantization  # noqa: E402
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase  # noqa: E402
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402

import exl3_vllm  # noqa: E402
from exl3_vllm import config as plugin  # noqa: E402
from exl3_vllm import embedding  # noqa: E402
from exl3_vllm.experts import Exl3ExpertsMethod  # noqa: E402
from exl3_vllm.linear import Exl3LinearMethod  # noqa: E402
from exl3_vllm.priming import captured_rows  # noqa: E402
from exl3_vllm.readback import begin_model  # noqa: E402
from exl3_vllm.settings import VARIABLE, ServedVariant  # noqa: E402
from exl3_vllm.stored import StoredLinear  # noqa: E402
from exl3eval.kernel_check.samples import make_weight  # noqa: E402

GRAPHS = SimpleNamespace(
    compilation_config=SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=[1, 2, 4]
    ),
    additional_config={},
)


def stored(key, n=128, *, bias=False):
    return StoredLinear(key=key, in_features=128, out_features=n, bits=4, codebook="mcg", has_bias=bias)


@pytest.fixture
def exl3_config(monkeypatch):
    monkeypatch.setenv(VARIABLE, "{}")
    monkeypatch.setattr(plugin, "get_current_vllm_config", lambda: GRAPHS)
    monkeypatch.setattr(plugin, "begin_model", lambda *args: None)
    return plugin.Exl3Config()


@pytest.fixture
def registries(monkeypatch):
    """Vllm's registries, put back afterwards."""
    monkeypatch.setattr(custom_op, "op_registry_oot", custom_op.op_registry_oot.copy())
    monkeypatch.setattr(embedding, "op_registry_oot", custom_op.op_registry_oot)
    methods = [name for name in quantization.QUANTIZATION_METHODS if not name.startswith("exl3")]
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", methods)
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})


def test_registering_twice_is_registering_once(registries, monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"embedding": "int8"}')
    exl3_vllm.register()
    exl3_vllm.register()
    assert custom_op.op_registry_oot["VocabParallelEmbedding"] is embedding.Exl3VocabEmbedding
    for name in ("exl3", "exl3-kernels"):
        assert quantization.get_quantization_config(name) is plugin.Exl3Config


def test_a_stack_keeps_an_exl3_of_its_own(registries, monkeypatch):
    monkeypatch.setenv(VARIABLE, "{}")

    class TheirConfig(plugin.Exl3Config):
        pass

    quantization.register_quantization_config("exl3")(TheirConfig)
    exl3_vllm.register()
    assert quantization.get_quantization_config("exl3") is TheirConfig
    assert quantization.get_quantization_config("exl3-kernels") is plugin.Exl3Config
    override = plugin.Exl3Config.override_quantization_method
    assert override({"quant_method": "exl3"}, "exl3-kernels") == "exl3-kernels"
    assert override({"quant_method": "exl3"}, None) is None
    assert override({"quant_method": "awq"}, "exl3-kernels") is None


def test_the_overlay_is_registered_only_when_asked_for(registries, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    custom_op.op_registry_oot.pop("VocabParallelEmbedding", None)
    exl3_vllm.register()
    assert "VocabParallelEmbedding" not in custom_op.op_registry_oot


def test_another_plugins_embedding_is_not_replaced(registries, monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"embedding": "int8"}')
    monkeypatch.setitem(custom_op.op_registry_oot, "VocabParallelEmbedding", SimpleNamespace)
    with pytest.raises(ValueError, match=r"another plugin replaces VocabParallelEmbedding by types.SimpleNamespace"):
        exl3_vllm.register()


def test_the_overlay_is_refused_beside_a_drafter(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"embedding": "int8"}')
    monkeypatch.setattr(embedding, "get_current_vllm_config", lambda: SimpleNamespace(speculative_config=object()))
    with pytest.raises(ValueError, match="speculative decoding"):
        embedding.Exl3VocabEmbedding.__init__(nn.Module(), 128, 64)


@pytest.mark.parametrize("tied", [False, True])
def test_the_overlay_serves_its_codes_on_any_number_of_ranks(tied):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(64, 32))
    layer.use_fused_embedding = True
    method = embedding.Int8EmbeddingMethod("embed_tokens", tied=tied)
    method.process_weights_after_loading(layer)
    assert layer.use_fused_embedding is False and hasattr(layer, "weight") is tied
    expected = layer.codes.float() * layer.scales[:, None]
    assert torch.equal(method.embedding(layer, torch.arange(64)), expected)


def test_a_fused_layer_must_be_exl3_as_a_whole(exl3_config):
    exl3_config.linears = {"l.0.q_proj": stored("l.0.q_proj"), "l.0.k_proj": stored("l.0.k_proj")}
    with pytest.raises(ValueError, match=r"l\.0\.v_proj is not"):
        exl3_config._stored_parts("l.0.qkv_proj")
    assert exl3_config._stored_parts("l.0.o_proj") == []


def test_names_follow_the_models_renames_with_fused_parts_apart(exl3_config):
    exl3_config.linears = exl3_config._original = {"model.l.0.up_proj": stored("model.l.0.up_proj")}
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.": "language_model.model."},
        orig_to_new_stacked={".up_proj": (".gate_up_proj", 1)},
    )
    exl3_config.apply_vllm_mapper(mapper)
    assert set(exl3_config.linears) == {"model.l.0.up_proj", "language_model.model.l.0.up_proj"}


class Layer(nn.Module):
    def load_weights(self, weights):
        return [tuple(tensor.shape) for _, tensor in weights]


@pytest.mark.parametrize("graph_rows", [(), (1, 2, 4)])
def test_experts_that_are_served_one_by_one_are_refused_under_cuda_graphs(monkeypatch, graph_rows):
    monkeypatch.setattr(FusedMoEMethodBase, "__init__", lambda self, moe: setattr(self, "moe", moe))
    parallel = SimpleNamespace(use_ep=False)
    moe = SimpleNamespace(has_bias=False, moe_parallel_config=parallel, tp_rank=0, tp_size=1)
    linears = {(0, projection): stored(f"m.experts.0.{projection}") for projection in ("w1", "w2", "w3")}
    method = Exl3ExpertsMethod(
        moe, linears, prefix="m.experts", variant=ServedVariant(linear="1-:reference"), graph_rows=graph_rows
    )
    layer = Layer()
    layer.activation = SimpleNamespace(value="silu")
    method.create_weights(layer, 1, 128, 128, torch.float32)
    weight = make_weight(128, 128, 4, "mcg", device=torch.device("cpu"))
    assert layer.load_weights([("trellis", weight.trellis), ("suh", weight.suh)]) == [(8, 8 * 64), (128,)]
    for store in method.stores.values():
        for index in range(len(store.shards)):
            for suffix in store.suffixes:
                tensor = torch.tensor(weight.multiplier) if suffix == "mcg" else getattr(weight, suffix)
                load = store.parameter(suffix).weight_loader
                expert, projection = 0, store.shards[index].stored.key.rpartition(".")[2]
                flat = tensor.flatten(1) if tensor.dim() == 3 else tensor
                load(store.parameter(suffix), flat, f"m.experts.0.{suffix}", projection, expert)
    if graph_rows:
        with pytest.raises(ValueError, match=r"m\.experts: these EXL3 experts are served one after another"):
            method.process_weights_after_loading(layer)
        return
    method.process_weights_after_loading(layer)
    x, ids = torch.randn(3, 128), torch.zeros(3, 1, dtype=torch.int32)
    y = method.apply(layer, x, torch.ones(3, 1), ids)
    assert torch.equal(y, layer.exl3(x, ids.long(), torch.ones(3, 1)))
    assert exl3_vllm.effective_config()["experts"]["m.experts"] == "1-:experts-loop"


def test_rows_to_prime_are_those_that_will_be_captured():
    assert captured_rows(GRAPHS) == (1, 2, 4)
    eager = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, cudagraph_capture_sizes=[1, 2])
    )
    assert captured_rows(eager) == ()


def test_every_variant_has_a_compile_cache_of_its_own():
    def identity(variant):
        vllm_config = SimpleNamespace(additional_config={})
        begin_model(vllm_config, variant)
        return json.dumps(vllm_config.additional_config)

    assert identity(ServedVariant()) == identity(ServedVariant())
    assert identity(ServedVariant()) != identity(ServedVariant(linear="1-:fp16-staged"))


@pytest.mark.parametrize("in_model", [False, True])
def test_a_bias_on_one_side_only_is_refused(in_model):
    method = Exl3LinearMethod([stored("l.o_proj", bias=not in_model)], prefix="l.o_proj", variant=ServedVariant())
    layer = nn.Module()
    layer.register_parameter("bias", nn.Parameter(torch.zeros(128)) if in_model else None)
    method.create_weights(layer, 128, [128], 128, 128, torch.float32)
    for suffix in method.store.suffixes:
        shape = method.store.shards[0].shapes.get(suffix, ())
        parameter = layer.get_parameter(suffix)
        parameter.weight_loader(parameter, torch.ones(shape, dtype=parameter.dtype))
    with pytest.raises(ValueError, match="do not agree that there is a bias"):
        method.process_weights_after_loading(layer)


def test_a_tensor_that_never_came_is_named():
    method = Exl3LinearMethod([stored("l.o_proj")], prefix="l.o_proj", variant=ServedVariant())
    layer = nn.Module()
    layer.register_parameter("bias", None)
    method.create_weights(layer, 128, [128], 128, 128, torch.float32)
    with pytest.raises(ValueError, match=r"l\.o_proj\.trellis was not loaded"):
        method.process_weights_after_loading(layer)

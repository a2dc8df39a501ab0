"""Routed experts on a CPU: the loop, the op around it, and which route a layer takes."""

import copy
import gc
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

from exl3_kernels import experts as experts_module
from exl3_kernels import grouped
from exl3_kernels.cuda import FLAGS, SOURCES, UNITS, find_nvcc
from exl3_kernels.experts import (
    EXPERTS_ROUTES,
    GROUPED,
    Exl3Experts,
    Expert,
    exl3_experts,
    parse_experts_dispatch,
    select_experts_route,
)
from exl3_kernels.linear import Exl3Linear
from exl3_kernels.routes import read_launches, reset_launches
from exl3_kernels.weight import MULTIPLIERS, Exl3Weight
from exl3eval.kernel_check import grouped as check
from exl3eval.kernel_check.finding import Skipped
from exl3eval.kernel_check.subject import scope_of, subjects_on

HIDDEN, INNER = 128, 256
KINDS = ((4, "mcg"), (3, "mul1"), (2, "3inst"))


def make_linear(k, n, bits, codebook, seed, dispatch="1-:reference", bias=False):
    g = torch.Generator().manual_seed(seed)
    weight = Exl3Weight(
        trellis=torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), generator=g, dtype=torch.int16),
        suh=(torch.randn(k, generator=g) * k**-0.5).half(),
        svh=torch.randn(n, generator=g).half(),
        codebook=codebook,
        multiplier=MULTIPLIERS[codebook],
        bias=torch.zeros(n) if bias else None,
    )
    return Exl3Linear(weight, dispatch=dispatch)


def make_experts(**options):
    return [
        Expert(
            gate=make_linear(HIDDEN, INNER, *kind, seed=10 * e, **options),
            up=make_linear(HIDDEN, INNER, *kind, seed=10 * e + 1, **options),
            down=make_linear(INNER, HIDDEN, *kind, seed=10 * e + 2, **options),
        )
        for e, kind in enumerate(KINDS)
    ]


def make_calls(tokens=5, slots=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(len(KINDS), generator=g)[:slots] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN, generator=g), ids, torch.rand(tokens, slots, generator=g)


@pytest.fixture(scope="module")
def layer():
    return Exl3Experts(make_experts(), activation=silu)


def by_hand(layer, x, ids, scales):
    expected = torch.zeros(len(x), HIDDEN)
    for token, chosen in enumerate(ids.tolist()):
        for slot, e in enumerate(chosen):
            if 0 <= e < len(KINDS):
                row = x[token, None]
                y = layer.down[e](silu(layer.gate[e](row)) * layer.up[e](row))
                expected[token] += y[0] * scales[token, slot]
    return expected


def test_a_cpu_takes_the_loop_which_is_every_token_by_hand(layer):
    call = make_calls()
    assert layer.dispatch == "1-:experts-loop" and "3 experts" in repr(layer)
    torch.testing.assert_close(layer(*call), by_hand(layer, *call), rtol=1e-5, atol=1e-6)


def test_unrouted_slots_add_nothing_and_no_tokens_give_no_rows(layer):
    x, ids, scales = make_calls()
    ids[0], ids[2, 1] = -1, len(KINDS)
    y = layer(x, ids, scales)
    torch.testing.assert_close(y, by_hand(layer, x, ids, scales), rtol=1e-5, atol=1e-6)
    assert not y[0].any()
    assert layer(x[:0], ids[:0], scales[:0]).shape == (0, HIDDEN)
    assert not layer(x, ids[:, :0], scales[:, :0]).any()


def test_slots_are_added_in_order():
    """Numbers whose sum depends on the order: 2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1."""
    layer = Exl3Experts(make_experts(), activation=silu)
    for e in range(len(KINDS)):
        layer.down[e].forward = lambda rows: torch.ones(len(rows), HIDDEN)
    x, ids = torch.zeros(1, HIDDEN), torch.tensor([[0, 1, 2]])
    assert layer(x, ids, torch.tensor([[2.0**24, 1.0, -(2.0**24)]])).eq(0).all()
    assert layer(x, ids, torch.tensor([[2.0**24, -(2.0**24), 1.0]])).eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_has_the_type_of_the_tokens(layer, dtype):
    x, ids, scales = make_calls()
    y = layer(x.to(dtype), ids, scales)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x, ids, scales), rtol=0.05, atol=0.05)


def test_the_loop_counts_its_linears(layer):
    reset_launches()
    x, _, _ = make_calls(2)
    layer(x, torch.tensor([[1], [1]]), torch.ones(2, 1))
    assert {(launch.route, launch.bits) for launch in read_launches()} == {("reference", 3)}
    assert sum(read_launches().values()) == 3


def test_the_op_is_opaque_and_its_fake_agrees(layer):
    x, ids, scales = make_calls()
    torch.library.opcheck(
        exl3_experts, (x, ids, scales, layer.number, layer.dispatch), test_utils=("test_schema", "test_faketensor")
    )
    half = x.half()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = layer(*(mode.from_tensor(t) for t in (half, ids, scales)))
    assert fake.shape == x.shape and fake.dtype == torch.float16


def test_a_compiled_layer_does_not_break_its_graph(layer):
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    call = make_calls()
    assert torch.equal(compiled(*call), layer(*call))


def test_a_copy_is_a_layer_of_its_own(layer):
    twin = copy.deepcopy(layer)
    assert twin.number != layer.number
    twin.down[0].suh.zero_()
    x, _, _ = make_calls(1)
    zeros, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    twin.down[0].dense = None
    assert not twin(x, zeros, ones).any() and layer(x, zeros, ones).any()


def test_a_layer_that_is_gone_leaves_the_table_of_layers():
    number = Exl3Experts(make_experts(), activation=silu).number
    gc.collect()
    assert number not in experts_module._layers


# ------------------------------------------------------------------------------------------------ dispatch
def test_a_dispatch_names_the_route_of_every_token_count():
    assert [select_experts_route(GROUPED, tokens).name for tokens in (1, 16, 17, 4096)] == [
        "grouped-decode",
        "grouped-decode",
        "grouped-prefill",
        "grouped-prefill",
    ]
    assert parse_experts_dispatch(" 1-2:experts-loop, 3-:grouped-prefill")[1].first == 3
    assert all(route.doc.endswith(".") for route in EXPERTS_ROUTES.values())


@pytest.mark.parametrize(
    ("dispatch", "reason"),
    [
        ("1-:decode-gemm", "known: experts-loop, grouped-decode"),
        ("1-16:grouped-decode", "rows from 17 on are not served"),
        ("2-:experts-loop", "rows must tile 1..infinity"),
        ("1-:experts-loop,5-:grouped-prefill", "rows must tile 1..infinity"),
        ("1-4:experts-loop,6-:grouped-prefill", "rows must tile 1..infinity"),
        ("1-0:experts-loop,1-:grouped-prefill", "rows must tile 1..infinity"),
        ("experts-loop", "not `first-last:route`"),
    ],
)
def test_a_malformed_dispatch_says_what_is_wrong(dispatch, reason):
    with pytest.raises(ValueError, match=reason):
        parse_experts_dispatch(dispatch)


def test_a_route_that_cannot_serve_the_layer_is_refused():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        Exl3Experts(make_experts(), activation=silu, dispatch=GROUPED)
    with pytest.raises(ValueError, match="activation is not SiLU"):
        Exl3Experts(make_experts(), activation=gelu, dispatch=GROUPED)
    Exl3Experts(make_experts(), activation=gelu, dispatch="1-:experts-loop")


@pytest.mark.parametrize("activation", [silu, nn.SiLU(), lambda x: nn.functional.silu(x)])
def test_silu_is_told_by_its_values(activation):
    assert experts_module._is_silu(activation) and not experts_module._is_silu(gelu)


def on_gpu(experts, monkeypatch, activation=silu, **given):
    """Build a layer as if its tensors were on a GPU with a known table."""
    monkeypatch.setattr(experts_module, "rejects_experts", lambda w, device: grouped.rejects_experts(w, "cuda"))
    monkeypatch.setattr(experts_module, "dispatch_on", lambda device, k, n, bits: "1-:reference")
    return Exl3Experts(experts, activation=activation, **given)


def test_a_layer_is_grouped_where_every_projection_follows_the_measured_dispatch(monkeypatch):
    assert on_gpu(make_experts(), monkeypatch).dispatch == GROUPED
    assert on_gpu(make_experts(dispatch="1-:fp16-staged"), monkeypatch).dispatch == "1-:experts-loop"
    one_other = [*make_experts()[:2], make_experts(dispatch="1-:fp16-staged")[2]]
    assert on_gpu(one_other, monkeypatch).dispatch == "1-:experts-loop"
    assert on_gpu(make_experts(), monkeypatch, activation=gelu).dispatch == "1-:experts-loop"
    assert on_gpu(make_experts(bias=True), monkeypatch).dispatch == "1-:experts-loop"


def test_layers_that_the_kernels_cannot_serve_say_why():
    def reason(experts):
        weights = [tuple(experts_module._weight(linear) for linear in expert) for expert in experts]
        return grouped.rejects_experts(weights, "cuda")

    experts = make_experts()
    assert reason(experts) == ""
    assert "back" in reason([experts[0]._replace(down=experts[0].gate), *experts[1:]])
    small = Expert(*(make_linear(128, 128, 4, "mcg", seed=i) for i in range(3)))
    assert "expert 1 has other shapes" in reason([experts[0], small])
    assert "has a bias" in reason(make_experts(bias=True))


def test_average_rows_of_an_expert_choose_how_many_share_an_item():
    assert [grouped.row_groups(tokens * 8, 128) for tokens in (1, 64, 65, 256, 257, 4096)] == [1, 1, 4, 4, 8, 8]
    assert grouped.row_groups(1 << 20, 128, most=4) == 4


CHECKS = (check.together_and_alone, check.experts_relative_error, check.experts_wrong_weight)


def test_the_suite_passes_the_loop_and_catches_wrong_experts():
    subjects = {subject.name: subject for subject in subjects_on(torch.device("cpu"))}
    scope = scope_of(torch.device("cpu"), quick=True)
    for prove in CHECKS:
        evidence = prove(subjects["fp16-staged"], scope)
        assert evidence.worst <= evidence.bound and evidence.cases
    broken = check.experts_relative_error(subjects["broken-window"], scope)
    assert broken.worst > broken.bound
    for prove in (check.routing_plan, check.experts_without_tokens, check.experts_replay):
        assert isinstance(prove(subjects["fp16-staged"], scope), Skipped)


def test_the_suite_sees_experts_that_depend_on_their_neighbours(monkeypatch):
    (staged,) = subjects_on(torch.device("cpu"), ["fp16-staged"])
    promising = replace(staged, traits=replace(staged.traits, row_bits=True))
    forward = Exl3Experts.forward
    monkeypatch.setattr(Exl3Experts, "forward", lambda *call: forward(*call) * (1 + 2.0**-6 * (len(call[1]) > 1)))
    evidence = check.together_and_alone(promising, scope_of(torch.device("cpu"), quick=True))
    assert evidence.worst > evidence.bound
    evidence = check.combined_and_separate(promising, scope_of(torch.device("cpu"), quick=True))
    assert evidence.worst > evidence.bound


@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    ("unit", "architecture"),
    [
        ("routing.o", "sm_80"),
        pytest.param("experts1.o", "sm_86", marks=pytest.mark.slow),
        pytest.param("experts4.o", "sm_120", marks=pytest.mark.slow),
        pytest.param("experts8.o", "sm_90a", marks=pytest.mark.slow),
    ],
)
def test_a_unit_compiles_without_a_warning(unit, architecture, tmp_path):
    source, defines = next((source, defines) for target, source, defines in UNITS if target == unit)
    command = [
        find_nvcc(),
        *FLAGS,
        "-Werror",
        "all-warnings",
        f"-arch={architecture}",
        *defines,
        "-c",
        SOURCES / source,
    ]
    done = subprocess.run([*command, "-o", tmp_path / unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

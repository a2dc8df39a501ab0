"""The exactness suite on the CPU: sound routes pass, and every kind of fault turns it red."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from exl3_kernels.codebook import codebook_values
from exl3_kernels.hadamard import hadamard_128, hadamard_half
from exl3_kernels.prefill import rotates_rows
from exl3_kernels.reconstruct import dense_weight, inner_weight, linear_staged
from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import CODEBOOKS
from exl3eval.errors import UsageError
from exl3eval.kernel_check import decoding, grouped, guards, launches, mutants, oracle, rows, samples, sums
from exl3eval.kernel_check.commands import check_routes, register
from exl3eval.kernel_check.finding import Evidence, Skipped, judge
from exl3eval.kernel_check.report import SCHEMA, build_receipt, render_markdown
from exl3eval.kernel_check.subject import QUICK_CPU, TRAITS, Subject, Traits, altered, subject_of, subjects_on
from exl3eval.kernel_check.suite import CONTROL_CAUGHT, PROPERTIES, is_green
from exl3eval.records import parse_json

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "data" / "golden_small.safetensors"
TINY = replace(
    QUICK_CPU,
    bits=(3, 4),
    one_hot_rows=(100,),
    whole_rows=34,
    shapes=((256, 128, 4, "mul1"),),
    rows=(1, 2, 3, 17),
    edge_rows=(7, 31, 33),
    repeats=3,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def route(name="fp16-staged"):
    return subject_of(ROUTES[name], CPU)


def fake(run, **traits):
    return Subject(
        name="fake", run=run, rejects=lambda weight, rows: "", device=CPU, traits=Traits(specialised=True, **traits)
    )


def staged(x, weight, out_dtype):
    return linear_staged(x.half(), weight, accumulate=torch.float32).to(out_dtype)


def row_by_row(x, weight, out_dtype):
    inner, rotated = inner_weight(weight).float(), hadamard_half(x.half(), pre_scale=weight.suh).float()
    y = hadamard_128(torch.cat([row[None] @ inner for row in rotated])) * weight.svh.float()
    return (y if weight.bias is None else y + weight.bias.float()).to(out_dtype)


def status(check, subject, scope=TINY):
    try:
        outcome = check(subject, scope)
    except Exception as error:
        outcome = error
    return judge(0, "", "", outcome).status


# ------------------------------------------------------------------------------------------------ oracle and samples
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_oracle_and_the_codec_agree(bits):
    weight = samples.make_weight(128, 128, bits, "mcg", seed=bits)
    assert torch.equal(oracle.decode_weight(weight.trellis, "mcg"), inner_weight(weight))


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_oracles_tables_are_the_codecs(codebook):
    assert torch.equal(torch.from_numpy(oracle.codebook_table(codebook)), codebook_values(codebook))


def test_every_state_occurs_once():
    states = oracle.decode_states(samples.every_state_words())
    assert sorted(states.reshape(-1).tolist()) == list(range(1 << 16))


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_every_packed_bit_is_set_once(bits):
    words = samples.single_bit_words(bits).to(torch.int32) & 0xFFFF
    flat = words.view(256 * bits, 16 * bits)
    assert torch.equal(flat.sum(0), torch.full((16 * bits,), 0xFFFF))
    assert bool((flat.count_nonzero(dim=1) == 1).all())


def test_one_hot_rows_turn_into_single_inputs():
    turned = hadamard_128(samples.one_hot_rows(256, rotated=True).float())
    assert torch.equal(turned, torch.eye(256) * turned[0, 0])


def test_the_bound_grows_with_the_rows_and_not_with_the_bias():
    weight = samples.make_weight(256, 128, 4, "mcg")
    x = samples.make_rows(2, 256)
    once, twice = (oracle.exact_product(x * scale, weight, "rotated").bound for scale in (1, 2))
    assert torch.allclose(twice, 2 * once, rtol=0.05)


def test_upstreams_weights_are_the_oracles():
    evidence = decoding.oracle_against_upstream(GOLDEN)
    assert evidence.worst == 0 and evidence.cases == 24 * 128 * 128
    assert decoding.oracle_against_upstream(None).status == "not run"


# ------------------------------------------------------------------------------------------------ findings
def test_a_value_beyond_its_bound_fails_and_nan_fails():
    evidence = Evidence(checked="", cases=1, worst=1.0, bound=1.0)
    assert judge(1, "", "", evidence).status == "pass"
    assert judge(1, "", "", replace(evidence, worst=1.1)).status == "fail"
    nan = judge(1, "", "", replace(evidence, worst=float("nan")))
    assert nan.status == "fail" and nan.worst is None
    assert judge(1, "", "", replace(evidence, cases=0)).status == "fail"


def test_a_property_that_raises_has_failed():
    finding = judge(1, "", "", RuntimeError("out of memory"))
    assert finding.status == "fail" and "out of memory" in finding.reason


# ------------------------------------------------------------------------------------------------ sound routes
@pytest.mark.parametrize("name", ["reference", "fp16-staged", "rotated-fp16"])
@pytest.mark.parametrize("check", [p.check for p in PROPERTIES if p.name not in ("two processes", "faults are caught")])
def test_sound_routes_pass(name, check):
    assert status(check, route(name)) != "fail"


def test_a_second_process_gives_the_same_bits():
    assert status(launches.another_process, route()) == "pass"


def test_a_row_by_row_route_is_row_invariant_and_combines_experts():
    subject = fake(row_by_row, row_bits=True)
    for check in (rows.row_invariance, rows.tile_edges, rows.wide_range_rows, rows.strides_and_alignment):
        assert check(subject, TINY).bound == 0 and status(check, subject) == "pass"


def test_experts_alone_and_together(monkeypatch):
    monkeypatch.setitem(ROUTES, "rowwise", replace(ROUTES["fp16-staged"], name="rowwise", run=_route_run(row_by_row)))
    monkeypatch.setitem(TRAITS, "rowwise", Traits(row_bits=True))
    assert status(grouped.together_and_alone, route("rowwise")) == "pass"
    assert status(grouped.combined_and_separate, route("rowwise")) == "pass"


def _route_run(run):
    return lambda x, weight, dense, out_dtype: run(x, weight, out_dtype)


def dense_in_float16(x, weight, out_dtype):
    left = hadamard_128(inner_weight(weight).float().T).T
    dense = hadamard_128(left) * weight.suh.float()[:, None] * weight.svh.float()
    y = x.half().float() @ dense.half().float()
    return (y if weight.bias is None else y + weight.bias.float()).to(out_dtype)


def one_side_in_float16(x, weight, out_dtype):
    inner = inner_weight(weight).float()
    if rotates_rows(weight):
        outputs = (hadamard_128(inner) * weight.svh.float()).half().float()
        y = hadamard_half(x.half(), pre_scale=weight.suh).float() @ outputs
    else:
        inputs = (hadamard_128(inner.T).T * weight.suh.float()[:, None]).half().float()
        y = hadamard_128(x.half().float() @ inputs) * weight.svh.float()
    return (y if weight.bias is None else y + weight.bias.float()).to(out_dtype)


def dense_in_e4m3(x, weight, out_dtype):
    def rounded(values, largest):
        return (values * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)

    dense, rows = dense_weight(weight).float(), x.float()
    y = rounded(rows, rows.abs().amax(1, keepdim=True)) @ rounded(dense, dense.abs().amax(0))
    return (y.bfloat16() if weight.bias is None else y.bfloat16() + weight.bias.float()).to(out_dtype)


@pytest.mark.parametrize(
    "check",
    [
        decoding.one_hot_decode,
        decoding.directed_patterns,
        decoding.every_state,
        rows.row_invariance,
        sums.error_over_bound,
        sums.relative_error,
        mutants.suite_catches_mutants,
    ],
)
@pytest.mark.parametrize(
    ("run", "arithmetic"),
    [(dense_in_float16, "dense16"), (one_side_in_float16, "half16"), (dense_in_e4m3, "e4m3")],
)
def test_routes_that_round_their_weights_pass_within_their_own_bounds(run, arithmetic, check):
    assert status(check, fake(run, arithmetic=arithmetic)) != "fail"


@pytest.mark.parametrize("shape", [(256, 512, 4, "mcg"), (512, 256, 4, "mcg")])
def test_a_weight_rounded_on_one_side_is_held_to_its_own_bound(shape):
    def twice(x, weight, out_dtype):  # rounds its rows or its sums once more
        y = one_side_in_float16(x.bfloat16(), weight, torch.float32)
        return y.to(out_dtype)

    scope = replace(TINY, shapes=(shape,), one_hot=shape[:2])
    for check in (decoding.one_hot_decode, sums.error_over_bound, sums.relative_error):
        assert status(check, fake(one_side_in_float16, arithmetic="half16"), scope) == "pass"
    for check in (sums.error_over_bound, sums.relative_error):
        assert status(check, fake(twice, arithmetic="half16"), scope) == "fail"


@pytest.mark.parametrize("shape", sums.SPLIT_SHAPES)
def test_rounded_weights_stay_below_half_the_bound(shape):
    subject = fake(dense_in_float16, arithmetic="dense16")
    evidence = sums.error_over_bound(subject, replace(TINY, shapes=(shape,)))
    assert 0.05 < evidence.worst <= 0.45


# ------------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize("name", ["reference", "fp16-staged"])
def test_every_fault_is_caught(name):
    evidence = mutants.suite_catches_mutants(route(name), TINY)
    assert evidence.worst == 0 and evidence.cases >= 6


@pytest.mark.parametrize("fault", ["swapped codebooks", "an off-by-one window", "a flipped multiplier bit"])
@pytest.mark.parametrize("check", [decoding.one_hot_decode, decoding.directed_patterns, decoding.every_state])
def test_decoding_faults_are_caught_by_each_decoding_property(fault, check):
    subject = route()
    assert status(check, altered(subject, fault, mutants.faults(subject)[fault])) == "fail"


@pytest.mark.parametrize("fault", ["swapped codebooks", "a dropped Hadamard stage", "one flipped weight bit"])
def test_numeric_faults_are_beyond_the_fp64_bound(fault):
    subject = route()
    assert status(sums.error_over_bound, altered(subject, fault, mutants.faults(subject)[fault])) == "fail"


@pytest.mark.parametrize("check", [rows.row_invariance, rows.tile_edges, sums.error_over_bound])
def test_a_skipped_tail_row_is_caught(check):
    subject = replace(route(), traits=Traits(specialised=True))
    assert status(check, altered(subject, "a tail", mutants.skipped_tail_row)) == "fail"


def test_a_suite_blind_to_a_fault_says_so():
    blind = fake(lambda x, weight, out_dtype: staged(x, weight, out_dtype) * float("nan"))
    evidence = mutants.suite_catches_mutants(blind, TINY)
    assert "nothing, yet" in evidence.reason and evidence.worst == 1


def test_a_bound_that_is_too_wide_misses_wrong_weights(monkeypatch):
    assert sums.one_wrong_weight(route(), TINY).worst <= 0.1
    exact = oracle.exact_product
    wide = lambda *given: replace(exact(*given), bound=exact(*given).bound * 50)  # noqa: E731
    monkeypatch.setattr(sums, "exact_product", wide)
    assert sums.one_wrong_weight(route(), TINY).worst > 0.5


def test_rows_that_depend_on_their_neighbours_are_caught():
    def run(x, weight, out_dtype):
        return row_by_row(x, weight, out_dtype) * (1 + 2.0**-20 * (len(x) > 16))

    assert status(rows.row_invariance, fake(run, row_bits=True)) == "fail"


def test_a_result_rounded_twice_is_caught():
    def run(x, weight, out_dtype):
        return staged(x, weight, torch.float32).half().to(out_dtype)

    assert status(rows.dtype_matrix, fake(run)) == "pass"  # its fp32 result is rounded too: the types agree
    assert status(sums.error_over_bound, fake(run)) == "fail"

    def through_bfloat16(x, weight, out_dtype):
        y = staged(x, weight, torch.float32)
        return y.bfloat16().half() if out_dtype == torch.float16 else y.to(out_dtype)

    assert status(rows.dtype_matrix, fake(through_bfloat16)) == "fail"


def test_overwritten_rows_random_results_and_ignored_strides_are_caught():
    def overwrites(x, weight, out_dtype):
        y = staged(x, weight, out_dtype)
        x.zero_()
        return y

    def drifts(x, weight, out_dtype):
        return staged(x, weight, torch.float32).add(torch.rand(1) * 1e-6).to(out_dtype)

    def ignores_strides(x, weight, out_dtype):
        return staged(torch.as_strided(x, x.shape, (x.shape[1], 1)), weight, out_dtype)

    assert status(launches.launch_contract, fake(overwrites)) == "fail"
    assert status(launches.repeats, fake(drifts)) == "fail"
    assert status(rows.strides_and_alignment, fake(ignores_strides)) == "fail"


def test_infinite_results_are_caught():
    assert status(rows.finite_outputs, fake(lambda x, w, t: staged(x, w, torch.float32) * 1e38)) == "fail"


def test_counters_that_do_not_move_are_caught(monkeypatch):
    assert status(guards.counters, route()) == "pass"
    monkeypatch.setattr(guards, "read_launches", dict)
    assert status(guards.counters, route()) == "fail"


def test_a_route_that_serves_anything_is_caught(monkeypatch):
    lax = replace(ROUTES["fp16-staged"], name="lax", run=lambda x, weight, dense, out_dtype: x.new_zeros(1, 1))
    monkeypatch.setitem(ROUTES, "lax", lax)
    assert status(guards.guards, route("lax")) == "fail"


def test_gpu_properties_do_not_apply_to_the_cpu():
    for check in (launches.graph_replay, launches.poisoned_scratch, launches.canaries, launches.two_streams):
        assert isinstance(check(route(), TINY), Skipped)


# ------------------------------------------------------------------------------------------------ command and receipt
def test_the_command_writes_a_receipt(tmp_path, monkeypatch):
    monkeypatch.setattr("exl3eval.kernel_check.subject.QUICK_CPU", TINY)
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    arguments = ["check", "--device", "cpu", "--quick", "--route", "fp16-staged", "--route", "broken-window"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    receipt = parse_json((tmp_path / "receipt.json").read_text(), where="receipt")
    assert receipt["schema"] == SCHEMA and receipt["verdict"] == "PASS" and receipt["kernels"] is None
    assert receipt["controls"] == ["broken-window"] and receipt["device"]["type"] == "cpu"
    numbers = {finding["number"] for finding in receipt["findings"]}
    assert set(range(1, 23)) <= numbers
    failed = {f["number"] for f in receipt["findings"] if f["status"] == "fail"}
    assert {3, 4, 5, 14} <= failed and {f["route"] for f in receipt["findings"] if f["status"] == "fail"} == {
        "broken-window"
    }
    assert str(tmp_path) not in json.dumps(receipt)
    assert "| 3 | one-hot decode |  | pass | FAIL |" in (tmp_path / "check.md").read_text()


def test_a_failing_route_or_an_uncaught_control_turns_the_verdict():
    passed = judge(3, "one-hot decode", "decode-gemm", Evidence(checked="", cases=1, worst=0))
    failed = replace(passed, status="fail")
    assert is_green([passed]) and not is_green([passed, failed])
    assert is_green([replace(failed, route="broken-window")])
    assert not is_green([replace(failed, route="broken-window", name=CONTROL_CAUGHT)])
    receipt = build_receipt([failed], identity={"device": {"name": "a GPU"}}, quick=True)
    assert receipt["verdict"] == "FAIL" and receipt["counts"]["fail"] == 1
    assert "# Kernel check, a GPU: FAIL" in render_markdown(receipt)


def test_wrong_arguments_are_the_users():
    with pytest.raises(UsageError, match="no such route"):
        subjects_on(CPU, ["wgmma"])
    with pytest.raises(UsageError, match="needs a CUDA device"):
        subjects_on(CPU, ["decode-gemm"])
    with pytest.raises(UsageError, match="not one of"):
        check_routes("tpu")
    with pytest.raises(UsageError, match="not a file"):
        check_routes("cpu", upstream=Path("absent.safetensors"))


def test_every_route_of_the_kernels_package_has_its_traits():
    ours = {name for name, route in ROUTES.items() if route.run.__module__.startswith("exl3_kernels")}
    assert ours == set(TRAITS)

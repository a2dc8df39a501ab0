"""Every part of the vLLM engine that can be shown without vLLM: environments, records, evidence, lanes, scoring."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from exl3eval.arm import ArmSpec
from exl3eval.engine.lanes import Lane
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.request import PREFILL
from exl3eval.variant import Variant
from exl3eval.vllm_engine.arguments import engine_arguments, kv_cache_bytes
from exl3eval.vllm_engine.child import check_effective
from exl3eval.vllm_engine.environment import INHERITED, check_version, child_environment, declared_environment
from exl3eval.vllm_engine.evidence import read_counter
from exl3eval.vllm_engine.floor import check_cross_engine
from exl3eval.vllm_engine.plan import plan_arms
from exl3eval.vllm_engine.process import run_process, serve
from exl3eval.vllm_engine.request import (
    ChildReport,
    ChildRequest,
    LaneReport,
    LaneTask,
    read_report,
    read_request,
    write_report,
    write_request,
)
from exl3eval.vllm_engine.stack import Evidence, check_findings, find_lines, parse_stack

BF16 = Path(__file__).parents[1] / "data/qwen2-tied/bf16"
PLUGIN = {"linear": "1-:reference", "embedding": "stored"}
COUNTED = {"hits": 2, "misses": 3}


def request(tmp_path, **changes):
    fields = {
        "arm": "base",
        "model": str(BF16),
        "reference_model": str(BF16),
        "reference_hidden": str(tmp_path / "hidden"),
        "lanes": (LaneTask(lane=PREFILL, rows=str(tmp_path / "rows")),),
        "style": "one-token",
        "mode": "eager",
        "activations": "float32",
        "device_type": "cpu",
        "vocab_size": 1000,
        "head": "own",
        "logits": "float32",
        "float32_head": False,
        "arguments": {},
        "evidence": (Evidence(kind="kernels", pattern="gemm"),),
        "plugin": True,
        "ids": str(tmp_path / "ids.safetensors"),
        "digests": ("ab" * 32,),
        "report": str(tmp_path / "report.json"),
        "trust_remote_code": False,
        "fresh": False,
    }
    return ChildRequest(**fields | changes)


def report():
    finding = find_lines(Evidence(kind="kernels", pattern="gemm"), ["a_gemm", "b"])
    lane = LaneReport(resumed=1, repeat_difference=0.0, seconds=2.5)
    return ChildReport(
        effective={"dtype": "float32"},
        plugin=None,
        lanes={"prefill": lane},
        embedding_bytes=None,
        findings=(finding,),
        start_seconds=1.0,
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1rc2", "0.32.0+cpu"])
def test_versions_in_range_pass(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0", "unknown"])
def test_versions_outside_are_refused_with_the_range(version):
    with pytest.raises(UsageError, match=r">=0\.26,<0\.33"):
        check_version(version)


def test_a_child_sees_only_declared_variables(tmp_path):
    caller = {"PATH": "/bin", "VLLM_ATTENTION_BACKEND": "X", "EXL3EVAL_CACHE": "/x", "PYTHONSTARTUP": "/evil.py"}
    declared = declared_environment(device_type="cpu", mode="eager", plugin=PLUGIN, stack=None)
    environment = child_environment(caller, declared, cache_dir=tmp_path)
    assert set(environment) == {"PATH", "VLLM_CACHE_ROOT", *declared}
    assert not set(declared) & set(INHERITED)
    assert json.loads(environment["EXL3_VLLM_VARIANT"]) == PLUGIN


def test_plugins_load_only_where_they_are_declared():
    stack = parse_stack({"environment": {"MY_FLAG": "8"}, "evidence": {"log": "fused"}}, where="v.toml")
    plain = declared_environment(device_type="cuda", mode="graphs", plugin=None, stack=None)
    foreign = declared_environment(device_type="cuda", mode="graphs", plugin=None, stack=stack)
    assert (plain["VLLM_PLUGINS"], foreign["VLLM_PLUGINS"], foreign["MY_FLAG"]) == ("", "", "8")
    assert declared_environment(device_type="cuda", mode="graphs", plugin=PLUGIN, stack=None)["VLLM_PLUGINS"] == "exl3"
    assert "OMP_NUM_THREADS" not in plain and "EXL3_VLLM_VARIANT" not in foreign


def test_one_gpu_of_the_callers_is_passed_on(tmp_path):
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "4,6"}, {}, cache_dir=tmp_path, device_index=1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"


def test_records_survive_the_file(tmp_path):
    asked, answered = request(tmp_path), report()
    write_request(tmp_path / "request.json", asked)
    write_report(tmp_path / "report.json", answered)
    assert read_request(tmp_path / "request.json") == asked
    assert read_report(tmp_path / "report.json") == answered
    with pytest.raises(UsageError, match="is not of schema"):
        read_report(tmp_path / "request.json")


def test_a_cpu_has_no_graphs(tmp_path):
    with pytest.raises(UsageError, match="CUDA graphs"):
        request(tmp_path, mode="graphs")


def test_one_program_serves_every_lane(tmp_path):
    """Compile ranges depend on the token budget: it may not depend on the rows of a decode step."""
    lanes = tuple(
        LaneTask(lane=Lane(kind="decode", rows=rows, scored=8), rows=str(tmp_path / str(rows))) for rows in (1, 8)
    )
    arguments = engine_arguments(request(tmp_path, lanes=lanes), num_inputs=512)
    assert arguments["max_num_batched_tokens"] == 8 * 504
    assert engine_arguments(request(tmp_path, lanes=lanes[:1]), num_inputs=512)["max_num_batched_tokens"] == 2048
    assert arguments["enable_prefix_caching"] is False and arguments["max_model_len"] == 513
    forced = engine_arguments(request(tmp_path, lanes=lanes, style="forced", float32_head=True), num_inputs=512)
    assert forced["logits_processors"] and forced["hf_overrides"] == {"head_dtype": "float32"}


def test_the_cache_holds_twice_what_the_lanes_need():
    # 2 layers, 2 key-value heads of 64: 2 x 2 x 2 x 64 x 4 bytes a token.
    assert kv_cache_bytes(BF16, num_tokens=100_000, num_sequences=8) == 2 * 2048 * (100_000 + 1024)
    assert kv_cache_bytes(BF16, num_tokens=10, num_sequences=1) == 1 << 27


STACK = {
    "environment": {"VLLM_EXL3_EMBED_BITS": "8"},
    "plugins": ["exl3"],
    "packages": ["exllamav3"],
    "arguments": {"quantization": "exl3"},
    "python": "/opt/fork/bin/python",
    "evidence": [{"log": "embedding: int8"}, {"kernels": "exl3_gemm", "minimum": 9}],
}


def test_a_stack_is_declared_without_its_path():
    stack = parse_stack(STACK, where="fork.toml")
    assert stack.interpreter == Path("/opt/fork/bin/python")
    assert "/opt" not in json.dumps(stack.identity)
    assert stack.evidence[1] == Evidence(kind="kernels", pattern="exl3_gemm", minimum=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evidence": []}, "no evidence"),
        ({"evidence": {"log": "("}}, "no regular expression"),
        ({"evidence": {"counter": "routes.count"}}, "package.module:name"),
        ({"evidence": {"log": "a", "kernels": "b"}}, "expected one of"),
        ({"evidence": {"log": "a", "minimum": 0}}, "needs 0"),
        ({"environment": {"A": 8}}, "table of strings"),
        ({"enviroment": {}}, "unknown key `vllm.enviroment`"),
        ({"arguments": {"enable_prefix_caching": True}}, "which the harness decides"),
    ],
)
def test_a_malformed_stack_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        parse_stack(STACK | change, where="fork.toml")


def test_evidence_that_is_not_seen_invalidates_the_arm():
    lines = ["INFO embedding: int8 (248320 rows)", "INFO ready"]
    seen = find_lines(Evidence(kind="log", pattern="embedding: int8"), lines)
    check_findings("fork", [seen])
    assert seen.first == "INFO embedding: int8 (248320 rows)"
    with pytest.raises(InvalidRunError, match=r"evidence log = 'fused' was seen 0 times, expected 1 or more"):
        check_findings("fork", [seen, find_lines(Evidence(kind="log", pattern="fused"), lines)])


def test_counters_may_be_numbers_mappings_or_functions(monkeypatch):
    module = SimpleNamespace(count=4, table=COUNTED, read=lambda: COUNTED, text="many")
    monkeypatch.setitem(sys.modules, "fork_counters", module)
    found = {
        name: read_counter(Evidence(kind="counter", pattern=f"fork_counters:{name}")) for name in ("count", "read")
    }
    assert (found["count"].count, found["read"].count, found["read"].first) == (4, 5, "hits: 2")
    for name in ("text", "absent"):
        with pytest.raises(UsageError, match="evidence counter"):
            read_counter(Evidence(kind="counter", pattern=f"fork_counters:{name}"))


EFFECTIVE = {
    "prefix_caching": False,
    "async_scheduling": False,
    "tensor_parallel": 1,
    "dtype": "float32",
    "float32_matmul": "highest",
    "compile_mode": "NONE",
    "cudagraph_mode": "NONE",
}


@pytest.mark.parametrize(
    ("field", "value"), [("prefix_caching", True), ("dtype", "bfloat16"), ("compile_mode", "VLLM_COMPILE")]
)
def test_an_engine_that_is_not_as_declared_is_invalid(tmp_path, field, value):
    check_effective(EFFECTIVE, request(tmp_path))
    with pytest.raises(InvalidRunError, match=field):
        check_effective(EFFECTIVE | {field: value}, request(tmp_path))


def arm(name, activations, lanes):
    variant = Variant(name=name, doc="d", activations=activations, linear="1-:reference", embedding="stored")
    return ArmSpec(name=name, checkpoint=None, checkpoint_sha256="", declared=variant, resolved=variant, lanes=lanes)


def test_every_mode_and_lane_has_an_unquantized_control_in_the_same_activations():
    plain, graph = Lane(kind="decode", rows=4, scored=8), Lane(kind="decode", rows=4, scored=8, graph=True)
    specs = [
        arm("reference", "float32", (PREFILL,)),
        arm("reference-bfloat16", "bfloat16", (PREFILL,)),
        arm("base", "bfloat16", (PREFILL, plain)),
        arm("graphs", "bfloat16", (PREFILL, graph)),
    ]
    planned = [
        (a.name, a.spec.name, a.mode, [lane.name for lane in a.lanes])
        for a in plan_arms(specs, stacks={}, compiled=False)
    ]
    assert planned == [
        ("reference", "reference", "eager", ["prefill"]),
        ("reference-bfloat16", "reference-bfloat16", "eager", ["prefill"]),
        ("reference-{lane}", "reference-bfloat16", "eager", ["decode[4]"]),
        ("reference-{lane}", "reference-bfloat16", "graphs-uncompiled", ["decode[4,graph]"]),
        ("base", "base", "eager", ["prefill", "decode[4]"]),
        ("graphs", "graphs", "eager", ["prefill"]),
        ("graphs", "graphs", "graphs-uncompiled", ["decode[4,graph]"]),
    ]
    compiled = plan_arms(specs[:3], stacks={}, compiled=True)
    assert [(a.name, a.mode) for a in compiled][2:] == [("reference-{lane}-compiled", "compiled"), ("base", "compiled")]
    assert compiled[2].lanes == (PREFILL, plain)
    across = plan_arms(specs[:3], stacks={}, compiled=False, own_reference=False)
    assert (across[0].name, any(a.is_reference for a in across)) == ("reference-vllm", False)


def test_differences_across_engines_need_a_floor_below_them():
    check_cross_engine("vllm", "vllm", delta_nats=1e-9, floor_nats=None)
    check_cross_engine("transformers", "vllm", delta_nats=-2e-3, floor_nats=1e-3)
    with pytest.raises(InvalidRunError, match="below the floor"):
        check_cross_engine("transformers", "vllm", delta_nats=5e-4, floor_nats=1e-3)
    with pytest.raises(InvalidRunError, match="no floor"):
        check_cross_engine("transformers", "vllm", delta_nats=5e-4, floor_nats=None)


FAKE_CHILD = """#!{python}
import json, os, sys
*_, request, pipe = sys.argv
with open(int(pipe), "w") as out:
    print(json.dumps({{"advance": 5}}), file=out)
    {body}
"""


def fake_python(tmp_path, body):
    script = tmp_path / "python"
    script.write_text(FAKE_CHILD.format(python=sys.executable, body=body))
    script.chmod(0o755)
    return script


def run_fake(tmp_path, body, on_positions=lambda count: None, on_started=lambda: None):
    asked = tmp_path / "request.json"
    write_request(asked, request(tmp_path))
    return run_process(
        fake_python(tmp_path, body),
        "child",
        asked,
        arm="base",
        environment={},
        on_positions=on_positions,
        on_started=on_started,
    )


def test_a_refusal_in_the_child_is_raised_here(tmp_path):
    seen = []
    with pytest.raises(InvalidRunError, match="m"):
        body = 'print(json.dumps({"error": "InvalidRunError", "message": "m", "hint": "h"}), file=out)'
        run_fake(tmp_path, body, seen.append)
    assert seen == [5]


def test_a_child_that_dies_is_reported_with_its_last_error(tmp_path):
    with pytest.raises(UsageError, match=r"`base`: .* code 3: ValueError: no memory for cache blocks"):
        run_fake(tmp_path, 'print("ValueError: no memory for cache blocks"); sys.exit(3)')


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("AssertionError: Error in memory profiling. Initial free memory 136.1 GiB", "run nothing else there"),
        ("ValueError: something", "its log: vllm/"),
    ],
)
def test_a_known_failure_has_its_cure_as_hint(tmp_path, line, hint):
    with pytest.raises(UsageError) as raised:
        run_fake(tmp_path, f"print({line!r}); sys.exit(1)")
    assert hint in raised.value.hint


def test_the_log_of_a_child_comes_back(tmp_path):
    assert run_fake(tmp_path, 'print("embedding: int8")') == ["embedding: int8"]


STARTED = 'print(json.dumps({"started": True}), file=out, flush=True); print("seen", sys.stdin.readline())'


def test_a_child_that_is_ready_waits_for_the_word_to_go_on(tmp_path):
    seen = []
    assert run_fake(tmp_path, STARTED, on_started=lambda: seen.append("ready"))[0] == "seen go"
    assert seen == ["ready"]


def test_a_child_that_waits_in_vain_is_ended(tmp_path):
    def refuse():
        raise InvalidRunError("the reference is broken")

    with pytest.raises(InvalidRunError, match="the reference is broken"):
        run_fake(tmp_path, STARTED + "; import time; time.sleep(60)", on_started=refuse)
    assert "seen" not in (tmp_path / "log.txt").read_text()


def test_a_child_answers_refusals_through_its_pipe():
    reader, writer = os.pipe()

    def refuse(tell):
        tell({"advance": 3})
        raise UsageError("m", hint="h")

    assert serve(refuse, writer) == 2
    with open(reader) as stream:
        assert [json.loads(line) for line in stream] == [
            {"advance": 3},
            {"error": "UsageError", "message": "m", "hint": "h"},
        ]

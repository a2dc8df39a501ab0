"""Memory of an arm under vLLM: what is asked of the engine, what the receipt says, which options are refused."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3eval import cli
from exl3eval.errors import EXIT_FAIL, EXIT_INVALID, EXIT_USAGE
from exl3eval.memory import served
from exl3eval.records import read_receipt
from exl3eval.variant import SCHEMA
from exl3eval.vllm_engine.environment import Interpreter
from exl3eval.vllm_engine.memory import (
    ENGINE_BUDGET,
    FITS,
    HARD_CAP,
    EngineMemory,
    EngineMemoryRequest,
    MemoryReading,
    RequestOutcome,
)
from exl3eval.vllm_engine.process import LOG_FILE

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/qwen2-tied"
VLLM_PYTHON = os.environ.get("EXL3EVAL_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
CALL = ("--engine", "vllm", "--model", DATA / "exl3-mcg-5bpw", "--max-model-len", "128")
SERVED = EngineMemory(
    outcome=FITS,
    message="",
    device_bytes=None,
    engine_budget_bytes=None,
    hard_cap_bytes=None,
    weights_bytes=None,
    kv_cache_bytes=1 << 30,
    kv_tokens=4096,
    peak_allocated=None,
    peak_reserved=None,
    peak_used=3 << 30,
    readings={name: MemoryReading(allocated=None, reserved=None, used=1 << 20) for name in ("before", "started")},
    requests=tuple(
        RequestOutcome(prompt_tokens=112, generated_tokens=8, finished=True, found=found)
        for found in (True, False, True)
    ),
    effective={"max_model_len": 128},
    unknown={"peak_allocated": "no statistics", "peak_reserved": "no statistics", "weights_bytes": "packed"},
)
REFUSED = replace(SERVED, outcome=ENGINE_BUDGET, message="no room for cache blocks", kv_tokens=None, requests=())


class Engine:
    """In place of a real engine: keeps what it was asked, answers what it was given."""

    def __init__(self) -> None:
        self.answer, self.log = SERVED, ""
        self.request: EngineMemoryRequest | None = None
        self.environment: dict[str, str] = {}

    def measure(
        self, request: EngineMemoryRequest, *, python: Path, environment: dict[str, str], folder: Path
    ) -> EngineMemory:
        self.request, self.environment, self.python = request, environment, python
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG_FILE).write_text(self.log)
        return self.answer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(served, "measure_engine_memory", fake.measure)
    monkeypatch.setattr(
        served,
        "find_interpreter",
        lambda python, packages: Interpreter(python=python or Path("python"), packages={}, version="3.12"),
    )
    return fake


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("EXL3EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EXL3EVAL_THREADS", "1")
    monkeypatch.setenv("EXL3EVAL_SECRET", "of the caller's shell")
    monkeypatch.delenv("EXL3EVAL_VLLM_PYTHON", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exl3eval", "memory", "--quiet", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def stack_variant(folder: Path, evidence: str, arguments: str = "") -> Path:
    fields = {"name": "fork", "doc": "F.", "activations": "auto", "linear": "auto", "embedding": "stored"}
    lines = [f'{name} = "{value}"' for name, value in {"schema": SCHEMA, **fields}.items()]
    lines += ["[vllm]", f"evidence = {{ {evidence} }}", 'plugins = ["fork"]', f"arguments = {{ {arguments} }}"]
    path = folder / "fork.toml"
    path.write_text("\n".join(lines))
    return path


def test_the_engine_is_asked_for_secrets_in_prompts_that_fill_it(engine, call):
    code, _, err = call(*CALL, "--variant", "int8-embed", "--max-num-seqs", "3", "--device", "cpu")
    assert code == 0, err
    request = engine.request
    assert (request.max_model_len, request.max_num_seqs, request.mode) == (128, 3, "eager")
    assert (request.hard_cap_bytes, request.kv_cache_bytes) == (None, 1 << 30)
    assert not Path(request.model, "upstream_logits.safetensors").exists(), "vLLM takes every such file for weights"
    assert Path(request.model, "model.safetensors").is_file()
    starts = []
    for probe in request.probes:
        prompt, secret = probe.prompt, probe.expected
        assert len(prompt) + served.ANSWER_TOKENS == 128 and len(secret) <= served.ANSWER_TOKENS
        (start,) = [i for i in range(len(prompt)) if prompt[i : i + len(secret)] == secret]
        starts.append(start)
    assert len(starts) == len(served.DEPTHS) and starts == sorted(set(starts))
    assert json.loads(engine.environment["EXL3_VLLM_VARIANT"])["embedding"] == "int8"
    assert "EXL3EVAL_SECRET" not in engine.environment


def test_long_prompts_are_whole_texts_end_to_end(engine, call, tmp_path):
    """Of a copy of the model whose rotary embedding is scaled, so that the length is vLLM's to judge."""
    model = tmp_path / "long"
    shutil.copytree(DATA / "bf16", model)
    config = json.loads((model / "config.json").read_text())
    scaled = config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (model / "config.json").write_text(json.dumps(scaled))
    code, _, err = call("--engine", "vllm", "--model", model, "--max-model-len", "5000", "--device", "cpu")
    assert code == 0, err
    prompt = engine.request.probes[-1].prompt
    assert len(prompt) == 5000 - served.ANSWER_TOKENS
    assert prompt[:100] not in [prompt[i : i + 100] for i in range(1, len(prompt))]


def test_the_receipt_is_sealed_and_names_what_ran(engine, call, tmp_path):
    code, out, err = call(*CALL, "--device", "cpu", "--out", tmp_path / "m.json")
    assert code == 0, err
    receipt = read_receipt(tmp_path / "m.json")
    assert receipt["schema"] == "exl3eval/memory-served/1"
    identity, results = receipt["identity"], receipt["results"]
    assert identity["limits"] == {
        "engine_budget": None,
        "hard_cap_bytes": None,
        "kv_cache_bytes": 1 << 30,
        "max_model_len": 128,
        "max_num_seqs": 8,
    }
    assert identity["model"]["form"] == "exl3" and len(identity["model"]["sha256"]) == 64
    assert identity["environment"]["VLLM_PLUGINS"] == "exl3"
    assert identity["interpreter"]["python"] == "3.12" and identity["resolved"]["activations"] == "float32"
    assert results["fits"] and results["kv_tokens"] == 4096 and results["weights_bytes"] is None
    assert [each["found"] for each in results["requests"]] == [True, False, True]
    assert str(tmp_path) not in (tmp_path / "m.json").read_text()
    assert "4096 tokens" in out and "of 3 requests 3 finished, 2 found" in out
    assert "unknown: peak allocated, peak reserved: no statistics" in out
    again, _, err = call(*CALL, "--device", "cpu", "--out", tmp_path / "m.json")
    assert again == EXIT_USAGE and "immutable" in err


def test_what_does_not_fit_is_a_receipt_and_exit_1(engine, call, tmp_path):
    engine.answer = REFUSED
    code, out, _ = call(*CALL, "--device", "cpu", "--out", tmp_path / "m.json")
    assert code == EXIT_FAIL
    assert "does not fit, engine budget: no room for cache blocks; of 3 requests 0 finished" in " ".join(out.split())
    assert read_receipt(tmp_path / "m.json")["results"]["fits"] is False


def test_a_request_that_is_cut_short_does_not_fit(engine, call):
    cut = replace(SERVED.requests[0], finished=False)
    engine.answer = replace(SERVED, requests=(cut, *SERVED.requests[1:]))
    code, out, _ = call(*CALL, "--device", "cpu", "--json")
    assert (code, json.loads(out)["results"]["outcome"]) == (EXIT_FAIL, FITS)


def test_three_limits_stand_apart_on_a_gpu(engine, call, monkeypatch):
    """On a fake GPU of 8 GiB."""

    class Properties:
        total_memory, major, minor = 8 << 30, 9, 0

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(served, "resolve_device", lambda name: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    monkeypatch.setattr(served, "device_identity", lambda device: {"type": "cuda", "name": "Fake"})
    engine.answer = replace(
        REFUSED,
        outcome=HARD_CAP,
        message="CUDA out of memory",
        device_bytes=8 << 30,
        engine_budget_bytes=4 << 30,
        hard_cap_bytes=2 << 30,
    )
    code, out, err = call(*CALL, "--budget", "2", "--engine-budget", "0.5")
    assert code == EXIT_FAIL, err
    request = engine.request
    assert (request.hard_cap_bytes, request.budget_frac, request.kv_cache_bytes) == (2 << 30, 0.5, None)
    assert engine.environment["CUDA_VISIBLE_DEVICES"] == "0"
    rows = {line.split("  ")[1].strip(): line for line in out.splitlines() if " GiB " in line}
    for limit, size in (("engine budget", "4.00"), ("hard cap", "2.00"), ("physical memory", "8.00")):
        assert f"{size} GiB" in rows[limit], out
    assert "does not fit, hard cap: CUDA out of memory" in out
    code, _, err = call(*CALL, "--budget", "9")
    assert code == EXIT_USAGE and "exceeds the 8.00 GiB" in err


def test_graphs_of_a_variant_are_served_as_graphs(engine, call):
    code, _, err = call(*CALL, "--variant", "graph-decode", "--device", "cpu")
    assert code == EXIT_USAGE and "graphs-uncompiled" in err, err
    assert engine.request is None


def test_a_stack_proves_itself_by_its_log(engine, call, tmp_path):
    variant = stack_variant(tmp_path, 'log = "fork engaged"', 'quantization = "fork"')
    engine.log = "INFO fork engaged\n"
    code, out, err = call(*CALL, "--variant", variant, "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["results"]["evidence"][0]["count"] == 1
    assert engine.request.arguments == {"quantization": "fork"}
    assert engine.environment["VLLM_PLUGINS"] == "fork"


@pytest.mark.parametrize(
    ("evidence", "arguments", "exit_code", "reason"),
    [
        ('log = "fork engaged"', "", EXIT_INVALID, "was seen 0 times"),
        ('counter = "fork:calls"', "", EXIT_USAGE, "a memory account reads the log alone"),
        ('log = "fork engaged"', "gpu_memory_utilization = 0.5", EXIT_USAGE, "sets `gpu_memory_utilization`"),
    ],
)
def test_a_stack_that_cannot_be_believed_is_refused(engine, call, tmp_path, evidence, arguments, exit_code, reason):
    variant = stack_variant(tmp_path, evidence, arguments)
    code, _, err = call(*CALL, "--variant", variant, "--device", "cpu")
    assert (code, reason in err) == (exit_code, True), err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--engine", "sglang"), "--engine is 'sglang'"),
        (("--max-model-len", "128"), "--max-model-len is for arms under vLLM"),
        (("--engine-budget", "0.5"), "--engine-budget is for arms under vLLM"),
        (("--max-num-seqs", "4"), "--max-num-seqs is for arms under vLLM"),
        (("--engine", "vllm", "--positions", "8"), "--positions is for arms under transformers"),
        (("--engine", "vllm", "--decode-positions", "8"), "--decode-positions is for arms under transformers"),
        (("--engine", "vllm", "--rows", "2"), "--rows is for arms under transformers"),
        (("--engine", "vllm", "--against", "a.json"), "--against is for arms under transformers"),
        ((*CALL, "--device", "cpu", "--budget", "2"), "--budget needs a GPU: torch cannot cap CPU memory"),
        ((*CALL, "--device", "cpu", "--engine-budget", "0.5"), "--engine-budget needs a GPU"),
        ((*CALL, "--engine-budget", "1.5"), "--engine-budget is 1.5"),
        ((*CALL, "--max-model-len", "63"), "--max-model-len is 63"),
        ((*CALL, "--max-model-len", "64", "--device", "cpu"), "give a larger --max-model-len"),
        ((*CALL, "--max-model-len", "4096", "--device", "cpu"), "more than the 2048 positions"),
        ((*CALL, "--max-num-seqs", "0"), "--max-num-seqs is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(engine, call, options, reason):
    code, _, err = call(*options)
    assert (code, reason in err) == (EXIT_USAGE, True), err
    assert engine.request is None


def test_a_stack_needs_vllm(call, tmp_path):
    code, _, err = call("--variant", stack_variant(tmp_path, 'log = "x"'), "--device", "cpu")
    assert code == EXIT_USAGE and "declares a vLLM stack" in err and "--engine vllm" in err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_without_vllm_it_says_what_to_install(call):
    code, _, err = call(*CALL, "--device", "cpu")
    assert code == EXIT_USAGE and "tools/vllm/install.sh" in err


def test_a_report_says_where_a_start_ended(engine, call):
    engine.answer = replace(REFUSED, readings={"before": SERVED.readings["before"]})
    _, out, _ = call(*CALL, "--device", "cpu")
    moments = [line.split()[0] for line in out.splitlines() if line.strip().endswith("1.00 MiB")]
    assert moments == ["before"], out


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path(VLLM_PYTHON).is_file(), reason="no vLLM environment: tools/vllm/install.sh .venv-vllm")
def test_a_real_engine_is_reached_by_the_command(call, monkeypatch, tmp_path):
    monkeypatch.setenv("EXL3EVAL_VLLM_PYTHON", VLLM_PYTHON)
    code, out, err = call(*CALL, "--variant", "int8-embed", "--device", "cpu", "--out", tmp_path / "m.json")
    assert code == 0, err
    receipt = read_receipt(tmp_path / "m.json")
    results = receipt["results"]
    # 2 layers x 2 (keys, values) x 2 heads x 64 x 4 bytes a token.
    assert results["kv_cache_bytes"] == results["kv_tokens"] * 2048 <= 1 << 30
    assert results["readings"]["before"]["used"] < results["readings"]["started"]["used"] <= results["peak_used"]
    assert [(each["finished"], each["prompt_tokens"]) for each in results["requests"]] == [(True, 112)] * 3
    assert results["effective"]["quantization"] == "exl3" and results["effective"]["max_model_len"] == 128
    assert "of 3 requests 3 finished" in out and str(tmp_path) not in (tmp_path / "m.json").read_text()

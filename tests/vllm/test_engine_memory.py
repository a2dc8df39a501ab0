"""Memory of a served arm: whose limit was hit, and an account of a real engine."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3eval.errors import UsageError
from exl3eval.vllm_engine.arms import stage_model
from exl3eval.vllm_engine.environment import child_environment, declared_environment, find_interpreter
from exl3eval.vllm_engine.memory import (
    ENGINE_BUDGET,
    FITS,
    HARD_CAP,
    PHYSICAL,
    EngineMemory,
    EngineMemoryRequest,
    MemoryProbe,
    MemoryReading,
    RequestOutcome,
    measure_engine_memory,
    read_memory,
    write_memory,
)
from exl3eval.vllm_engine.memory_child import judge

ROOT = Path(__file__).parents[2]
BF16 = ROOT / "tests/data/qwen2-tied/bf16"
REQUEST = EngineMemoryRequest(
    arm="base",
    model=str(BF16),
    mode="eager",
    activations="float32",
    device_type="cpu",
    arguments={},
    max_model_len=64,
    max_num_seqs=2,
    budget_frac=0.1,
    hard_cap_bytes=None,
    kv_cache_bytes=1 << 24,
    probes=(MemoryProbe(prompt=(3, 4, 5, 6), expected=(7, 7)),),
)


@pytest.mark.parametrize(
    ("error", "cap", "free", "limit"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), None, 10, PHYSICAL),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 5, 10, HARD_CAP),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 20, 10, PHYSICAL),
        (ValueError("No available memory for the cache blocks. Try increasing ..."), None, 10, ENGINE_BUDGET),
        (ValueError("Free memory on device is less than desired GPU memory utilization"), 5, 10, ENGINE_BUDGET),
    ],
)
def test_three_limits_are_told_apart(error, cap, free, limit):
    assert judge(error, cap=cap, free=free) == limit


def test_another_failure_is_no_limit():
    with pytest.raises(UsageError, match="does not start: no such architecture"):
        judge(ValueError("no such architecture"), cap=None, free=10)


@pytest.mark.parametrize("change", [{"hard_cap_bytes": 1}, {"kv_cache_bytes": None}, {"budget_frac": 0.0}])
def test_limits_that_cannot_be_enforced_are_refused(change):
    with pytest.raises(UsageError):
        replace(REQUEST, **change)


def test_an_account_survives_the_file(tmp_path):
    memory = EngineMemory(
        outcome=FITS,
        message="",
        device_bytes=None,
        engine_budget_bytes=None,
        hard_cap_bytes=None,
        weights_bytes=10,
        kv_cache_bytes=20,
        kv_tokens=5,
        peak_allocated=None,
        peak_reserved=None,
        peak_used=99,
        readings={"before": MemoryReading(allocated=None, reserved=None, used=7)},
        requests=(RequestOutcome(prompt_tokens=4, generated_tokens=2, finished=True, found=False),),
        effective={"dtype": "float32"},
        unknown={"peak_allocated": "torch keeps no statistics of CPU tensors"},
    )
    write_memory(tmp_path / "m.json", memory)
    assert read_memory(tmp_path / "m.json") == memory


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_real_engine_accounts_for_what_it_holds(tmp_path):
    python = (
        None
        if importlib.util.find_spec("vllm")
        else Path(os.environ.get("EXL3EVAL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    )
    if python is not None and not python.exists():
        pytest.skip("vLLM is not installed here: run tools/vllm/install.sh .venv-vllm")
    from exl3eval.checkpoint.directory import open_checkpoint

    checkpoint = open_checkpoint(BF16)
    declared = declared_environment(device_type="cpu", mode="eager", plugin=None, stack=None)
    memory = measure_engine_memory(
        replace(REQUEST, model=str(stage_model(checkpoint, tmp_path))),
        python=find_interpreter(python, packages=()).python,
        environment=child_environment(os.environ, declared, cache_dir=tmp_path),
        folder=tmp_path,
    )
    assert (memory.outcome, memory.effective["prefix_caching"]) == (FITS, False)
    # 2 layers x 2 (keys, values) x 2 heads x 64 x 4 bytes a token.
    assert memory.kv_cache_bytes == memory.kv_tokens * 2048 <= 1 << 24
    assert memory.readings["before"].used < memory.readings["started"].used <= memory.peak_used
    assert [(each.finished, each.generated_tokens, each.prompt_tokens) for each in memory.requests] == [(True, 2, 4)]
    assert set(memory.unknown) == {"peak_allocated", "peak_reserved", "device_bytes", "weights_bytes"}

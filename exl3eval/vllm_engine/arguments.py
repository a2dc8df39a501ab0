"""Engine arguments of an arm: a pure function of its request, the same for every lane it can be driven through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3eval.records import read_json
from exl3eval.vllm_engine.request import ChildRequest

WORKER_EXTENSION = "exl3eval.vllm_engine.worker.EmittedRows"
FORCED_IDS = "exl3eval_forced_ids"
FORCED_PROCESSOR = "exl3eval.vllm_engine.forced:ForcedIds"
MIN_SEQUENCES = 8
MIN_BATCHED_TOKENS = 2048
MIN_KV_BYTES = 1 << 27
PROBE_TOKENS = 24
EXECUTION: Mapping[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "graphs": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "graphs-uncompiled": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}


def engine_arguments(request: ChildRequest, *, num_inputs: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    One program serves every lane: rows per step are set on the scheduler while it runs, so that a lane changes
    nothing that a compiler could specialise on.

    Parameters
    ----------
    request : ChildRequest
        The arm.
    num_inputs : int
        Ids per context that go in.
    """
    lanes = [task.lane for task in request.lanes]
    sequences = max(MIN_SEQUENCES, *(lane.batch for lane in lanes))
    prefixes = [lane.batch * lane.first_scored(num_inputs) for lane in lanes if lane.kind == "decode"]
    tokens = max(lane.batch for lane in lanes) * (num_inputs + 1)
    arguments: dict[str, Any] = {
        "model": request.model,
        "dtype": request.activations,
        "max_model_len": max(num_inputs + 1, PROBE_TOKENS + 1),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, num_inputs, *prefixes),
        "kv_cache_memory_bytes": kv_cache_bytes(Path(request.model), num_tokens=tokens, num_sequences=sequences),
        "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "trust_remote_code": request.trust_remote_code,
        "disable_log_stats": True,
        "logprobs_mode": "raw_logits",
        "distributed_executor_backend": "uni",
        "worker_extension_cls": WORKER_EXTENSION,
        **EXECUTION[request.mode],
    }
    if request.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if request.style == "forced" and prefixes:
        arguments["logits_processors"] = [FORCED_PROCESSOR]
    overrides = arguments.get("hf_overrides", {}) | dict(request.arguments.get("hf_overrides", {}))
    return arguments | dict(request.arguments) | ({"hf_overrides": overrides} if overrides else {})


def kv_cache_bytes(model: Path, *, num_tokens: int, num_sequences: int) -> int:
    """Estimate the key-value cache that `num_tokens` in `num_sequences` need, twice over.

    From config.json: 2 x layers x key-value heads x head size x 4 bytes a token, plus a block of 128 tokens for
    every sequence; at least 128 MiB.
    """
    config = read_json(model / "config.json")
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", 1)
    size = text.get("head_dim") or text.get("hidden_size", 1) // heads
    per_token = 8 * text.get("num_hidden_layers", 1) * (text.get("num_key_value_heads") or heads) * size
    return max(MIN_KV_BYTES, 2 * per_token * (num_tokens + 128 * num_sequences))

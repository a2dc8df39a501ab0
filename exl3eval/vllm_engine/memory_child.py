"""The process of one memory account: `python -m exl3eval.vllm_engine.memory_child REQUEST.json PIPE`."""

from __future__ import annotations

import gc
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from exl3eval.errors import UsageError
from exl3eval.vllm_engine.arguments import EXECUTION
from exl3eval.vllm_engine.memory import (
    ENGINE_BUDGET,
    FITS,
    HARD_CAP,
    PHYSICAL,
    REPORT_FILE,
    EngineMemory,
    EngineMemoryRequest,
    MemoryProbe,
    MemoryReading,
    RequestOutcome,
    read_memory_request,
    write_memory,
)
from exl3eval.vllm_engine.process import serve

EXTENSION = "exl3eval.vllm_engine.worker.HeldBytes"
NO_ALLOCATOR = "torch keeps no statistics of CPU tensors"
ON_A_CPU = {
    "device_bytes": "a CPU's memory belongs to every process",
    "weights_bytes": "vLLM packs weights for a CPU where no module shows them",
}
NOT_STARTED = "the engine did not start"
_PAGE = resource.getpagesize()


def account(request: EngineMemoryRequest) -> EngineMemory:
    """Start the engine, serve the probes, and say what it took.

    Raises
    ------
    UsageError
        If the engine refuses for another reason than memory.
    """
    gpu = request.device_type == "cuda"
    free, total = torch.cuda.mem_get_info() if gpu else (None, None)
    if gpu and request.hard_cap_bytes is not None and total is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.hard_cap_bytes / total))
    readings = {"before": _read(gpu)}
    outcome, message = FITS, ""
    requests: tuple[RequestOutcome, ...] = ()
    held: dict[str, Any] = {}
    unknown = {} if gpu else dict.fromkeys(("peak_allocated", "peak_reserved"), NO_ALLOCATOR) | ON_A_CPU
    try:
        llm = _start(request)
        readings["started"] = _read(gpu)
        (held,) = llm.collective_rpc("exl3eval_held")
        requests = tuple(_serve_probe(llm, probe) for probe in request.probes)
        readings["served"] = _read(gpu)
    except (torch.OutOfMemoryError, ValueError, RuntimeError) as error:
        outcome, message = judge(error, cap=request.hard_cap_bytes, free=free), str(error).strip().splitlines()[0][:300]
        unknown |= dict.fromkeys(("weights_bytes", "kv_cache_bytes", "kv_tokens"), NOT_STARTED) if not held else {}
    return EngineMemory(
        outcome=outcome,
        message=message,
        device_bytes=total,
        engine_budget_bytes=int(request.budget_frac * total) if total and request.kv_cache_bytes is None else None,
        hard_cap_bytes=request.hard_cap_bytes,
        weights_bytes=held.get("weights") if gpu else None,
        kv_cache_bytes=held.get("kv_cache"),
        kv_tokens=held.get("kv_tokens"),
        peak_allocated=torch.cuda.max_memory_allocated() if gpu else None,
        peak_reserved=torch.cuda.max_memory_reserved() if gpu else None,
        peak_used=None if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        readings=readings,
        requests=requests,
        effective=held.get("effective", {}),
        unknown=unknown | ({"peak_used": "the driver keeps no peak"} if gpu else {}),
    )


def judge(error: Exception, *, cap: int | None, free: int | None) -> str:
    """Name the limit that an engine hit.

    Parameters
    ----------
    error : Exception
        What ended it.
    cap, free : int or None
        The enforced cap, and what the driver had free before the start.

    Raises
    ------
    UsageError
        If memory is not what it says.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return HARD_CAP if cap is not None and (free is None or cap <= free) else PHYSICAL
    if "memory" in text.lower() and ("cache" in text.lower() or "utilization" in text.lower()):
        return ENGINE_BUDGET
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if not re.match(r"\d+ validation error", line)), type(error).__name__)
    raise UsageError(
        f"vLLM does not start: {telling[:300]}", hint="its log is vllm/<folder>/log.txt in the cache folder"
    ) from error


def _start(request: EngineMemoryRequest) -> Any:
    from vllm import LLM

    return LLM(
        model=request.model,
        dtype=request.activations,
        max_model_len=request.max_model_len,
        max_num_seqs=request.max_num_seqs,
        gpu_memory_utilization=request.budget_frac,
        kv_cache_memory_bytes=request.kv_cache_bytes,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        worker_extension_cls=EXTENSION,
        **EXECUTION[request.mode],
        **request.arguments,
    )


def _serve_probe(llm: Any, probe: MemoryProbe) -> RequestOutcome:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=len(probe.expected), temperature=0.0, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": list(probe.prompt)}], parameters, use_tqdm=False)
    ids = tuple(answer.outputs[0].token_ids)
    return RequestOutcome(
        prompt_tokens=len(probe.prompt),
        generated_tokens=len(ids),
        finished=bool(answer.finished),
        found=ids == probe.expected,
    )


def _read(gpu: bool) -> MemoryReading:
    """Read settled memory: what is garbage or merely cached is given back first."""
    gc.collect()
    if not gpu:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return MemoryReading(allocated=None, reserved=None, used=pages * _PAGE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return MemoryReading(
        allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved(), used=total - free
    )


def main(path: Path, descriptor: int) -> int:
    """Run a request and write its account; return the exit code."""
    return serve(lambda tell: write_memory(path.parent / REPORT_FILE, account(read_memory_request(path))), descriptor)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))

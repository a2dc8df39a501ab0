"""Memory of a served arm: what the engine holds, what it was allowed, and what became of real requests.

Three limits are told apart: the engine's own budget (a share of the device that vLLM plans with and never enforces
on the allocator), a hard cap on the allocator (ours, enforced), and the device's physical memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.records import read_json, write_json
from exl3eval.vllm_engine.process import run_process
from exl3eval.vllm_engine.request import check_mode

CHILD = "exl3eval.vllm_engine.memory_child"
SCHEMA, REPORT_SCHEMA = "exl3eval/vllm-memory-request/1", "exl3eval/vllm-memory/1"
REQUEST_FILE, REPORT_FILE = "memory-request.json", "memory.json"
FITS, ENGINE_BUDGET, HARD_CAP, PHYSICAL = "fits", "engine budget", "hard cap", "physical memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """One prompt whose continuation is known: a needle in a long context, for instance.

    Parameters
    ----------
    prompt, expected : tuple of int
        Token ids.
    """

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryRequest:
    """What to start, under which limits, and what to ask of it.

    Parameters
    ----------
    arm : str
        Name, for messages.
    model : str
        Directory that vLLM can load.
    mode, activations, device_type : str
        As for a scored arm.
    arguments : mapping
        Further engine arguments.
    max_model_len : int
        Longest request, in tokens.
    max_num_seqs : int
        Requests side by side.
    budget_frac : float
        vLLM's `gpu_memory_utilization`: the share of the device that it plans with.
    hard_cap_bytes : int or None
        Cap on the allocator; GPUs only.
    kv_cache_bytes : int or None
        Cache to allocate instead of what the budget leaves; needed on a CPU.
    probes : tuple of MemoryProbe
        Requests to serve.
    """

    arm: str
    model: str
    mode: str
    activations: str
    device_type: str
    arguments: Mapping[str, Any]
    max_model_len: int
    max_num_seqs: int
    budget_frac: float
    hard_cap_bytes: int | None
    kv_cache_bytes: int | None
    probes: tuple[MemoryProbe, ...]

    def __post_init__(self) -> None:
        check_mode(self.mode, self.device_type)
        if not 0 < self.budget_frac <= 1:
            raise UsageError(f"an engine budget of {self.budget_frac} of the device", hint="give a share in 0..1")
        if self.device_type == "cpu" and (self.hard_cap_bytes is not None or self.kv_cache_bytes is None):
            raise UsageError(
                "on a CPU vLLM needs the size of its cache, and torch cannot cap memory",
                hint="give kv_cache_bytes and no hard cap",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory at one moment, in bytes; None where the device cannot tell.

    Parameters
    ----------
    allocated, reserved : int or None
        By torch's allocator on the GPU.
    used : int
        GPU: by everybody, as the driver says. CPU: resident pages of the process.
    """

    allocated: int | None
    reserved: int | None
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """What became of a probe: served to its end, and whether it found what was planted."""

    prompt_tokens: int
    generated_tokens: int
    finished: bool
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The account of one served arm; None is unknown, with the reason in `unknown`.

    Parameters
    ----------
    outcome : str
        `fits`, or the limit that was hit: `engine budget`, `hard cap`, `physical memory`.
    message : str
        What the engine said if it does not fit.
    device_bytes : int or None
        Physical memory of the device.
    engine_budget_bytes : int or None
        What the engine planned with.
    hard_cap_bytes : int or None
        The enforced cap, if one was asked for.
    weights_bytes, kv_cache_bytes, kv_tokens : int or None
        Tensors of the loaded model; of the cache; tokens it holds.
    peak_allocated, peak_reserved, peak_used : int or None
        Largest over start-up and requests.
    readings : mapping of str to MemoryReading
        `before`, `started` and `served`, as far as it came.
    requests : tuple of RequestOutcome
        One per probe.
    effective : mapping
        Configuration read back.
    unknown : mapping of str to str
        Field -> why it is None.
    """

    outcome: str
    message: str
    device_bytes: int | None
    engine_budget_bytes: int | None
    hard_cap_bytes: int | None
    weights_bytes: int | None
    kv_cache_bytes: int | None
    kv_tokens: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    peak_used: int | None
    readings: Mapping[str, MemoryReading]
    requests: tuple[RequestOutcome, ...]
    effective: Mapping[str, Any]
    unknown: Mapping[str, str]


def measure_engine_memory(
    request: EngineMemoryRequest, *, python: Path, environment: Mapping[str, str], folder: Path
) -> EngineMemory:
    """Start an arm in a fresh process under its limits, serve the probes, and account for memory.

    Parameters
    ----------
    request : EngineMemoryRequest
        The arm and its limits.
    python : Path
        Interpreter that has vLLM.
    environment : mapping
        All that the process sees, see `child_environment`.
    folder : Path
        For the request, the log and the report.

    Raises
    ------
    UsageError
        If the engine fails for another reason than memory.
    """
    write_json(folder / REQUEST_FILE, {"schema": SCHEMA, **asdict(request)})
    run_process(
        python,
        CHILD,
        folder / REQUEST_FILE,
        arm=request.arm,
        environment=environment,
        on_positions=lambda count: None,
    )
    return read_memory(folder / REPORT_FILE)


def read_memory_request(path: Path) -> EngineMemoryRequest:
    """Read a request."""
    table = _open(path, SCHEMA)
    probes = tuple(MemoryProbe(prompt=tuple(p["prompt"]), expected=tuple(p["expected"])) for p in table["probes"])
    return EngineMemoryRequest(**table | {"probes": probes})


def write_memory(path: Path, memory: EngineMemory) -> None:
    """Write an account, atomically."""
    write_json(path, {"schema": REPORT_SCHEMA, **asdict(memory)})


def read_memory(path: Path) -> EngineMemory:
    """Read an account."""
    table = _open(path, REPORT_SCHEMA)
    return EngineMemory(
        **table
        | {
            "readings": {name: MemoryReading(**each) for name, each in table["readings"].items()},
            "requests": tuple(RequestOutcome(**each) for each in table["requests"]),
        }
    )


def _open(path: Path, schema: str) -> dict[str, Any]:
    table = read_json(path)
    found = table.pop("schema", None) if isinstance(table, dict) else None
    if found != schema:
        raise UsageError(f"{path.name} is not of schema {schema}: {found}", hint="run one exl3eval on both sides")
    return dict(table)

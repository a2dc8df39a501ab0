"""The memory receipt: rows of bytes by name, each known or with the reason why not, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exl3eval import records
from exl3eval.errors import UsageError
from exl3eval.memory.measure import PHASES, MemoryRun, Phase

SCHEMA = "exl3eval/memory/1"
WORKLOAD = ("positions", "decode_positions", "rows")
NOT_REACHED = "memory ran out before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: bytes, or None and why."""

    section: str
    name: str
    bytes: float | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One row of two receipts; `change` is new minus old, None where either is unknown."""

    section: str
    name: str
    old: float | None
    new: float | None
    change: float | None


def build_receipt(run: MemoryRun) -> dict[str, Any]:
    """Assemble the receipt of a measurement."""
    request = run.request
    identity = {
        "model": {
            "sha256": run.checkpoint_sha256,
            "form": "exl3" if run.checkpoint.is_exl3 else "16-bit",
            "model_type": run.checkpoint.config.get("model_type"),
        },
        "declared": run.declared.identity,
        "resolved": run.resolved.identity,
        "attention": run.attention,
        "launches": [{**launch._asdict(), "count": count} for launch, count in sorted(run.launches.items())],
        "workload": {name: getattr(request, name) for name in WORKLOAD},
        "engine": "transformers",
        "graphs": False,
        "kv_cache": run.resolved.activations,
        "trust_remote_code": request.trust_remote_code,
        "code": run.code,
        "device": run.device,
    }
    results = {
        "rows": [asdict(row) for row in list_rows(run)],
        "phases": [asdict(phase) for phase in run.phases],
        "unknown": run.unknown,
        "budget": None if run.budget is None else {**asdict(run.budget), "binds_first": run.budget.binds_first},
        "outcome": asdict(run.outcome),
    }
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": identity,
        "identity_digest": records.digest_value(identity),
        "results": results,
        "results_digest": records.digest_value(results),
    }


def list_rows(run: MemoryRun) -> tuple[Row, ...]:
    """Lay out every figure of a measurement, in one order for every arm and device."""
    return (*_weight_rows(run), *_held_rows(run), *_cache_rows(run), *_peak_rows(run))


def _weight_rows(run: MemoryRun) -> Iterator[Row]:
    if run.weights is None:
        yield Row(section="weights", name="all, resident", bytes=None, why=f"{NOT_REACHED} the arm was loaded")
        return
    for kind in run.weights:
        yield Row(section="weights", name=f"{kind.kind}, stored", bytes=kind.stored)
        yield Row(section="weights", name=f"{kind.kind}, resident", bytes=kind.resident)
    yield Row(section="weights", name="all, stored", bytes=sum(kind.stored for kind in run.weights))
    yield Row(section="weights", name="all, resident", bytes=sum(kind.resident for kind in run.weights))
    yield Row(section="weights", name="int8 overlay of the embedding, resident", bytes=run.overlay)


def _held_rows(run: MemoryRun) -> Iterator[Row]:
    loaded, unloaded = _phase(run, "load"), _phase(run, "release")
    held_why = run.unknown.get("held", f"{NOT_REACHED} this was read")
    load = None if loaded is None else _minus(loaded.after.held, loaded.before.held)
    yield Row(section="held", name="load, by the allocator", bytes=load, why="" if load is not None else held_why)
    driver = None if loaded is None else _minus(loaded.after.process, loaded.before.process)
    source = "by the driver" if run.device["type"] == "cuda" else "by resident pages"
    yield Row(section="held", name=f"load, {source}", bytes=driver, why=_why(driver, run, "process"))
    yield Row(
        section="held",
        name="kernel workspaces",
        bytes=run.workspaces,
        why="" if run.workspaces is not None else f"{NOT_REACHED} a prefill",
    )
    rest = None
    if unloaded and loaded and run.weights and unloaded.after.held is not None and loaded.before.held is not None:
        resident = sum(kind.resident for kind in run.weights)
        rest = unloaded.after.held - loaded.before.held - resident - (run.workspaces or 0)
    yield Row(
        section="held",
        name="libraries' workspaces and block rounding",
        bytes=rest,
        why="" if rest is not None else held_why,
    )
    yield Row(
        section="held",
        name="CUDA graph pool of one decode step",
        bytes=run.graph_pool,
        why="" if run.graph_pool is not None else run.graph_why or f"{NOT_REACHED} the capture",
    )
    yield Row(section="held", name="CUDA context", bytes=None, why=_CONTEXT[run.device["type"]])


_CONTEXT = {
    "cuda": "torch asks the driver through a context that exists by then",
    "cpu": "there is none on a CPU",
}


def _cache_rows(run: MemoryRun) -> Iterator[Row]:
    reached = f"{NOT_REACHED} the decode phase ended"
    cache = run.cache
    freed = _phase(run, "release")
    given_back = None if freed is None else _minus(freed.before.held, freed.after.held)
    section = "key-value cache"
    yield Row(
        section=section,
        name="per token, by its tensors",
        bytes=None if cache is None else cache.per_token,
        why=reached if cache is None else "",
    )
    yield Row(section=section, name="per token, by the formula", bytes=run.formula, why=run.formula_why)
    yield Row(
        section=section,
        name="per prefilled token, by its tensors",
        bytes=None if cache is None else cache.per_prefilled_token,
        why=reached if cache is None else "",
    )
    yield Row(
        section=section, name="whole, by its tensors", bytes=None if cache is None else cache.total,
        why=reached if cache is None else "",
    )  # fmt: skip
    yield Row(section=section, name="whole, by the allocator", bytes=given_back, why=_why(given_back, run, "held"))


def _peak_rows(run: MemoryRun) -> Iterator[Row]:
    for name in PHASES:
        phase = _phase(run, name, finished=False)
        for field, label in (("peak_held", "held"), ("peak_reserved", "reserved"), ("process_peak", "resident pages")):
            if field == "process_peak" and run.device["type"] == "cuda":
                continue
            value = None if phase is None else getattr(phase.busy, field)
            yield Row(section="peak", name=f"{name}, {label}", bytes=value, why=_why(value, run, field))
        value = None if phase is None else phase.busy.process
        label = "device at the end" if run.device["type"] == "cuda" else "resident pages at the end"
        yield Row(section="peak", name=f"{name}, {label}", bytes=value, why=_why(value, run, "process"))
        used = None if phase is None else _minus(phase.busy.peak_held, phase.after.held)
        if name in ("prefill", "decode", "scoring"):
            yield Row(section="activations", name=name, bytes=used, why=_why(used, run, "held"))


def _phase(run: MemoryRun, name: str, *, finished: bool = True) -> Phase | None:
    found = next((phase for phase in run.phases if phase.name == name), None)
    return None if found is None or (finished and found.why) else found


def _minus(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right


def _why(value: float | None, run: MemoryRun, field: str) -> str:
    return "" if value is not None else run.unknown.get(field, f"{NOT_REACHED} this was read")


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a memory receipt and check its digests.

    Raises
    ------
    UsageError
        If it is missing or no memory receipt.
    InvalidRunError
        If it was altered.
    """
    receipt = records.read_receipt(path)
    if receipt.get("schema") != SCHEMA:
        raise UsageError(f"{path.name} is no memory receipt ({SCHEMA})", hint="give a file of `exl3eval memory --out`")
    return receipt


def compare_receipts(old: dict[str, Any], new: dict[str, Any]) -> tuple[Difference, ...]:
    """Subtract one receipt from another, row by row.

    Raises
    ------
    UsageError
        If they were measured under different workloads or on different devices.
    """
    for what, left, right in (
        ("workloads", old["identity"]["workload"], new["identity"]["workload"]),
        ("devices", old["identity"]["device"]["name"], new["identity"]["device"]["name"]),
    ):
        if left != right:
            raise UsageError(f"the receipts are of different {what}: {left} and {right}", hint="measure both alike")
    names = list(dict.fromkeys((row["section"], row["name"]) for side in (old, new) for row in side["results"]["rows"]))
    before, after = (
        {(row["section"], row["name"]): row["bytes"] for row in side["results"]["rows"]} for side in (old, new)
    )
    return tuple(
        Difference(
            section=section,
            name=name,
            old=left,
            new=right,
            change=None if left is None or right is None else right - left,
        )
        for section, name in names
        for left, right in [(before.get((section, name)), after.get((section, name)))]
    )

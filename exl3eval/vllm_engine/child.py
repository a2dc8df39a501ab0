"""The process of one arm: `python -m exl3eval.vllm_engine.child REQUEST.json PIPE`.

Builds the engine, reads back what it really is, proves that it scores what it generates, waits for the reference, then
runs the lanes context by context. Progress and refusals go to the pipe as JSON lines, the report to the file named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from exl3_kernels import routes
from exl3_kernels.routes import Launch
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.capture import read_hidden, write_hidden
from exl3eval.engine.lanes import Lane
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.records import digest_value
from exl3eval.vllm_engine.arguments import PROBE_TOKENS, engine_arguments
from exl3eval.vllm_engine.drive import Engine
from exl3eval.vllm_engine.environment import PLUGIN_PACKAGE
from exl3eval.vllm_engine.evidence import find_kernels, read_counter
from exl3eval.vllm_engine.process import serve, wait_to_work
from exl3eval.vllm_engine.reference_head import load_reference_head
from exl3eval.vllm_engine.request import (
    ChildReport,
    ChildRequest,
    LaneReport,
    LaneTask,
    read_request,
    write_report,
)
from exl3eval.vllm_engine.score import Scorer
from exl3eval.vllm_engine.store import ContextRows, context_path, read_rows, write_rows

GENERATED = 8


def run_child(request: ChildRequest, tell: Callable[[dict[str, Any]], None]) -> ChildReport:
    """Run one arm.

    Parameters
    ----------
    request : ChildRequest
        The arm.
    tell : callable
        Receives progress.

    Raises
    ------
    UsageError
        If the engine refuses its arguments.
    InvalidRunError
        If the engine is not what was asked for, or what it emits must not be read as a number.
    """
    begun = time.monotonic()
    ids_NT1 = load_file(request.ids)["ids"].long()
    engine = Engine(_start_engine(request, ids_NT1))
    effective = engine.ask("exl3eval_readback")
    check_effective(effective, request)
    plugin, counters = _open_plugin(request)
    scorer = Scorer(
        head=load_reference_head(
            open_checkpoint(Path(request.reference_model)),
            vocab_size=request.vocab_size,
            device=torch.device(request.device_type),
        ),
        vocab_size=request.vocab_size,
        own_head=request.head == "own",
        round_logits=request.logits == "bfloat16",
    )
    engine.check_self(ids_NT1[0, : PROBE_TOKENS - GENERATED].tolist(), GENERATED)
    kernels = [evidence for evidence in request.evidence if evidence.kind == "kernels"]
    findings = find_kernels(engine, request, ids_NT1, kernels) if kernels else []
    started = time.monotonic()
    wait_to_work(tell)
    arm = _Arm(request=request, engine=engine, scorer=scorer, counters=counters, ids_NT1=ids_NT1, tell=tell)
    lanes = {task.lane.name: arm.run(task) for task in request.lanes}
    findings += [read_counter(evidence) for evidence in request.evidence if evidence.kind == "counter"]
    return ChildReport(
        effective=effective,
        plugin=plugin,
        lanes=lanes,
        embedding_bytes=engine.ask("exl3eval_embedding_bytes"),
        findings=tuple(findings),
        start_seconds=round(started - begun, 3),
    )


def _start_engine(request: ChildRequest, ids_NT1: torch.Tensor) -> Any:
    from vllm import LLM

    num_inputs = ids_NT1.shape[1] - 1
    arguments = engine_arguments(request, num_inputs=num_inputs)
    try:
        return LLM(**arguments)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"arm `{request.arm}`: vLLM does not start: {str(error).strip().splitlines()[0][:300]}",
            hint="the arm's log, beside its request in the cache folder, holds the rest",
        ) from error


def check_effective(effective: Mapping[str, Any], request: ChildRequest) -> None:
    """Compare what the engine resolved with what the arm declares.

    Raises
    ------
    InvalidRunError
        Naming the first field that differs.
    """
    modes = {
        "eager": ("NONE", "NONE"),
        "compiled": ("compiled", "NONE"),
        "graphs": ("compiled", "FULL_DECODE_ONLY"),
        "graphs-uncompiled": ("NONE", "FULL_DECODE_ONLY"),
    }
    compiled, graphs = modes[request.mode]
    expected = {
        "prefix_caching": False,
        "async_scheduling": False,
        "tensor_parallel": 1,
        "dtype": request.activations,
        "float32_matmul": "highest",
        "compile_mode": compiled,
        "cudagraph_mode": graphs,
        "kv_cache_dtype": request.arguments.get("kv_cache_dtype", "auto"),
    }
    seen = {"kv_cache_dtype": "auto", **effective}
    seen["compile_mode"] = "NONE" if effective["compile_mode"] in (None, "NONE") else "compiled"
    for field, value in expected.items():
        if seen[field] != value:
            raise InvalidRunError(
                f"arm `{request.arm}`: the engine runs with {field} = {seen[field]!r}, declared {value!r}",
                hint="vLLM changed the setting by itself: this model or platform does not support the mode",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """Launch counters of this process: the plugin's tick on the device, inside graphs too."""

    reset: Callable[[], None]
    read: Callable[[], dict[Launch, int]]


def _open_plugin(request: ChildRequest) -> tuple[dict[str, Any] | None, _Counters]:
    if not request.plugin:
        return None, _Counters(reset=routes.reset_launches, read=routes.read_launches)
    try:
        plugin = import_module(PLUGIN_PACKAGE)
    except ImportError as error:
        raise UsageError(
            f"the plugin {PLUGIN_PACKAGE} is not installed beside vLLM", hint="install this project there"
        ) from error
    config = dict(plugin.effective_config())
    # One entry per layer: thousands in a large model, and the launch counters name every shape and width anyway.
    config["linears"] = {"count": len(config["linears"]), "sha256": digest_value(config["linears"])}
    return config, _Counters(reset=plugin.reset_counts, read=plugin.read_counts)


class _Arm:
    """An engine over contexts: batches that are not finished yet, their rows, and a repeat of the first."""

    def __init__(
        self,
        *,
        request: ChildRequest,
        engine: Engine,
        scorer: Scorer,
        counters: _Counters,
        ids_NT1: torch.Tensor,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._request, self._engine, self._scorer, self._counters = request, engine, scorer, counters
        self._ids_NT1, self._tell = ids_NT1, tell

    def run(self, task: LaneTask) -> LaneReport:
        begun = time.monotonic()
        lane, num_contexts = task.lane, len(self._ids_NT1)
        positions = self._ids_NT1.shape[1] - 1 - lane.first_scored(self._ids_NT1.shape[1] - 1)
        resumed = 0
        for start in range(0, num_contexts, lane.batch):
            members = list(range(start, min(start + lane.batch, num_contexts)))
            if not self._request.fresh and all(self._is_finished(task, member) for member in members):
                resumed += len(members)
            else:
                self._run_batch(task, members)
            self._tell({"advance": positions * len(members)})
        difference = self._repeat_difference(task)
        return LaneReport(resumed=resumed, repeat_difference=difference, seconds=round(time.monotonic() - begun, 3))

    def _is_finished(self, task: LaneTask, member: int) -> bool:
        digest = self._request.digests[member]
        if read_rows(context_path(Path(task.rows), digest)) is None:
            return False
        return task.hidden is None or read_hidden(context_path(Path(task.hidden), digest)) is not None

    def _filled(self, lane: Lane, members: list[int]) -> list[int]:
        """Fill a short batch with the first contexts again: the engine sees exactly the lane's rows."""
        return (members + list(range(len(self._ids_NT1))) * lane.batch)[: lane.batch]

    def _score(self, task: LaneTask, members: list[int]) -> tuple[list[ContextRows], torch.Tensor]:
        """Run and score one batch; rows and hidden states of the fillers come last."""
        filled = self._filled(task.lane, members)
        ids_BT1 = self._ids_NT1[filled]
        first = task.lane.first_scored(ids_BT1.shape[1] - 1)
        reference = None if task.hidden is not None else self._reference_hidden(filled, ids_BT1.shape[1] - 1 - first)
        emitted = self._engine.run_lane(ids_BT1, task.lane, style=self._request.style)
        return self._scorer.score_batch(emitted, ids_BT1[:, first + 1 :], reference)

    def _run_batch(self, task: LaneTask, members: list[int]) -> None:
        self._counters.reset()
        self._engine.ask("exl3eval_replays")
        rows, hidden_BSH = self._score(task, members)
        launches, replays = self._counters.read(), self._engine.ask("exl3eval_replays")
        self._check_replays(task, replays)
        for index, member in enumerate(members):
            digest = self._request.digests[member]
            evidence = rows[index].evidence
            if index == 0:
                evidence = replace(evidence, launches=launches, graph_replays=replays)
            if task.hidden is not None:
                path = context_path(Path(task.hidden), digest)
                write_hidden(path, hidden_BSH[index], launches if index == 0 else {})
            write_rows(context_path(Path(task.rows), digest), replace(rows[index], evidence=evidence))

    def _check_replays(self, task: LaneTask, replays: int) -> None:
        """A lane under graphs replays one per scored step; any other lane none."""
        expected = task.lane.scored or 0 if task.lane.graph else 0
        if replays < expected or (replays and not task.lane.graph):
            raise InvalidRunError(
                f"arm `{self._request.arm}`, lane {task.lane.name}: {replays} CUDA graphs replayed in "
                f"{task.lane.scored} scored steps",
                hint="add the lane's rows to the capture sizes, or run it without graphs",
            )

    def _reference_hidden(self, filled: list[int], scored: int) -> torch.Tensor:
        """Read the reference's hidden states of a batch: [B, S, H]."""
        states = []
        for member in filled:
            found = read_hidden(context_path(Path(self._request.reference_hidden), self._request.digests[member]))
            if found is None:
                raise UsageError(
                    "hidden states of the reference are missing", hint="keep other processes out of the cache folder"
                )
            states.append(found[0][-scored:])
        return torch.stack(states)

    def _repeat_difference(self, task: LaneTask) -> float:
        """Run the first batch again and compare with what is stored of its first context."""
        stored = read_rows(context_path(Path(task.rows), self._request.digests[0]))
        if stored is None:
            raise UsageError("finished rows vanished", hint="keep other processes out of the cache folder")
        again, *_ = self._score(task, list(range(min(task.lane.batch, len(self._ids_NT1)))))[0]
        pairs = [
            (stored.divergences.kl, again.divergences.kl),
            (stored.divergences.delta_nll, again.divergences.delta_nll),
            (stored.candidate_log_probs, again.candidate_log_probs),
        ]
        return max(float((left - right).abs().max()) for left, right in pairs)


def main(path: Path, descriptor: int) -> int:
    """Run a request and write its report; return the exit code."""

    def work(tell: Callable[[dict[str, Any]], None]) -> None:
        request = read_request(path)
        write_report(Path(request.report), run_child(request, tell))

    return serve(work, descriptor)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))

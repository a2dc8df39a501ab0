"""Arms under vLLM: their processes side by side, and what they leave behind.

Every process scores its own logits against the reference's hidden states, so the reference goes first; the others start
their engines meanwhile and wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3_kernels.routes import Launch
from exl3eval.arm import ArmSpec
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.engine.capture import Capture
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import EmbeddingBytes
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.progress import Reporter
from exl3eval.records import digest_value
from exl3eval.vllm_engine.environment import child_environment, declared_environment
from exl3eval.vllm_engine.plan import VllmArm
from exl3eval.vllm_engine.process import Locked, run_process, write_ids
from exl3eval.vllm_engine.request import (
    ChildReport,
    ChildRequest,
    LaneTask,
    check_mode,
    read_report,
    write_request,
)
from exl3eval.vllm_engine.session import VllmSession, arm_contract, arm_identity, hidden_folder, plugin_variant
from exl3eval.vllm_engine.stack import check_findings, find_lines
from exl3eval.vllm_engine.store import ContextRows, context_path, read_rows

CHILD, REQUEST_FILE, REPORT_FILE, IDS_FILE = (
    "exl3eval.vllm_engine.child",
    "request.json",
    "report.json",
    "ids.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOutcome:
    """One arm in one lane.

    Parameters
    ----------
    spec : ArmSpec
        Of the arm.
    lane : Lane
        Of the rows.
    rows : Path
        Folder of divergences, one file per context.
    capture : Capture
        Launches, resumed contexts and repeatability; its folder holds hidden states for the reference alone.
    head_rows : mapping of int to int
        Rows that the head saw at a time -> calls.
    graph_replays : int
        In scored steps.
    embedding_bytes : EmbeddingBytes
        Stored and run.
    attention : str
        Backends, as read back.
    identity : mapping
        Effective configuration, packages, variables, evidence: what a receipt says of the engine.
    """

    spec: ArmSpec
    lane: Lane
    rows: Path
    capture: Capture
    head_rows: Mapping[int, int]
    graph_replays: int
    embedding_bytes: EmbeddingBytes
    attention: str
    identity: Mapping[str, Any]


def run_vllm_arms(
    arms: Sequence[VllmArm], session: VllmSession, reporter: Reporter, *, reference_hidden: Path | None = None
) -> dict[tuple[str, str], LaneOutcome]:
    """Run every arm in a process of its own.

    Parameters
    ----------
    arms : sequence of VllmArm
        As `plan_arms` returns them.
    session : VllmSession
        What they share.
    reporter : Reporter
        Told about progress.
    reference_hidden : Path or None
        Hidden states of another engine's reference; None where `arms` has its own.

    Returns
    -------
    dict
        (arm name, lane name) -> LaneOutcome, in the order of `arms`.

    Raises
    ------
    UsageError, InvalidRunError
        As environment or engine refuse.
    """
    for arm in arms:
        check_mode(arm.mode, session.device.type)
    yardstick = next((arm for arm in arms if arm.is_reference), None)
    hidden = reference_hidden if yardstick is None else hidden_folder(yardstick, session)
    if hidden is None:
        raise UsageError("no reference to score against", hint="run the reference, or give its hidden states")
    num_inputs = session.tokens.num_tokens - 1
    total = sum(num_inputs - lane.first_scored(num_inputs) for arm in arms for lane in arm.lanes)
    outcomes: dict[tuple[str, str], LaneOutcome] = {}
    with reporter.phase(f"vllm, {len(arms)} processes", total * len(session.tokens.contexts), "positions") as advance:
        locked, pool = Locked(advance), ThreadPoolExecutor(max_workers=session.num_processes)
        try:
            # The reference is submitted first, so that whoever waits for it waits for something that runs.
            first = None if yardstick is None else pool.submit(_run_arm, yardstick, session, hidden, locked, _at_once)
            wait = _at_once if first is None else first.result
            others = [pool.submit(_run_arm, a, session, hidden, locked, wait) for a in arms if a is not yardstick]
            for future in [*([] if first is None else [first]), *others]:
                outcomes |= future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return outcomes


def _at_once() -> None:
    """Let a process that is ready go on."""


def _run_arm(
    arm: VllmArm, session: VllmSession, reference_hidden: Path, advance: Locked, wait: Callable[[], object]
) -> dict[tuple[str, str], LaneOutcome]:
    variant, checkpoint = arm.spec.resolved, arm.spec.checkpoint
    interpreter = session.interpreter_of(arm)
    plugin = plugin_variant(arm)
    declared = declared_environment(device_type=session.device.type, mode=arm.mode, plugin=plugin, stack=arm.stack)
    contract = arm_contract(arm, session, reference_hidden)
    folders = {
        lane: session.cache_dir / "captures" / digest_value({**contract, "lane": lane.name, "scored": lane.scored})[:32]
        for lane in arm.lanes
    }
    folder = session.cache_dir / "vllm" / digest_value({**contract, "lanes": [lane.name for lane in arm.lanes]})[:32]
    ids_NT1 = torch.stack([torch.from_numpy(context.ids.copy()).long() for context in session.tokens.contexts])
    write_ids(folder / IDS_FILE, ids_NT1)
    request = ChildRequest(
        arm=arm.name,
        model=str(stage_model(checkpoint, folder)),
        reference_model=str(session.reference.directory.resolve()),
        reference_hidden=str(reference_hidden.resolve()),
        lanes=tuple(
            LaneTask(
                lane=lane,
                rows=str(rows.resolve()),
                hidden=str(reference_hidden.resolve()) if arm.is_reference else None,
            )
            for lane, rows in folders.items()
        ),
        style=session.style,
        mode=arm.mode,
        activations=variant.activations,
        device_type=session.device.type,
        vocab_size=session.vocab_size,
        head=variant.head,
        logits=variant.logits,
        float32_head=variant.activations != "float32" and not checkpoint.has_quantized_head,
        arguments=arm.stack.arguments if arm.stack else {},
        evidence=tuple(e for e in arm.stack.evidence if e.kind != "log") if arm.stack else (),
        plugin=plugin is not None,
        ids=str((folder / IDS_FILE).resolve()),
        digests=tuple(context.digest for context in session.tokens.contexts),
        report=str((folder / REPORT_FILE).resolve()),
        trust_remote_code=session.trust_remote_code,
        fresh=session.fresh,
    )
    environment = child_environment(
        session.inherited, declared, cache_dir=session.cache_dir, device_index=session.device.index
    )
    write_request(folder / REQUEST_FILE, request)
    log = run_process(
        interpreter.python,
        CHILD,
        folder / REQUEST_FILE,
        arm=arm.name,
        environment=environment,
        on_positions=advance,
        on_started=wait,
    )
    report = read_report(Path(request.report))
    logged = [find_lines(e, log) for e in arm.stack.evidence if e.kind == "log"] if arm.stack else []
    findings = [*report.findings, *logged]
    check_findings(arm.name, findings)
    return {
        (arm.name.format(lane=lane.slug), lane.name): _lane_outcome(
            arm,
            lane,
            rows,
            reference_hidden,
            session,
            report,
            arm_identity(arm, interpreter, declared, report, findings),
        )
        for lane, rows in folders.items()
    }


def stage_model(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return a directory that vLLM can load: it takes every safetensors file for weights, whatever it holds.

    Parameters
    ----------
    checkpoint : Checkpoint
        Names the files that are weights.
    folder : Path
        Links are made there if the model directory holds others.
    """
    directory = checkpoint.directory.resolve()
    foreign = {file.name for file in directory.glob("*.safetensors")} - set(checkpoint.file_bytes)
    if not foreign:
        return directory
    staged = folder.resolve() / "model"
    staged.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        link = staged / file.name
        if file.name not in foreign and not link.exists():
            link.symlink_to(file)
    return staged


def _lane_outcome(
    arm: VllmArm,
    lane: Lane,
    rows: Path,
    hidden: Path,
    session: VllmSession,
    report: ChildReport,
    identity: Mapping[str, Any],
) -> LaneOutcome:
    launches: Counter[Launch] = Counter()
    head_rows: Counter[int] = Counter()
    replays = 0
    for context in session.tokens.contexts:
        evidence = read_context(rows, context.digest).evidence
        launches.update(evidence.launches)
        head_rows.update(evidence.head_rows)
        replays += evidence.graph_replays
    found = report.lanes[lane.name]
    stored = _stored_embedding(arm.spec.checkpoint)
    return LaneOutcome(
        spec=arm.spec,
        lane=lane,
        rows=rows,
        capture=Capture(
            directory=hidden if arm.is_reference else rows,
            launches=dict(launches),
            resumed=found.resumed,
            repeat_difference=found.repeat_difference,
        ),
        head_rows=dict(head_rows),
        graph_replays=replays,
        # A plain table counts as stored, whatever dtype it runs in.
        embedding_bytes=EmbeddingBytes(stored=stored, run=min(stored, report.embedding_bytes or stored)),
        attention="+".join(report.effective["attention"]),
        identity=identity,
    )


def read_context(rows: Path, ids_digest: str) -> ContextRows:
    """Read one finished context.

    Raises
    ------
    InvalidRunError
        If it is missing or damaged.
    """
    found = read_rows(context_path(rows, ids_digest))
    if found is None:
        raise InvalidRunError(
            "finished rows are missing or damaged", hint="keep other processes out of the cache folder; run again"
        )
    return found


def _stored_embedding(checkpoint: Checkpoint) -> int:
    return next((entry.nbytes for name, entry in checkpoint.plain.items() if "embed_tokens" in name), 0)

"""Receipts: what was measured, on what, with which result, as one strict JSON record.

A receipt holds no path, no NaN and no hand-typed number. `results` is computed from the positions file
alone; `identity` names everything that may have moved it.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exl3eval.arm import ArmRecord
from exl3eval.checkpoint.inspect import inventory
from exl3eval.errors import UsageError
from exl3eval.floors import floor_means
from exl3eval.records import digest_file, digest_value, write_receipt
from exl3eval.request import REFERENCE, VLLM
from exl3eval.score.positions import split_arms, write_table
from exl3eval.session import KldRun

SCHEMA = "exl3eval/receipt/2"
RECEIPT_FILE = "receipt.json"
POSITIONS_FILE = "positions.parquet"
CANDIDATES_FILE = "candidates.parquet"
FLOORS_FILE = "floors.parquet"


def _arm_identity(record: ArmRecord) -> dict[str, Any]:
    return {
        "checkpoint_sha256": record.spec.checkpoint_sha256,
        "declared": record.spec.declared.identity,
        "resolved": record.spec.resolved.identity,
        "attention": record.attention,
        "lane": record.lane.name,
        "engine": record.engine,
        "launches": [{**launch._asdict(), "count": count} for launch, count in sorted(record.launches.items())],
    }


def build_results(run: KldRun) -> dict[str, Any]:
    """Lay out every number of a run."""
    floor = run.summaries[run.floor_arm]
    return {
        "arms": {name: asdict(summary) for name, summary in run.summaries.items()},
        "comparison": asdict(run.comparison),
        "floors": {
            "reference_rounding": {"arm": run.floor_arm, "kl": floor.kl.mean},
            "lane_control": _control(run, run.lane_control),
            "graph_control": _control(run, run.graph_control),
            **floor_means(split_arms(run.floors)),
            "repeat_difference": {name: record.capture.repeat_difference for name, record in run.arms.items()},
        },
        "sizes": {name: _sizes(record) for name, record in run.arms.items()},
        "embedding_bytes": {name: asdict(record.embedding_bytes) for name, record in run.arms.items()},
        "logit_grid": dict(run.scores.grids),
        "cut_mass": dict(run.scores.cut_mass),
    }


def _sizes(record: ArmRecord) -> dict[str, Any]:
    found = inventory(record.spec.checkpoint)
    return {
        "checkpoint_bytes": found.exl3_bytes + found.plain_bytes,
        "body_bpw": found.body_bpw,
        "head_bpw": found.head_bpw,
    }


def _control(run: KldRun, name: str | None) -> dict[str, Any] | None:
    return None if name is None else {"arm": name, "kl": run.summaries[name].kl.mean}


def build_receipt(run: KldRun) -> dict[str, Any]:
    """Assemble a run's receipt, without the digest of the positions file."""
    first, *_ = run.tokens.contexts
    identity = {
        "suite": {"name": run.suite.name, "digest": run.suite.digest, "split": run.request.split},
        "tokens": {
            "digest": run.tokens.digest,
            "tokenizer_digest": run.tokens.tokenizer_digest,
            "num_contexts": len(run.tokens.contexts),
            "positions_per_context": len(first.ids) - 1,
            "first_scored": run.lane.first_scored(len(first.ids) - 1),
        },
        "vocabulary": {"size": run.vocabulary.size, "digest": run.vocabulary.digest},
        "reference_precision": run.request.reference_precision,
        "lane": run.lane.name,
        "head_lane": {name: record.spec.resolved.head for name, record in run.arms.items()},
        "engine": run.request.engine,
        "reference_engine": run.request.reference_engine or run.request.engine,
        "compiled": run.request.compiled,
        "decode_style": run.request.decode_style if run.request.engine == VLLM else None,
        "graphs": any(record.lane.graph for record in run.arms.values()),
        "kv_cache": run.lane.kv_cache,
        "seed": run.request.seed,
        "trust_remote_code": run.request.trust_remote_code,
        "arms": {name: _arm_identity(record) for name, record in run.arms.items()},
        "code": run.code,
        "device": run.device,
    }
    results = build_results(run)
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "reference": REFERENCE,
        "baseline": run.comparison.baseline,
        "variant": run.comparison.variant,
        "floor": run.floor_arm,
        "resampling": asdict(run.resampling),
        "identity": identity,
        "identity_digest": digest_value(identity),
        "results": results,
        "results_digest": digest_value(results),
        "warnings": build_warnings(run),
        "checkpoint_notes": {
            name: list(record.spec.checkpoint.notes)
            for name, record in run.arms.items()
            if record.spec.checkpoint.notes
        },
    }


def build_warnings(run: KldRun) -> list[str]:
    """Say what a reader must know before reading the numbers."""
    warnings = [
        f"arm `{name}`: every logit sits on the {grid} grid: rounded logits put a floor of 7e-5 to 2e-3 nats under "
        "a divergence"
        for name, grid in run.scores.grids.items()
        if grid is not None
    ]
    warnings += [
        f"arm `{name}`: running a context again changed hidden states by up to {record.capture.repeat_difference:.3g}: "
        "the arm is not repeatable"
        for name, record in run.arms.items()
        if record.capture.repeat_difference != 0.0
    ]
    floor, delta = run.summaries[run.floor_arm].kl.mean, run.comparison.paired.delta.mean
    if 0 < abs(delta) < floor:
        warnings.append(
            f"the delta of `{run.comparison.variant}` is below the reference's own rounding floor ({floor:.2e} nats): "
            "read the paired interval, not the difference of two absolute figures"
        )
    num_clusters = run.comparison.paired.delta.num_clusters
    if num_clusters < 20:
        warnings.append(f"{num_clusters} clusters: fewer than 20 give no trustworthy interval")
    return warnings


def check_output_folder(out: Path) -> None:
    """Refuse an output folder that already holds a run, before any work.

    Raises
    ------
    UsageError
        If it holds a receipt or positions, or is not a folder.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out.name} is a file", hint="give a folder")
    for name in (RECEIPT_FILE, POSITIONS_FILE, FLOORS_FILE, CANDIDATES_FILE):
        if (out / name).exists():
            raise UsageError(f"--out already holds {name}; receipts are immutable", hint="choose another folder")


def write_run(out: Path, run: KldRun) -> dict[str, Any]:
    """Write positions, floors and the worst contexts' candidates, then the receipt that names their digests; return it.

    Raises
    ------
    UsageError
        If either exists or the disk refuses the write.
    """
    write_table(out / POSITIONS_FILE, run.table)
    write_table(out / FLOORS_FILE, run.floors)
    write_table(out / CANDIDATES_FILE, run.candidates)
    return write_receipt(
        out / RECEIPT_FILE,
        {
            **build_receipt(run),
            "positions_sha256": digest_file(out / POSITIONS_FILE),
            "floors_sha256": digest_file(out / FLOORS_FILE),
            "candidates_sha256": digest_file(out / CANDIDATES_FILE),
        },
    )

"""The receipt of a smoke test."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from exl3eval.records import digest_value
from exl3eval.smoke.measure import SmokeArm, SmokeRun
from exl3eval.smoke.needle import AFTER, CUE

SCHEMA = "exl3eval/smoke/1"
KIND = "companion: retrieval and greedy agreement, no divergence"


def build_receipt(run: SmokeRun) -> dict[str, Any]:
    """Assemble the receipt of a smoke test."""
    models = run.request.models
    identity = {
        "suite": {"name": run.suite.name, "digest": run.suite.digest, "split": models.split},
        "tokens": {
            "digest": run.tokens.digest,
            "num_contexts": len(run.tokens.contexts),
            "length": run.tokens.num_tokens,
        },
        "vocabulary": {"size": run.vocabulary.size, "digest": run.vocabulary.digest},
        "needle": {"cue": CUE, "after": AFTER, "depths": list(run.request.depths)},
        "steps": run.request.steps,
        "allow_lost": run.request.allow_lost,
        "seed": models.seed,
        "reference_precision": models.reference_precision,
        "engine": "transformers",
        "trust_remote_code": models.trust_remote_code,
        "arms": {name: _identity(arm) for name, arm in run.arms.items()},
        "code": run.code,
        "device": run.device,
    }
    results = {
        "arms": {
            name: {"retrieval": asdict(arm.retrieval), "agreement": asdict(arm.agreement)}
            for name, arm in run.arms.items()
        },
        "texts": run.texts,
        "verdict": asdict(run.verdict),
    }
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "judged": next(reversed(run.arms)),
        "identity": identity,
        "identity_digest": digest_value(identity),
        "results": results,
        "results_digest": digest_value(results),
    }


def _identity(arm: SmokeArm) -> dict[str, Any]:
    return {
        "checkpoint_sha256": arm.checkpoint_sha256,
        "declared": arm.declared.identity,
        "resolved": arm.resolved.identity,
        "attention": arm.attention,
        "launches": [{**launch._asdict(), "count": count} for launch, count in sorted(arm.launches.items())],
    }

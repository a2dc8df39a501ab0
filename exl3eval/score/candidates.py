"""The most likely tokens of every side in a few contexts: what shows why a context is among the worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from exl3eval.score.divergence import log_normalisers
from exl3eval.score.scoring import BLOCK_LOGITS, ScoredArm, ScoredContext

SCHEMA = "exl3eval/candidates/1"
NUM_CANDIDATES = 5
ARROW_SCHEMA = pa.schema(
    [
        ("arm", pa.string()),
        ("context", pa.string()),
        ("position", pa.int32()),
        ("ids", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float64())),
    ],
    metadata={"schema": SCHEMA},
)


@torch.inference_mode()
def list_candidates(arms: Mapping[str, ScoredArm], contexts: Sequence[ScoredContext]) -> pa.Table:
    """List the ids that each arm holds most likely, at every position of the contexts given.

    Parameters
    ----------
    arms : mapping of str to ScoredArm
        By name, the reference among them.
    contexts : sequence of ScoredContext
        A few: logits are computed again.

    Returns
    -------
    Table
        One row per arm, context and position; ids most likely first, natural log-probabilities from FP64 normalisers.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ARROW_SCHEMA.names}
    for name, arm in arms.items():
        vocab_size = arm.head.vocab_size
        rows = max(1, BLOCK_LOGITS // vocab_size)
        for context in contexts:
            hidden_SH = arm.capture.hidden_states(context.ids_digest)[-len(context.targets) :]
            for start in range(0, len(hidden_SH), rows):
                logits_TV = arm.all_logits(hidden_SH[start : start + rows])[:, :vocab_size]
                top = logits_TV.topk(min(NUM_CANDIDATES, vocab_size), dim=1)
                columns["ids"] += top.indices.tolist()
                columns["log_probs"] += (top.values.double() - log_normalisers(logits_TV)[:, None]).tolist()
                columns["position"] += range(context.first + start, context.first + start + len(logits_TV))
            columns["arm"] += [name] * len(hidden_SH)
            columns["context"] += [context.name] * len(hidden_SH)
    return pa.table(columns, schema=ARROW_SCHEMA)

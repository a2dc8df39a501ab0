"""Runs as `exl3eval kld --out` writes them, from numbers that a test chooses."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from exl3eval.identity import source_digest
from exl3eval.records import digest_file, digest_value, seal, write_json
from exl3eval.score.positions import ARROW_SCHEMA, write_table

FLOOR = "reference-bfloat16"


def build_arms(
    *,
    num_contexts: int = 64,
    num_positions: int = 16,
    contexts_per_cluster: int = 2,
    strata: tuple[str, ...] = ("code", "prose"),
    scale: float = 0.005,
    changes: dict[str, float] | None = None,
    noise: float = 0.01,
    seed: int = 0,
) -> dict[str, dict[str, np.ndarray]]:
    """Columns of every arm: a baseline `base`, the floor, and variants whose KL is (1 + change) times as large.

    `noise` is the relative spread of a variant's change between contexts; no change and no noise is a copy.
    """
    generator = np.random.default_rng(seed)
    shape = (num_contexts, num_positions)
    kl = scale * np.exp(generator.normal(0.0, 0.4, (num_contexts, 1)) + generator.normal(0.0, 0.6, shape))
    index = np.arange(num_contexts)
    labels = {
        "context": np.array([f"context-{i:03d}" for i in index]).repeat(num_positions),
        "cluster": np.array([f"document-{i // contexts_per_cluster:03d}" for i in index]).repeat(num_positions),
        "stratum": np.array([strata[i // contexts_per_cluster % len(strata)] for i in index]).repeat(num_positions),
        "position": np.tile(np.arange(num_positions), num_contexts),
        "target": generator.integers(0, 1000, num_contexts * num_positions),
    }
    disagree = (generator.random(shape) < 0.02).astype(np.int8) * 3

    def arm(name: str, values: np.ndarray, top1: np.ndarray) -> dict[str, np.ndarray]:
        rows = {field.name: np.zeros(values.size) for field in ARROW_SCHEMA}
        rows |= labels | {"arm": np.repeat(name, values.size)}
        rows |= {"kl": values.ravel(), "tv": np.sqrt(values / 4.0).ravel(), "top1": top1.ravel()}
        return rows | {"entropy_arm": np.full(values.size, 2.0)}

    arms = {"base": arm("base", kl, disagree), FLOOR: arm(FLOOR, 0.02 * kl, np.zeros(shape, np.int8))}
    for name, change in (changes or {"variant": 0.0}).items():
        factor = 1.0 + change + noise * generator.normal(size=(num_contexts, 1)) * (noise > 0.0)
        arms[name] = arm(name, kl * factor if change or noise else kl.copy(), disagree)
    return arms


def write_run(
    folder: Path, arms: dict[str, dict[str, np.ndarray]], variant: str = "variant", **identity: object
) -> Path:
    """Write the baseline, the floor and one variant as a run; `identity` replaces fields of the identity."""
    chosen = {name: arms[name] for name in (FLOOR, "base", variant)}
    write_table(folder / "positions.parquet", build_table(chosen))
    write_table(folder / "floors.parquet", build_table({"batch_shape:base": chosen[FLOOR]}))
    write_receipt(folder, chosen, variant, **identity)
    return folder


def build_table(arms: dict[str, dict[str, np.ndarray]]) -> pa.Table:
    columns = []
    for field in ARROW_SCHEMA:
        values = np.concatenate([rows[field.name] for rows in arms.values()])
        column = pa.array(values.astype(str) if pa.types.is_dictionary(field.type) else values)
        columns.append(column.dictionary_encode() if pa.types.is_dictionary(field.type) else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=ARROW_SCHEMA)


def write_receipt(
    folder: Path,
    arms: dict[str, dict[str, np.ndarray]],
    variant: str,
    *,
    created: str = "2026-01-01T00:00:00+00:00",
    repeat_difference: float = 0.0,
    **changed: object,
) -> None:
    """Write a receipt that fits the positions beside it."""
    first = int(arms["base"]["position"].min())
    num_positions = int(arms["base"]["position"].max()) + 1
    num_contexts = len(arms["base"]["kl"]) // (num_positions - first)
    means = {name: _context_means(rows["kl"], num_positions - first) for name, rows in arms.items()}
    identity = {
        "suite": {"name": "synthetic", "digest": "5" * 64, "split": "analysis"},
        "tokens": {
            "digest": "7" * 64,
            "num_contexts": num_contexts,
            "positions_per_context": num_positions,
            "first_scored": first,
        },
        "vocabulary": {"size": 1000, "digest": "9" * 64},
        "reference_precision": "float32",
        "lane": "prefill",
        "head_lane": dict.fromkeys(["reference", *arms], "own"),
        "engine": "transformers",
        "seed": 1,
        "arms": {"reference": _arm("reference", launches=0)} | {name: _arm(name) for name in arms},
        "code": {"exl3eval_source_sha256": source_digest("exl3eval"), "git": {"commit": None, "diff_sha256": None}},
        "device": {"type": "cpu", "name": "synthetic", "isa": "AVX2", "threads": 1},
    } | changed
    results = {
        "arms": {name: {"kl": {"mean": _mean(values)}} for name, values in means.items()},
        "comparison": {"paired": {"delta": {"mean": _mean(means[variant] - means["base"])}}},
        "floors": {"repeat_difference": {"base": 0.0, variant: repeat_difference}},
    }
    receipt = {
        "schema": "exl3eval/receipt/2",
        "created": created,
        "reference": "reference",
        "baseline": "base",
        "variant": variant,
        "floor": FLOOR,
        "identity": identity,
        "identity_digest": digest_value(identity),
        "results": results,
        "results_digest": digest_value(results),
        "positions_sha256": digest_file(folder / "positions.parquet"),
        "floors_sha256": digest_file(folder / "floors.parquet"),
    }
    write_json(folder / "receipt.json", seal(receipt))


def _context_means(values: np.ndarray, num_positions: int) -> np.ndarray:
    codes = np.repeat(np.arange(len(values) // num_positions), num_positions)
    return np.bincount(codes, weights=values) / num_positions


def _mean(values: np.ndarray) -> float:
    import math

    return math.fsum(values) / len(values)


def _arm(name: str, launches: int = 8) -> dict[str, object]:
    declared = {"name": name, "doc": "", "activations": "auto", "linear": "auto", "embedding": name}
    return {
        "checkpoint_sha256": "1" * 64,
        "declared": declared,
        "resolved": declared | {"activations": "float32", "linear": "1-:reference"},
        "attention": "sdpa",
        "launches": [{"route": "reference", "bits": 4, "count": launches}],
    }

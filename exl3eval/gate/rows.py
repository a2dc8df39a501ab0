"""Rows of a run, laid out by context: what every endpoint is computed from.

Shapes: N contexts, P positions per context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from exl3eval.errors import InvalidRunError
from exl3eval.score.divergence import AGREE
from exl3eval.stats.clusters import ContextSample, FloatArray, IntArray
from exl3eval.verify import RUN_AGAIN

# Fields of a variant that name or demand and change no number.
LABEL_FIELDS = ("name", "doc", "requires", "forbids", "lanes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArmRows:
    """One arm's positions: what every endpoint is computed from.

    Attributes
    ----------
    arm : str
    contexts, clusters, strata : tuple of str, length N
        In the order of the run.
    targets_NP : ndarray of int64
        Token that each position predicts.
    kl_NP, tv_NP, disagree_NP : ndarray of float64
        KL(reference || arm) in nats, total variation, and 1 where the most likely ids differ.
    entropy : float
        Mean entropy of the arm in nats.
    """

    arm: str
    contexts: tuple[str, ...]
    clusters: tuple[str, ...]
    strata: tuple[str, ...]
    targets_NP: IntArray
    kl_NP: FloatArray
    tv_NP: FloatArray
    disagree_NP: FloatArray
    entropy: float

    @property
    def num_contexts(self) -> int:
        """N."""
        return len(self.contexts)

    def first(self, num_contexts: int) -> ArmRows:
        """Keep the first contexts in the order of the run."""
        count = slice(num_contexts)
        return replace(
            self,
            contexts=self.contexts[count],
            clusters=self.clusters[count],
            strata=self.strata[count],
            targets_NP=self.targets_NP[count],
            kl_NP=self.kl_NP[count],
            tv_NP=self.tv_NP[count],
            disagree_NP=self.disagree_NP[count],
        )

    def average(self, values_NP: FloatArray) -> ContextSample:
        """Average a figure over each context's positions, in the order of positions."""
        num_contexts, num_positions = values_NP.shape
        codes = np.repeat(np.arange(num_contexts), num_positions)
        means = np.bincount(codes, weights=values_NP.ravel()) / num_positions
        return ContextSample(values=means, clusters=self.clusters, strata=self.strata)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A checked run: its receipt, and the rows of the arms that a verdict needs."""

    receipt: Mapping[str, Any]
    baseline: ArmRows
    variant: ArmRows
    floor: ArmRows

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that may have moved the numbers."""
        return self.receipt["identity"]

    @property
    def lane(self) -> str:
        """Which forward passes were scored."""
        return self.identity["lane"]

    @property
    def identical(self) -> bool:
        """Whether variant and baseline agree in every bit of every position."""
        return np.array_equal(self.baseline.kl_NP, self.variant.kl_NP) and np.array_equal(
            self.baseline.tv_NP, self.variant.tv_NP
        )


def arm_rows(arm: str, table: pa.Table) -> ArmRows:
    """Lay one arm's rows out by context.

    Raises
    ------
    InvalidRunError
        If a context's rows are not together, in order and as many as every other's, or its labels vary.
    """
    codes, names = _encode(table, "context")
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    num_positions, remainder = divmod(table.num_rows, max(len(names), 1))
    position = table["position"].to_numpy()
    expected = np.tile(position[0] + np.arange(num_positions), len(names))
    if len(starts) != len(names) or remainder or not np.array_equal(position, expected):
        raise InvalidRunError(
            f"arm `{arm}`: rows of {len(names)} contexts lie in {len(starts)} blocks; expected one block each, of as "
            "many positions, all the same ones in order",
            hint=RUN_AGAIN,
        )
    labels = {}
    for label in ("cluster", "stratum"):
        values, kinds = _encode(table, label)
        blocks = values.reshape(len(names), num_positions)
        if not (blocks == blocks[:, :1]).all():
            raise InvalidRunError(f"arm `{arm}`: the {label} changes inside a context", hint=RUN_AGAIN)
        labels[label] = tuple(kinds[code] for code in blocks[:, 0])

    def measure(name: str) -> FloatArray:
        return table[name].to_numpy().astype(np.float64).reshape(len(names), num_positions)

    return ArmRows(
        arm=arm,
        contexts=tuple(names[code] for code in codes[starts]),
        clusters=labels["cluster"],
        strata=labels["stratum"],
        targets_NP=table["target"].to_numpy().astype(np.int64).reshape(len(names), num_positions),
        kl_NP=measure("kl"),
        tv_NP=measure("tv"),
        disagree_NP=(measure("top1") != AGREE).astype(np.float64),
        entropy=float(table["entropy_arm"].to_numpy().mean()),
    )


def _encode(table: pa.Table, column: str) -> tuple[np.ndarray, list[str]]:
    encoded = table[column].combine_chunks().cast(pa.string()).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()

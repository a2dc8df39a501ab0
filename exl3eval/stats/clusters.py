"""What the statistics are computed on: values with the cluster that each came from.

The unit is a context (its mean over positions), the cluster is its source document. Contexts of one
document resemble each other, so every standard error here is a sum over clusters, never over contexts:
ignoring clusters gives .78-.80 coverage for a nominal 95 % interval (measurement.md section 4).

Shapes: N contexts or positions, G clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from exl3eval.errors import InvalidRunError, UsageError

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
Labels: TypeAlias = Sequence[str] | Sequence[int] | NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextSample:
    """One number per context, with the document and the kind of text that it came from.

    Parameters
    ----------
    values : array_like of float, shape [N]
        Per-context means (nats, or differences of nats). Finite.
    clusters : sequence of str or int, length N
        Source document of each context.
    strata : sequence of str or int, length N, optional
        Kind of text of each context. A cluster lies in one stratum.

    Attributes
    ----------
    codes_N : ndarray of int64
        Index of each context's cluster in `labels`.
    labels : tuple
        Cluster ids in sorted order, so that nothing depends on the order of contexts.

    Raises
    ------
    UsageError
        If there is no context, lengths differ, labels mix types, or a cluster spans two strata.
    InvalidRunError
        If a value is NaN or infinite.
    """

    values: FloatArray
    clusters: Labels
    strata: Labels | None = None
    codes_N: IntArray = field(init=False)
    labels: tuple[str | int, ...] = field(init=False)
    _mean: float | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        values, codes, labels = _clustered(self.values, self.clusters, unit="context")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "codes_N", codes)
        object.__setattr__(self, "labels", labels)
        if self.strata is not None:
            _check_strata(self.strata, codes, labels)

    @property
    def num_contexts(self) -> int:
        """N."""
        return len(self.values)

    @property
    def num_clusters(self) -> int:
        """G."""
        return len(self.labels)

    @property
    def all_equal(self) -> bool:
        """True when every value is the same number: the null arm (or one context)."""
        return bool(self.values.min() == self.values.max())

    @property
    def sizes_G(self) -> IntArray:
        """Number of contexts of each cluster."""
        return np.bincount(self.codes_N, minlength=self.num_clusters)

    @property
    def sums_G(self) -> FloatArray:
        """Sum of values of each cluster, the same bits for any order of contexts."""
        order = np.lexsort((self.values, self.codes_N))
        starts = np.concatenate(([0], np.cumsum(self.sizes_G)[:-1]))
        return np.add.reduceat(self.values[order], starts)

    def mean(self) -> float:
        """Mean over contexts, correctly rounded; exactly the common value when all are equal."""
        if self._mean is None:
            mean = float(self.values[0]) if self.all_equal else math.fsum(self.values) / self.num_contexts
            object.__setattr__(self, "_mean", mean)
        assert self._mean is not None
        return self._mean

    def sd(self) -> float:
        """Standard deviation over contexts (n - 1 in the denominator), the same bits for any order of contexts."""
        return math.sqrt(math.fsum((self.values - self.mean()) ** 2) / (self.num_contexts - 1))

    def replace_values(self, values: FloatArray) -> ContextSample:
        """Put other values on the same contexts."""
        return ContextSample(values=values, clusters=self.clusters, strata=self.strata)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionSample:
    """One number per scored position, with the source document of its context.

    Parameters
    ----------
    values : array_like of float, shape [P]
        Per-position figures, for instance KL in nats. Finite.
    clusters : sequence of str or int, length P
        Source document of each position. Integers are the fast choice at a million positions.

    Raises
    ------
    UsageError, InvalidRunError
        As `ContextSample`.
    """

    values: FloatArray
    clusters: Labels
    codes_P: IntArray = field(init=False)
    labels: tuple[str | int, ...] = field(init=False)

    def __post_init__(self) -> None:
        values, codes, labels = _clustered(self.values, self.clusters, unit="position")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "codes_P", codes)
        object.__setattr__(self, "labels", labels)

    @property
    def num_clusters(self) -> int:
        """G."""
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linearisation:
    """The mean over contexts as a ratio of cluster sums, linearised: all that its variance needs.

    Attributes
    ----------
    mean : float
        sum_g S_g / sum_g n_g.
    residual_sums_G : ndarray of float64
        u_g = S_g - mean * n_g.
    sizes_G : ndarray of float64
        n_g.
    leverage_G : ndarray of float64
        1 / (1 - n_g / N), the CR2 factor of an intercept-only model.
    se : float
        sqrt(sum_g leverage_g u_g^2) / N.
    """

    mean: float
    residual_sums_G: FloatArray
    sizes_G: FloatArray
    leverage_G: FloatArray
    se: float


def linearise_mean(sample: ContextSample) -> Linearisation:
    """Compute the CR2 cluster-robust standard error of the mean over contexts.

    CR2 (Bell and McCaffrey 2002) scales the residuals of cluster g by (I - 11'/N)^{-1/2}, which sums to
    u_g / sqrt(1 - n_g/N). It is unbiased when contexts are independent, whatever the cluster sizes, where
    CR1 (the one factor G/(G-1)) is too small; with equal sizes the two are the same number.

    Raises
    ------
    UsageError
        If there is one cluster: its standard error is unknown, not 0.
    """
    if sample.num_clusters < 2:
        raise UsageError(
            "a cluster standard error of 1 cluster is unknown",
            hint="add contexts from other documents; between-document variance cannot come from one document",
        )
    mean = sample.mean()
    sizes = sample.sizes_G.astype(np.float64)
    residuals = np.zeros_like(sizes) if sample.all_equal else sample.sums_G - mean * sizes
    leverage = 1.0 / (1.0 - sizes / sizes.sum())
    se = math.sqrt(math.fsum(leverage * residuals**2)) / sample.num_contexts
    return Linearisation(mean=mean, residual_sums_G=residuals, sizes_G=sizes, leverage_G=leverage, se=se)


def check_same_contexts(first: ContextSample, second: ContextSample) -> None:
    """Refuse two arms whose contexts do not line up one to one.

    Raises
    ------
    UsageError
        If the arms hold different numbers of contexts, or contexts of different clusters.
    """
    if first.labels != second.labels or not np.array_equal(first.codes_N, second.codes_N):
        raise UsageError(
            f"the arms do not hold the same contexts in the same order: {first.num_contexts} contexts in "
            f"{first.num_clusters} clusters against {second.num_contexts} in {second.num_clusters}",
            hint="score both arms on one suite and keep its order",
        )


def _clustered(
    values: FloatArray, clusters: Labels, *, unit: str
) -> tuple[FloatArray, IntArray, tuple[str | int, ...]]:
    """Validate and copy one clustered column; return values, codes and sorted labels."""
    column = np.array(values, dtype=np.float64)
    if column.ndim != 1 or column.size == 0:
        raise UsageError(
            f"{unit} values have shape {list(column.shape)}, expected [n] with n >= 1",
            hint=f"pass one number per {unit}",
        )
    if len(clusters) != column.size:
        raise UsageError(
            f"{column.size} {unit} values came with {len(clusters)} cluster ids",
            hint=f"pass one cluster id per {unit}",
        )
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        raise InvalidRunError(
            f"{bad.size} of {column.size} {unit} values are not finite, the first is {column[bad[0]]} at {bad[0]}",
            hint="a NaN or infinite figure makes the run invalid; find the position that produced it",
        )
    codes, labels = _encode(clusters, what="cluster")
    column.setflags(write=False)
    codes.setflags(write=False)
    return column, codes, labels


def _encode(ids: Labels, *, what: str) -> tuple[IntArray, tuple[str | int, ...]]:
    """Turn ids into indices of their sorted distinct values."""
    array = np.asarray(ids)
    mixed = not isinstance(ids, np.ndarray) and len({isinstance(label, str) for label in ids}) > 1
    if mixed or array.ndim != 1 or array.dtype.kind not in "USiu":
        raise UsageError(
            f"{what} ids must be all str or all int, got {'mixed types' if mixed else array.dtype}",
            hint=f"use the document's id as the {what} id",
        )
    labels, codes = np.unique(array, return_inverse=True)
    return codes.astype(np.int64), tuple(labels.tolist())


def _check_strata(strata: Labels, codes: IntArray, labels: tuple[str | int, ...]) -> None:
    """Refuse strata of the wrong length or that split a cluster."""
    if len(strata) != codes.size:
        raise UsageError(
            f"{codes.size} context values came with {len(strata)} strata", hint="pass one stratum per context"
        )
    stratum_codes, names = _encode(strata, what="stratum")
    pairs = np.unique(np.stack([codes, stratum_codes]), axis=1)
    split = np.flatnonzero(np.bincount(pairs[0]) > 1)
    if split.size:
        found = sorted(str(names[code]) for code in pairs[1][pairs[0] == split[0]])
        raise UsageError(
            f"cluster {labels[split[0]]!r} lies in {len(found)} strata: {', '.join(found)}",
            hint="a document has one kind of text; give its parts different cluster ids only if they are independent",
        )

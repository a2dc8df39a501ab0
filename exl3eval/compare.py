"""From positions to numbers: what each arm loses, and what a variant adds to its baseline.

Everything here is computed from the positions table alone, so a stored run can be checked without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.score.divergence import AGREE, FLIP, NEAR_TIE, TIE
from exl3eval.stats.clusters import ContextSample, PositionSample
from exl3eval.stats.intervals import Estimate, estimate_means
from exl3eval.stats.paired import PairedDifference, estimate_paired_difference
from exl3eval.stats.strata import estimate_strata
from exl3eval.stats.tails import TailEstimate, estimate_tails

MIN_TOP1 = 0.5
NEAR_UNIFORM = 0.95
NUM_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampling:
    """How intervals are resampled.

    Parameters
    ----------
    seed : int
        Fixes every resample.
    confidence : float
        Two-sided level.
    num_resamples : int
        Bootstrap resamples.
    """

    seed: int
    confidence: float = 0.95
    num_resamples: int = 9_999


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstContext:
    """One of the contexts with the largest mean KL divergence."""

    context: str
    stratum: str
    mean_kl: float
    max_kl: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm against the reference. Divergences in nats per position, rates in 0..1."""

    arm: str
    num_positions: int
    kl: Estimate
    tails: tuple[TailEstimate, ...]
    strata: dict[str | int, Estimate]
    kl_reverse: float
    js: float
    ear: float
    delta_nll: Estimate
    nll_ref: float
    top1_agreement: float
    top1_ties: int
    top1_near_ties: int
    top1_flips: int
    top_k_overlap: float
    entropy_ref: float
    entropy_arm: float
    worst: tuple[WorstContext, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A variant against its baseline, both against one reference."""

    baseline: str
    variant: str
    paired: PairedDifference
    identical: bool


def context_means(rows: pa.Table, measure: str) -> ContextSample:
    """Average a measure over each context's positions: one value per context, in order of first appearance.

    Raises
    ------
    UsageError
        If there are no rows.
    """
    if rows.num_rows == 0:
        raise UsageError("there are no positions to average", hint="score at least one context")
    names = rows["context"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    counts = np.bincount(codes)
    means = np.bincount(codes, weights=rows[measure].to_numpy()) / counts
    clusters, strata = (
        rows[label].combine_chunks().cast(pa.string()).take(pa.array(first)).to_pylist()
        for label in ("cluster", "stratum")
    )
    return ContextSample(values=means, clusters=clusters, strata=strata)


def summarise_arm(arm: str, rows: pa.Table, resampling: Resampling, *, executor: Executor | None = None) -> ArmSummary:
    """Reduce one arm's positions."""
    kl, delta_nll = context_means(rows, "kl"), context_means(rows, "delta_nll")
    options = {"confidence": resampling.confidence, "num_resamples": resampling.num_resamples, "seed": resampling.seed}
    kl_estimate, nll_estimate = estimate_means([kl, delta_nll], executor=executor, **options)  # type: ignore[arg-type]
    positions = PositionSample(values=rows["kl"].to_numpy(), clusters=_cluster_codes(rows))
    top1 = rows["top1"].to_numpy()
    counts = {kind: int(np.count_nonzero(top1 == kind)) for kind in (AGREE, TIE, NEAR_TIE, FLIP)}
    return ArmSummary(
        arm=arm,
        num_positions=rows.num_rows,
        kl=kl_estimate,
        tails=estimate_tails(positions, executor=executor, **options),  # type: ignore[arg-type]
        strata=estimate_strata(kl, executor=executor, **options),  # type: ignore[arg-type]
        kl_reverse=_mean(rows, "kl_reverse"),
        js=_mean(rows, "js"),
        ear=1.0 - _mean(rows, "tv"),
        delta_nll=nll_estimate,
        nll_ref=_mean(rows, "nll_ref"),
        top1_agreement=counts[AGREE] / rows.num_rows,
        top1_ties=counts[TIE],
        top1_near_ties=counts[NEAR_TIE],
        top1_flips=counts[FLIP],
        top_k_overlap=_mean(rows, "top_k_overlap"),
        entropy_ref=_mean(rows, "entropy_ref"),
        entropy_arm=_mean(rows, "entropy_arm"),
        worst=_worst_contexts(rows, kl),
    )


def _cluster_codes(rows: pa.Table) -> np.ndarray:
    return rows["cluster"].combine_chunks().dictionary_encode().indices.to_numpy()


def _mean(rows: pa.Table, measure: str) -> float:
    return float(rows[measure].to_numpy().mean())


def _worst_contexts(rows: pa.Table, kl: ContextSample) -> tuple[WorstContext, ...]:
    names = rows["context"].combine_chunks().dictionary_encode()
    codes, labels = names.indices.to_numpy(), names.dictionary.to_pylist()
    strata = kl.strata or [""] * len(labels)
    values = rows["kl"].to_numpy()
    total = float(kl.values.sum())
    return tuple(
        WorstContext(
            context=labels[code],
            stratum=str(strata[code]),
            mean_kl=float(kl.values[code]),
            max_kl=float(values[codes == code].max()),
            share=float(kl.values[code]) / total if total else 0.0,
        )
        for code in np.argsort(-kl.values, kind="stable")[:NUM_WORST]
    )


def compare_arms(
    baseline: tuple[str, pa.Table],
    variant: tuple[str, pa.Table],
    resampling: Resampling,
    *,
    executor: Executor | None = None,
) -> Comparison:
    """Compare two arms, context by context.

    Raises
    ------
    UsageError
        If the arms were not scored on the same positions.
    """
    (baseline_name, left), (variant_name, right) = baseline, variant
    for column in ("context", "position", "target"):
        if left.num_rows != right.num_rows or not left[column].combine_chunks().cast(
            pa.string() if column == "context" else pa.int32()
        ).equals(right[column].combine_chunks().cast(pa.string() if column == "context" else pa.int32())):
            raise UsageError(
                f"arms `{baseline_name}` and `{variant_name}` differ in column `{column}`",
                hint="only arms over the same contexts, positions and targets can be paired",
            )
    paired = estimate_paired_difference(
        context_means(left, "kl"),
        context_means(right, "kl"),
        confidence=resampling.confidence,
        num_resamples=resampling.num_resamples,
        seed=resampling.seed,
        executor=executor,
    )
    identical = bool(np.array_equal(left["kl"].to_numpy(), right["kl"].to_numpy()))
    return Comparison(baseline=baseline_name, variant=variant_name, paired=paired, identical=identical)


def check_sanity(summaries: Sequence[ArmSummary], vocab_size: int) -> None:
    """Stop on an arm that is broken rather than lossy (lessons M12).

    Raises
    ------
    InvalidRunError
        If an arm agrees with the reference's most likely id at fewer than half of the positions, or its
        distribution is nearly uniform.
    """
    for summary in summaries:
        if summary.top1_agreement < MIN_TOP1:
            raise InvalidRunError(
                f"arm `{summary.arm}` agrees with the reference's top id at {summary.top1_agreement:.1%} of positions",
                hint="below 50 % the arm is broken or is another model; no number is reported",
            )
        if summary.entropy_arm > NEAR_UNIFORM * np.log(vocab_size):
            raise InvalidRunError(
                f"arm `{summary.arm}` is nearly uniform: mean entropy {summary.entropy_arm:.2f} of "
                f"{np.log(vocab_size):.2f} nats",
                hint="the arm is broken; no number is reported",
            )

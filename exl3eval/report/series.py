"""Numbers behind the figures, from verified runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from exl3eval.compare import context_means
from exl3eval.report.plots import Axis, Curve, Curves, Forest, ForestRow, Mark, Point, Scatter
from exl3eval.report.study import BASELINE, CONTROL, FLOOR, GRAPH_CONTROL, VARIANT, Arm, Run, Study, decode_rows

KL_AXIS = "KL(reference ‖ arm), nats per position"
NUM_BINS = 60
NUM_THRESHOLDS = 160
NUM_POSITION_BINS = 16
CONFIDENCE_EDGES = np.linspace(0.0, 1.0, 11)
GIB = 1 << 30
LANE_CONTROLS = {CONTROL: "reference in the lane", GRAPH_CONTROL: "reference replayed"}


def floor_marks(study: Study, lane: str) -> tuple[Mark, ...]:
    """Mark the reference's own rounding floor, and what the lane itself moves."""
    floors = [arm for arm in study.arms(lane) if arm.role in (FLOOR, CONTROL, GRAPH_CONTROL)]
    return tuple(Mark(label=f"floor: {arm.label}", value=arm.summary["kl"]["mean"]) for arm in floors)


def margin_of(run: Run) -> float | None:
    """Return the margin on mean KL that a gate declared for this run's variant."""
    if run.verdict is None:
        return None
    return next(
        (
            endpoint["margin"]["value"]
            for endpoint in run.verdict["verdict"]["endpoints"]
            if (endpoint["delta"]["variant"], endpoint["delta"]["endpoint"]) == (run.variant, "mean")
        ),
        None,
    )


def paired_forest(study: Study, lane: str) -> Forest:
    """Paired differences; the margin is shaded where all runs declared the same one."""
    runs = study.in_lane(lane)
    margins = {margin_of(run) for run in runs}
    rows = []
    for index, run in enumerate(runs):
        delta = run.paired["delta"]
        interval = delta["interval"] or {"low": None, "high": None}
        rows.append(
            ForestRow(
                label=study.label(run),
                value=delta["mean"],
                low=interval["low"],
                high=interval["high"],
                series=index + 1,
            )
        )
    return Forest(
        x=Axis(label="variant minus baseline (right is worse), nats per position"),
        rows=tuple(rows),
        series=(),
        margin=margins.pop() if len(margins) == 1 else None,
        marks=(Mark(label="no difference", value=0.0),),
    )


def strata_forest(study: Study, lane: str) -> Forest:
    """Mean KL of every kind of text, one row per kind and arm; most lossy kind of the first arm on top."""
    arms = [arm for arm in study.arms(lane) if arm.role in (BASELINE, VARIANT)]
    first, *_ = arms
    order = sorted(first.summary["strata"], key=lambda name: -first.summary["strata"][name]["mean"])
    rows = []
    for stratum in order:
        for index, arm in enumerate(arms):
            estimate = arm.summary["strata"][stratum]
            interval = estimate["interval"] or {"low": None, "high": None}
            rows.append(
                ForestRow(
                    label=stratum if index == 0 else "",
                    value=estimate["mean"],
                    low=interval["low"],
                    high=interval["high"],
                    series=index,
                )
            )
    return Forest(
        x=Axis(label=KL_AXIS), rows=tuple(rows), series=tuple(arm.label for arm in arms), marks=floor_marks(study, lane)
    )


def kl_histogram(study: Study, lane: str) -> Curves:
    """Share of positions per bin of log KL; positions of exactly 0 have no place on the axis."""
    arms = study.arms(lane)
    positive = [values[values > 0] for values in (_kl(arm) for arm in arms)]
    filled = [values for values in positive if len(values)]
    low, high = (min(v.min() for v in filled), max(v.max() for v in filled)) if filled else (1e-12, 1.0)
    edges = np.logspace(np.floor(np.log10(max(low, 1e-12))), np.ceil(np.log10(high)), NUM_BINS + 1)
    curves = tuple(
        _curve(arm, index, edges[:-1], np.histogram(values, edges)[0] / len(_kl(arm)))
        for index, (arm, values) in enumerate(zip(arms, positive, strict=True))
    )
    return Curves(x=Axis(label=KL_AXIS, log=True), y=Axis(label="share of positions"), curves=curves, steps=True)


def kl_exceedance(study: Study, lane: str) -> Curves:
    """Share of positions beyond each threshold, on two log axes: the tail that a mean hides."""
    arms = study.arms(lane)
    top = max(float(_kl(arm).max()) for arm in arms) or 1.0
    thresholds = np.logspace(np.log10(top) - 4, np.log10(top), NUM_THRESHOLDS)
    curves = []
    for index, arm in enumerate(arms):
        ordered = np.sort(_kl(arm))
        share = 1.0 - np.searchsorted(ordered, thresholds, side="right") / len(ordered)
        curves.append(_curve(arm, index, thresholds[share > 0], share[share > 0]))
    return Curves(
        x=Axis(label=f"threshold on {KL_AXIS}", log=True),
        y=Axis(label="share of positions beyond it", log=True),
        curves=tuple(curves),
    )


def context_scatter(study: Study, lane: str) -> Scatter:
    """Mean KL per context: each variant against its baseline."""
    runs, points = study.in_lane(lane), []
    for index, run in enumerate(runs):
        names = context_names(run.rows[run.baseline])
        before, after = (context_means(run.rows[name], "kl").values for name in (run.baseline, run.variant))
        points += [
            Point(label=name, x=float(x), y=float(y), series=index + 1)
            for name, x, y in zip(names, before, after, strict=True)
            if x > 0 and y > 0
        ]
    return Scatter(
        x=Axis(label="baseline: mean KL of the context, nats", log=True),
        y=Axis(label="variant, nats", log=True),
        points=tuple(points),
        series=("", *(study.label(run) for run in runs)),
        diagonal=True,
    )


def context_names(rows: pa.Table) -> list[str]:
    """Return the contexts in the order of `exl3eval.compare.context_means`."""
    return rows["context"].combine_chunks().dictionary_encode().dictionary.to_pylist()


def position_edges(first: int, num_positions: int) -> np.ndarray:
    """Split positions first..P-1 into bins that widen with the position; every bin holds at least one."""
    edges = np.unique(np.round(np.geomspace(first + 1, num_positions + 1, NUM_POSITION_BINS + 1)).astype(int))
    return edges - 1


def lane_edges(study: Study, lane: str) -> np.ndarray:
    """Bin the positions that a lane scored."""
    run, *_ = study.in_lane(lane)
    return position_edges(run.first_scored, run.identity["tokens"]["positions_per_context"])


def mean_by_bin(rows: pa.Table, column: str, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average KL over positions whose `column` falls in each bin: means (NaN where empty) and counts."""
    last = np.nextafter(edges[-1], np.inf)
    codes = np.digitize(rows[column].to_numpy(), [*edges[:-1], last]) - 1
    counts = np.bincount(codes, minlength=len(edges) - 1)
    sums = np.bincount(codes, weights=rows["kl"].to_numpy(), minlength=len(edges) - 1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0), counts


def kl_by_position(study: Study, lane: str) -> Curves:
    """Mean KL against how much context came before."""
    arms = study.arms(lane)
    edges = lane_edges(study, lane)
    centres = np.array([np.sqrt((low + 1) * high) for low, high in pairwise(edges)])
    return Curves(
        x=Axis(label="tokens of context before the prediction", log=True),
        y=Axis(label="mean KL, nats", log=True),
        curves=_binned(arms, "position", edges, centres),
        markers=True,
    )


def kl_by_confidence(study: Study, lane: str) -> Curves:
    """Mean KL against the probability of the reference's first choice."""
    centres = (CONFIDENCE_EDGES[:-1] + CONFIDENCE_EDGES[1:]) / 2
    return Curves(
        x=Axis(label="reference confidence (probability of its first choice)"),
        y=Axis(label="mean KL, nats", log=True),
        curves=_binned(study.arms(lane), "confidence_ref", CONFIDENCE_EDGES, centres),
        markers=True,
    )


def size_fidelity(study: Study, lane: str) -> Scatter | None:
    """Mean KL against the checkpoint's size, where receipts hold it."""
    sized = [(arm, size) for arm in _measured(study, lane) if (size := arm.optional("sizes"))]
    return _trade_off(
        study,
        lane,
        [(arm, size["checkpoint_bytes"] / GIB) for arm, size in sized],
        "checkpoint, GiB",
        more_is_better=False,
    )


def speed_fidelity(study: Study, lane: str) -> Scatter | None:
    """Mean KL against speed, where receipts hold it."""
    timed = [(arm, speed) for arm in _measured(study, lane) if (speed := arm.optional("speed"))]
    return _trade_off(
        study,
        lane,
        [(arm, speed["tokens_per_second"]) for arm, speed in timed],
        "tokens per second",
        more_is_better=True,
    )


def kl_by_rows(study: Study) -> Curves | None:
    """Mean KL of decode lanes against their row count M, with the dispatch thresholds of the arms marked."""
    lanes = [lane for lane in study.lanes if decode_rows(lane) is not None]
    if len(lanes) < 2:
        return None
    found: dict[str, list[tuple[int, float]]] = {}
    quiet: dict[str, bool] = {}
    thresholds: dict[int, None] = {}
    for lane in lanes:
        for arm in study.arms(lane):
            name = LANE_CONTROLS.get(arm.role, arm.name)
            quiet[name] = arm.role in (FLOOR, CONTROL, GRAPH_CONTROL)
            found.setdefault(name, []).append((decode_rows(lane) or 0, arm.summary["kl"]["mean"]))
            if not quiet[name]:
                thresholds |= dict.fromkeys(_thresholds(arm.run.identity["arms"][arm.name]["resolved"]["linear"]))
    curves = []
    for index, (name, pairs) in enumerate(found.items()):
        x, y = zip(*sorted(pairs), strict=True)
        curves.append(Curve(label=name, x=tuple(map(float, x)), y=y, series=index, quiet=quiet[name]))
    return Curves(
        x=Axis(label="rows per forward pass, M", log=True),
        y=Axis(label="mean KL, nats"),
        curves=tuple(curves),
        markers=True,
        verticals=tuple(Mark(label=f"M = {rows}", value=float(rows)) for rows in sorted(thresholds)),
    )


def _thresholds(dispatch: str) -> Sequence[int]:
    """First row count of every route but the first of a dispatch such as `1-127:gemv,128-:reconstruct`."""
    return [int(entry.split("-")[0]) for entry in dispatch.split(",")[1:]]


def _trade_off(
    study: Study, lane: str, costs: Sequence[tuple[Arm, float]], label: str, *, more_is_better: bool
) -> Scatter | None:
    if not costs:
        return None
    points = []
    for index, (arm, cost) in enumerate(costs):
        interval = arm.summary["kl"]["interval"] or {"low": None, "high": None}
        mean = arm.summary["kl"]["mean"]
        points.append(Point(label=arm.label, x=cost, y=mean, low=interval["low"], high=interval["high"], series=index))
    return Scatter(
        x=Axis(label=label),
        y=Axis(label="mean KL, nats"),
        points=tuple(points),
        series=tuple(arm.label for arm, _ in costs),
        named=True,
        front=pareto_front([(point.x, point.y) for point in points], more_is_better=more_is_better),
        horizontals=floor_marks(study, lane),
    )


def pareto_front(points: Sequence[tuple[float, float]], *, more_is_better: bool) -> tuple[tuple[float, float], ...]:
    """Return the points that no other beats on both axes, by x; y is a loss, x a cost or (`more_is_better`) a gain."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0] if more_is_better else point[0], point[1])):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return tuple(sorted(front))


def _measured(study: Study, lane: str) -> list[Arm]:
    return [arm for arm in study.arms(lane) if arm.role in (BASELINE, VARIANT)]


def _kl(arm: Arm) -> np.ndarray:
    return arm.rows["kl"].to_numpy()


def _binned(arms: Sequence[Arm], column: str, edges: np.ndarray, centres: np.ndarray) -> tuple[Curve, ...]:
    curves = []
    for index, arm in enumerate(arms):
        means, _ = mean_by_bin(arm.rows, column, edges)
        shown = np.isfinite(means) & (means > 0)
        curves.append(_curve(arm, index, centres[shown], means[shown]))
    return tuple(curves)


def _curve(arm: Arm, index: int, x: np.ndarray, y: np.ndarray) -> Curve:
    return Curve(
        label=arm.label,
        x=tuple(map(float, x)),
        y=tuple(map(float, y)),
        series=index,
        quiet=arm.role in (FLOOR, CONTROL, GRAPH_CONTROL),
    )

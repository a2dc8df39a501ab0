"""Numbers behind figures equal their definitions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from exl3eval.report import series
from exl3eval.report.study import load_study

RUN = Path(__file__).parents[1] / "data" / "report_run"


@pytest.fixture(scope="module")
def study():
    return load_study([RUN])


def kl_of(study, arm):
    return study.runs[0].rows[arm]["kl"].to_numpy()


def test_histogram_shares_sum_to_the_share_of_positive_positions(study):
    for curve in series.kl_histogram(study, "prefill").curves:
        kl = kl_of(study, curve.label)
        assert sum(curve.y) == pytest.approx(np.count_nonzero(kl > 0) / len(kl), abs=1e-12)


def test_exceedance_is_the_share_beyond_each_threshold(study):
    for curve in series.kl_exceedance(study, "prefill").curves:
        kl = kl_of(study, curve.label)
        for threshold, share in list(zip(curve.x, curve.y, strict=True))[::40]:
            assert share == pytest.approx(np.count_nonzero(kl > threshold) / len(kl), abs=1e-12)


@pytest.mark.parametrize("num_positions", [1, 2, 3, 16, 512, 2048])
def test_position_bins_cover_every_position_once(num_positions):
    first = num_positions // 2
    edges = series.position_edges(first, num_positions)
    assert edges[0] == first and edges[-1] == num_positions
    assert (np.diff(edges) >= 1).all()


def test_bin_means_average_exactly_the_positions_in_the_bin():
    rows = pa.table({"position": [0, 1, 2, 3, 3], "kl": [1.0, 2.0, 4.0, 8.0, 10.0]})
    means, counts = series.mean_by_bin(rows, "position", np.array([0, 1, 3, 4, 9]))
    assert counts.tolist() == [1, 2, 2, 0]
    assert means[:3].tolist() == [1.0, 3.0, 9.0] and np.isnan(means[3])


def test_a_confidence_of_exactly_one_lies_in_the_last_bin():
    rows = pa.table({"confidence_ref": [0.0, 0.999, 1.0], "kl": [1.0, 2.0, 4.0]})
    means, counts = series.mean_by_bin(rows, "confidence_ref", series.CONFIDENCE_EDGES)
    assert counts[0] == 1 and counts[-1] == 2 and means[-1] == 3.0


def test_scatter_has_every_context_once_with_its_own_means(study):
    run = study.runs[0]
    points = {point.label: (point.x, point.y) for point in series.context_scatter(study, "prefill").points}
    contexts = run.rows["base"]["context"].cast(pa.string()).to_numpy(zero_copy_only=False)
    assert set(points) == set(contexts)
    for name in list(points)[:3]:
        means = [run.rows[arm]["kl"].to_numpy()[contexts == name].mean() for arm in ("base", "int8-embed")]
        assert points[name] == pytest.approx(means)


def test_the_front_keeps_what_nothing_beats():
    points = [(1.0, 5.0), (2.0, 4.0), (2.5, 4.5), (3.0, 1.0), (4.0, 1.0)]
    assert series.pareto_front(points, more_is_better=False) == ((1.0, 5.0), (2.0, 4.0), (3.0, 1.0))
    assert series.pareto_front(points, more_is_better=True) == ((4.0, 1.0),)

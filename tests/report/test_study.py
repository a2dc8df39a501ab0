"""Several runs in one report: one axis has one protocol, equal arms appear once, a later run replaces the earlier."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from exl3eval.errors import UsageError
from exl3eval.records import digest_value
from exl3eval.report import series
from exl3eval.report.document import NOT_MEASURED, Figure, Notice, Prose, Table
from exl3eval.report.sections import build_document
from exl3eval.report.study import Run, arrange, load_study

RUN = Path(__file__).parents[1] / "data" / "report_run"
MARGIN = 4e-4


@pytest.fixture(scope="module")
def stored():
    return load_study([RUN]).runs[0]


def altered(run, change, **fields):
    """A run whose receipt was changed and digested again; its positions stay."""
    receipt = copy.deepcopy(dict(run.receipt))
    change(receipt)
    for field in ("identity", "results"):
        receipt[f"{field}_digest"] = digest_value(receipt[field])
    return replace(run, receipt=receipt, **fields)


def renamed(run, name):
    """The same figures under another variant's name."""

    def change(receipt):
        old = receipt["variant"]
        receipt["variant"] = receipt["results"]["comparison"]["variant"] = name
        for place in (receipt["identity"]["arms"], receipt["results"]["arms"], receipt["results"]["embedding_bytes"]):
            place[name] = place.pop(old)

    rows = {name if arm == run.variant else arm: part for arm, part in run.rows.items()}
    return altered(run, change, rows=rows)


def blocks(study, kind):
    return [b for section in build_document(study).sections for b in section.blocks if isinstance(b, kind)]


def table(study, table_id):
    return next(block for block in blocks(study, Table) if block.id == table_id)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("suite", "digest"), "0" * 64),
        (("suite", "split"), "qualification"),
        (("tokens", "digest"), "0" * 64),
        (("reference_precision",), "bfloat16"),
        (("arms", "reference", "checkpoint_sha256"), "0" * 64),
    ],
)
def test_mixing_protocols_is_an_error_that_names_the_field(stored, path, value):
    def change(receipt):
        place = receipt["identity"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    with pytest.raises(UsageError, match=path[-1]):
        arrange([stored, renamed(altered(stored, change), "other")])


def test_one_run_twice_is_refused(stored):
    with pytest.raises(UsageError, match="given twice"):
        arrange([stored, stored])


def test_equal_baselines_and_floors_appear_once(stored):
    study = arrange([stored, renamed(stored, "other")])
    assert [arm.label for arm in study.arms("prefill")] == ["base", "int8-embed", "other", "reference-bfloat16"]
    assert [row[0].text for row in table(study, "divergence").rows] == [
        "`base`",
        "`int8-embed`",
        "`other`",
        "`reference-bfloat16` (floor)",
    ]
    assert len(table(study, "paired").rows) == 2


def test_baselines_of_one_name_with_other_figures_are_told_apart(stored):
    def change(receipt):
        receipt["results"]["arms"]["base"]["kl"]["mean"] *= 1.01

    study = arrange([stored, renamed(altered(stored, change), "other")])
    labels = [arm.label for arm in study.arms("prefill") if arm.name == "base"]
    assert len(set(labels)) == 2
    assert all(label.startswith("base (") for label in labels)


def test_a_later_answer_to_the_same_question_makes_an_erratum(stored):
    def later(receipt):
        receipt["created"] = "2999-01-01T00:00:00+00:00"
        receipt["identity"]["code"]["exl3eval"] = "9.9"
        receipt["results"]["arms"]["int8-embed"]["kl"]["mean"] *= 2

    new = altered(stored, later)
    study = arrange([stored, new])
    assert study.runs == (new,)
    notice = next(block.text for block in blocks(study, Notice) if "superseded" in block.text)
    assert stored.digest[:12] in notice and new.digest[:12] in notice and "`code.exl3eval`" in notice
    assert len(table(study, "erratum").rows) == 2
    assert len(table(study, "divergence").rows) == 3


def test_without_a_gate_no_margin_is_invented(stored):
    study = arrange([stored])
    row = table(study, "paired").rows[0]
    assert [cell.text for cell in row[3:5]] == ["none", "not judged"]
    assert next(f for f in blocks(study, Figure) if f.id == "forest").plot.margin is None
    assert any(f"Power against a margin: {NOT_MEASURED}" in block.text for block in blocks(study, Prose))


def verdict_of(run):
    delta = run.paired["delta"]
    endpoint = {
        "outcome": "PASS",
        "unit": "nats",
        "margin": {"value": MARGIN, "fraction": 0.0, "absolute": MARGIN, "floors": 0.0},
        "power": {"power": 0.93, "contexts_needed": 17},
        "next_step": "",
        "delta": {
            "variant": run.variant,
            "endpoint": "mean",
            "value": delta["mean"],
            "upper": delta["upper_bound"],
            "why": "",
        },
    }
    return {
        "policy": {"name": "release"},
        "verdict": {"outcome": "PASS", "exploratory": False, "endpoints": [endpoint], "refusals": ["too few contexts"]},
    }


def test_a_verdict_brings_margin_power_and_refusals(stored):
    study = arrange([replace(stored, verdict=verdict_of(stored))])
    assert [cell.text for cell in table(study, "paired").rows[0][3:5]] == ["0.000400", "PASS"]
    assert [cell.text for cell in table(study, "gate").rows[0][5:]] == ["93.0 %", "17", "PASS"]
    assert next(f for f in blocks(study, Figure) if f.id == "forest").plot.margin == MARGIN
    assert any("too few contexts" in block.text for block in blocks(study, Notice))


def test_size_and_speed_appear_when_a_receipt_holds_them(stored):
    plain = arrange([altered(stored, lambda receipt: receipt["results"].pop("sizes"))])
    assert series.size_fidelity(plain, "prefill") is None
    assert series.size_fidelity(arrange([stored]), "prefill") is not None
    assert any("tokens per second" in b.text and NOT_MEASURED in b.text for b in blocks(plain, Prose))

    def change(receipt):
        sizes = {"checkpoint_bytes": 3 << 30, "body_bpw": 5.03, "head_bpw": 6.0}
        receipt["results"]["sizes"] = {"base": sizes, "int8-embed": {**sizes, "checkpoint_bytes": 2 << 30}}
        receipt["results"]["speed"] = {"base": {"tokens_per_second": 41.5}}

    study = arrange([altered(stored, change)])
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table(study, "cost").rows}
    assert rows["`base`"] == ["3.00 GiB", "5.03", "6.00", "41.5"]
    assert rows["`int8-embed`"] == ["2.00 GiB", "5.03", "6.00", NOT_MEASURED]
    assert [point.x for point in series.size_fidelity(study, "prefill").points] == [3.0, 2.0]
    assert {figure.id for figure in blocks(study, Figure)} >= {"pareto", "speed"}


def test_lanes_get_tables_and_figures_of_their_own(stored):
    def decode(rows, scale):
        def change(receipt):
            receipt["identity"]["lane"] = f"decode[{rows}]"
            receipt["results"]["arms"]["base"]["kl"]["mean"] *= scale
            receipt["identity"]["arms"]["base"]["resolved"]["linear"] = "1-15:gemv,16-:reference"

        return altered(stored, change)

    study = arrange([stored, decode(16, 2.0), decode(1, 1.0)])
    assert study.lanes == ("prefill", "decode[1]", "decode[16]")
    plot = series.kl_by_rows(study)
    base = next(curve for curve in plot.curves if curve.label == "base")
    mean = stored.results["arms"]["base"]["kl"]["mean"]
    assert (base.x, base.y) == ((1.0, 16.0), (mean, 2 * mean))
    assert [mark.value for mark in plot.verticals] == [16.0]
    figures = [figure.id for figure in blocks(study, Figure)]
    assert len(figures) == len(set(figures))
    assert {"tail-1", "tail-2", "tail-3", "decode-rows"} <= set(figures)


def test_a_variant_that_agrees_in_every_bit_is_said_so(stored):
    def change(receipt):
        receipt["results"]["comparison"]["identical"] = True

    document = build_document(arrange([altered(stored, change)]))
    assert "agrees with `base` in every bit" in document.sections[0].blocks[0].text


def test_runs_compare_by_identity_not_by_positions(stored):
    assert stored != Run(folder=stored.folder, receipt=stored.receipt, rows=stored.rows)


def test_lanes_of_one_kind_score_the_same_positions(stored):
    def decode(rows, first):
        def change(receipt):
            receipt["identity"]["lane"] = f"decode[{rows}]"
            receipt["identity"]["tokens"]["first_scored"] = first

        return altered(stored, change)

    with pytest.raises(UsageError, match="scored from position 8"):
        arrange([stored, decode(1, 8), decode(4, 9)])


def test_head_lanes_stand_side_by_side(stored):
    def change(receipt):
        for place in (receipt["identity"]["arms"], receipt["results"]["arms"]):
            place["base@shared-head"] = place["reference-bfloat16"]

    assert not any(section.id == "heads" for section in build_document(arrange([stored])).sections)
    (row,) = table(arrange([altered(stored, change)]), "heads").rows
    own, shared = (stored.results["arms"][name]["kl"]["mean"] for name in ("base", "reference-bfloat16"))
    assert (row[2].value, row[4].value, row[6].value) == (own, shared, own - shared)


def test_the_control_of_a_lane_is_shown_beside_the_floor(stored):
    def change(receipt):
        receipt["identity"]["lane"] = "decode[4]"
        for place in (receipt["identity"]["arms"], receipt["results"]["arms"], receipt["results"]["embedding_bytes"]):
            place["reference-decode-4"] = place["reference-bfloat16"]
        receipt["results"]["floors"]["lane_control"] = {"arm": "reference-decode-4", "kl": 0.0}

    run = altered(stored, change)
    study = arrange([replace(run, rows={**stored.rows, "reference-decode-4": stored.rows["reference-bfloat16"]})])
    assert [arm.role for arm in study.arms("decode[4]")] == ["baseline", "variant", "floor", "control"]
    assert table(study, "divergence").rows[3][0].text == "`reference-decode-4` (lane control)"
    assert any("the reference in the lane" in row[1].text for row in table(study, "floors").rows)

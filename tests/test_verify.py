"""A report rests on verified runs: whatever was altered, the run is refused with exit code 4."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exl3eval.errors import EXIT_INVALID, InvalidRunError, UsageError
from exl3eval.records import digest_file, digest_value, seal, write_json
from exl3eval.report.study import load_study
from exl3eval.verify import first_difference, verify_run

RUN = Path(__file__).parent / "data" / "report_run"


@pytest.fixture
def run(tmp_path):
    for name in ("receipt.json", "positions.parquet", "floors.parquet"):
        shutil.copyfile(RUN / name, tmp_path / name)
    return tmp_path


def edit(run, change, *, redigest=True):
    receipt = json.loads((run / "receipt.json").read_text())
    change(receipt)
    if redigest:
        for field in ("identity", "results"):
            receipt[f"{field}_digest"] = digest_value(receipt[field])
    write_json(run / "receipt.json", seal(receipt))


def edit_positions(run, column, change):
    table = pq.read_table(run / "positions.parquet")
    values = table[column].to_numpy().copy()
    change(values)
    index = table.column_names.index(column)
    table = table.set_column(index, table.schema.field(column), pa.array(values))
    pq.write_table(table, run / "positions.parquet")


def test_an_untouched_run_is_believed(run):
    receipt, arms = verify_run(run)
    assert set(arms) == {"reference-bfloat16", "base", "int8-embed"}
    assert receipt["variant"] == "int8-embed"


@pytest.mark.parametrize("name", ["positions.parquet", "floors.parquet"])
def test_one_flipped_byte_of_a_table_is_seen(run, name):
    path = run / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidRunError, match=rf"{name}: sha256 was altered") as caught:
        verify_run(run)
    assert caught.value.exit_code == EXIT_INVALID


def test_one_flipped_bit_anywhere_in_a_receipt_is_seen(run):
    path = run / "receipt.json"
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(InvalidRunError):
            verify_run(run)


@pytest.mark.parametrize("field", ["created", "warnings", "checkpoint_notes"])
def test_what_no_number_depends_on_is_sealed_too(run, field):
    receipt = json.loads((run / "receipt.json").read_text())
    receipt[field] = "2026"
    write_json(run / "receipt.json", receipt)
    with pytest.raises(InvalidRunError, match=r"receipt\.json was altered"):
        verify_run(run)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("results", "arms", "int8-embed", "kl", "mean"), 1e-3),
        (("results", "arms", "int8-embed", "top1_flips"), 0),
        (("results", "arms", "base", "strata", "code", "mean"), 1e-3),
        (("results", "comparison", "paired", "sign_flip_p"), 0.9),
        (("results", "comparison", "paired", "delta", "interval"), {"low": -1.0, "high": 1.0}),
        (("results", "comparison", "identical"), True),
        (("results", "floors", "reference_rounding", "kl"), 0.5),
        (("results", "floors", "self_noise", "reference"), 0.5),
        (("resampling", "seed"), 7),
        (("identity", "tokens", "num_contexts"), 25),
    ],
)
def test_a_number_that_the_positions_do_not_give_is_refused_even_with_new_digests(run, where, value):
    def change(receipt):
        *parents, last = where
        for key in parents:
            receipt = receipt[key]
        assert receipt[last] != value
        receipt[last] = value

    edit(run, change)
    with pytest.raises(InvalidRunError):
        verify_run(run)


@pytest.mark.parametrize("field", ["identity", "results"])
def test_an_edit_without_new_digests_names_the_digest(run, field):
    def change(receipt):
        receipt[field]["added"] = 1

    edit(run, change, redigest=False)
    with pytest.raises(InvalidRunError, match=f"`{field}` was altered"):
        verify_run(run)


def test_positions_changed_together_with_their_digest_do_not_fit_the_results(run):
    def double(values):
        values[:40] *= 2

    edit_positions(run, "kl", double)
    edit(run, lambda receipt: receipt.update(positions_sha256=digest_file(run / "positions.parquet")))
    with pytest.raises(InvalidRunError, match=r"not what its positions give: results\."):
        verify_run(run)


def test_a_field_that_is_missing_is_named(run):
    edit(run, lambda receipt: receipt["results"].pop("floors"))
    with pytest.raises(InvalidRunError, match="floors"):
        verify_run(run)


def test_a_folder_without_a_run_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"holds no receipt\.json"):
        verify_run(tmp_path)


def test_a_verdict_on_other_results_is_refused(run):
    record = {"schema": "exl3eval/verdict/1", "runs": [{"results_digest": "0" * 64}], "verdict": {"endpoints": []}}
    write_json(run / "verdict.json", record)
    with pytest.raises(InvalidRunError, match="judges other results"):
        load_study([run])


def test_differences_are_found_at_any_depth():
    assert first_difference({"a": [1.0, {"b": "x"}]}, {"a": [1.0 + 1e-12, {"b": "x"}]}) is None
    assert first_difference({"a": [1.0]}, {"a": [1.0 + 1e-6]}) == "results.a[0] is 1.0, expected 1.000001"
    assert first_difference({"a": 1}, {"a": True}) == "results.a is 1, expected True"
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == "results has 'b' on one side only"
    assert first_difference([1], [1, 2]) == "results has 1 entries, expected 2"

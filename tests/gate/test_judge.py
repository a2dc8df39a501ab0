"""Records, the ledger and declarations: margins are fixed before the run, and reuse is counted."""

import sqlite3
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from synthetic_runs import build_arms, write_run

from exl3eval.errors import UsageError
from exl3eval.gate.declaration import commit_time
from exl3eval.gate.judge import GateRequest, judge
from exl3eval.gate.ledger import count_suite_uses, list_verdicts, open_ledger, register_policy
from exl3eval.gate.policy import MarginRule, Policy, load_policy
from exl3eval.gate.trend import collect_series, find_change_points, sparkline, trend_svg
from exl3eval.records import canonical_json

MINE = Policy(name="mine", doc="", margins={"mean": MarginRule(fraction=0.02, absolute=1e-9)}, num_resamples=999)
RUN_TIME = datetime(2026, 1, 1, tzinfo=UTC)
BEFORE, AFTER = RUN_TIME - timedelta(days=1), RUN_TIME + timedelta(days=1)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with open_ledger(path) as connection:
        register_policy(connection, MINE, now=BEFORE)
    return path


def request(ledger: Path, *folders: Path, policy: Policy = MINE, **options) -> GateRequest:
    return GateRequest(folders=folders, policy=policy, policy_file=None, ledger=ledger, **options)


def test_a_record_is_strict_path_free_and_repeatable(tmp_path, ledger):
    folder = write_run(tmp_path / "run", build_arms())
    records = [judge(request(ledger, folder), now=AFTER) for _ in range(2)]
    assert canonical_json(records[0]) == canonical_json(records[1])
    assert str(tmp_path) not in canonical_json(records[0])
    assert records[0]["schema"] == "exl3eval/verdict/1"
    assert records[0]["policy"]["digest"] == MINE.digest
    assert records[0]["policy"]["declared"] == {"witness": "ledger", "since": BEFORE.isoformat()}
    assert records[0]["verdict"]["outcome"] == "PASS"
    assert records[0]["verdict"]["exit_code"] == 0
    power = records[0]["verdict"]["endpoints"][0]["power"]
    assert {"num_contexts", "num_clusters", "deff", "sigma", "mde", "power"} <= set(power)


def test_a_policy_first_seen_after_the_run_decides_nothing(tmp_path):
    folder = write_run(tmp_path / "run", build_arms())
    record = judge(request(tmp_path / "new.sqlite", folder), now=AFTER)
    assert record["verdict"]["outcome"] == "INCONCLUSIVE"
    assert "was first seen at" in record["verdict"]["refusals"][0]
    assert record["policy"]["declared"]["witness"] == "none"
    looked = judge(request(tmp_path / "other.sqlite", folder, exploratory=True), now=AFTER)
    assert looked["verdict"]["outcome"] == "PASS"
    assert "no gate" in looked["notes"][-1]


def test_a_policy_edited_after_it_judged_a_run_is_found(tmp_path, ledger):
    folder = write_run(tmp_path / "run", build_arms(changes={"variant": 0.2}))
    assert judge(request(ledger, folder), now=AFTER)["verdict"]["outcome"] == "FAIL"
    softer = replace(MINE, margins={"mean": MarginRule(fraction=0.5, absolute=1e-9)})
    record = judge(request(ledger, folder, policy=softer), now=AFTER)
    assert record["verdict"]["outcome"] == "INVALID"
    assert "was edited after verdict 1" in record["verdict"]["refusals"][0]
    assert record["verdict"]["exit_code"] == 4
    # Another name does not help: it is younger than the run.
    renamed = judge(request(ledger, folder, policy=replace(softer, name="soft")), now=AFTER)
    assert renamed["verdict"]["outcome"] == "INCONCLUSIVE"


def test_the_package_is_a_witness_for_its_own_policies(tmp_path):
    policy = replace(load_policy("quick"))
    folder = write_run(tmp_path / "run", build_arms())
    record = judge(request(tmp_path / "l.sqlite", folder, policy=policy), now=AFTER)
    assert record["policy"]["declared"] == {"witness": "package", "since": None}
    assert record["verdict"]["outcome"] == "PASS"


def test_a_commit_is_a_witness_until_the_file_is_edited(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("a = 1\n")
    assert commit_time(file) is None
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "policy")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert abs(commit_time(file) - datetime.now(UTC)) < timedelta(minutes=5)
    file.write_text("a = 2\n")
    assert commit_time(file) is None


def test_an_invalid_run_is_recorded_not_raised(tmp_path, ledger):
    folder = write_run(tmp_path / "run", build_arms())
    (folder / "positions.parquet").write_bytes(b"PAR1")
    record = judge(request(ledger, folder), now=AFTER)
    assert record["verdict"]["outcome"] == "INVALID"
    assert record["verdict"]["next_steps"]
    with open_ledger(ledger) as connection:
        assert [entry.outcome for entry in list_verdicts(connection)] == ["INVALID"]
        assert count_suite_uses(connection) == []


def test_one_variant_twice_is_usage(tmp_path, ledger):
    folder = write_run(tmp_path / "run", build_arms())
    with pytest.raises(UsageError, match="2 of the runs measure variant `variant`"):
        judge(request(ledger, folder, folder), now=AFTER)


def test_a_silent_no_op_is_noted(tmp_path, ledger):
    record = judge(request(ledger, write_run(tmp_path / "run", build_arms(noise=0.0))), now=AFTER)
    assert record["verdict"]["outcome"] == "PASS"
    assert any("changes embedding and agrees with `base` in every bit" in note for note in record["notes"])


def test_history_filters_and_counts_decisions(tmp_path, ledger):
    good = write_run(tmp_path / "good", build_arms(changes={"a": 0.0}), "a")
    bad = write_run(tmp_path / "bad", build_arms(changes={"b": 0.5}), "b")
    for folder, options in ((good, {}), (bad, {}), (good, {"exploratory": True})):
        judge(request(ledger, folder, **options), now=AFTER)
    with open_ledger(ledger) as connection:
        assert len(list_verdicts(connection)) == 3
        assert [entry.outcome for entry in list_verdicts(connection, variant="b")] == ["FAIL"]
        assert len(list_verdicts(connection, suite="555")) == 3
        assert list_verdicts(connection, suite="6") == []
        assert list_verdicts(connection, outcome="FAIL")[0].variants == ("b",)
        (use,) = count_suite_uses(connection)
    assert (use.decisions, use.exploratory, use.split) == (2, 1, "analysis")


def test_the_ledger_only_grows(tmp_path, ledger):
    judge(request(ledger, write_run(tmp_path / "run", build_arms())), now=AFTER)
    connection = sqlite3.connect(ledger)
    for statement in ("DELETE FROM verdicts", "UPDATE policies SET first_seen = ''", "DELETE FROM judged"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()
    (tmp_path / "text.sqlite").write_text("not a database, " * 100)
    with pytest.raises(UsageError, match=r"the ledger text\.sqlite refused"), open_ledger(tmp_path / "text.sqlite"):
        pass


def test_a_change_point_is_where_the_level_moved():
    errors = [1.0] * 12
    assert find_change_points([0.1, -0.2, 0.0, 0.3, -0.1, 0.1, 8.0, 8.2, 7.9, 8.1, 8.0, 8.1], errors) == (6,)
    assert find_change_points([0.3, -0.4, 0.1, 0.9, -0.8, 0.2, 0.5, -0.6, 0.4, 0.0, 0.2, -0.1], errors) == ()
    assert find_change_points([0.0] * 6, [0.0] * 6) == ()
    assert find_change_points([0.0] * 3 + [1e-6] * 3, [0.0] * 6) == (3,)
    assert find_change_points([1.0], [1.0]) == ()


def test_trends_are_drawn_per_variant(tmp_path, ledger):
    for index, change in enumerate((0.0, 0.001, 0.0, 0.3, 0.301, 0.3)):
        judge(request(ledger, write_run(tmp_path / str(index), build_arms(changes={"a": change}), "a")), now=AFTER)
    with open_ledger(ledger) as connection:
        (series,) = collect_series(list_verdicts(connection))
    assert series.change_points == (3,)
    assert len(sparkline([p.value for p in series.points])) == 6
    picture = trend_svg(series)
    assert picture.count("<circle") == 6
    assert picture.count("stroke-dasharray") == 1
    from xml.etree import ElementTree

    ElementTree.fromstring(picture)

"""Baselines: blessed by people, scoped, content-addressed, and never changed by a check."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime

import numpy as np
import pytest
from synthetic_runs import build_arms, write_run

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.baseline import Blessing, bless, check, read_baseline, run_scope
from exl3eval.gate.evidence import read_run
from exl3eval.gate.policy import MarginRule, Policy
from exl3eval.gate.speed import bless_speed, check_speed, compare_times, read_speed
from exl3eval.gate.verdict import Outcome

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TODAY = date(2026, 1, 2)
POLICY = Policy(name="p", doc="", margins={"mean": MarginRule(fraction=0.02, absolute=1e-9)}, num_resamples=999)
GOOD = Blessing(who="A. Name", why="a test")


@pytest.fixture
def runs(tmp_path):
    """A run, a later one whose variant is worse, and one that cures it."""
    made = {}
    for name, change in (("now", 0.001), ("worse", 0.2), ("cured", 0.0)):
        arms = build_arms(changes={"variant": change}, noise=0.002)
        made[name] = tmp_path / name, read_run(write_run(tmp_path / name, arms))
    return made


def add(store, runs, name="now", arm="variant", blessing=GOOD, now=NOW):
    return bless(store, *runs[name], arm, blessing, now=now)


def test_a_run_is_held_against_the_blessed_rows(tmp_path, runs):
    store = tmp_path / "store"
    entry = add(store, runs)
    files = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    same = check(store, runs["now"][1], "variant", POLICY, today=TODAY)
    assert (same.exit_code, same.verdict.outcome, same.baseline) == (0, Outcome.PASS, entry.digest)
    assert same.verdict.endpoints[0].delta.value == 0.0
    assert check(store, runs["worse"][1], "variant", POLICY, today=TODAY).exit_code == 1
    assert {file: file.read_bytes() for file in store.rglob("*") if file.is_file()} == files


def test_a_blessing_needs_a_name_and_a_reason():
    for who, why in (("", "x"), ("x", " ")):
        with pytest.raises(UsageError, match="needs a name and a reason"):
            Blessing(who=who, why=why)
    with pytest.raises(UsageError, match="--status is 'fine'"):
        Blessing(who="a", why="b", status="fine")
    with pytest.raises(UsageError, match="with --until None"):
        Blessing(who="a", why="b", status="waived")
    with pytest.raises(UsageError, match="with --until 2026-01-01"):
        Blessing(who="a", why="b", until=date(2026, 1, 1))


def test_a_waiver_runs_out(tmp_path, runs):
    store = tmp_path / "store"
    add(store, runs, blessing=replace(GOOD, status="waived", until=TODAY))
    waived = check(store, runs["worse"][1], "variant", POLICY, today=TODAY)
    assert (waived.exit_code, waived.verdict.outcome) == (0, Outcome.FAIL)
    assert "waived until 2026-01-02" in waived.message
    late = check(store, runs["worse"][1], "variant", POLICY, today=date(2026, 1, 3))
    assert late.exit_code == 1
    assert "ran out" in late.message


def test_known_broken_must_stay_broken(tmp_path, runs):
    store = tmp_path / "store"
    add(store, runs, "worse", blessing=replace(GOOD, status="known-broken"))
    assert check(store, runs["worse"][1], "variant", POLICY, today=TODAY).exit_code == 0
    cured = check(store, runs["cured"][1], "variant", POLICY, today=TODAY)
    assert cured.exit_code == 1
    assert "no longer FAILs" in cured.message


def test_the_newest_entry_of_a_scope_counts(tmp_path, runs):
    store = tmp_path / "store"
    add(store, runs, "now")
    newer = add(store, runs, "worse", now=NOW.replace(day=2))
    found = check(store, runs["worse"][1], "variant", POLICY, today=TODAY)
    assert (found.baseline, found.exit_code) == (newer.digest, 0)


def test_another_scope_has_no_baseline_and_says_what_differs(tmp_path, runs):
    store = tmp_path / "store"
    with pytest.raises(UsageError, match="no baseline of 0 fits this run"):
        check(store, runs["now"][1], "variant", POLICY, today=TODAY)
    add(store, runs)
    arms = build_arms(changes={"variant": 0.001}, noise=0.002)
    other = read_run(write_run(tmp_path / "decode", arms, lane="decode"))
    with pytest.raises(UsageError, match="nearest differs in lane: 'prefill' against 'decode'"):
        check(store, other, "variant", POLICY, today=TODAY)
    with pytest.raises(UsageError, match="has no arm `x`"):
        check(store, other, "x", POLICY, today=TODAY)
    gpu = {"type": "cuda", "name": "GPU", "compute_capability": "9.0", "driver": "1", "cuda": "13"}
    scope = run_scope(read_run(write_run(tmp_path / "gpu", arms, device=gpu)), "variant")
    assert scope["device"] == {"type": "cuda", "name": "GPU", "compute_capability": "9.0"}
    assert scope["provider"] == ["reference"]


def test_an_altered_entry_is_invalid(tmp_path, runs):
    store = tmp_path / "store"
    entry = add(store, runs)
    record = json.loads((entry.folder / "baseline.json").read_text())
    (entry.folder / "baseline.json").write_text(json.dumps(record | {"who": "B. Other"}))
    with pytest.raises(InvalidRunError, match="was altered: record"):
        read_baseline(entry.folder)
    (entry.folder / "baseline.json").write_text(json.dumps(record))
    read_baseline(entry.folder)
    (entry.folder / "rows.parquet").write_bytes(b"x")
    with pytest.raises(InvalidRunError, match="was altered: rows"):
        check(store, runs["now"][1], "variant", POLICY, today=TODAY)


def test_an_entry_is_never_replaced(tmp_path, runs):
    add(tmp_path / "store", runs)
    with pytest.raises(UsageError, match="already exists and is immutable"):
        add(tmp_path / "store", runs)


def speed(tmp_path, name="times.json", driver="1", scale=1.0, **changed):
    times = (scale * (1e-3 + 1e-5 * np.random.default_rng(0).random(20))).tolist()
    record = {"schema": "exl3eval/speed/1", "platform": {"gpu": "x", "driver": driver}, "cells": {"decode": times}}
    (tmp_path / name).write_text(json.dumps(record | changed))
    return tmp_path / name


def test_speed_is_compared_on_one_platform_only(tmp_path):
    store = tmp_path / "store"
    bless_speed(store, read_speed(speed(tmp_path)), who="a", why="b", now=NOW)
    outcomes = {
        scale: check_speed(store, read_speed(speed(tmp_path, scale=scale)))[0].outcome
        for scale in (0.9, 1.0, 1.05, 1.2)
    }
    assert outcomes == {
        0.9: Outcome.PASS,
        1.0: Outcome.PASS,
        1.05: Outcome.INCONCLUSIVE,
        1.2: Outcome.FAIL,
    }
    with pytest.raises(UsageError, match="nearest differs in driver: '1' against '2'"):
        check_speed(store, read_speed(speed(tmp_path, driver="2")))
    with pytest.raises(UsageError, match="lacks cell 'decode'"):
        check_speed(store, read_speed(speed(tmp_path, cells={"other": [1.0] * 5})))
    with pytest.raises(UsageError, match="needs a name and a reason"):
        bless_speed(store, read_speed(speed(tmp_path)), who="", why="b", now=NOW)
    (file,) = store.glob("*/speed.json")
    file.write_text(file.read_text().replace('"who": "a"', '"who": "c"'))
    with pytest.raises(InvalidRunError, match="was altered"):
        check_speed(store, read_speed(speed(tmp_path)))


def test_few_or_bad_times_are_refused(tmp_path):
    for cells in ({"a": [1.0] * 4}, {"a": [1.0, 1.0, 1.0, 1.0, 0.0]}, {"a": [True] * 5}, {}):
        with pytest.raises(UsageError):
            read_speed(speed(tmp_path, cells=cells))
    with pytest.raises(UsageError, match="not a speed record"):
        read_speed(speed(tmp_path, schema="x"))
    few = compare_times("a", (1.0, 1.1, 0.9, 1.0, 1.0), (1.0, 1.1, 0.9, 1.05, 1.02))
    assert few.outcome is Outcome.INCONCLUSIVE

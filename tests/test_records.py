"""Strict JSON, atomic and exclusive writes, digests that know no paths."""

import json
import os
from pathlib import Path

import pytest

from exl3eval.errors import UsageError
from exl3eval.records import (
    canonical_json,
    digest_file,
    digest_parts,
    digest_value,
    read_json,
    write_atomic,
    write_json,
)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1, float("-inf")]}])
def test_non_finite_floats_never_reach_a_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": Infinity}', "Infinity is not JSON"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('{"a": 1', "not strict JSON"),
        ("", "not strict JSON"),
    ],
)
def test_reading_refuses_what_is_not_strict(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"receipt.json.*{reason}"):
        read_json(path)


def test_reading_names_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json does not exist"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8"):
        read_json(tmp_path / "bytes.json")


def test_exclusive_writes_do_not_replace(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    write_atomic(path, "first", exclusive=True)
    with pytest.raises(UsageError, match="immutable"):
        write_atomic(path, "second", exclusive=True)
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["receipt.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_digests_ignore_order_and_place(tmp_path: Path) -> None:
    assert digest_value({"a": 1, "b": [2]}) == digest_value({"b": [2], "a": 1})
    assert digest_value({"a": 1}) != digest_value({"a": 1.5})
    assert digest_parts([("a", "1"), ("b", "2")]) == digest_parts([("b", "2"), ("a", "1")])
    for folder in ("one", "two"):
        write_json(tmp_path / folder / "x.json", {"k": 1})
    assert digest_file(tmp_path / "one" / "x.json") == digest_file(tmp_path / "two" / "x.json")


def test_json_survives_a_round_trip(tmp_path: Path) -> None:
    value = {"ä": [1, 2.5, None, True, "x"], "nested": {"z": 1e-300}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert json.loads((tmp_path / "x.json").read_text()) == value

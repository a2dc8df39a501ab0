"""The shingle scan: every offset, normalised text, a compact index that reads back strictly."""

from __future__ import annotations

import lzma
import random
from hashlib import blake2b

import numpy as np
import pytest

from exl3eval.errors import SuiteError
from exl3eval.suite.load import INDEX_NAME, shipped_directory
from exl3eval.suite.shingles import (
    CalibrationIndex,
    build_index,
    count_shared,
    pack_hashes,
    read_calibration,
    read_index,
    shingle_hashes,
    shingle_tokens,
    unpack_hashes,
    write_index,
)

# In nearly every code corpus, calibration data included.
MIT_PARAGRAPH = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software
and associated documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies"""


def words(count: int, *, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(count)]


def test_hashes_are_those_of_the_definition() -> None:
    tokens = words(40, seed=1)
    expected = {
        int.from_bytes(blake2b(" ".join(tokens[at : at + 12]).encode(), digest_size=5).digest(), "little")
        for at in range(29)
    }
    assert shingle_hashes(" ".join(tokens)).tolist() == sorted(expected)
    assert shingle_hashes(" ".join(tokens[:11])).size == 0


def test_tokens_are_normalised_and_han_counts_singly() -> None:
    assert shingle_tokens("The ﬁrst STRASSE, straße!") == ["the", "first", "strasse", "strasse"]
    assert shingle_tokens("漢字とkana 12") == ["漢", "字", "と", "kana", "12"]


@pytest.mark.parametrize("offset", [0, 1, 5, 11, 12, 13, 250])
def test_an_excerpt_is_caught_at_every_offset(offset: int) -> None:
    calibration = words(500, seed=2)
    index = build_index([" ".join(calibration)])
    clean = words(300, seed=3)
    assert index.count_hits(shingle_hashes(" ".join(clean))) == 0
    excerpt = [word.upper() for word in calibration[offset : offset + 12]]
    dirty = " ".join(clean[:offset] + excerpt + clean[offset:])
    assert index.count_hits(shingle_hashes(dirty)) == 1
    assert index.count_hits(shingle_hashes(dirty.replace(excerpt[0], "other"))) == 0


def test_the_shipped_index_catches_calibration_text() -> None:
    index = read_index(shipped_directory() / INDEX_NAME)
    assert index.hashes.size > 800_000
    assert index.false_positive < 1e-6
    hashes = shingle_hashes(MIT_PARAGRAPH)
    assert index.count_hits(hashes) == hashes.size > 30
    assert index.count_hits(shingle_hashes(" ".join(words(2000, seed=4)))) == 0


def test_the_index_round_trips_in_a_compact_file(tmp_path) -> None:
    draw = np.random.default_rng(5)
    hashes = np.unique(draw.integers(0, 2**40, size=50_000, dtype=np.uint64))
    write_index(tmp_path / "index.xz", CalibrationIndex(hashes=hashes))
    assert np.array_equal(read_index(tmp_path / "index.xz").hashes, hashes)
    assert (tmp_path / "index.xz").stat().st_size < 4 * hashes.size


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not xz",
        lzma.compress(b"1234567"),
        lzma.compress(b""),
        pack_hashes(np.array([1, 2**41], dtype=np.uint64)),
        pack_hashes(np.array([5, 5], dtype=np.uint64)),
    ],
    ids=["empty", "foreign", "ragged", "no shingle", "too wide", "repeated"],
)
def test_a_damaged_index_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "index.xz").write_bytes(content)
    with pytest.raises(SuiteError, match=r"index\.xz"):
        read_index(tmp_path / "index.xz")


def test_counting_shared_shingles_agrees_with_sets() -> None:
    draw = np.random.default_rng(6)
    first, second = (np.unique(draw.integers(0, 3000, size=1000, dtype=np.uint64)) for _ in range(2))
    assert count_shared(first, second) == len(set(first.tolist()) & set(second.tolist())) > 0
    assert count_shared(first, first[:0]) == count_shared(first[:0], first) == 0
    assert np.array_equal(unpack_hashes(pack_hashes(first)), first)


def test_calibration_texts_must_exist_and_be_readable(tmp_path) -> None:
    with pytest.raises(SuiteError, match=r"no \*\.xz"):
        read_calibration(tmp_path)
    (tmp_path / "a.xz").write_bytes(lzma.compress("ein Text".encode("utf-16")))
    with pytest.raises(SuiteError, match=r"a\.xz is not xz-compressed UTF-8"):
        read_calibration(tmp_path)
    with pytest.raises(SuiteError, match="no 12-word shingle"):
        build_index(["too short"])

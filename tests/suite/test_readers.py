"""Readers: what is kept of a page, a book, a source file, a question list and a database."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest

from exl3eval.errors import SuiteError
from exl3eval.suite.context import content_chars
from exl3eval.suite.generate import log_lines, tool_dialogue
from exl3eval.suite.markup import dialogue, markdown_text, page_text, rst_text
from exl3eval.suite.readers import READERS, Document, clean_text


def read(reader: str, path: Path, content: str | bytes) -> list[Document]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(READERS[reader](path))


def test_licence_comments_leave_source_code_and_others_stay(tmp_path: Path) -> None:
    code = (
        "#!/usr/bin/env python\n# Copyright 2020 Someone.\n# Licensed under X.\n\nimport os\n\n# a real remark\nx = 1\n"
    )
    (document,) = read("code", tmp_path / "a.py", code)
    assert "Copyright" not in document.text and "# a real remark\nx = 1" in document.text
    c_code = "/* Copyright 2013.\n * MIT license. */\n#include <stdio.h>\n/* Adds. */\nint f(void);\n// (c) Someone\n"
    (document,) = read("code", tmp_path / "a.c", c_code)
    assert document.text == "#include <stdio.h>\n/* Adds. */\nint f(void);\n"


def test_pages_give_running_text_and_their_language() -> None:
    language, text = page_text(
        '<html lang="de"><head><title>T</title><style>p{}</style></head><body><nav>Menü</nav>'
        '<div class="navheader">weg</div><h1>Titel<a class="headerlink">¶</a></h1><p>Ein\n  Satz &amp; mehr.</p>'
        '<ul><li>eins</li><li><img alt="x"></li></ul><pre>a\n  b</pre><p><img src="../math/1.png" alt="x^2"></p>'
        "<script>f()</script></body></html>"
    )
    assert language == "de"
    assert clean_text(text) == "Titel\n\nEin Satz & mehr.\n\n- eins\n\na\n  b\n\n$x^2$\n"


def test_books_lose_the_distributors_notes(tmp_path: Path) -> None:
    text = "Header\n\n*** START OF THIS ***\n\nOnce.\n\nSee www.gutenberg.net\n\nTwice.\n\n*** END OF THIS ***\nX\n"
    (document,) = read("book", tmp_path / "a.txt", text)
    assert document.text == "Once.\n\nTwice.\n"


def test_r_character_vectors_are_read(tmp_path: Path) -> None:
    def chunk(*strings: str) -> bytes:
        data = b"X\n" + struct.pack(">III", 3, 262657, 197888) + struct.pack(">I", 5) + b"UTF-8"
        data += struct.pack(">II", 16, len(strings))
        for string in strings:
            data += struct.pack(">Ii", 0x40009, len(string.encode())) + string.encode()
        return struct.pack(">I", len(data)) + zlib.compress(data)

    documents = read("rdata", tmp_path / "a.rdb", chunk("EMMA", "", "Émile went.") + chunk("PERSUASION", "Later."))
    assert [(document.name, document.text) for document in documents] == [
        ("emma", "EMMA\n\nÉmile went.\n"),
        ("persuasion", "PERSUASION\nLater.\n"),
    ]


def test_metamath_parts_keep_statements_and_drop_proofs(tmp_path: Path) -> None:
    banner = "$(\n#*#*#*#\n  {}\n#*#*#*#\n$)\n"
    text = banner.format("Logic") + "ax $a |- x $.\n" + banner.format("Sets") + "th $p |- y $= ( ax ) ABC $.\n"
    documents = read("metamath", tmp_path / "a.mm", text)
    assert [document.name for document in documents] == ["a.mm: Logic", "a.mm: Sets"]
    assert "th $p |- y $." in documents[1].text and "ABC" not in documents[1].text


def test_question_lists_become_dialogues() -> None:
    text = (
        "=====\nFAQ\n=====\n\n.. only:: html\n\n   .. contents::\n\n"
        "General\n=======\n\nWhy is it so?\n-------------\n\n"
        "Because.\n\n.. _label:\n\nHow do I do that thing?\n-----------------------\n\nLike this::\n\n   f()\n"
    )
    assert dialogue(text) == [
        {"role": "user", "content": "Why is it so?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "How do I do that thing?"},
        {"role": "assistant", "content": "Like this::\n\n   f()"},
    ]
    assert dialogue("No title at all.\n") == []


def test_markup_keeps_prose_and_drops_machinery() -> None:
    assert markdown_text("A\n{!> ../x.py!}\n<!-- no -->B\n") == "A\nB\n"
    assert rst_text(".. _ref:\n\nText\n\n.. comment here\n   more\n\n.. note::\n   Kept.\n") == (
        "\nText\n\n\n.. note::\n   Kept.\n"
    )


def test_json_and_records(tmp_path: Path) -> None:
    record = {"Geography": {"Area": {"total": {"text": "3 sq km"}}, "Note": {"text": "windy"}}}
    (prose,) = read("factbook", tmp_path / "a.json", json.dumps(record))
    assert prose.text == "Geography\n\ntotal: 3 sq km\n\nNote: windy\n"
    entries = read("json-entries", tmp_path / "b.json", json.dumps({"api": {"A": {"x": 1}, "B": 2}, "n": 3}))
    assert [(entry.name, json.loads(entry.text)) for entry in entries] == [
        ("api.A", {"api": {"A": {"x": 1}}}),
        ("api.B", {"api": {"B": 2}}),
    ]


def test_cleaning_is_idempotent() -> None:
    text = "\ufeffa\u00a0b \r\n\r\n\r\n\r\nc\x0c\x00d\t\n\n"
    assert clean_text(text) == "a b\n\ncd\n" == clean_text(clean_text(text))


def test_generated_documents_depend_on_the_seed_alone() -> None:
    for kind in ("system", "access", "jobs"):
        assert log_lines(kind, seed=1) == log_lines(kind, seed=1) != log_lines(kind, seed=2)
    tools, messages = tool_dialogue("travel", seed=1)
    assert (tools, messages) == tool_dialogue("travel", seed=1) != tool_dialogue("travel", seed=2)
    assert {message["role"] for message in messages} == {"user", "assistant", "tool"}
    assert content_chars("", messages) > 10_000
    with pytest.raises(SuiteError, match="unknown log kind"):
        log_lines("poem", seed=1)

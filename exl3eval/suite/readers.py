"""One file of a package to one or more documents: text cleaned of headers, licences and navigation."""

from __future__ import annotations

import gzip
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3eval.suite.generate import log_lines, tool_dialogue
from exl3eval.suite.markup import dialogue, markdown_text, page_text, rst_text

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole source document, before a window is cut from it. Chat documents have messages."""

    name: str
    text: str = ""
    language: str = ""
    """Language the document itself declares, if any."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()


def clean_text(text: str) -> str:
    """Unify line ends, drop control characters and trailing blanks, keep at most one empty line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "").replace("\u00a0", " ")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _read(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode("utf-8")


def _text(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, text=clean_text(_read(path)))


def _book(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, text=_book_text(_read(path)))


def _book_text(text: str) -> str:
    """Return a book's own text: without distributor's notes, which carry other terms than the text."""
    begin = re.search(r"^\*\*\* ?START OF TH.*\*\*\*[ \t]*$", text, re.M)
    end = re.search(r"^\*\*\* ?END OF TH|^End of (?:the )?Project Gutenberg", text, re.M)
    text = text[begin.end() if begin else 0 : end.start() if end else len(text)]
    kept = [part for part in re.split(r"\n\s*\n", text) if not re.search(r"gutenberg|pgdp|^#{3,}", part, re.I)]
    return clean_text("\n\n".join(kept))


def _rdata(path: Path) -> Iterator[Document]:
    """Read each character vector of an R lazy-load database: (big-endian length, zlib stream) chunks.

    A stream is in R's XDR serialization, version 3: a 23-byte header, then for a string vector a type word
    whose low byte is 16, the number of strings, and per string a type word, a length and the bytes.
    """
    raw = path.read_bytes()
    at = 0
    while at < len(raw):
        stream = zlib.decompressobj()
        data = stream.decompress(raw[at + 4 :])
        at = len(raw) - len(stream.unused_data)
        kind, count = struct.unpack_from(">II", data, 23)
        if not data.startswith(b"X\n") or kind & 0xFF != 16:
            continue
        lines, offset = [], 31
        for _ in range(count):
            _, length = struct.unpack_from(">Ii", data, offset)
            lines.append(data[offset + 8 : offset + 8 + max(length, 0)].decode("utf-8"))
            offset += 8 + max(length, 0)
        text = _book_text("\n".join(lines))
        yield Document(name=re.sub(r"\W+", "-", text.strip().partition("\n")[0].lower()), text=text)


def _page(path: Path) -> Iterator[Document]:
    language, text = page_text(path.read_text(encoding="utf-8", errors="strict"))
    yield Document(name=path.name, text=clean_text(text), language=language)


def _markdown(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, text=clean_text(markdown_text(_read(path))))


def _rst(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, text=clean_text(rst_text(_read(path))))


def _faq(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, messages=tuple(dialogue(clean_text(_read(path)))))


_NOTICE = re.compile(r"copyright|licen[cs]e|\(c\)|SPDX|all rights reserved|warrant", re.I)
_COMMENT_BLOCK = re.compile(
    r"(?:^[ \t]*(?://|#(?!\s*(?:include|define|if|pragma|undef|endif)))[^\n]*\n)+|/\*.*?\*/", re.M | re.S
)


def _code(path: Path) -> Iterator[Document]:
    """Read source code without the full-line comments that state a licence."""
    text = _COMMENT_BLOCK.sub(lambda block: "\n" if _NOTICE.search(block[0]) else block[0], clean_text(_read(path)))
    yield Document(name=path.name, text=clean_text(text))


def _metamath(path: Path) -> Iterator[Document]:
    """Read each part of a Metamath database: statements and comments, without the proofs."""
    banner = re.compile(r"^\$\(\n(?:#\*)+#?\n\s*(.+)\n(?:#\*)+#?\n", re.M)
    text = _read(path)
    marks = list(banner.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=False):
        part = re.sub(r"\$=.*?\$\.", "$.", text[mark.start() : end], flags=re.S)
        yield Document(name=f"{path.name}: {mark[1].strip()}", text=clean_text(part))


def _factbook(path: Path) -> Iterator[Document]:
    """Read a country's record as prose: one paragraph per field."""
    lines: list[str] = []

    def walk(label: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            if value.get("text"):
                lines.append(f"{label}: {value['text']}")
            elif depth == 0:
                lines.append(f"\n{label}\n")
            for key, inner in value.items():
                if key != "text":
                    walk(key, inner, depth + 1)

    for section, value in json.loads(_read(path)).items():
        walk(section, value, 0)
    yield Document(name=path.name, text=clean_text(re.sub(r"<[^>]+>", " ", "\n\n".join(lines))))


def _json(path: Path) -> Iterator[Document]:
    yield Document(name=path.name, text=json.dumps(json.loads(_read(path)), indent=2, ensure_ascii=False) + "\n")


def _json_entries(path: Path) -> Iterator[Document]:
    """Read each second-level entry of a large JSON object as a document of its own."""
    for section, entries in json.loads(_read(path)).items():
        if isinstance(entries, dict):
            for key, entry in entries.items():
                text = json.dumps({section: {key: entry}}, indent=2, ensure_ascii=False) + "\n"
                yield Document(name=f"{section}.{key}", text=text)


def _chapters(path: Path) -> Iterator[Document]:
    """Read a JSON list of titled paragraphs as one text."""
    parts = []
    for chapter in json.loads(_read(path)):
        parts += [chapter["chapter"], *chapter["paragraphs"]]
    yield Document(name=path.name, text=clean_text("\n\n".join(parts)))


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "text": _text,
    "book": _book,
    "rdata": _rdata,
    "html": _page,
    "markdown": _markdown,
    "rst": _rst,
    "faq": _faq,
    "code": _code,
    "metamath": _metamath,
    "factbook": _factbook,
    "json": _json,
    "json-entries": _json_entries,
    "chapters": _chapters,
}


def _logs(kind: str, seed: int) -> Document:
    return Document(name=kind, text=log_lines(kind, seed=seed))


def _tools(topic: str, seed: int) -> Document:
    tools, messages = tool_dialogue(topic, seed=seed)
    return Document(name=topic, messages=tuple(messages), tools=tuple(tools))


GENERATORS: dict[str, Callable[[str, int], Document]] = {"logs": _logs, "tool-dialogue": _tools}

"""Turn the bytes of a package's files into plain text, one reader per file format."""

from __future__ import annotations

import html.parser
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any


class _Text(html.parser.HTMLParser):
    """Visible text of a page; block elements break lines."""

    SKIPPED = frozenset({"script", "style", "head", "nav", "footer"})
    BLOCKS = frozenset(
        [
            "p",
            "div",
            "li",
            "tr",
            "pre",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "dt",
            "dd",
            "br",
            "table",
            "ul",
            "ol",
            "section",
            "blockquote",
        ]
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.depth = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in self.SKIPPED
        self.verbatim += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.SKIPPED and self.depth > 0
        self.verbatim -= tag == "pre" and self.verbatim > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _html(raw: bytes) -> str:
    parser = _Text()
    parser.feed(_text(raw))
    return "".join(parser.parts)


def _man(raw: bytes) -> str:
    lines = [line for line in _text(raw).split("\n") if not line.startswith(('.\\"', "'\\\"", ".\\}"))]
    text = "\n".join(
        re.sub(r"^[.'](?:[A-Z]{1,2}|ft|sp|in|ad|ta|nf|fi|ie|el|if|de|ds|hy|nh|so)\b ?", "", x) for x in lines
    )
    text = re.sub(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\[&|/,^]|\\s[-+]?\d", "", text)
    text = re.sub(r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]", "'", text)
    return re.sub(r"\\\((?:lq|rq|dq)|\\\[(?:lq|rq|dq)\]", '"', text).replace("\\-", "-").replace("\\e", "\\")


def _mo(raw: bytes) -> str:
    order = "<" if raw[:4] == b"\xde\x12\x04\x95" else ">"
    _, _, count, _, table = struct.unpack(order + "5I", raw[:20])
    spans = struct.iter_unpack(order + "2I", raw[table : table + 8 * count])
    strings = [raw[start : start + size].split(b"\0")[0].decode("utf-8", "replace") for size, start in spans]
    return "\n".join(s for s in strings[1:] if len(s) > 10)


def _ftl(raw: bytes) -> str:
    values = re.findall(r"^(?:[\w.-]+|    \.\w+) =\s*((?:.|\n    (?! *[.\[*]))+)", _text(raw), re.M)
    return "\n".join(re.sub(r"\s+", " ", value) for value in values if len(value) > 10)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _json_strings(raw: bytes) -> str:
    text = "\n".join(string for string in _strings(json.loads(raw)) if len(string) > 12)
    return re.sub(r"<[^>\n]{1,80}>", "", text)


def _json(raw: bytes) -> str:
    return json.dumps(json.loads(raw), ensure_ascii=False, indent=2)


def _verses(raw: bytes) -> str:
    """Poems and chapters stored as JSON with `paragraphs`, `content` or `para` lists."""
    rows = json.loads(raw)
    fields = ("title", "chapter", "author", "paragraphs", "content", "para")
    return "\n\n".join(
        "\n".join(_strings([row[f] for f in fields if f in row])) for row in rows if isinstance(row, dict)
    )


def _wordnet(raw: bytes) -> str:
    lines = (line.partition(" | ") for line in _text(raw).split("\n") if not line.startswith("  "))
    words = (
        (re.findall(r"(\S+) [0-9a-f] (?=\S+ [0-9a-f] |\d{3} )", head + " "), gloss.strip()) for head, _, gloss in lines
    )
    return "\n".join(f"{', '.join(names).replace('_', ' ')}: {gloss}" for names, gloss in words if gloss)


def _r_strings(raw: bytes) -> str:
    """Strings of an R lazy-load database: length-prefixed zlib blocks of serialized CHARSXP records."""
    lines: list[str] = []
    at = 0
    while at + 4 < len(raw):
        stream = zlib.decompressobj()
        block = stream.decompress(raw[at + 4 :])
        at = len(raw) - len(stream.unused_data)
        for match in re.finditer(rb"\x00[\x04\x08\x00][\x00\x01]\x09(....)", block, re.S):
            (size,) = struct.unpack(">I", match[1])
            if size < 200:
                lines.append(_text(block[match.end() : match.end() + size]))
    return "\n".join(lines)


READERS: dict[str, Callable[[bytes], str]] = {
    "text": _text,
    "html": _html,
    "man": _man,
    "mo": _mo,
    "ftl": _ftl,
    "json": _json,
    "json-strings": _json_strings,
    "verses": _verses,
    "wordnet": _wordnet,
    "r-strings": _r_strings,
}

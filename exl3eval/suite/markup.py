"""Markup to text: HTML pages, Markdown, reStructuredText, and question lists as dialogues."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SKIPPED = {"script", "style", "head", "nav", "footer", "button", "svg", "form"}
_SKIPPED_NAMES = re.compile(
    r"page-header|path\b|toplang|bottomlang|quickview|comments_section|\bfooter\b|navheader|navfooter|headerlink|permalink"
    r"|sidebar|\brelated\b|\bnav\b|breadcrumb|viewcode|\btoc\b|contents\b|pst-|bd-(?:header|sidebar|toc)|prev-next|docs-\w*nav"
)
_BLOCK = re.compile(r"p|div|section|article|table|tr|[uod]l|dt|dd|li|pre|h\d|[bh]r|blockquote")
_PARAGRAPH = re.compile(r"p|pre|h\d")
_VOID = re.compile(r"area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr")


class _PageText(HTMLParser):
    """Collects the running text of a page, leaving out navigation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.language = ""
        self.parts: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._num_skipped = 0
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "html":
            self.language = named.get("lang") or named.get("xml:lang") or ""
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n- " if tag == "li" else "\n\n" if _PARAGRAPH.fullmatch(tag) else "\n")
        if tag in ("td", "th"):
            self.parts.append(" ")
        if tag == "img" and "/math/" in (named.get("src") or "") and not self._num_skipped:
            self.parts.append(f"${named.get('alt') or ''}$")
        if _VOID.fullmatch(tag):
            return
        label = f"{named.get('id') or ''} {named.get('class') or ''}"
        skipped = tag in _SKIPPED or bool(_SKIPPED_NAMES.search(label))
        self._open.append((tag, skipped))
        self._num_skipped += skipped
        self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if all(tag != name for name, _ in self._open):
            return
        while self._open:
            name, skipped = self._open.pop()
            self._num_skipped -= skipped
            self._num_pre -= name == "pre"
            if name == tag:
                break
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n\n" if _PARAGRAPH.fullmatch(tag) else "\n")

    def handle_data(self, data: str) -> None:
        if not self._num_skipped:
            self.parts.append(data if self._num_pre else re.sub(r"\s+", " ", data))


def page_text(html: str) -> tuple[str, str]:
    """Return the language that an HTML page declares ("" if none) and its running text."""
    parser = _PageText()
    parser.feed(html)
    parser.close()
    return parser.language, re.sub(r"^[ \t]*-?[ \t]*$", "", "".join(parser.parts), flags=re.M)


def markdown_text(text: str) -> str:
    """Drop HTML comments, include directives and badge images from Markdown."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    kept = [line for line in text.split("\n") if not re.match(r"\s*(\{!.*!\}|<img |<a .*>\s*$|</a>)", line)]
    return "\n".join(kept)


def rst_text(text: str) -> str:
    """Drop comments, labels and contents directives from reStructuredText."""
    text = re.sub(
        r"^\.\. (?:contents|highlight|module|index|toctree|only|_).*\n(?:\n*[ \t]+.*\n)*", "", text, flags=re.M
    )
    return re.sub(r"^\.\. (?![\w-]+::)[^\[_|].*\n(?:[ \t]+.*\n)*", "", text, flags=re.M)


def dialogue(text: str) -> list[dict[str, str]]:
    """Turn a question list in reStructuredText into alternating user and assistant messages.

    A question is a section title ended by a question mark or longer than four words; its answer is the
    text up to the next title. Titles without text of their own (chapters) are left out.
    """
    title = re.compile(r"^(?!\s)(\w.*|[\"`\'(*:].*)\n([=\-~^\"'*+#])\2{5,}[ \t]*$", re.M)
    source = rst_text(text)
    marks = list(title.finditer(source))
    ends = [mark.start() for mark in marks[1:]] + [len(source)]
    messages = []
    for mark, end in zip(marks, ends, strict=False):
        question = " ".join(mark[1].split())
        answer = source[mark.end() : end]
        answer = re.sub(r"\n[=\-~^*]{6,}[ \t]*$", "", answer.rstrip()).strip()
        if answer and (question.endswith("?") or len(question.split()) > 4):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages

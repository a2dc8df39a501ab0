"""What a report says, before any format: sections of blocks. Renderers turn a `Document` into text; nothing else does.

Text may mark code with backticks; it has no other markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from exl3eval.report.candidates import Candidates
from exl3eval.report.plots import Plot

SCHEMA = "exl3eval/report/1"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One table cell.

    Attributes
    ----------
    text : str
        As printed.
    value : float, int, str, pair of float or None
        The exact value behind the text: sort key, hover text and JSON.
    hint : str
        Why a value is unknown, or what it rests on.
    """

    text: str
    value: float | int | str | tuple[float, float] | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A table column; `numeric` ones are set to the right."""

    name: str
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under column names."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.id}: a row has another number of cells than there are columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A paragraph that must not be missed."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with its caption, and the sentence that stands in for it where it cannot be seen."""

    id: str
    caption: str
    alt: str
    plot: Plot


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One arm's figures along one context; every tuple is as long as the context's predictions.

    `likely` holds the most likely ids with natural log-probabilities, None where the run stored none.
    """

    arm: str
    kl: tuple[float, ...]
    delta_nll: tuple[float, ...]
    top1_arm: tuple[int, ...]
    kind: tuple[int, ...]
    likely: tuple[Candidates | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContext:
    """A context for the token viewer: targets in order, what the reference put first, and each arm beside it.

    `first` is the position of the first target.
    """

    context: str
    stratum: str
    first: int
    target: tuple[int, ...]
    top1_ref: tuple[int, ...]
    confidence_ref: tuple[float, ...]
    likely_ref: tuple[Candidates | None, ...]
    arms: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenViewer:
    """Contexts to walk through token by token (HTML only), with the text of the ids where a tokenizer was given."""

    id: str
    contexts: tuple[TokenContext, ...]
    texts: dict[int, str]


Block = Prose | Notice | Items | Table | Figure | TokenViewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled run of blocks."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report.

    Attributes
    ----------
    title, subtitle : str
    sections : tuple of Section
    receipts : tuple of dict
        Digests of every receipt that the report rests on.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    receipts: tuple[dict[str, str], ...]

    def figures(self) -> Iterator[Figure]:
        """Every figure, in order."""
        return (block for section in self.sections for block in section.blocks if isinstance(block, Figure))


def split_code(text: str) -> list[tuple[bool, str]]:
    """Split text at backticks: (is code, piece), empty pieces left out."""
    pieces = re.split(r"`([^`]*)`", text)
    return [(index % 2 == 1, piece) for index, piece in enumerate(pieces) if piece]


def document_json(document: Document) -> dict[str, Any]:
    """Lay a document out as strict JSON; every block names its kind."""
    return {
        "schema": SCHEMA,
        "title": document.title,
        "subtitle": document.subtitle,
        "receipts": list(document.receipts),
        "sections": [
            {
                "id": section.id,
                "title": section.title,
                "blocks": [_block_json(block) for block in section.blocks if not isinstance(block, TokenViewer)],
            }
            for section in document.sections
        ],
    }


def _block_json(block: Block) -> dict[str, Any]:
    kind = {"kind": type(block).__name__.lower()}
    if isinstance(block, Figure):
        return kind | asdict(block) | {"plot": {"kind": type(block.plot).__name__.lower(), **asdict(block.plot)}}
    return kind | asdict(block)

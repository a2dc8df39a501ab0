"""The table of `docs/mistakes.md`, read: each row with its guards, and for each guard the test that proves it."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IDS = (*(f"M{number}" for number in range(1, 16)), "M15b", *(f"M{number}" for number in range(16, 43)))
PEER_IDS = tuple(f"P{number}" for number in range(1, 10))
COLUMNS = 5
_ITEM = re.compile(r"`([^`]+)`( \(structure\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A guard, the node id of the test that proves it, and whether the guard is a structure that cannot be removed."""

    row: str
    guard: str
    test: str
    is_structure: bool

    @property
    def name(self) -> str:
        return f"{self.row} {self.guard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mistake."""

    id: str
    mistake: str
    here: str
    proofs: tuple[Proof, ...]


def read_rows(text: str | None = None) -> list[Row]:
    """Read the rows, in order; the n-th test of a row proves its n-th guard.

    Raises
    ------
    ValueError
        If a row has not five cells, or not one test per guard.
    """
    rows = []
    for line in (text or (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")).splitlines():
        if not re.match(r"\| [MP]\d", line):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) != COLUMNS:
            raise ValueError(f"{len(cells)} cells in the row of {cells[0]}, expected {COLUMNS}")
        name, mistake, here, guards, tests = cells
        pairs = zip(_ITEM.findall(guards), _ITEM.findall(tests), strict=True)
        proofs = tuple(Proof(row=name, guard=g, test=t, is_structure=bool(kind)) for (g, kind), (t, _) in pairs)
        rows.append(Row(id=name, mistake=mistake, here=here, proofs=proofs))
    return rows


def resolve(dotted: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the name's last part.

    Raises
    ------
    ImportError, AttributeError
        If there is no such name.
    """
    parts = dotted.split(".")
    for size in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:size])
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            continue
        for part in parts[size:-1]:
            owner = getattr(owner, part)
        getattr(owner, parts[-1])
        return owner, parts[-1]
    raise ImportError(f"no module of {dotted} can be imported")

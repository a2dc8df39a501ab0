"""stdout: data as JSON, or tables for people."""

from __future__ import annotations

import json
from typing import Any

PLAIN_WIDTH = 140


def print_json(value: Any) -> None:
    """Print strict JSON, keys sorted."""
    print(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False))


def print_tables(renderable: Any, *, width: int = PLAIN_WIDTH) -> None:
    """Print what rich can render: as wide as the terminal, or `width` columns where there is none."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    console.print(renderable, highlight=False)

"""Fill the bundled model's card from the record of its training: no figure is typed by hand.

    PYTHONPATH=. python -m training.card --training MODEL/training.json --card exl3eval/bundled/MODEL_CARD.md

The card is its own template: every figure stands between `<!-- figure:NAME -->` and `<!-- /figure -->`,
so rendering again replaces what stands there.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.records import read_json, write_atomic

_FIGURE = re.compile(r"(<!-- figure:(\w+) -->).*?(<!-- /figure -->)", re.S)


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Render every figure of the card from a `training.json` record.

    Raises
    ------
    UsageError
        If the record lacks a field.
    """
    try:
        corpus, recipe = record["corpus"], record["recipe"]
        return {
            "length": str(recipe["length"]),
            "parameters": f"{record['parameters']:,}",
            "corpus": f"{record['train_bytes'] / 1e6:.1f} MB, {record['train_tokens']:,} tokens",
            "epochs": f"{record['seen_tokens'] / record['train_tokens']:.1f}",
            "contexts": str(corpus["suite"]["contexts"]),
            "refused": f"{corpus['exclusion']['refused_documents']:,}",
            "run": (
                f"{record['steps']:,} steps of {recipe['batch']} x {recipe['length']} tokens "
                f"({record['seen_tokens']:,} tokens) in {record['seconds']:.0f} s on one {record['device']}, "
                f"torch {record['versions']['torch']}, transformers {record['versions']['transformers']}"
            ),
            "rerun": f"--steps {record['steps']}",
            "digests": f"corpus `{corpus['digest']}`, weights `{record['weights_sha256']}`",
            "held_out": _held_out_table(record["held_out"]),
            "sources": _source_table(corpus["sources"]),
        }
    except KeyError as error:
        raise UsageError(f"training.json has no field {error}", hint="train again with this version") from error


def render_card(card: str, record: Mapping[str, Any]) -> str:
    """Return the card with every marked figure replaced.

    Raises
    ------
    UsageError
        If the card asks for a figure that does not exist, or leaves one out.
    """
    values = figures(record)
    asked = {match[2] for match in _FIGURE.finditer(card)}
    if asked != set(values):
        wrong = ", ".join(sorted(asked ^ set(values)))
        raise UsageError(f"the card and the record differ in figures: {wrong}", hint="mark each figure once or more")

    def fill(match: re.Match[str]) -> str:
        value = values[match[2]]
        return f"{match[1]}\n{value}\n{match[3]}" if "\n" in value else f"{match[1]}{value}{match[3]}"

    return _FIGURE.sub(fill, card)


def _held_out_table(held_out: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        f"| {name} | {row['nll_nats']:.3f} | {row['bits_per_byte']:.3f} | {row['tokens']:,} |"
        for name, row in sorted(held_out.items())
    ]
    return "\n".join(["", "| family | nats per token | bits per byte | tokens |", "|---|---|---|---|", *rows, ""])


def _source_table(sources: list[Mapping[str, str]]) -> str:
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source in sources:
        families[source["package"], source["licence"]].append(source["family"])
    rows = [
        f"| `{package}` | {licence} | {', '.join(dict.fromkeys(names))} |"
        for (package, licence), names in sorted(families.items())
    ]
    return "\n".join(["", "| package | licence of the text used | families |", "|---|---|---|", *rows, ""])


def main() -> None:
    """Render the card in place."""
    parser = argparse.ArgumentParser(description="Fill the model card from training.json.")
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--card", type=Path, required=True)
    arguments = parser.parse_args()
    card = arguments.card.read_text(encoding="utf-8")
    write_atomic(arguments.card, render_card(card, read_json(arguments.training)))


if __name__ == "__main__":
    main()

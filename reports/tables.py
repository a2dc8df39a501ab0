"""Two tables of a folder of receipts, one per variant (or mode) and lane: effects and floors.

python reports/tables.py reports/h200/receipts
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from exl3eval.records import read_receipt

LANES = ("prefill", "chunked[256]", *(f"decode[{rows}]" for rows in (1, 2, 4, 8, 16, 127, 128, 129)))


def main() -> None:
    """Print a table of effects and one of floors."""
    folder = Path(sys.argv[1])
    receipts: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        receipt = read_receipt(path)
        variant = path.stem.removesuffix(f"-{receipt['identity']['lane'].replace('[', '-').rstrip(']')}")
        receipts.setdefault(variant, {})[receipt["identity"]["lane"]] = receipt
    print("| variant | lane | KL of base | variant minus base | 95 % | contexts worse |\n|---|---|---:|---:|---|---:|")
    for variant, lanes in receipts.items():
        for lanes_alike, row in _rows(lanes):
            print(f"| {variant} | {lanes_alike} | {row} |")
    columns = ("BF16 reference", "lane alone", "batch", "chunks", "replayed graph", "receipts")
    print(f"\n| lane | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for lane in LANES:
        floors = [lanes[lane]["results"]["floors"] for lanes in receipts.values() if lane in lanes]
        if floors:
            print(f"| {lane} | {' | '.join(_floors(floors))} |")


def _floors(floors: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return one lane's floors, the largest over its receipts; empty where none measured it."""

    def largest(name: str, arm: str = "") -> str:
        found = [of[name] for of in floors if of.get(name)]
        values = [max(of.values()) if not arm else of[arm] for of in found if not arm or arm in of]
        return f"{max(values):.1e}" if values and max(values) else "0" if values else ""

    return (
        largest("reference_rounding", "kl"),
        largest("lane_control", "kl"),
        largest("batch_shape", "base"),
        largest("chunk_split", "base"),
        largest("eager_graph"),
        str(len(floors)),
    )


def _rows(lanes: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    rows: dict[str, list[str]] = {}
    for lane in sorted(lanes, key=LANES.index):
        results = lanes[lane]["results"]
        paired = results["comparison"]["paired"]
        base = results["arms"]["base"]["kl"]["mean"]
        delta, interval = paired["delta"]["mean"], paired["delta"]["interval"]
        wins = paired["by_context"]
        if results["comparison"]["identical"]:
            row = f"{base:.5f} | exactly 0 | | 0 of {sum(wins.values())}"
        else:
            row = (
                f"{base:.5f} | {delta:+.2e} | [{interval['low']:+.1e}, {interval['high']:+.1e}] | "
                f"{wins['losses']} of {sum(wins.values())}"
            )
        rows.setdefault(row, []).append(lane)
    return [(", ".join(names), row) for row, names in rows.items()]


if __name__ == "__main__":
    main()

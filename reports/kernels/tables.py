"""The tables that the texts of this folder quote, from their receipts.

python reports/kernels/tables.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exl3eval.kernel_bench.report import best_route
from exl3eval.records import read_receipt

HERE = Path(__file__).parent
SMALL = ("small", "moe")
TRITON = ("triton-decode", "triton-reconstruct")
ROWS_AND_BOUNDS = (
    # rows, small shapes, goal and least against the peer, goal against dense
    (1, 16, False, 0.60, 0.80, 0.80),
    (1, 16, True, 0.55, 0.75, 0.60),
    (32, 128, False, 0.45, 0.60, 1.40),
    (32, 128, True, 0.45, 0.60, 1.40),
    (144, 256, False, 0.45, 0.60, 1.40),
    (144, 256, True, 0.45, 0.60, 1.40),
    (512, 512, False, 0.85, 0.92, 1.15),
    (512, 512, True, 0.85, 0.92, 1.15),
    (2048, 2048, False, 0.85, 0.92, 1.15),
    (2048, 2048, True, 0.85, 0.92, 1.15),
    (8192, 8192, False, 0.97, 1.00, 1.04),
    (8192, 8192, True, 0.97, 1.00, 1.04),
)


def main() -> None:
    """Print every table."""
    bench = read_receipt(HERE / "h200" / "bench.json")
    print("\n".join(bench_table(bench)) + "\n")
    print("\n".join(triton_table(bench)))
    experts = read_receipt(HERE / "experts" / "receipt.json")
    for layer in ("K4 mcg", "K3-5 mixed"):
        print(f"\n{layer}\n" + "\n".join(experts_table(experts, layer)))
    print("\n" + "\n".join(encoder_tables(read_receipt(HERE / "encoder" / "receipt.json"))))


def bench_table(bench: Mapping[str, Any]) -> Iterator[str]:
    """Yield the range of the best exact route's ratios in each group of cells, and how many miss a bound."""
    yield "| rows, shapes | to peer | goal (done) | above goal, done | by dense | to dense | goal | above |"
    yield "|---|---|---|---|---|---|---|---|"
    for first, last, small, goal, done, dense_goal in ROWS_AND_BOUNDS:
        cells = [
            cell["contestants"][best_route(cell["contestants"])]
            for cell in bench["cells"]
            if first <= cell["rows"] <= last and (cell["geometry"]["name"] in SMALL) == small
        ]
        peer, by_dense, dense = (
            [cell[key] for cell in cells if cell[key]] for key in ("to_peer", "to_peer_by_dense", "to_dense_fp16")
        )
        rows = f"{first}..{last}" if first < last else f"{first}"
        yield (
            f"| {rows}, {'two small' if small else 'large'} | {_range(peer)} |"
            f" {goal:.2f} ({done:.2f}) | {sum(r > goal for r in peer)}, {sum(r > done for r in peer)} of {len(peer)} |"
            f" {_range(by_dense)} | {_range(dense)} | {dense_goal:.2f} | {sum(r > dense_goal for r in dense)} |"
        )


def triton_table(bench: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the faster of the Triton routes takes, against upstream, the best other route and a dense product."""
    yield "| Triton routes, rows, shapes | served by | to peer | to the best CUDA route | to dense |"
    yield "|---|---|---|---|---|"
    for rows in (1, 16, 32, 64, 256, 2048, 8192):
        for small in (False, True):
            found: dict[str, list[float]] = {"to_peer": [], "to_dense_fp16": [], "to_best": []}
            served = set()
            for cell in bench["cells"]:
                if cell["rows"] != rows or (cell["geometry"]["name"] in SMALL) != small:
                    continue
                ours = {n: c for n, c in cell["contestants"].items() if n in TRITON}
                name = min(ours, key=lambda n: ours[n]["median_us"])
                best = cell["contestants"][best_route(cell["contestants"])]
                served.add(name.removeprefix("triton-"))
                found["to_best"].append(ours[name]["median_us"] / best["median_us"])
                for key in ("to_peer", "to_dense_fp16"):
                    found[key] += [ours[name][key]] if ours[name][key] else []
            yield (
                f"| {rows}, {'two small' if small else 'large'} | {', '.join(sorted(served))} |"
                f" {_range(found['to_peer'])} | {_range(found['to_best'])} | {_range(found['to_dense_fp16'])} |"
            )


def experts_table(receipt: Mapping[str, Any], layer: str) -> Iterator[str]:
    """Yield one row per number of tokens, in microseconds, the fastest contestant but the loop in bold."""
    for row in receipt["rows"]:
        if row["layer"] != layer:
            continue
        median, bytes_s = row["median_s"], row["roofline_s"]
        fastest = min((name for name in median if name != "experts-loop"), key=lambda name: median[name])
        columns = {name: f"{seconds * 1e6:,.0f}" for name, seconds in median.items()}
        columns[fastest] = f"**{columns[fastest]}**"
        grouped = min(seconds for name, seconds in median.items() if name.startswith("grouped"))
        decode = f" {columns['grouped-decode']}" if "grouped-decode" in columns else ""
        yield (
            f"| {row['tokens']:,} |{decode} | {columns['grouped-prefill']} | {columns['experts-loop']} |"
            f" {columns['dense bf16']} | {bytes_s * 1e6:.1f} | {grouped / bytes_s:.1f} |"
            f" {median['dense bf16'] / grouped:.2f} |"
        )


def encoder_tables(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yield millions of weights a second by K and by the size of a call, and the gather's times."""
    for name in ("kernel", "torch"):
        speeds = [receipt[name].get(f"mcg.K{bits}") for bits in range(1, 9)]
        yield f"| {name}, M weights/s |{''.join(f' {_speed(speed)} |'.replace('  ', ' ') for speed in speeds)}"
    strips = sorted(receipt["strips"].values(), key=lambda of: of["tiles"])
    yield ", ".join(f"{of['tiles']:,} tiles {_speed(of)}" for of in strips)
    for shape, times in receipt["gather"].items():
        rows, width = (f"{int(number):,}" for number in shape.split("x"))
        kernel, torch = (f"{times[name]['median_s'] * 1e6:.0f} us" for name in ("kernel", "torch"))
        yield f"| {rows} rows of {width} | {kernel} | {torch} |"


def _speed(measured: Mapping[str, Any] | None) -> str:
    return f"{measured['weights_per_s'] / 1e6:.1f}" if measured else ""


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


if __name__ == "__main__":
    main()

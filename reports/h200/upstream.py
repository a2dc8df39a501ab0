"""Every EXL3 checkpoint that upstream's own converter wrote, against its BF16 source: one sealed record per checkpoint.

python reports/h200/upstream.py CHECKPOINTS OUT [--device cuda] [--variant rotated-fp16] [--side-by-side 8]
python reports/h200/upstream.py --compare OUT_CPU OUT_CUDA

CHECKPOINTS holds one folder per model, each with `bf16` and `exl3-*`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exl3eval.records import read_receipt, write_receipt

LANES = ("--lane", "prefill", "--positions", "64", "--lane", "decode", "--rows", "1,4", "--decode-positions", "16")
# Relative, as in tests/engine/test_upstream.py: a router's near tie can send a token to another expert.
TOLERANCE, TOLERANCE_MOE = 0.005, 0.02


def main() -> None:
    """Measure the checkpoints on one device, or compare what two devices gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--compare", action="store_true", help="both folders hold records")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant", default="base")
    parser.add_argument("--num-contexts", default="16")
    parser.add_argument("--side-by-side", type=int, default=1)
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(options.first, options.second))
    options.second.mkdir(parents=True, exist_ok=True)
    models = sorted(path for path in options.first.glob("*/exl3-*") if path.is_dir())
    with ThreadPoolExecutor(options.side_by_side) as pool:
        failed = [name for name in pool.map(lambda model: measure(model, options), models) if name]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def measure(model: Path, options: argparse.Namespace) -> str:
    """Measure one checkpoint in a process of its own and write its record; return its name if that failed."""
    name = f"{model.parent.name} {model.name.removeprefix('exl3-')}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["exl3eval", "kld", "--model", str(model), "--reference", str(model.parent / "bf16"), *LANES]
        command += ["--variant", options.variant, "--num-contexts", options.num_contexts]
        command += ["--device", options.device, "--out", f"{folder}/run"]
        done = subprocess.run([*command, "--quiet"], capture_output=True, text=True)
        print(f"{name}: exit {done.returncode}", flush=True)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
            return name
        receipts = {path.parent.name: read_receipt(path) for path in sorted(Path(folder).glob("run/*/receipt.json"))}
    record = {
        "schema": "exl3eval/upstream-checkpoints/1",
        "identity": {key: receipts["prefill"]["identity"][key] for key in ("code", "device", "suite")},
        "variant": options.variant,
        "runs": {name: {lane: _headline(receipt, options.variant) for lane, receipt in receipts.items()}},
    }
    write_receipt(options.second / f"{name.replace(' ', '-')}.json", record)
    return ""


def _headline(receipt: dict[str, Any], variant: str) -> dict[str, Any]:
    arm, launches = receipt["results"]["arms"][variant], receipt["identity"]["arms"][variant]["launches"]
    return {
        "mean_kl": arm["kl"]["mean"],
        "interval": arm["kl"]["interval"],
        "contexts": arm["kl"]["num_contexts"],
        "positions": arm["num_positions"],
        "top1_agreement": arm["top1_agreement"],
        "routes": sorted({f"{launch['route']} {launch['rows_bucket']}" for launch in launches}),
        "identity_digest": receipt["identity_digest"],
        "results_digest": receipt["results_digest"],
    }


def compare(one: Path, other: Path) -> str | None:
    """Print the mean divergence of every run of both folders; return what differs by too much."""
    beyond = []
    for path in sorted(one.glob("*.json")):
        first, second = (read_receipt(folder / path.name)["runs"] for folder in (one, other))
        for model, lanes in first.items():
            for lane, headline in lanes.items():
                a, b = headline["mean_kl"], second[model][lane]["mean_kl"]
                print(f"| {model} | {lane} | {a:.6f} | {b:.6f} | {b / a - 1:+.2%} |")
                if not abs(b / a - 1) <= (TOLERANCE_MOE if "moe" in model else TOLERANCE):
                    beyond.append(f"{model} {lane}")
    return f"beyond the tolerance: {', '.join(beyond)}" if beyond else None


if __name__ == "__main__":
    main()

"""A served model in every mode, through the command line: one receipt per mode and lane.

python reports/vllm/lanes.py OUT [--model DIR --reference DIR] [--modes eager,compiled,graphs-uncompiled,graphs]

Run it where vLLM and this project are installed. Receipts alone are kept; each is sealed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PLAIN = ("--variant", "int8-embed", "--lane", "prefill", "--lane", "decode")
REPLAYED = ("--variant", "int8-embed+graph-decode", "--lane", "decode")
MODES = {
    "eager": PLAIN,
    "compiled": (*PLAIN, "--compile"),
    "graphs-uncompiled": REPLAYED,
    "graphs": (*REPLAYED, "--compile"),
}


def main() -> None:
    """Run every mode, several side by side, and copy the receipts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--reference")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--num-contexts", default="32")
    parser.add_argument("--positions", default="128")
    parser.add_argument("--decode-positions", default="32")
    parser.add_argument("--side-by-side", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.side_by_side) as pool:
        jobs = [pool.submit(_run, mode, Path(folder), options) for mode in options.modes.split(",")]
        failed = [mode for job in jobs if (mode := job.result())]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(mode: str, folder: Path, options: argparse.Namespace) -> str:
    command = ["exl3eval", "kld", "--engine", "vllm", *MODES[mode], "--rows", options.rows, "--quiet"]
    for name in ("model", "reference", "num_contexts", "positions", "decode_positions"):
        if value := getattr(options, name):
            command += [f"--{name.replace('_', '-')}", value]
    done = subprocess.run([*command, "--out", str(folder / mode)], capture_output=True, text=True)
    (options.out / f"{mode}.log").write_text(done.stdout + done.stderr)
    for receipt in sorted((folder / mode).glob("*/receipt.json")):
        shutil.copyfile(receipt, options.out / f"{mode}-{receipt.parent.name}.json")
    print(f"{mode}: exit {done.returncode}", flush=True)
    return mode if done.returncode else ""


if __name__ == "__main__":
    main()

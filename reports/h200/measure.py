"""Every variant in every lane that it means something in, on the bundled model: one receipt per variant and lane.

python reports/h200/measure.py OUT [--side-by-side 4] [--device cuda] [--num-contexts N]

Receipts alone are kept (the positions of a run are 1 to 15 MB); each is sealed, and `exl3eval verify OUT` checks them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PREFILL = ("--lane", "prefill", "--lane", "chunked", "--chunks", "256", "--positions", "512")
DECODE = ("--lane", "decode", "--rows", "1,2,4,8,16,127,128,129", "--positions", "96", "--decode-positions", "16")
CASES = (
    *(
        (variant, "decode", DECODE)
        for variant in (
            "base",
            "int8-embed",
            "bf16-logits",
            "broken-window",
            "head-bf16",
            "online-k6",
            "shared-decode",
            "graph-decode",
            "int8-embed+graph-decode",
        )
    ),
    ("decode-gemm", "decode", (*DECODE[:3], "1,2,4,8,16", *DECODE[4:])),
    *(
        (variant, "prefill", PREFILL)
        for variant in (
            "base",
            "int8-embed",
            "bf16-logits",
            "broken-window",
            "head-bf16",
            "online-k6",
            "shared-decode",
            "prefill-reconstruct",
            "prefill-fused",
            "prefill-half",
            "wide-decode",
            "fp8-prefill",
        )
    ),
)


def main() -> None:
    """Run every case, several side by side, and copy the receipts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side-by-side", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-contexts", default="64")
    parser.add_argument("--only", help="cases whose variant has this name")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in (None, case[0])]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.side_by_side) as pool:
        jobs = [pool.submit(_run, case, Path(folder), options) for case in cases]
        failed = [name for job in jobs if (name := job.result())]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(case: tuple[str, str, tuple[str, ...]], folder: Path, options: argparse.Namespace) -> str:
    variant, kind, lanes = case
    name = f"{variant}-{kind}"
    command = ["exl3eval", "kld", "--variant", variant, *lanes, "--device", options.device, "--quiet"]
    command += ["--num-contexts", options.num_contexts, "--out", str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    (options.out / f"{name}.log").write_text(done.stdout + done.stderr)
    for receipt in sorted((folder / name).glob("*/receipt.json")):
        shutil.copyfile(receipt, options.out / f"{variant}-{receipt.parent.name}.json")
    print(f"{name}: exit {done.returncode}", flush=True)
    return name if done.returncode else ""


if __name__ == "__main__":
    main()

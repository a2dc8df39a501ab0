"""Many runs of `exl3eval kld`, several side by side: one receipt per case and lane.

python reports/lanes.py OUT --cases variants --num-contexts 32
    every variant in every lane that it means something in
python reports/lanes.py OUT --cases served --num-contexts 32
    int8-embed served by vLLM in every mode

What else is given goes to every `exl3eval kld`: --device, --model and --reference. Receipts alone are kept (a run's
positions are 1 to 15 MB); each is sealed, and `exl3eval verify OUT` checks them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Case = tuple[str, str, tuple[str, ...]]  # what receipts are named by, the rest of the case's name, arguments

PREFILL = ("--lane", "prefill", "--lane", "chunked", "--chunks", "256", "--positions", "512")
DECODE = ("--lane", "decode", "--positions", "96", "--decode-positions", "16", "--rows")
ROWS, FEW_ROWS = "1,2,4,8,16,127,128,129", "1,2,4,8,16"
ANYWHERE = ("base", "int8-embed", "bf16-logits", "broken-window", "head-bf16", "online-k6", "shared-decode")
IN_PREFILL = ("prefill-reconstruct", "prefill-fused", "prefill-half", "wide-decode", "fp8-prefill")
IN_DECODE = ("graph-decode", "int8-embed+graph-decode")

SERVED = ("--engine", "vllm", "--positions", "128", "--decode-positions", "32", "--lane", "decode", "--rows", "1,2,4,8")
PLAIN = (*SERVED, "--lane", "prefill", "--variant", "int8-embed")
REPLAYED = (*SERVED, "--variant", "int8-embed+graph-decode")

CASES: dict[str, tuple[Case, ...]] = {
    "variants": (
        *((variant, "decode", ("--variant", variant, *DECODE, ROWS)) for variant in (*ANYWHERE, *IN_DECODE)),
        ("decode-gemm", "decode", ("--variant", "decode-gemm", *DECODE, FEW_ROWS)),
        *((variant, "prefill", ("--variant", variant, *PREFILL)) for variant in (*ANYWHERE, *IN_PREFILL)),
    ),
    "served": (
        ("eager", "all", PLAIN),
        ("compiled", "all", (*PLAIN, "--compile")),
        ("graphs-uncompiled", "decode", REPLAYED),
        ("graphs", "decode", (*REPLAYED, "--compile")),
    ),
}


def main() -> None:
    """Run the cases and copy the receipts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", choices=tuple(CASES), required=True)
    parser.add_argument("--only", help="comma-separated: variants, or modes, to run alone")
    parser.add_argument("--side-by-side", type=int, default=4)
    options, arguments = parser.parse_known_args()
    only = options.only.split(",") if options.only else None
    cases = [case for case in CASES[options.cases] if only is None or case[0] in only]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.side_by_side) as pool:
        jobs = [pool.submit(run, case, arguments, Path(folder), options.out) for case in cases]
        failed = [name for job in jobs if (name := job.result())]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(case: Case, arguments: list[str], folder: Path, out: Path) -> str:
    """Run one case, keep its log and receipts, and return its name if it failed."""
    prefix, kind, chosen = case
    name = f"{prefix}-{kind}"
    command = ["exl3eval", "kld", *chosen, *arguments, "--quiet", "--out", str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    for receipt in sorted((folder / name).glob("*/receipt.json")):
        shutil.copyfile(receipt, out / f"{prefix}-{receipt.parent.name}.json")
    print(f"{name}: exit {done.returncode}", flush=True)
    return name if done.returncode else ""


if __name__ == "__main__":
    main()

"""A report over a million positions: at most 20 s and 2 GB on two cores. Measured in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from exl3eval.floors import floor_means
from exl3eval.records import digest_file, digest_value, seal, write_json
from exl3eval.score.positions import ARROW_SCHEMA, LABELS, read_positions, split_arms, write_table
from exl3eval.verify import recompute_results

RUN = Path(__file__).parents[1] / "data" / "report_run"
MAX_SECONDS, MAX_BYTES = 20.0, 2_000_000_000
_MEASURE = """
import resource, sys, time
from pathlib import Path
started = time.monotonic()
from concurrent.futures import ThreadPoolExecutor
from exl3eval.report.study import load_study
from exl3eval.report.write import write_report
with ThreadPoolExecutor(2) as pool:
    study = load_study([Path(sys.argv[1])], executor=pool)
write_report(study, Path(sys.argv[2]), formats=("md", "html", "json"))
print(time.monotonic() - started, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def synthetic_run(folder, num_contexts, num_positions):
    """Lognormal losses of three arms with the fixed run's identity; labelled as no measurement of anything."""
    rng = np.random.default_rng(1)
    count = num_contexts * num_positions
    kl = np.exp(rng.normal(-7.0, 1.5, count) + np.repeat(rng.normal(0.0, 0.4, num_contexts), num_positions))
    first = rng.integers(0, 1024, count)
    target = rng.integers(0, 1024, count)
    arms = {"reference-bfloat16": 0.03 * kl, "base": kl, "int8-embed": kl * np.exp(rng.normal(0.02, 0.05, count))}
    documents = [index // 2 for index in range(num_contexts)]
    labels = {
        "context": [f"context-{index:05d}" for index in range(num_contexts)],
        "cluster": [f"document-{index}" for index in documents],
        "stratum": [f"stratum-{index % 17:02d}" for index in documents],
    }
    tables = []
    for arm, values in arms.items():
        flips = rng.random(count) < 0.05
        columns = {name: np.repeat(names, num_positions) for name, names in labels.items()}
        columns |= {"arm": np.repeat(arm, count), "position": np.tile(np.arange(num_positions), num_contexts)}
        columns |= {"target": target, "kl": values, "kl_reverse": values, "js": values / 4, "tv": np.minimum(values, 1)}
        columns |= {"top1": np.where(flips, 3, 0), "top_k_overlap": 1.0 - flips, "nll_ref": np.full(count, 2.0)}
        columns |= {"delta_nll": rng.normal(0, 0.01, count), "confidence_ref": rng.random(count), "top1_ref": first}
        columns |= {"entropy_ref": np.full(count, 2.0), "entropy_arm": np.full(count, 2.0)}
        columns |= {"top1_arm": np.where(flips, (first + 1) % 1024, first)}
        arrays = [
            (pa.array(columns[f.name]).dictionary_encode() if f.name in LABELS else pa.array(columns[f.name])).cast(
                f.type
            )
            for f in ARROW_SCHEMA
        ]
        tables.append(pa.Table.from_arrays(arrays, schema=ARROW_SCHEMA))
    table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    write_table(folder / "positions.parquet", table)
    receipt = json.loads((RUN / "receipt.json").read_text())
    del receipt["candidates_sha256"]
    receipt["identity"]["tokens"] |= {"num_contexts": num_contexts, "positions_per_context": num_positions}
    results = recompute_results(receipt, split_arms(table))
    receipt["results"] |= {"arms": results["arms"], "comparison": results["comparison"]}
    receipt["results"]["floors"] |= results["floors"]
    receipt |= {f"{field}_digest": digest_value(receipt[field]) for field in ("identity", "results")}
    receipt["positions_sha256"] = digest_file(folder / "positions.parquet")
    shutil.copyfile(RUN / "floors.parquet", folder / "floors.parquet")
    receipt["results"]["floors"] |= floor_means(split_arms(read_positions(folder / "floors.parquet")))
    write_json(folder / "receipt.json", seal(receipt))


def measure(folder, out):
    done = subprocess.run([sys.executable, "-c", _MEASURE, folder, out], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, nbytes = map(float, done.stdout.split())
    return seconds, nbytes


@pytest.mark.slow
def test_a_million_positions(tmp_path):
    folder = tmp_path / "run"
    synthetic_run(folder, 1000, 1000)
    seconds, nbytes = measure(folder, tmp_path / "report")
    shutil.rmtree(folder)
    print(f"{seconds:.1f} s, {nbytes / 1e9:.2f} GB")
    assert seconds <= MAX_SECONDS
    assert nbytes <= MAX_BYTES


def test_a_synthetic_run_of_other_shape_is_reported(tmp_path):
    folder = tmp_path / "run"
    synthetic_run(folder, 40, 3)
    measure(folder, tmp_path / "report")
    assert "context-00" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")

"""The plugin in every mode of execution, each beside its unquantized control: rows, routes, graph replays, bits, speed.

usage: python reports/vllm/plugin_modes.py OUT.json [--positions N]

One process per engine, all at once. Every engine scores the same contexts in one-token steps of 1, 2, 4 and 8 rows; its
logits are compared with those of the other modes and row counts in FP64. Run it where vLLM and this project are
installed (on a GPU of sm_90: VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer is not).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl3eval.records import write_receipt

ROWS = (1, 2, 4, 8)
GRAPHS = "FULL_DECODE_ONLY"
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "graphs": {"compilation_config": {"cudagraph_mode": GRAPHS}},
    "graphs-uncompiled": {"compilation_config": {"mode": 0, "cudagraph_mode": GRAPHS}},
}
ARMS = {"bf16": {}, "exl3": {"tally": True}, "exl3-int8": {"tally": True, "embedding": "int8"}}
COMPARED = (
    ("eager", "compiled"),
    ("eager", "graphs-uncompiled"),
    ("compiled", "graphs"),
    ("eager", "graphs"),
)
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "exl3",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}


def held_out_ids(num_contexts: int, num_positions: int) -> np.ndarray:
    """Return int64 [N, T] of the shipped essays, in the bundled model's tokens."""
    from tokenizers import Tokenizer

    from exl3eval.bundled import bundled_model

    root = Path(__file__).parents[2] / "contexts/essays"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("*.txt")))
    ids = Tokenizer.from_file(str(bundled_model("bf16") / "tokenizer.json")).encode(text).ids
    return np.array(ids[: num_contexts * num_positions]).reshape(num_contexts, num_positions)


def run_engine(arm: str, mode: str, folder: Path) -> dict[str, Any]:
    """Run one engine in this process, write its logits [M, T, V] per row count, and return what it did."""
    replays = _count_replays()
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    import exl3_vllm
    from exl3eval.bundled import bundled_model

    exl3 = arm != "bf16"
    cuda = torch.cuda.is_available()
    llm = LLM(
        model=str(bundled_model("exl3" if exl3 else "bf16")),
        dtype="bfloat16" if cuda else "float32",
        max_model_len=1024,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        **({"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05} if cuda else {}),
        **({} if exl3 else {"hf_overrides": {"head_dtype": "float32"}}),
        **MODES[mode],
    )
    started = time.monotonic() - begun
    emitted: list[torch.Tensor] = []

    def capture(model: Any) -> None:
        inner = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = inner(*args, **kwargs)
            emitted.append(logits.to("cpu", copy=True))
            return logits

        model.compute_logits = compute_logits

    llm.apply_model(capture)
    ids = np.load(folder / "ids.npy")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config
    scheduler.long_prefill_token_threshold = 1
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    record: dict[str, Any] = {"start_seconds": round(started, 1), "lanes": {}, "config": exl3_vllm.effective_config()}
    for rows in ROWS:
        emitted.clear()
        replays.clear()
        exl3_vllm.reset_counts()
        llm.generate([{"prompt_token_ids": row} for row in ids[:rows].tolist()], one, use_tqdm=False)
        launches: Counter[str] = Counter()
        for launch, count in exl3_vllm.read_counts().items():
            launches[f"{launch.route} {launch.rows_bucket}"] += count
        steps = [logits for logits in emitted if len(logits) == rows][-ids.shape[1] :]
        # Later versions of vLLM run the prompt of a lone request at once: no lane of one row then.
        if len(steps) == ids.shape[1]:
            np.save(folder / f"{arm}.{mode}.{rows}.npy", torch.stack(steps, dim=1).float().numpy())
        record["lanes"][str(rows)] = {
            "head_calls_by_rows": dict(Counter(len(logits) for logits in emitted)),
            "logits": str(emitted[0].dtype).removeprefix("torch."),
            "graph_replays": replays["replay"],
            "launches": dict(sorted(launches.items())),
        }
    scheduler.long_prefill_token_threshold = 0
    free = SamplingParams(temperature=0, max_tokens=128, detokenize=False, ignore_eos=True)
    record["tokens_per_second"] = {}
    for rows in (1, max(ROWS)):
        prompts = [{"prompt_token_ids": row} for row in ids[:rows, :8].tolist()]
        took = []
        for _ in range(3):
            begun = time.monotonic()
            llm.generate(prompts, free, use_tqdm=False)
            took.append(time.monotonic() - begun)
        record["tokens_per_second"][str(rows)] = round(128 * rows / min(took))
    return record


def _count_replays() -> Counter[str]:
    replays: Counter[str] = Counter()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays["replay"] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    return replays


def compare(left: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the mean divergence in nats and the share of rows that agree, over the contexts that both scored."""
    contexts = min(len(left), len(right))
    a, b = torch.from_numpy(left[:contexts]), torch.from_numpy(right[:contexts])
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return {
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "top1": float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        "bit_equal": float((a == b).all(-1).double().mean()),
    }


def main() -> None:
    """Run every engine and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--engine", nargs=3, metavar=("ARM", "MODE", "FOLDER"), help="run one engine, for the parent")
    options = parser.parse_args()
    if options.engine:
        arm, mode, folder = options.engine
        options.out.write_text(json.dumps(run_engine(arm, mode, Path(folder))))
        return
    modes = list(MODES) if torch.cuda.is_available() else ["eager", "compiled"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        np.save(folder / "ids.npy", held_out_ids(max(ROWS), options.positions))
        engines = {f"{arm}.{mode}": (arm, mode) for arm in ARMS for mode in modes}
        children = {name: _start(name, *engine, folder) for name, engine in engines.items()}
        if failed := [name for name, child in children.items() if child.wait()]:
            sys.exit(f"{failed[0]} failed:\n" + (folder / f"{failed[0]}.log").read_text()[-2000:])
        logits = {path.stem: np.load(path) for path in sorted(folder.glob("*.*.*.npy"))}
        pairs = [(f"{arm}.{a}.{m}", f"{arm}.{b}.{m}") for arm in ARMS for a, b in COMPARED for m in ROWS]
        pairs += [(f"{name}.1", f"{name}.{m}") for name in engines for m in ROWS[1:]]
        pairs += [
            (f"bf16.{mode}.{m}", f"{arm}.{mode}.{m}") for arm in ("exl3", "exl3-int8") for mode in modes for m in ROWS
        ]
        record = {
            "schema": "exl3eval/vllm-plugin-modes/1",
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "positions": options.positions,
            "engines": {name: json.loads((folder / f"{name}.json").read_text()) for name in engines},
            "comparisons": {f"{a} || {b}": compare(logits[a], logits[b]) for a, b in pairs if {a, b} <= logits.keys()},
        }
    write_receipt(options.out, record)


def _start(name: str, arm: str, mode: str, folder: Path) -> subprocess.Popen[bytes]:
    variables = VARIABLES | {
        "EXL3_VLLM_VARIANT": json.dumps(ARMS[arm]),
        "VLLM_CACHE_ROOT": str(folder / f"cache-{name}"),
    }
    command = [sys.executable, __file__, str(folder / f"{name}.json"), "--engine", arm, mode, str(folder)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)


if __name__ == "__main__":
    main()

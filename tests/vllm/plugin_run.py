"""Runs jobs in vLLM's environment, one model after another in one process, and writes what each emitted.

usage: plugin_run.py REQUEST.json, an object with `jobs` (list) and `out` (folder). A job has `name`, `model`, `ids`,
`decode` (tokens to generate after the prompt), and optionally `variant`, `arguments` (of vLLM's LLM) and `plant`.
"""

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

PLANTED_ROWS = 8


def planted_apply(method, layer, x, bias=None):
    """The defect that an audit must catch: a branch on the row count in Python, outside the op."""
    from exl3_vllm.ops import fused_linear

    route = "fp16-staged" if x.shape[0] <= PLANTED_ROWS else "reference"
    parts = list(layer.exl3)
    for part in parts:
        part.dispatch = f"1-:{route}"
    return fused_linear(x, parts, with_bias=bias is not None, out_dtype=method.out_dtype or x.dtype)


def run(job, out):
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    import exl3_vllm
    from exl3_vllm.linear import Exl3LinearMethod

    os.environ["EXL3_VLLM_VARIANT"] = json.dumps(job.get("variant", {}))
    exl3_vllm.register()
    honest = Exl3LinearMethod.apply
    if job.get("plant"):
        Exl3LinearMethod.apply = planted_apply
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        **job.get("arguments", {}),
    }
    llm = LLM(model=job["model"], **arguments)
    rows = []

    def capture(model):
        inner = model.compute_logits

        def compute_logits(hidden, *args, **kwargs):
            logits = inner(hidden, *args, **kwargs)
            rows.append(logits.to("cpu", torch.float32, copy=True))
            return logits

        model.compute_logits = compute_logits

    llm.apply_model(capture)
    exl3_vllm.reset_counts()
    sampling = SamplingParams(temperature=0, max_tokens=job["decode"], ignore_eos=True, prompt_logprobs=0)
    (answer,) = llm.generate([{"prompt_token_ids": job["ids"]}], sampling, use_tqdm=False)
    # The sampler asks for the last prompt row before the prompt's own rows are asked for.
    first, prompt, *decoded = rows
    tokens = list(answer.outputs[0].token_ids)
    np.save(out / f"{job['name']}.npy", torch.cat([prompt[: len(job["ids"]) - 1], first, *decoded]).numpy())
    counts = [[*launch, count] for launch, count in sorted(exl3_vllm.read_counts().items())]
    record = {"tokens": tokens, "counts": counts, "config": exl3_vllm.effective_config()}
    (out / f"{job['name']}.json").write_text(json.dumps(record))
    Exl3LinearMethod.apply = honest
    del llm, capture
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    for one in request["jobs"]:
        try:
            run(one, Path(request["out"]))
        except Exception as error:  # a job may have to be refused: the test reads why
            if not one.get("refused"):
                raise
            Path(request["out"], f"{one['name']}.json").write_text(json.dumps({"error": str(error)}))

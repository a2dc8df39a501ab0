"""Scores ids on one or two tensor-parallel ranks. usage: ranks_run.py MODEL RANKS OUT.npy ID..."""

import sys

import numpy as np

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    model, ranks, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        enable_prefix_caching=False,
        tensor_parallel_size=ranks,
        max_logprobs=-1,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    (answer,) = llm.generate([{"prompt_token_ids": [int(one) for one in sys.argv[4:]]}], sampling, use_tqdm=False)
    rows = [[row[token].logprob for token in sorted(row)] for row in answer.prompt_logprobs[1:]]
    np.save(out, np.array(rows))

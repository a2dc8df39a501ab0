"""Forced decoding: a logits processor that makes vLLM sample the held-out ids, so that true decode state is scored.

The logits that arms are scored on are taken before any processor sees them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from exl3eval.vllm_engine.arguments import FORCED_IDS


class ForcedIds(AdapterLogitsProcessor):  # type: ignore[misc]
    """Samples `extra_args["exl3eval_forced_ids"]` one after the other."""

    def is_argmax_invariant(self) -> bool:
        """Say that the most likely id changes, so that greedy requests are processed too."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Return what forces a request's ids, None for a request that forces nothing."""
        ids = (params.extra_args or {}).get(FORCED_IDS)
        if ids is None:
            return None

        def force(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            forced_V = torch.full_like(logits_V, float("-inf"))
            forced_V[ids[len(output_ids)]] = 0.0
            return forced_V

        return force

"""Driving a lane: vLLM's own scheduler, one step at a time, with the rows of every step decided here.

The engine runs in this process, so the token budget and the cap per request can be set before each step. All
requests of a batch are equally long, and therefore move in lock step: after a prefix in one step, each step gives
the linears and the head exactly one row per request. What comes out is checked against what was asked for.

Shapes: B requests, R rows of one step, T input ids, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from exl3eval.engine.lanes import Lane
from exl3eval.errors import InvalidRunError
from exl3eval.vllm_engine.arguments import FORCED_IDS

HINT = "this version of vLLM schedules otherwise than those tested; no number is reported"
# A served token and its rescoring may round differently in 16 bits: prefill and decode were seen up to 0.15 apart.
NEAR_TOP = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that one step emitted.

    Parameters
    ----------
    request_R, position_R : Tensor
        int64: which request of the batch, and the index of the input id that the row follows.
    hidden_RH : Tensor
        Post-final-norm hidden states, in the engine's dtype.
    logits_RV : Tensor
        FP32.
    """

    request_R: torch.Tensor
    position_R: torch.Tensor
    hidden_RH: torch.Tensor
    logits_RV: torch.Tensor


class Engine:
    """vLLM in this process, stepped by hand.

    Parameters
    ----------
    llm : LLM
        Built with `engine_arguments`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._served = 0
        self.ask("exl3eval_watch")

    def ask(self, method: str) -> Any:
        """Call a method of the worker extension."""
        (answer,) = self._llm.collective_rpc(method)
        return answer

    def run_lane(self, ids_BT1: torch.Tensor, lane: Lane, *, style: str = "one-token") -> Iterator[Rows]:
        """Run a batch through a lane and yield the rows of its scored positions, in order.

        Parameters
        ----------
        ids_BT1 : Tensor
            int64 [B, T + 1], the last target included; B is 1 except in decode lanes.
        lane : Lane
            Row regime.
        style : str
            Of decode lanes.

        Raises
        ------
        InvalidRunError
            If a step emitted other rows than the lane declares, or tokens that its logits do not explain.
        """
        num_inputs = ids_BT1.shape[1] - 1
        first = lane.first_scored(num_inputs)
        if lane.kind != "decode":
            for rows in self._prefill(ids_BT1[0, :-1].tolist(), lane.rows or num_inputs):
                kept = rows.position_R >= first
                if bool(kept.any()):
                    yield _select(rows, kept)
        elif style == "forced":
            yield from self._decode(ids_BT1, first, forced=True)
        else:
            yield from self._decode(ids_BT1, first, forced=False)

    def _prefill(self, ids_T: list[int], chunk: int) -> Iterator[Rows]:
        """One request in chunks: each step emits a row to sample from, then the rows of its prompt ids."""
        self._add([ids_T], max_tokens=1, prompt_logprobs=0)
        for start in range(0, len(ids_T), chunk):
            width = min(chunk, len(ids_T) - start)
            last = start + width == len(ids_T)
            outputs, calls = self._step(width, requests=1)
            (hidden_1H, logits_1V), *prompt = calls or [(torch.empty(0, 0), torch.empty(0, 0))]
            counts = [len(hidden) for hidden, _ in prompt]
            # Runner V1 leaves the last prompt row to the sampler alone, V2 computes it twice.
            if len(hidden_1H) != 1 or sum(counts) not in ((width, width - 1) if last else (width,)):
                raise InvalidRunError(
                    f"a prefill step of {width} ids emitted rows {[len(hidden) for hidden, _ in calls]}", hint=HINT
                )
            if prompt:
                hidden_RH = torch.cat([hidden for hidden, _ in prompt])[: width - last]
                logits_RV = torch.cat([logits for _, logits in prompt])[: width - last]
                yield _consecutive(start, hidden_RH, logits_RV)
            if last:
                self._check_greedy(outputs, logits_1V)
                yield _consecutive(len(ids_T) - 1, hidden_1H, logits_1V)

    def _decode(self, ids_BT1: torch.Tensor, first: int, *, forced: bool) -> Iterator[Rows]:
        """B requests in lock step: `first` ids each in one step, then one row each per step."""
        batch, num_inputs = ids_BT1.shape[0], ids_BT1.shape[1] - 1
        targets = ids_BT1[:, first:].tolist()
        if forced:
            self._add(ids_BT1[:, :first].tolist(), max_tokens=len(targets[0]), forced=targets)
        else:
            self._add(ids_BT1[:, :num_inputs].tolist(), max_tokens=1)
        outputs: list[Any] = []
        logits_RV = torch.empty(0, 0)
        for position in range(first - 1, num_inputs):
            outputs, calls = self._step(first if position < first else 1, requests=batch)
            if [len(hidden) for hidden, _ in calls] != [batch]:
                raise InvalidRunError(
                    f"a decode step of {batch} requests emitted rows {[len(hidden) for hidden, _ in calls]}", hint=HINT
                )
            ((hidden_RH, logits_RV),) = calls
            if position >= first:
                yield Rows(
                    request_R=torch.arange(batch),
                    position_R=torch.full((batch,), position),
                    hidden_RH=hidden_RH,
                    logits_RV=logits_RV,
                )
        if forced:
            sampled = [list(output.outputs[0].token_ids) for output in _in_order(outputs, batch)]
            if sampled != targets:
                raise InvalidRunError("forced decoding sampled other ids than the held-out ones", hint=HINT)
        else:
            self._check_greedy(outputs, logits_RV)

    def generate(self, ids_T: list[int], num_tokens: int) -> list[int]:
        """Generate greedily, whatever the token."""
        self._add([ids_T], max_tokens=num_tokens)
        outputs: list[Any] = []
        for step in range(num_tokens):
            outputs, _ = self._step(1 if step else len(ids_T), requests=1)
        return list(_in_order(outputs, 1)[0].outputs[0].token_ids)

    def check_self(self, ids_T: list[int], num_tokens: int) -> None:
        """Generate a short continuation and score it again: the model must have found every token most likely.

        Raises
        ------
        InvalidRunError
            If it did not, by more than rounding: this engine mis-scores this model.
        """
        generated = self.generate(ids_T, num_tokens)
        whole = torch.tensor([[*ids_T, *generated]])
        for rows in self.run_lane(whole, Lane(kind="prefill", scored=num_tokens)):
            served_R = whole[0, rows.position_R + 1].to(rows.logits_RV.device)
            gap_R = rows.logits_RV.amax(dim=1) - rows.logits_RV.gather(1, served_R[:, None]).squeeze(1)
            if not float(gap_R.max()) <= NEAR_TOP:
                raise InvalidRunError(
                    f"the engine generated a token that it scores {float(gap_R.max()):.3g} nats below its own best",
                    hint="decode and prefill of this model disagree in this engine; no number is reported",
                )

    def _add(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int,
        prompt_logprobs: int | None = None,
        forced: list[list[int]] | None = None,
    ) -> None:
        from vllm import SamplingParams

        self._served += 1
        for index, prompt in enumerate(prompts):
            parameters = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=prompt_logprobs,
                extra_args={FORCED_IDS: forced[index]} if forced else None,
            )
            self._llm.llm_engine.add_request(f"{self._served}/{index}", {"prompt_token_ids": prompt}, parameters)

    def _step(self, width: int, *, requests: int) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Run one step of at most `width` tokens for each request; return finished outputs and the head's calls."""
        scheduler = self._core.scheduler
        scheduler.scheduler_config.long_prefill_token_threshold = width
        scheduler.max_num_scheduled_tokens = width * requests
        outputs = [output for output in self._llm.llm_engine.step() if output.finished]
        return outputs, self.ask("exl3eval_take")

    def _check_greedy(self, outputs: list[Any], logits_BV: torch.Tensor) -> None:
        """Prove that row i is request i's: the token sampled from it is its most likely."""
        for output, logits_V in zip(_in_order(outputs, len(logits_BV)), logits_BV, strict=True):
            token = output.outputs[0].token_ids[-1]
            if logits_V[token] != logits_V.max():
                raise InvalidRunError("a request's token is not the most likely of its row of logits", hint=HINT)


def _in_order(outputs: list[Any], batch: int) -> list[Any]:
    """Sort finished requests as they were added.

    The engine appends a random suffix to request names, so only the number between is read.
    """
    if len(outputs) != batch:
        raise InvalidRunError(f"{len(outputs)} requests of {batch} finished with the last step", hint=HINT)
    return sorted(outputs, key=lambda output: int(output.request_id.split("/")[1].split("-")[0]))


def _consecutive(start: int, hidden_RH: torch.Tensor, logits_RV: torch.Tensor) -> Rows:
    positions = torch.arange(start, start + len(hidden_RH))
    return Rows(request_R=torch.zeros_like(positions), position_R=positions, hidden_RH=hidden_RH, logits_RV=logits_RV)


def _select(rows: Rows, kept_R: torch.Tensor) -> Rows:
    if bool(kept_R.all()):
        return rows
    return Rows(
        request_R=rows.request_R[kept_R],
        position_R=rows.position_R[kept_R],
        hidden_RH=rows.hidden_RH[kept_R.to(rows.hidden_RH.device)],
        logits_RV=rows.logits_RV[kept_R.to(rows.logits_RV.device)],
    )

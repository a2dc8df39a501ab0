"""Rows to divergences as they are emitted: logits live for one block, whatever the number of contexts.

The reference's hidden states go through its head in FP32; the arm's logits are the engine's own. The reference arm
itself is scored against its own replay, which is the floor of that procedure.

Shapes: B contexts of a batch, S scored positions, R rows of a block, H hidden size, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from exl3eval.engine.head import Head
from exl3eval.errors import InvalidRunError
from exl3eval.score.candidates import NUM_CANDIDATES
from exl3eval.score.divergence import Divergences, cut_mass, logit_grid, measure_divergences
from exl3eval.vllm_engine.drive import Rows
from exl3eval.vllm_engine.store import ContextRows, Evidenced

BLOCK_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """How rows of an arm become divergences.

    Parameters
    ----------
    head : Head
        The reference's, in FP32.
    vocab_size : int
        Ids scored.
    own_head : bool
        Score the engine's logits; else the arm's hidden states through the reference's head.
    round_logits : bool
        Round logits to BF16, a control.
    """

    head: Head
    vocab_size: int
    own_head: bool = True
    round_logits: bool = False

    def score_batch(
        self, emitted: Iterable[Rows], targets_BS: torch.Tensor, reference_BSH: torch.Tensor | None
    ) -> tuple[list[ContextRows], torch.Tensor]:
        """Score a batch of contexts as its rows arrive.

        Parameters
        ----------
        emitted : iterable of Rows
            Of the scored positions, each once, a context's in order.
        targets_BS : Tensor
            int64, the true next ids.
        reference_BSH : Tensor or None
            The reference's hidden states; None for the reference itself.

        Returns
        -------
        rows : list of ContextRows
            Without launches.
        hidden_BSH : Tensor
            On the CPU, in the engine's dtype.

        Raises
        ------
        InvalidRunError
            If a hidden state is not finite, a position is missing or doubled, or a divergence is not valid.
        """
        batch, scored = targets_BS.shape
        pending: list[Rows] = []
        blocks: list[_Block] = []
        head_rows: Counter[int] = Counter()
        first: int | None = None
        for rows in emitted:
            first = int(rows.position_R[0]) if first is None else first
            head_rows[len(rows.position_R)] += 1
            pending.append(rows)
            if sum(each.logits_RV.numel() for each in pending) >= BLOCK_LOGITS:
                blocks += self._score_pending(pending, targets_BS, reference_BSH, first)
                pending = []
        if pending:
            blocks += self._score_pending(pending, targets_BS, reference_BSH, first or 0)
        return _gather(blocks, batch, scored, head_rows), _hidden(blocks, batch, scored)

    def _score_pending(
        self, pending: list[Rows], targets_BS: torch.Tensor, reference_BSH: torch.Tensor | None, first: int
    ) -> list[_Block]:
        limit = max(1, BLOCK_LOGITS // self.vocab_size)
        request_R = torch.cat([rows.request_R for rows in pending])
        place_R = torch.cat([rows.position_R for rows in pending]) - first
        hidden_RH = torch.cat([rows.hidden_RH for rows in pending])
        logits_RV = pending[0].logits_RV if len(pending) == 1 else torch.cat([rows.logits_RV for rows in pending])
        blocks = []
        for start in range(0, len(place_R), limit):
            rows = slice(start, start + limit)
            blocks.append(
                self._score_block(
                    request_R[rows], place_R[rows], hidden_RH[rows], logits_RV[rows], targets_BS, reference_BSH
                )
            )
        return blocks

    def _score_block(
        self,
        request_R: torch.Tensor,
        place_R: torch.Tensor,
        hidden_RH: torch.Tensor,
        logits_RV: torch.Tensor,
        targets_BS: torch.Tensor,
        reference_BSH: torch.Tensor | None,
    ) -> _Block:
        if not bool(torch.isfinite(hidden_RH).all()):
            raise InvalidRunError(
                "hidden states are not finite",
                hint="activations overflowed or the checkpoint is damaged; no number is reported",
            )
        device = logits_RV.device
        reference_RH = hidden_RH if reference_BSH is None else reference_BSH[request_R, place_R].to(device)
        reference_RV = self.head.logits(reference_RH)
        if not self.own_head:
            logits_RV = self.head.all_logits(hidden_RH)
        if self.round_logits:
            logits_RV = logits_RV.bfloat16().float()
        mass_R = cut_mass(logits_RV, self.vocab_size)
        logits_RV = logits_RV[:, : self.vocab_size].contiguous()
        targets_R = targets_BS[request_R, place_R].to(device)
        found = measure_divergences(reference_RV, {"arm": logits_RV}, targets_R)["arm"]
        top = logits_RV.topk(min(NUM_CANDIDATES, self.vocab_size), dim=1)
        # log Z of the arm, from its loss of the true id: the FP64 sum over the vocabulary is not taken twice.
        logz_R = (found.nll_ref + found.delta_nll) + logits_RV.gather(1, targets_R[:, None]).squeeze(1).double().cpu()
        return _Block(
            request_R=request_R,
            place_R=place_R,
            hidden_RH=hidden_RH.cpu(),
            divergences=found,
            candidate_ids_RC=top.indices.int().cpu(),
            candidate_log_probs_RC=top.values.double().cpu() - logz_R[:, None],
            cut_mass_R=mass_R.cpu(),
            grid=logit_grid(logits_RV),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    request_R: torch.Tensor
    place_R: torch.Tensor
    hidden_RH: torch.Tensor
    divergences: Divergences
    candidate_ids_RC: torch.Tensor
    candidate_log_probs_RC: torch.Tensor
    cut_mass_R: torch.Tensor
    grid: str | None


def _order(blocks: list[_Block], batch: int, scored: int) -> torch.Tensor:
    """Return the permutation that sorts all rows by context and position, each present exactly once."""
    flat = torch.cat([block.request_R * scored + block.place_R for block in blocks]) if blocks else torch.empty(0)
    order = torch.argsort(flat)
    if not torch.equal(flat[order], torch.arange(batch * scored)):
        raise InvalidRunError(
            f"{len(flat)} rows were emitted for {batch} x {scored} positions",
            hint="this version of vLLM schedules otherwise than those tested; no number is reported",
        )
    return order


def _hidden(blocks: list[_Block], batch: int, scored: int) -> torch.Tensor:
    hidden = torch.cat([block.hidden_RH for block in blocks])[_order(blocks, batch, scored)]
    return hidden.reshape(batch, scored, -1)


def _gather(blocks: list[_Block], batch: int, scored: int, head_rows: Counter[int]) -> list[ContextRows]:
    order = _order(blocks, batch, scored)

    def split(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.cat(parts)[order].split(scored)

    measures = {f.name: split([getattr(block.divergences, f.name) for block in blocks]) for f in fields(Divergences)}
    ids = split([block.candidate_ids_RC for block in blocks])
    log_probs = split([block.candidate_log_probs_RC for block in blocks])
    mass = split([block.cut_mass_R for block in blocks])
    grids = {block.grid for block in blocks}
    return [
        ContextRows(
            divergences=Divergences(**{name: parts[index] for name, parts in measures.items()}),
            candidate_ids=ids[index],
            candidate_log_probs=log_probs[index],
            evidence=Evidenced(
                head_rows=dict(head_rows) if index == 0 else {},
                grid=next(iter(grids)) if len(grids) == 1 else None,
                cut_mass=float(mass[index].max()),
            ),
        )
        for index in range(batch)
    ]

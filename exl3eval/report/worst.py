"""The worst contexts: which ones, how much of the loss they carry, and the tokens that moved in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from exl3eval.report.breakdown import lane_suffix
from exl3eval.report.candidates import Candidates
from exl3eval.report.document import (
    Block,
    Cell,
    Column,
    Prose,
    Section,
    Table,
    TokenContext,
    TokenRow,
    TokenViewer,
)
from exl3eval.report.numbers import count_cell, number_cell, percent, share_cell, text_cell
from exl3eval.report.study import VARIANT, Arm, Run, Study
from exl3eval.score.divergence import AGREE, FLIP, NEAR_TIE, TIE

KINDS = {AGREE: "same", TIE: "tie", NEAR_TIE: "near tie", FLIP: "flip"}
NUM_TOKENS = 12
LONGEST_TOKEN = 16


def worst_contexts(study: Study) -> Section:
    """List the contexts with the largest loss, the documents that move the difference, and single tokens."""
    blocks: list[Block] = []
    for lane in study.lanes:
        suffix = lane_suffix(study, lane)
        arms = [arm for arm in study.arms(lane) if arm.role == VARIANT]
        shares = "; ".join(
            f"`{arm.label}` {percent(sum(w['share'] for w in arm.summary['worst']), decimals=1)}" for arm in arms
        )
        blocks += [
            Prose(text=f"Worst contexts are listed, never dropped. Share of all loss in the contexts below: {shares}."),
            _contexts_table(arms, lane, f"worst{suffix}"),
            _documents_table(study, study.in_lane(lane), lane, f"influence{suffix}"),
            *(_tokens_table(study, arm, f"tokens{suffix}-{index + 1}") for index, arm in enumerate(arms)),
            token_viewer(study, lane, f"viewer{suffix}"),
        ]
    return Section(id="worst", title="Worst contexts and the tokens that moved", blocks=tuple(blocks))


def _contexts_table(arms: list[Arm], lane: str, table_id: str) -> Table:
    return Table(
        id=table_id,
        caption=f"Contexts with the largest mean KL, nats, {lane} lane.",
        columns=(
            Column(name="arm", numeric=False),
            Column(name="context", numeric=False),
            Column(name="stratum", numeric=False),
            Column(name="mean KL"),
            Column(name="max KL"),
            Column(name="share of loss"),
        ),
        rows=tuple(
            (
                text_cell(f"`{arm.label}`"),
                text_cell(worst["context"]),
                text_cell(worst["stratum"]),
                number_cell(worst["mean_kl"]),
                number_cell(worst["max_kl"]),
                share_cell(worst["share"], decimals=1),
            )
            for arm in arms
            for worst in arm.summary["worst"]
        ),
    )


def _documents_table(study: Study, runs: tuple[Run, ...], lane: str, table_id: str) -> Table:
    return Table(
        id=table_id,
        caption=f"Documents that move the paired difference most when left out, nats, {lane} lane.",
        columns=(
            Column(name="variant", numeric=False),
            Column(name="document", numeric=False),
            Column(name="contexts"),
            Column(name="its own Δ"),
            Column(name="Δ without it"),
        ),
        rows=tuple(
            (
                text_cell(f"`{study.label(run)}`"),
                text_cell(str(found["cluster"])),
                count_cell(found["num_contexts"]),
                number_cell(found["cluster_mean"], signed=True),
                number_cell(found["mean_without"], signed=True),
            )
            for run in runs
            for found in run.paired["top_clusters"]
        ),
    )


def _tokens_table(study: Study, arm: Arm, table_id: str) -> Table:
    order = np.argsort(-arm.rows["kl"].to_numpy(), kind="stable")[:NUM_TOKENS]
    moved = arm.rows.take(pa.array(order)).to_pylist()
    return Table(
        id=table_id,
        caption=f"Positions of `{arm.label}` with the largest KL of all contexts: what came next, and what each side "
        "put first.",
        columns=(
            Column(name="context", numeric=False),
            Column(name="position"),
            Column(name="true token", numeric=False),
            Column(name="reference's first", numeric=False),
            Column(name="its confidence"),
            Column(name="arm's first", numeric=False),
            Column(name="KL"),
            Column(name="ΔNLL"),
            Column(name="change", numeric=False),
        ),
        rows=tuple(
            (
                text_cell(row["context"]),
                count_cell(row["position"]),
                _token_cell(study, row["target"]),
                _token_cell(study, row["top1_ref"]),
                share_cell(row["confidence_ref"], decimals=1),
                _token_cell(study, row["top1_arm"]),
                number_cell(row["kl"]),
                number_cell(row["delta_nll"], signed=True),
                text_cell(KINDS[row["top1"]]),
            )
            for row in moved
        ),
    )


def token_text(texts: Mapping[int, str], token: int) -> str:
    """Show a token: its text with blanks made visible, or its id."""
    if token not in texts:
        return f"#{token}"
    shown = texts[token][:LONGEST_TOKEN] + ("…" if len(texts[token]) > LONGEST_TOKEN else "")
    shown = shown.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("`", "ˋ")
    return shown or f"#{token}"


def _token_cell(study: Study, token: int) -> Cell:
    return Cell(text=f"`{token_text(study.texts, token)}`", value=token, hint=f"id {token}")


def token_viewer(study: Study, lane: str, viewer_id: str) -> TokenViewer:
    """Gather the worst contexts of every variant of a lane, with every arm beside them."""
    contexts: dict[str, TokenContext] = {}
    arms = [arm for arm in study.arms(lane) if arm.role == VARIANT]
    for arm in arms:
        for worst in arm.summary["worst"]:
            contexts.setdefault(worst["context"], _token_context(study, lane, worst))
    return TokenViewer(id=viewer_id, contexts=tuple(contexts.values()), texts=study.texts)


def _token_context(study: Study, lane: str, worst: Mapping[str, Any]) -> TokenContext:
    rows, first = [], None
    for arm in sorted(study.arms(lane), key=lambda arm: arm.role != VARIANT):
        part = arm.rows.filter(pc.equal(arm.rows["context"].cast(pa.string()), worst["context"]))
        columns = {name: part[name].to_pylist() for name in ("kl", "delta_nll", "top1_arm", "top1")}
        first = first or {name: part[name].to_pylist() for name in ("target", "top1_ref", "confidence_ref")}
        rows.append(
            TokenRow(
                arm=arm.label,
                kl=tuple(columns["kl"]),
                delta_nll=tuple(columns["delta_nll"]),
                top1_arm=tuple(columns["top1_arm"]),
                kind=tuple(columns["top1"]),
                likely=_likely(arm, arm.name, worst["context"], part.num_rows),
            )
        )
    if first is None:
        raise ValueError(f"lane {lane} has no arms")
    return TokenContext(
        context=worst["context"],
        stratum=worst["stratum"],
        first=arm.run.first_scored,
        target=tuple(first["target"]),
        top1_ref=tuple(first["top1_ref"]),
        confidence_ref=tuple(first["confidence_ref"]),
        likely_ref=_likely(arm, arm.run.receipt["reference"], worst["context"], len(first["target"])),
        arms=tuple(rows),
    )


def _likely(arm: Arm, side: str, context: str, count: int) -> tuple[Candidates | None, ...]:
    first = arm.run.first_scored
    return tuple(arm.run.candidates.get((side, context, first + index)) for index in range(count))


def shown_tokens(study: Study) -> set[int]:
    """Collect every id that the report would print, so that a tokenizer decodes no more than those."""
    ids: set[int] = set()
    for lane in study.lanes:
        for context in token_viewer(study, lane, "").contexts:
            ids.update(context.target, context.top1_ref, *(row.top1_arm for row in context.arms))
            for likely in (context.likely_ref, *(row.likely for row in context.arms)):
                ids.update(*(found.ids for found in likely if found is not None))
        for arm in study.arms(lane):
            if arm.role == VARIANT:
                order = np.argsort(-arm.rows["kl"].to_numpy(), kind="stable")[:NUM_TOKENS]
                moved = arm.rows.take(pa.array(order))
                ids.update(*(moved[name].to_pylist() for name in ("target", "top1_ref", "top1_arm")))
    return ids

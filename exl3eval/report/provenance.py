"""What a report rests on, what it replaces, and what it does not show: all read from receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from exl3eval.report.document import Block, Column, Items, Notice, Section, Table
from exl3eval.report.numbers import estimate_text, interval_text, text_cell, value_cell
from exl3eval.report.study import UNQUANTIZED_CACHES, Run, Study, decode_rows

MIN_CLUSTERS = 20


def erratum(study: Study) -> Section | None:
    """Say which runs a later one replaces, and what changed; None when nothing was replaced."""
    if not study.superseded:
        return None
    blocks: list[Block] = []
    rows = []
    for pair in study.superseded:
        old, new = pair.old, pair.new
        blocks.append(
            Notice(
                text=f"The run of `{old.variant}` of {old.receipt['created']} ({old.digest[:12]}) is superseded by the "
                f"one of {new.receipt['created']} ({new.digest[:12]}): {_change_words(old, new)}. It is left out of "
                "every other table and figure."
            )
        )
        for run in (old, new):
            rows.append(
                (
                    text_cell(f"`{run.variant}`"),
                    text_cell(run.receipt["created"]),
                    value_cell(run.results["arms"][run.variant]["kl"]),
                    value_cell(run.paired["delta"], signed=True),
                    text_cell(interval_text(run.paired["delta"], signed=True)),
                )
            )
    table = Table(
        id="erratum",
        caption="Figures before and after, nats per position.",
        columns=(
            Column(name="variant", numeric=False),
            Column(name="run of", numeric=False),
            Column(name="mean KL"),
            Column(name="Δ mean KL"),
            Column(name=study.runs[0].interval_name),
        ),
        rows=tuple(rows),
    )
    return Section(id="erratum", title="Erratum", blocks=(*blocks, table))


def _change_words(old: Run, new: Run) -> str:
    if old.digest == new.digest:
        return "every number is the same"
    before, after = (estimate_text(run.results["arms"][run.variant]["kl"]) for run in (old, new))
    changed = [name for name, left, right in _leaves(old.identity, new.identity) if left != right]
    shown = ", ".join(f"`{name}`" for name in changed[:4]) + (
        f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    )
    return f"its mean KL was {before} and is {after} nats; the identities differ in {shown or 'nothing'}"


def _leaves(left: Any, right: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted(left.keys() | right.keys()):
            yield from _leaves(left.get(key), right.get(key), f"{where}.{key}" if where else str(key))
    else:
        yield where, left, right


def provenance(study: Study) -> Section:
    """List everything that may have moved the numbers, run by run."""
    tables = []
    for index, run in enumerate(study.runs, start=1):
        rows = [(text_cell(name), text_cell(f"`{value}`")) for name, value in _facts(run)]
        tables.append(
            Table(
                id=f"provenance-{index}",
                caption=f"Provenance of `{study.title(run)}`.",
                columns=(Column(name="what", numeric=False), Column(name="value", numeric=False)),
                rows=tuple(rows),
            )
        )
    return Section(id="provenance", title="Provenance", blocks=tuple(tables))


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    identity, receipt = run.identity, run.receipt
    code, device = identity["code"], identity["device"]
    yield "created", receipt["created"]
    yield "identity digest", receipt["identity_digest"]
    yield "results digest", receipt["results_digest"]
    yield "positions SHA-256", receipt["positions_sha256"]
    yield "suite", f"{identity['suite']['name']}, {identity['suite']['split']} split, {identity['suite']['digest']}"
    yield "token ids", identity["tokens"]["digest"]
    yield "tokenizer", identity["tokens"]["tokenizer_digest"]
    yield "reference weights SHA-256", identity["arms"][receipt["reference"]]["checkpoint_sha256"]
    for name in dict.fromkeys((run.baseline, run.variant)):
        arm = identity["arms"][name]
        yield f"weights of {name}, SHA-256", arm["checkpoint_sha256"]
        resolved = ", ".join(_field_words(arm["resolved"]))
        yield f"{name} resolved", f"{resolved}, attention {arm['attention']}"
    yield "reference arithmetic", identity["reference_precision"]
    yield "lane", run.lane
    yield "KV cache", identity["kv_cache"] or "none"
    yield "engine", identity["engine"]
    yield "device", ", ".join(f"{key} {value}" for key, value in device.items() if value is not None)
    yield "exl3eval", f"{code['exl3eval']}, source {code['exl3eval_source_sha256'][:16]}"
    yield "exl3_kernels source", code["exl3_kernels_source_sha256"][:16]
    yield "git commit", code["git"]["commit"] or "unknown"
    yield "uncommitted changes", code["git"]["diff_sha256"] or "none"
    yield "python", code["python"]
    yield "packages", ", ".join(f"{name} {version}" for name, version in code["packages"].items() if version)
    yield "seed", identity["seed"]
    yield "resampling", ", ".join(f"{key} {value}" for key, value in receipt["resampling"].items())
    for name, notes in receipt["checkpoint_notes"].items():
        yield f"checkpoint of {name}", "; ".join(notes)


def _field_words(variant: Mapping[str, Any]) -> Iterator[str]:
    for key, value in variant.items():
        if key not in ("name", "doc") and value not in ([], None):
            yield f"{key} {' '.join(value) if isinstance(value, list) else value}"


def limits(study: Study) -> Section:
    """Say what this does not show."""
    return Section(
        id="limits",
        title="What this does not show",
        blocks=(Items(items=tuple(dict.fromkeys(item for run in study.runs for item in _limits(study, run)))),),
    )


def _limits(study: Study, run: Run) -> Iterator[str]:
    identity, delta = run.identity, run.paired["delta"]
    tokens = identity["tokens"]
    if all(decode_rows(lane) is None for lane in study.lanes):
        lanes = " and ".join(study.lanes)
        yield f"Decoding: only the {lanes} lane was scored; routes that serve other row counts did not run."
    if identity["device"]["type"] == "cpu":
        yield "GPU kernels: the arms ran on a CPU."
    else:
        yield f"Other devices than {identity['device']['name']}: kernels and rounding differ between them."
    if not identity["graphs"]:
        yield "Graph replay: the arms ran eagerly."
    if identity["kv_cache"] in UNQUANTIZED_CACHES:
        yield "A quantized KV cache: none was used."
    yield f"Serving: the engine was {identity['engine']}; another engine's fusions, batching and sampling were not run."
    yield (f"Long contexts: each has {tokens['positions_per_context']} scored positions, and nothing beyond was seen.")
    yield "Task quality: a KL divergence says how far a distribution moved, not whether answers got worse."
    yield (
        "A strict zero: differences below the floors listed above cannot be told from the reference's own rounding, "
        "except where arms agree in every bit."
    )
    unknown = sum(estimate["interval"] is None for estimate in run.results["arms"][run.variant]["strata"].values())
    if unknown:
        yield f"Single kinds of text: {unknown} strata of `{study.title(run)}` have too few documents for an interval."
    if delta["num_clusters"] < MIN_CLUSTERS:
        yield f"A trustworthy interval: {delta['num_clusters']} documents are fewer than {MIN_CLUSTERS}."

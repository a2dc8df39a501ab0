"""The order of a report's sections, each a pure function of the study."""

from __future__ import annotations

from collections.abc import Callable

from exl3eval.report.breakdown import by_position, by_stratum, distribution, engagement, memory_speed
from exl3eval.report.difference import floors, paired
from exl3eval.report.document import Document, Section
from exl3eval.report.headline import headline, summary
from exl3eval.report.heads import head_lanes
from exl3eval.report.provenance import erratum, limits, provenance
from exl3eval.report.study import Study
from exl3eval.report.worst import worst_contexts

SECTIONS: tuple[Callable[[Study], Section | None], ...] = (
    summary,
    erratum,
    headline,
    paired,
    head_lanes,
    floors,
    distribution,
    by_stratum,
    by_position,
    worst_contexts,
    engagement,
    memory_speed,
    provenance,
    limits,
)


def build_document(study: Study) -> Document:
    """Assemble every section."""
    first, *_ = study.runs
    tokens, suite = first.identity["tokens"], first.identity["suite"]
    names = ", ".join(dict.fromkeys(f"`{study.label(run)}`" for run in study.runs))
    subject = f" on {study.model_name}" if study.model_name else ""
    return Document(
        title=f"Fidelity of {names}{subject}",
        subtitle=(
            f"{tokens['num_contexts']} contexts × {tokens['positions_per_context']} positions of {suite['name']} "
            f"({suite['split']} split), vocabulary {first.identity['vocabulary']['size']:,}, "
            f"{' and '.join(study.lanes)} lane{'s' if len(study.lanes) > 1 else ''}, {first.identity['device']['name']}"
        ),
        sections=tuple(found for build in SECTIONS if (found := build(study)) is not None),
        receipts=tuple(
            {key: run.receipt[key] for key in ("created", "identity_digest", "results_digest", "positions_sha256")}
            | {"variant": run.variant}
            for run in study.runs
        ),
    )

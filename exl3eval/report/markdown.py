"""Markdown: a page for GitHub, and a model card with the metadata that Hugging Face reads. No local path in either."""

from __future__ import annotations

from collections.abc import Iterator

from huggingface_hub import EvalResult, ModelCardData

from exl3eval.report.document import Block, Document, Figure, Items, Notice, Prose, Section, Table
from exl3eval.report.study import VARIANT, Study

FIGURES = "figures"
FOLDED = frozenset({"strata", "position", "worst", "engagement", "memory", "provenance"})
CARD_SECTIONS = ("summary", "erratum", "headline", "paired", "floors", "limits")
HUB_TAGS = ("exl3", "quantization", "kl-divergence")


def render_markdown(document: Document) -> str:
    """Render a whole report for GitHub; the long sections are folded."""
    lines = [f"# {document.title}", "", document.subtitle, ""]
    for section in document.sections:
        lines += _section(section, folded=section.id in FOLDED)
    return "\n".join([*lines, *_footer(document)])


def render_model_card(document: Document, study: Study, *, base_model: str | None = None) -> str:
    """Render the sections that belong on a model card, under a metadata block with every variant's figures.

    Parameters
    ----------
    document : Document
        The report.
    study : Study
        What it was made from.
    base_model : str or None
        Hub name of the 16-bit model.
    """
    first, *_ = study.runs
    model_name = study.model_name or f"exl3-{first.identity['arms'][first.variant]['checkpoint_sha256'][:12]}"
    metadata = ModelCardData(
        base_model=base_model, tags=list(HUB_TAGS), model_name=model_name, eval_results=list(_eval_results(study))
    )
    lines = ["---", metadata.to_yaml().rstrip(), "---", "", f"# {document.title}", "", document.subtitle, ""]
    for section in document.sections:
        if section.id in CARD_SECTIONS:
            lines += _section(section, folded=False)
    return "\n".join([*lines, *_footer(document)])


def _eval_results(study: Study) -> Iterator[EvalResult]:
    for lane in study.lanes:
        for arm in study.arms(lane):
            if arm.role != VARIANT:
                continue
            suite = arm.run.identity["suite"]
            figures = {
                "mean KL(reference || arm), nats": ("kl_divergence", arm.summary["kl"]["mean"]),
                "p99 KL, nats": ("kl_divergence_p99", arm.tail("p99")["value"]),
                "top-1 agreement": ("top1_agreement", arm.summary["top1_agreement"]),
                "expected acceptance rate": ("expected_acceptance_rate", arm.summary["ear"]),
            }
            for name, (kind, value) in figures.items():
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=suite["name"],
                    dataset_name=f"{suite['name']} ({suite['split']} split)",
                    dataset_args={"digest": suite["digest"], "lane": lane, "variant": arm.label},
                    metric_type=kind,
                    metric_name=f"{name} ({arm.label})",
                    metric_value=value,
                )


def _section(section: Section, *, folded: bool) -> list[str]:
    lines = [f"## {section.title}", ""]
    if folded:
        lines += ["<details>", "<summary>Show</summary>", ""]
    for block in section.blocks:
        lines += _block(block)
    return [*lines, "</details>", ""] if folded else lines


def _block(block: Block) -> list[str]:
    match block:
        case Prose(text=text):
            return [text, ""]
        case Notice(text=text):
            return [f"> **Note** {text}", ""]
        case Items(items=items):
            return [*(f"- {item}" for item in items), ""]
        case Table():
            return _table(block)
        case Figure():
            return _figure(block)
        case _:
            return []


def _table(table: Table) -> list[str]:
    return [
        table.caption,
        "",
        _row([column.name for column in table.columns]),
        _row(["---:" if column.numeric else ":---" for column in table.columns]),
        *(_row([cell.text for cell in row]) for row in table.rows),
        "",
    ]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"


def _figure(figure: Figure) -> list[str]:
    alt = figure.alt.replace('"', "'")
    return [
        "<picture>",
        f'<source media="(prefers-color-scheme: dark)" srcset="{FIGURES}/{figure.id}-dark.png">',
        f'<img src="{FIGURES}/{figure.id}-light.png" width="640" alt="{alt}">',
        "</picture>",
        "",
        figure.caption,
        "",
    ]


def _footer(document: Document) -> list[str]:
    digests = ", ".join(f"`{receipt['results_digest'][:16]}` ({receipt['variant']})" for receipt in document.receipts)
    return [
        "---",
        "",
        f"Made by `exl3eval report` from receipts {digests}; every number was computed again from their positions.",
        "",
    ]

"""Writing a report in the formats asked for; figures are drawn only where a format needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exl3eval.errors import UsageError
from exl3eval.records import write_atomic, write_json
from exl3eval.report.document import Document
from exl3eval.report.reproduce import REPORT_FILE, report_json, write_bundle
from exl3eval.report.sections import build_document
from exl3eval.report.study import Study
from exl3eval.report.worst import shown_tokens

FORMATS = ("md", "html", "tex", "pdf", "json")
NEEDS = {"html": ("jinja2", "matplotlib"), "md": ("matplotlib",), "tex": ("matplotlib",), "pdf": ("fpdf", "matplotlib")}


def parse_formats(text: str) -> tuple[str, ...]:
    """Split a list such as `md,html`.

    Raises
    ------
    UsageError
        If a format is unknown, or a package that it needs is not installed.
    """
    from importlib.util import find_spec

    formats = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in formats:
        if name not in FORMATS:
            raise UsageError(f"--format names {name!r}", hint=f"use any of: {','.join(FORMATS)}")
        if missing := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
            raise UsageError(f"--format {name} needs {' and '.join(missing)}", hint="pip install 'exl3eval[report]'")
    return formats


def decode_tokens(study: Study, tokenizer_dir: Path) -> Study:
    """Give the ids that a report prints their text.

    Raises
    ------
    UsageError
        If the folder holds no tokenizer, or another one than the runs used.
    """
    from transformers import AutoTokenizer

    from exl3eval.engine.vocabulary import read_vocabulary

    expected, found = study.runs[0].identity["vocabulary"]["digest"], read_vocabulary(tokenizer_dir).digest
    if found != expected:
        raise UsageError(
            f"--tokenizer {tokenizer_dir.name} has vocabulary {found[:12]}, the runs {expected[:12]}",
            hint="give the directory of the reference or of the model",
        )
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    texts = {token: str(tokenizer.decode([token])) for token in sorted(shown_tokens(study))}
    return replace(study, texts=texts)


def write_report(
    study: Study, out: Path, *, formats: Sequence[str], base_model: str | None = None, reproduce: bool = False
) -> list[Path]:
    """Write a report.

    Parameters
    ----------
    study : Study
        Verified runs.
    out : Path
        Folder; files of an earlier report in it are replaced.
    formats : sequence of str
        Of `FORMATS`.
    base_model : str or None
        Hub name of the 16-bit model, for the model card.
    reproduce : bool
        Also write the commands, the runs and a check that needs no model.

    Returns
    -------
    list of Path
        What to look at, relative to `out`.

    Raises
    ------
    UsageError
        If the disk refuses a write.
    """
    document = build_document(study)
    written: list[str] = []

    def put(name: str, content: str | bytes) -> None:
        write_atomic(out / name, content)
        written.append(name)

    if "md" in formats:
        from exl3eval.report.markdown import render_markdown, render_model_card

        put("report.md", render_markdown(document))
        put("model-card.md", render_model_card(document, study, base_model=base_model))
    if "html" in formats:
        from exl3eval.report.html import render_html

        put("report.html", render_html(document))
    if "tex" in formats:
        from exl3eval.report.latex import render_latex

        put("paper.tex", render_latex(document))
    if "pdf" in formats:
        from exl3eval.report.pdf import render_pdf

        put("report.pdf", render_pdf(document))
    if "json" in formats:
        write_json(out / REPORT_FILE, report_json(study, document))
        written.append(REPORT_FILE)
    _write_figures(document, out, formats)
    if reproduce:
        write_bundle(study, document, out / "reproduce")
        written.append("reproduce/check.py")
    return [Path(name) for name in written]


def _write_figures(document: Document, out: Path, formats: Sequence[str]) -> None:
    from exl3eval.report.markdown import FIGURES

    light = (("svg", "png") if "md" in formats else ()) + (("pdf",) if "tex" in formats else ())
    dark = ("svg", "png") if "md" in formats else ()
    if not light:
        return
    from exl3eval.report.figures import render_files
    from exl3eval.report.theme import DARK, LIGHT

    for figure in document.figures():
        for look, theme, kinds in (("light", LIGHT, light), ("dark", DARK, dark)):
            for kind, content in render_files(figure, theme, kinds).items() if kinds else ():
                name = f"{figure.id}.pdf" if kind == "pdf" else f"{figure.id}-{look}.{kind}"
                write_atomic(out / FIGURES / name, content)

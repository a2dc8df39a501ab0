"""Files of a report: every format, the bundle that checks itself, the gallery, tokens as text."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.records import digest_file, seal, write_json
from exl3eval.report import candidates
from exl3eval.report.commands import register
from exl3eval.report.document import Cell, Column, Document, Section, Table
from exl3eval.report.gallery import render_gallery
from exl3eval.report.html import render_html
from exl3eval.report.numbers import estimate_text, interval_text, percent, plain
from exl3eval.report.pdf import render_pdf
from exl3eval.report.reproduce import check_bundle
from exl3eval.report.sections import build_document
from exl3eval.report.study import load_study
from exl3eval.report.worst import shown_tokens
from exl3eval.report.write import decode_tokens, parse_formats, write_report

DATA = Path(__file__).parents[1] / "data"
RUN = DATA / "report_run"


@pytest.fixture(scope="module")
def study():
    return load_study([RUN])


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("receipt.json", "positions.parquet", "floors.parquet", "candidates.parquet"):
        shutil.copyfile(RUN / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write_report(study, out, formats=("md", "html", "tex", "pdf", "json"), reproduce=True)
    return out


def test_every_figure_that_markdown_names_exists(written):
    names = re.findall(r'(?:src|srcset)="([^"]+)"', (written / "report.md").read_text(encoding="utf-8"))
    assert len(names) >= 12
    for name in names:
        assert (written / name).read_bytes().startswith(b"\x89PNG")


def test_vector_figures_are_whole_and_use_no_stand_in_colour(written):
    figures = sorted((written / "figures").glob("*.svg"))
    assert len(figures) >= 12
    for path in figures:
        ET.parse(path)
        assert "#0b0c" not in path.read_text(encoding="utf-8")


def test_pdf_has_pages_and_embedded_fonts(written):
    content = (written / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF-") and content.rstrip().endswith(b"%%EOF")
    assert len(re.findall(rb"/Type /Page\b", content)) >= 3
    assert b"DejaVuSans" in content


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no TeX engine on this machine")
def test_latex_compiles(written, tmp_path):
    shutil.copytree(written / "figures", tmp_path / "figures")
    shutil.copyfile(written / "paper.tex", tmp_path / "paper.tex")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 50_000


def test_the_page_is_one_file(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    links = set(re.findall(r"""(?:src|href)=["']([^"']+)""", text))
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_same_runs_give_the_same_bytes(study, written):
    assert render_html(build_document(study)) == (written / "report.html").read_text(encoding="utf-8")


def test_the_bundle_checks_itself_on_a_cpu_without_the_model(written):
    command = [sys.executable, str(written / "reproduce" / "check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d{4} numbers of 1 runs are what the positions give\n", done.stdout)


def test_a_changed_number_of_the_bundle_is_found(written, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(written / "reproduce", bundle)
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    table = next(b for section in report["sections"] for b in section["blocks"] if b.get("id") == "divergence")
    table["rows"][0][1]["value"] *= 1.001
    write_json(bundle / "report.json", report)
    with pytest.raises(InvalidRunError, match="expected"):
        check_bundle(bundle)


def test_commands_name_digests_and_no_path(written):
    script = (written / "reproduce" / "measure.sh").read_text(encoding="utf-8")
    assert "--variant variants/int8-embed.toml --baseline variants/base.toml" in script
    assert "--num-contexts 24 --positions 16" in script
    assert subprocess.run(["sh", "-n"], input=script.encode(), timeout=30).returncode == 0
    from exl3eval.variant import load_variant

    assert load_variant(str(written / "reproduce" / "variants" / "int8-embed.toml")).embedding == "int8"


def test_the_command_line_refuses_an_altered_run(run, tmp_path):
    app = typer.Typer()
    register(app)
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "out"), "--format", "json"])
    assert done.exit_code == 0 and (tmp_path / "out" / "report.json").exists()
    with (run / "positions.parquet").open("ab") as file:
        file.write(b"\0")
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "refused"), "--format", "json"])
    assert isinstance(done.exception, InvalidRunError) and done.exception.exit_code == 4
    assert not (tmp_path / "refused").exists()


def test_unknown_formats_are_named():
    assert parse_formats("md, json,md") == ("md", "json")
    with pytest.raises(UsageError, match="'docx'"):
        parse_formats("md,docx")


def test_tokens_appear_as_text_when_the_tokenizer_is_at_hand(study):
    named = decode_tokens(study, DATA / "qwen2-tied" / "bf16")
    assert set(named.texts) == shown_tokens(study)
    page = render_html(build_document(named))
    assert "⏎" in page and "␣" in page


def test_a_token_cannot_end_the_script_that_carries_it(study):
    token = next(iter(shown_tokens(study)))
    page = render_html(build_document(replace(study, texts={token: "</script><script>alert(1)"})))
    assert "</script><script>alert" not in page


def test_the_gallery_lists_verified_runs(run, tmp_path):
    page = render_gallery(tmp_path)
    assert "| [run](run/receipt.json) | `int8-embed` | `base` | prefill |" in page
    (run / "receipt.json").write_text("{}")
    with pytest.raises(UsageError, match="schema"):
        render_gallery(tmp_path)


def store_candidates(run, *, wrong_first=False):
    """Write lists of two ids for one context, the first of each from the positions."""
    rows = pq.read_table(run / "positions.parquet").to_pylist()
    rows = [row for row in rows if row["context"] == "code-014" and row["arm"] == "int8-embed"]
    records = []
    for row in rows:
        for side, first in (("reference", row["top1_ref"]), ("int8-embed", row["top1_arm"])):
            ids = [first + 1, first] if wrong_first else [first, first + 1]
            records.append(
                {
                    "arm": side,
                    "context": row["context"],
                    "position": row["position"],
                    "ids": ids,
                    "log_probs": [-0.5, -2.0],
                }
            )
    table = pa.Table.from_pylist(records).replace_schema_metadata({"schema": candidates.SCHEMA})
    pq.write_table(table, run / "candidates.parquet")
    receipt = json.loads((run / "receipt.json").read_text())
    write_json(run / "receipt.json", seal(receipt | {"candidates_sha256": digest_file(run / "candidates.parquet")}))


def test_stored_candidates_reach_the_token_viewer(run):
    store_candidates(run)
    loaded = load_study([run])
    assert loaded.runs[0].candidates["reference", "code-014", 3].log_probs == (-0.5, -2.0)
    payload = re.search(r'<script type="application/json">(.*?)</script>', render_html(build_document(loaded)), re.S)
    contexts = {context["name"]: context for context in json.loads(payload[1])["contexts"]}
    assert contexts["code-014"]["likely"][3][1] == [0.6065, 0.1353]
    assert all(
        listed is None for context in contexts.values() if context["name"] != "code-014" for listed in context["likely"]
    )


def test_candidates_that_contradict_the_positions_are_refused(run):
    store_candidates(run, wrong_first=True)
    with pytest.raises(InvalidRunError, match="the positions say"):
        load_study([run])


def test_altered_candidates_are_refused(run):
    store_candidates(run)
    (run / "candidates.parquet").unlink()
    with pytest.raises(InvalidRunError, match="missing or was altered"):
        load_study([run])


def estimate(mean, low, high):
    return {"mean": mean, "interval": {"low": low, "high": high}, "why": ""}


def test_numbers_show_the_digits_that_the_interval_supports():
    found = estimate(0.00522943, 0.00473353, 0.00575048)
    assert (estimate_text(found), interval_text(found)) == ("0.00523", "[0.00473, 0.00575]")
    found = estimate(1.29e-9, 0.8e-9, 1.8e-9)
    assert (estimate_text(found, signed=True), interval_text(found)) == ("+1.29e-09", "[8.00e-10, 1.80e-09]")
    assert interval_text(estimate(1e-4, -1e-9, 2.7e-4), signed=True) == "[0.00000, +0.00027]"
    assert interval_text({"mean": 1.0, "interval": None, "why": "1 cluster"}) == "unknown"
    assert [plain(value) for value in (0.0, 1.0, 123456.0, 2e7, 4e-9)] == [
        "0",
        "1.00",
        "123456",
        "2.00e+07",
        "4.00e-09",
    ]
    assert [percent(value) for value in (0.5, 1e-7, 0.0)] == ["50.00 %", "1.00e-05 %", "0.00 %"]


@pytest.mark.parametrize("length", [1, 40, 400])
def test_pdf_tables_fit_the_page_whatever_they_hold(length):
    columns = tuple(Column(name=f"column {index}") for index in range(9))
    row = tuple(Cell(text=(f"{index} 中" * length)[:length]) for index in range(9))
    table = Table(id="wide", caption="A wide table.", columns=columns, rows=(row, row))
    section = Section(id="one", title="One", blocks=(table,))
    receipt = {"created": "2026-01-01T00:00:00+00:00"}
    document = Document(title="Wide", subtitle="", sections=(section,), receipts=(receipt,))
    assert render_pdf(document).startswith(b"%PDF-")

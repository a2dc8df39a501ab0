"""PDF without a TeX engine: the same pages on every machine, figures as vectors, fonts embedded.

fpdf2 is pure Python, reads matplotlib's SVG as vectors, and needs little more than what matplotlib already brings; the
fonts are the DejaVu files that ship with matplotlib.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exl3eval.report.document import Block, Document, Figure, Items, Notice, Prose, Table
from exl3eval.report.figures import render_files
from exl3eval.report.theme import LIGHT

MARGIN_MM = 18.0
TEXT_PT, SMALL_PT, TABLE_PT = 9.5, 8.0, 7.5
LINE = 1.45
PADDING_MM = 3.6
MAX_LINES, CHARACTER_MM = 30, 2.4
_MM_PER_PT = 25.4 / 72


def render_pdf(document: Document) -> bytes:
    """Render a report as PDF; the same document gives the same bytes with the same package versions."""
    pdf = _open(document)
    _text(pdf, _plain(document.title), size=18, style="B")
    pdf.ln(1)
    _text(pdf, _plain(document.subtitle), size=TEXT_PT, color=LIGHT.muted)
    for section in document.sections:
        if pdf.get_y() > pdf.h - 75:
            pdf.add_page()
        pdf.ln(4)
        pdf.start_section(_plain(section.title))
        _text(pdf, _plain(section.title), size=13, style="B")
        pdf.ln(1.5)
        for block in section.blocks:
            _block(pdf, block)
    return bytes(pdf.output())


def _open(document: Document) -> Any:
    import matplotlib
    from fpdf import FPDF

    class Report(FPDF):
        def footer(self) -> None:
            self.set_y(-12)
            self.set_font("dejavu", size=SMALL_PT)
            self.set_text_color(LIGHT.muted)
            self.cell(0, 5, f"{self.page_no()} / {{nb}}", align="C")

    pdf = Report(format="A4")
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    pdf.add_font("dejavu", "", fonts / "DejaVuSans.ttf")
    pdf.add_font("dejavu", "B", fonts / "DejaVuSans-Bold.ttf")
    pdf.set_margin(MARGIN_MM)
    pdf.set_auto_page_break(True, margin=MARGIN_MM)
    pdf.set_title(_plain(document.title))
    pdf.set_lang("en")
    newest = max(receipt["created"] for receipt in document.receipts)
    pdf.set_creation_date(datetime.fromisoformat(newest).astimezone(UTC))
    pdf.add_page()
    return pdf


def _plain(text: str) -> str:
    return text.replace("`", "")


def _printable(pdf: Any, text: str) -> str:
    """Replace characters that the font has no glyph for by their code points."""
    glyphs = pdf.fonts["dejavu"].cmap
    return "".join(char if ord(char) in glyphs or char == "\n" else f"U+{ord(char):04X}" for char in text)


def _text(pdf: Any, text: str, *, size: float, style: str = "", color: str = LIGHT.ink) -> None:
    pdf.set_font("dejavu", style, size)
    pdf.set_text_color(color)
    pdf.multi_cell(0, size * _MM_PER_PT * LINE, _printable(pdf, text), align="L", new_x="LMARGIN", new_y="NEXT")


def _block(pdf: Any, block: Block) -> None:
    match block:
        case Prose(text=text):
            _text(pdf, _plain(text), size=TEXT_PT)
            pdf.ln(2)
        case Notice(text=text):
            _text(pdf, f"Note. {_plain(text)}", size=TEXT_PT, style="B")
            pdf.ln(2)
        case Items(items=items):
            for item in items:
                _text(pdf, f"•  {_plain(item)}", size=TEXT_PT)
            pdf.ln(2)
        case Table():
            _table(pdf, block)
        case Figure():
            _figure(pdf, block)
        case _:
            pass


def _table(pdf: Any, table: Table) -> None:
    from fpdf.fonts import FontFace

    line = TABLE_PT * _MM_PER_PT * 1.55
    if pdf.get_y() + 4 * line > pdf.h - MARGIN_MM:
        pdf.add_page()
    pdf.ln(1.5)
    _text(pdf, _plain(table.caption), size=SMALL_PT, color=LIGHT.muted)
    pdf.ln(0.8)
    pdf.set_font("dejavu", size=TABLE_PT)
    pdf.set_text_color(LIGHT.ink)
    pdf.set_draw_color(LIGHT.ink)
    pdf.set_line_width(0.2)
    cells = [[_printable(pdf, _plain(cell.text)) for cell in row] for row in table.rows]
    names = [_printable(pdf, _plain(column.name)) for column in table.columns]
    widths = _widths(pdf, names, cells)
    cells = [[_cut(text, width) for text, width in zip(row, widths, strict=True)] for row in cells]
    _rule(pdf, sum(widths))
    with pdf.table(
        col_widths=tuple(widths),
        width=min(sum(widths), pdf.epw),
        align="LEFT",
        text_align=tuple("RIGHT" if column.numeric else "LEFT" for column in table.columns),
        borders_layout="SINGLE_TOP_LINE",
        line_height=line,
        headings_style=FontFace(emphasis="B"),
        padding=(0.3, 0.8),
    ) as drawn:
        for row in (names, *cells):
            drawn.row(row)
    _rule(pdf, sum(widths))
    pdf.ln(3)


def _cut(text: str, width: float) -> str:
    """Keep a row on one page: a text of more than `MAX_LINES` lines ends early; other formats hold it whole."""
    most = int(MAX_LINES * width / CHARACTER_MM)
    return text if len(text) <= most else text[: most - 1] + "…"


def _rule(pdf: Any, width: float) -> None:
    pdf.line(pdf.l_margin, pdf.get_y(), pdf.l_margin + width, pdf.get_y())


def _widths(pdf: Any, names: list[str], cells: list[list[str]]) -> list[float]:
    """Give columns the width of their longest text in mm; the widest give way until the table fits."""
    wanted = []
    for index, name in enumerate(names):
        pdf.set_font("dejavu", "B", TABLE_PT)
        head = pdf.get_string_width(name)
        pdf.set_font("dejavu", "", TABLE_PT)
        wanted.append(max([head, *(pdf.get_string_width(row[index]) for row in cells)]) + PADDING_MM)
    excess = sum(wanted) - pdf.epw
    while excess > 0.01:
        widest = max(wanted)
        second = max((width for width in wanted if width < widest), default=0.0)
        shared = [index for index, width in enumerate(wanted) if width == widest]
        cut = min(widest - second, excess / len(shared))
        for index in shared:
            wanted[index] -= cut
        excess -= cut * len(shared)
    return wanted


def _figure(pdf: Any, figure: Figure) -> None:
    svg = render_files(figure, LIGHT, ("svg",))["svg"]
    width = pdf.epw * 0.86
    height = width * _aspect(svg)
    if height > pdf.eph - 20:
        width, height = width * (pdf.eph - 20) / height, pdf.eph - 20
    if pdf.get_y() + height + 10 > pdf.h - MARGIN_MM:
        pdf.add_page()
    pdf.image(io.BytesIO(svg), w=width, h=height, alt_text=figure.alt)
    pdf.ln(1)
    _text(pdf, _plain(figure.caption), size=SMALL_PT, color=LIGHT.muted)
    pdf.ln(3)


def _aspect(svg: bytes) -> float:
    box = svg[svg.index(b'viewBox="') + 9 :].split(b'"', 1)[0].split()
    return float(box[3]) / float(box[2])

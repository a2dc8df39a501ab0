"""LaTeX: a document of booktabs tables and PDF figures that compiles with pdflatex and can be pasted in pieces."""

from __future__ import annotations

import re

from exl3eval.report.document import Block, Document, Figure, Items, Notice, Prose, Section, Table, split_code

FIGURES = "figures"
LONG_CELL = 48
_PREAMBLE = r"""\documentclass[10pt]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage{textcomp}
\usepackage[margin=2.4cm]{geometry}
\usepackage{booktabs}
\usepackage{graphicx}
\setlength{\parindent}{0pt}
\setlength{\parskip}{0.5em}
% In this document tables and figures stay where they are; pasted elsewhere they float as usual.
\makeatletter
\newenvironment{here}[1]{\par\medskip\noindent\begin{minipage}{\linewidth}\def\@captype{#1}}{\end{minipage}\par\medskip}
\renewenvironment{table}[1][]{\begin{here}{table}}{\end{here}}
\renewenvironment{figure}[1][]{\begin{here}{figure}}{\end{here}}
\makeatother
\newcommand{\fit}[1]{\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{#1}}
"""
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "×": r"$\times$",
    "−": r"$-$",
    "Δ": r"$\Delta$",
    "‖": r"$\|$",
    "…": r"\ldots{}",
    "␣": r"\textvisiblespace{}",
    "⏎": r"$\hookleftarrow$",
    "⇥": r"$\mapsto$",
    "ˋ": r"\textasciigrave{}",
}
_PLAIN_NUMBER = re.compile(r"(?<![\w.])([+-]?\d[\d,]*(?:\.\d+)?)(?:e([+-]\d+))?(?![\w.])")


def render_latex(document: Document) -> str:
    """Render a report as one LaTeX document; figures are read from the folder `figures`."""
    parts = [
        _PREAMBLE,
        rf"\title{{{marked(document.title)}}}",
        rf"\author{{}}\date{{{marked(document.subtitle)}}}",
        r"\begin{document}",
        r"\maketitle",
        *(_section(section) for section in document.sections),
        r"\end{document}",
        "",
    ]
    return "\n".join(parts)


def escape(text: str) -> str:
    """Write text so that LaTeX prints it; characters without a sure glyph appear as U+ code points."""
    return "".join(_SPECIAL.get(char) or (char if " " <= char <= "~" else f"U+{ord(char):04X}") for char in text)


def marked(text: str) -> str:
    """Escape text, with code between backticks in typewriter type and numbers with true signs and powers of ten."""
    return "".join(
        rf"\texttt{{{breakable(piece)}}}" if is_code else _PLAIN_NUMBER.sub(_number, escape(piece))
        for is_code, piece in split_code(text)
    )


def breakable(text: str) -> str:
    """Escape code and let long words break."""
    pieces = re.findall(r"[^\s/:,]{1,16}[/:,]?|[/:,]|\s+", text)
    return r"\allowbreak{}".join(escape(piece) for piece in pieces)


def _number(found: re.Match[str]) -> str:
    digits, exponent = found[1], found[2]
    sign = "$-$" if digits.startswith("-") else "$+$" if digits.startswith("+") else ""
    power = rf"$\times10^{{{int(exponent)}}}$" if exponent else ""
    return f"{sign}{digits.lstrip('+-')}{power}"


def _section(section: Section) -> str:
    return "\n".join(["", rf"\section*{{{marked(section.title)}}}", *(_block(block) for block in section.blocks)])


def _block(block: Block) -> str:
    match block:
        case Prose(text=text):
            return f"{marked(text)}\n"
        case Notice(text=text):
            return f"\\textbf{{Note.}} {marked(text)}\n"
        case Items(items=items):
            return "\n".join([r"\begin{itemize}", *(rf"\item {marked(item)}" for item in items), r"\end{itemize}"])
        case Table():
            return _table(block)
        case Figure():
            return "\n".join(
                [
                    r"\begin{figure}[!htbp]",
                    r"\centering",
                    rf"\includegraphics[width=0.8\linewidth]{{{FIGURES}/{block.id}.pdf}}",
                    rf"\caption{{{marked(block.caption)}}}",
                    rf"\label{{fig:{block.id}}}",
                    r"\end{figure}",
                ]
            )
        case _:
            return ""


def _table(table: Table) -> str:
    long_last = any(len(row[-1].text) > LONG_CELL for row in table.rows)
    spec = "".join("r" if column.numeric else "l" for column in table.columns)
    if long_last:
        spec = spec[:-1] + r"p{0.68\linewidth}"
    body = [
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
        _row([column.name for column in table.columns]),
        r"\midrule",
        *(_row([cell.text for cell in row]) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if not long_last:
        body = [r"\fit{%", *body, "}"]
    return "\n".join(
        [
            r"\begin{table}[!htbp]",
            r"\centering\small",
            rf"\caption{{{marked(table.caption)}}}",
            rf"\label{{tab:{table.id}}}",
            *body,
            r"\end{table}",
        ]
    )


def _row(cells: list[str]) -> str:
    return " & ".join(marked(cell) for cell in cells) + r" \\"

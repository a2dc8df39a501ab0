"""Seeded generators for the kinds of text that packages hardly ship: tool calls, logs, tables, LaTeX, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from training.chats import tool_chat
from training.fetch import Document
from training.words import CITIES, NAMES, NOUNS, PARTS


def log_lines(rng: random.Random) -> str:
    """Render a service log: timestamps that advance, levels, request ids and an occasional traceback."""
    moment = datetime(2020, 1, 1) + timedelta(seconds=rng.randrange(10**8))
    host, style = f"{rng.choice(PARTS)}-{rng.randint(1, 40):02d}", rng.choice(("iso", "syslog", "access", "json"))
    lines: list[str] = []
    for _ in range(rng.randint(30, 90)):
        moment += timedelta(milliseconds=rng.randrange(1, 9000))
        part, took = rng.choice(PARTS), rng.randint(1, 4000)
        address = ".".join(str(rng.randint(1, 254)) for _ in range(4))
        level = rng.choices(("INFO", "DEBUG", "WARN", "ERROR"), (6, 3, 2, 1))[0]
        event = rng.choice(
            (
                f"request {rng.getrandbits(32):08x} finished in {took} ms",
                f"connection from {address} port {rng.randint(1024, 65535)} closed",
                f"retry {rng.randint(1, 5)} for {rng.choice(NOUNS)} {rng.randint(1, 9999)}: timed out after {took} ms",
                f"user {rng.choice(NAMES).lower()} opened {rng.choice(NOUNS)} {rng.randint(1, 9999)}",
                f"queue depth {rng.randint(0, 900)}, {rng.randint(1, 64)} workers busy",
            )
        )
        if style == "iso":
            lines.append(f"{moment.isoformat(timespec='milliseconds')}Z {level:5} [{part}] {event}")
        elif style == "syslog":
            lines.append(f"{moment:%b %d %H:%M:%S} {host} {part}[{rng.randint(200, 32000)}]: {level.lower()}: {event}")
        elif style == "access":
            path = f"/{rng.choice(NOUNS)}s/{rng.randint(1, 9999)}"
            status = rng.choice((200, 200, 200, 204, 304, 404, 500))
            lines.append(f'{address} - - [{moment:%d/%b/%Y:%H:%M:%S} +0000] "GET {path} HTTP/1.1" {status} {took * 7}')
        else:
            lines.append(json.dumps({"ts": moment.isoformat(), "level": level, "part": part, "msg": event}))
        if level == "ERROR" and style == "iso":
            lines.append(f'  File "{part}/{rng.choice(NOUNS)}.py", line {rng.randint(10, 900)}, in {rng.choice(NOUNS)}')
            lines.append(f"{rng.choice(('ValueError', 'TimeoutError', 'KeyError'))}: {rng.choice(NOUNS)}")
    return "\n".join(lines)


def table(rng: random.Random) -> str:
    """Render a Markdown, CSV or aligned table with consistent columns and a total."""
    columns = rng.sample(("city", "owner", "item", "count", "price", "date", "share"), rng.randint(4, 6))
    makers: dict[str, Callable[[], str]] = {
        "city": lambda: rng.choice(CITIES),
        "owner": lambda: rng.choice(NAMES),
        "item": lambda: rng.choice(NOUNS),
        "count": lambda: str(rng.randint(0, 500)),
        "price": lambda: f"{rng.randint(100, 99999) / 100:.2f}",
        "date": lambda: f"{datetime(2018, 1, 1) + timedelta(days=rng.randrange(3000)):%Y-%m-%d}",
        "share": lambda: f"{rng.randint(0, 1000) / 10:.1f} %",
    }
    rows = [[makers[column]() for column in columns] for _ in range(rng.randint(12, 45))]
    style = rng.choice(("markdown", "csv", "aligned"))
    if style == "csv":
        return "\n".join(",".join(row) for row in [columns, *rows])
    if style == "markdown":
        return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in [columns, *rows])


def _polynomial(rng: random.Random, x: str) -> str:
    terms = [f"{rng.randint(2, 19)}{x}^{{{power}}}" for power in range(rng.randint(2, 6), 1, -1)]
    return rng.choice((" + ", " - ")).join([*terms, f"{rng.randint(1, 40)}"])


def latex(rng: random.Random) -> str:
    """Render a LaTeX sheet of worked derivatives, integrals, sums and matrix products."""
    parts = [f"\\section{{{rng.choice(('Exercises', 'Worked problems', 'Notes'))} {rng.randint(1, 60)}}}"]
    for number in range(1, rng.randint(6, 14)):
        x, a, b, n = rng.choice("xtuz"), rng.randint(2, 19), rng.randint(2, 19), rng.randint(2, 9)
        p, q, r, s = (rng.randint(-9, 9) for _ in range(4))
        top, power = a * n, n + 1
        matrix = rf"\begin{{pmatrix}} {p} & {q} \\ {r} & {s} \end{{pmatrix}}"
        body = rng.choice(
            (
                f"Let $f({x}) = {a}{x}^{{{n}}} + {b}{x}$. Then\n\\[ f'({x}) = {top}{x}^{{{n - 1}}} + {b}. \\]",
                rf"\[ \int_0^{{{b}}} {a * power}{x}^{{{n}}} \, d{x} = {a} \cdot {b}^{{{power}}} = {a * b**power} \]",
                rf"\[ \sum_{{k=1}}^{{{top}}} k = \frac{{{top} \cdot {top + 1}}}{{2}} = {top * (top + 1) // 2} \]",
                f"The determinant of ${matrix}$ is ${p * s - q * r}$.",
                rf"Suppose that $g({x}) = {_polynomial(rng, x)}$ is irreducible over $\mathbb{{Q}}$. "
                rf"By the lemma, no root of $g$ lies in $\mathbb{{Z}}$, and $\gcd({a * b}, {top}) \geq {a}$.",
                f"\\begin{{align}}\n  {a}{x} + {b} &= {top + b} \\\\\n  {x} &= {n}\n\\end{{align}}",
            )
        )
        parts.append(rf"\paragraph{{{number}.}} {body}")
    return "\n\n".join(parts)


def json_record(rng: random.Random) -> str:
    """Render a nested JSON record, compact or indented."""
    rows = [
        {
            "id": rng.getrandbits(32),
            "owner": {"name": rng.choice(NAMES), "city": rng.choice(CITIES), "active": rng.random() < 0.7},
            "items": [
                {"sku": f"{rng.choice(NOUNS)}-{rng.randint(1, 999)}", "qty": rng.randint(1, 40)} for _ in range(3)
            ],
            "note": rng.choice((None, f"see {rng.choice(NOUNS)} {rng.randint(1, 99)}")),
            "total": rng.randint(1, 10**6) / 100,
        }
        for _ in range(rng.randint(4, 14))
    ]
    return json.dumps({"kind": rng.choice(NOUNS), "rows": rows}, indent=rng.choice((None, 2)))


GENERATORS: tuple[tuple[str, Callable[[random.Random], str], float], ...] = (
    ("chat", tool_chat, 1.5),
    ("logs", log_lines, 2.5),
    ("tables", table, 2.0),
    ("math", latex, 2.0),
    ("json", json_record, 0.7),
)
"""(family, generator, megabytes)."""


def generate(seed: int, scale: float) -> Iterator[Document]:
    """Yield the synthetic documents of every generator."""
    for family, make, megabytes in GENERATORS:
        rng = random.Random(f"{seed}:{make.__name__}")
        size = number = 0
        while size < megabytes * scale * 1e6:
            text = make(rng)
            yield Document(id=f"synthetic:{make.__name__}/{number}", family=family, text=text)
            size += len(text.encode())
            number += 1

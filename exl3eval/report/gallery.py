"""The index page of a folder of runs: every receipt below it, verified, with its headline and a link to its report."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

from exl3eval.errors import UsageError
from exl3eval.receipt import RECEIPT_FILE
from exl3eval.report.numbers import estimate_text, interval_text
from exl3eval.report.study import Run, load_study

INDEX = "README.md"
REPORT_PAGES = ("report.md", "report.html", "report.pdf")
_HEAD = (
    "| run | variant | baseline | lane | device | contexts | mean KL, nats | Δ mean KL | interval | verdict | report |",
    "| :--- | :--- | :--- | :--- | :--- | ---: | ---: | ---: | ---: | :--- | :--- |",
)


def render_gallery(root: Path, *, executor: Executor | None = None) -> str:
    """Verify every run below a folder and list them, one table per model.

    Raises
    ------
    UsageError
        If there is no run.
    InvalidRunError
        If a run fails verification: a gallery shows no number that it could not compute again.
    """
    folders = sorted(
        path.parent for path in root.rglob(RECEIPT_FILE) if "reproduce" not in path.relative_to(root).parts
    )
    if not folders:
        raise UsageError(f"{root.name} holds no {RECEIPT_FILE}", hint="write runs there with `exl3eval kld --out`")
    groups: dict[str, list[tuple[Path, Run]]] = {}
    for folder in folders:
        run, *_ = load_study([folder], executor=executor).runs
        groups.setdefault(run.identity["arms"][run.variant]["checkpoint_sha256"], []).append((folder, run))
    lines = [
        "# Reports",
        "",
        "Every run below was verified when this page was written: its digests match, and every number of its receipt "
        "was computed again from its positions. Figures of different suites, reference precisions or devices share no "
        "axis.",
        "",
    ]
    for checkpoint, members in groups.items():
        lines += [f"## Model with weights `{checkpoint[:16]}`", "", *_HEAD]
        lines += [_row(root, folder, run) for folder, run in members]
        lines.append("")
    return "\n".join(lines)


def _row(root: Path, folder: Path, run: Run) -> str:
    delta, tokens = run.paired["delta"], run.identity["tokens"]
    same = run.results["comparison"]["identical"]
    cells = (
        f"[{folder.relative_to(root)}]({folder.relative_to(root).as_posix()}/{RECEIPT_FILE})",
        f"`{run.variant}`",
        f"`{run.baseline}`",
        run.lane,
        str(run.identity["device"]["name"]),
        f"{tokens['num_contexts']} × {tokens['positions_per_context'] - tokens.get('first_scored', 0)}",
        estimate_text(run.results["arms"][run.variant]["kl"]),
        "0, every bit" if same else estimate_text(delta, signed=True),
        interval_text(delta, signed=True),
        run.verdict["verdict"]["outcome"] if run.verdict else "not judged",
        " ".join(_pages(root, folder)) or "none",
    )
    return "| " + " | ".join(cells) + " |"


def _pages(root: Path, folder: Path) -> Iterator[str]:
    for name in REPORT_PAGES:
        for place in (folder / name, folder / "report" / name):
            if place.exists():
                yield f"[{name.split('.')[1]}]({place.relative_to(root).as_posix()})"

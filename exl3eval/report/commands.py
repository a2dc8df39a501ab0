"""The verbs `report` and `gallery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(report)
    app.command()(gallery)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of `exl3eval kld --out`.")],
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier report in it is replaced.")],
    formats: Annotated[str, typer.Option("--format", help="Any of md,html,tex,pdf,json.")] = "md,html,json",
    reproduce: Annotated[
        bool, typer.Option("--reproduce", help="Add the commands, the runs and a check that needs no model.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model directory to show tokens as text; default: ids.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model, for titles and the model card.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub name of the 16-bit model, for the model card.")] = None,
) -> None:
    """Write a report of verified runs, to paste into a model card, a pull request or a paper."""
    from concurrent.futures import ThreadPoolExecutor

    from exl3eval.report.study import load_study
    from exl3eval.report.write import decode_tokens, parse_formats, write_report
    from exl3eval.settings import load_settings

    chosen = parse_formats(formats)
    with ThreadPoolExecutor(max_workers=load_settings().num_threads) as pool:
        study = load_study(runs, model_name=model_name, executor=pool)
    if tokenizer is not None:
        study = decode_tokens(study, tokenizer)
    for path in write_report(study, out, formats=chosen, base_model=base_model, reproduce=reproduce):
        print(out / path)


def gallery(
    folder: Annotated[Path, typer.Argument(help="Folder of runs; its README.md is written.")] = Path("reports"),
) -> None:
    """Verify every run below a folder and write its index page."""
    from concurrent.futures import ThreadPoolExecutor

    from exl3eval.records import write_atomic
    from exl3eval.report.gallery import INDEX, render_gallery
    from exl3eval.settings import load_settings

    with ThreadPoolExecutor(max_workers=load_settings().num_threads) as pool:
        page = render_gallery(folder, executor=pool)
    write_atomic(folder / INDEX, page)
    print(folder / INDEX)

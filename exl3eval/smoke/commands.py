"""The verb `smoke`: a thin skin, added to the command line by `register`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exl3eval.console import print_json, print_tables
from exl3eval.errors import EXIT_OK, UsageError


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(smoke)


def smoke(
    variant: Annotated[str, typer.Option(help="What to judge: a name from `exl3eval variants`, or a .toml file.")] = (
        "base"
    ),
    baseline: Annotated[str, typer.Option(help="What it may not fall behind, beside the reference.")] = "base",
    model: Annotated[Path | None, typer.Option(help="EXL3 directory; default: the bundled model.")] = None,
    reference: Annotated[Path | None, typer.Option(help="BF16 directory that --model was made from.")] = None,
    reference_precision: Annotated[
        str, typer.Option(help="Arithmetic of the reference's activations: float32 or bfloat16.")
    ] = "float32",
    suite: Annotated[Path | None, typer.Option(help="Suite folder; default: the shipped one.")] = None,
    num_contexts: Annotated[int, typer.Option(help="Contexts, each with a secret at every depth.")] = 8,
    positions: Annotated[int, typer.Option(help="Ids of every prompt.")] = 256,
    depths: Annotated[str, typer.Option(help="Where secrets are planted, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    steps: Annotated[int, typer.Option(help="Ids decoded after each context.")] = 32,
    allow_lost: Annotated[int, typer.Option(help="Secrets that the variant may lose.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the contexts and the secrets.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the receipt to this new file, JSON.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let transformers run code from the model directories.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Decode with reference, baseline and variant: planted secrets must come back; exit 1 FAIL, 3 INCONCLUSIVE."""
    from exl3eval.progress import TerminalReporter
    from exl3eval.records import write_receipt
    from exl3eval.request import KldRequest
    from exl3eval.settings import load_settings
    from exl3eval.smoke.judge import EXIT_CODES
    from exl3eval.smoke.measure import SmokeRequest, run_smoke
    from exl3eval.smoke.present import receipt_report
    from exl3eval.smoke.receipt import build_receipt

    if out is not None and out.exists():
        raise UsageError(f"{out.name} already exists and is immutable", hint="choose another file")
    settings = load_settings()
    run = run_smoke(
        SmokeRequest(
            models=KldRequest(
                model=model,
                reference=reference,
                variant=variant,
                baseline=baseline,
                suite=suite,
                num_contexts=num_contexts,
                num_positions=positions,
                reference_precision=reference_precision,
                device=device,
                seed=seed,
                trust_remote_code=trust_remote_code,
            ),
            depths=_parse_depths(depths),
            steps=steps,
            allow_lost=allow_lost,
        ),
        cache_dir=settings.cache_dir,
        num_threads=settings.num_threads,
        reporter=TerminalReporter(quiet=quiet),
    )
    receipt = build_receipt(run)
    if out is not None:
        write_receipt(out, receipt)
    if as_json:
        print_json(receipt)
    else:
        print_tables(receipt_report(receipt))
    if EXIT_CODES[run.verdict.outcome] != EXIT_OK:
        raise typer.Exit(EXIT_CODES[run.verdict.outcome])


def _parse_depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--depths is {text!r}", hint="give numbers from 0 to 1, such as 0,0.5,1") from error

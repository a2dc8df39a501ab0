"""The verb `memory`: a thin skin, added to the command line by `register`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exl3eval.errors import EXIT_FAIL, UsageError


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(memory)


def memory(
    model: Annotated[Path | None, typer.Option(help="EXL3 or 16-bit directory; default: the bundled model.")] = None,
    variant: Annotated[str, typer.Option(help="A name from `exl3eval variants`, or a .toml file.")] = "base",
    activations: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16, in place of the variant's.")
    ] = None,
    positions: Annotated[int, typer.Option(help="Tokens prefilled per context.")] = 512,
    decode_positions: Annotated[int, typer.Option(help="Tokens decoded one at a time after the prefill.")] = 32,
    rows: Annotated[int, typer.Option(help="Contexts side by side.")] = 1,
    budget: Annotated[
        float | None, typer.Option(help="GiB that the allocator may reserve: a hard cap of ours, not the card's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the receipt to this new file, JSON.")] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier receipt to subtract.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let transformers run code from the model directory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure what an arm stores, holds and needs at its peak, phase by phase; exit 1 if memory runs out."""
    from dataclasses import asdict

    from exl3eval.memory.measure import MemoryRequest, measure_memory
    from exl3eval.memory.present import difference_report, receipt_report
    from exl3eval.memory.receipt import build_receipt, compare_receipts, read_receipt
    from exl3eval.progress import TerminalReporter
    from exl3eval.records import write_receipt
    from exl3eval.settings import load_settings

    if out is not None and out.exists():
        raise UsageError(f"{out.name} already exists and is immutable", hint="choose another file")
    earlier = None if against is None else read_receipt(against)
    run = measure_memory(
        MemoryRequest(
            model=model,
            variant=variant,
            activations=activations,
            positions=positions,
            decode_positions=decode_positions,
            rows=rows,
            budget=None if budget is None else int(budget * (1 << 30)),
            device=device,
            trust_remote_code=trust_remote_code,
        ),
        num_threads=load_settings().num_threads,
        reporter=TerminalReporter(quiet=quiet),
    )
    receipt = build_receipt(run)
    if out is not None:
        write_receipt(out, receipt)
    differences = None if earlier is None else compare_receipts(earlier, receipt)
    if as_json:
        _print_json(receipt if differences is None else {**receipt, "differences": [asdict(d) for d in differences]})
    else:
        _print(receipt_report(receipt))
        if differences is not None and against is not None:
            _print(difference_report(differences, against=against.stem))
    if not run.outcome.fits:
        raise typer.Exit(EXIT_FAIL)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False))


def _print(renderable: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(renderable, highlight=False)

"""The verb `memory`: a thin skin, added to the command line by `register`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from exl3eval.console import print_json, print_tables
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
    engine: Annotated[str, typer.Option(help="What runs the arm: transformers, or vllm as it serves.")] = (
        "transformers"
    ),
    positions: Annotated[int | None, typer.Option(help="Tokens prefilled per context; default 512.")] = None,
    decode_positions: Annotated[
        int | None, typer.Option(help="Tokens decoded one at a time after the prefill; default 32.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Contexts side by side; default 1.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="GiB that the allocator may reserve: a hard cap of ours, not the card's.")
    ] = None,
    engine_budget: Annotated[
        float | None, typer.Option(help="Under vLLM: its gpu_memory_utilization, planned with only; default 0.9.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Under vLLM: longest request in tokens, which the probes fill; default 2048.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Under vLLM: requests that it prepares for side by side; default 8.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the receipt to this new file, JSON.")] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier receipt to subtract; not under vLLM.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let transformers run code from the model directory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure what an arm stores, holds and needs at its peak, phase by phase; exit 1 if memory runs out."""
    from exl3eval.progress import TerminalReporter
    from exl3eval.records import write_receipt
    from exl3eval.request import VLLM
    from exl3eval.settings import load_settings

    workload = {"positions": positions, "decode_positions": decode_positions, "rows": rows}
    serving = {"engine_budget": engine_budget, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    _check_engine(engine, own=workload | {"against": against}, served=serving)
    if out is not None and out.exists():
        raise UsageError(f"{out.name} already exists and is immutable", hint="choose another file")
    settings, reporter = load_settings(), TerminalReporter(quiet=quiet)
    cap = None if budget is None else int(budget * (1 << 30))
    common: dict[str, Any] = {
        "model": model,
        "variant": variant,
        "activations": activations,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    differences: list[dict[str, Any]] | None = None
    if engine == VLLM:
        from exl3eval.memory.present import served_report
        from exl3eval.memory.served import ServedRequest, build_served_receipt, measure_served

        served = measure_served(ServedRequest(**common, **_given(serving), hard_cap=cap), settings, reporter=reporter)
        receipt, fits = build_served_receipt(served), served.fits
        report = [served_report(receipt)]
    else:
        from dataclasses import asdict

        from exl3eval.memory.measure import MemoryRequest, measure_memory
        from exl3eval.memory.present import difference_report, receipt_report
        from exl3eval.memory.receipt import build_receipt, compare_receipts, read_receipt

        earlier = None if against is None else read_receipt(against)
        run = measure_memory(
            MemoryRequest(**common, **_given(workload), budget=cap),
            num_threads=settings.num_threads,
            reporter=reporter,
        )
        receipt, fits = build_receipt(run), run.outcome.fits
        report = [receipt_report(receipt)]
        if earlier is not None and against is not None:
            found = compare_receipts(earlier, receipt)
            differences = [asdict(each) for each in found]
            report.append(difference_report(found, against=against.stem))
    if out is not None:
        write_receipt(out, receipt)
    if as_json:
        print_json(receipt if differences is None else {**receipt, "differences": differences})
    else:
        for part in report:
            print_tables(part)
    if not fits:
        raise typer.Exit(EXIT_FAIL)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_engine(engine: str, *, own: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Refuse an engine that does not exist, and options of the engine that was not asked for."""
    from exl3eval.request import ENGINES, VLLM

    if engine not in ENGINES:
        raise UsageError(f"--engine is {engine!r}", hint=f"use {' or '.join(ENGINES)}")
    foreign, whose, hint = (
        (own, "for arms under transformers", "leave it out: under vLLM --max-model-len sizes the requests")
        if engine == VLLM
        else (served, "for arms under vLLM", "add --engine vllm")
    )
    for name in _given(foreign):
        raise UsageError(f"--{name.replace('_', '-')} is {whose}", hint=hint)

"""The command line: one function per verb, each a thin skin over one function of the package.

stdout is data, stderr is talk. Exit codes: 0 ok, 1 FAIL, 2 usage or environment, 3 INCONCLUSIVE, 4 INVALID.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from exl3eval import __version__
from exl3eval.console import print_json, print_tables
from exl3eval.errors import EXIT_USAGE, Exl3EvalError
from exl3eval.gate import commands as gate_commands
from exl3eval.kernel_bench import commands as bench_commands
from exl3eval.kernel_check import commands as check_commands
from exl3eval.memory import commands as memory_commands
from exl3eval.report import commands as report_commands
from exl3eval.smoke import commands as smoke_commands

EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Did this EXL3 kernel or quantizer change the model, by how much, and can I ship it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
contexts_app = typer.Typer(help="The held-out contexts.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(contexts_app, name="contexts")
kernels_app = typer.Typer(help="The kernel stack.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kernels_app, name="kernels")
gate_commands.register(app)
bench_commands.register(kernels_app)
check_commands.register(kernels_app)
report_commands.register(app)
memory_commands.register(app)
smoke_commands.register(app)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def main() -> None:
    """Run the command line; errors a user can fix are one line, never a traceback."""
    try:
        app()
    except Exl3EvalError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:  # the command line library turns an interrupt into this
            print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise


def _show_version(value: bool) -> None:
    if value:
        print(f"exl3eval {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def kld(
    variant: Annotated[str, typer.Option(help="What to measure: a name from `exl3eval variants`, or a .toml file.")] = (
        "base"
    ),
    baseline: Annotated[str, typer.Option(help="What to compare it with, context by context.")] = "base",
    model: Annotated[Path | None, typer.Option(help="EXL3 directory; default: the bundled model.")] = None,
    reference: Annotated[Path | None, typer.Option(help="BF16 directory that --model was made from.")] = None,
    reference_precision: Annotated[
        str, typer.Option(help="Arithmetic of the reference's activations: float32 or bfloat16.")
    ] = "float32",
    suite: Annotated[Path | None, typer.Option(help="Suite folder; default: the shipped one.")] = None,
    split: Annotated[str, typer.Option(help="analysis, or the sealed qualification split.")] = "analysis",
    num_contexts: Annotated[int | None, typer.Option(help="A balanced subset of this size; default: all.")] = None,
    positions: Annotated[
        int | None,
        typer.Option(help="Scored predictions per context; default: 512, or 128 where vLLM runs on a CPU."),
    ] = None,
    lane: Annotated[
        list[str] | None, typer.Option(help="prefill (default), chunked or decode; may be given several times.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Decode lanes: contexts per forward, such as 1,4,16; default: 1 to 16 and both sides of every "
            "threshold at which the variants change routes."
        ),
    ] = None,
    chunks: Annotated[
        str | None, typer.Option(help="Chunked lanes: tokens per forward, such as 64,256; default: 128.")
    ] = None,
    decode_positions: Annotated[
        int | None, typer.Option(help="Decode lanes: positions scored after the prefix; default: 64.")
    ] = None,
    shared_head: Annotated[
        bool, typer.Option("--shared-head", help="Score both arms through the reference's head as well.")
    ] = False,
    engine: Annotated[str, typer.Option(help="What runs the arms: transformers, or vllm as it serves.")] = (
        "transformers"
    ),
    reference_engine: Annotated[
        str, typer.Option(help="Under vLLM: what runs the reference; transformers adds the floor between engines.")
    ] = "",
    compiled: Annotated[bool, typer.Option("--compile", help="Under vLLM: arms run under torch.compile.")] = False,
    decode_style: Annotated[
        str, typer.Option(help="Under vLLM, decode lanes: one-token, or forced through the sampler.")
    ] = "one-token",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the context order and of resampling.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write receipt.json and positions.parquet here; a folder per lane if several.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore captures of earlier runs.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let transformers run code from the model directories.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure exact KL(reference || arm) of a variant and its baseline, with intervals."""
    from exl3eval.engine.lanes import parse_integers, parse_lanes
    from exl3eval.present import receipt_tables
    from exl3eval.progress import TerminalReporter
    from exl3eval.receipt import build_receipt, check_output_folder, write_run
    from exl3eval.request import KldRequest, decode_rows, default_positions
    from exl3eval.run import run_kld
    from exl3eval.settings import load_settings

    settings = load_settings()
    kinds = lane or ["prefill"]
    counts = parse_integers(rows, "--rows") if rows is not None else None
    if counts is None and "decode" in kinds:
        counts = decode_rows(model, (baseline, variant), device)
    lanes = parse_lanes(kinds, rows=counts, chunks=chunks, decode_positions=decode_positions)
    folders = {each.name: out if out is None or len(lanes) == 1 else out / each.slug for each in lanes}
    for folder in folders.values():
        if folder is not None:
            check_output_folder(folder)
    request = KldRequest(
        model=model,
        reference=reference,
        variant=variant,
        baseline=baseline,
        suite=suite,
        split=split,
        num_contexts=num_contexts,
        num_positions=default_positions(engine, device) if positions is None else positions,
        reference_precision=reference_precision,
        lanes=tuple(lanes),
        shared_head=shared_head,
        engine=engine,
        reference_engine=reference_engine,
        compiled=compiled,
        decode_style=decode_style,
        device=device,
        seed=seed,
        trust_remote_code=trust_remote_code,
        fresh=fresh,
    )
    runs = run_kld(request, settings=settings, reporter=TerminalReporter(quiet=quiet))
    receipts = []
    for run in runs:
        folder = folders[run.lane.name]
        receipts.append(write_run(folder, run) if folder is not None else build_receipt(run))
        if not as_json:
            print_tables(receipt_tables(receipts[-1]))
    if as_json:
        print_json(receipts[0] if len(receipts) == 1 else receipts)


@app.command()
def verify(
    place: Annotated[
        Path, typer.Argument(help="A folder written by `exl3eval kld --out`, a receipt, or many of them.")
    ],
) -> None:
    """Check every digest, and compute every number of a run again from its positions; needs no model."""
    from concurrent.futures import ThreadPoolExecutor

    from exl3eval.settings import load_settings
    from exl3eval.verify import find_receipts, verify_place

    with ThreadPoolExecutor(max_workers=load_settings().num_threads) as pool:
        found = {each: verify_place(each, executor=pool) for each in find_receipts(place)}
    if list(found) == [place]:
        print_json(found[place])
    else:
        print_json({each.relative_to(place).as_posix(): result for each, result in found.items()})


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(help="The run taken as baseline.")],
    right: Annotated[Path, typer.Argument(help="The run compared with it.")],
    declare: Annotated[
        list[str] | None, typer.Option(help="A field of the identity that may differ, such as identity.device.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pair the variants of two runs; anything that differs and is not declared refuses the comparison."""
    from dataclasses import asdict

    from exl3eval.crossrun import StoredRun, compare_runs
    from exl3eval.present import paired_table, rows_table
    from exl3eval.verify import verify_run

    runs = [StoredRun(receipt=receipt, arms=arms) for receipt, arms in (verify_run(left), verify_run(right))]
    differences, comparison = compare_runs(runs[0], runs[1], declared=declare or [])
    if as_json:
        print_json({"differences": [asdict(d) for d in differences], "comparison": asdict(comparison)})
        return
    if differences:
        rows = [(d.field, str(d.left), str(d.right)) for d in differences]
        print_tables(rows_table(("declared difference", left.name, right.name), rows))
    print_tables(paired_table(asdict(comparison)))


@app.command()
def inspect(directory: Annotated[Path, typer.Argument(help="A model directory.")], as_json: Json = False) -> None:
    """Show what a checkpoint holds: bits, codebook, shape and bytes per module, and totals."""
    from exl3eval.checkpoint.directory import open_checkpoint
    from exl3eval.checkpoint.inspect import inventory, inventory_json
    from exl3eval.present import inventory_report

    found = inventory(open_checkpoint(directory))
    if as_json:
        print_json(inventory_json(found))
    else:
        print_tables(inventory_report(found))


@app.command()
def variants(as_json: Json = False) -> None:
    """List the shipped variants and what each changes."""
    from exl3eval.present import rows_table
    from exl3eval.variant import shipped_variants

    shipped = shipped_variants()
    if as_json:
        print_json([variant.identity for variant in shipped.values()])
        return
    rows = [(v.name, v.activations, v.linear, v.embedding, v.doc) for v in shipped.values()]
    print_tables(rows_table(("variant", "activations", "linear", "embedding", "what it changes"), rows))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can run and what is missing; exit 2 if the main job cannot run."""
    from exl3eval.doctor import examine_machine
    from exl3eval.present import rows_table
    from exl3eval.settings import load_settings

    checks = examine_machine(load_settings())
    if as_json:
        print_json([{"name": c.name, "ok": c.ok, "required": c.required, "finding": c.finding} for c in checks])
    else:
        rows = [(c.name, "ok" if c.ok else "missing" if c.required else "-", c.finding) for c in checks]
        print_tables(rows_table(("check", "", "finding"), rows))
    if any(check.required and not check.ok for check in checks):
        raise typer.Exit(EXIT_USAGE)


@app.command()
def quantize(
    model: Annotated[Path, typer.Option(help="16-bit Hugging Face directory.")],
    out: Annotated[Path, typer.Option(help="New EXL3 directory.")],
    bits: Annotated[float, typer.Option(help="Average bits per body weight, 2 to 8; fractions mix widths.")] = 4.0,
    head_bits: Annotated[int, typer.Option(help="Bits of the output head, 1 to 8, or 16 to leave it.")] = 6,
    codebook: Annotated[str, typer.Option(help="mcg, mul1 or 3inst.")] = "mcg",
    calibration: Annotated[
        Path | None, typer.Option(help="Text file or folder to calibrate on; default: text that the model samples.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Calibration rows.")] = 64,
    columns: Annotated[int, typer.Option(help="Tokens per calibration row.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of signs and sampling.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Quantize a 16-bit model to EXL3."""
    from exl3eval.engine.device import resolve_device
    from exl3eval.progress import TerminalReporter
    from exl3eval.quantizer.quantize import QuantizeRequest, quantize_model
    from exl3eval.settings import load_settings

    settings = load_settings()
    summary = quantize_model(
        QuantizeRequest(
            model=model,
            out=out,
            bits=bits,
            head_bits=head_bits,
            codebook=codebook,
            calibration=calibration,
            rows=rows,
            columns=columns,
            seed=seed,
        ),
        device=resolve_device(device),
        num_threads=settings.num_threads,
        reporter=TerminalReporter(quiet=quiet),
    )
    print_json(summary)


@contexts_app.command("list")
def list_contexts(
    suite: Annotated[Path | None, typer.Option(help="Suite folder; default: the shipped one.")] = None,
    as_json: Json = False,
) -> None:
    """List the documents of a suite's analysis split."""
    from exl3eval.present import rows_table
    from exl3eval.suite.context import list_rows
    from exl3eval.suite.load import load_suite

    loaded = load_suite(suite)
    rows = list_rows(loaded)
    if as_json:
        print_json(rows)
        return
    columns = ("id", "stratum", "language", "licence", "chars", "source")
    cells = [[str(row[column]) for column in columns] for row in rows]
    print_tables(rows_table(columns, cells, title=f"{loaded.name}: {len(rows)} documents, digest {loaded.digest[:16]}"))


@contexts_app.command("verify")
def verify_contexts(
    suite: Annotated[Path | None, typer.Option(help="Suite folder; default: the shipped one.")] = None,
) -> None:
    """Recompute every digest, count and minimum, and scan again for contamination and duplicates."""
    from dataclasses import asdict

    from exl3eval.suite.load import verify_suite

    print_json(asdict(verify_suite(suite)))


@contexts_app.command("build")
def build_contexts(
    recipe: Annotated[Path, typer.Argument(help="Recipe (.toml) naming packages, patterns, strata and counts.")],
    out: Annotated[Path, typer.Argument(help="Suite folder to write.")],
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of .xz calibration texts; default: the index beside the recipe.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Folder for fetched packages; default: in the cache.")] = None,
) -> None:
    """Build a suite from packages fetched by name (needs the package registries)."""
    from exl3eval.settings import load_settings
    from exl3eval.suite.build import build_suite

    work_dir = work or load_settings().cache_dir / "sources"
    suite = build_suite(recipe, out, work_dir=work_dir, calibration_dir=calibration)
    print_json({"name": suite.name, "digest": suite.digest, "analysis": len(suite.contexts)})

"""The gate's commands: thin skins, added to the main application by `register`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from exl3eval.console import print_json, print_tables
from exl3eval.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
PolicyName = Annotated[str, typer.Option("--policy", help="A shipped policy's name, or a .toml file.")]
Ledger = Annotated[Path, typer.Option(help="Where verdicts and policies are recorded.")]
Store = Annotated[Path, typer.Option(help="Folder of baselines.")]
SuiteFolder = Annotated[Path | None, typer.Option(help="Suite folder of the runs; default: the shipped one if it is.")]
Arm = Annotated[str | None, typer.Option(help="Arm of the run; default: its variant.")]
LEDGER, STORE = Path("reports/ledger.sqlite"), Path("reports/baselines")

baseline_app = typer.Typer(
    help="What arms read when a person blessed them.", no_args_is_help=True, rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add `gate`, `power`, `history`, `import-foreign` and `baseline` to an application."""
    app.command()(gate)
    app.command()(power)
    app.command()(history)
    app.command("import-foreign")(import_foreign)
    app.add_typer(baseline_app, name="baseline")


def gate(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Folders of `exl3eval kld --out`, one variant each.")
    ] = None,
    policy: PolicyName = "default",
    suite: SuiteFolder = None,
    ledger: Ledger = LEDGER,
    out: Annotated[
        Path | None, typer.Option(help="Write verdict.json, junit.xml, summary.md, badge.svg and badge.json here.")
    ] = None,
    summary: Annotated[Path | None, typer.Option(help="Append the Markdown summary to this file (a CI's).")] = None,
    github: Annotated[bool, typer.Option("--github", help="Print GitHub annotations on stderr.")] = False,
    exploratory: Annotated[bool, typer.Option("--exploratory", help="List refusals without applying them.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="No RUN: measure 32 contexts now and judge them by policy `quick`.")
    ] = False,
    variant: Annotated[str, typer.Option(help="With --quick: what to measure against `base`.")] = "base",
    as_json: Json = False,
) -> None:
    """Decide whether a variant may ship: exit 0 PASS, 1 FAIL, 2 usage, 3 INCONCLUSIVE, 4 INVALID."""
    from exl3eval.gate.judge import GateRequest, judge, suite_at_hand
    from exl3eval.gate.ledger import utc_now
    from exl3eval.gate.outputs import github_annotations, summary_markdown, write_outputs
    from exl3eval.gate.policy import load_policy
    from exl3eval.gate.present import verdict_tables

    if bool(runs) == quick:
        raise UsageError("give one or more RUN folders, or --quick", hint="`exl3eval kld --out RUN` makes one")
    with _quick_run(variant) if quick else _given(runs or []) as folders, _threads() as pool:
        name = "quick" if quick and policy == "default" else policy
        request = GateRequest(
            folders=folders,
            policy=load_policy(name),
            policy_file=Path(name) if name.endswith(".toml") else None,
            ledger=ledger,
            suite=suite_at_hand(folders[0], suite),
            exploratory=exploratory,
        )
        record = judge(request, now=utc_now(), executor=pool)
    if out is not None:
        write_outputs(out, record)
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(summary_markdown(record))
    if github:
        print("\n".join(github_annotations(record)), file=sys.stderr)
    _show(record, verdict_tables(record), as_json)
    raise typer.Exit(record["verdict"]["exit_code"])


def power(
    run: Annotated[Path, typer.Argument(help="A run of a similar change: its paired variance is used.")],
    policy: PolicyName = "default",
    margin: Annotated[float | None, typer.Option(help="Margin of the mean in nats, in place of the policy's.")] = None,
    contexts: Annotated[list[int] | None, typer.Option(help="A number of contexts to study; repeatable.")] = None,
    ledger: Ledger = LEDGER,
    as_json: Json = False,
) -> None:
    """Say how many contexts a policy's margins need, and declare the policy in the ledger."""
    from exl3eval.gate.design import SIZES, study_design
    from exl3eval.gate.evidence import read_run
    from exl3eval.gate.ledger import open_ledger, register_policy, utc_now
    from exl3eval.gate.policy import load_policy
    from exl3eval.gate.present import power_table

    if (margin is not None and not margin > 0.0) or any(size < 2 for size in contexts or ()):
        raise UsageError(
            f"--margin is {margin}, --contexts {contexts}", hint="a positive margin and sizes of 2 or more"
        )
    rule = load_policy(policy)
    with open_ledger(ledger) as connection:
        register_policy(connection, rule, now=utc_now())
    with _threads() as pool:
        study = study_design(read_run(run), rule, sizes=tuple(contexts or SIZES), mean_margin=margin, executor=pool)
    _show(study, power_table(study), as_json)


def history(
    variant: Annotated[str | None, typer.Option(help="Only verdicts on this variant.")] = None,
    suite: Annotated[str | None, typer.Option(help="Only this suite (start of its digest).")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only PASS, FAIL, INCONCLUSIVE or INVALID.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only this policy (name).")] = None,
    endpoint: Annotated[str, typer.Option(help="Endpoint of the trend.")] = "mean",
    svg: Annotated[Path | None, typer.Option(help="Folder for one trend plot per variant.")] = None,
    ledger: Ledger = LEDGER,
    as_json: Json = False,
) -> None:
    """List verdicts, show trends and change points, and count how often each suite was used to decide."""
    from exl3eval.gate.ledger import count_suite_uses, list_verdicts, open_ledger
    from exl3eval.gate.present import history_tables
    from exl3eval.gate.trend import collect_series, trend_svg
    from exl3eval.records import write_atomic

    if not ledger.is_file():
        raise UsageError(f"there is no ledger {ledger.name}", hint="`exl3eval gate` starts one; or give --ledger")
    with open_ledger(ledger) as connection:
        entries = list_verdicts(connection, variant=variant, suite=suite, outcome=outcome, policy=policy)
        uses = count_suite_uses(connection)
    series = collect_series(entries, endpoint=endpoint)
    if svg is not None:
        for number, one in enumerate(series, start=1):
            write_atomic(svg / f"trend-{number:02d}.svg", trend_svg(one))
    record = {
        "schema": "exl3eval/history/1",
        "verdicts": [{"id": entry.id, **entry.record} for entry in entries],
        "series": [asdict(one) for one in series],
        "suite_uses": [asdict(use) for use in uses],
    }
    _show(record, history_tables(entries, series, uses), as_json)


def import_foreign(
    file: Annotated[Path, typer.Argument(help="A llama.cpp .kld file, or per-context rows as JSON or JSON lines.")],
    out: Annotated[Path, typer.Option(help="New folder for foreign.json.")],
    form: Annotated[str, typer.Option("--format", help="llama-kld or rows.")] = "rows",
    against: Annotated[Path | None, typer.Option(help="llama-kld: the candidate's file over the same tokens.")] = None,
    value_key: Annotated[str, typer.Option(help="rows: field of the figure.")] = "kl",
    context_key: Annotated[str, typer.Option(help="rows: field of the context's name.")] = "context",
    cluster_key: Annotated[str, typer.Option(help="rows: field of the source document; empty if unknown.")] = "",
    as_json: Json = False,
) -> None:
    """Import another tool's numbers, labelled as such; no gate accepts them."""
    from exl3eval.gate.foreign import FORMATS, RowKeys, import_llama, import_rows, write_foreign
    from exl3eval.gate.ledger import utc_now
    from exl3eval.gate.present import foreign_table

    if form not in FORMATS:
        raise UsageError(f"--format is {form!r}", hint=f"use one of: {', '.join(FORMATS)}")
    if form == "llama-kld":
        record = import_llama(file, against, now=utc_now())
    else:
        keys = RowKeys(value=value_key, context=context_key, cluster=cluster_key)
        record = import_rows(file, keys, now=utc_now())
    write_foreign(out, record)
    _show(record, foreign_table(record), as_json)


@baseline_app.command("check")
def baseline_check(
    run: Annotated[Path, typer.Argument(help="A run, or a speed record (.json).")],
    arm: Arm = None,
    policy: PolicyName = "default",
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """Hold a run or a speed record against its newest baseline; changes nothing."""
    from exl3eval.gate.baseline import check, check_json
    from exl3eval.gate.evidence import read_run
    from exl3eval.gate.ledger import utc_now
    from exl3eval.gate.policy import load_policy
    from exl3eval.gate.present import check_tables, speed_table
    from exl3eval.gate.speed import check_speed, read_speed
    from exl3eval.gate.verdict import worst

    if run.suffix == ".json":
        cells = check_speed(store, read_speed(run))
        record = {"schema": "exl3eval/speed-check/1", "cells": [asdict(cell) for cell in cells]}
        _show(record, speed_table(cells), as_json)
        raise typer.Exit(worst(cell.outcome for cell in cells).exit_code)
    evidence, rule = read_run(run), load_policy(policy)
    with _threads() as pool:
        found = check(store, evidence, arm or evidence.variant.arm, rule, today=utc_now().date(), executor=pool)
    _show(check_json(found), check_tables(found), as_json)
    raise typer.Exit(found.exit_code)


@baseline_app.command("bless")
def baseline_bless(
    run: Annotated[Path, typer.Argument(help="A run, or a speed record (.json).")],
    who: Annotated[str, typer.Option(help="Who vouches for it.")],
    why: Annotated[str, typer.Option(help="Why it is right.")],
    arm: Arm = None,
    status: Annotated[str, typer.Option(help="good, waived or known-broken.")] = "good",
    until: Annotated[str | None, typer.Option(help="waived: its last day, YYYY-MM-DD.")] = None,
    store: Store = STORE,
) -> None:
    """Add a baseline: a person's decision, recorded with name and reason, never made by a check."""
    from exl3eval.gate.baseline import Blessing, bless
    from exl3eval.gate.evidence import read_run
    from exl3eval.gate.ledger import utc_now
    from exl3eval.gate.speed import bless_speed, read_speed

    if run.suffix == ".json":
        if arm or until or status != "good":
            raise UsageError("a speed record has no arm, status or waiver", hint="give --who and --why alone")
        print(bless_speed(store, read_speed(run), who=who, why=why, now=utc_now()))
        return
    try:
        last_day = date.fromisoformat(until) if until else None
    except ValueError as error:
        raise UsageError(f"--until is {until!r}", hint="write a day as YYYY-MM-DD") from error
    blessing = Blessing(who=who, why=why, status=status, until=last_day)
    evidence = read_run(run)
    print(bless(store, run, evidence, arm or evidence.variant.arm, blessing, now=utc_now()).digest)


@contextmanager
def _given(folders: list[Path]) -> Iterator[list[Path]]:
    yield folders


@contextmanager
def _quick_run(variant: str) -> Iterator[list[Path]]:
    """Measure a small run of the bundled model into a temporary folder."""
    from exl3eval.progress import TerminalReporter
    from exl3eval.receipt import write_run
    from exl3eval.request import KldRequest
    from exl3eval.run import run_kld
    from exl3eval.settings import load_settings

    request = KldRequest(variant=variant, num_contexts=32, num_positions=64)
    (run,) = run_kld(request, settings=load_settings(), reporter=TerminalReporter(quiet=True))
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), run)
        yield [Path(folder)]


@contextmanager
def _threads() -> Iterator[Executor]:
    from exl3eval.settings import load_settings

    with ThreadPoolExecutor(max_workers=load_settings().num_threads) as pool:
        yield pool


def _show(record: Any, tables: Any, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print_tables(tables, width=160)

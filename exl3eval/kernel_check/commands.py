"""`kernels check`: a thin skin, added to the `kernels` application by `register`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3eval.errors import EXIT_FAIL, UsageError

if TYPE_CHECKING:
    import torch

    from exl3eval.kernel_check.finding import Finding


def register(app: typer.Typer) -> None:
    """Add `check` to an application."""
    app.command()(check)


def check(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")] = "auto",
    route: Annotated[list[str] | None, typer.Option(help="Check this route only; repeat for more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write receipt.json and check.md here.")] = None,
    upstream: Annotated[Path | None, typer.Option(help="Weights that upstream reconstructed, safetensors.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt instead of tables.")] = False,
) -> None:
    """Check that every route is exact where it promises to be, and that these checks can fail."""
    import json

    from exl3eval.kernel_check.report import render_markdown
    from exl3eval.records import require_absent, write_atomic, write_receipt

    if out is not None:
        require_absent(out / "receipt.json")
    receipt = check_routes(device, route, upstream=upstream, quick=quick)
    if out is not None:
        receipt = write_receipt(out / "receipt.json", receipt)
        write_atomic(out / "check.md", render_markdown(receipt))
    if as_json:
        print(json.dumps(receipt, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print(render_markdown(receipt))
    if receipt["verdict"] != "PASS":
        raise typer.Exit(EXIT_FAIL)


def check_routes(
    device: str = "auto", routes: list[str] | None = None, *, upstream: Path | None = None, quick: bool = False
) -> dict[str, Any]:
    """Run the suite and return its receipt; progress goes to standard error.

    Raises
    ------
    UsageError
        If the device or a route is not there, or the file of upstream's weights is missing.
    """
    from exl3eval.kernel_check.report import build_receipt
    from exl3eval.kernel_check.subject import scope_of, subjects_on
    from exl3eval.kernel_check.suite import run_suite

    if upstream is not None and not upstream.is_file():
        raise UsageError(f"{upstream.name} is not a file", hint="give a safetensors file of trellis and inner tensors")
    where = _device(device)
    findings = []
    for finding in run_suite(subjects_on(where, routes), scope_of(where, quick=quick), where, upstream=upstream):
        _talk(finding)
        findings.append(finding)
    return build_receipt(findings, identity=_identity(where), quick=quick)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N", hint="name one of those")
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"{name}: torch sees {torch.cuda.device_count()} NVIDIA GPUs",
            hint="use --device cpu, or see `exl3eval doctor`",
        )
    return torch.device("cuda", int(index or 0))


def _identity(device: torch.device) -> dict[str, Any]:
    from exl3eval.identity import built_kernels, code_identity, device_identity

    return {
        "code": code_identity(),
        "device": device_identity(device),
        "kernels": built_kernels(device) if device.type == "cuda" else None,
    }


def _talk(f: Finding) -> None:
    worst = "" if f.worst is None else f" {f.worst:.3g} of {f.bound:.3g}"
    print(
        f"{f.status:14} {f.route:20} {f.number:2} {f.name}{worst} {f.reason if f.status != 'pass' else ''}",
        file=sys.stderr,
    )

"""Two ways to check a report: measure again with the same commands, or compute every number again from the positions.

The second needs no model and no GPU and takes seconds: the bundle carries the runs themselves.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exl3eval.errors import InvalidRunError
from exl3eval.receipt import FLOORS_FILE, POSITIONS_FILE, RECEIPT_FILE
from exl3eval.records import canonical_json, read_json, write_atomic, write_json
from exl3eval.report.candidates import CANDIDATES_FILE
from exl3eval.report.document import Document, document_json
from exl3eval.report.sections import build_document
from exl3eval.report.study import VERDICT_FILE, Run, Study, load_study
from exl3eval.variant import SCHEMA as VARIANT_SCHEMA
from exl3eval.verify import first_difference

REPORT_FILE = "report.json"
_CHECK = '''"""Compute every number of the report again from the positions in `runs/`, and compare."""

from pathlib import Path

from exl3eval.report.reproduce import check_bundle

if __name__ == "__main__":
    print(check_bundle(Path(__file__).resolve().parent))
'''


def report_json(study: Study, document: Document) -> dict[str, Any]:
    """Lay out the report with what is needed to build it again."""
    texts = {str(token): text for token, text in sorted(study.texts.items())}
    return document_json(document) | {"model_name": study.model_name, "token_texts": texts}


def write_bundle(study: Study, document: Document, folder: Path) -> None:
    """Write commands, check, the runs and the expected report.

    Raises
    ------
    UsageError
        If the disk refuses a write.
    """
    runs = [*study.runs, *(pair.old for pair in study.superseded)]
    for index, run in enumerate(runs, start=1):
        target = folder / "runs" / f"{index:02d}"
        target.mkdir(parents=True, exist_ok=True)
        for name in (RECEIPT_FILE, POSITIONS_FILE, FLOORS_FILE, CANDIDATES_FILE, VERDICT_FILE):
            if (run.folder / name).exists():
                shutil.copyfile(run.folder / name, target / name)
        for name, declared in _declared(run):
            write_atomic(folder / "variants" / f"{name}.toml", _variant_toml(declared))
    write_atomic(folder / "measure.sh", measure_script(study))
    write_atomic(folder / "check.py", _CHECK)
    write_json(folder / REPORT_FILE, report_json(study, document))


def check_bundle(folder: Path) -> str:
    """Verify every run of a bundle, build its report again and compare it with the stored one.

    Returns
    -------
    str
        One sentence.

    Raises
    ------
    InvalidRunError
        Naming the first number that differs.
    """
    stored = read_json(folder / REPORT_FILE)
    study = replace(
        load_study(sorted((folder / "runs").iterdir()), model_name=stored["model_name"]),
        texts={int(token): text for token, text in stored["token_texts"].items()},
    )
    if found := first_difference(
        stored, json.loads(canonical_json(report_json(study, build_document(study)))), "report"
    ):
        raise InvalidRunError(
            f"{REPORT_FILE} is not what its positions give: {found}", hint="use the exl3eval that the receipts name"
        )
    return f"{_count_numbers(stored)} numbers of {len(study.runs)} runs are what the positions give"


def measure_script(study: Study) -> str:
    """Write the exact commands that measure every run again."""
    lines = [
        "#!/bin/sh",
        "# Measures the report's runs again. Set MODEL and REFERENCE to directories whose weights have these digests.",
        "set -eu",
        'cd "$(dirname "$0")"',
    ]
    for run in study.runs:
        identity = run.identity
        code = identity["code"]
        packages = " ".join(f"{name}=={version}" for name, version in code["packages"].items() if version)
        lines += [
            "",
            f"# exl3eval {code['exl3eval']}, commit {code['git']['commit'] or 'unknown'}, "
            f"uncommitted changes {code['git']['diff_sha256'] or 'none'}",
            f"# python {code['python']}: {packages}",
            f"# MODEL: SHA-256 of weights {identity['arms'][run.variant]['checkpoint_sha256']}",
            f"# REFERENCE: SHA-256 of weights {identity['arms'][run.receipt['reference']]['checkpoint_sha256']}",
            f"# suite {identity['suite']['name']} {identity['suite']['digest']}",
            " ".join(_command(run)),
        ]
    return "\n".join([*lines, ""])


def _command(run: Run) -> Iterator[str]:
    identity, tokens = run.identity, run.identity["tokens"]
    names = [name for name, _ in _declared(run)]
    yield "exl3eval kld"
    yield f"--variant variants/{shlex.quote(names[-1])}.toml --baseline variants/{shlex.quote(names[0])}.toml"
    yield '--model "$MODEL" --reference "$REFERENCE"'
    yield f"--reference-precision {identity['reference_precision']} --split {shlex.quote(identity['suite']['split'])}"
    yield f"--num-contexts {tokens['num_contexts']} --positions {tokens['positions_per_context']}"
    yield _lane_options(run)
    yield f"--device {identity['device']['type']} --seed {identity['seed']}"
    if identity["trust_remote_code"]:
        yield "--trust-remote-code"
    yield f"--out measured/{shlex.quote(run.variant)}-{run.digest[:8]}"


def _lane_options(run: Run) -> str:
    kind, _, rows = run.identity["lane"].rstrip("]").partition("[")
    if kind == "decode":
        scored = run.identity["tokens"]["positions_per_context"] - run.first_scored
        return f"--lane decode --rows {rows} --decode-positions {scored}"
    return f"--lane chunked --chunks {rows}" if kind == "chunked" else f"--lane {kind}"


def _declared(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    arms = run.identity["arms"]
    return [(arms[name]["declared"]["name"], arms[name]["declared"]) for name in (run.baseline, run.variant)]


def _variant_toml(declared: Mapping[str, Any]) -> str:
    """Write a declaration as TOML; JSON strings are TOML strings."""
    fields = {"schema": VARIANT_SCHEMA, **declared}
    return "".join(f"{name} = {canonical_json(value)}\n" for name, value in fields.items() if value is not None)


def _count_numbers(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count_numbers, value.values()))
    if isinstance(value, list):
        return sum(map(_count_numbers, value))
    return int(isinstance(value, (int, float)) and not isinstance(value, bool))

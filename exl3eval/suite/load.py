"""Load a suite strictly, and verify it from the ground up.

A suite is a folder: `manifest.json` (every row without its text), `texts-*.jsonl` (the rows with their
text, one file per licence), the hashed calibration shingles, the fallback chat template and `LICENSES/`.
One context is one window of one source document, and a cluster is a source document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from exl3eval.errors import Exl3EvalError, SuiteError
from exl3eval.records import digest_file, parse_json, read_json
from exl3eval.suite.context import (
    SPLITS,
    Context,
    StratumFloor,
    Suite,
    check_floors,
    content_chars,
    content_digest,
    content_text,
    manifest_row,
    suite_digest,
)
from exl3eval.suite.shingles import Hashes, count_shared, read_index, shingle_hashes

SUITE_SCHEMA = "exl3eval.suite/1"
SHIPPED_SUITE = "heldout-v1"
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "calibration-shingles.xz"
TEMPLATE_NAME = "chat-fallback.jinja"
NOTICES_NAME = "LICENSES"
MAX_OVERLAP = 0.03
"""Largest share of a text's shingles that a text of another cluster may hold."""

_RESTORE = "restore the suite's folder from the release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify_suite` established."""

    name: str
    digest: str
    num_contexts: int
    num_clusters: int
    num_calibration_shingles: int
    """Every context shares none of them."""
    max_overlap: float
    """Largest share of shingles between two clusters."""


def load_suite(directory: Path | None = None) -> Suite:
    """Load a suite and check every row against the manifest.

    Parameters
    ----------
    directory : Path, optional
        Default: the suite shipped with the package.

    Raises
    ------
    SuiteError
        Naming the file or context: altered, missing, duplicated or foreign rows, unknown schema or split,
        text that is not UTF-8, strata below their declared floor, a digest that differs.
    """
    folder = shipped_directory() if directory is None else directory
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except Exl3EvalError as error:
        raise SuiteError(f"{folder.name}: {error.message}", hint=_RESTORE) from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SUITE_SCHEMA:
        seen = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise SuiteError(f"{MANIFEST_NAME} has schema {seen!r}, expected {SUITE_SCHEMA!r}", hint=_RESTORE)
    try:
        floors = {name: StratumFloor(**floor) for name, floor in manifest["floors"].items()}
        rows: list[dict[str, Any]] = manifest["contexts"]
        name, digest, text_digests = manifest["name"], manifest["digest"], manifest["files"]
    except (KeyError, TypeError, AttributeError) as error:
        raise SuiteError(f"{MANIFEST_NAME} lacks or misuses {error}", hint=_RESTORE) from error
    for file_name, expected in sorted(text_digests.items()):
        path = folder / file_name
        if not path.is_file():
            raise SuiteError(f"{file_name} is missing", hint=_RESTORE)
        if (seen := digest_file(path)) != expected:
            raise SuiteError(f"{file_name} was altered: sha256 {seen}, manifest says {expected}", hint=_RESTORE)
    contexts = _read_texts(folder)
    _match_rows(contexts, rows)
    check_floors(contexts, floors)
    if (seen := suite_digest(contexts)) != digest:
        raise SuiteError(f"suite {name} has digest {seen}, its manifest says {digest}", hint=_RESTORE)
    return Suite(
        name=name,
        digest=digest,
        contexts=tuple(context for context in contexts if context.split == "analysis"),
        sealed=tuple(context for context in contexts if context.split == "qualification"),
        floors=floors,
        licences=dict(sorted(Counter(context.licence for context in contexts).items())),
        fallback_template=(folder / TEMPLATE_NAME).read_text(encoding="utf-8"),
    )


def shipped_directory() -> Path:
    """Return the folder of the suite that the package carries."""
    return Path(str(files("exl3eval.contexts"))) / SHIPPED_SUITE


def verify_suite(directory: Path | None = None) -> Verification:
    """Load a suite, then scan it again: against the calibration shingles and context against context.

    Raises
    ------
    SuiteError
        As `load_suite`; also a context that shares a shingle with calibration data, or two clusters that
        share more than `MAX_OVERLAP`.
    """
    folder = shipped_directory() if directory is None else directory
    suite = load_suite(folder)
    index = read_index(folder / INDEX_NAME)
    contexts = [*suite.contexts, *suite.sealed]
    hashes = {context.id: shingle_hashes(content_text(context)) for context in contexts}
    for context in contexts:
        if hits := index.count_hits(hashes[context.id]):
            raise SuiteError(
                f"context {context.id} shares {hits} of {hashes[context.id].size} shingles with calibration data",
                hint="never evaluate on calibration text: remove the document",
            )
    clusters = {context.id: context.cluster for context in contexts}
    largest = 0.0
    for first, second, share in scan_overlaps(hashes):
        if clusters[first] == clusters[second]:
            continue
        if share > MAX_OVERLAP:
            raise SuiteError(
                f"contexts {first} and {second} share {share:.1%} of their shingles", hint="remove one of them"
            )
        largest = max(largest, share)
    return Verification(
        name=suite.name,
        digest=suite.digest,
        num_contexts=len(contexts),
        num_clusters=len(set(clusters.values())),
        num_calibration_shingles=int(index.hashes.size),
        max_overlap=largest,
    )


def scan_overlaps(hashes: Mapping[str, Hashes]) -> Iterator[tuple[str, str, float]]:
    """Yield each pair of texts that share shingles, with the share of the smaller text's shingles."""
    names = list(hashes)
    for position, first in enumerate(names):
        for second in names[:position]:
            if share := overlap(hashes[first], hashes[second]):
                yield first, second, share


def overlap(first: Hashes, second: Hashes) -> float:
    """Return the share of the smaller text's shingles that both texts hold."""
    return count_shared(first, second) / max(1, min(first.size, second.size))


def _read_texts(folder: Path) -> list[Context]:
    contexts: list[Context] = []
    for path in sorted(folder.glob("texts-*.jsonl")):
        try:
            lines = path.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise SuiteError(f"{path.name} is not UTF-8 at byte {error.start}", hint=_RESTORE) from error
        contexts += [
            _parse_row(line, where=f"{path.name}:{number}") for number, line in enumerate(lines, start=1) if line
        ]
    return contexts


def _parse_row(line: str, *, where: str) -> Context:
    try:
        row = parse_json(line, where=where)
        if row["kind"] not in ("text", "chat"):
            raise SuiteError(f"{where}: unknown kind {row['kind']!r}", hint=_RESTORE)
        if row["split"] not in SPLITS:
            raise SuiteError(f"{where}: foreign split {row['split']!r}, expected one of {SPLITS}", hint=_RESTORE)
        if row["kind"] == "chat":
            row |= {"messages": tuple(row["messages"]), "tools": tuple(row["tools"])}
        context = Context(**row)
        seen = content_digest(context.text, context.messages, context.tools)
        chars = content_chars(context.text, context.messages)
    except SuiteError:
        raise
    except (Exl3EvalError, KeyError, TypeError, AttributeError) as error:
        raise SuiteError(f"{where} is not a context row: {error}", hint=_RESTORE) from error
    if seen != context.sha256 or chars != context.chars:
        raise SuiteError(
            f"{where}: the text of {context.id} was altered: sha256 {seen}, its row says {context.sha256}",
            hint=_RESTORE,
        )
    return context


def _match_rows(contexts: list[Context], rows: list[dict[str, Any]]) -> None:
    for label, ids in (("texts", [c.id for c in contexts]), ("manifest", [row.get("id") for row in rows])):
        twice = [name for name, count in Counter(ids).items() if count > 1]
        if twice:
            raise SuiteError(f"context {twice[0]} appears twice in the {label}", hint=_RESTORE)
    declared = {row["id"]: row for row in rows}
    held = {context.id: context for context in contexts}
    for missing in sorted(declared.keys() - held.keys()):
        raise SuiteError(f"context {missing} of the manifest has no text", hint=_RESTORE)
    for foreign in sorted(held.keys() - declared.keys()):
        raise SuiteError(f"context {foreign} is not in the manifest", hint=_RESTORE)
    for context in contexts:
        row = manifest_row(context)
        changed = [key for key in row if declared[context.id].get(key) != row[key]]
        if changed or row.keys() != declared[context.id].keys():
            what = ", ".join(changed) or "its keys"
            raise SuiteError(f"context {context.id} differs from the manifest in {what}", hint=_RESTORE)
    splits: dict[str, str] = {}
    for context in contexts:
        if splits.setdefault(context.cluster, context.split) != context.split:
            raise SuiteError(f"cluster {context.cluster} lies in both splits", hint="a document has one split")

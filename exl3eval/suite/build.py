"""Build a suite from named packages: fetch, read, cut, scan, freeze.

The recipe (TOML) names the packages, the documents to take and what each stratum must hold. Documents are
tried in a seeded order; one that shares a shingle with calibration data, or more than a few percent with an
accepted document, is refused and listed. The same recipe and archives give the same bytes.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from exl3eval import __version__
from exl3eval.errors import SuiteError
from exl3eval.records import canonical_json, digest_file, write_atomic, write_json
from exl3eval.suite import load
from exl3eval.suite.context import (
    Context,
    Suite,
    check_floors,
    content_chars,
    content_digest,
    content_text,
    manifest_row,
    suite_digest,
    text_row,
)
from exl3eval.suite.fetch import Source, fetch_package
from exl3eval.suite.readers import GENERATORS, READERS, Document
from exl3eval.suite.recipe import Pick, Recipe, read_recipe
from exl3eval.suite.shingles import (
    HASH_BITS,
    SHINGLE_WORDS,
    CalibrationIndex,
    Hashes,
    build_index,
    count_shared,
    read_calibration,
    read_index,
    shingle_hashes,
    write_index,
)

Fetch = Callable[[Source, Path, Path], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A document that was not taken, and why."""

    document: str
    reason: str
    """`calibration`, or the document that it overlaps with."""
    hits: int
    shingles: int


def build_suite(
    recipe_path: Path,
    out_dir: Path,
    *,
    work_dir: Path,
    calibration_dir: Path | None = None,
    fetch: Fetch = fetch_package,
) -> Suite:
    """Build a suite into `out_dir` and load it back.

    Parameters
    ----------
    recipe_path : Path
        The recipe; the fallback chat template lies beside it.
    out_dir : Path
        May be the recipe's folder.
    work_dir : Path
        Keeps downloaded archives and their contents.
    calibration_dir : Path, optional
        Folder of `*.xz` calibration texts to index; default: the index beside the recipe.
    fetch : callable
        Returns the folder of a source's files.

    Raises
    ------
    SuiteError
        On a wrong recipe, a failed download, a stratum shortfall or two sources claiming one document.
    """
    recipe = read_recipe(recipe_path)
    folder = recipe_path.parent
    index = _index_calibration(recipe, folder, calibration_dir)
    roots = {source.id: fetch(source, work_dir, folder) for source in recipe.sources.values()}
    contexts, refusals = _choose(recipe, roots, index)
    check_floors(contexts, recipe.floors)
    num_analysis = sum(context.split == "analysis" for context in contexts)
    if num_analysis != recipe.analysis:
        raise SuiteError(
            f"{num_analysis} analysis contexts, the recipe declares {recipe.analysis}",
            hint="make takes and strata agree",
        )
    notices = _collect_notices(recipe, roots)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_texts(out_dir, contexts)
    shutil.rmtree(out_dir / load.NOTICES_NAME, ignore_errors=True)
    for name, text in notices.items():
        write_atomic(out_dir / load.NOTICES_NAME / name, text)
    write_index(out_dir / load.INDEX_NAME, index)
    if out_dir.resolve() != folder.resolve():
        shutil.copyfile(folder / load.TEMPLATE_NAME, out_dir / load.TEMPLATE_NAME)
    write_json(out_dir / load.MANIFEST_NAME, _manifest(recipe, recipe_path, out_dir, contexts, refusals, index))
    return load.load_suite(out_dir)


def _index_calibration(recipe: Recipe, folder: Path, calibration_dir: Path | None) -> CalibrationIndex:
    if calibration_dir is None:
        return read_index(folder / load.INDEX_NAME)
    texts = read_calibration(calibration_dir)
    digests = {name: digest_file(calibration_dir / name) for name in texts}
    if digests != recipe.calibration:
        changed = sorted(dict(digests.items() ^ recipe.calibration.items()))
        raise SuiteError(
            f"calibration files differ from those the recipe pins: {', '.join(changed)}",
            hint="name the folder of the pinned files, or pin the new ones",
        )
    return build_index(texts.values())


def _choose(recipe: Recipe, roots: Mapping[str, Path], index: CalibrationIndex) -> tuple[list[Context], list[Refusal]]:
    contexts: list[Context] = []
    refusals: list[Refusal] = []
    accepted: dict[str, Hashes] = {}
    for pick in recipe.picks:
        taken = 0
        source = recipe.sources[pick.source]
        for place, document in _candidates(recipe, pick, roots[pick.source]):
            if taken == pick.take:
                break
            cluster = f"{source.id}:{place}"
            context = _cut(recipe, pick, source, cluster, document)
            if context is None or cluster in accepted:
                continue
            hashes = shingle_hashes(content_text(context))
            reason, hits = "calibration", index.count_hits(hashes)
            closest = max(accepted, key=lambda name: load.overlap(hashes, accepted[name]), default=None)
            if not hits and closest and load.overlap(hashes, accepted[closest]) > load.MAX_OVERLAP:
                reason, hits = f"overlap with {closest}", count_shared(hashes, accepted[closest])
            if hits:
                refusals.append(Refusal(document=cluster, reason=reason, hits=hits, shingles=hashes.size))
                continue
            accepted[cluster] = hashes
            contexts.append(context)
            taken += 1
        if taken < pick.take:
            raise SuiteError(
                f"stratum {pick.stratum}: source {pick.source} gave {taken} of {pick.take} documents",
                hint="a shortfall is never shipped: widen the pick's paths or add another source",
            )
    return _assign(recipe, contexts), refusals


def _order(recipe: Recipe, name: str) -> bytes:
    return sha256(f"{recipe.seed}:{name}".encode()).digest()


def _candidates(recipe: Recipe, pick: Pick, root: Path) -> Iterator[tuple[str, Document]]:
    """Yield (place, document) in seeded order, reading files only as they are reached."""
    if pick.reader in GENERATORS:
        for kind in pick.paths:
            yield f"{pick.reader}/{kind}", GENERATORS[pick.reader](kind, recipe.seed)
        return
    found = {path for pattern in pick.paths for path in root.glob(pattern) if path.is_file()}
    places = {path.relative_to(root).as_posix(): path for path in found}
    for place in sorted(places, key=lambda place: _order(recipe, place)):
        documents = list(READERS[pick.reader](places[place]))
        for document in sorted(documents, key=lambda document: _order(recipe, document.name)):
            if document.language and document.language != pick.language:
                continue
            yield place if len(documents) == 1 else f"{place}#{document.name}", document


def _cut(recipe: Recipe, pick: Pick, source: Source, cluster: str, document: Document) -> Context | None:
    """Cut the document's window; None if it is too short."""
    chars, floor = recipe.window_chars[pick.stratum], recipe.floors[pick.stratum].min_chars
    draw = random.Random(f"{recipe.seed}:{cluster}")
    text, messages = "", document.messages
    if messages:
        messages = _cut_dialogue(messages, chars, draw)
    else:
        text = _cut_text(document.text, chars, draw)
    size = content_chars(text, messages)
    if size < floor:
        return None
    return Context(
        id="",
        cluster=cluster,
        split="",
        stratum=pick.stratum,
        language=pick.language,
        kind="chat" if messages else "text",
        source=f"{source.client} {source.package}: {cluster.partition(':')[2]}",
        version=source.version,
        licence=pick.licence or source.licence,
        chars=size,
        sha256=content_digest(text, messages, document.tools),
        text=text,
        messages=messages,
        tools=document.tools,
    )


def _cut_text(text: str, chars: int, draw: random.Random) -> str:
    """Cut `chars` characters from a seeded paragraph start; a shorter text stays whole."""
    if len(text) <= chars:
        return text
    starts = [0] + [match.end() for match in re.finditer(r"\n\n", text) if match.end() <= len(text) - chars]
    start = draw.choice(starts)
    return text[start : start + chars].rstrip() + "\n"


def _cut_dialogue(messages: tuple[dict[str, Any], ...], chars: int, draw: random.Random) -> tuple[dict[str, Any], ...]:
    """Cut whole turns, from a seeded user message, until `chars` characters are reached."""
    starts = [at for at, message in enumerate(messages) if message["role"] == "user"]
    long_enough = [at for at in starts if content_chars("", messages[at:]) >= chars]
    start = draw.choice(long_enough or [0])
    for end in [at for at in starts if at > start]:
        if content_chars("", messages[start:end]) >= chars:
            return messages[start:end]
    return messages[start:]


def _assign(recipe: Recipe, contexts: list[Context]) -> list[Context]:
    """Seal each stratum's qualification share, in seeded order, and number the contexts."""
    done: list[Context] = []
    for stratum, floor in recipe.floors.items():
        rows = sorted(
            (context for context in contexts if context.stratum == stratum),
            key=lambda context: _order(recipe, f"split:{context.cluster}"),
        )
        for number, context in enumerate(rows):
            split = "qualification" if number < floor.qualification else "analysis"
            done.append(replace(context, id=f"{stratum}-{number:03d}", split=split))
    return done


def _write_texts(out_dir: Path, contexts: list[Context]) -> None:
    for stale in out_dir.glob("texts-*.jsonl"):
        stale.unlink()
    for licence in sorted({context.licence for context in contexts}):
        rows = [canonical_json(text_row(context)) for context in contexts if context.licence == licence]
        slug = re.sub(r"[^a-z0-9.]+", "-", licence.lower())
        write_atomic(out_dir / f"texts-{slug}.jsonl", "\n".join(rows) + "\n")


def _collect_notices(recipe: Recipe, roots: Mapping[str, Path]) -> dict[str, str]:
    """Return the files of `LICENSES/`: who wrote what on which terms, and each package's licence text."""
    lines = ["Sources of the texts, their licences and their authors.", ""]
    notices = {}
    for source in recipe.sources.values():
        origin = " ".join(part for part in (source.client, source.package, source.version) if part)
        lines += [f"{source.id} ({origin})", f"  licence: {source.licence}", f"  {source.attribution}", ""]
        if source.notice:
            path = roots[source.id] / source.notice
            if not path.is_file():
                raise SuiteError(f"{source.id}: no licence text at {source.notice}", hint="correct the recipe's notice")
            notices[f"{source.id}.txt"] = path.read_text(encoding="utf-8", errors="replace")
    return notices | {"NOTICE.txt": "\n".join(lines)}


def _manifest(
    recipe: Recipe,
    recipe_path: Path,
    out_dir: Path,
    contexts: list[Context],
    refusals: list[Refusal],
    index: CalibrationIndex,
) -> dict[str, Any]:
    def table(item: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(item, name) for name in names}

    files = [
        *sorted(out_dir.glob("texts-*.jsonl")),
        *sorted((out_dir / load.NOTICES_NAME).iterdir()),
        out_dir / load.INDEX_NAME,
        out_dir / load.TEMPLATE_NAME,
    ]
    return {
        "schema": load.SUITE_SCHEMA,
        "name": recipe.name,
        "digest": suite_digest(contexts),
        "builder": {"exl3eval": __version__, "recipe_sha256": digest_file(recipe_path), "seed": recipe.seed},
        "floors": {
            name: table(floor, "analysis", "qualification", "min_chars") for name, floor in recipe.floors.items()
        },
        "packages": [
            table(source, "id", "client", "package", "version", "licence", "sha256", "attribution")
            for source in recipe.sources.values()
        ],
        "files": {path.relative_to(out_dir).as_posix(): digest_file(path) for path in files},
        "contamination": {
            "calibration": dict(recipe.calibration),
            "shingle_words": SHINGLE_WORDS,
            "hash_bits": HASH_BITS,
            "num_calibration_shingles": int(index.hashes.size),
            "false_positive_per_shingle": index.false_positive,
            "max_overlap": load.MAX_OVERLAP,
            "refused": [table(refusal, "document", "reason", "hits", "shingles") for refusal in refusals],
        },
        "contexts": [manifest_row(context) for context in contexts],
    }

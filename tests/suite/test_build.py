"""Building from a fake source, and every way in which a built suite can be altered."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from exl3eval.errors import SuiteError
from exl3eval.records import canonical_json, digest_file, digest_value
from exl3eval.suite.build import build_suite
from exl3eval.suite.context import content_digest
from exl3eval.suite.fetch import Source, fetch_package
from exl3eval.suite.load import INDEX_NAME, MANIFEST_NAME, load_suite, verify_suite

RECIPE = """
schema = "exl3eval.suite-recipe/1"
name = "tiny"
seed = 7
analysis = 7

[strata]
prose = { analysis = 3, qualification = 1, min_chars = 900, window_chars = 1000 }
code = { analysis = 2, qualification = 1, min_chars = 900, window_chars = 1000 }
chat = { analysis = 2, qualification = 1, min_chars = 900, window_chars = 1000 }

[calibration]
"cal.xz" = "CALIBRATION"

[[sources]]
id = "fake"
client = "npm"
package = "fake-texts"
version = "1.0"
licence = "MIT"
attribution = "Nobody."
notice = "LICENSE"

[[sources]]
id = "generated"
client = "generated"
version = "1"
licence = "CC0-1.0"
attribution = "The test."

[[picks]]
stratum = "prose"
language = "en"
source = "fake"
reader = "text"
paths = ["prose/*.txt"]
take = 4

[[picks]]
stratum = "code"
language = "python"
source = "fake"
reader = "code"
paths = ["code/*.py"]
take = 3
licence = "BSD-3-Clause"

[[picks]]
stratum = "chat"
language = "en"
source = "generated"
reader = "tool-dialogue"
paths = ["travel", "weather", "warehouse"]
take = 3
"""


def prose(seed: int, num_words: int = 400) -> str:
    draw = random.Random(seed)
    text = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(num_words)]
    return "\n\n".join(" ".join(text[at : at + 40]) for at in range(0, num_words, 40)) + "\n"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A recipe, its packages and the calibration data they are scanned against."""
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "cal.xz").write_bytes(lzma.compress(prose(1000, 800).encode()))
    recipe = RECIPE.replace("CALIBRATION", digest_file(tmp_path / "calibration" / "cal.xz"))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.toml").write_text(recipe)
    (tmp_path / "recipe" / "chat-fallback.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for folder, count in (("prose", 5), ("code", 3)):
        (tmp_path / "files" / folder).mkdir(parents=True)
        for number in range(count):
            path = tmp_path / "files" / folder / f"{number}.{'txt' if folder == 'prose' else 'py'}"
            path.write_text(prose(number + 50 * (folder == "code")))
    (tmp_path / "files" / "LICENSE").write_text("MIT, by Nobody\n")
    return tmp_path


def build(packages: Path, out: str = "out") -> Path:
    build_suite(
        packages / "recipe" / "recipe.toml",
        packages / out,
        work_dir=packages / "work",
        calibration_dir=packages / "calibration",
        fetch=lambda source, work_dir, recipe_dir: packages / "files",
    )
    return packages / out


def test_two_builds_give_the_same_bytes(packages: Path) -> None:
    first, second = build(packages, "first"), build(packages, "second")
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert {str(name) for name in names} >= {"LICENSES/NOTICE.txt", "LICENSES/fake.txt", "texts-bsd-3-clause.jsonl"}


def test_the_built_suite_verifies(packages: Path) -> None:
    suite = load_suite(build(packages))
    assert verify_suite(packages / "out").num_clusters == 10
    assert (len(suite.contexts), len(suite.sealed)) == (7, 3)
    assert all(context.chars >= 900 for context in suite.contexts)
    assert suite.licences == {"BSD-3-Clause": 3, "CC0-1.0": 3, "MIT": 4}


def test_contaminated_and_overlapping_documents_are_refused_and_listed(packages: Path) -> None:
    folder = packages / "files" / "prose"
    dirty = prose(0).split(" ")
    dirty[100:100] = prose(1000, 800).split()[301:313]
    (folder / "0.txt").write_text(" ".join(dirty)[:1000])
    build(packages)
    manifest = json.loads((packages / "out" / MANIFEST_NAME).read_text())
    refused = manifest["contamination"]["refused"]
    assert [(row["document"], row["reason"], row["hits"]) for row in refused] == [
        ("fake:prose/0.txt", "calibration", 1)
    ]
    (folder / "0.txt").write_text(prose(1)[:1000])
    (folder / "1.txt").write_text(prose(1)[:1000])
    build(packages)
    refused = json.loads((packages / "out" / MANIFEST_NAME).read_text())["contamination"]["refused"]
    assert len(refused) == 1 and "overlap with fake:prose/" in refused[0]["reason"]


def test_a_shortfall_is_an_error_and_writes_nothing(packages: Path) -> None:
    (packages / "files" / "code" / "0.py").write_text("too = 'short'\n")
    with pytest.raises(SuiteError, match="stratum code: source fake gave 2 of 3"):
        build(packages)
    assert not (packages / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("analysis = 7", "analysis = 8", "7 analysis contexts"),
        ("prose = { analysis = 3", "prose = { analysis = 4", "stratum prose holds 3"),
        ('reader = "code"', 'reader = "cobol"', "unknown source, stratum or reader"),
        ('client = "npm"', 'client = "ftp"', "unknown client 'ftp'"),
        ("suite-recipe/1", "suite-recipe/9", "has schema"),
        ("take = 4", "", "not a recipe"),
        ("seed = 7", "seed = = 7", "not a recipe"),
        ('notice = "LICENSE"', 'notice = "COPYING"', "no licence text"),
        ('"cal.xz" =', '"other.xz" =', "differ from those the recipe pins"),
        ('"travel"', '"astrology"', "unknown dialogue topic"),
    ],
)
def test_a_wrong_recipe_is_refused(packages: Path, old: str, new: str, message: str) -> None:
    path = packages / "recipe" / "recipe.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SuiteError, match=message):
        build(packages)
    assert not (packages / "out").exists()


def test_only_the_pinned_archive_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "archives" / "fake" / "fake-1.0.tgz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"something else")
    source = Source(
        id="fake",
        client="npm",
        package="fake",
        version="1.0",
        licence="MIT",
        sha256="0" * 64,
        attribution="",
        notice="",
    )
    with pytest.raises(SuiteError, match="the recipe pins 0000"):
        fetch_package(source, tmp_path, tmp_path)
    assert not (tmp_path / "unpacked").exists()


Rows = list[dict]


def rewrite(folder: Path, change: Callable[[Rows, dict], None]) -> None:
    """Change text rows and manifest, and renew the file digests as a careful forger would."""
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    paths = sorted(folder.glob("texts-*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for path in paths:
        path.unlink()
        del manifest["files"][path.name]
    change(rows, manifest)
    (folder / "texts-all.jsonl").write_text("".join(canonical_json(row) + "\n" for row in rows))
    manifest["files"]["texts-all.jsonl"] = digest_file(folder / "texts-all.jsonl")
    (folder / MANIFEST_NAME).write_text(canonical_json(manifest))


def forge_text(rows: Rows, manifest: dict) -> None:
    """Alter a text and every digest up to the manifest's row, but not the suite's."""
    for row in rows:
        if row["kind"] == "text":
            row["text"] = row["text"][::-1]
            row["sha256"] = content_digest(row["text"], (), ())
            next(entry for entry in manifest["contexts"] if entry["id"] == row["id"])["sha256"] = row["sha256"]


def field(name: str, value: object) -> Callable[[Rows, dict], None]:
    return lambda rows, manifest: rows[-1].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (field("text", "another text"), "was altered"),
        (lambda rows, manifest: rows[-1].update(chars=rows[-1]["chars"] + 1), "was altered"),
        (forge_text, "has digest"),
        (lambda rows, manifest: rows.pop(), "has no text"),
        (lambda rows, manifest: rows.append(rows[-1]), "appears twice in the texts"),
        (lambda rows, manifest: rows.append(rows[-1] | {"id": "extra"}), "is not in the manifest"),
        (lambda rows, manifest: manifest["contexts"].append(manifest["contexts"][0]), "twice in the manifest"),
        (field("split", "training"), "foreign split 'training'"),
        (field("split", "qualification"), "differs from the manifest in split"),
        (field("stratum", "code"), "differs from the manifest in stratum"),
        (field("licence", "WTFPL"), "differs from the manifest in licence"),
        (field("kind", "audio"), "unknown kind 'audio'"),
        (field("surprise", 1), "not a context row"),
        (lambda rows, manifest: rows[-1].pop("cluster"), "not a context row"),
        (lambda rows, manifest: manifest.update(schema="exl3eval.suite/9"), "has schema"),
        (lambda rows, manifest: manifest.pop("floors"), "lacks or misuses"),
        (lambda rows, manifest: manifest.update(digest="0" * 64), "its manifest says 0000"),
        (lambda rows, manifest: manifest["floors"]["code"].update(analysis=3), "stratum code holds 2"),
        (lambda rows, manifest: manifest["floors"]["code"].update(min_chars=5000), "declares at least 5000"),
        (lambda rows, manifest: manifest["floors"].pop("chat"), "undeclared stratum 'chat'"),
        (lambda rows, manifest: manifest["files"].update({"texts-x.jsonl": "0"}), "texts-x.jsonl is missing"),
    ],
)
def test_each_alteration_is_an_error(packages: Path, change: Callable[[Rows, dict], None], message: str) -> None:
    folder = build(packages)
    rewrite(folder, lambda rows, manifest: None)
    load_suite(folder)
    rewrite(folder, change)
    with pytest.raises(SuiteError, match=message):
        load_suite(folder)


def test_any_changed_file_is_an_error(packages: Path) -> None:
    folder = build(packages)
    for name in json.loads((folder / MANIFEST_NAME).read_text())["files"]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"\n")
        with pytest.raises(SuiteError, match="was altered"):
            load_suite(folder)
        (folder / name).write_bytes(content)
    load_suite(folder)


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": NaN}', b"[]", b"\xff\xfe"])
def test_a_broken_manifest_is_an_error(packages: Path, content: bytes) -> None:
    folder = build(packages)
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(SuiteError, match=r"manifest\.json"):
        load_suite(folder)
    with pytest.raises(SuiteError, match=r"manifest\.json does not exist"):
        load_suite(packages)


def test_texts_must_be_utf8(packages: Path) -> None:
    folder = build(packages)
    path = folder / "texts-mit.jsonl"
    path.write_bytes(path.read_bytes()[:-40] + b'\xe9"}\n')
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][path.name] = digest_file(path)
    (folder / MANIFEST_NAME).write_text(canonical_json(manifest))
    with pytest.raises(SuiteError, match=r"texts-mit\.jsonl is not UTF-8"):
        load_suite(folder)


def reseal(folder: Path, change: Callable[[Rows, dict], None]) -> None:
    """Change rows and renew every digest: only a scan of the texts can tell."""
    rewrite(folder, change)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    rows = [
        [row[key] for key in ("id", "cluster", "split", "stratum", "language", "kind", "sha256")]
        for row in manifest["contexts"]
    ]
    manifest["digest"] = digest_value(sorted(rows))
    (folder / MANIFEST_NAME).write_text(canonical_json(manifest))


def replace_code(text: str) -> Callable[[Rows, dict], None]:
    def change(rows: Rows, manifest: dict) -> None:
        for row in rows:
            if row["id"] == "code-001":
                row.update(text=text, chars=len(text), sha256=content_digest(text, (), ()))
                entry = next(entry for entry in manifest["contexts"] if entry["id"] == row["id"])
                entry.update({key: row[key] for key in ("chars", "sha256")})

    return change


def test_verify_scans_the_texts_again(packages: Path) -> None:
    folder = build(packages)
    text = load_suite(folder).select(seed=0)[0].text
    reseal(folder, replace_code(" ".join(prose(1000, 800).split()[200:400])))
    load_suite(folder)
    with pytest.raises(SuiteError, match="code-001 shares 189 of 189 shingles with calibration data"):
        verify_suite(folder)
    reseal(folder, replace_code(text))
    with pytest.raises(SuiteError, match=r"share 100\.0% of their shingles"):
        verify_suite(folder)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(SuiteError, match=rf"{INDEX_NAME} is missing"):
        verify_suite(folder)


def test_a_cluster_lies_in_one_split(packages: Path) -> None:
    folder = build(packages)
    sealed = load_suite(folder).sealed[0]

    def move(rows: Rows, manifest: dict) -> None:
        for row in [*rows, *manifest["contexts"]]:
            if row["stratum"] == sealed.stratum and row["split"] == "analysis":
                row["cluster"] = sealed.cluster

    rewrite(folder, move)
    with pytest.raises(SuiteError, match="lies in both splits"):
        load_suite(folder)

"""Fetch the packages of `sources.toml` by name and read their files as plain-text documents.

Debian packages come from `apt-get download`, npm packages from `npm pack`, Python packages from
`pip download --no-deps`. Nothing is installed; pip alone runs a source distribution's metadata step.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.readers import READERS

SOURCES = Path(__file__).with_name("sources.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One row of `sources.toml`: which files of a package feed which family of text."""

    package: str
    family: str
    licence: str
    paths: tuple[str, ...]
    format: str
    megabytes: float
    sdist: bool = False
    split: str = ""

    def __post_init__(self) -> None:
        if self.format not in READERS:
            raise ValueError(f"{self.package}: format {self.format!r} is not one of {', '.join(READERS)}")

    @property
    def folder(self) -> str:
        """Name of the folder the package is unpacked into."""
        return re.sub(r"[^\w.+-]+", "-", self.package)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file, or one section of a very large file: the unit of exclusion and of the held-out split."""

    id: str
    family: str
    text: str


def shuffle_key(name: str) -> str:
    """Order names as if shuffled, the same way everywhere."""
    return hashlib.sha256(name.encode()).hexdigest()


def load_sources(path: Path = SOURCES) -> tuple[Source, ...]:
    """Read the table of sources; unknown keys are refused by the dataclass."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
    return tuple(Source(**{**row, "paths": tuple(row["paths"])}) for row in rows)


def fetch_package(source: Source, root: Path) -> Path:
    """Download and unpack one package under `root`, once; return the unpacked folder."""
    target = root / "packages" / source.folder
    if target.exists():
        return target
    kind, _, name = source.package.partition(":")
    downloads = root / "downloads" / source.folder
    downloads.mkdir(parents=True, exist_ok=True)
    if not any(downloads.iterdir()):
        # --no-build-isolation keeps pip from downloading build tools just to read an sdist's name.
        sdist = ["--no-binary", ":all:", "--no-build-isolation"] if source.sdist else ["--only-binary", ":all:"]
        command = {
            "deb": ["apt-get", "download", "-q", name],
            "npm": ["npm", "pack", "--silent", name],
            "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *sdist, name],
        }[kind]
        subprocess.run(command, cwd=downloads, check=True, stdout=subprocess.DEVNULL)
    (archive,) = downloads.iterdir()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
    elif archive.suffix in (".whl", ".zip"):
        zipfile.ZipFile(archive).extractall(partial)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
    for nested in [*partial.rglob("*.xpi"), *partial.rglob("src.zip")]:
        zipfile.ZipFile(nested).extractall(nested.with_suffix(".d"))
    partial.rename(target)
    return target


def read_documents(source: Source, folder: Path) -> Iterator[Document]:
    """Yield the documents of one source in the order of their paths' digests: a fixed shuffle.

    Raises
    ------
    FileNotFoundError
        If no file of the package matches: a new version moved them.
    """
    files = {file for pattern in source.paths for file in folder.glob(pattern) if file.is_file()}
    if not files:
        raise FileNotFoundError(f"{source.package}: no file matches {', '.join(source.paths)}")
    for file in sorted(files, key=lambda file: shuffle_key(str(file.relative_to(folder)))):
        raw = file.read_bytes()
        if file.suffix in (".gz", ".dz"):
            raw = gzip.decompress(raw)
        elif file.suffix == ".xz":
            raw = lzma.decompress(raw)
        text = READERS[source.format](raw)
        name = f"{source.package}/{file.relative_to(folder)}"
        sections = re.split(source.split, text, flags=re.M) if source.split else [text]
        for number in sorted(range(len(sections)), key=lambda number: shuffle_key(str(number))):
            document = f"{name}#{number}" if source.split else name
            yield Document(id=document, family=source.family, text=sections[number])

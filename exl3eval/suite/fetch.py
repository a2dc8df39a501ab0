"""Fetch and unpack the named packages that a suite is built from.

Each package comes through its registry's ordinary client, is pinned by version and by the sha256 of its
archive, and is kept in a work folder: a second build downloads nothing. Debian drops superseded versions,
so an archive that is no longer served must be kept or the recipe moved to its successor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from exl3eval.errors import SuiteError
from exl3eval.records import digest_file

CLIENTS = ("apt", "npm", "sdist", "wheel", "folder", "generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where documents come from, and on what terms."""

    id: str
    """Name used by the recipe's picks."""
    client: str
    """One of `CLIENTS`. `folder` is a folder beside the recipe; `generated` has no files."""
    package: str
    """Package name; for `folder` its path relative to the recipe's folder."""
    version: str
    licence: str
    sha256: str
    """Digest of the archive as served; empty for `folder` and `generated`."""
    attribution: str
    """Who wrote the text, as the licence asks."""
    notice: str
    """Path of the licence text inside the unpacked package; empty if the licence asks for none."""


def fetch_package(source: Source, work_dir: Path, recipe_dir: Path) -> Path:
    """Return the folder that holds a source's files, downloading its package if need be.

    Raises
    ------
    SuiteError
        If the client fails, or the archive is not the pinned one.
    """
    if source.client == "folder":
        return (recipe_dir / source.package).resolve()
    unpacked = work_dir / "unpacked" / source.id
    if source.client == "generated":
        return unpacked
    archive = _download(source, work_dir / "archives" / source.id)
    seen = digest_file(archive)
    if seen != source.sha256:
        raise SuiteError(
            f"{source.id}: {archive.name} has sha256 {seen}, the recipe pins {source.sha256 or 'none'}",
            hint="delete the archive to download it again, or review the new package and pin its digest",
        )
    if not unpacked.exists():
        _unpack(archive, unpacked)
    return unpacked


def _download(source: Source, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        name, version = source.package, source.version
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command = {
            "apt": ["apt-get", "download", f"{name}={version}"],
            "npm": ["npm", "pack", "--silent", f"{name}@{version}"],
            "sdist": [*pip, f"{name}=={version}"],
            "wheel": [*pip[:-2], "--only-binary", ":all:", f"{name}=={version}"],
        }[source.client]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise SuiteError(f"{source.id}: {command[0]} is not installed", hint=f"install {command[0]}") from error
        if done.returncode:
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise SuiteError(
                f"{source.id}: cannot download {name} {version}: {reason}",
                hint="put the archive into the work folder, or move the recipe to a version still served",
            )
    archives = sorted(folder.iterdir())
    if len(archives) != 1:
        raise SuiteError(
            f"{source.id}: {len(archives)} archives in the work folder, expected 1", hint="keep the pinned one"
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True, capture_output=True)
        elif archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(partial)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
    except (subprocess.CalledProcessError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise SuiteError(f"cannot unpack {archive.name}: {error}", hint="delete it and build again") from error
    partial.rename(folder)

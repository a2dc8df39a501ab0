"""Run by the interpreter under examination: which packages it has, in which version, with which bytes.

Run as a file, with the standard library alone: the interpreter need not have this project. Prints one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

SUFFIXES = (".py", ".so", ".cu", ".cuh", ".h", ".toml")


def digest_folder(root: Path) -> str:
    """Digest sources and shared objects under a folder: names and bytes, whatever folder they lie in."""
    sha = hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        sha.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return sha.hexdigest()


def examine_package(name: str, distributions: dict[str, list[str]]) -> dict[str, str | None] | None:
    """Describe an import package without importing it; None if there is none."""
    spec = find_spec(name)
    if spec is None:
        return None
    distribution = next(iter(distributions.get(name, ())), None)
    locations = list(spec.submodule_search_locations or ())
    return {
        "distribution": distribution,
        "version": metadata.version(distribution) if distribution else None,
        "sha256": digest_folder(Path(locations[0])) if locations and name != "torch" else None,
    }


def main(names: list[str]) -> None:
    """Print what is found of every package named."""
    distributions = {key: list(value) for key, value in metadata.packages_distributions().items()}
    packages = {name: examine_package(name, distributions) for name in names}
    print(json.dumps({"python": platform.python_version(), "packages": packages}))


if __name__ == "__main__":
    main(sys.argv[1:])

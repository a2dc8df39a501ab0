"""Strict records on disk: canonical JSON, digests, atomic and exclusive writes.

A record never holds NaN, infinity or an absolute path, and a killed writer leaves either the old
file or none (lessons M24: eight published receipts were not valid JSON).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exl3eval.errors import InvalidRunError, UsageError

_READ_BYTES = 1 << 22
RECEIPT_DIGEST = "receipt_digest"


def canonical_json(value: Any) -> str:
    """Render `value` as canonical JSON: sorted keys, no spaces, no NaN or infinity.

    Raises
    ------
    ValueError
        If a float is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_value(value: Any) -> str:
    """Return the sha256 hex digest of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 hex digest of a file's bytes."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            sha.update(block)
    return sha.hexdigest()


def digest_parts(parts: Iterable[tuple[str, str]]) -> str:
    """Digest named digests, independent of their order."""
    return digest_value(sorted(parts))


def parse_json(text: str, *, where: str) -> Any:
    """Parse strict JSON: no NaN, no infinity, no duplicate keys.

    Raises
    ------
    UsageError
        Naming `where` and the reason.
    """

    def refuse_constant(token: str) -> Any:
        raise ValueError(f"{token} is not JSON")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(keys) != len(set(keys)):
            raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except ValueError as error:
        raise UsageError(f"{where} is not strict JSON: {error}", hint="restore the file or write it again") from error


def write_atomic(path: Path, content: bytes | str, *, exclusive: bool = False) -> None:
    """Write a file so that a reader sees all of it or none of it.

    Parameters
    ----------
    path : Path
        Destination; its folder is created.
    content : bytes or str
        Text is written as UTF-8.
    exclusive : bool
        Refuse to replace an existing file (receipts are immutable).

    Raises
    ------
    UsageError
        If `exclusive` and the file exists, or if the disk refuses the write.
    """
    payload = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
            temporary = None
    except FileExistsError as error:
        raise UsageError(f"{path.name} already exists and is immutable", hint="choose another output folder") from error
    except OSError as error:
        raise UsageError(
            f"cannot write {path.name}: {error.strerror}", hint="free space or choose another folder"
        ) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def render_json(value: Any) -> str:
    """Render `value` as the text of a record: indented strict JSON, sorted keys, a final newline."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any, *, exclusive: bool = False) -> None:
    """Write `value` as indented strict JSON (sorted keys, no NaN), atomically."""
    write_atomic(path, render_json(value), exclusive=exclusive)


def seal(value: Mapping[str, Any]) -> dict[str, Any]:
    """Add the digest of everything else that a receipt says."""
    body = {key: item for key, item in value.items() if key != RECEIPT_DIGEST}
    return {**body, RECEIPT_DIGEST: digest_value(body)}


def require_absent(path: Path) -> None:
    """Refuse to begin long work whose receipt would find its place taken.

    Raises
    ------
    UsageError
        If the file exists.
    """
    if path.exists():
        raise UsageError(f"{path.name} already exists and is immutable", hint="choose another output folder")


def write_receipt(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Write a receipt, which nobody may change: it holds the digest of everything else it says; return it.

    Raises
    ------
    UsageError
        If the file exists or the disk refuses the write.
    """
    receipt = seal(value)
    write_json(path, receipt, exclusive=True)
    return receipt


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt and check that it is as it was written, to the byte.

    Raises
    ------
    UsageError
        If the file is missing.
    InvalidRunError
        If it is not strict JSON, has no digest, or was changed.
    """
    if not path.is_file():
        raise UsageError(f"{path.name} does not exist", hint="check the folder given")
    hint = "restore the file, or measure again; a receipt is never edited"
    try:
        value = read_json(path)
        text = path.read_text(encoding="utf-8")
    except UsageError as error:
        raise InvalidRunError(error.message, hint=hint) from error
    if not isinstance(value, dict) or RECEIPT_DIGEST not in value:
        raise InvalidRunError(f"{path.name} is no receipt: it has no `{RECEIPT_DIGEST}`", hint=hint)
    fresh = seal(value)[RECEIPT_DIGEST]
    if fresh != value[RECEIPT_DIGEST]:
        raise InvalidRunError(
            f"{path.name} was altered: its digest is {fresh[:16]}, it says {str(value[RECEIPT_DIGEST])[:16]}", hint=hint
        )
    if text != render_json(value):
        raise InvalidRunError(f"{path.name} was altered: it is laid out as no receipt is written", hint=hint)
    return value


def read_json(path: Path) -> Any:
    """Read strict JSON from a file.

    Raises
    ------
    UsageError
        If the file is missing, is not UTF-8 or is not strict JSON.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"), where=path.name)
    except FileNotFoundError as error:
        raise UsageError(f"{path.name} does not exist", hint="check the folder given") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not UTF-8", hint="restore the file or write it again") from error

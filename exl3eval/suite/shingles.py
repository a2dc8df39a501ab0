"""All-offset word shingles: what two texts share, and what a text shares with calibration data.

A text is normalised (NFKC, casefold) and cut into tokens: each run of word characters is one token and
each Han or Kana character is one token. (Combining signs end a run, so in Devanagari a shingle spans
fewer words: stricter, never laxer.) Every 12 consecutive tokens, at every offset, make a shingle, kept
as its 40-bit blake2b hash. Scanning at a stride missed real contamination, hence every offset.

Against an index of m hashes a clean shingle is a false hit with probability m / 2**40: 8e-7 for the
860 thousand shingles of the calibration data, so 0.2 % for a clean text of 2,500 shingles. A text with any
hit is refused; the rare clean one lost that way costs nothing.
"""

from __future__ import annotations

import lzma
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exl3eval.errors import SuiteError
from exl3eval.records import write_atomic

SHINGLE_WORDS = 12
HASH_BITS = 40

Hashes = NDArray[np.uint64]

_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_SINGLE}]|[^\W{_SINGLE}]+")


def shingle_tokens(text: str) -> list[str]:
    """Return the normalised tokens of a text, in order."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def shingle_hashes(text: str) -> Hashes:
    """Hash every 12-token shingle of a text.

    Returns
    -------
    ndarray of uint64, shape (num_distinct,)
        Sorted distinct 40-bit hashes; empty if the text has fewer than 12 tokens.
    """
    tokens = [token.encode() for token in shingle_tokens(text)]
    count = max(0, len(tokens) - SHINGLE_WORDS + 1)
    raw = bytearray(8 * count)
    for start in range(count):
        shingle = b" ".join(tokens[start : start + SHINGLE_WORDS])
        raw[8 * start : 8 * start + HASH_BITS // 8] = blake2b(shingle, digest_size=HASH_BITS // 8).digest()
    return np.unique(np.frombuffer(bytes(raw), dtype="<u8").astype(np.uint64))


def count_shared(first: Hashes, second: Hashes) -> int:
    """Count the shingles present in both sorted arrays."""
    if not first.size or not second.size:
        return 0
    at = np.minimum(np.searchsorted(second, first), second.size - 1)
    return int(np.count_nonzero(second[at] == first))


def pack_hashes(hashes: Hashes) -> bytes:
    """Compress sorted distinct hashes: first differences, one byte plane after another, xz."""
    steps = np.diff(hashes, prepend=np.uint64(0)).astype("<u8")
    planes = np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 8).T)
    return lzma.compress(planes.tobytes(), preset=6)


def unpack_hashes(packed: bytes) -> Hashes:
    """Invert `pack_hashes`.

    Raises
    ------
    ValueError
        If the bytes are not a packed array of sorted distinct 40-bit hashes.
    """
    try:
        planes = np.frombuffer(lzma.decompress(packed), dtype=np.uint8)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"not xz data: {error}") from error
    if planes.size % 8:
        raise ValueError(f"{planes.size} bytes are not whole 64-bit steps")
    steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<u8").ravel().astype(np.uint64)
    hashes = np.cumsum(steps, dtype=np.uint64)
    if steps.size and (steps[1:].min(initial=1) == 0 or hashes[-1] >> np.uint64(HASH_BITS)):
        raise ValueError("hashes are not sorted, distinct and 40 bits wide")
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationIndex:
    """The hashed shingles of the texts that EXL3 models are calibrated on."""

    hashes: Hashes

    def count_hits(self, hashes: Hashes) -> int:
        """Count the distinct shingles of a text that calibration data also holds."""
        return count_shared(hashes, self.hashes)

    @property
    def false_positive(self) -> float:
        """The probability that one clean shingle reads as a hit."""
        return self.hashes.size / 2**HASH_BITS


def build_index(texts: Iterable[str]) -> CalibrationIndex:
    """Index calibration texts.

    Raises
    ------
    SuiteError
        If they hold no shingle: scanning against nothing would pass everything.
    """
    parts = [shingle_hashes(text) for text in texts]
    hashes = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.uint64)
    if not hashes.size:
        raise SuiteError("the calibration texts hold no 12-word shingle", hint="check the calibration folder")
    return CalibrationIndex(hashes=hashes)


def read_calibration(folder: Path) -> dict[str, str]:
    """Read every `*.xz` calibration text of a folder, keyed by file name.

    Raises
    ------
    SuiteError
        If there is none, or one is not xz-compressed UTF-8.
    """
    paths = sorted(folder.glob("*.xz"))
    if not paths:
        raise SuiteError(f"no *.xz calibration text in {folder.name}", hint="name the folder that holds them")
    texts = {}
    for path in paths:
        try:
            texts[path.name] = lzma.decompress(path.read_bytes()).decode()
        except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise SuiteError(f"{path.name} is not xz-compressed UTF-8: {error}", hint="restore the file") from error
    return texts


def write_index(path: Path, index: CalibrationIndex) -> None:
    """Write an index as one compressed file."""
    write_atomic(path, pack_hashes(index.hashes))


def read_index(path: Path) -> CalibrationIndex:
    """Read an index written by `write_index`.

    Raises
    ------
    SuiteError
        If the file is missing, damaged or empty.
    """
    hint = "restore the file or build the suite again"
    try:
        hashes = unpack_hashes(path.read_bytes())
    except OSError as error:
        raise SuiteError(f"cannot read {path.name}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise SuiteError(f"{path.name} is damaged: {error}", hint=hint) from error
    if not hashes.size:
        raise SuiteError(f"{path.name} holds no shingle", hint=hint)
    return CalibrationIndex(hashes=hashes)

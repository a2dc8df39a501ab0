"""llama.cpp's base-logits file (`--kl-divergence-base`), read without adding what it does not hold.

Little-endian: the magic `_logits_`; int32 n_ctx, n_vocab, n_chunk; int32 token ids [n_chunk, n_ctx]; then for each
chunk n_ctx - 1 - n_ctx / 2 rows (the second half) of uint16: four that are two float32 (step, floor), and one code per
token, padded to an even vocabulary. A log-probability is floor + step * code; code 0 means at or below the floor, up to
half a step. The floor lies at most 16 nats under the row's largest, so the tail's mass is not in the file:
renormalising it adds up to 2.8 % of fake mass (measurement.md section 3).

The token table holds a leading BOS once, although each chunk may have been evaluated with one.

Shapes: R rows of one chunk, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exl3eval.errors import UsageError
from exl3eval.stats.clusters import FloatArray

MAGIC = b"_logits_"
_HEADER_BYTES = len(MAGIC) + 3 * 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlamaKld:
    """An opened file; rows stay on disk until read."""

    name: str
    n_ctx: int
    n_vocab: int
    n_chunk: int
    tokens: NDArray[np.int32]
    codes: NDArray[np.uint16]
    """(n_chunk, R, 4 + padded V), mapped from the file."""

    @property
    def tokens_digest(self) -> str:
        """sha256 of the token ids as little-endian int32."""
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

    @property
    def targets(self) -> NDArray[np.int32]:
        """Token that each stored row predicts, [n_chunk, R]."""
        return self.tokens[:, self.n_ctx // 2 + 1 :]

    def chunk(self, index: int) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Return log-probabilities [R, V] and where they are stored; elsewhere the value is what it is at most."""
        raw = np.ascontiguousarray(self.codes[index])
        step_R, floor_R = raw[:, :4].view("<f4").astype(np.float64).T
        codes_RV = raw[:, 4 : 4 + self.n_vocab].astype(np.float64)
        stored_RV = codes_RV > 0.0
        return floor_R[:, None] + step_R[:, None] * np.where(stored_RV, codes_RV, 0.5), stored_RV


def read_llama_kld(path: Path) -> LlamaKld:
    """Open a base-logits file.

    Raises
    ------
    UsageError
        If the magic, the header or the size does not fit.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror}", hint="check the path") from error
    if len(head) < _HEADER_BYTES or not head.startswith(MAGIC):
        raise UsageError(
            f"{path.name} starts with {head[: len(MAGIC)]!r}, expected {MAGIC!r}",
            hint="give a file written by llama-perplexity --kl-divergence-base",
        )
    n_ctx, n_vocab, n_chunk = (int(value) for value in np.frombuffer(head, dtype="<i4", offset=len(MAGIC)))
    if n_ctx < 4 or n_vocab < 2 or n_chunk < 1:
        raise UsageError(
            f"{path.name}: n_ctx = {n_ctx}, n_vocab = {n_vocab}, n_chunk = {n_chunk}", hint="the file is damaged"
        )
    num_rows, width = n_ctx - 1 - n_ctx // 2, 4 + 2 * ((n_vocab + 1) // 2)
    expected = _HEADER_BYTES + 4 * n_ctx * n_chunk + 2 * num_rows * width * n_chunk
    if size != expected:
        raise UsageError(
            f"{path.name} has {size:,} bytes, its header says {expected:,}",
            hint="the file was cut short or is of another version; write it again",
        )
    tokens = np.fromfile(path, dtype="<i4", count=n_ctx * n_chunk, offset=_HEADER_BYTES).reshape(n_chunk, n_ctx)
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise UsageError(f"{path.name} holds token ids outside 0..{n_vocab - 1}", hint="the file is damaged")
    codes = np.memmap(
        path, dtype="<u2", mode="r", offset=_HEADER_BYTES + 4 * n_ctx * n_chunk, shape=(n_chunk, num_rows, width)
    )
    return LlamaKld(name=path.name, n_ctx=n_ctx, n_vocab=n_vocab, n_chunk=n_chunk, tokens=tokens, codes=codes)


def summarise_base(base: LlamaKld) -> list[dict[str, Any]]:
    """Return per chunk: entropy of what is stored, its missing mass, and NLL of the targets that are stored."""
    rows = []
    for index in range(base.n_chunk):
        log_RV, stored_RV = base.chunk(index)
        p_RV = np.where(stored_RV, np.exp(log_RV), 0.0)
        place = (np.arange(len(log_RV)), base.targets[index])
        known_R = stored_RV[place]
        rows.append(
            {
                "context": f"chunk-{index}",
                "value": float(-(p_RV * log_RV).sum(axis=1).mean()),
                "num_positions": len(log_RV),
                "missing_mass": float(1.0 - p_RV.sum(axis=1).mean()),
                "nll": float(-log_RV[place][known_R].mean()) if known_R.any() else None,
                "targets_below_floor": int((~known_R).sum()),
            }
        )
    return rows


def summarise_pair(base: LlamaKld, candidate: LlamaKld) -> list[dict[str, Any]]:
    """Return per chunk a lower bound of KL(base || candidate), in nats per position.

    KL is the sum over tokens of q - p - p (log q - log p), every term of which is >= 0 and 0 for p = q. A code 0 says
    only that a probability is at most the floor's, so its term is replaced by the least that it can be: identical files
    read exactly 0 and no mass is invented. Rounding of the codes can lift the bound above the divergence by at most
    about one step times sum |q - p|, 2.4e-4 nats times twice the total variation.

    Raises
    ------
    UsageError
        If the files differ in shape, vocabulary or tokens.
    """
    for name in ("n_ctx", "n_vocab", "n_chunk", "tokens_digest"):
        seen, expected = getattr(candidate, name), getattr(base, name)
        if seen != expected:
            raise UsageError(
                f"{candidate.name} and {base.name} differ in {name}: {seen} against {expected}",
                hint="only files over the same tokens and vocabulary can be compared",
            )
    rows = []
    for index in range(base.n_chunk):
        (log_p, has_p), (log_q, has_q) = base.chunk(index), candidate.chunk(index)
        log_p = np.where(has_p, log_p, np.minimum(log_p, np.where(has_q, log_q, log_p)))
        log_q = np.where(has_q, log_q, np.minimum(log_q, log_p))
        gap = np.where(has_p | has_q, log_q - log_p, 0.0)
        kl_R = (np.exp(log_p) * (np.expm1(gap) - gap)).sum(axis=1)
        rows.append({"context": f"chunk-{index}", "value": float(kl_R.mean()), "num_positions": len(kl_R)})
    return rows

"""Contexts to token ids, once per tokenizer: from here on only ids travel.

Re-encoding decoded text merges tokens differently, so ids are made once, digested, kept in a
content-addressed file and handed to every arm as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exl3eval.errors import CheckpointError, Exl3EvalError, SuiteError
from exl3eval.records import (
    canonical_json,
    digest_file,
    digest_parts,
    digest_value,
    parse_json,
    read_json,
    write_atomic,
)
from exl3eval.suite.chat import render_chat
from exl3eval.suite.context import Context, Suite

TOKENS_SCHEMA = "exl3eval.tokens/1"
_METADATA_KEY = "exl3eval"
_RECORD_FIELDS = {"schema", "key", "bos_id", "digest", "contexts"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContext:
    """One context as token ids."""

    id: str
    cluster: str
    stratum: str
    template: str
    """How a dialogue was rendered: `tokenizer` or `fallback`; `none` for plain text."""
    digest: str
    """sha256 of the ids as little-endian int32."""
    ids: Ids = field(repr=False)
    """(num_tokens,) int32, read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSuite:
    """The token ids that every arm is scored on."""

    suite_digest: str
    tokenizer_digest: str
    split: str
    seed: int
    num_tokens: int
    """Ids per context, a leading BOS included."""
    bos_id: int | None
    """Prepended to every context; None if the tokenizer itself prepends none."""
    digest: str
    """Digest of all of this but the seed: equal digests mean the same ids in the same order."""
    contexts: tuple[TokenContext, ...]


def tokenize_suite(
    suite: Suite,
    tokenizer_dir: Path,
    *,
    split: str = "analysis",
    num_contexts: int | None = None,
    num_tokens: int = 2048,
    seed: int = 0,
    cache_dir: Path | None = None,
) -> TokenSuite:
    """Tokenize a draw of a suite, or read it from the cache.

    Parameters
    ----------
    suite : Suite
    tokenizer_dir : Path
        A model directory; only its local files are read and none of its code is run.
    split, num_contexts, seed
        As in `Suite.select`.
    num_tokens : int
        Ids per context; each context is cut to its first `num_tokens`.
    cache_dir : Path, optional
        Where the token file is kept; None keeps nothing.

    Raises
    ------
    CheckpointError
        If the directory holds no tokenizer that loads without running its code.
    SuiteError
        If a context is shorter than `num_tokens`, or a cached file was altered.
    """
    if num_tokens < 2:
        raise SuiteError(f"{num_tokens} tokens per context predict nothing", hint="use at least 2")
    chosen = suite.select(split, num_contexts, seed)
    key = {
        "schema": TOKENS_SCHEMA,
        "suite_digest": suite.digest,
        "template_sha256": hashlib.sha256(suite.fallback_template.encode()).hexdigest(),
        "tokenizer_digest": digest_tokenizer(tokenizer_dir),
        "split": split,
        "seed": seed,
        "num_tokens": num_tokens,
        "contexts": [context.id for context in chosen],
    }
    path = None if cache_dir is None else cache_dir / "tokens" / f"{digest_value(key)}.safetensors"
    if path is not None and path.exists():
        return _read_tokens(path, key, chosen)
    tokenizer = load_tokenizer(tokenizer_dir)
    bos_id = leading_bos(tokenizer)
    tokens = [_tokenize(context, tokenizer, bos_id, num_tokens, suite.fallback_template) for context in chosen]
    done = _assemble(key, bos_id, tokens)
    if path is not None:
        write_atomic(path, _pack(done, key))
    return done


def digest_tokenizer(tokenizer_dir: Path) -> str:
    """Digest what decides the ids: the tokenizer's files and the declared model type.

    Raises
    ------
    CheckpointError
        If the directory holds none of the files.
    """
    present = [tokenizer_dir / name for name in _TOKENIZER_FILES if (tokenizer_dir / name).is_file()]
    if not present:
        raise CheckpointError(
            f"{tokenizer_dir.name} holds no tokenizer file", hint="copy the tokenizer of the model beside its weights"
        )
    parts = [(path.name, digest_file(path)) for path in present]
    if (tokenizer_dir / "config.json").is_file():
        parts.append(("model_type", str(read_json(tokenizer_dir / "config.json").get("model_type"))))
    return digest_parts(parts)


def load_tokenizer(tokenizer_dir: Path) -> Any:
    """Load a tokenizer from local files, running none of the directory's code.

    Raises
    ------
    CheckpointError
        If transformers cannot.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; each means this directory will not do
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"cannot load the tokenizer of {tokenizer_dir.name}: {reason}", hint="check its tokenizer files"
        ) from error


def leading_bos(tokenizer: Any) -> int | None:
    """Return the BOS id if the tokenizer itself prepends one, judged by what it makes of no text at all."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    return int(ids[0]) if ids and ids[0] == tokenizer.bos_token_id else None


def _tokenize(
    context: Context, tokenizer: Any, bos_id: int | None, num_tokens: int, fallback_template: str
) -> TokenContext:
    text, template = context.text, "none"
    if context.kind == "chat":
        text, template = render_chat(context, tokenizer, fallback_template)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if bos_id is not None and ids[:1] != [bos_id]:
        ids = [bos_id, *ids]
    if len(ids) < num_tokens:
        raise SuiteError(
            f"context {context.id} has {len(ids)} tokens with this tokenizer, {num_tokens} asked for",
            hint=f"ask for at most {len(ids)} tokens",
        )
    return _token_context(context, template, np.asarray(ids[:num_tokens], dtype=np.int32))


def _token_context(context: Context, template: str, ids: Ids) -> TokenContext:
    ids.setflags(write=False)
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    return TokenContext(
        id=context.id, cluster=context.cluster, stratum=context.stratum, template=template, digest=digest, ids=ids
    )


def _assemble(key: dict[str, Any], bos_id: int | None, tokens: list[TokenContext]) -> TokenSuite:
    rows = [[token.id, token.cluster, token.stratum, token.template, token.digest] for token in tokens]
    fields = {name: key[name] for name in ("suite_digest", "tokenizer_digest", "split", "num_tokens")}
    digest = digest_value({"bos_id": bos_id, "contexts": rows, **fields})
    return TokenSuite(bos_id=bos_id, digest=digest, seed=key["seed"], contexts=tuple(tokens), **fields)


def _pack(tokens: TokenSuite, key: dict[str, Any]) -> bytes:
    from safetensors.numpy import save

    rows = [{"id": row.id, "template": row.template, "digest": row.digest} for row in tokens.contexts]
    record = {"key": key, "bos_id": tokens.bos_id, "digest": tokens.digest, "contexts": rows, "schema": TOKENS_SCHEMA}
    ids = np.stack([row.ids for row in tokens.contexts])
    return save({"ids": ids}, metadata={_METADATA_KEY: canonical_json(record)})


def _read_tokens(path: Path, key: dict[str, Any], chosen: tuple[Context, ...]) -> TokenSuite:
    """Read a token file, trusting nothing in it: each digest is computed again."""
    try:
        return _check_tokens(path, key, chosen)
    except _Altered as error:
        raise SuiteError(
            f"token file {path.name[:12]} in the cache was altered: {error}", hint=f"delete {path.name} and run again"
        ) from error


class _Altered(Exception):
    """A token file does not hold what its name says."""


def _check_tokens(path: Path, key: dict[str, Any], chosen: tuple[Context, ...]) -> TokenSuite:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            record = parse_json((file.metadata() or {})[_METADATA_KEY], where=path.name)
            names, ids = list(file.keys()), file.get_tensor("ids")
    except (SafetensorError, Exl3EvalError, KeyError, OSError) as error:
        raise _Altered(f"unreadable ({error})") from error
    if not isinstance(record, dict) or record.keys() != _RECORD_FIELDS or names != ["ids"]:
        raise _Altered("unknown content")
    if record["schema"] != TOKENS_SCHEMA or record["key"] != key:
        raise _Altered("made for another suite, tokenizer or draw")
    if ids.dtype != np.int32 or ids.shape != (len(chosen), key["num_tokens"]):
        raise _Altered(f"ids are {ids.dtype} {ids.shape}")
    tokens = list(_check_rows(record["contexts"], ids, chosen))
    done = _assemble(key, record["bos_id"], tokens)
    if done.digest != record["digest"]:
        raise _Altered("overall digest differs")
    return done


def _check_rows(rows: Any, ids: Ids, chosen: tuple[Context, ...]) -> Iterator[TokenContext]:
    if not isinstance(rows, list) or len(rows) != len(chosen):
        raise _Altered("rows are missing")
    for row, context, row_ids in zip(rows, chosen, ids, strict=True):
        if not isinstance(row, dict) or row.keys() != {"id", "template", "digest"}:
            raise _Altered("a row has unknown fields")
        token = _token_context(context, row["template"], row_ids.copy())
        if row["id"] != context.id or row["digest"] != token.digest:
            raise _Altered(f"ids of {context.id} differ from their digest")
        yield token

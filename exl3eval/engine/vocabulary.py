"""The vocabulary contract: exactly the tokenizer's ids are scored, and both arms share them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exl3eval.errors import UsageError
from exl3eval.records import digest_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids that a tokenizer can emit.

    Parameters
    ----------
    size : int
        Largest id + 1.
    digest : str
        sha256 over (token, id) pairs.
    tokens : dict
        Token -> id.
    """

    size: int
    digest: str
    tokens: dict[str, int]


def read_vocabulary(directory: Path) -> Vocabulary:
    """Read the vocabulary of a model directory's tokenizer.

    Raises
    ------
    UsageError
        If there is no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        tokens = dict(tokenizer.get_vocab())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory.name}: no tokenizer that transformers can read", hint="copy the model's tokenizer files there"
        ) from error
    if not tokens:
        raise UsageError(
            f"{directory.name}: the tokenizer has no tokens", hint="copy the model's tokenizer files there"
        )
    return Vocabulary(size=max(tokens.values()) + 1, digest=digest_value(sorted(tokens.items())), tokens=tokens)


def check_same_vocabulary(reference: Vocabulary, candidate: Vocabulary) -> None:
    """Refuse two different vocabularies.

    Raises
    ------
    UsageError
        Naming sizes and the first token that differs.
    """
    if reference.digest == candidate.digest:
        return
    differing = sorted(
        token
        for token in reference.tokens.keys() | candidate.tokens.keys()
        if reference.tokens.get(token) != candidate.tokens.get(token)
    )
    raise UsageError(
        f"the reference's vocabulary has {len(reference.tokens)} tokens and the model's {len(candidate.tokens)}; "
        f"{len(differing)} differ, first {differing[0]!r}",
        hint="compare a quantized model with the model it was made from",
    )

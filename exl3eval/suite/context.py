"""The nouns of a suite: a context, a stratum's floor, the suite itself, and what they are digested by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

from exl3eval.errors import SuiteError
from exl3eval.records import canonical_json, digest_value

SPLITS = ("analysis", "qualification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One held-out text: a window of one source document."""

    id: str
    cluster: str
    """The source document; contexts of one cluster are not independent."""
    split: str
    """`analysis`, or `qualification` (sealed)."""
    stratum: str
    language: str
    kind: str
    """`text`, or `chat`: then `text` is empty and `messages` go through a chat template."""
    source: str
    """Package and path of the document."""
    version: str
    licence: str
    chars: int
    """Unicode characters of the text, or of all message contents."""
    sha256: str
    """Digest of the text's UTF-8 bytes, or of the canonical JSON of messages and tools."""
    text: str = field(default="", repr=False)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumFloor:
    """What a stratum must hold: contexts per split, and characters per context."""

    analysis: int
    qualification: int
    min_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A loaded suite. The sealed split is apart, so that using it is always a decision."""

    name: str
    digest: str
    """Digest of every row's identity and text digest; two suites with one digest hold the same texts."""
    contexts: tuple[Context, ...]
    """The analysis split."""
    sealed: tuple[Context, ...] = field(repr=False)
    """The qualification split; ask `select` for it by name."""
    floors: Mapping[str, StratumFloor]
    licences: Mapping[str, int]
    """Contexts per licence, both splits."""
    fallback_template: str = field(repr=False)
    """Chat template for tokenizers that bring none, or whose template drops tool calls."""

    def select(self, split: str = "analysis", num_contexts: int | None = None, seed: int = 0) -> tuple[Context, ...]:
        """Draw the first `num_contexts` of a seeded permutation whose every prefix is balanced over strata.

        The draw for a smaller number is a prefix of the draw for a larger one, so sequential looks extend
        each other.

        Parameters
        ----------
        split : str
            `analysis`, or `qualification` (opens the sealed split).
        num_contexts : int, optional
            Default: all of the split.
        seed : int
            Another seed draws another permutation.

        Raises
        ------
        SuiteError
            If the split is unknown or holds fewer contexts.
        """
        if split not in SPLITS:
            raise SuiteError(f"unknown split {split!r}", hint=f"use {' or '.join(SPLITS)}")
        pool = self.contexts if split == "analysis" else self.sealed
        wanted = len(pool) if num_contexts is None else num_contexts
        if not 0 < wanted <= len(pool):
            raise SuiteError(
                f"{wanted} contexts asked for, suite {self.name} holds {len(pool)} in split {split}",
                hint=f"ask for 1 to {len(pool)}",
            )
        return balanced_order(pool, seed=seed)[:wanted]


def balanced_order(contexts: Iterable[Context], *, seed: int) -> tuple[Context, ...]:
    """Permute contexts so that each prefix holds the strata in the proportion of the whole.

    Each step takes the stratum furthest behind its share (ties by seeded hash), then its next context in
    seeded order.
    """

    def rank(name: str) -> bytes:
        return sha256(f"{seed}:{name}".encode()).digest()

    queues: dict[str, list[Context]] = {}
    for context in sorted(contexts, key=lambda context: rank(context.id), reverse=True):
        queues.setdefault(context.stratum, []).append(context)
    sizes = {stratum: len(queue) for stratum, queue in queues.items()}
    total = sum(sizes.values())
    ties = {stratum: rank(stratum) for stratum in sizes}
    order: list[Context] = []
    while len(order) < total:
        behind = {
            stratum: (len(order) + 1) * sizes[stratum] - total * (sizes[stratum] - len(queue))
            for stratum, queue in queues.items()
            if queue
        }
        order.append(queues[max(behind, key=lambda stratum: (behind[stratum], ties[stratum]))].pop())
    return tuple(order)


def suite_digest(contexts: Iterable[Context]) -> str:
    """Digest what the numbers depend on: each row's identity, place and text digest, in id order."""
    rows = sorted([row.id, row.cluster, row.split, row.stratum, row.language, row.kind, row.sha256] for row in contexts)
    return digest_value(rows)


def content_digest(text: str, messages: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]) -> str:
    """Digest a text's bytes, or the canonical JSON of a dialogue."""
    messages = list(messages)
    content = canonical_json({"messages": messages, "tools": list(tools)}) if messages else text
    return sha256(content.encode()).hexdigest()


def content_chars(text: str, messages: Iterable[Mapping[str, Any]]) -> int:
    """Count the characters of a text, or of all message contents and tool-call arguments."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    spoken = sum(len(message["content"]) for message in messages)
    return len(text) + spoken + sum(len(canonical_json(call["function"])) for call in calls)


def check_floors(contexts: Iterable[Context], floors: Mapping[str, StratumFloor]) -> None:
    """Refuse a suite in which a stratum holds too few or too short contexts.

    Raises
    ------
    SuiteError
        Naming the stratum or context, seen against declared.
    """
    contexts = list(contexts)
    for context in contexts:
        if context.stratum not in floors:
            raise SuiteError(
                f"{context.id}: undeclared stratum {context.stratum!r}", hint="declare it in the recipe's strata"
            )
        if context.chars < floors[context.stratum].min_chars:
            raise SuiteError(
                f"{context.id} has {context.chars} characters, stratum {context.stratum} declares at least"
                f" {floors[context.stratum].min_chars}",
                hint="choose a longer document",
            )
    for stratum, floor in floors.items():
        for split in SPLITS:
            seen = sum(context.stratum == stratum and context.split == split for context in contexts)
            if seen < getattr(floor, split):
                raise SuiteError(
                    f"stratum {stratum} holds {seen} contexts in split {split}, declared {getattr(floor, split)}",
                    hint="a short stratum is never shipped: add documents to the recipe",
                )


def manifest_row(context: Context) -> dict[str, Any]:
    """Return a context's row without its text."""
    return {
        item.name: getattr(context, item.name)
        for item in fields(context)
        if item.name not in ("text", "messages", "tools")
    }


def text_row(context: Context) -> dict[str, Any]:
    """Return a context's row with its text."""
    if context.kind == "chat":
        return manifest_row(context) | {"messages": list(context.messages), "tools": list(context.tools)}
    return manifest_row(context) | {"text": context.text}


def list_rows(suite: Suite) -> list[dict[str, Any]]:
    """Return one row per context of the analysis split, for a table: everything but the text."""
    return [manifest_row(context) for context in suite.contexts]


def content_text(context: Context) -> str:
    """Return all the words of a context: its text, or its messages and tool calls."""
    if context.kind == "text":
        return context.text
    calls = [canonical_json(message.get("tool_calls", [])) for message in context.messages]
    spoken = [message["content"] for message in context.messages]
    return "\n".join(part for pair in zip(spoken, calls, strict=True) for part in pair)

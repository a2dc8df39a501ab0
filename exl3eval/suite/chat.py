"""Dialogues to text, through the tokenizer's own chat template or the suite's fallback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from exl3eval.errors import SuiteError
from exl3eval.records import canonical_json
from exl3eval.suite.context import Context

OWN, FALLBACK = "tokenizer", "fallback"


def render_chat(context: Context, tokenizer: Any, fallback_template: str) -> tuple[str, str]:
    """Render a dialogue.

    The tokenizer's own template is used if it has one that accepts the dialogue and keeps all of it: every
    message, and every tool call's name and arguments (some templates silently drop tool calls).

    Parameters
    ----------
    context : Context
        Of kind `chat`.
    tokenizer : transformers tokenizer
    fallback_template : str
        Jinja chat template used otherwise.

    Returns
    -------
    text, template : str
        The rendered dialogue, and which template rendered it (`tokenizer` or `fallback`).

    Raises
    ------
    SuiteError
        If the fallback template loses a part as well.
    """
    if tokenizer.chat_template:
        text = _try_template(context, tokenizer, None)
        if text is not None and not any(_lost_parts(context, text)):
            return text, OWN
    text = _try_template(context, tokenizer, fallback_template)
    lost = next(_lost_parts(context, text), None) if text is not None else "everything"
    if text is None or lost is not None:
        raise SuiteError(
            f"the fallback chat template loses {lost!r} of context {context.id}", hint="restore the suite's template"
        )
    return text, FALLBACK


def _try_template(context: Context, tokenizer: Any, template: str | None) -> str | None:
    """Render, or return None if the template refuses the dialogue (roles, tools)."""
    import jinja2

    # Templates may edit what they are given.
    messages, tools = copy.deepcopy(list(context.messages)), copy.deepcopy(list(context.tools))
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, chat_template=template, tokenize=False, add_generation_prompt=False
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError):
        return None


def _lost_parts(context: Context, text: str) -> Iterator[str]:
    """Yield the parts of a dialogue that its rendering lacks.

    Message contents are looked for in order; a call's name and arguments between the contents around it.
    """
    spans, end = [], 0
    for message in context.messages:
        content = message["content"].strip()
        start = text.find(content, end)
        if start < 0:
            yield content
            return
        end = start + len(content)
        spans.append((start, end))
    for number, message in enumerate(context.messages):
        after = spans[number - 1][1] if number else 0
        before = spans[number + 1][0] if number + 1 < len(spans) else len(text)
        yield from (part for part in _call_parts(message) if not _holds(text[after:before], part))
    yield from (name for tool in context.tools if not _holds(text, name := tool["function"]["description"]))


def _call_parts(message: Mapping[str, Any]) -> list[str]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    values = [value for call in calls for value in call["arguments"].values()]
    return [call["name"] for call in calls] + [v if isinstance(v, str) else canonical_json(v) for v in values]


def _holds(text: str, part: str) -> bool:
    """Whether a text holds a part, as it is or with JSON's ASCII escapes."""
    return part in text or json.dumps(part)[1:-1] in text

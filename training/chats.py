"""Seeded conversations in the chat template: questions about real headings, and calls of invented tools."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from training.chat import render_chat
from training.fetch import Document
from training.words import CITIES, NAMES, NOUNS

QUESTIONS = {
    "de": ("Was bedeutet „{}“?", "Erkläre mir bitte: {}", "Was steht unter „{}“?"),
    "fr": ("Que signifie « {} » ?", "Explique-moi : {}", "Que faut-il savoir sur « {} » ?"),
    "es": ("¿Qué significa «{}»?", "Explícame esto: {}", "¿Qué debo saber sobre «{}»?"),
    "zh": ("“{}”是什么意思？", "请解释一下：{}", "关于“{}”有哪些内容？"),
    "ja": ("「{}」とは何ですか。", "「{}」について説明してください。", "{} を教えてください。"),
    "ru": ("Что такое «{}»?", "Объясни, пожалуйста: {}", "Что сказано о «{}»?"),
    "ar": ("ما معنى «{}»؟", "اشرح لي: {}", "ماذا تعرف عن «{}»؟"),
    "hi": ("“{}” का क्या अर्थ है?", "कृपया समझाइए: {}", "“{}” के बारे में बताइए।"),
    "en": ("What is meant by {}?", "Explain this to me: {}", "Tell me about {}.", "Could you summarise {}?"),
}
SYSTEMS = ("You are a helpful assistant.", "Answer briefly and truthfully.", "You are a patient technical writer.")
TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Current weather of a city.", {"city": "string", "unit": "string"}),
    "find_records": ("Search records by kind and owner.", {"kind": "string", "owner": "string", "limit": "integer"}),
    "convert_amount": (
        "Convert an amount between currencies.",
        {"amount": "number", "source": "string", "to": "string"},
    ),
    "set_reminder": ("Store a reminder.", {"owner": "string", "subject": "string", "minutes": "integer"}),
}


def heading_pairs(document: Document) -> Iterator[tuple[str, str]]:
    """Yield (heading, paragraph) pairs: a short line directly followed by a paragraph of text."""
    blocks = [block.strip() for block in document.text.split("\n\n")]
    for heading, body in itertools.pairwise(blocks):
        title = heading.strip("=-~*# \n")
        if 3 < len(title) < 70 and "\n" not in title and 100 < len(body) < 900 and body[0].isalnum():
            yield title, body


def question_chat(rng: random.Random, family: str, pairs: list[tuple[str, str]]) -> str:
    """Render a conversation of questions about headings, answered by the paragraphs below them."""
    questions = QUESTIONS.get(family, QUESTIONS["en"])
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for title, body in pairs:
        messages.append({"role": "user", "content": rng.choice(questions).format(title)})
        messages.append({"role": "assistant", "content": body})
    return render_chat(messages)


def _arguments(rng: random.Random, name: str) -> tuple[dict[str, Any], str, Any, str]:
    city, owner, noun = rng.choice(CITIES), rng.choice(NAMES), rng.choice(NOUNS)
    if name == "get_weather":
        degrees = rng.randint(-9, 38)
        sky = rng.choice(("clear", "overcast", "light rain", "fog", "thunder"))
        return (
            {"city": city, "unit": "celsius"},
            f"How warm is it in {city} right now?",
            {"city": city, "temperature": degrees, "sky": sky},
            f"It is {degrees} degrees in {city}, with {sky}.",
        )
    if name == "find_records":
        limit = rng.randint(2, 9)
        found = [{"id": rng.randint(1000, 99999), "kind": noun, "open": rng.random() < 0.5} for _ in range(limit)]
        count = sum(row["open"] for row in found)
        return (
            {"kind": noun, "owner": owner, "limit": limit},
            f"Show me up to {limit} {noun} records that belong to {owner}.",
            found,
            f"{owner} has {limit} {noun} records, {count} of them open: {', '.join(str(r['id']) for r in found)}.",
        )
    if name == "convert_amount":
        amount, rate = rng.randint(5, 9000) / 4, rng.randint(50, 250) / 100
        source, to = rng.sample(("EUR", "USD", "JPY", "INR", "CNY", "RUB", "EGP"), 2)
        return (
            {"amount": amount, "source": source, "to": to},
            f"How much is {amount} {source} in {to}?",
            {"rate": rate, "result": round(amount * rate, 2)},
            f"At a rate of {rate}, {amount} {source} is {round(amount * rate, 2)} {to}.",
        )
    minutes = rng.choice((5, 10, 15, 30, 45, 90))
    return (
        {"owner": owner, "subject": noun, "minutes": minutes},
        f"Remind {owner} about the {noun} in {minutes} minutes.",
        {"stored": True, "id": f"r-{rng.randint(100, 9999)}"},
        f"Done: {owner} will be reminded about the {noun} in {minutes} minutes.",
    )


def tool_chat(rng: random.Random) -> str:
    """Render a conversation in which the assistant calls tools and reports their results."""
    names = rng.sample(sorted(TOOLS), rng.randint(1, 3))
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": TOOLS[name][0],
                "parameters": {
                    "type": "object",
                    "properties": {field: {"type": kind} for field, kind in TOOLS[name][1].items()},
                    "required": list(TOOLS[name][1])[:1],
                },
            },
        }
        for name in names
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(SYSTEMS)}]
    for _ in range(rng.randint(1, 5)):
        name = rng.choice(names)
        arguments, question, result, answer = _arguments(rng, name)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": json.dumps(result)},
            {"role": "assistant", "content": answer},
        ]
    return render_chat(messages, tools=tools)


def generate_chats(documents: list[Document], seed: int, megabytes: float) -> Iterator[Document]:
    """Yield chats built from the headings of natural-language documents; each chat keeps its document's id."""
    rng = random.Random(f"{seed}:chats")
    size = 0
    for document in rng.sample(documents, len(documents)):
        pairs = list(heading_pairs(document)) if document.family not in ("code", "json", "tables", "logs") else []
        rng.shuffle(pairs)
        for start in range(0, min(len(pairs), 30), 5):
            text = question_chat(rng, document.family, pairs[start : start + 5])
            yield Document(id=f"{document.id}?chat={start}", family="chat", text=text)
            size += len(text.encode())
        if size > megabytes * 1e6:
            return

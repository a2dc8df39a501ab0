"""The bundled model's special tokens and chat template (ChatML with tools)."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jinja2

PAD, BOS, EOS, START, END = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|im_start|>tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{{- message['content'] if message['content'] is string else '' -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' -}}{{- (call['function'] if call['function'] is defined else call) | tojson -}}{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


_TEMPLATE = _template()


def render_chat(messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> str:
    """Render a conversation exactly as the model's tokenizer does, BOS included."""
    return _TEMPLATE.render(messages=messages, tools=tools, bos_token=BOS)

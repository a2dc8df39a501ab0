"""Contexts to ids with a tiny tokenizer: policies, determinism, and a cache that trusts nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from exl3eval.errors import CheckpointError, SuiteError
from exl3eval.suite.chat import render_chat
from exl3eval.suite.context import Context, StratumFloor, Suite
from exl3eval.suite.load import load_suite
from exl3eval.suite.tokens import digest_tokenizer, leading_bos, load_tokenizer, tokenize_suite

OWN_TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
{{- c.function | tojson }}{% endfor %}
{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"""
DROPS_CALLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{{ (tools or []) | tojson }}"
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)
FALLBACK = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {{ (m.tool_calls or []) | tojson }}\n{% endfor %}"
FALLBACK += "{{ (tools or []) | tojson }}"

TOOLS = ({"type": "function", "function": {"name": "tide", "description": "Tide at a harbour.", "parameters": {}}},)
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"harbour": "Tromsø", "metres": 4}}}
DIALOGUE = (
    {"role": "user", "content": "How high?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "tide", "content": '{"high": 2.5}'},
    {"role": "assistant", "content": "It reaches 2.5 m."},
)


def save_tokenizer(folder: Path, *, bos: bool = True, template: str | None = None, **config: object) -> Path:
    """Write a tokenizer of single bytes: id 0 is BOS, then one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {char: number for number, char in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def context(name: str, text: str = "", **fields: object) -> Context:
    filled = {
        "id": name,
        "cluster": name,
        "split": "analysis",
        "stratum": "prose",
        "language": "en",
        "kind": "text",
        "source": "the test",
        "version": "1",
        "licence": "CC0-1.0",
        "chars": len(text),
        "sha256": "",
        "text": text,
    }
    return Context(**(filled | fields))


CHAT = context("chat", kind="chat", stratum="chat", messages=DIALOGUE, tools=TOOLS)


@pytest.fixture
def suite() -> Suite:
    texts = [context(f"prose-{number}", f"Text number {number}: naïve 漢字. " * 4) for number in range(3)]
    return Suite(
        name="tiny",
        digest="d" * 64,
        contexts=(*texts, CHAT),
        sealed=(context("sealed", "Sealed text. " * 9, split="qualification"),),
        floors={"prose": StratumFloor(analysis=3, qualification=1, min_chars=1)},
        licences={"CC0-1.0": 5},
        fallback_template=FALLBACK,
    )


@pytest.mark.parametrize("bos", [True, False])
def test_ids_are_the_texts_with_the_tokenizers_own_bos(suite: Suite, tmp_path: Path, bos: bool) -> None:
    folder = save_tokenizer(tmp_path / "model", bos=bos)
    tokens = tokenize_suite(suite, folder, num_tokens=40)
    assert tokens.bos_id == (0 if bos else None)
    assert [row.id for row in tokens.contexts] == [row.id for row in suite.select()]
    for row, chosen in zip(tokens.contexts, suite.select(), strict=True):
        assert row.ids.shape == (40,) and row.ids.dtype == np.int32 and not row.ids.flags.writeable
        body = row.ids[1:] if bos else row.ids
        decoded = load_tokenizer(folder).decode(body, clean_up_tokenization_spaces=False)
        assert (row.ids[0] == 0) == bos
        if chosen.kind == "chat":
            assert decoded.startswith("[user] How high?")
        else:
            assert decoded == chosen.text.encode()[: body.size].decode()


def test_a_bos_written_by_the_chat_template_is_not_doubled(suite: Suite, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", template="{{ bos_token }}" + OWN_TEMPLATE)
    row = next(row for row in tokenize_suite(suite, folder, num_tokens=30).contexts if row.id == "chat")
    assert row.template == "tokenizer"
    assert row.ids[:2].tolist()[0] == 0 and row.ids[1] != 0


def test_bos_is_decided_by_the_empty_text(tmp_path: Path) -> None:
    assert leading_bos(load_tokenizer(save_tokenizer(tmp_path / "with"))) == 0
    assert leading_bos(load_tokenizer(save_tokenizer(tmp_path / "without", bos=False))) is None


@pytest.mark.parametrize(
    ("template", "used"),
    [(OWN_TEMPLATE, "tokenizer"), (DROPS_CALLS, "fallback"), (REFUSES_TOOLS, "fallback"), (None, "fallback")],
    ids=["own", "drops calls", "refuses tools", "none"],
)
def test_tool_calls_survive_whatever_the_template(tmp_path: Path, template: str | None, used: str) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", template=template))
    text, seen = render_chat(CHAT, tokenizer, FALLBACK)
    assert seen == used
    assert text.index("How high?") < text.index("Tromsø") < text.index("2.5 m.")
    assert '"name": "tide"' in text and "Tide at a harbour." in text
    assert CHAT.messages == DIALOGUE


def test_a_lossy_fallback_is_an_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model"))
    with pytest.raises(SuiteError, match="loses 'tide' of context chat"):
        render_chat(CHAT, tokenizer, DROPS_CALLS)


def test_the_shipped_fallback_keeps_every_shipped_dialogue(tmp_path: Path) -> None:
    shipped = load_suite()
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model"))
    dialogues = [row for row in shipped.contexts + shipped.sealed if row.kind == "chat"]
    assert {render_chat(row, tokenizer, shipped.fallback_template)[1] for row in dialogues} == {"fallback"}


def test_the_shipped_suite_tokenizes(tmp_path: Path) -> None:
    tokens = tokenize_suite(load_suite(), save_tokenizer(tmp_path / "model"), num_contexts=32, num_tokens=2048)
    assert {row.ids.shape for row in tokens.contexts} == {(2048,)}
    assert len({row.stratum for row in tokens.contexts}) == 17


def test_a_cached_draw_equals_a_fresh_one(suite: Suite, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")
    draw = {"num_contexts": 3, "num_tokens": 32, "seed": 5}
    fresh = tokenize_suite(suite, folder, **draw)
    written = tokenize_suite(suite, folder, **draw, cache_dir=tmp_path)
    (file,) = (tmp_path / "tokens").iterdir()
    content = file.read_bytes()
    read = tokenize_suite(suite, folder, **draw, cache_dir=tmp_path)
    assert fresh.digest == written.digest == read.digest
    for one, two in zip(fresh.contexts, read.contexts, strict=True):
        assert np.array_equal(one.ids, two.ids)
        assert (one.id, one.cluster, one.stratum, one.template, one.digest) == (
            two.id,
            two.cluster,
            two.stratum,
            two.template,
            two.digest,
        )
    file.unlink()
    tokenize_suite(suite, folder, **draw, cache_dir=tmp_path)
    assert file.read_bytes() == content


def test_what_decides_the_ids_decides_the_digest(suite: Suite, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")
    base = tokenize_suite(suite, folder, num_tokens=20).digest
    assert tokenize_suite(suite, folder, num_tokens=21).digest != base
    assert tokenize_suite(suite, folder, num_tokens=20, num_contexts=3).digest != base
    assert tokenize_suite(suite, save_tokenizer(tmp_path / "bare", bos=False), num_tokens=20).digest != base
    other = digest_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert digest_tokenizer(folder) != other
    (folder / "weights.safetensors").write_bytes(b"not looked at")
    assert digest_tokenizer(folder) == digest_tokenizer(folder)


def rewrite(file: Path, change) -> None:
    """Change the ids and the record of a token file."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        record = json.loads(opened.metadata()["exl3eval"])
    tensors = load_file(file)
    change(tensors, record)
    save_file(tensors, file, metadata={"exl3eval": json.dumps(record)})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, record: tensors["ids"].__setitem__((0, 5), 77),
        lambda tensors, record: tensors.update(ids=tensors["ids"][:, :-1].copy()),
        lambda tensors, record: tensors.update(ids=tensors["ids"].astype(np.int64)),
        lambda tensors, record: tensors.update(more=np.zeros(3)),
        lambda tensors, record: record.update(digest="0" * 64),
        lambda tensors, record: record.update(bos_id=None),
        lambda tensors, record: record["key"].update(seed=99),
        lambda tensors, record: record["contexts"].reverse(),
        lambda tensors, record: record["contexts"].pop(),
        lambda tensors, record: record["contexts"][0].update(template="fallback"),
        lambda tensors, record: record.update(schema="exl3eval.tokens/9"),
        lambda tensors, record: record.update(note="hello"),
    ],
    ids=["id", "shape", "dtype", "tensor", "digest", "bos", "key", "order", "row", "template", "schema", "field"],
)
def test_an_altered_token_file_is_an_error(suite: Suite, tmp_path: Path, change) -> None:
    folder = save_tokenizer(tmp_path / "model")
    tokenize_suite(suite, folder, num_tokens=24, cache_dir=tmp_path)
    (file,) = (tmp_path / "tokens").iterdir()
    rewrite(file, lambda tensors, record: None)
    tokenize_suite(suite, folder, num_tokens=24, cache_dir=tmp_path)
    rewrite(file, change)
    with pytest.raises(SuiteError, match="was altered"):
        tokenize_suite(suite, folder, num_tokens=24, cache_dir=tmp_path)


def test_a_truncated_token_file_is_an_error(suite: Suite, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")
    tokenize_suite(suite, folder, num_tokens=24, cache_dir=tmp_path)
    (file,) = (tmp_path / "tokens").iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SuiteError, match="was altered: unreadable"):
        tokenize_suite(suite, folder, num_tokens=24, cache_dir=tmp_path)


def test_a_short_context_is_named(suite: Suite, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")
    with pytest.raises(SuiteError, match=r"context sealed has 118 tokens with this tokenizer, 119 asked for"):
        tokenize_suite(suite, folder, split="qualification", num_tokens=119)
    with pytest.raises(SuiteError, match="1 tokens per context predict nothing"):
        tokenize_suite(suite, folder, num_tokens=1)


def test_only_local_tokenizers_without_code_are_loaded(suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer file"):
        tokenize_suite(suite, tmp_path, num_tokens=8)
    folder = save_tokenizer(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of model"):
        tokenize_suite(suite, folder, num_tokens=8)
    remote = save_tokenizer(
        tmp_path / "remote", tokenizer_class="Custom", auto_map={"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    )
    (remote / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Custom: pass\n")
    with contextlib.suppress(CheckpointError):
        tokenize_suite(suite, remote, num_tokens=8)
    assert not (tmp_path / "ran").exists()

import importlib
import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3eval.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def training_package():
    package = types.ModuleType("training")
    package.__path__ = [str(ROOT / "training")]
    sys.modules["training"] = package
    yield
    for name in [name for name in sys.modules if name == "training" or name.startswith("training.")]:
        del sys.modules[name]


def load(name):
    return importlib.import_module(f"training.{name}")


@pytest.fixture(scope="module")
def tokenizer(training_package, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [(ROOT / "training" / "corpus.py").read_text(), "Grüße aus Köln. 你好，世界。 Привет, мир. नमस्ते दुनिया।"] * 4
    load("tokenizer").save_tokenizer(load("tokenizer").train_tokenizer(texts, vocabulary=512), folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " two  spaces \n\n\ttab",
        "naïve e\u0301",
        "عربي हिन्दी 日本語 한국어",
        "👩‍👩‍👧 \U0010fffd\u200b\x00",
        "<|im_startx|> 1234567",
    ],
)
def test_tokenizer_round_trips_any_unicode(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids[1:]) == text


def test_special_tokens_have_the_ids_that_training_assumes(tokenizer):
    train = load("train")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        train.PAD_ID,
        train.BOS_ID,
        train.EOS_ID,
    )


def test_chat_template_keeps_every_role_and_tool_call(tokenizer):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "system", "content": "S-text"},
        {"role": "user", "content": "U-text"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "T-text"},
        {"role": "assistant", "content": "A-text"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == load("chat").render_chat(messages, tools=tools)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>' in text
    order = ["<|bos|>", '"parameters": {}', "S-text", "U-text", "Zürich", "T-text", "A-text"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == len(messages) + 1


def test_a_document_that_quotes_a_context_is_refused_whole(tmp_path):
    corpus, fetch = load("corpus"), load("fetch")
    context = " ".join(f"word{i}" for i in range(60))
    row = {"messages": [{"role": "user", "content": context}]}
    (tmp_path / "texts-chat.jsonl").write_text(json.dumps(row) + "\n")
    exclusion = corpus.Exclusion(tmp_path)
    own = " ".join(f"other{i}" for i in range(500))
    two, three = (" ".join(f"word{i}" for i in range(20, 20 + 11 + n)) for n in (2, 3))
    assert exclusion.admits(fetch.Document(id="clean", family="prose", text=own))
    assert exclusion.admits(fetch.Document(id="two shingles", family="prose", text=f"{own} {two}"))
    assert not exclusion.admits(fetch.Document(id="three shingles", family="prose", text=f"{own} {three.upper()} x"))
    assert exclusion.refused == {"three shingles": 3}


def test_clean_drops_licence_headers_and_foreign_scripts():
    corpus, fetch = load("corpus"), load("fetch")
    code = "# Copyright 2020 Someone\n# Licensed under X\n\n" + "def double(x):\n    return 2 * x\n" * 8
    cleaned = corpus.clean(fetch.Document(id="a", family="code", text=code))
    assert cleaned is not None and cleaned.text.startswith("def double")
    assert corpus.clean(fetch.Document(id="b", family="ja", text="Not translated at all. " * 20)) is None


def test_generators_are_seeded_and_the_held_out_split_follows_the_document():
    corpus, synthetic = load("corpus"), load("synthetic")
    documents = list(synthetic.generate(7, 0.02))
    assert documents == list(synthetic.generate(7, 0.02))
    assert documents != list(synthetic.generate(8, 0.02))
    assert {d.family for d in documents} == {"chat", "logs", "tables", "math", "json"}
    many = [replace(documents[0], id=f"d{i}{suffix}") for i in range(400) for suffix in ("", "?chat=0", "?chat=5")]
    train, held_out = corpus.split_held_out(many)
    base = [{d.id.partition("?")[0] for d in part} for part in (train, held_out)]
    assert base[1] and not base[0] & base[1]


def test_sources_are_complete_and_every_family_is_fed():
    sources = load("fetch").load_sources()
    assert all(s.licence and s.megabytes > 0 for s in sources)
    made = {family for family, _, _ in load("synthetic").GENERATORS}
    assert len({s.family for s in sources} | made) == 17


def test_twenty_steps_lower_the_loss_and_windows_start_with_bos(monkeypatch):
    train = load("train")
    monkeypatch.setattr(train, "SHAPE", {**train.SHAPE, "hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 512})
    recipe = train.Recipe(length=32, batch=8, warmup_steps=2, peak_rate=1e-2)
    stream = torch.arange(4000, dtype=torch.int32) % 50 + 3
    windows = train.Windows([stream, stream + 50], recipe, torch.device("cpu"))
    assert windows.draw().shape == (8, 33) and (windows.draw()[:, 0] == train.BOS_ID).all()
    model = train.build_model(recipe.seed)
    before = train.held_out_nll(model, stream, 32, torch.device("cpu"))
    curve = train.train(model, windows, recipe, progress_at=lambda step, _: step / 20, compiled=False)
    after = train.held_out_nll(model, stream, 32, torch.device("cpu"))
    assert curve[-1]["step"] == 20
    assert abs(before - math.log(512)) < 0.2 and after < before - 1


def test_learning_rate_warms_up_and_decays():
    train = load("train")
    recipe = train.Recipe(warmup_steps=10)
    rates = [train.rate_at(step, step / 100, recipe) for step in range(101)]
    assert max(rates) <= recipe.peak_rate and rates.index(max(rates)) == 9
    assert rates[-1] == pytest.approx(recipe.peak_rate * recipe.final_rate_frac, rel=1e-12)


def record():
    return {
        "corpus": {
            "digest": "c" * 64,
            "suite": {"contexts": 173},
            "exclusion": {"refused_documents": 1234},
            "sources": [{"package": "deb:x", "family": f, "licence": "MIT"} for f in ("code", "math", "code")],
        },
        "train_bytes": 98_700_000,
        "train_tokens": 30_000_000,
        "parameters": 6_818_048,
        "recipe": {"batch": 256, "length": 512},
        "steps": 5000,
        "seen_tokens": 600_000_000,
        "seconds": 240.1,
        "held_out": {"prose": {"nll_nats": 3.21, "bits_per_byte": 1.5, "tokens": 50_000}},
        "device": "TESTGPU",
        "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
        "weights_sha256": "d" * 64,
    }


def test_card_renders_every_figure_and_rendering_again_replaces_it():
    card = load("card")
    template = (ROOT / "exl3eval" / "bundled" / "MODEL_CARD.md").read_text(encoding="utf-8")
    once = card.render_card(template, record())
    for figure in (
        "6,818,048",
        "98.7 MB",
        "20.0",
        "173",
        "1,234",
        "5,000 steps",
        "TESTGPU",
        "| prose | 3.210 |",
        "d" * 64,
    ):
        assert figure in once, figure
    assert "| `deb:x` | MIT | code, math |" in once
    assert card.render_card(once, record()) == once
    other = card.render_card(once, record() | {"steps": 6001})
    assert "6,001 steps" in other and "5,000 steps" not in other


def test_card_and_record_must_agree():
    card = load("card")
    with pytest.raises(UsageError, match=r"differ in figures: .*nonsense"):
        card.render_card("<!-- figure:nonsense --><!-- /figure -->", record())
    with pytest.raises(UsageError, match="no field 'seconds'"):
        card.figures({key: value for key, value in record().items() if key != "seconds"})

"""Decoding against prefills of the whole text, and the smoke test end to end on a tiny upstream checkpoint."""

import json
from pathlib import Path

import pytest
import torch
import typer
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model
from typer.testing import CliRunner

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, InvalidRunError, UsageError
from exl3eval.records import digest_value, read_json
from exl3eval.smoke import commands
from exl3eval.smoke.decode import Decoder, decode
from exl3eval.variant import Variant

DATA = Path(__file__).parents[1] / "data" / "qwen2-tied"
PROMPT = torch.arange(9) * 29 % VOCAB
STEPS = 6


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> ArmModel:
    config = tiny_config()
    directory = write_model(tmp_path_factory.mktemp("tiny"), llama_tensors(config), config)
    variant = Variant(name="v", doc="V.", activations="float32", linear="1-:reference", embedding="stored")
    return load_arm(open_checkpoint(directory), variant, vocab_size=VOCAB, device=torch.device("cpu"))


def choices_by_prefill(arm: ArmModel, ids: torch.Tensor) -> torch.Tensor:
    return arm.head.logits(arm.hidden_states(ids)).argmax(dim=1)


def test_decoding_chooses_what_a_prefill_of_the_same_ids_chooses(arm: ArmModel) -> None:
    decoder = Decoder(arm=arm, head=arm.head)
    free = decode(decoder, PROMPT, STEPS)
    assert free.ids.shape == (STEPS,) and free.hidden.shape == (STEPS, 128)
    whole = torch.cat([PROMPT, free.ids])
    assert torch.equal(choices_by_prefill(arm, whole[:-1])[len(PROMPT) - 1 :], free.ids)
    states = arm.hidden_states(whole[:-1])[len(PROMPT) - 1 :]
    assert torch.allclose(states, free.hidden, atol=1e-4)
    again = decode(decoder, PROMPT, STEPS, along=free.ids)
    assert torch.equal(again.ids, free.ids) and torch.equal(again.hidden, free.hidden)


def test_decoding_along_other_ids_feeds_those(arm: ArmModel) -> None:
    along = torch.arange(STEPS) * 17 % VOCAB
    forced = decode(Decoder(arm=arm, head=arm.head), PROMPT, STEPS, along=along)
    whole = torch.cat([PROMPT, along])
    assert torch.equal(choices_by_prefill(arm, whole[:-1])[len(PROMPT) - 1 :], forced.ids)


def test_nothing_to_decode_is_refused(arm: ArmModel) -> None:
    decoder = Decoder(arm=arm, head=arm.head)
    for prompt, steps, along in ((PROMPT, 0, None), (PROMPT[:0], 2, None), (PROMPT, 2, PROMPT[:1])):
        with pytest.raises(InvalidRunError, match="empty output is no evidence"):
            decode(decoder, prompt, steps, along=along)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    monkeypatch.setenv("EXL3EVAL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("EXL3EVAL_THREADS", "1")
    app = typer.Typer()
    commands.register(app)
    app.callback()(lambda: None)
    models = ["--model", str(DATA / "exl3-mcg-5bpw"), "--reference", str(DATA / "bf16"), "--device", "cpu", "-q"]
    small = ["--num-contexts", "2", "--positions", "128", "--steps", "4", "--depths", "0.5"]
    return lambda *extra: CliRunner().invoke(app, ["smoke", *models, *small, *extra])


def test_a_model_that_cannot_copy_is_inconclusive_and_says_so(run, tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "base.json"))
    assert done.exit_code == EXIT_INCONCLUSIVE, done.output
    assert "base: INCONCLUSIVE" in done.output and "too few to tell" in done.output
    receipt = read_json(tmp_path / "base.json")
    assert list(receipt["results"]["arms"]) == ["base", "reference"] and receipt["judged"] == "base"
    assert receipt["results_digest"] == digest_value(receipt["results"])
    assert "divergence" in receipt["kind"] and "kl" not in json.dumps(receipt["results"])
    own = receipt["results"]["arms"]["reference"]["agreement"]
    assert own["counts"]["agree"] == own["positions"] == 8 and own["prefixes"] == [4, 4]
    launched = {launch["route"] for launch in receipt["identity"]["arms"]["base"]["launches"]}
    assert launched == {"reference"} and not receipt["identity"]["arms"]["reference"]["launches"]
    assert str(tmp_path) not in json.dumps(receipt)
    assert isinstance(run("--out", str(tmp_path / "base.json")).exception, UsageError)


def test_a_broken_kernel_is_seen(run) -> None:
    done = run("--variant", "broken-window", "--json", "--steps", "8")
    receipt = json.loads(done.output)
    arms = receipt["results"]["arms"]
    agree = {name: arm["agreement"]["counts"]["agree"] for name, arm in arms.items()}
    assert agree["reference"] == 16 >= agree["base"] > agree["broken-window"]
    assert done.exit_code in (EXIT_FAIL, EXIT_INCONCLUSIVE)
    assert receipt["results"]["verdict"]["outcome"] != "PASS"


def test_a_variant_that_the_smoke_test_cannot_run_is_refused(run, tmp_path: Path) -> None:
    text = "\n".join(
        (
            'schema = "exl3eval/variant/1"',
            'name = "replayed"',
            'doc = "Replays."',
            'activations = "auto"',
            'linear = "auto"',
            'embedding = "stored"',
            'graphs = "decode"',
        )
    )
    (tmp_path / "replayed.toml").write_text(text)
    done = run("--variant", str(tmp_path / "replayed.toml"))
    assert isinstance(done.exception, UsageError) and "replays graphs" in done.exception.message
    assert isinstance(run("--depths", "middle").exception, UsageError)

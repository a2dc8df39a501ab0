"""`exl3eval kld --engine vllm`, start to end."""

import json
import os
import sys
from pathlib import Path

import pytest

from exl3eval import cli
from exl3eval.errors import EXIT_USAGE
from exl3eval.verify import verify_run

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "qwen2-tied"
PYTHON = os.environ.get("EXL3EVAL_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
needs_vllm = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="no vLLM environment: tools/vllm/install.sh .venv-vllm"
)


def call(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["exl3eval", "kld", "--quiet", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--engine", "sglang"), "--engine is 'sglang'"),
        (("--compile",), "--compile is for arms under vLLM"),
        (("--decode-style", "forced"), "--decode-style is for arms under vLLM"),
        (("--reference-engine", "vllm"), "--reference-engine is for arms under vLLM"),
        (("--engine", "vllm", "--shared-head"), "--shared-head under vLLM"),
    ],
)
def test_options_of_another_engine_are_refused(monkeypatch, capsys, options, reason):
    code, err = call(monkeypatch, capsys, *options)
    assert (code, reason in err) == (EXIT_USAGE, True), err


def test_without_vllm_it_says_what_to_install_before_the_models_are_read(monkeypatch, capsys, tmp_path):
    def read_model(*arguments):
        raise AssertionError("a model was read")

    monkeypatch.setattr("exl3eval.run._digest_checkpoint", read_model)
    monkeypatch.delenv("EXL3EVAL_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("EXL3EVAL_CACHE", str(tmp_path))
    code, err = call(monkeypatch, capsys, "--engine", "vllm", "--num-contexts", "24", "--positions", "16")
    assert code == EXIT_USAGE
    assert "tools/vllm/install.sh" in err


@pytest.mark.vllm
@needs_vllm
def test_two_engines_give_one_number_and_their_own_difference_is_a_floor(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("EXL3EVAL_VLLM_PYTHON", PYTHON)
    monkeypatch.setenv("EXL3EVAL_CACHE", str(tmp_path / "cache"))
    common = ("--model", DATA / "exl3-mcg-5bpw", "--reference", DATA / "bf16", "--variant", "int8-embed")
    size = ("--num-contexts", "24", "--positions", "16")
    engines = {"own": (), "vllm": ("--engine", "vllm", "--reference-engine", "transformers")}
    for name, options in engines.items():
        code, err = call(monkeypatch, capsys, *common, *size, *options, "--out", tmp_path / name)
        assert code == 0, err
    receipts = {name: json.loads((tmp_path / name / "receipt.json").read_text()) for name in engines}
    for arm in ("base", "int8-embed"):
        own, served = (receipts[name]["results"]["arms"][arm]["kl"]["mean"] for name in engines)
        assert served == pytest.approx(own, abs=1e-6)
    floor = receipts["vllm"]["results"]["floors"]["engines"]["reference"]
    assert 0.0 < floor < 1e-9
    assert receipts["vllm"]["identity"]["arms"]["int8-embed"]["engine"]["effective"]["prefix_caching"] is False
    assert str(tmp_path) not in (tmp_path / "vllm" / "receipt.json").read_text()
    verify_run(tmp_path / "vllm")

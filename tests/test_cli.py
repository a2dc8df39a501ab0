"""The command line: its surface, its exit codes, and one line of help for every kind of bad input."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import llama_tensors, tiny_config, write_model

from exl3eval import cli
from exl3eval.errors import EXIT_INVALID, EXIT_USAGE

DATA = Path(__file__).parent / "data" / "qwen2-tied"
MODEL, REFERENCE = DATA / "exl3-mcg-5bpw", DATA / "bf16"
SMALL = ("--num-contexts", "32", "--positions", "16", "--quiet")


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory):
    """Run the command line in this process, as the console script does, on a machine without a network."""

    connect = socket.socket.connect

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    def connect_locally(self: socket.socket, address: object) -> None:
        """Arms run in processes that talk through local sockets; nothing else may be reached."""
        if self.family != socket.AF_UNIX:
            refuse()
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("EXL3EVAL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["exl3eval", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


def _pair(*extra: object) -> tuple[object, ...]:
    return ("kld", "--model", MODEL, "--reference", REFERENCE, *SMALL, *extra)


def test_base_against_itself_is_exactly_zero(run) -> None:
    receipt = json.loads(run(*_pair("--json")).out)
    comparison = receipt["results"]["comparison"]
    assert comparison["identical"] is True
    assert comparison["paired"]["delta"]["mean"] == 0.0
    assert comparison["paired"]["by_context"] == {"wins": 0, "ties": 32, "losses": 0}
    assert receipt["results"]["arms"]["base"]["kl"] == receipt["results"]["arms"]["base-repeat"]["kl"]


def test_a_run_is_written_whole_and_twice_gives_the_same_digits(run, tmp_path: Path) -> None:
    first = run(*_pair("--variant", "int8-embed", "--out", tmp_path / "a"))
    assert first.code == 0
    assert run(*_pair("--variant", "int8-embed", "--out", tmp_path / "b", "--fresh")).code == 0
    receipts = [json.loads((tmp_path / name / "receipt.json").read_text()) for name in ("a", "b")]
    assert receipts[0]["results"] == receipts[1]["results"]
    assert receipts[0]["results_digest"] == receipts[1]["results_digest"]
    assert receipts[0]["identity_digest"] == receipts[1]["identity_digest"]
    assert receipts[0]["positions_sha256"] == receipts[1]["positions_sha256"]
    assert receipts[0]["results"]["comparison"]["paired"]["delta"]["mean"] != 0.0
    assert str(tmp_path) not in (tmp_path / "a" / "receipt.json").read_text()
    assert "int8-embed minus base" in first.out
    again = run(*_pair("--variant", "int8-embed", "--out", tmp_path / "a"))
    assert again.code == EXIT_USAGE
    assert "receipts are immutable" in again.err


def test_the_receipt_names_what_ran(run) -> None:
    receipt = json.loads(run(*_pair("--variant", "int8-embed", "--reference-precision", "bfloat16", "--json")).out)
    identity = receipt["identity"]
    assert receipt["floor"] == "reference-float32"
    assert identity["reference_precision"] == "bfloat16"
    launches = identity["arms"]["int8-embed"]["launches"]
    assert sum(launch["count"] for launch in launches) == 15 * 32
    assert {launch["route"] for launch in launches} == {"reference"}
    assert identity["arms"]["reference"]["launches"] == []
    sizes = receipt["results"]["embedding_bytes"]
    assert sizes["int8-embed"]["run"] < 0.52 * sizes["base"]["run"]


def test_controls_are_caught(run) -> None:
    """One weight in 256 read a bit off, and logits rounded to BF16: both are worse, beyond any doubt."""
    for variant in ("broken-window", "bf16-logits"):
        receipt = json.loads(run(*_pair("--variant", variant, "--json")).out)
        delta = receipt["results"]["comparison"]["paired"]["delta"]
        assert delta["lower_bound"] > 0, variant
    assert any("bfloat16 grid" in warning for warning in receipt["warnings"])


def test_lanes_are_runs_of_their_own(run, tmp_path: Path) -> None:
    lanes = ("--lane", "decode", "--rows", "1,5", "--decode-positions", "4", "--out", tmp_path / "run")
    assert run(*_pair("--variant", "int8-embed", *lanes)).code == 0
    for rows in (1, 5):
        receipt = json.loads((tmp_path / "run" / f"decode-{rows}" / "receipt.json").read_text())
        identity = receipt["identity"]
        assert identity["lane"] == f"decode[{rows}]"
        assert identity["tokens"]["first_scored"] == 12
        assert {launch["rows_bucket"] for launch in identity["arms"]["base"]["launches"]} >= {rows}
        assert receipt["results"]["arms"]["base"]["num_positions"] == 32 * 4
        assert receipt["results"]["floors"]["lane_control"]["kl"] < 1e-6


def test_the_identical_head_reads_exactly_zero(run) -> None:
    """An arm that scores through the reference's head, on the reference's own model, is the reference."""
    arguments = ("kld", "--model", REFERENCE, "--reference", REFERENCE, *SMALL, "--variant", "head-bf16", "--json")
    receipt = json.loads(run(*arguments).out)
    for arm in ("base", "head-bf16"):
        assert receipt["results"]["arms"][arm]["kl"]["mean"] == 0.0
    assert receipt["results"]["comparison"]["identical"] is True


def test_a_route_that_never_ran_voids_the_claim(run, tmp_path: Path) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(
        'schema = "exl3eval/variant/1"\nname = "claims"\ndoc = "Claims."\nactivations = "float32"\n'
        'linear = "1-8:fp16-staged,9-:reference"\nembedding = "stored"\nrequires = ["fp16-staged"]\n'
    )
    outcome = run(*_pair("--variant", file))
    assert outcome.code == EXIT_INVALID
    assert "declares route `fp16-staged`, which launched 0 times in lane prefill" in outcome.err
    assert run(*_pair("--variant", file, "--lane", "decode", "--rows", "4", "--decode-positions", "4")).code == 0
    file.write_text(file.read_text() + 'forbids = ["reference"]\n')
    outcome = run(*_pair("--variant", file, "--lane", "decode", "--rows", "4", "--decode-positions", "4"))
    assert outcome.code == EXIT_INVALID
    assert "forbids route `reference`" in outcome.err


def _damaged(tmp_path: Path, name: str) -> Path:
    directory = tmp_path / "damaged"
    directory.mkdir()
    for file in MODEL.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / name).write_bytes((directory / name).read_bytes()[:1000])
    return directory


def _other_vocabulary(tmp_path: Path) -> Path:
    return write_model(tmp_path / "other", llama_tensors(tiny_config()), tiny_config())


def _without(tmp_path: Path, source: Path, name: str) -> Path:
    directory = tmp_path / "without"
    directory.mkdir()
    for file in source.iterdir():
        if file.name != name:
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def _occupied(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "positions.parquet").write_bytes(b"x")
    return tmp_path / "run"


def _gptq(tmp_path: Path) -> Path:
    return write_model(
        tmp_path / "gptq",
        {"model.embed_tokens.weight": torch.zeros(4, 4)},
        tiny_config(quantization_config={"quant_method": "gptq"}),
        exl3=False,
    )


BAD = {
    "unknown variant": (lambda t: ("kld", "--variant", "int9-embed"), "unknown variant 'int9-embed'"),
    "unknown baseline": (lambda t: ("kld", "--baseline", "bas"), "did you mean `base`"),
    "missing variant file": (lambda t: ("kld", "--variant", t / "x.toml"), "cannot read variant file x.toml"),
    "model alone": (lambda t: ("kld", "--model", MODEL), "--model was given without --reference"),
    "reference alone": (lambda t: ("kld", "--reference", REFERENCE), "--reference was given without --model"),
    "no such model": (lambda t: ("kld", "--model", t / "no", "--reference", REFERENCE), "no"),
    "empty model": (lambda t: ("kld", "--model", t, "--reference", REFERENCE), "safetensors"),
    "reference is EXL3": (lambda t: ("kld", "--model", MODEL, "--reference", MODEL), "is quantized"),
    "model is GPTQ": (lambda t: ("kld", "--model", _gptq(t), "--reference", REFERENCE), "quantized as gptq"),
    "truncated weights": (
        lambda t: ("kld", "--model", _damaged(t, "model.safetensors"), "--reference", REFERENCE),
        "model.safetensors",
    ),
    "truncated config": (
        lambda t: ("kld", "--model", _damaged(t, "config.json"), "--reference", REFERENCE),
        "config.json",
    ),
    "truncated tokenizer": (
        lambda t: ("kld", "--model", _damaged(t, "tokenizer.json"), "--reference", REFERENCE),
        "no tokenizer that transformers can read",
    ),
    "no config": (
        lambda t: ("kld", "--model", _without(t, MODEL, "config.json"), "--reference", REFERENCE),
        "config.json",
    ),
    "no weights in the reference": (
        lambda t: ("kld", "--model", MODEL, "--reference", _without(t, REFERENCE, "model.safetensors")),
        "safetensors",
    ),
    "other vocabulary": (
        lambda t: ("kld", "--model", _other_vocabulary(t), "--reference", REFERENCE),
        "vocabulary has 1024 tokens and the model's 256",
    ),
    "precision": (lambda t: _pair("--reference-precision", "float16"), "--reference-precision is 'float16'"),
    "no positions": (lambda t: _pair("--positions", "0"), "--positions is 0"),
    "no contexts": (lambda t: _pair("--num-contexts", "0"), "--num-contexts is 0"),
    "too many contexts": (lambda t: _pair("--num-contexts", "5000"), "5000 contexts asked for"),
    "too many positions": (lambda t: _pair("--positions", "90000"), "90001"),
    "unknown split": (lambda t: _pair("--split", "secret"), "unknown split 'secret'"),
    "no such suite": (lambda t: _pair("--suite", t / "none"), "manifest.json"),
    "unknown lane": (lambda t: _pair("--lane", "verify"), "unknown lane 'verify'"),
    "no prefix": (
        lambda t: _pair("--lane", "decode", "--decode-positions", "16"),
        "lane decode[1] scores 16 of 16 positions",
    ),
    "GPU route on a CPU": (lambda t: _pair("--variant", "shared-decode"), "route `shared-decode` cannot serve lm_head"),
    "wrong lane": (lambda t: _pair("--variant", "prefill-fused", "--lane", "decode"), "says nothing in lane decode[1]"),
    "unknown device": (lambda t: _pair("--device", "tpu"), "'tpu'"),
    "absent GPU": (lambda t: _pair("--device", "cuda:77"), "'cuda:77' does not exist"),
    "unsupported device": (lambda t: _pair("--device", "meta"), "'meta' is not supported"),
    "out holds a run": (lambda t: _pair("--out", _occupied(t)), "already holds positions.parquet"),
    "out is a file": (lambda t: _pair("--out", MODEL / "config.json"), "is a file"),
    "not a number": (lambda t: _pair("--positions", "many"), "'--positions'"),
    "unknown option": (lambda t: ("kld", "--varient", "base"), "No such option"),
    "unknown command": (lambda t: ("measure",), "No such command"),
    "inspect nothing": (lambda t: ("inspect", t), "safetensors"),
    "quantize EXL3": (lambda t: ("quantize", "--model", MODEL, "--out", t / "q"), "is quantized already"),
    "quantize to 9 bits": (
        lambda t: ("quantize", "--model", REFERENCE, "--out", t / "q", "--bits", "9"),
        "--bits is 9",
    ),
    "quantize head to 12": (
        lambda t: ("quantize", "--model", REFERENCE, "--out", t / "q", "--head-bits", "12"),
        "--head-bits is 12",
    ),
    "unknown codebook": (
        lambda t: ("quantize", "--model", REFERENCE, "--out", t / "q", "--codebook", "mul2"),
        "--codebook is 'mul2'",
    ),
    "quantize over files": (lambda t: ("quantize", "--model", REFERENCE, "--out", MODEL), "is not an empty folder"),
    "verify nothing": (lambda t: ("contexts", "verify", "--suite", t), "manifest.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2(run, tmp_path: Path, case: str) -> None:
    arguments, reason = BAD[case]
    outcome = run(*arguments(tmp_path))
    assert outcome.code == EXIT_USAGE, outcome.err
    assert reason in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    if outcome.err.startswith("error: "):
        assert outcome.err.split("\n")[1].startswith("hint: ")
        assert len(outcome.err.strip().split("\n")) == 2
    assert not list(tmp_path.rglob("receipt.json"))


def test_nan_weights_are_invalid(run, tmp_path: Path) -> None:
    directory = _without(tmp_path, MODEL, "model.safetensors")
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    outcome = run("kld", "--model", directory, "--reference", REFERENCE, *SMALL, "--out", tmp_path / "run")
    assert outcome.code == EXIT_INVALID
    assert "not finite" in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_broken_model_is_invalid_not_a_number(run, tmp_path: Path) -> None:
    directory = _without(tmp_path, MODEL, "model.safetensors")
    tensors = load_file(MODEL / "model.safetensors")
    trellis = tensors["model.layers.1.mlp.down_proj.trellis"]
    tensors["model.layers.1.mlp.down_proj.trellis"] = torch.randint_like(trellis, -(1 << 15), 1 << 15)
    tensors["model.layers.1.mlp.down_proj.svh"] *= 50
    save_file(tensors, directory / "model.safetensors")
    outcome = run("kld", "--model", directory, "--reference", REFERENCE, *SMALL)
    assert outcome.code == EXIT_INVALID
    assert "the arm is broken" in outcome.err


def test_inspect_prints_totals_and_json(run) -> None:
    text = run("inspect", MODEL).out
    assert "5.111 bits per weight" in text
    inventory = json.loads(run("inspect", MODEL, "--json").out)
    assert inventory["num_exl3"] == 15
    assert inventory["body_bits"] == 5


def test_variants_are_listed(run) -> None:
    listed = json.loads(run("variants", "--json").out)
    assert {"base", "int8-embed"} <= {variant["name"] for variant in listed}
    assert "int8-embed" in run("variants").out


def test_doctor_finds_everything_the_main_job_needs(run) -> None:
    outcome = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(outcome.out)}
    assert outcome.code == 0, outcome.out
    assert all(check["ok"] for check in checks.values() if check["required"])


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['exl3eval', sys.argv[1]]\n"
        "from exl3eval import cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'triton', 'matplotlib', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for argument in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, argument],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "exl3eval" in done.stdout


def test_no_folder_shadows_hub_kernels(tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('exl3_kernels').origin)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("None ") or "site-packages" in done.stdout.split()[0]


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exl3eval.doctor.examine_machine", lambda settings: interrupt())
    monkeypatch.setattr(sys, "argv", ["exl3eval", "doctor"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "the same command continues" in capsys.readouterr().err


def test_graphs_without_a_gpu_are_refused_before_any_arm_runs(run) -> None:
    outcome = run(*_pair("--variant", "graph-decode", "--lane", "decode", "--rows", "2", "--decode-positions", "4"))
    if not torch.cuda.is_available():
        assert (outcome.code, "need a GPU" in outcome.err) == (EXIT_USAGE, True)
        assert "run reference" not in outcome.err

"""The commands on real runs: exit codes, files, and what a person is told. Small model; bundled one with -m slow."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exl3eval import cli
from exl3eval.bundled import bundled_model
from exl3eval.errors import UsageError
from exl3eval.records import digest_file, seal, write_json
from exl3eval.variant import shipped_variants

DATA = Path(__file__).parents[1] / "data" / "qwen2-tied"
SMALL_MODEL = ("--model", DATA / "exl3-mcg-5bpw", "--reference", DATA / "bf16")
SIZE = ("--num-contexts", "40", "--positions", "24")


def model_is_bundled() -> bool:
    try:
        return bool(bundled_model("exl3") and bundled_model("bf16"))
    except UsageError:
        return False


needs_bundled = pytest.mark.skipif(not model_is_bundled(), reason="this checkout carries no bundled model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gate")


@pytest.fixture
def run(monkeypatch, capsys, folder):
    """Run the command line in this process, as the console script does."""
    monkeypatch.setenv("EXL3EVAL_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exl3eval", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def measured(run, folder):
    """A run of a variant, made once."""

    def make(variant: str, *size: str, model: tuple = SMALL_MODEL) -> Path:
        out = folder / "-".join(("run", variant, *size, "small" if model else "bundled"))
        if not out.exists():
            code, _, error = run("kld", *model, "--variant", variant, *(size or SIZE), "--quiet", "--out", out)
            assert code == 0, error
        return out

    return make


def test_base_against_itself_passes_with_exactly_zero(run, measured):
    code, text, _ = run("gate", measured("base"), "--json")
    record = json.loads(text)
    assert (code, record["verdict"]["outcome"]) == (0, "PASS")
    assert record["verdict"]["identical"] == ["base-repeat"]
    assert {e["delta"]["upper"] for e in record["verdict"]["endpoints"]} == {0.0}
    assert record["order_verified"]
    assert record["policy"]["declared"]["witness"] in ("package", "commit")


def test_int8_embedding_is_judged_at_the_default_policy(run, measured, folder):
    code, text, error = run("gate", measured("int8-embed"), "--out", "verdict", "--summary", "summary.md", "--github")
    record = json.loads((folder / "verdict" / "verdict.json").read_text())
    outcome = record["verdict"]["outcome"]
    assert outcome in ("PASS", "FAIL", "INCONCLUSIVE")
    assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[outcome]
    assert text.startswith(outcome)
    assert all(word in text for word in ("DEFF", "sigma_d", "MDE", "power"))
    assert (folder / "summary.md").read_text().startswith(f"## exl3eval gate: {outcome}")
    assert error.startswith("::")
    assert record["verdict"]["endpoints"][0]["delta"]["value"] != 0.0
    if outcome != "PASS":
        assert record["verdict"]["next_steps"] or record["verdict"]["refusals"]


@needs_bundled
@pytest.mark.slow
def test_the_bundled_model_is_judged(run, measured):
    size = ("--num-contexts", "64", "--positions", "64")
    code, text, _ = run("gate", measured("base", *size, model=()))
    assert (code, text.split()[0]) == (0, "PASS")
    code, text, _ = run("gate", measured("int8-embed", *size, model=()))
    assert (code, text.split()[0]) in ((0, "PASS"), (1, "FAIL"), (3, "INCONCLUSIVE"))
    if "broken-window" in shipped_variants():
        code, text, _ = run("gate", measured("broken-window", *size, model=()))
        assert (code, text.split()[0]) == (1, "FAIL")


@pytest.mark.slow
def test_eight_contexts_are_refused_for_power(run, measured):
    code, text, _ = run("gate", measured("base", "--num-contexts", "8", "--positions", "24"))
    assert code == 3
    assert "8 contexts give no trustworthy interval and no power: run with --num-contexts 32 or more" in text


def test_a_shuffled_run_is_invalid(run, measured, folder):
    source, out = measured("base"), folder / "shuffled"
    out.mkdir()
    table = pq.read_table(source / "positions.parquet")
    order = np.random.default_rng(0).permutation(40)
    rows = np.concatenate([np.arange(24) + 24 * i for i in order])
    block = 40 * 24
    arms = [table.slice(block * i, block) for i in range(3)]
    pq.write_table(pa.concat_tables([arm.take(rows) for arm in arms]), out / "positions.parquet")
    shutil.copyfile(source / "floors.parquet", out / "floors.parquet")
    receipt = json.loads((source / "receipt.json").read_text())
    write_json(out / "receipt.json", receipt)
    code, text, _ = run("gate", out)
    assert code == 4
    assert "was altered" in text
    receipt["positions_sha256"] = digest_file(out / "positions.parquet")
    write_json(out / "receipt.json", seal(receipt))
    code, text, _ = run("gate", out)
    assert code == 4
    assert "contexts are not the suite's draw" in text


def test_power_is_tabulated_and_declares_the_policy(run, measured):
    code, text, _ = run("power", measured("int8-embed"), "--contexts", "32", "--contexts", "136", "--json")
    study = json.loads(text)
    assert code == 0
    mean = study["endpoints"][0]
    assert [size["n"] for size in mean["sizes"]] == [32, 136]
    assert mean["sizes"][0]["mde"] == pytest.approx(mean["sizes"][1]["mde"] * (136 / 32) ** 0.5)
    code, text, _ = run("power", measured("int8-embed"), "--margin", "1.0")
    assert code == 0
    assert "n needed" in text


def test_baselines_are_blessed_and_checked(run, measured):
    folder = measured("int8-embed")
    assert run("baseline", "check", folder)[0] == 2
    code, digest, _ = run("baseline", "bless", folder, "--who", "A. Name", "--why", "a test")
    assert code == 0
    code, text, _ = run("baseline", "check", folder, "--json")
    record = json.loads(text)
    assert (code, record["baseline"]) == (0, digest.strip())
    code, _, error = run("baseline", "bless", folder, "--who", "a", "--why", "b", "--status", "waived", "--until", "x")
    assert code == 2
    assert "YYYY-MM-DD" in error


def test_history_lists_and_draws(run, measured):
    run("gate", measured("base"))
    code, text, _ = run("history", "--variant", "base-repeat", "--svg", "trends", "--json")
    record = json.loads(text)
    assert code == 0
    assert record["verdicts"]
    assert record["suite_uses"][0]["decisions"] >= 1
    assert Path("trends/trend-01.svg").read_text().startswith("<svg")
    assert "uses of suites" in run("history")[1]


@needs_bundled
@pytest.mark.slow
def test_the_quick_gate_needs_no_run(run):
    code, text, error = run("gate", "--quick")
    assert code == 0, text + error
    assert text.startswith("PASS")
    assert "policy quick" in text


def test_foreign_rows_are_imported_and_refused(run, folder):
    rows = [{"context": f"c{i}", "kl": 0.1 + i} for i in range(5)]
    (folder / "rows.json").write_text(json.dumps(rows))
    code, text, _ = run("import-foreign", "rows.json", "--out", "foreign")
    assert code == 0
    assert text.startswith("foreign evidence")
    assert run("gate", "foreign")[0] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate",), "give one or more RUN folders, or --quick"),
        (("gate", "absent"), "holds no receipt.json"),
        (("gate", "absent", "--policy", "defualt"), "unknown policy 'defualt'"),
        (("gate", "absent", "--quick"), "give one or more RUN folders, or --quick"),
        (("history", "--ledger", "absent.sqlite"), "there is no ledger absent.sqlite"),
        (("power", "absent", "--margin", "-1"), "--margin is -1.0"),
        (("import-foreign", "absent", "--out", "x", "--format", "csv"), "--format is 'csv'"),
        (("baseline", "check", "absent.json"), "absent.json does not exist"),
        (("baseline", "bless", "absent", "--who", "", "--why", "x"), "needs a name and a reason"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run, arguments, message):
    code, out, error = run(*arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert "hint: " in error

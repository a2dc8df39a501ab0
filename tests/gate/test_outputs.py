"""What a CI reads: JUnit against its schema, annotations, summary, badges, and the composite action run by bash."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from synthetic_runs import build_arms, write_run

from exl3eval.gate.judge import GateRequest, judge
from exl3eval.gate.outputs import badge_json, badge_svg, github_annotations, junit_xml, summary_markdown, write_outputs
from exl3eval.gate.policy import load_policy

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 2, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    cases = {
        "PASS": build_arms(noise=0.001),
        "FAIL": build_arms(changes={"variant": 0.2}),
        "INCONCLUSIVE": build_arms(num_contexts=8),
        "INVALID": build_arms(),
    }
    found = {}
    for name, arms in cases.items():
        run = write_run(folder / name, arms)
        if name == "INVALID":
            (run / "positions.parquet").write_bytes(b"cut")
        request = GateRequest(
            folders=[run], policy=load_policy("default"), policy_file=None, ledger=folder / "ledger.sqlite"
        )
        found[name] = judge(request, now=NOW)
        assert found[name]["verdict"]["outcome"] == name
    return found


OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID")


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_junit_fits_its_schema(records, outcome):
    schema = pytest.importorskip("xmlschema").XMLSchema(ROOT / "tests" / "data" / "junit.xsd")
    text = junit_xml(records[outcome])
    schema.validate(text)
    with pytest.raises(Exception, match="testcase"):
        schema.validate(text.replace("<testcase ", "<testcase colour='red' ", 1))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_junit_holds_one_case_per_endpoint_and_counts_them(records, outcome):
    suite = ElementTree.fromstring(junit_xml(records[outcome])).find("testsuite")
    cases = suite.findall("testcase")
    assert int(suite.get("tests")) == len(cases)
    assert int(suite.get("failures")) == sum(case.find("failure") is not None for case in cases)
    assert int(suite.get("errors")) == sum(case.find("error") is not None for case in cases)
    assert (int(suite.get("failures")) + int(suite.get("errors")) == 0) == (outcome == "PASS")
    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(names)) == len(names)
    if outcome in ("PASS", "FAIL"):
        endpoints = {("variant.prefill", name) for name in ("mean", "p99", "cvar1", "ear", "top1")}
        assert endpoints | {("policy.default", "admissible")} <= set(names)
    if outcome == "FAIL":
        assert int(suite.get("failures")) > 0


def test_junit_survives_hostile_names(records):
    record = deepcopy(records["FAIL"])
    record["verdict"]["endpoints"][0]["delta"]["variant"] = "<a>&\x00\ud800\"'"
    ElementTree.fromstring(junit_xml(record))


def test_annotations_are_one_escaped_line_each(records):
    kinds = {name: [line.split(" ", 1)[0] for line in github_annotations(record)] for name, record in records.items()}
    assert kinds["PASS"] == ["::notice"]
    assert kinds["FAIL"][0] == "::error"
    assert kinds["INCONCLUSIVE"][0] == "::warning"
    assert kinds["INVALID"][0] == "::error"
    record = deepcopy(records["FAIL"])
    record["verdict"]["endpoints"][0]["next_step"] = "100 %\nnext::error"
    line = github_annotations(record)[1]
    assert "\n" not in line
    assert "100 %25%0Anext" in line


def test_the_summary_names_policy_power_and_next_steps(records):
    text = summary_markdown(records["INCONCLUSIVE"])
    assert text.startswith("## exl3eval gate: INCONCLUSIVE")
    assert records["INCONCLUSIVE"]["policy"]["digest"][:12] in text
    for word in ("DEFF", "sigma_d", "MDE", "power", "| G |", "- refused: 8 contexts", "--num-contexts 32"):
        assert word in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "next:" in summary_markdown(records["INVALID"])


def test_badges_state_the_outcome(records):
    for outcome, record in records.items():
        badge = badge_json(record)
        assert (badge["schemaVersion"], badge["message"]) == (1, outcome.lower())
        picture = ElementTree.fromstring(badge_svg(record))
        assert picture.get("aria-label") == f"exl3eval gate: {outcome}"


def test_files_are_written_whole(records, tmp_path):
    write_outputs(tmp_path, records["PASS"])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "badge.json",
        "badge.svg",
        "junit.xml",
        "summary.md",
        "verdict.json",
    ]
    assert json.loads((tmp_path / "verdict.json").read_text()) == records["PASS"]


def gate_step() -> dict:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    return next(step for step in action["runs"]["steps"] if step.get("id") == "gate")


REAL = f"#!{sys.executable}\nfrom exl3eval.cli import main\nmain()\n"
RECORDING = """#!/bin/sh
echo "$@" >> calls
case "$1" in kld) exit $KLD;; esac
number=$(grep -c '^gate' calls)
exit $(echo "$GATE" | cut -d' ' -f"$number")
"""


def run_step(folder: Path, program_text: str = REAL, **inputs: str) -> tuple[int, dict[str, str], str]:
    """Run the action's step as a runner does: inputs filled in, bash, output and summary files."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    values = {name: str(spec["default"]) for name, spec in action["inputs"].items()} | inputs
    env = {}
    for name, template in gate_step()["env"].items():
        key = template.removeprefix("${{ inputs.").removesuffix(" }}")
        env[name] = values[key]
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    program = binaries / "exl3eval"
    program.write_text(program_text)
    program.chmod(0o755)
    (binaries / "python").unlink(missing_ok=True)
    (binaries / "python").symlink_to(sys.executable)
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", gate_step()["run"]],
        cwd=folder,
        env=os.environ
        | env
        | {name: str(file) for name, file in files.items()}
        | {"PATH": f"{binaries}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return done.returncode, outputs, files["GITHUB_STEP_SUMMARY"].read_text() + done.stderr


def test_every_input_of_the_action_is_used_and_none_is_pasted_into_the_script():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    text = (ROOT / "action.yml").read_text()
    for name in action["inputs"]:
        assert f"inputs.{name}" in text
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
        for variable in step["env"]:
            assert f"${variable}" in step["run"] or f"${{{variable}" in step["run"]
    assert set(action["outputs"]) == {"verdict", "exit-code"}


def test_the_action_judges_runs_and_reports(tmp_path):
    write_run(tmp_path / "bad", build_arms(changes={"variant": 0.2}))
    code, outputs, text = run_step(tmp_path, runs="bad")
    assert code == 1, text
    assert outputs == {"verdict": "FAIL", "exit-code": "1"}
    assert "## exl3eval gate: FAIL" in text
    assert "::error title=exl3eval gate%3A FAIL" in text


@pytest.mark.parametrize(
    ("kld", "gate", "expected", "sizes"),
    [
        ("0", "3 0", 0, ["32", "64"]),
        ("0", "1", 1, ["32"]),
        ("0", "3 3 3", 3, ["32", "64", "96"]),
        ("0", "3 4", 4, ["32", "64"]),
        ("2", "0", 2, ["32"]),
    ],
)
def test_the_action_stops_at_the_look_that_decides(tmp_path, monkeypatch, kld, gate, expected, sizes):
    monkeypatch.setenv("KLD", kld)
    monkeypatch.setenv("GATE", gate)
    code, outputs, _ = run_step(tmp_path, RECORDING, looks="32 64 96", variant="int8-embed", model="m", reference="r")
    assert code == expected
    assert outputs == {"verdict": "", "exit-code": str(expected)}
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    measured = [call for call in calls if call[0] == "kld"]
    assert [call[call.index("--num-contexts") + 1] for call in measured] == sizes
    assert measured[0][1:5] == ["--variant", "int8-embed", "--baseline", "base"]
    assert measured[0][9:13] == ["--model", "m", "--reference", "r"]


def test_the_documented_workflow_is_yaml_that_uses_the_actions_inputs():
    text = (ROOT / "docs" / "gate.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```yaml\n")[1:]]
    assert blocks
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    used = 0
    for block in blocks:
        document = yaml.safe_load(block)
        for job in document.get("jobs", {}).values() if isinstance(document, dict) else ():
            assert job["runs-on"]
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                if "exl3eval" in step.get("uses", "") or step.get("uses") == "./":
                    used += 1
                    assert set(step["with"]) <= set(inputs)
    assert used


def test_documented_toml_is_a_policy():
    from exl3eval.gate.policy import parse_policy

    text = (ROOT / "docs" / "gate.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert blocks
    for block in blocks:
        parse_policy(block, where="docs/gate.md")

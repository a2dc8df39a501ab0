"""Every guard of `docs/mistakes.md` removed in turn: the test that the table names for it must fail."""

import os
import subprocess
import sys

import pytest
from mistakes_table import ROOT, Proof, read_rows

PROOFS = [proof for row in read_rows() for proof in row.proofs if not proof.is_structure]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with the plugin that removes guards."""
    options = ("-p", "removed_guards", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", "-x")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )


def test_with_every_guard_in_place_every_test_passes() -> None:
    done = run_pytest(*sorted({proof.test for proof in PROOFS}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.name.replace(" ", "-"))
def test_without_the_guard_its_test_fails(proof: Proof) -> None:
    done = run_pytest("--remove-guard", proof.name, proof.test)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-4000:] + done.stderr[-2000:]
    assert "guard_replacements.py" not in done.stdout, f"the replacement itself failed: {done.stdout[-4000:]}"

"""Everything under reports/ is as it was written: receipts verify, none survives one changed byte, texts quote them."""

import runpy
import sys
from pathlib import Path

import pytest

from exl3eval.errors import InvalidRunError
from exl3eval.receipt import RECEIPT_FILE
from exl3eval.records import read_receipt
from exl3eval.verify import find_receipts, verify_place

REPORTS = Path(__file__).parents[1] / "reports"
PLACES = find_receipts(REPORTS)
RECEIPTS = [place / RECEIPT_FILE if place.is_dir() else place for place in PLACES]


def _name(place: Path) -> str:
    return place.relative_to(REPORTS).as_posix()


def test_there_is_something_to_verify() -> None:
    assert len(PLACES) >= 20
    assert any(place.is_dir() for place in PLACES)


@pytest.mark.parametrize("place", PLACES, ids=_name)
def test_a_receipt_verifies(place: Path) -> None:
    assert verify_place(place)["verified"] == ("every number" if place.is_dir() else "the digest")


@pytest.mark.parametrize("receipt", RECEIPTS, ids=_name)
def test_one_changed_byte_is_seen(receipt: Path, tmp_path: Path) -> None:
    data = receipt.read_bytes()
    copy = tmp_path / receipt.name
    for place in range(7, len(data), max(1, len(data) // 25)):
        changed = bytearray(data)
        changed[place] ^= 1
        copy.write_bytes(changed)
        with pytest.raises(InvalidRunError):
            read_receipt(copy)


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("tables.py h200/receipts", "h200/README.md"),
        ("tables.py vllm/h200/bundled", "vllm/README.md"),
        ("tables.py vllm/h200/smollm2", "vllm/README.md"),
        ("h200/upstream.py --compare h200/upstream/cpu h200/upstream/h200", "h200/README.md"),
        ("h200/upstream.py --compare h200/upstream/cpu-rotated h200/upstream/h200", "h200/README.md"),
        ("h200/upstream.py --compare h200/upstream/cpu-rotated h200/upstream/h200-triton", "h200/README.md"),
        ("kernels/tables.py", "kernels/notes.md kernels/experts.md kernels/encoder/README.md"),
    ],
)
def test_published_tables_are_what_their_command_prints(
    command: str, texts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPORTS)
    monkeypatch.setattr(sys, "argv", command.split())
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        known = "beyond the tolerance: qwen3moe mul1-4bpw prefill" if "upstream/cpu " in command else None
        assert end.code in (None, known)
    published = {line for text in texts.split() for line in Path(text).read_text(encoding="utf-8").splitlines()}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) >= 15
    assert [row for row in rows if row not in published] == []

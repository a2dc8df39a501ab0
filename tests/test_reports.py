"""Everything under reports/ is as it was written: each receipt verifies, and none survives one changed byte."""

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

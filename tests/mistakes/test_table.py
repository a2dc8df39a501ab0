"""`docs/mistakes.md` is complete and true: every id, every guard, every test."""

import ast
from functools import lru_cache

import pytest
from mistakes_table import IDS, PEER_IDS, ROOT, Proof, read_rows, resolve
from removed_guards import REMOVALS

ROWS = read_rows()
PROOFS = [proof for row in ROWS for proof in row.proofs]


@lru_cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def asserts_something(function: ast.FunctionDef) -> bool:
    """Whether a function holds an assertion of something that is not a constant, or expects an error."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "raises":
            return True
    return False


def test_every_mistake_has_exactly_one_row() -> None:
    assert sorted(row.id for row in ROWS) == sorted((*IDS, *PEER_IDS))
    assert len(IDS) == 43 and len(PEER_IDS) == 9


def test_every_row_says_what_it_was_what_holds_it_off_and_what_proves_it() -> None:
    for row in ROWS:
        assert row.mistake.endswith(".") and row.here.endswith("."), row.id
        assert row.proofs, row.id


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.name)
def test_every_guard_and_every_test_exists(proof: Proof) -> None:
    owner, name = resolve(proof.guard)
    assert name in vars(owner)
    file, _, function = proof.test.partition("::")
    assert asserts_something(functions_of(file)[function]), proof.test


def test_every_guard_that_is_no_structure_is_removed_once() -> None:
    assert sorted(proof.name for proof in PROOFS if not proof.is_structure) == sorted(REMOVALS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("| M1 | a | b | `c.d` |", "4 cells in the row of M1"),
        ("| M1 | a | b | `c.d`<br>`c.e` | `t::f` |", "shorter|longer"),
    ],
)
def test_a_malformed_row_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(line)


def test_an_empty_test_proves_nothing() -> None:
    tree = ast.parse("def test_a():\n    '''x'''\ndef test_b():\n    assert True\ndef test_c():\n    assert a == 1\n")
    assert [asserts_something(node) for node in tree.body] == [False, False, True]

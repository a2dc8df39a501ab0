"""The shipped suite: what it holds, and how it is drawn from."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest

from exl3eval.errors import SuiteError
from exl3eval.suite.context import Suite, content_digest, list_rows
from exl3eval.suite.load import load_suite, verify_suite

LANGUAGES = {"german", "french", "spanish", "chinese", "japanese", "arabic", "russian", "hindi"}
STRATA = LANGUAGES | {"prose", "encyclopedic", "technical", "code", "math", "chat", "json", "tables", "logs"}


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load_suite()


def test_the_suite_verifies_from_the_ground_up() -> None:
    verified = verify_suite()
    assert verified.digest == load_suite().digest
    assert verified.num_contexts == verified.num_clusters >= 160
    assert 0 <= verified.max_overlap <= 0.03


def test_it_holds_what_it_declares(suite: Suite) -> None:
    assert len(suite.contexts) == 136
    assert len(suite.sealed) >= 28
    assert {context.stratum for context in suite.contexts} == STRATA == set(suite.floors)
    assert {context.stratum for context in suite.sealed} == STRATA
    assert len({context.language for context in suite.contexts if context.stratum == "code"}) >= 4
    assert len({context.cluster for context in suite.contexts + suite.sealed}) == len(suite.contexts + suite.sealed)
    assert sum(suite.licences.values()) == len(suite.contexts + suite.sealed)
    assert not [licence for licence in suite.licences if "GPL" in licence or "SA" in licence]


def test_every_context_is_its_digest(suite: Suite) -> None:
    for context in suite.contexts:
        assert content_digest(context.text, context.messages, context.tools) == context.sha256
        assert bool(context.messages) == (context.kind == "chat") == (context.stratum == "chat")
    assert sum(bool(context.tools) for context in suite.contexts + suite.sealed) >= 2


def test_rows_are_for_tables_and_leave_the_sealed_split_out(suite: Suite) -> None:
    rows = list_rows(suite)
    assert [row["id"] for row in rows] == [context.id for context in suite.contexts]
    assert not {"text", "messages", "tools"} & rows[0].keys()
    assert "sealed" not in repr(suite) and suite.sealed[0].id not in repr(suite)


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_is_balanced_over_strata(suite: Suite, seed: int) -> None:
    order = suite.select(seed=seed)
    assert sorted(context.id for context in order) == sorted(context.id for context in suite.contexts)
    total = Counter(context.stratum for context in order)
    for stratum, size in total.items():
        seen = accumulate(context.stratum == stratum for context in order)
        assert all(abs(count - number * size / 136) < 1 for number, count in enumerate(seen, start=1))
    assert {context.stratum for context in order[:32]} == STRATA


def test_draws_nest_repeat_and_depend_on_the_seed(suite: Suite) -> None:
    assert suite.select(num_contexts=32) == suite.select(num_contexts=64)[:32] == suite.select(num_contexts=64)[:32]
    assert suite.select(seed=1) != suite.select(seed=2)


def test_the_sealed_split_opens_only_by_name(suite: Suite) -> None:
    sealed = {context.id for context in suite.sealed}
    assert not sealed & {context.id for context in suite.select()}
    assert {context.id for context in suite.select("qualification")} == sealed
    assert {context.split for context in suite.select("qualification")} == {"qualification"}


@pytest.mark.parametrize(
    ("split", "number", "message"),
    [("holdout", None, "unknown split 'holdout'"), ("analysis", 137, "holds 136"), ("analysis", 0, "0 contexts")],
)
def test_impossible_draws_are_refused(suite: Suite, split: str, number: int | None, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        suite.select(split, number)

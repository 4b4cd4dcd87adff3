"""Decisions that are left to the freeze: order, clocks that are skewed, and who may be the first of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from tests.unit.tokens.test_lineage import entry_of, item

from toprope.tokens.deferred import decide_deferred
from toprope.tokens.hashing import ChainHash
from toprope.tokens.items import item_digests
from toprope.tokens.lineage import DEFERRED, DEFERRED_ALL_TOLD, ParentChoice


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize(
    ("told", "clocks"),
    [
        (told, clocks)
        for told in (DEFERRED, DEFERRED_ALL_TOLD)
        for clocks in (*permutations((1.0, 2.0, 3.0, 4.0)), (1.0,) * 4)
    ],
)
def test_clocks_that_are_skewed_change_no_decision(told: str, clocks: tuple[float, ...]) -> None:
    """A call named earlier than its parents, as by another worker's clock, must not train as the first of all."""
    choice = ParentChoice("unresolved", None, told, ChainHash())
    turns = [item("u:hi"), item("a:x"), item("u:b"), item("a:y"), item("u:c"), item("a:z"), item("u:d")]
    calls = {
        "c9": entry_of("c9", [1], [2], [item("a:x")], choice),
        "c8": entry_of("c8", [1, 2, 3], [4], [item("a:y")], choice),
        "c7": entry_of("c7", [1, 2, 3, 4, 5], [6], [item("a:z")], choice),
        "other": entry_of("other", [7, 7], [8], [item("a:title")], choice),
    }
    asked = {"c9": turns[:1], "c8": turns[:3], "c7": turns[:5], "other": turns[:1]}
    entries = [
        replace(call, created_at=at, item_digests=item_digests(asked[name]))
        for (name, call), at in zip(calls.items(), clocks, strict=True)
    ]
    decided = {e.model_call_id: e for e in decide_deferred(entries, "r")}
    assert {name: e.parent_decision for name, e in decided.items()} == {
        "c9": "root",
        "c8": "resolved",
        "c7": "resolved",
        "other": "root",
    }
    assert {name: e.parent_call_id for name, e in decided.items()} == {
        "c9": None,
        "c8": "c9",
        "c7": "c8",
        "other": None,
    }


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("clock", [1.0, 3.0])
def test_a_rewritten_history_is_no_first_call_whatever_its_clock_says(clock: float) -> None:
    choice = ParentChoice("unresolved", None, DEFERRED_ALL_TOLD, ChainHash())
    said = replace(entry_of("c1", [1], [2], [item("a:x")], choice), created_at=2.0)
    asked = item_digests([item("u:hi"), item("a:x")])
    rewritten = replace(entry_of("c2", [1, 9, 3], [4], [item("a:y")], choice), item_digests=asked)
    rewritten = replace(rewritten, created_at=clock)
    decided = {e.model_call_id: e for e in decide_deferred([said, rewritten], "r")}
    assert (decided["c1"].parent_decision, decided["c2"].parent_decision) == ("root", "unresolved")


def test_what_a_continuation_of_a_shown_turn_says_again_is_no_doubt_about_the_first_call() -> None:
    choice = ParentChoice("unresolved", None, DEFERRED_ALL_TOLD, ChainHash())
    shown = [item("u:?"), item("a:yes"), item("u:hi")]
    first = replace(entry_of("c1", [1], [2], [item("a:no")], choice), item_digests=item_digests(shown))
    more = item_digests([*shown, item("a:no"), item("u:sure?")])
    second = replace(entry_of("c2", [1, 2, 3], [4], [item("a:yes")], choice), created_at=1.0, item_digests=more)
    decided = {e.model_call_id: e for e in decide_deferred([first, second], "r")}
    assert (decided["c1"].parent_decision, decided["c2"].parent_call_id) == ("root", "c1")


@pytest.mark.parametrize("empty_first", [True, False])
def test_calls_of_equal_length_come_in_order_of_time_and_an_empty_one_is_nobodys_parent(empty_first: bool) -> None:
    choice = ParentChoice("unresolved", None, DEFERRED_ALL_TOLD, ChainHash())
    shown = item_digests([item("u:?"), item("a:yes"), item("u:hi")])
    times = (1.0, 2.0) if empty_first else (2.0, 1.0)
    empty = replace(entry_of("c1", [1, 2], [], [], choice), created_at=times[0], item_digests=shown)
    retry = replace(entry_of("c2", [1, 2], [3], [item("a:x")], choice), created_at=times[1], item_digests=shown)
    decided = {e.model_call_id: e for e in decide_deferred([empty, retry], "r")}
    reasons = [decided[name].parent_resolution_reason for name in ("c1", "c2")]
    assert [e.parent_decision for e in decided.values()] == ["root", "root"]
    assert reasons == (["first_call", "continues_nothing"] if empty_first else ["continues_nothing", "first_call"])

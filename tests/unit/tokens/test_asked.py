"""Marks that share their beginning: what a request adds to one before it is known without a walk over the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toprope.tokens.asked import Asked


@given(st.lists(st.lists(st.text(max_size=2), max_size=3), max_size=8), st.integers(0, 8))
def test_what_came_since_an_earlier_request_and_what_that_held_are_all_marks(parts: list[list[str]], at: int) -> None:
    line = [Asked()]
    for part in parts:
        line.append(line[-1].extended(part))
    last, earlier = line[-1], line[min(at, len(line) - 1)]
    flat = tuple(mark for part in parts for mark in part)
    assert last.all() == flat
    assert last.count == len(flat)
    since = last.since(earlier)
    assert since is not None
    assert earlier.all() + since == flat


def test_equal_marks_of_another_request_are_not_taken_for_its_beginning() -> None:
    one, twin = Asked(("a", "b")), Asked(("a", "b"))
    later = one.extended(("c",))
    assert later.since(one) == ("c",)
    assert later.since(twin) is None
    assert one.since(later) is None
    assert later.since(one.extended(("c",))) is None


def test_a_conversation_of_any_length_is_let_go_of() -> None:
    """A chain of values that hold each other must not be freed by recursion: 100,000 turns overflow a C stack."""
    asked = Asked()
    for turn in range(100_000):
        asked = asked.extended((str(turn),))
    assert asked.count == len(asked.all()) == 100_000
    del asked

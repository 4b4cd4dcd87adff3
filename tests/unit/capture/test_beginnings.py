"""Which roots a call may put in doubt that is lost later, and which calls came before anybody can have spoken."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.capture.beginnings import Beginnings
from toprope.tokens.shown import ShownBeginning, asked_for


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


SHOTS = [user("ex"), {"type": "message", "role": "assistant", "content": "ok"}]
FIRST = ShownBeginning(asked_for(SHOTS), known=False)
KNOWN = ShownBeginning(asked_for(SHOTS), known=True)


def begun(*calls: str) -> Beginnings:
    it = Beginnings()
    for call in calls:
        it.began("k", call)
    return it


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("shown", "request_", "doubt"),
    [
        (FIRST, [user("q")], True),
        (FIRST, [*SHOTS, user("q")], False),  # it was shown all of it
        (KNOWN, [user("title?")], False),  # what it said comes after what it was asked
        (KNOWN, [user("ex")], True),
        (KNOWN, [], True),  # nobody knows what it was asked
        (None, [user("q")], False),
    ],
)
def test_a_root_is_in_doubt_once_an_older_call_is_lost_that_may_have_said_what_it_shows(
    shown: ShownBeginning | None, request_: list[dict[str, Any]], doubt: bool
) -> None:
    it = begun("old", "root", "open")
    it.recorded("k", "root", shown)
    assert it.lost("k", "old", request_) is doubt


@pytest.mark.promise("CP-9")
def test_only_calls_that_were_open_when_a_root_began_put_it_in_doubt() -> None:
    it = begun("old", "root", "later")
    it.recorded("k", "root", FIRST)
    it.began("k", "last")
    assert [it.lost("k", each, [user("q")]) for each in ("later", "last")] == [False, False]
    assert it.lost("k", "old", [user("q")])
    assert len(it) == 0


@pytest.mark.promise("CP-9")
def test_every_root_is_watched_and_the_later_one_of_two_alike_for_more_calls() -> None:
    it = begun("a", "r1", "b", "r2", "c", "r3", "d")
    for root in ("r3", "r2", "r1"):
        it.recorded("k", root, KNOWN if root == "r3" else FIRST)
    assert [it.lost("k", each, [user("ex")]) for each in ("d", "c")] == [False, True]
    assert not it.lost("other", "a", [user("ex")])
    it.began("k", "e")
    assert [it.lost("k", each, [user("q")]) for each in ("e", "b", "a")] == [False, True, True]


@pytest.mark.promise("CP-9")
def test_a_call_that_was_recorded_or_never_sent_puts_nothing_in_doubt_and_one_that_nobody_began_all() -> None:
    it = begun("old", "older", "root", "open")
    it.recorded("k", "root", FIRST)
    it.recorded("k", "old")
    assert it.lost("k", "never begun", [user("q")])
    assert it.lost("k", "older", [user("q")])
    assert not it.lost("k", "open", [user("q")])
    it = begun("open")
    it.recorded("k", "never begun", FIRST)
    assert it.lost("k", "open", [user("q")])


def test_a_call_that_begins_twice_is_as_old_as_the_first_time() -> None:
    it = begun("old", "root", "old")
    it.recorded("k", "root", FIRST)
    assert it.lost("k", "old", [user("q")])


def test_a_key_that_was_made_new_has_no_roots_in_doubt() -> None:
    it = begun("old", "root")
    it.recorded("k", "root", FIRST)
    it.outlived("k")
    assert len(it) == 0
    assert not it.lost("k", "old", [user("q")])


def test_what_is_watched_goes_with_the_calls_that_it_is_watched_for() -> None:
    it = begun("stream")
    for at in range(50):
        it.began("k", f"r{at}")
        it.recorded("k", f"r{at}", ShownBeginning((f"u{at}", "message:m"), known=False))
    assert len(it._of["k"].watched) == 50
    it.began("k", "next")
    it.recorded("k", "stream")
    assert len(it._of["k"].watched) == 0
    it.recorded("k", "next")
    assert len(it) == 0
    for verb in (it.recorded, it.lost):
        verb("k", "next")
    assert len(it) == 0


def test_what_is_watched_is_read_again_only_once_another_call_is_the_oldest() -> None:
    """Beside a call that hangs, every end would else read all that is watched: quadratic in the calls of a rollout."""
    it = begun("hung", "next")
    watched = []
    for at in range(3):
        it.began("k", f"r{at}")
        it.recorded("k", f"r{at}", ShownBeginning((f"u{at}", "message:m"), known=False))
        watched.append(it._of["k"].watched)
    assert watched[0] is watched[1] is watched[2]
    it.recorded("k", "hung")
    assert it._of["k"].watched is not watched[0]
    assert len(it._of["k"].watched) == 3
    assert it.lost("k", "next", [user("q")])


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("calls", "before"),
    [
        ([("a", 1, True)], True),
        ([("a", 0, True)], False),  # nobody knows which
        ([("a", 2, True)], False),  # another writer's call was the first
        ([("t", 1, False), ("a", 2, True)], True),
        ([("t", 1, True), ("a", 2, True)], False),  # a part of what that one says may have left
        ([("t", 1, False), ("a", 3, True)], False),
        ([("t", 1, False), ("s", 2, True), ("a", 3, True)], False),
        ([("t", 1, False), ("s", 2, False), ("a", 3, True)], True),
        ([("s", 3, False), ("a", 2, True)], False),  # the store answered out of order
        ([("s", 2, False), ("a", 1, True)], True),
        ([("t", 1, False), ("t", 1, False), ("a", 2, True)], True),
        ([("t", 0, False), ("a", 1, True)], True),
        ([("t", 0, False), ("a", 2, True)], False),
        ([("t", 0, False), ("a", 0, True)], False),
    ],
)
def test_a_call_began_before_any_reply_if_all_older_ones_are_open_here_and_not_streamed(
    calls: list[tuple[str, int, bool]], before: bool
) -> None:
    it = Beginnings()
    for call, place, stream in calls:
        it.began("k", call, place, stream=stream)
    assert it.before_any_reply("k", "a") is before
    it.recorded("k", "t")
    assert it.before_any_reply("k", "a") is before
    assert not it.before_any_reply("k", "unknown")
    assert not it.before_any_reply("other", "a")


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("verb", ["recorded", "lost"])
@pytest.mark.parametrize("another", [False, True])
def test_once_a_call_ended_no_other_one_begins_before_any_reply(verb: str, another: bool) -> None:
    it = Beginnings()
    it.began("k", "a", 1, stream=False)
    if another:
        it.began("k", "b", 2, stream=False)
    getattr(it, verb)("k", "a")
    place = 3 if another else 2
    it.began("k", "c", place, stream=False)
    it.began("k", "d", place + 1, stream=False)
    assert not it.before_any_reply("k", "c")
    assert not it.before_any_reply("k", "d")
    assert it.before_any_reply("k", "b") is another

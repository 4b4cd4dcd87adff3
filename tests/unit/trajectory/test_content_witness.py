"""Which call wrote the row's final output, when several could have: what is not certain is not named.

Each situation takes the reader of witnesses, so that unsafe variants of it can be put through them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from tests.mutants import killer, mutated
from tests.unit.trajectory.rows import called, held, result, row, said, thought, tree

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory import terminal
from toprope.trajectory.build import Built, Masked, Trainable, build

Reader = Callable[..., terminal.TerminalWitnesses]


def built(read: Reader, entries: list[TokenEntry], output: list[dict[str, Any]]) -> Built:
    claims = read(row(output), entries)
    copied = terminal.TerminalWitnesses(content=claims.content)  # a mutant's are of a class of its own
    return build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=copied)


def named(read: Reader, entries: list[TokenEntry], output: list[dict[str, Any]], *calls: str) -> None:
    for order in list(permutations(entries))[:24]:
        assert read(row(output), list(order)).content == calls


def sub_agent_first(*, m2: list[dict[str, Any]]) -> list[TokenEntry]:
    """The main agent asks a sub-agent, whose reply it repeats in its own words."""
    return tree(m1=(None, [called("sub")]), s1=(None, [said("42")]), m2=("m1", m2))


def test_a_reply_is_not_told_from_an_equal_one_that_was_thought_about_first(read: Reader) -> None:
    entries = tree(c1=(None, [said("Done.")]), c2=("c1", [thought("t"), said("Done.")]))
    named(read, entries, [said("Done.")], "c1", "c2")
    result_ = built(read, entries, [said("Done.")])
    assert isinstance(result_, Trainable)
    assert result_.traces[0].call_ids == ("c1", "c2"), "the only chain, to its end"
    named(read, entries, [thought("t"), said("Done.")], "c2")


def test_a_sub_agents_reply_does_not_stand_for_the_main_agents(read: Reader) -> None:
    entries = sub_agent_first(m2=[thought("t"), said("42")])
    masked = built(read, entries, [said("42")])
    assert isinstance(masked, Masked)
    assert "several_roots" in masked.reasons
    for output in ([called("a"), result("a"), said("42")], [called("a"), result("a"), thought("t"), said("42")]):
        whole = built(read, entries, output)
        assert isinstance(whole, Trainable)
        assert whole.traces[0].call_ids == ("m1", "m2")


def test_reasoning_that_was_left_out_in_part_or_written_anew_hides_no_call(read: Reader) -> None:
    both = [thought("t"), thought("u"), said("42")]
    entries = sub_agent_first(m2=both)
    for output in ([thought("u"), said("42")], [thought("t"), said("42")], both):
        named(read, entries, output, "m2")
    named(read, entries, [thought("u"), thought("t"), said("42")], "m2", "s1")  # nobody's, so it counts for nothing
    named(read, entries, [thought("a summary"), said("42")], "m2", "s1")
    named(read, entries, [called("a"), result("a"), thought("a summary"), said("42")], "m2")


def test_a_call_that_said_more_or_less_than_the_row_is_not_named(read: Reader) -> None:
    entries = tree(c1=(None, [said("a"), said("b")]), c2=("c1", [said("b")]))
    named(read, entries, [said("a"), said("b")], "c1")
    named(read, entries, [said("b")], "c2")
    named(read, entries, [said("b"), said("a")])


def test_a_sub_agent_that_said_what_the_row_ends_with_is_not_the_main_agents_turn(read: Reader) -> None:
    """The agent hands in its answer cut to the number: only the sub-agent said just that, and in no such place."""
    entries = sub_agent_first(m2=[said("The answer is 42.")])
    named(read, entries, [called("a"), result("a"), said("42")])
    masked = built(read, entries, [called("a"), result("a"), said("42")])
    assert isinstance(masked, Masked)


def test_a_row_that_shows_a_part_of_a_transcript_names_the_call_that_goes_on_from_it(read: Reader) -> None:
    entries = tree(
        c1=(None, [called("x")]),
        c2=("c1", [said("half way")]),
        s1=(None, [said("end")]),
        c3=("c2", [thought("t"), said("end")]),
    )
    window = [said("half way"), {"role": "user", "content": "go"}, said("end")]
    named(read, entries, window, "c3")

    anew = [*window[:-1], thought("a summary"), said("end")]
    named(read, entries, anew, "c3")


def test_the_whole_transcript_decides_between_calls_that_go_on_from_the_same_words(read: Reader) -> None:
    entries = tree(
        a1=(None, [said("a")]),
        a2=("a1", [thought("u"), called("x")]),
        a3=("a2", [said("end")]),
        b1=(None, [thought("t"), called("x")]),
        b2=("b1", [thought("v"), said("end")]),
        d1=(None, [thought("u"), called("x")]),
        d2=("d1", [said("end")]),
    )
    named(read, entries, [thought("t"), called("x"), result("x"), said("end")], "b2")
    named(read, entries, [thought("u"), called("x"), result("x"), said("end")], "d2")
    named(read, entries, [thought("a summary"), called("x"), result("x"), said("end")], "b2", "d2")


def test_a_conversation_that_was_compacted_is_named_by_its_last_call_only(read: Reader) -> None:
    shown = [called("x"), result("x"), said("end")]
    entries = tree(c1=(None, [called("x")]), summary=("c1", [said("so far")]), k1=(None, [said("end")]))
    named(read, entries, shown, "k1")
    later = tree(c1=(None, [called("x")]), k1=(None, [said("end")]), c2=("c1", [said("so far")]))
    named(read, later, shown)
    at_once = [replace(each, created_at=0.0) for each in entries]
    named(read, at_once, shown)


def test_a_turn_that_said_nothing_is_looked_through(read: Reader) -> None:
    entries = tree(
        c1=(None, [said("a")]),
        c2=("c1", [called("x")]),
        e=("c2", []),
        c3=("e", [said("end")]),
        s1=(None, [said("end")]),
    )
    named(read, entries, [called("x"), result("x"), said("end")], "c3")


def test_a_row_that_ends_with_a_tools_result_is_named_by_its_whole_transcript_or_not_at_all(read: Reader) -> None:
    """Who read the result spoke last, and the row does not show it."""
    entries = held([said("a")], [called("x")], [said("never shown")])
    named(read, entries, [said("a"), called("x"), result("x")], "c1")
    named(read, entries, [called("x"), result("x")])
    # A user's turn at the end is read by nobody.
    named(read, entries, [said("never shown"), {"role": "user", "content": "bye"}], "c2")


def test_a_final_output_of_several_calls_is_a_transcript(read: Reader) -> None:
    entries = tree(c1=(None, [said("a")]), c2=("c1", [said("b")]))
    named(read, entries, [said("a"), said("b")], "c2")
    one = tree(c1=(None, [said("a")]), c2=("c1", [said("b")]), s1=(None, [said("a"), said("b")]))
    named(read, one, [said("a"), said("b")], "c2", "s1")


def test_a_call_whose_copies_differ_is_named_beside_its_like_and_masks(read: Reader) -> None:
    """What it wrote is not known, and so neither is whether the other was the last."""
    s1, m2 = tree(s1=(None, [said("42")]), m2=(None, [said("42")]))
    entries = [s1, m2, replace(m2, output_items=(said("41"),))]
    named(read, entries, [said("42")], "m2", "s1")
    assert isinstance(built(read, entries, [said("42")]), Masked)


def test_parents_in_a_ring_end_nowhere(read: Reader) -> None:
    a, b = tree(a=(None, [said("x")]), b=("a", [said("y")]))
    ring = [replace(a, parent_decision="resolved", parent_call_id="b"), b]
    named(read, ring, [said("x"), {"role": "user", "content": "go"}, said("y")], "b")
    quiet = [replace(each, output_items=()) for each in ring]
    named(read, [*quiet, *tree(c=(None, [said("z")]))], [said("q"), {"role": "user"}, said("z")])


SITUATIONS = {name: value for name, value in list(globals().items()) if name.startswith("test_")}


@pytest.fixture
def read() -> Reader:
    return terminal.witnesses_of


_AGAIN = "for wanted in (shown, _spoken(shown)):"
MUTANTS: dict[str, tuple[str, str]] = {
    "exact_matches_come_first": ("elif not mark.startswith(THOUGHT):", "elif THOUGHT not in str(shown):"),
    "reasoning_may_not_be_left_out": ("elif not mark.startswith(THOUGHT):", "else:"),
    "anything_may_be_left_out": ("elif not mark.startswith(THOUGHT):", "elif False:"),
    "reasoning_written_anew_hides_the_call": (_AGAIN, "for wanted in (shown,):"),
    "reasoning_of_the_final_output_counts_for_nothing": (_AGAIN, "for wanted in (_spoken(shown),):"),
    "reasoning_of_a_transcript_written_anew_hides_the_call": (" or said.in_all(_spoken(shown))", ""),
    "reasoning_of_a_transcript_counts_for_nothing": ("said.in_all(shown) or ", ""),
    "reasoning_written_anew_at_the_end_of_a_part_hides_the_call": (" or said.just(_spoken(last))", ""),
    "one_match_is_enough": (
        "    following = {",
        "    if len(own) == 1:\n        return tuple(own)\n    following = {",
    ),
    "a_final_output_alone_is_a_transcript": (
        "if found := said.just(wanted) | said.in_all(wanted):",
        "if found := said.in_all(wanted) or said.just(wanted):",
    ),
    "a_final_output_of_several_calls_is_nobodys": (
        "if found := said.just(wanted) | said.in_all(wanted):",
        "if found := said.just(wanted):",
    ),
    "what_ends_in_a_tools_result_is_final": (
        'elif count or item.get("type", "message") != "message":',
        "elif count:",
    ),
    "a_users_last_turn_hides_the_reply": ('elif count or item.get("type", "message") != "message":', "else:"),
    "the_transcript_is_not_asked": ("sorted(whole or following", "sorted(following"),
    "the_turn_before_is_not_asked": ("sorted(whole or following or", "sorted(whole or"),
    "any_call_may_come_later": ("if said.nothing_after(call_id)}", "}"),
    "compaction_is_never_named": ("if said.nothing_after(call_id)}", "if False}"),
    "equal_times_are_an_order": ("copy.at < began", "copy.at <= began"),
    "part_of_a_transcript_is_one": ("if begin == 0 and copy.parent", "if begin is not None and copy.parent"),
    "the_end_of_a_transcript_is_one": ("if begin == 0 and copy.parent not in self._copies:", "if begin == 0:"),
    "part_of_a_reply_is_one": ("len(shown)) == 0 for", "len(shown)) is not None for"),
    "one_copy_speaks_for_the_call": (
        "self._copies.setdefault(entry.model_call_id, set()).add(copy)",
        "self._copies[entry.model_call_id] = {copy}",
    ),
    "a_silent_turn_is_the_one_before": ("                if not spoken:\n", "                if False:\n"),
}


def reader(old: str, new: str) -> Reader:
    found: Reader = mutated("toprope.trajectory", ("evidence", "terminal"), "terminal", old, new)[
        "terminal"
    ].witnesses_of
    return found


def checks(read: Reader) -> dict[str, Callable[[], object]]:
    return {name: partial(situation, read) for name, situation in SITUATIONS.items()}


def test_the_reader_itself_survives() -> None:
    assert killer(checks(reader("Nothing in the row can", "Nothing in the row can"))) is None


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_killed(name: str) -> None:
    assert killer(checks(reader(*MUTANTS[name]))) is not None, "an unsafe reader passes every situation"

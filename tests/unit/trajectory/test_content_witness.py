"""Which call wrote the row's final output, when several could have: what is not certain is not named.

Each situation takes the reader of witnesses, so that unsafe variants of it can be put through them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from tests.mutants import killer, mutated
from tests.unit.trajectory.golden import entry
from tests.unit.trajectory.rows import called, held, result, said, thought, tree

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory import content
from toprope.trajectory.build import Built, Masked, Trainable, build
from toprope.trajectory.evidence import read as read_evidence
from toprope.trajectory.terminal import TerminalWitnesses

Reader = Callable[..., tuple[str, ...]]
NO_IDS = np.zeros(0, np.uint32)


def written_by(read: Reader, entries: list[TokenEntry], output: Any) -> tuple[str, ...]:
    return read(read_evidence("r", entries), entries, output)


def built(read: Reader, entries: list[TokenEntry], output: list[dict[str, Any]]) -> Built:
    claim = TerminalWitnesses(content=written_by(read, entries, output))
    return build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=claim)


def named(read: Reader, entries: list[TokenEntry], output: list[dict[str, Any]], *calls: str) -> None:
    for order in list(permutations(entries))[:24]:
        assert written_by(read, list(order), output) == calls


def sub_agent_first(*, m2: list[dict[str, Any]]) -> list[TokenEntry]:
    """The main agent asks a sub-agent, whose reply it repeats in its own words."""
    return tree(m1=(None, [called("sub")]), s1=(None, [said("42")]), m2=("m1", m2))


def user(text: str = "go") -> dict[str, Any]:
    return {"role": "user", "content": text}


def unknown_history(entry: TokenEntry) -> TokenEntry:
    """The same call, of which lineage could not tell what it continues."""
    why = "history_rewritten:m1@3"
    return replace(entry, parent_decision="unresolved", parent_call_id=None, parent_resolution_reason=why)


def test_a_reply_is_not_told_from_an_equal_one_that_was_thought_about_first(read: Reader) -> None:
    entries = tree(c1=(None, [said("Done.")]), c2=("c1", [thought("t"), said("Done.")]))
    named(read, entries, [said("Done.")])
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
    named(read, entries, [thought("u"), thought("t"), said("42")])  # nobody's, so it counts for nothing
    named(read, entries, [thought("a summary"), said("42")])
    for before in ([called("a"), result("a")], [thought("anew"), called("a"), result("a")]):
        named(read, entries, [*before, thought("a summary"), said("42")], "m2")
    named(read, entries, [called("a"), result("a"), thought("t")])
    planned = tree(m1=(None, [said("plan"), called("a")]), m2=("m1", [thought("t"), said("42")]))
    named(read, planned, [said("plan"), called("a"), result("a"), thought("a summary")])


def test_thoughts_are_told_from_words_and_words_by_their_ends(read: Reader) -> None:
    entries = tree(m1=(None, [said("Done.\n")]), s1=(None, [thought("Done."), said("Fine.")]))
    named(read, entries, [said(" Done.")], "m1")
    named(read, tree(m1=(None, [said("4")]), s1=(None, [said("14 apples, 42 pears")])), [said("4")], "m1")
    for wrote in ("<think>so</think>Done.", "Done. Really.", "14 or 4"):
        shown = "4" if "4" in wrote else "Done."
        named(read, tree(m1=(None, [said(wrote)]), s1=(None, [said(shown)])), [said(shown)])


def test_a_call_that_said_more_or_less_than_the_row_is_not_named(read: Reader) -> None:
    entries = tree(c1=(None, [said("a"), said("b")]), c2=("c1", [said("b")]))
    named(read, entries[:1], [said("a"), said("b")], "c1")
    named(read, entries, [said("a"), said("b")])
    named(read, entries, [said("b")], "c2")
    named(read, entries, [said("b"), said("a")])
    # What follows in the same conversation, longer, may be what the harness cut down.
    more = tree(c1=(None, [called("x")]), c2=("c1", [said("b")]), c3=("c2", [said("It is b")]))
    for output in ([called("x"), result("x"), said("b")], [said("b")]):
        named(read, more, output)
        named(read, more[:2], output, "c2")
    for first, then in (("c1", "c2"), ("c2", "c1")):  # whichever comes first by name
        named(read, tree(**{first: (None, [said("b")]), then: (first, [said("b")])}), [said("b")])


def test_a_sub_agent_that_said_what_the_row_ends_with_is_not_the_main_agents_turn(read: Reader) -> None:
    """The agent hands in its answer cut to the number: only the sub-agent said just that, and in no such place."""
    entries = sub_agent_first(m2=[said("The answer is 42.")])
    for output in ([called("a"), result("a"), said("42")], [said("42")]):
        named(read, entries, output)
        assert isinstance(built(read, entries, output), Masked)


def test_a_row_that_shows_a_part_of_a_transcript_names_the_call_that_goes_on_from_it(read: Reader) -> None:
    entries = tree(
        c1=(None, [called("x")]),
        c2=("c1", [said("so"), said("half way")]),
        s1=(None, [said("end")]),
        c3=("c2", [thought("t"), said("end")]),
    )
    window = [said("half way"), user(), said("end")]
    named(read, entries, window, "c3")
    named(read, entries, [*window[:-1], thought("a summary"), said("end")], "c3")
    # With a rival, what is left out between two turns speaks against it; alone, tool calls may be left out.
    gap = [called("x"), result("x"), said("end")]
    named(read, entries, gap)
    named(read, [each for each in entries if each.model_call_id != "s1"], gap, "c3")


def test_the_conversation_decides_between_calls_that_go_on_from_the_same_words(read: Reader) -> None:
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
    named(read, entries, [thought("u"), called("x"), result("x"), said("end")])  # a part of a3's, all of d2's
    named(read, entries[3:], [thought("u"), called("x"), result("x"), said("end")], "d2")
    named(read, entries, [thought("a summary"), called("x"), result("x"), said("end")])
    named(read, entries, [said("a"), user(), called("x"), result("x"), said("end")], "a3")


def test_turns_of_another_conversation_name_nobody(read: Reader) -> None:
    """A conversation that was compacted is not told from a sub-agent's, whatever the times say."""
    shown = [called("x"), result("x"), said("end")]
    for late in (True, False):
        calls = {"c1": (None, [called("x")]), "c2": ("c1", [said("so far")]), "k1": (None, [said("end")])}
        entries = tree(**calls) if late else tree(**{name: calls[name] for name in ("c1", "k1", "c2")})
        named(read, entries, shown)
        named(read, entries, shown[-1:], "k1")


def test_a_sub_agent_that_did_and_said_the_same_hides_a_compacted_conversation(read: Reader) -> None:
    entries = tree(m1=(None, [called("a")]), s1=(None, [called("b")]), s2=("s1", [said("ok")]), m2=(None, [said("ok")]))
    shown = [called("a"), result("a"), said("ok")]
    named(read, entries, shown)
    named(read, entries[1:], shown, "s2")  # without m1 nobody else did what the row shows
    conflict = [entries[0], replace(entries[0], output_items=(said("x"),)), *entries[1:]]
    named(read, conflict, shown)


def test_a_history_that_nobody_knows_may_hold_anything(read: Reader) -> None:
    m1, m2, s1, s2 = tree(
        m1=(None, [said("so")]), m2=("m1", [said("ok")]), s1=(None, [said("hm")]), s2=("s1", [said("ok")])
    )
    shown = [said("hm"), user(), said("ok")]
    named(read, [m1, m2, s1, s2], shown, "s2")
    named(read, [m1, unknown_history(m2), s1, s2], shown)
    silent = replace(m2, output_items=())
    named(read, [m1, silent, s1, s2], shown, "s2")
    named(read, [m1, unknown_history(silent), s1, s2], shown)
    longer = tree(m1=(None, [said("so")]), m2=("m1", [said("on")]), m3=("m2", [said("ok")]))
    named(read, [longer[0], unknown_history(longer[1]), longer[2], s1, s2], shown)
    # Alone it is named, and what is unknown before it masks.
    alone = built(read, [m1, unknown_history(m2), s1], [said("so"), user(), said("ok")])
    assert isinstance(alone, Masked)
    assert alone.reasons == ("unresolved_parent", "history_rewritten")
    # A transcript that ends in a tool's result is whole or names nobody.
    named(read, [m1, unknown_history(replace(m2, output_items=(said("x"), called("b"))))], [said("x"), result("b")])
    named(read, [unknown_history(replace(m1, output_items=(called("a"),)))], [called("a"), result("a")])


def test_a_row_without_tool_calls_hides_the_turns_that_made_one(read: Reader) -> None:
    calls: dict[str, Any] = {"c1": (None, [called("x")]), "c2": ("c1", [said("so far")]), "c3": ("c2", [called("y")])}
    entries = tree(**calls, c4=("c3", [said("end")]))
    for output in ([said("end")], [said("so far"), said("end")], [said("so far"), user(), said("end")]):
        named(read, [*entries, *tree(s1=(None, [said("sub")]))], output, "c4")
        named(read, [*entries, *tree(s1=(None, [called("y")]))], [result("y"), *output[-1:]], "c4")
        named(read, [*entries, *tree(s1=(None, [called("y")]))], output)  # it may go on from anybody's words
        going_on = {"s1": (None, [called("y")]), "s2": ("s1", [said("sub")])}
        named(read, [*entries, *tree(**going_on)], output, "c4")
    # Out of steps, an agent hands in what it said before; or all but the call that it made beside it.
    named(read, entries[:3], [said("so far")])
    named(read, tree(c1=(None, [said("so far"), called("x")])), [said("so far")])
    named(read, tree(c1=(None, [said("so far"), called("x")])), [said("so far"), called("x"), result("x")], "c1")


def test_a_row_without_words_hides_the_turns_that_said_some(read: Reader) -> None:
    entries = tree(c1=(None, [called("x")]), c2=("c1", [said("never shown")]))
    named(read, entries, [called("x"), result("x")])
    named(read, entries[:1], [called("x"), result("x")], "c1")
    named(read, tree(c1=(None, [said("so far"), called("x")])), [called("x"), result("x")])


def test_a_turn_that_said_nothing_is_looked_through(read: Reader) -> None:
    entries = tree(
        c1=(None, [said("a")]),
        c2=("c1", [called("x")]),
        e=("c2", []),
        c3=("e", [said("end")]),
        s1=(None, [said("end")]),
    )
    named(read, entries, [called("x"), result("x"), said("end")], "c3")


def test_a_last_turn_that_said_nothing_may_be_the_rows(read: Reader) -> None:
    shown = [called("x"), result("x"), said("end")]
    for quiet in ([], [thought("t")]):
        entries = tree(c1=(None, [called("x")]), c2=("c1", [said("end")]), c3=("c2", quiet))
        for output in (shown, shown[-1:], [thought("t"), *shown[-1:]]):
            named(read, entries, output)
        named(read, [entries[0], replace(entries[2], model_call_id="c2")], shown[:2])
        nothing = replace(entries[2], generation_token_ids=NO_IDS, generation_log_probs=np.zeros(0))
        named(read, [*entries[:2], nothing], shown, "c2")


def test_a_row_that_ends_with_a_tools_result_is_named_by_its_whole_transcript_or_not_at_all(read: Reader) -> None:
    """Who read the result spoke last, and the row does not show it."""
    entries = held([said("a")], [called("x")], [said("never shown")])
    named(read, entries, [said("a"), called("x"), result("x")], "c1")
    named(read, entries, [called("x"), result("x")])
    # A user's turn at the end is read by nobody.
    named(read, entries, [said("never shown"), user("bye")], "c2")


def test_a_final_output_of_several_calls_is_a_transcript(read: Reader) -> None:
    entries = tree(c1=(None, [said("a")]), c2=("c1", [said("b")]))
    named(read, entries, [said("a"), said("b")], "c2")
    one = tree(c1=(None, [said("a")]), c2=("c1", [said("b")]), s1=(None, [said("a"), said("b")]))
    named(read, one, [said("a"), said("b")])


def test_calls_with_equal_ids_are_one(read: Reader) -> None:
    c1, c2 = tree(c1=(None, [called("x")]), c2=("c1", [said("end")]))
    twins = [c1, c2, replace(c2, model_call_id="c3")]
    for output in ([said("end")], [called("x"), result("x"), said("end")]):
        named(read, twins, output, "c2", "c3")
    other = entry("c3", [1, 2], c2.generation_token_ids.tolist(), None, {"decision": "root"})
    named(read, [c1, c2, replace(other, output_items=c2.output_items)], [said("end")])


def test_a_call_whose_copies_differ_hides_its_like_and_masks(read: Reader) -> None:
    """What it wrote is not known, and so neither is whether the other was the last."""
    s1, m2 = tree(s1=(None, [said("42")]), m2=(None, [said("42")]))
    for copies in ([m2, replace(m2, output_items=(said("41"),))], [replace(m2, output_items=(said("41"),)), m2]):
        named(read, [s1, *copies], [said("42")])
        assert isinstance(built(read, [s1, *copies], [said("42")]), Masked)
    silent = replace(m2, output_items=())
    named(read, [s1, silent, replace(silent, media=True)], [said("42")])


def test_parents_in_a_ring_end_nowhere(read: Reader) -> None:
    """A claim that is not verified is none: a ring of silent calls would be walked for ever."""
    a, b, c = tree(a=(None, []), b=("a", []), c=("b", [said("Done.")]))
    ring = [replace(a, parent_decision="resolved", parent_call_id="b"), b, c]
    shown = [called("x"), result("x"), said("Done.")]
    assert isinstance(built(read, ring, shown), Masked)
    both = [replace(a, parent_decision="resolved", parent_call_id="c"), b, c]
    assert isinstance(built(read, both, shown), Masked)


def same_steps(*m2: dict[str, Any], words: str = "42", first: tuple[dict[str, Any], ...] = ()) -> list[TokenEntry]:
    """A sub-agent that takes the main agent's step and ends with these words."""
    step = called("x")
    return tree(m1=(None, [*first, step]), s1=(None, [step]), s2=("s1", [said(words)]), m2=("m1", list(m2)))


@pytest.mark.promise("CP-9")
def test_an_answer_cut_out_of_anything_is_not_the_sub_agents(read: Reader) -> None:
    def shown(words: str) -> list[dict[str, Any]]:
        return [called("x"), result("x"), said(words)]

    for whole in ("答案是42。", "距离42公里", "42km", "$42M", "x42", "42nd", '{"answer": 42}'):
        named(read, same_steps(said(whole)), shown("42"))
    cut = {
        "成功": "テストは成功しました",
        "All tests pas": "All tests pass.",
        "All te...": "All tests pass.",
        "yes": "**Yes**",
    }
    for words, whole in cut.items():
        named(read, same_steps(said(whole), words=words), shown(words))
    for other in ("142 pears", "4 and 2", "no"):
        named(read, same_steps(said(other)), shown("42"), "s2")


@pytest.mark.promise("CP-9")
def test_an_argument_of_a_finish_tool_or_a_thought_may_be_the_answer(read: Reader) -> None:
    answer = {"type": "function_call", "call_id": "f", "name": "submit", "arguments": '{"answer": ["42"]}'}
    shown = [called("x"), result("x"), said("42")]
    for output in (shown, shown[-1:]):
        for m2 in ([answer], [said("I submit it."), answer], [thought("so 42")]):
            for first in ((), (said("look"),)):
                named(read, same_steps(*m2, first=first), output)
    asked = tree(m1=(None, [said("I ask"), called("sub")]), s1=(None, [said("42")]))
    named(read, asked, shown[-1:])
    named(read, same_steps(said("43"), thought("not 42")), shown, "s2")
    submitted = tree(s1=(None, [said("42")]), m1=(None, [answer]), m2=("m1", [said("Submitted.")]))
    named(read, submitted, shown[-1:])


def test_a_side_call_cut_inside_its_thought_hides_no_transcript_that_is_the_rows_own(read: Reader) -> None:
    entries = tree(t=(None, [thought("cut")]), c1=(None, [called("x")]), c2=("c1", [said("It is done")]))
    named(read, entries, [called("x"), result("x"), said("It is done")], "c2")
    named(read, entries, [said("It is done")])
    quiet = tree(s1=(None, [said("sub")]), s2=("s1", [thought("t")]), c1=(None, [said("end")]))
    named(read, quiet, [said("end")], "c1")


def test_a_retry_whose_client_had_gone_is_no_rival(read: Reader) -> None:
    c1, gone, c3 = tree(c1=(None, [called("x")]), c2=("c1", [said("It is end")]), c3=("c1", [said("end")]))
    shown = [called("x"), result("x"), said("end")]
    named(read, [c1, gone, c3], shown)
    named(read, [c1, replace(gone, client_gone=True), c3], shown, "c3")
    named(read, [c1, gone, replace(c3, client_gone=True)], shown)


def test_a_row_that_cannot_be_read_names_nobody(read: Reader) -> None:
    entries = tree(c1=(None, [said("end")]))
    named(read, entries, [{"role": "assistant", "content": [{"type": {}}]}, said("end")])
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    for strange in (deep, 10**5_000):
        named(read, entries, [{"type": "other", "value": strange}, said("end")])


SITUATIONS = {name: value for name, value in list(globals().items()) if name.startswith("test_")}


@pytest.fixture
def read() -> Reader:
    return content.written_by


_LEFT_OUT = 'elif not mark.is_thought:\n                    return "part"'
_MEASURE = "self._length[before.id] if before else 0"
MUTANTS: dict[str, tuple[str, str]] = {
    "blanks_tell_calls_apart": (" self.words == shown.words and", " False and"),
    "thoughts_are_words": ("and self.is_thought == shown.is_thought\n", "\n"),
    "a_part_of_a_thought_is_a_word": ("or self.is_thought != shown.is_thought:", "or False:"),
    "nobody_cuts_words": ("return any(_is_among(words, text) for text in self.texts) or (", "return ("),
    "only_the_first_place_counts": ("at = text.find(words, at + 1)", "at = -1"),
    "nobody_normalises": ("any(shown.plain) and not", "False and not"),
    "a_number_is_cut_out_of_a_longer_one": ("if not longer_before and not (", "if not ("),
    "arguments_are_no_words": ("unseen = [*_spoken(self._all[actor]), *", "unseen = [*"),
    "thoughts_hold_no_answer": ("*(() if _spoken(self._all[call.id]) else self._all[call.id])]", "]"),
    "what_the_row_hides_ends_nothing": (" or actor in self._hides_some)", ")"),
    "a_silent_side_call_may_have_said_anything": (
        "            if self._actor[call.id] in self._hides_some:\n",
        "            if True:\n",
    ),
    "unread_retries_count": ("        if any(not _is_unread(call) for call in writers):", "        if False:"),
    "what_cannot_be_read_raises": ("except (TypeError, ValueError, RecursionError):", "except KeyError:"),
    "a_piece_of_a_word_is_one": ("return _is_among(shown.words, self.words)", "return shown.words in self.words"),
    "reasoning_written_anew_hides_the_call": ("(whole, whole.without_thoughts())", "(whole,)"),
    "reasoning_counts_for_nothing": ("(whole, whole.without_thoughts())", "(whole.without_thoughts(),)"),
    "a_thought_at_the_end_is_no_ending": ("if not self.ending or spoken:", "if True:"),
    "reasoning_may_not_be_left_out": (_LEFT_OUT, _LEFT_OUT.replace("elif not mark.is_thought", "else")),
    "anything_may_be_left_out": (_LEFT_OUT, _LEFT_OUT.replace("not mark.is_thought", "False")),
    "a_final_output_of_several_calls_is_nobodys": ("self.marks[-max(1, self.ending) :]", "self.marks[-1:]"),
    "what_ends_in_a_tools_result_is_final": (
        'elif count or item.get("type", "message") != "message":',
        "elif count:",
    ),
    "a_users_last_turn_hides_the_reply": ('elif count or item.get("type", "message") != "message":', "else:"),
    "records_set_aside_say_nothing": (
        "        if any(not _spoken(marks) or any(",
        "        if any(False and any(",
    ),
    "a_silent_record_set_aside_is_none": ("if any(not _spoken(marks) or any(", "if any(any("),
    "records_set_aside_did_nothing": ("told = [*self._aside, *", "told = [*"),
    "rivals_are_not_asked": ("        if rivals:\n", "        if False:\n"),
    "any_rival_hides_the_call": ("if any(self._may_show(rival, rest) for rival in rivals):", "if True:"),
    "nothing_is_ever_compacted": ("_Sought(shown.marks[self._told_elsewhere(first, shown) :])", "_Sought(shown.marks)"),
    "everything_may_be_compacted": (
        "_Sought(shown.marks[self._told_elsewhere(first, shown) :])",
        "_Sought(shown.last)",
    ),
    "what_the_call_itself_did_may_be_compacted": ("if call_id not in own)]", ")]"),
    "turns_may_be_left_out_before_a_rival": ("if self._reach(first, shown.marks) is None:", "if False:"),
    "part_of_a_transcript_before_a_tools_result": (
        'return self._reach(call, shown.marks) == "whole"',
        "return self._reach(call, shown.marks) is not None",
    ),
    "what_the_row_shows_before_is_not_asked": (" and self._may_show(call, whole)\n", "\n"),
    "a_part_of_a_reply_is_one": (
        "self._reach(call, shown.last) is not None and self._may_show(call, whole)",
        "self._may_show(call, whole)",
    ),
    "its_own_conversation_is_a_rival": ("if call.id not in kin or", "if True or"),
    "its_own_conversation_is_never_a_rival": (" or self._reach(call, shown.last) is not None]", "]"),
    "what_follows_is_never_a_rival": (
        "kin = {call.id for call in first.path()}\n",
        "kin = {call.id for call in first.path()} | first.descendants()\n",
    ),
    "a_boundary_hides_nothing": ("self._unknown[each.id] = any(each.faults_here())", "self._unknown[each.id] = False"),
    "a_boundary_hides_what_follows_it_only": ("self._unknown[before.id] if before else False", "False"),
    "what_stands_behind_a_boundary_is_whole": ('"part" if self._unknown[call.id] else "whole"', '"whole"'),
    "a_silent_conversation_is_none": ("return not call.children and (not", "return False and (not"),
    "a_silent_conversation_that_went_on_may_be_the_last": ("return not call.children and (not", "return (not"),
    "tool_calls_are_always_shown": (
        "_kinds(output, whole.marks))",
        "{True, False})",
    ),
    "tool_calls_are_never_shown": (
        "_kinds(output, whole.marks))",
        "{False})",
    ),
    "a_hidden_call_ends_a_conversation": ("if call.id in self._hides_some:", "if False:"),
    "a_result_tells_of_no_call": ("if results else set()", "if False else set()"),
    "words_are_always_shown": (
        "_kinds(output, whole.marks))",
        "{False, *_kinds(output, whole.marks)})",
    ),
    "a_silent_call_is_never_the_last": ("if before and not self._speaks(each.id) else", "if False else"),
    "an_empty_call_may_be_the_last": ("if self._counts(call) and", "if"),
    "twins_are_two": ("return call.prompt_len, call.digest()", "return call.id, call.digest()"),
    "twins_by_generation_alone": ("return call.prompt_len, call.digest()", "return call.generated.tobytes()"),
    "a_window_begins_with_a_call": ("if at == 0 and each.id != self._speaker[call.id] else None", "if False else None"),
    "the_end_of_a_reply_is_one": ("if at == 0 and each.id != self._speaker[call.id] else None", "if at == 0 else None"),
}


def reader(old: str, new: str) -> Reader:
    found: Reader = mutated("toprope.trajectory", ("evidence", "content"), "content", old, new)["content"].written_by
    return found


def checks(read: Reader) -> dict[str, Callable[[], object]]:
    return {name: partial(situation, read) for name, situation in SITUATIONS.items()}


def test_the_reader_itself_survives() -> None:
    assert killer(checks(reader("Only verified evidence is read", "Only verified evidence is read"))) is None


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_killed(name: str) -> None:
    assert killer(checks(reader(*MUTANTS[name]))) is not None, "an unsafe reader passes every situation"

"""Which call wrote the row's final output, when several could have: what is not certain is not named.

Each situation takes the reader of witnesses, so that unsafe variants of it can be put through them too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mutants import killer, mutated
from tests.unit.trajectory.golden import entry
from tests.unit.trajectory.rows import called, claims, held, result, row, said, thought, tree

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory import content
from toprope.trajectory import words as words_read
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
    orders = list(permutations(entries))
    for order in orders[:: -(-len(orders) // 4)]:
        assert written_by(read, list(order), output) == calls


def sub_agent_first(*, m2: list[dict[str, Any]], s1: str = "42") -> list[TokenEntry]:
    """The main agent asks a sub-agent, whose reply it repeats in its own words."""
    return tree(m1=(None, [called("sub")]), s1=(None, [said(s1)]), m2=("m1", m2))


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
    numbers = tree(c1=(None, [said("14")]), c2=("c1", [said("end")]))
    named(read, numbers, [said("4"), user(), said("end")])
    named(read, numbers, [said("14"), user(), said("end")], "c2")
    twice = [said("I **run**")], [said("b")], [said("i run")], [said("b")]
    named(read, held(*twice), [said("i run"), user(), said("b")])
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
    again = tree(
        c1=(None, [said("a")]),
        c2=("c1", [said("a")]),
        c3=("c2", [said("a")]),
        c4=("c3", [said("end")]),
        s1=(None, [said("end")]),
    )
    named(read, again, [said("a"), user(), said("a"), user(), said("end")], "c4")
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
    unsampled = tree(s1=(None, [said("end")]), m1=(None, [said("end")]))
    named(
        read,
        [unsampled[0], replace(unsampled[1], generation_token_ids=NO_IDS, generation_log_probs=np.zeros(0))],
        [said("end")],
    )


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
    looked = tree(m1=(None, [said("look")]), s1=(None, [said("42")]), m2=("m1", [answer]))
    named(read, looked, shown[-1:])
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


@pytest.mark.promise("CP-9")
def test_an_answer_that_is_cut_out_and_normalised_is_not_the_sub_agents(read: Reader) -> None:
    """The main agent's sentence holds it, the scorer takes it out of there; the sub-agent said just that."""
    normalised = {
        "1400": ("#### 1,400", "Step 3: 1,400", "1 400 in all", "$1,400.00", "1’400", "It is 1400.0", "01400"),
        "B": ("I think the answer is (b).", "so **b**"),
        "Paris, France": ("Final answer: **Paris**, France", "It is paris, france!", "PARIS — FRANCE, of course"),
        "yes": ("Answer: Yes", "YES!", "*Yes*, it is"),
        "it's done": ("Result: it’s done", "Result: it&#39;s done"),
        "-5": ("The answer is −5", "It is \\(-5\\)"),
        "0.50": ("about .5", "it is 0.5, all told"),
        "1,400.00": ("1400 dollars", "$ 1400"),
        "42.000": ("42", "I say 42,0"),
        "Strasse 4": ("In Straße 4", "the STRASSE #4"),
        "ﬁne café": ("All fine Cafe.",),
        "x y": ("<answer>x <b>y</b></answer>", "x&nbsp;y"),
        "Fin...": ("Finding 3.",),
        "Fin…": ("Finding 3.",),
        "...": ("anything",),
        "Don...": ("It is done",),
        "1,40...": ("about 1400",),
        "the total is 14…": ("the total is 1,400",),
        "✅": ("tests: ✅",),
        "AB": ("**a**b", "cab and ab"),
        "4k": ("14km, 4km",),
    }
    for words, sentences in normalised.items():
        for whole in sentences:
            named(read, same_steps(said(whole), words=words), [called("x"), result("x"), said(words)])
            named(read, sub_agent_first(m2=[said(whole)], s1=words), [said(words)])


def test_signs_and_numbers_of_a_list_are_not_the_sub_agents(read: Reader) -> None:
    for shown, wrote in (
        ("])", "It is ] ) ."),
        (">", '{"answer": "\\u003e"}'),
        ("-", "Sign: −"),
        ("?", "Answer: ？"),
        ("✔", "Yes ✔️✔️"),
        ("✔✔", "Yes ✔️✔️"),
        ('"', "A ”"),
        ("[1, 200, 300]", "[1.0,200.0,300.0]"),
        ("140000.5", "₹1,40,000.50"),
        ("42", "الجواب ٤٢"),
        ("1400.5", "١٬٤٠٠٫٥٠"),
        ("1400", "1.4e3"),
        ("0.014", "1.4e-2"),
    ):
        named(read, same_steps(said(wrote), words=shown), [said(shown)])
    named(read, same_steps(said("So - ]"), words=">"), [said(">")], "s2")
    named(read, same_steps(said("So - ]"), words="<b></b>"), [said("<b></b>")], "s2")
    named(read, same_steps(said("1.4e3x"), words="1400"), [said("1400")], "s2")


def test_an_answer_joined_from_several_items_is_not_the_sub_agents(read: Reader) -> None:
    """Harnesses hand in all text of a reply as one, and join a reply that was cut with what went on from it."""
    whole = "The total is 42 apples."
    for parts in (
        ("The total is", "42 apples."),
        ("The total is 4", "2 apples."),
        ("the total", "**is 42**", "apples"),
    ):
        wrote = [item for part in parts for item in (said(part), thought("hm"))]
        named(read, sub_agent_first(m2=wrote, s1=whole), [said(whole)])
        # Also before the end of the row.
        longer = tree(m1=(None, wrote), m2=("m1", [said("b")]), s1=(None, [said(whole)]), s2=("s1", [said("b")]))
        named(read, longer, [said(whole), user(), said("b")])
    cut = tree(m1=(None, [said("The total is 42")]), m2=("m1", [said("apples.")]), s1=(None, [said(whole)]))
    named(read, cut, [said(whole)])
    named(read, [*cut[:2], replace(cut[2], output_items=(said("The total is 42 pears."),))], [said(whole)])
    used = [said("The total is 42"), called("x")]
    tool = tree(m1=(None, used), m2=("m1", [said("apples.")]), s1=(None, [said(whole)]))
    named(read, tool, [said(whole)], "s1")
    named(read, sub_agent_first(m2=[said("It is 1."), said("50")], s1="It is 1.5"), [said("It is 1.5")])
    # Nobody joins words with what was asked after them, where either alone says all of it.
    side = tree(m1=(None, [said("It is 42")]), t=("m1", [said("A title")]))
    named(read, side, [said("It is 42")], "m1")
    # What was compacted may have been joined.
    own, told = [said("one two"), user(), said("b")], [said("one"), said("two")]
    after = tree(
        m1=(None, [said("one two")]), m2=("m1", [said("b")]), s1=(None, told), k1=(None, [thought("t"), said("b")])
    )
    named(read, after, own)
    # A writer has to have said it as the row shows it.
    named(read, tree(s1=(None, told), s2=("s1", [said("b")])), own)


def test_letters_and_digits_that_stand_in_others_are_no_answer(read: Reader) -> None:
    others = {
        "1400": ("21400 or 14005",),
        "B": ("a table about probabilities",),
        "yes": ("My EYES!", "YESTERDAY"),
        "42": ("042042", "142"),
        "done it": ("did it",),
    }
    for words, sentences in others.items():
        for whole in sentences:
            named(read, same_steps(said(whole), words=words), [called("x"), result("x"), said(words)], "s2")


@pytest.mark.promise("CP-9")
def test_json_is_undone_wherever_it_stands(read: Reader) -> None:
    code = 'def f():\n    return "x\\t", "é", "𠮷"'
    fenced = f"Here it is:\n```json\n{json.dumps({'answer': code})}\n```"
    twice = json.dumps({"result": json.dumps({"answer": code})})
    answer = {"type": "function_call", "call_id": "f", "name": "submit", "arguments": twice}
    for m2 in (said(fenced), said(json.dumps({"answer": code}) + " is all"), said(twice), answer):
        named(read, same_steps(m2, words=code), [called("x"), result("x"), said(code)])
        named(read, sub_agent_first(m2=[m2], s1=code), [said(code)])
    dumped = json.dumps({"answer": "café"})  # as a harness writes what a tool took
    took = {**answer, "arguments": '{"answer": "café"}'}
    named(read, same_steps(took, words=dumped), [called("x"), result("x"), said(dumped)])
    numbers = {"type": "function_call", "call_id": "f", "name": "submit", "arguments": {"answer": [1400, True]}}
    for words in ("1,400", "true"):
        named(read, same_steps(numbers, words=words), [called("x"), result("x"), said(words)])


def both_end(m1: list[dict[str, Any]], s1: list[dict[str, Any]], words: str = "All tests pass.") -> list[TokenEntry]:
    """Two agents that do these and say the same at the end; the main one goes on last."""
    return tree(m1=(None, m1), s1=(None, s1), s2=("s1", [said(words)]), m2=("m1", [said(words)]))


def ran(arguments: Any = "{}", name: str = "run", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": arguments, **more}


@pytest.mark.promise("CP-9")
def test_a_call_is_shown_as_a_framework_parsed_it(read: Reader) -> None:
    """Defaults are filled in, prefixes of servers dropped, cut JSON repaired, strings made numbers."""
    parsed = (
        (ran("{}"), ran('{"verbose": false}')),
        (ran(name="mcp__t__run"), ran()),
        (ran(), ran(name="functions.run")),
        (ran(name="mcp__t__runTests"), ran(name="run_tests")),
        (ran('{"p": "x"'), ran('{"p": "x"}')),
        (ran('{"n": "3"}'), ran('{"n": 3}')),
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, ran(name="shell")),
    )
    for made, shown in parsed:
        row = [shown, result("c"), said("All tests pass.")]
        named(read, both_end([made], [shown]), row)
        # What stood before a compaction was parsed as well.
        last = [said("All tests pass.")]
        named(read, tree(m1=(None, [made]), k1=(None, last), s1=(None, [shown]), s2=("s1", last)), row)
        named(read, tree(m1=(None, [made]), s1=(None, [shown])), [shown])
    other = [ran(name="look"), result("c"), said("All tests pass.")]
    m1 = [said("I **run** it")]
    said_before = tree(m1=(None, m1), k1=(None, last), s1=(None, [said("i run it")]), s2=("s1", last))
    named(read, said_before, [said("i run it"), user(), *last])
    named(read, both_end([ran(name="write")], other[:1]), other, "s2")
    named(read, both_end([said("I run them.")], other[:1]), other, "s2")


def test_a_picture_may_be_any_picture_of_a_rival(read: Reader) -> None:
    picture = {"type": "message", "role": "assistant", "content": [{"type": "output_image", "image_url": "u"}]}
    other = {**picture, "content": [{"type": "output_image", "image_url": "https://example.com/u"}]}
    named(read, both_end([other], [picture]), [picture, user(), said("All tests pass.")])
    last = [said("All tests pass.")]
    compacted = tree(m1=(None, [other]), k1=(None, last), s1=(None, [picture]), s2=("s1", last))
    named(read, compacted, [picture, user(), *last])
    named(read, tree(m1=(None, [other]), s1=(None, [picture])), [picture])
    named(read, both_end([said("a picture")], [picture]), [picture, user(), *last], "s2")
    named(read, both_end([thought("a picture")], [picture]), [picture, user(), said("All tests pass.")], "s2")
    named(read, both_end([ran()], [picture]), [picture, user(), said("All tests pass.")], "s2")
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I can not"}]}
    named(read, tree(c1=(None, [refused])), [said("I can not")], "c1")
    empty = {"type": "message", "role": "assistant", "content": [*said("a")["content"], *said("")["content"]]}
    named(read, tree(c1=(None, [empty])), [said("a")], "c1")


@pytest.mark.promise("CP-9")
def test_a_reply_whose_client_left_at_its_stop_mark_is_a_rival(read: Reader) -> None:
    """A harness that has its answer closes the stream; the record of it is a gone client's."""
    for m1 in ([said("Plan")], [called("sub")]):
        for whole in ("42", "FINAL ANSWER: 42"):
            m1_, s1, m2 = tree(m1=(None, m1), s1=(None, [said("42")]), m2=("m1", [said(whole)]))
            named(read, [m1_, s1, replace(m2, client_gone=True)], [said("42")])
    both = [m1_, s1, replace(m2, output_items=(said("42"),), client_gone=True)]
    named(read, both, [called("x"), result("x"), said("42")], "m2")
    named(read, both, [said("42")])
    named(read, [both[0], replace(s1, output_items=(said("41"),)), both[2]], [said("42")], "m2")
    # Whoever left inside a thought had read no words.
    silent = replace(m2, output_items=(thought("cut"),), client_gone=True)
    named(read, [m1_, s1, silent], [said("42")], "s1")
    # An unread call that was continued was read.
    going_on = tree(m1=(None, [said("42")]), m2=("m1", [called("y")]), s1=(None, [said("42")]))
    named(read, [replace(going_on[0], client_gone=True), *going_on[1:]], [said("42")])


def test_a_retry_that_was_read_takes_the_place_of_a_reply_whose_client_had_gone(read: Reader) -> None:
    c1, gone, c3 = tree(c1=(None, [called("x")]), c2=("c1", [said("It is end")]), c3=("c1", [said("end")]))
    shown = [called("x"), result("x"), said("end")]
    again = replace(gone, prompt_token_ids=c3.prompt_token_ids)
    named(read, [c1, again, c3], shown)
    named(read, [c1, replace(again, client_gone=True), c3], shown, "c3")
    named(read, [c1, again, replace(c3, client_gone=True)], shown)
    named(read, [c1, replace(again, client_gone=True), replace(c3, client_gone=True)], shown)
    # Asked otherwise, or after something else, it was no retry.
    named(read, [c1, replace(gone, client_gone=True), c3], shown)
    elsewhere = replace(again, client_gone=True, parent_call_id=None, parent_decision="root")
    named(read, [c1, elsewhere, c3], shown[-1:])
    first, unknown = replace(c3, parent_call_id=None, parent_decision="root"), replace(again, client_gone=True)
    named(read, [first, unknown_history(unknown)], shown[-1:])
    d1, d2 = tree(x=(None, []), y=(None, []), d1=(None, [called("y")]), d2=("d1", [said("end")]))[2:]
    lead = [*c1.prompt_token_ids.tolist(), *c1.generation_token_ids.tolist(), int(d2.prompt_token_ids[-1])]
    named(read, [c1, replace(gone, prompt_token_ids=np.array(lead, np.uint32), client_gone=True), d1, d2], shown[-1:])
    # What was continued was read.
    seen = [*again.prompt_token_ids.tolist(), *again.generation_token_ids.tolist(), 900]
    after = replace(entry("c4", seen, [901], "c2", {"decision": "resolved"}), output_items=(said("later"),))
    named(read, [c1, replace(again, client_gone=True), c3, after], shown)


def test_a_retry_that_says_the_same_is_one_whatever_its_prompt_says_anew(read: Reader) -> None:
    """The time, or a reminder, stands in a prompt that was sent again."""
    c1, gone, c3 = tree(c1=(None, [called("x")]), c2=("c1", [said("It is end")]), c3=("c1", [said("It is  end")]))
    shown = [said("It is end")]
    left = replace(gone, client_gone=True)
    named(read, [c1, left, c3], shown, "c3")
    named(read, [c1, left, replace(c3, client_gone=True)], shown)
    named(read, [c1, replace(left, output_items=(thought("t"), *gone.output_items)), c3], shown, "c3")
    named(read, [c1, replace(left, output_items=(said("It is end."),)), c3], shown)
    # After another call, or nobody knows which, it may be a conversation of its own.
    apart = replace(c3, prompt_token_ids=np.array([7], np.uint32), parent_call_id=None, parent_decision="root")
    named(read, [c1, left, apart], shown)
    d1, d2 = tree(x=(None, []), y=(None, []), d1=(None, [called("y")]), d2=("d1", [said("It is end")]))[2:]
    named(read, [c1, left, d1, d2], shown)
    named(read, [c1, unknown_history(left), c3], shown)
    # Silence is no answer.
    silent, also = replace(left, output_items=(thought("end"),)), replace(c3, output_items=(thought("so"),))
    seen = [*c3.prompt_token_ids.tolist(), *c3.generation_token_ids.tolist(), 900]
    after = replace(entry("c5", seen, [901], "c3", {"decision": "resolved"}), output_items=(said("fine"),))
    other = replace(apart, output_items=(said("end"),), model_call_id="c4")
    named(read, [c1, silent, also, after, other], [said("end")])


def test_a_side_call_that_nobody_read_ends_no_trace() -> None:
    """A harness ends the session while its client still asks what the user may type next."""
    for asked in ("why is it 42?", "Ran x. It is 42", "42"):
        m1, m2, side = tree(m1=(None, [called("x")]), m2=("m1", [said("42")]), side=("m2", [said(asked)]))
        entries = [m1, m2, replace(side, client_gone=True)]
        witnesses = claims(row([said("42")]), entries)
        for deliver in ("single", "all_chains"):
            done = build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=witnesses, deliver=deliver)
            traces = done.traces if isinstance(done, Trainable) else ()
            assert [trace.role for trace in traces if trace.role == "terminal"] == []
            assert (done.reasons if isinstance(done, Masked) else traces) == ("several_chains",) or deliver != "single"


def test_an_unread_reply_in_parts_may_be_the_last() -> None:
    title, m1 = tree(t=(None, [said("A title")]), m1=(None, [said("Done."), said("It is 42.")]))
    assert claims(row([said("Done.\nIt is 42.")]), [title, replace(m1, client_gone=True)]).unread == {"m1"}


def test_an_unread_reply_that_may_be_the_last_is_not_cut() -> None:
    """Nobody is named; but the one conversation that would be left is not the rollout's."""
    m1, v1 = tree(m1=(None, [said("FINAL ANSWER: 42")]), v1=(None, [said("42")]))
    entries = [replace(m1, client_gone=True), v1]
    for shown, masks in ((said("42"), True), (said("FINAL ANSWER: 42"), False), (said("43"), False)):
        terminal = claims(row([shown]), entries)
        done = build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=terminal)
        assert isinstance(done, Masked) == masks
    assert terminal.unread == frozenset()
    for wrote, shown in ((thought("it is 42"), said("42")), (ran('{"answer": "42"}', "submit"), said("42"))):
        gone = [replace(entries[0], output_items=(said("I submit it."), wrote)), v1]
        for before in ([], [said("42."), said("42!")], [said("what nobody said"), user()]):
            assert claims(row([*before, shown]), gone).unread == {"m1"}
    named_ = claims(row([said("42")], _ng_terminal_model_call_id="v1"), entries)
    done = build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=named_, deliver="all_chains")
    assert isinstance(done, Trainable)
    assert [trace.call_ids for trace in done.traces] == [("v1",)], "a witness that names another call cuts it"


def test_a_row_that_cannot_be_read_names_nobody(read: Reader) -> None:
    entries = tree(c1=(None, [said("end")]))
    named(read, entries, [{"role": "assistant", "content": [{"type": {}}]}, said("end")])
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    for strange in (deep, 10**5_000):
        named(read, entries, [{"type": "other", "value": strange}, said("end")])


SITUATIONS = {
    name: value
    for name, value in list(globals().items())
    if name.startswith("test_") and inspect.signature(value).parameters
}


@pytest.fixture
def read() -> Reader:
    return content.written_by


_LEFT_OUT = "elif not mark.is_thought:\n                    return at == 0"
_MEASURE = "self._length[before.id] if before else 0"
MUTANTS: dict[str, tuple[str, str]] = {
    "blanks_tell_calls_apart": ('content if words is None else "")', "content)"),
    "thoughts_are_words": ("if self.is_thought != shown.is_thought:", "if False:"),
    "nobody_cuts_words": ("if _is_among(part.raw, self.raw):", "if False:"),
    "only_the_first_place_counts": ("at = text.find(words, at + 1)", "at = -1"),
    "nobody_normalises": ("if any(letters.hold(each, was_cut=part.was_cut)", "if any(False"),
    "nobody_cuts_normalised_words": ("return part in self.text\n", "return part == self.text\n"),
    "only_the_first_normalised_place_counts": ("at = self.text.find(part, at + 1)", "at = -1"),
    "a_normalised_number_is_cut_out_of_a_longer_one": ("return (one_number or", "return (False or"),
    "short_words_stand_in_others": ("one_word = short and", "one_word = False and"),
    "signs_join_numbers": (" and edge not in self.gaps", ""),
    "numbers_are_written_one_way": (
        "numbered = _NUMBER.sub(_number, source)",
        "numbered = source",
    ),
    "zeros_before_a_number_tell": ('.lstrip("0"), fraction', ", fraction"),
    "zeros_of_a_fraction_tell": ('fraction.rstrip("0")\n', "fraction\n"),
    "nobody_writes_signs_another_way": ('unicodedata.normalize("NFKD", self.raw)', "self.raw"),
    "upper_case_is_lower_case": ("self.raw).casefold()", "self.raw).lower()"),
    "case_tells": ("self.raw).casefold()", "self.raw)"),
    "json_is_not_undone": ("(_unescaped, _unescaped, html", "(html"),
    "json_in_json_is_not_undone": ("(_unescaped, _unescaped, html", "(_unescaped, html"),
    "entities_are_not_undone": (" html.unescape,", ""),
    "tags_are_not_dropped": (', lambda text: _TAG.sub(" ", text)', ""),
    "a_row_is_not_undone": ("for text in part._undone for letters", "for text in (part,) for letters"),
    "pairs_are_two": ('undone.encode("utf-16", "surrogatepass").decode("utf-16", "replace")', "undone"),
    "what_was_cut_is_whole": ("Text(words.rstrip(), words != self.words)", "Text(words.rstrip())"),
    "a_short_word_was_cut_nowhere": ("edges = (at,) if was_cut else", "edges ="),
    "dots_are_words": ('_CUT = ("...", "…")', '_CUT = ("…",)'),
    "one_dot_is_a_word": ('_CUT = ("...", "…")', '_CUT = ("...",)'),
    "arguments_tell_calls_of_a_rival_apart": (
        "return self.is_call and _may_be_called(",
        "return False and _may_be_called(",
    ),
    "arguments_tell_what_was_compacted_apart": ("return any(_may_be_called(name", "return any(False and (name"),
    "servers_have_no_prefix": ("name.endswith(shown) or", "name == shown or"),
    "frameworks_have_no_prefix": ("or shown.endswith(name)", ""),
    "any_call_may_be_any": ("return name.endswith(shown) or shown.endswith(name)", "return True"),
    "kinds_have_no_names": ('str(item.get("type", "")).removesuffix("_call")', '"?"'),
    "names_have_signs": ('_SIGNS.sub("", str(name).casefold())', "str(name).casefold()"),
    "pictures_are_compared": ("found = self.is_picture and shown.is_picture", "found = False"),
    "words_are_a_picture": ("found = self.is_picture and shown.is_picture", "found = shown.is_picture"),
    "compacted_pictures_are_compared": ("return shown.is_thought in self._pictures", "return False"),
    "what_was_compacted_is_the_same": ("return self._texts[shown.is_thought].may_hold(shown.cut)", "return False"),
    "nobody_refuses": (' or part.get("refusal")', ""),
    "an_empty_part_is_no_words": (' or part.get("refusal") or part.get("text")', ' or part.get("refusal")'),
    "a_number_is_cut_out_of_a_longer_one": ("if not longer_before and not (", "if not ("),
    "arguments_are_no_words": ("unseen = [*spoken(self._all[actor]), *", "unseen = [*"),
    "thoughts_hold_no_answer": ("*(() if spoken(self._all[call.id]) else self._all[call.id])]", "]"),
    "what_the_row_hides_is_no_act": ("acts = bool(spoken(self._all[", "acts = bool(spoken(self._marks["),
    "what_the_row_hides_ends_nothing": (" or actor in self._hides_some\n", "\n"),
    "a_silent_side_call_may_have_said_anything": (
        "            if self._actor[call.id] in self._hides_some:\n",
        "            if True:\n",
    ),
    "unread_retries_count": ("return call.id not in self._retried and (", "return ("),
    "unread_replies_never_count": ("if call.is_unread and call.fault is None]", "if call.is_unread] and []"),
    "signs_are_no_answer": ("if any(each in text._signs for each in signs):", "if False:"),
    "no_signs_are_any": ('if not text._letters.text} - {""}', "if not text._letters.text}"),
    "letters_are_signs": ("for text in part._undone if not text._letters.text}", "for text in part._undone}"),
    "signs_have_widths": ('unicodedata.normalize("NFKC", self.raw.translate(_FOLDED))', "self.raw.translate(_FOLDED)"),
    "dashes_and_quotes_tell": ("self.raw.translate(_FOLDED)", "self.raw"),
    "a_number_has_two_fractions": ('r"|(?<!\\d)[.,]', 'r"|[.,]'),
    "india_is_elsewhere": ('r"(?:\\d{1,2}(?:,\\d\\d)+,', 'r"(?:x\\d{1,2}(?:,\\d\\d)+,'),
    "digits_are_ascii": ("str(unicodedata.decimal(found[0]))", "found[0]"),
    "marks_are_ascii": (", source).translate(_MARKS)", ", source)"),
    "powers_are_words": ("    if power:\n", "    if False:\n"),
    "nobody_joins_items": ("return sought.of_rival and any(joined", "return False and any(joined"),
    "a_writer_is_joined": ("return sought.of_rival and any(joined", "return any(joined"),
    "a_whole_is_what_its_parts_are": ("return not any(mark.may_say(shown) for mark in self.parts)", "return True"),
    "nobody_goes_on": ("if before else None]", "if False else None]"),
    "words_go_on_after_a_tools_result": ("not any(mark.is_call for mark in self._all[above.id])", "True"),
    "items_are_joined_with_blanks": ('for between in (" ", ""))', 'for between in (" ",))'),
    "nobody_joins_what_was_compacted": ("told += [each.wholes", "told + [each.wholes"),
    "nobody_joins_what_was_said_before": ("and self._is_joined(each.id, sought, at):", "and False:"),
    "nobody_joins_what_was_said_last": (
        "if not is_said and not self._is_joined(",
        "if not is_said and not (False and ",
    ),
    "nobody_says_it_again": (" | self._said_again()", ""),
    "what_nobody_read_is_said_again": ("self._calls.values() if not call.is_unread}", "self._calls.values()}"),
    "it_is_said_again_anywhere": ("return (call.parent.id, said) if said", 'return ("", said) if said'),
    "silence_is_said_again": (" if said and call.parent is not None else", " if call.parent is not None else"),
    "a_retry_is_after_anything": ("return call.parent.id if call.parent is not None else None, ", "return "),
    "a_retry_asks_anything": (", call.lead.tobytes()", ', b""'),
    "an_unread_retry_takes_its_place": (" if call.fault is None and not call.is_unread}", "}"),
    "what_nobody_knows_is_a_retry": ("call.is_unread and call.fault is None]", "call.is_unread]"),
    "who_left_inside_a_thought_had_read_words": ("if call.children or call.is_unread:", "if call.children:"),
    "what_cannot_be_read_raises": ("except (TypeError, ValueError, RecursionError):", "except KeyError:"),
    "a_piece_of_a_word_is_one": ("return _is_among(shown.words, self.words)", "return shown.words in self.words"),
    "reasoning_written_anew_hides_the_call": ("(whole, whole.without_thoughts())", "(whole,)"),
    "reasoning_counts_for_nothing": ("(whole, whole.without_thoughts())", "(whole.without_thoughts(),)"),
    "a_thought_at_the_end_is_no_ending": ("if not self.ending or words:", "if True:"),
    "reasoning_may_not_be_left_out": (_LEFT_OUT, _LEFT_OUT.replace("elif not mark.is_thought", "else")),
    "a_final_output_of_several_calls_is_nobodys": ("self.marks[-max(1, self.ending) :]", "self.marks[-1:]"),
    "what_ends_in_a_tools_result_is_final": (
        'elif count or item.get("type", "message") != "message":',
        "elif count:",
    ),
    "a_users_last_turn_hides_the_reply": ('elif count or item.get("type", "message") != "message":', "else:"),
    "records_set_aside_say_nothing": (
        "        if any(not spoken(marks) or any(",
        "        if any(False and any(",
    ),
    "a_silent_record_set_aside_is_none": ("if any(not spoken(marks) or any(", "if any(any("),
    "records_set_aside_did_nothing": ("told = [*self._aside, *", "told = [*"),
    "rivals_are_not_asked": ("        if rivals:\n", "        if False:\n"),
    "any_rival_hides_the_call": ("if any(self._may_show(rival, rest) for rival in rivals):", "if True:"),
    "nothing_is_ever_compacted": ("_Sought(shown.marks[self._told_elsewhere(first, shown) :])", "_Sought(shown.marks)"),
    "everything_may_be_compacted": (
        "_Sought(shown.marks[self._told_elsewhere(first, shown) :])",
        "_Sought(shown.last)",
    ),
    "a_silent_call_that_sampled_leaves_no_trace": (
        "(not call.is_empty or self._speaks(call.id))",
        "self._speaks(call.id)",
    ),
    "an_empty_call_leaves_no_trace": ("(not call.is_empty or self._speaks(call.id))", "(not call.is_empty)"),
    "turns_end_where_others_begin": ("at = self._shorter[at]\n", "at = 0\n"),
    "what_the_call_itself_did_may_be_compacted": ("if call_id not in own)]", ")]"),
    "turns_may_be_left_out_before_a_rival": ("if self._reach(first, shown.transcript) is None:", "if False:"),
    "part_of_a_transcript_before_a_tools_result": (
        'return self._reach(call, shown.transcript) == "whole"',
        "return self._reach(call, shown.transcript) is not None",
    ),
    "what_the_row_shows_before_is_not_asked": (" and self._may_show(call, whole)\n", "\n"),
    "a_part_of_a_reply_is_one": (
        "self._reach(call, shown.final) is not None and self._may_show(call, whole)",
        "self._may_show(call, whole)",
    ),
    "its_own_conversation_is_a_rival": ("if call.id not in kin or", "if True or"),
    "its_own_conversation_is_never_a_rival": (" or self._reach(call, shown.final) is not None]", "]"),
    "what_follows_is_never_a_rival": (
        "kin = {call.id for call in first.path()}\n",
        "kin = {call.id for call in first.path()} | first.descendants()\n",
    ),
    "a_boundary_hides_nothing": ("self._unknown[each.id] = any(each.faults_here())", "self._unknown[each.id] = False"),
    "a_boundary_hides_what_follows_it_only": ("self._unknown[before.id] if before else False", "False"),
    "what_stands_behind_a_boundary_is_whole": ('"part" if self._unknown[call.id] else "whole"', '"whole"'),
    "a_silent_conversation_is_none": ("return not self._speaks(self._speaker[call.id]) or", "return False or"),
    "a_silent_conversation_that_went_on_may_be_the_last": (
        "if call.children or call.is_unread:",
        "if call.is_unread:",
    ),
    "tool_calls_are_always_shown": (
        "_kinds(output, whole.marks), reader)",
        "{True, False}, reader)",
    ),
    "tool_calls_are_never_shown": (
        "_kinds(output, whole.marks), reader)",
        "{False}, reader)",
    ),
    "a_hidden_call_ends_a_conversation": ("if call.id in self._hides_some:", "if False:"),
    "a_result_tells_of_no_call": ("if results else set()", "if False else set()"),
    "words_are_always_shown": (
        "_kinds(output, whole.marks), reader)",
        "{False, *_kinds(output, whole.marks)}, reader)",
    ),
    "a_silent_call_is_never_the_last": ("if before and not self._speaks(each.id) else", "if False else"),
    "an_empty_call_may_be_the_last": ("if self._counts(call) and", "if"),
    "twins_are_two": ("return call.prompt_len, call.digest()", "return call.id, call.digest()"),
    "twins_by_generation_alone": ("return call.prompt_len, call.digest()", "return call.generated.tobytes()"),
    "a_window_begins_with_a_call": ("<= words else None", "< 0 else None"),
    "the_end_of_a_reply_is_one": ("<= words else None", ">= 0 else None"),
}


def reader(old: str, new: str) -> Reader:
    module = next(
        (module for module in (words_read, content) if old in Path(str(module.__file__)).read_text()), content
    )
    short = module.__name__.rpartition(".")[2]
    copies = mutated("toprope.trajectory", ("evidence", "words", "content"), short, old, new)
    found: Reader = copies["content"].written_by
    return found


def checks(read: Reader) -> dict[str, Callable[[], object]]:
    return {name: partial(situation, read) for name, situation in SITUATIONS.items()}


def test_the_reader_itself_survives() -> None:
    assert killer(checks(reader("Only verified evidence is read", "Only verified evidence is read"))) is None


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_killed(name: str) -> None:
    assert killer(checks(reader(*MUTANTS[name]))) is not None, "an unsafe reader passes every situation"

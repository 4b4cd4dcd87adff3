"""Lineage: every vector of `tests/golden/lineage.jsonl`, and the shapes in which clients send a conversation back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toprope.tokens.deferred import decide_deferred
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.items import item_digests
from toprope.tokens.lineage import (
    DEFERRED,
    DEFERRED_ALL_TOLD,
    LineageHistory,
    ParentChoice,
    decide,
    decide_asked,
)
from toprope.tokens.shown import ShownBeginning, ShownTurns, asked_for
from toprope.tokens.strands import Strand

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "golden" / "lineage.jsonl").read_text().splitlines()
    if line.strip()
]


def item(shorthand: str) -> dict[str, Any]:
    kind, _, rest = shorthand.partition(":")
    if kind in "sua":
        role = {"s": "system", "u": "user", "a": "assistant"}[kind]
        part = "output_text" if kind == "a" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": part, "text": rest}]}
    if kind == "r":
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": rest}]}
    call_id, _, tail = rest.partition(":")
    if kind == "f":
        return {"type": "function_call", "call_id": call_id, "name": tail, "arguments": "{}"}
    return {"type": "function_call_output", "call_id": call_id, "output": tail}


def record(
    history: LineageHistory,
    call_id: str,
    request: list[dict[str, Any]],
    prompt: list[int],
    gen: list[int],
    output: list[dict[str, Any]],
) -> ParentChoice:
    """What the recorder does: decide, then index the entry made from the decision."""
    choice = decide(history, request, prompt)
    history.add(entry_of(call_id, prompt, gen, output, choice), choice.asked, beginning=choice.beginning)
    return choice


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("case", GOLDEN, ids=[case["id"] for case in GOLDEN])
def test_golden_lineage(case: dict[str, Any]) -> None:
    history = LineageHistory()
    for call in case["calls"]:
        choice = record(
            history,
            call["id"],
            [item(each) for each in call["request"]],
            call["prompt"],
            call["gen"],
            [item(each) for each in call["output"]],
        )
        if "parent" in call:
            assert choice.parent_call_id == call["parent"]
        if "how" in call:
            assert choice.decision == call["how"]
        if "reason" in call:
            assert choice.reason == call["reason"]


def lose(history: LineageHistory, *request: str) -> None:
    """What the recorder does where a call with this request came to nothing."""
    items = [item(each) for each in request]
    history.note_unrecorded(items)


def few_shot(*, unseen: bool = False) -> LineageHistory:
    """A root whose request shows turns before its task."""
    history = LineageHistory()
    request = ["s:main", "u:eg", "a:ok", "u:eg2", "f:e:add", "o:e:1", "u:task"]
    record(history, "c1", [item(each) for each in request], [1, 2], [3], [item("a:x")])
    history.unseen = unseen
    return history


SHOTS = ["u:eg", "a:ok", "u:eg2", "f:e:add", "o:e:1"]


def ask(history: LineageHistory, request: list[str], prompt: list[int]) -> ParentChoice:
    return decide(history, [item(each) for each in request], prompt)


def after_one_call(gen: list[int], output: list[str], prompt: list[int]) -> LineageHistory:
    history = LineageHistory()
    record(history, "c1", [item("u:hi")], prompt, gen, [item(each) for each in output])
    return history


def test_a1_retokenised_history_names_the_call_and_the_first_differing_position() -> None:
    history = after_one_call([531, 316, 2], ["a:x"], [1, 10, 11])
    choice = ask(history, ["u:hi", "a:x", "u:more"], [1, 10, 11, 393, 302, 2, 9, 12])
    assert (choice.decision, choice.reason) == ("unresolved", "history_rewritten:c1@3")


def test_a2_a_template_that_drops_thinking_is_a_rewrite_and_not_a_lost_call() -> None:
    history = after_one_call([90, 91, 92, 93, 7, 2], ["r:think", "a:x"], [1, 20])
    choice = ask(history, ["u:hi", "a:x", "o:t:result"], [1, 20, 7, 2, 30, 31])
    assert (choice.decision, choice.reason) == ("unresolved", "history_rewritten:c1@2")


def test_a8_compaction_and_sub_agents_are_roots_and_turns_find_their_own_conversation() -> None:
    history = LineageHistory()
    calls: list[tuple[str, list[str], list[int], list[int], str | None]] = [
        ("m1", ["u:main"], [1, 10], [50, 2], None),
        ("s1", ["u:sub"], [1, 80], [81, 2], None),
        ("m2", ["u:main", "a:m1", "u:go"], [1, 10, 50, 2, 9, 11], [51, 2], "m1"),
        ("s2", ["u:sub", "a:s1", "u:go"], [1, 80, 81, 2, 9, 82], [83, 2], "s1"),
        ("k1", ["u:summarise"], [1, 12], [60, 2], None),
        ("k2", ["u:summary"], [1, 13, 60], [61, 2], None),
    ]
    for call_id, request, prompt, gen, parent in calls:
        choice = record(history, call_id, [item(r) for r in request], prompt, gen, [item(f"a:{call_id}")])
        assert choice.parent_call_id == parent, call_id
        assert choice.decision == ("resolved" if parent else "root"), call_id


def test_a10_a_turn_that_the_harness_wrote_is_no_turn_of_ours() -> None:
    history = after_one_call([2], ["a:x"], [1])
    assert ask(history, ["u:hi", "a:x", "a:I could not finish."], [1, 2, 7]).reason == "unrecorded_turn"
    # Nor is a second copy of one that we have: items are counted.
    assert ask(history, ["u:hi", "a:x", "a:x"], [1, 2, 7]).reason == "unrecorded_turn"


def test_a_turn_sent_back_twice_is_no_turn_of_ours_however_often_it_was_sent_before() -> None:
    history = after_one_call([2], ["a:x"], [1])
    record(history, "c2", [item("u:hi"), item("a:x"), item("u:go")], [1, 2, 3], [4], [item("a:y")])
    assert ask(history, ["u:hi", "a:x", "u:go", "a:y"], [1, 2, 3, 4, 5]).parent_call_id == "c2"
    assert ask(history, ["u:hi", "a:x", "u:go", "a:x", "a:y"], [1, 2, 3, 4, 5]).reason == "unrecorded_turn"


def test_what_a_child_said_does_not_stand_in_for_its_parent() -> None:
    """A request that leaves the child's ids out and keeps its words hides where the words came from."""
    history = after_one_call([2], ["a:x"], [1])
    record(history, "c2", [item("u:hi"), item("a:x"), item("u:go")], [1, 2, 3], [4], [item("a:y")])
    choice = ask(history, ["u:hi", "a:x", "a:y"], [1, 2, 9])
    assert (choice.decision, choice.reason) == ("unresolved", "unrecorded_turn")


def test_a_request_with_as_many_turns_as_the_parents_does_not_pass_for_it() -> None:
    history = LineageHistory()
    record(history, "c1", [item("u:hi"), item("a:shown")], [1], [2], [item("a:x")])
    ask(history, ["u:hi", "a:other"], [9])
    assert ask(history, ["u:hi", "a:other", "a:x"], [1, 2, 3]).reason == "unrecorded_turn"


def test_an_uncaptured_turn_in_front_of_other_ids_is_not_called_a_rewrite() -> None:
    history = after_one_call([50, 2], ["a:x"], [1, 10])
    assert ask(history, ["u:hi", "a:lost", "u:more"], [1, 10, 60, 2]).reason == "unrecorded_turn"
    assert ask(history, ["u:hi", "a:x", "u:more"], [1, 10, 60, 2]).reason == "history_rewritten:c1@2"


def test_a11_expanded_image_runs_match_and_the_unexpanded_form_does_not() -> None:
    history = after_one_call([50, 2], ["a:x"], [1, 151655, 151655, 151655, 151655, 10])
    expanded = [1, 151655, 151655, 151655, 151655, 10, 50, 2, 9, 11]
    assert ask(history, ["u:hi", "a:x", "u:more"], expanded).parent_call_id == "c1"
    choice = ask(history, ["u:hi", "a:x", "u:more"], [1, 151655, 10, 50, 2, 9, 11])
    assert (choice.decision, choice.reason) == ("unresolved", "history_rewritten:c1@2")


@pytest.mark.parametrize(("wrote", "sent"), [(1, True), (True, 1), (0, False), (None, 0)])
def test_a_changed_value_that_python_holds_for_equal_is_an_edited_history(wrote: Any, sent: Any) -> None:
    """The second request is known by what it has in common with the first; 1 for True is not in common."""

    def act(value: Any) -> dict[str, Any]:
        return {"type": "computer_call", "action": {"deep": [{"x": value}]}}

    history = LineageHistory()
    record(history, "c1", [item("u:hi")], [1], [2], [act(wrote)])
    record(history, "c2", [item("u:hi"), act(wrote), item("u:a")], [1, 2, 3], [4], [item("a:b")])
    whole = [item("u:hi"), act(wrote), item("u:a"), item("a:b"), item("u:z")]
    assert decide(history, whole, [1, 2, 3, 4, 5]).parent_call_id == "c2"
    assert decide(history, [whole[0], act(sent), *whole[2:]], [1, 2, 3, 4, 5]).reason == "unrecorded_turn"


def test_a_turn_sent_back_twice_is_not_accounted_for_by_the_one_that_was_sampled() -> None:
    history = after_one_call([2], ["a:ok"], [1])
    assert ask(history, ["u:hi", "a:ok", "a:ok", "u:y"], [1, 2, 9, 3]).reason == "unrecorded_turn"
    assert ask(history, ["u:hi", "a:ok", "u:y"], [1, 2, 3]).parent_call_id == "c1"


def test_renumbered_ids_and_reserialised_arguments_find_the_parent() -> None:
    history = LineageHistory()
    wrote = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"b": 1.0,"a":"caf\\u00e9"}',
    }
    record(history, "c1", [item("u:hi")], [1], [5, 2], [wrote])
    sent = {"type": "function_call", "call_id": "toolu_9", "name": "add", "arguments": '{"a":"café","b":1}'}
    result = {"type": "function_call_output", "call_id": "toolu_9", "output": "3"}
    assert decide(history, [item("u:hi"), sent, result], [1, 5, 2, 8]).parent_call_id == "c1"
    edited = {**sent, "arguments": '{"a":"tea","b":1}'}
    assert decide(history, [item("u:hi"), edited, result], [1, 5, 2, 8]).reason == "unrecorded_turn"


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("other", ["f:c1:mul", "f:other:mul"])
def test_a_lost_call_under_the_id_of_a_recorded_one_is_no_turn_of_ours(other: str) -> None:
    """Where it comes to the parent, to another beginning, and to a first call that is tried again."""
    history = LineageHistory()
    record(history, "r", [item("u:eg"), item("f:c1:add"), item("o:c1:1"), item("u:hi")], [1], [2], [item("f:c1:sub")])
    history.note_unrecorded(())
    assert ask(history, ["u:sub", other, "o:c1:2"], [9, 777, 8]).reason == "unrecorded_turn"
    assert (
        ask(history, ["u:eg", "f:c1:add", "o:c1:1", "u:hi", other, "o:c1:2"], [1, 2, 777]).reason == "unrecorded_turn"
    )
    first = LineageHistory()
    first.note_unrecorded([item("u:hi"), item("f:c1:add"), item("o:c1:1")])
    assert ask(first, ["u:hi", "f:c1:add", "o:c1:1"], [1]).decision == "root"
    assert ask(first, ["u:hi", other, "o:c1:2"], [1, 777]).reason == "unrecorded_turn"


@pytest.mark.promise("CP-9")
def test_a_call_that_was_cut_is_not_the_lost_one_that_went_on_under_its_id() -> None:
    """A prompt with the whole call begins with the ids of the cut one: only what it says tells them apart."""
    cut = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":'}
    whole = {**cut, "arguments": '{"a": 12}'}
    history = LineageHistory()
    record(history, "c1", [item("u:hi")], [1], [2, 3], [cut])
    history.note_unrecorded(())
    assert decide(history, [item("u:hi"), whole, item("o:call_1:x")], [1, 2, 3, 777, 4]).reason == "unrecorded_turn"
    assert decide(history, [item("u:hi"), cut, item("o:call_1:x")], [1, 2, 3, 4]).parent_call_id == "c1"


@pytest.mark.promise("CP-9")
def test_a_lost_turn_in_the_words_of_one_that_was_shown_is_no_shown_turn() -> None:
    """What was said before the parent does not stand in for what was added after it."""
    history = LineageHistory()
    record(history, "c1", [item("u:eg"), item("a:ok"), item("u:task")], [1, 2], [3], [item("a:x")])
    history.note_unrecorded([item("a:ok"), item("a:x")])
    kept = ["u:eg", "a:ok", "u:task", "a:x", "u:go", "a:ok", "u:on"]
    assert ask(history, kept, [1, 2, 3, 4, 777, 6]).reason == "unrecorded_turn"
    # Nor does it where the lost call was another conversation's first, of which the request may be the second.
    assert ask(history, ["u:other", "a:ok", "u:on"], [9, 777, 4]).reason == "unrecorded_turn"
    assert ask(history, ["u:other"], [9]).reason == "continues_nothing"


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("lost", "request_"),
    [
        (["u:other"], ["u:other", "a:ok", "u:on"]),  # in the words of a shown turn, after another user's
        (["u:other", "a:hi", "u:b"], ["u:other", "a:ok", "u:on"]),  # and the client dropped what stood between
        (["u:other", "f:q:q"], ["u:other", "a:ok", "u:on"]),
        (["u:other", "r:hm"], ["u:other", "a:ok", "u:on"]),
        (["u:eg"], ["u:eg", "a:ok", "u:on"]),  # the very beginning of the root
        (["s:sub", "u:eg"], ["u:eg", "a:ok", "u:on"]),
        (["u:eg", "a:hi", "u:b"], ["u:eg", "a:ok", "u:on"]),
        (["u:before", "a:hi", "u:eg"], ["u:eg", "a:ok", "u:on"]),
        (SHOTS[:3], [*SHOTS, "u:on"]),
        ([], [*SHOTS, "u:on"]),  # nobody knows what it was asked
    ],
)
def test_a_beginning_that_may_hold_what_a_lost_call_said_is_no_root(lost: list[str], request_: list[str]) -> None:
    history = few_shot()
    assert ask(history, request_, [9, 777, 4]).reason == "continues_nothing"
    lose(history, *lost)
    choice = ask(history, request_, [9, 777, 4])
    assert (choice.decision, choice.reason) == ("unresolved", "unrecorded_turn")


@pytest.mark.parametrize(
    "lost", [["u:title?"], ["s:t", "u:title?", "a:hm", "u:go"], SHOTS, ["s:sub", *SHOTS, "u:task", "a:x", "u:go"]]
)
def test_a_lost_call_that_was_shown_as_much_or_was_elsewhere_leaves_shown_turns_shown(lost: list[str]) -> None:
    """A few-shot prompt of a sub-agent, the same one or the first of its shots, is one whatever else was aborted."""
    history = few_shot()
    lose(history, *lost)
    assert ask(history, [*SHOTS, "u:sub"], [8]).reason == "continues_nothing"
    assert ask(history, ["s:sub", *SHOTS[:2], "u:sub"], [8]).reason == "continues_nothing"
    respelled = [{"role": "user", "content": "eg"}, item("a:ok"), item("u:sub")]
    assert decide(history, respelled, [8]).reason == "continues_nothing"


@pytest.mark.promise("CP-9")
def test_a_lost_request_in_another_spelling_is_known_all_the_same() -> None:
    history = few_shot()
    history.note_unrecorded([{"role": "user", "content": "eg", "id": "u1"}])
    assert ask(history, ["u:eg", "a:ok", "u:on"], [9, 777, 4]).reason == "unrecorded_turn"


@pytest.mark.promise("CP-9")
def test_a_thought_among_the_instructions_is_left_out_with_them() -> None:
    """Whoever's role it carries: what is said after it keeps its own digest."""
    thought = {"type": "reasoning", "role": "system", "content": "be brief"}
    history = LineageHistory()
    record(history, "c1", [thought, *map(item, SHOTS), item("u:task")], [1, 2], [3], [item("a:x")])
    lose(history, *SHOTS, "u:task")
    again = decide(history, [thought, *map(item, SHOTS), item("u:sub")], [8])
    assert again.reason == "continues_nothing"
    assert again.beginning == decide(LineageHistory(), [*map(item, SHOTS)], [8]).beginning != ()


def test_shown_turns_at_the_beginning_are_nobodys_reply_where_the_lost_call_was_shown_them() -> None:
    history = LineageHistory()
    record(history, "c1", [item("a:welcome"), item("u:task")], [1, 2], [3], [item("a:x")])
    lose(history, "a:welcome", "u:task")
    assert ask(history, ["a:welcome", "u:sub"], [8]).reason == "continues_nothing"
    lose(history, "u:title?")  # what it said may stand first: a client drops what it was asked
    assert ask(history, ["a:welcome", "u:sub"], [8]).reason == "unrecorded_turn"


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("unseen", [False, True])
def test_the_very_prompt_of_a_root_is_a_root_whatever_was_lost(unseen: bool) -> None:
    """Also where the items of the root are not known: another process recorded it."""
    known, history = few_shot(), LineageHistory()
    lose(known)
    shown = item_digests([item(each) for each in SHOTS])
    history.add(
        replace(entry_of("c1", [1, 2], [3], [], ParentChoice("root", None, "", ChainHash())), item_digests=shown)
    )
    lose(history)
    for each in (known, history):
        each.unseen = unseen
        assert ask(each, [*SHOTS, "u:task"], [1, 2]).reason == "continues_nothing"
        assert ask(each, [*SHOTS, "u:task"], [1, 4]).reason == "unrecorded_turn"
        assert ask(each, [*SHOTS, "a:ok", "u:task"], [1, 2]).decision == "unresolved"


@pytest.mark.promise("CP-9")
def test_the_prompt_of_a_root_vouches_for_no_turn_that_another_one_was_shown() -> None:
    history = few_shot()
    record(history, "c2", [item("u:eg"), item("a:ok"), item("u:task")], [5], [6], [item("a:x")])
    lose(history)
    assert ask(history, ["u:eg", "a:ok", "u:task"], [5]).reason == "continues_nothing"
    assert ask(history, ["u:eg", "f:e:add", "o:e:1", "u:task"], [5]).reason == "unrecorded_turn"


@pytest.mark.promise("CP-9")
def test_shown_turns_of_which_only_the_marks_are_known_are_nobodys_where_nothing_was_lost() -> None:
    history = LineageHistory()
    shown = item_digests([item(each) for each in SHOTS])
    history.add(
        replace(entry_of("c1", [1, 2], [3], [], ParentChoice("root", None, "", ChainHash())), item_digests=shown)
    )
    assert ask(history, [*SHOTS, "u:task"], [8]).reason == "continues_nothing"
    history.unseen = True
    assert ask(history, [*SHOTS, "u:task"], [8]).decision == "unresolved"
    history.unseen = False
    lose(history, "u:title?")
    assert ask(history, [*SHOTS, "u:task"], [8]).decision == "unresolved"


def test_equal_ids_with_another_split_are_ambiguous() -> None:
    history = LineageHistory()
    record(history, "a", [item("u:hi")], [1, 2], [3, 4], [item("a:x")])
    record(history, "b", [item("u:ho")], [1, 2, 3], [4], [item("a:x")])
    assert ask(history, ["u:hi", "a:x"], [1, 2, 3, 4, 5]).reason == "ambiguous_parent"


def test_an_empty_call_is_never_a_parent() -> None:
    history = LineageHistory()
    record(history, "c1", [item("u:hi")], [1, 2], [], [])
    assert ask(history, ["u:hi"], [1, 2]).decision == "root"
    assert ask(history, ["u:hi"], [1, 2, 3]).decision == "root"


def test_a_partial_turn_of_an_aborted_call_is_seen_when_the_agent_keeps_it() -> None:
    history = LineageHistory()
    history.note_unrecorded([item("u:q"), item("a:shown"), item("u:hi")])
    assert ask(history, ["u:q", "a:shown", "u:hi"], [1]).decision == "root"
    choice = ask(history, ["u:q", "a:shown", "u:hi", "a:par"], [1, 2])
    assert (choice.decision, choice.reason) == ("unresolved", "unrecorded_turn")


def test_what_a_lost_call_said_is_vouched_for_by_no_later_one() -> None:
    """A request that held a lost turn and was lost itself does not make that turn a shown one."""
    history = LineageHistory()
    history.note_unrecorded([item("u:hi")])
    history.note_unrecorded([item("u:hi"), item("a:par"), item("u:go")])
    assert ask(history, ["u:hi", "a:par", "u:go"], [1, 2]).reason == "unrecorded_turn"


def test_a_first_request_with_model_turns_is_no_root_where_lost_calls_were_not_seen() -> None:
    history = LineageHistory(unseen=True)
    assert ask(history, ["u:hi", "a:shown", "u:go"], [1]).reason == "unrecorded_turn"
    history.note_unrecorded([item("u:hi"), item("a:shown"), item("u:go")])
    assert ask(history, ["u:hi", "a:shown", "u:go"], [1]).reason == "unrecorded_turn"
    assert ask(history, ["u:hi"], [1]).reason == "first_call"


@pytest.mark.parametrize(("told", "decision"), [(DEFERRED, "unresolved"), (DEFERRED_ALL_TOLD, "root")])
def test_a_deferred_first_call_with_model_turns_is_a_root_only_where_none_can_have_been_aborted(
    told: str, decision: str
) -> None:
    choice = ParentChoice("unresolved", None, told, ChainHash())
    shown = item_digests([item("u:hi"), item("a:shown"), item("u:go")])
    first = replace(entry_of("c1", [1], [2], [item("a:x")], choice), item_digests=shown)
    assert [e.parent_decision for e in decide_deferred([first], "r")] == [decision]


def test_a_history_rebuilt_from_its_records_decides_the_same() -> None:
    first, entries = LineageHistory(), []
    items, prompt = [item("u:q"), item("a:shown"), item("u:hi")], [1, 2]
    for at in range(6):
        choice = decide(first, items, prompt)
        call = entry_of(f"c{at}", prompt, [50 + at], [item(f"f:id{at}:add")], choice)
        first.add(call, choice.asked)
        entries.append(call)
        items = [*items, item(f"f:id{at}:add"), item(f"o:id{at}:ok")]
        prompt = [*prompt, 50 + at, 7]
    second = LineageHistory()
    for call in entries:
        second.add(call)
    for history in (first, second):
        assert decide(history, items, prompt).parent_call_id == "c5"
        assert decide(history, items[:5], [*prompt[:4], 9]).parent_call_id == "c0"
        assert decide(history, items[:3], [9, 9]).decision == "root"
        assert decide(history, [*items, item("a:lost")], prompt).reason == "unrecorded_turn"
        assert decide(history, items, prompt).prompt_hash == ChainHash.of(prompt)


def test_a_foreign_claim_whose_ids_do_not_fit_lends_its_parents_hash_to_nobody() -> None:
    history = after_one_call([7] * 300, ["a:x"], [1, 2])
    foreign = [9] * 400
    claimed = ParentChoice("resolved", "c1", "claimed elsewhere", ChainHash.of(foreign), 302)
    history.add(entry_of("c2", foreign, [3], [item("a:y")], claimed))
    prompt = [*foreign, 3, 4]
    choice = ask(history, ["u:hi", "a:x", "a:y", "u:more"], prompt)
    assert choice.parent_call_id == "c2"
    assert choice.prompt_hash.hexdigest() == ChainHash.of(prompt).hexdigest()


def test_deferred_decisions_are_made_at_freeze() -> None:
    choice = ParentChoice("unresolved", None, DEFERRED, ChainHash())
    c1 = replace(entry_of("c1", [1], [2], [item("a:x")], choice), created_at=1.0)
    asked = item_digests([item("u:hi"), item("a:x")])
    c2 = replace(entry_of("c2", [1, 2, 3], [4], [item("a:y")], choice), created_at=2.0, item_digests=asked)
    for order in ([c1, c2], [c2, c1]):
        decided = {e.model_call_id: e for e in decide_deferred(order, "r")}
        assert (decided["c1"].parent_decision, decided["c2"].parent_call_id) == ("root", "c1")


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("told", "harm"),
    [
        (told, harm)
        for told in (DEFERRED, DEFERRED_ALL_TOLD)
        for harm in ({"rollout_id": "other"}, {"chain_hash": "0" * 64}, {"cum_len": 9})
    ],
)
def test_a_record_that_is_set_aside_vouches_for_no_turn_of_a_deferred_call(told: str, harm: dict[str, Any]) -> None:
    choice = ParentChoice("unresolved", None, told, ChainHash())
    kept = item_digests([item("u:hi"), item("a:LOST"), item("u:go")])
    root = ParentChoice("root", None, "first_call", ChainHash.of([9]), item_digests=kept)
    aside = replace(entry_of("c0", [9], [8], [item("a:LOST")], root), **harm)
    first = replace(entry_of("c1", [1], [2], [item("a:x")], choice), created_at=1.0)
    second = replace(entry_of("c2", [5, 6], [7], [item("a:y")], choice), created_at=2.0, item_digests=kept)
    for order in ([aside, first, second], [second, first, aside]):
        decided = {e.model_call_id: e for e in decide_deferred(order, "r")}
        assert (decided["c1"].parent_decision, decided["c2"].parent_decision) == ("root", "unresolved")
        assert decided["c0"] is aside
    alone = {e.model_call_id: e for e in decide_deferred([aside, second], "r")}
    assert alone["c2"].parent_decision == "unresolved", "a record is missing: what its call said may be kept here"


def entry_of(
    call_id: str, prompt: list[int], gen: list[int], output: list[dict[str, Any]], choice: ParentChoice
) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        model="m",
        created_at=0.0,
        prompt_token_ids=prompt,
        generation_token_ids=gen,
        generation_log_probs=[-0.1] * len(gen),
        output_items=tuple(output),
        item_digests=choice.item_digests,
        parent_decision=choice.decision,
        parent_call_id=choice.parent_call_id,
        parent_resolution_reason=choice.reason,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_tree_finds_what_a_search_of_every_call_finds(seed: int) -> None:
    """Few distinct ids, so that prompts share, fork, end inside and repeat each other."""
    dice = random.Random(seed)
    history, held = LineageHistory(), []
    for at in range(60):
        if held and dice.random() < 0.7:
            _, before, _ = dice.choice(held)
            prompt = before[: dice.randint(1, len(before))] if dice.random() < 0.2 else list(before)
            prompt = prompt + [dice.randrange(3) for _ in range(dice.randrange(4))]
        else:
            prompt = [dice.randrange(3) for _ in range(dice.randint(1, 4))]
        gen = [dice.randrange(3) for _ in range(dice.randrange(4))]
        fitting = [(len(s), p, c) for c, s, p in held if p < len(s) and prompt[: len(s)] == s]
        best = [(p, c) for n, p, c in fitting if n == max(fitting)[0]]
        choice = record(history, f"c{at:02d}", [item("u:x")], prompt, gen, [])
        if not best:
            assert choice.decision == "root"
        elif len({p for p, _ in best}) > 1:
            assert choice.reason == "ambiguous_parent"
        else:
            assert choice.parent_call_id == min(c for _, c in best)
            assert choice.suffix_start == max(fitting)[0]
        assert choice.prompt_hash == ChainHash.of(prompt)
        held.append((f"c{at:02d}", prompt + gen, len(prompt)))


def test_finding_a_parent_compares_each_id_of_the_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PF-5's rule: no work per recorded call, however many conversations share a beginning."""
    history = LineageHistory()
    shared = list(range(10, 1000))
    for at in range(300):
        record(history, f"c{at:03d}", [item("u:x")], [*shared[: 100 + at], 5], [6], [])
    compared: list[int] = []
    followed_by = Strand.followed_by

    def counting(strand: Strand, at: int, ids: Any) -> int:
        compared.append(min(strand.size - at, len(ids)))
        return followed_by(strand, at, ids)

    monkeypatch.setattr(Strand, "followed_by", counting)
    assert ask(history, ["u:x"], [*shared[:399], 5, 6, 7]).parent_call_id == "c299"
    assert 400 <= sum(compared) < 3 * 400


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("lost", "request_"),
    [
        ([["u:eg", "a:ok", "u:q"]], ["u:q", "a:ok", "u:on"]),  # what it said, the examples left out
        ([["u:eg", "f:e:add", "o:e:1", "u:task"], ["u:task"]], ["u:task", "f:e:add", "u:on"]),
        ([["u:task"]], ["u:asked for: task", "a:ok", "u:on"]),  # what it was asked in other words
        ([["u:task"], ["u:task", "a:ok", "u:on"]], ["u:task", "a:ok", "u:on"]),
        ([SHOTS, []], [*SHOTS, "u:task"]),  # nobody knows what the second one was asked
    ],
)
def test_a_first_beginning_that_may_hold_what_a_lost_call_said_is_no_root(
    lost: list[list[str]], request_: list[str]
) -> None:
    """Equal turns in a lost request are not enough: they stand after other users' items there."""
    history = LineageHistory()
    for each in lost:
        lose(history, *each)
    choice = ask(history, request_, [9, 777, 4])
    assert (choice.decision, choice.reason) == ("unresolved", "unrecorded_turn")


def test_a_first_beginning_that_every_lost_call_was_shown_is_one() -> None:
    history = LineageHistory()
    lose(history, "s:main", *SHOTS, "u:task")
    lose(history, *SHOTS)
    assert ask(history, ["s:sub", *SHOTS[:2], "u:task"], [1]).reason == "first_call"


@pytest.mark.promise("CP-9")
def test_a_field_beside_shown_words_is_no_shown_one() -> None:
    history = LineageHistory()
    lose(history, "u:eg", "a:ok", "u:q")
    beside = {"type": "message", "role": "assistant", "content": "ok", "thinking": "what the lost call said"}
    assert decide(history, [item("u:eg"), beside, item("u:q")], [1]).reason == "unrecorded_turn"
    assert ask(history, ["u:eg", "a:ok", "u:q"], [1]).reason == "first_call"


@pytest.mark.promise("CP-9")
def test_a_request_from_before_any_reply_is_a_root_whatever_was_recorded_or_lost_since() -> None:
    history = after_one_call([3], ["a:title"], [1, 2])
    lose(history, "u:eg")
    asked = history.asked_by([item(each) for each in [*SHOTS, "u:task"]])
    prompt = np.array([8], dtype=np.uint32)
    assert decide_asked(history, asked, prompt).decision == "unresolved"
    choice = decide_asked(history, asked, prompt, before_any_reply=True)
    assert (choice.decision, choice.reason, choice.doubtful) == ("root", "continues_nothing", None)
    first = decide_asked(LineageHistory(unseen=True), asked, prompt, before_any_reply=True)
    assert (first.decision, first.reason, first.doubtful) == ("root", "first_call", None)


@pytest.mark.promise("CP-9")
def test_what_a_root_shows_is_doubtful_but_where_its_very_prompt_is_a_roots() -> None:
    history = few_shot()
    known = ask(history, ["s:sub", *SHOTS, "u:sub"], [8]).doubtful
    other = ask(history, ["u:other", "a:ok", "u:on"], [8]).doubtful
    first = ask(LineageHistory(), [*SHOTS, "u:task"], [1, 2]).doubtful
    assert known is not None
    assert other is not None
    assert first is not None
    assert [known.known, other.known, first.known] == [True, False, False]
    assert known.said == first.said != other.said
    assert ask(history, [*SHOTS, "u:task"], [1, 2]).doubtful is None
    assert ask(history, ["u:sub"], [8]).doubtful is None
    assert ask(history, [*SHOTS, "u:task", "a:x"], [1, 2, 3, 4]).doubtful is None


@pytest.mark.promise("CP-9")
def test_a_beginning_stands_beside_a_lost_call_that_was_shown_it_or_if_known_was_asked_elsewhere() -> None:
    shots, title = asked_for([item(each) for each in SHOTS]), asked_for([item("u:title?")])
    greeting = asked_for([item("a:hi"), item("u:q")])
    cases = [
        (ShownBeginning(shots[:2], known=False), shots, True),
        (ShownBeginning(shots, known=True), shots[:2], False),
        (ShownBeginning(shots, known=False), title, False),
        (ShownBeginning(shots, known=True), title, True),
        (ShownBeginning(shots, known=True), (*title, shots[0]), False),
        (ShownBeginning(greeting[:1], known=True), title, False),  # a reply may stand first, what was asked left out
        (ShownBeginning(greeting[:1], known=False), greeting, True),
        (ShownBeginning(shots, known=True), (), False),
        (ShownBeginning((), known=True), shots, False),
    ]
    for shown, lost, stands in cases:
        assert shown.stands_beside(lost) is stands


def test_instructions_of_every_kind_are_left_out_at_the_beginning_and_nowhere_else() -> None:
    developer = {"type": "message", "role": "developer", "content": "be brief"}
    shots = [item(each) for each in SHOTS]
    assert asked_for([item("s:main"), developer, *shots]) == asked_for(shots)
    assert asked_for([*shots, developer]) != asked_for(shots)


class _Unread(dict[str, Any]):
    """An item that must not be looked at."""

    def get(self, *args: Any) -> Any:
        raise AssertionError("read")


@pytest.mark.promise("CP-9")
def test_a_lost_request_is_read_only_as_far_as_recorded_beginnings_ask_about_it() -> None:
    """A chat agent whose every call is aborted once would have its whole conversation digested each time."""
    plain = after_one_call([3], ["a:x"], [1, 2])
    plain.note_unrecorded([_Unread()])
    assert ask(plain, ["u:hi", "a:x", "u:go"], [1, 2, 3, 4]).parent_call_id == "c1"
    assert ask(plain, ["u:sub"], [9]).reason == "continues_nothing"
    history = few_shot()
    history.note_unrecorded([*(item(each) for each in ["s:main", *SHOTS]), _Unread()])
    assert ask(history, ["s:sub", *SHOTS, "u:sub"], [8]).reason == "continues_nothing"


@pytest.mark.promise("CP-9")
def test_a_beginning_that_lost_requests_were_not_compared_with_vouches_for_nobody() -> None:
    history = few_shot()
    lose(history, "u:new")
    for call, prompt in (("c2", [5, 6]), ("c3", [7, 8])):
        items = [item(each) for each in ["u:new", "a:ok", "u:go"]]
        asked = history.asked_by(items)
        before = call == "c2"
        choice = decide_asked(history, asked, np.array(prompt, np.uint32), items=items, before_any_reply=before)
        assert choice.reason == ("continues_nothing" if before else "unrecorded_turn")
        history.add(entry_of(call, prompt, [9], [], choice), choice.asked, beginning=choice.beginning)
    assert ask(history, [*SHOTS, "u:sub"], [8]).reason == "continues_nothing"


@pytest.mark.promise("CP-9")
def test_a_lost_request_from_before_the_first_record_is_known_whole() -> None:
    for lost, reason in (
        ("u:title?", "continues_nothing"),
        ("u:eg2", "continues_nothing"),
        ("u:eg", "unrecorded_turn"),
    ):
        history = LineageHistory()
        lose(history, lost)
        items = [item(each) for each in [*SHOTS, "u:task"]]
        choice = decide_asked(
            history, history.asked_by(items), np.array([1, 2], np.uint32), items=items, before_any_reply=True
        )
        history.add(entry_of("c1", [1, 2], [3], [item("a:x")], choice), choice.asked, beginning=choice.beginning)
        assert ask(history, [*SHOTS, "u:sub"], [8]).reason == reason


@pytest.mark.promise("CP-9")
def test_two_roots_that_begin_otherwise_are_both_known_beside_a_lost_call() -> None:
    """Of a lost request that begins as one root does, what the other begins with is looked for in all of it."""
    other = ["u:o", "a:ok", "u:task"]
    for lost, first, second in (
        ([*SHOTS, "u:task"], True, True),
        (["u:o", "a:ok"], True, True),
        (["u:o"], True, False),
        ([*SHOTS, "u:task", "a:x", "u:o"], True, False),
        (["u:title?"], True, True),
        (["u:t", "a:x", "u:eg", "u:o"], False, False),
    ):
        history = few_shot()
        record(history, "c2", [item(each) for each in other], [5], [6], [item("a:y")])
        lose(history, *lost)
        reasons = [ask(history, [*each, "u:sub"], [8]).decision == "root" for each in (SHOTS, other[:2])]
        assert reasons == [first, second], lost


@pytest.mark.promise("CP-9")
def test_more_lost_requests_than_are_told_apart_may_have_been_asked_anything() -> None:
    history = LineageHistory()
    for at in range(65):
        lose(history, *SHOTS, f"u:{at}")
        known = len(history._shown_turns._lost)
        assert known == (at + 1 if at < 64 else 1)
        assert (ask(history, [*SHOTS, "u:task"], [1]).decision == "root") == (at < 64)
    history = few_shot()
    for at in range(200):
        lose(history, "s:main", *SHOTS, f"u:{at}")
        lose(history, f"u:title {at}?")
    assert len(history._shown_turns._lost) == 2
    assert ask(history, [*SHOTS, "u:sub"], [8]).reason == "continues_nothing"


@pytest.mark.promise("CP-9")
def test_turns_that_a_call_without_a_place_held_are_nobodys_shown_ones() -> None:
    history = after_one_call([3], ["a:x"], [1, 2])
    assert record(history, "c2", [item("u:a"), item("a:lost"), item("u:b")], [5], [6], []).decision == "unresolved"
    assert ask(history, ["u:z", "a:lost", "u:on"], [9]).decision == "unresolved"


@pytest.mark.promise("CP-9")
def test_what_nobody_saw_lost_is_not_made_up_for_by_a_loss_that_is_known() -> None:
    history = few_shot(unseen=True)
    lose(history, "u:title?")
    assert ask(history, [*SHOTS, "u:sub"], [8]).reason == "unrecorded_turn"


class _Counted(str):
    """A digest that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        _Counted.compared += 1
        return str.__lt__(self, other)

    __hash__ = str.__hash__


def test_a_beginning_is_not_compared_with_every_other_one() -> None:
    """Sub-agents by the thousand show the same turns, each with a user's item of its own."""
    turns, prompt = ShownTurns(), np.array([1], np.uint32)
    for at in range(1000):
        turns.add_root(("message:ok",), prompt, (_Counted(f"u{at * 7 % 1000}"), _Counted("message:ok")))
    _Counted.compared = 0
    assert turns.judged((_Counted("u500"), _Counted("message:ok"))).known
    assert turns.judged((_Counted("u500"),)).known
    assert not turns.judged((_Counted("u500"), _Counted("message:other"))).known
    assert not turns.judged((_Counted("zz"),)).known
    assert not turns.judged(()).known
    assert _Counted.compared < 200

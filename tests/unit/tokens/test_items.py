"""Marks of items: what clients change on the way back and what they must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.tokens.items import CountedMarks, MarkBags, is_model_authored, item_digests


def call(arguments: Any, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments, **more}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, **more}


def stands(item: dict[str, Any], *recorded: dict[str, Any]) -> bool:
    return not CountedMarks(item_digests(recorded)).missing(item_digests([item]))


@pytest.mark.parametrize(
    ("sent", "recorded"),
    [
        (said("hi"), said([{"type": "output_text", "text": "hi", "annotations": []}])),
        (said("hi there"), said([{"type": "output_text", "text": "hi "}, {"type": "output_text", "text": "there"}])),
        ({"role": "assistant", "content": "hi"}, said("hi", id="msg_1", status="completed")),
        (call('{"a":1,"b":2}', "other"), call('{ "b": 2, "a": 1 }')),
        (call('{"a":1,"n":100}', "other"), call('{"a":1.0,"n":1e2}')),
        (call({"a": 1}, "other"), call('{"a": 1}')),
        (call("", "other"), call("{}")),
        (call('{"s":"\\u00e9"}', "other"), call('{"s":"é"}')),
        (call("not json", "c1"), call("{not json at all")),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "reasoning", "content": "t"},
        ),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, {"type": "reasoning", "id": "rs_1", "content": "t"}),
        ({"type": "item_reference", "id": "msg_1"}, said("hi", id="msg_1")),
    ],
)
def test_the_same_item_is_known_again(sent: dict[str, Any], recorded: dict[str, Any]) -> None:
    assert stands(sent, recorded)


@pytest.mark.parametrize(
    ("sent", "recorded"),
    [
        (said("hi "), said("hi")),
        (said("hi"), {"type": "reasoning", "content": "hi"}),
        (call('{"a":1}', "other"), call('{"a":2}')),
        (call('{"a":true}', "other"), call('{"a":1}')),
        (call('{"a":12345678901234567890}', "other"), call('{"a":12345678901234567891}')),
        ({**call("{}", "other"), "name": "mul"}, call("{}")),
        (said([{"type": "output_audio", "data": "a"}]), said([{"type": "output_audio", "data": "b"}])),
        (said([{"type": "text", "text": "x"}, {"type": "chart", "of": 1}]), said("x")),
        ({"type": "computer_call", "action": {"x": 1}}, {"type": "computer_call", "action": {"x": 2}}),
    ],
)
def test_another_item_is_not(sent: dict[str, Any], recorded: dict[str, Any]) -> None:
    assert not stands(sent, recorded)


def test_what_others_wrote_has_no_mark() -> None:
    others: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"type": "message", "role": "developer", "content": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "computer_call_output", "call_id": "c", "output": {}},
        said(""),
        said([]),
        said(None),
        said([{"type": "output_text", "text": ""}]),
    ]
    assert not any(map(is_model_authored, others))
    assert is_model_authored({"type": "a_kind_of_tomorrow", "data": 1})


def test_items_are_counted_and_an_id_stands_in_once() -> None:
    assert not stands(said("x"))
    bag = CountedMarks(item_digests([said("x", id="m1")]))
    assert not bag.missing(item_digests([said("x")]))
    assert bag.missing(item_digests([said("x"), said("x")]))
    assert bag.missing(item_digests([said("x"), said("made up", id="m1")]))
    assert bag.missing(item_digests([said("made up", id="m1"), said("x")]))


def test_the_id_of_a_thought_vouches_for_no_reply_and_the_reverse() -> None:
    thought = {"type": "reasoning", "id": "x1", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert CountedMarks(item_digests([thought])).missing(item_digests([said("made up", id="x1")]))
    assert CountedMarks(item_digests([said("hi", id="x1")])).missing(item_digests([thought]))
    assert not CountedMarks(item_digests([thought])).missing(item_digests([{**thought, "content": "shortened"}]))


def test_values_that_json_cannot_carry_still_have_marks() -> None:
    strange = {"type": "x", "v": float("nan"), "s": "\ud800"}
    assert item_digests([strange, said("\ud800")]) == item_digests([dict(strange), said("\ud800")])


marks = st.builds(
    lambda kind, content, ids: f"{kind}:{content}:{','.join(ids)}",
    st.sampled_from(["message", "reasoning"]),
    st.sampled_from("abc"),
    st.lists(st.sampled_from("xyz"), max_size=2, unique=True),
)
bags = st.lists(st.lists(marks, max_size=4).map(tuple), max_size=6)


@settings(max_examples=500, deadline=None)
@given(bags, st.lists(marks, min_size=1, max_size=3))
def test_many_bags_answer_as_each_of_them_would(held: list[tuple[str, ...]], asked: list[str]) -> None:
    many = MarkBags()
    for bag in held:
        many.add(bag)
    assert many.holds(asked) == any(not CountedMarks(bag).missing(asked) for bag in held)


def test_bags_that_cannot_hold_a_mark_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    many, looks = MarkBags(), list[int]()
    for n in range(1_000):
        many.add(("message:common:", f"message:{n}:", f"message:{n}:"))
        many.add(("message:common:", f"message:{n}:", f"message:{n}:"))
    missing = CountedMarks.missing

    def look(bag: CountedMarks, asked: Sequence[str]) -> tuple[str, ...]:
        looks.append(1)
        return missing(bag, asked)

    monkeypatch.setattr(CountedMarks, "missing", look)
    assert many.holds(("message:common:", "message:7:"))
    assert not many.holds(("message:common:", "message:7:", "message:8:"))
    assert not many.holds(("message:nowhere:", "message:common:"))
    assert len(looks) == 2

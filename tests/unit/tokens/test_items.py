"""Marks of items: what clients change on the way back and what they must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall, ResponseFunctionToolCallItem

from toprope.tokens.items import TOOL_RESULTS, CountedMarks, MarkBags, is_model_authored, item_digests, said_by_all
from toprope.wire.message_fields import ABOUT_A_CALL


def call(arguments: Any, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments, **more}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, **more}


def stands(item: dict[str, Any], *recorded: dict[str, Any]) -> bool:
    return not CountedMarks(sampled=item_digests(recorded)).missing(item_digests([item]))


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
        (call("{not json", "other"), call("{not json")),
        (call("{}", parsed_arguments={"x": 1}, created_by="bot", index=2), call("{}")),
        (call("{}", namespace="files", caller={"type": "direct"}, async_="x"), call("{}")),
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
        (call("{}", thought="LOST"), call("{}")),
        (call("{}", thought="LOST"), call("{}", thought="another")),
        ({"type": "item_reference", "id": "msg_2"}, {"type": "item_reference", "id": "msg_1"}),
        (said([{"type": "output_audio", "data": "a"}]), said([{"type": "output_audio", "data": "b"}])),
        (said([{"type": "text", "text": "x"}, {"type": "chart", "of": 1}]), said("x")),
        ({"type": "computer_call", "action": {"x": 1}}, {"type": "computer_call", "action": {"x": 2}}),
    ],
)
def test_another_item_is_not(sent: dict[str, Any], recorded: dict[str, Any]) -> None:
    assert not stands(sent, recorded)


def test_every_field_of_a_call_of_the_openai_package_is_one_that_we_know() -> None:
    """A program sends back what the package parsed, by either name of a field: none of it makes the call another."""
    for model in (ResponseFunctionToolCall, ResponseFunctionToolCallItem):
        fields = {name for key, field in model.model_fields.items() for name in (key, field.alias or key)}
        assert fields >= {"arguments", "call_id", "name"}
        assert fields <= ABOUT_A_CALL


CUSTOM = {"type": "custom_tool_call", "call_id": "k", "name": "apply_patch", "input": "*** Begin"}


def test_a_call_of_a_custom_tool_is_known_again_as_public_clients_dump_it() -> None:
    """`model_dump()` of the openai package writes nulls under each name that it knows; Codex leaves fields out."""
    dumped = ResponseCustomToolCall.model_validate(CUSTOM).model_dump()
    assert dumped.keys() > CUSTOM.keys()
    assert stands(dumped, CUSTOM)
    assert stands({**CUSTOM, "status": "completed", "namespace": "files"}, CUSTOM)
    assert stands(CUSTOM, {**CUSTOM, "extra_content": {"google": "signature"}})
    assert not stands({**CUSTOM, "extra_content": {"google": "signature"}}, CUSTOM)
    for other in ({"input": "*** End"}, {"name": "shell"}, {"input": None}, {"arguments": "of nobody's"}):
        assert not stands({**CUSTOM, **other}, CUSTOM)
    assert not stands(CUSTOM, call("*** Begin", name="apply_patch"))


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("abc"), st.none() | st.lists(st.none() | st.integers(0, 1)), max_size=3))
def test_explicit_nulls_make_no_item_of_another_kind(told: dict[str, Any]) -> None:
    search = {"type": "a_search_of_tomorrow", "action": {"query": "x", **told}, **told}
    present = {name: value for name, value in told.items() if value is not None}
    assert stands(search, {"type": "a_search_of_tomorrow", "action": {"query": "x", **present}, **present})
    assert not stands(search, {"type": "a_search_of_tomorrow", "action": {"query": "y", **present}, **present})


@pytest.mark.parametrize(
    "written",
    [
        said([{"type": "output_text", "text": "x", "annotations": [{"type": "file", "file": {"name": "a"}}]}]),
        said("x", annotations=[{"type": "url_citation", "url_citation": {"url": "u"}}]),
        said([{"type": "image_url", "image_url": {"url": "u"}}]),
        call("{}", extra_content={"google": {"signature": "s"}}),
    ],
)
def test_nulls_that_a_client_dumps_into_fields_and_parts_say_nothing(written: dict[str, Any]) -> None:
    def dumped(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: dumped(each) for name, each in value.items()} | {"url_citation_": None, "title": None}
        return [dumped(each) for each in value] if isinstance(value, list) else value

    assert stands({name: dumped(value) for name, value in written.items()}, written)
    assert stands(written, {name: dumped(value) for name, value in written.items()})


@pytest.mark.parametrize("kind", [{}, [], {"a": 1}, 7])
def test_a_part_whose_type_is_no_name_is_a_part_like_any_other(kind: Any) -> None:
    odd = [{"type": kind, "text": "x"}]
    assert stands(said(odd), said(odd))
    assert not stands(said(odd), said("x"))
    assert not any(map(is_model_authored, [{"role": "user", "content": odd}]))


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
    bag = CountedMarks(sampled=item_digests([said("x", id="m1")]))
    assert not bag.missing(item_digests([said("x")]))
    assert bag.missing(item_digests([said("x"), said("x")]))
    assert bag.missing(item_digests([said("x"), said("made up", id="m1")]))
    assert bag.missing(item_digests([said("made up", id="m1"), said("x")]))


def test_the_id_of_a_thought_vouches_for_no_reply_and_the_reverse() -> None:
    thought = {"type": "reasoning", "id": "x1", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert not stands(said("made up", id="x1"), thought)
    assert not stands(thought, said("hi", id="x1"))


def test_an_id_vouches_for_no_words_but_those_that_were_recorded() -> None:
    thought = {"type": "reasoning", "id": "x1", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert not stands({**thought, "content": "hm, but a lost call went on"}, thought)
    assert not stands(said("The answer is 42", id="m1"), said("The answer", id="m1"))
    assert not stands(call("{}", id="m1"), said("The answer", id="m1"))
    assert not stands({"type": "reasoning", "id": "m1", "summary": []}, said("The answer", id="m1"))
    assert not stands(call("{}", "x1"), thought)
    for sealed in ({"content": []}, {"content": None, "encrypted_content": "gAAA"}):
        assert stands({**thought, **sealed}, thought)
        assert stands({**thought, **sealed}, {**thought, "content": []})
        assert not stands({**thought, **sealed}, {**thought, "id": "x2"})


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    "other",
    [
        {"name": "mul"},
        {"arguments": '{"a":2}'},
        {"arguments": '{"a":1,"b":2}'},
        {"arguments": '{"a":1'},
        {"arguments": ""},
        {"arguments": None},
        {"type": "custom_tool_call", "input": "x"},
    ],
)
def test_the_id_of_a_call_vouches_for_no_other_call(other: dict[str, Any]) -> None:
    """Clients number their calls, we make ids of places, and a call that is cut begins like the next one."""
    for recorded in (call('{"a":1}', id="fc_1"), call('{"a":', id="fc_1")):
        assert not stands({**recorded, **other}, recorded)
        assert not stands(recorded, {**recorded, **other})
        assert item_digests([recorded]) == item_digests([{**recorded, "call_id": "another"}])


def test_the_id_of_what_was_only_shown_vouches_for_nothing() -> None:
    thought = {"type": "reasoning", "id": "x1", "content": [{"type": "reasoning_text", "text": "hm"}]}
    for sent in ({**thought, "content": [], "encrypted_content": "LOST"}, {"type": "item_reference", "id": "x1"}):
        assert stands(sent, thought)
        assert CountedMarks(item_digests([thought])).missing(item_digests([sent]))
        many = MarkBags()
        many.add(item_digests([thought]))
        assert many.holds(item_digests([thought]))
        assert not many.holds(item_digests([sent]))


def test_a_field_that_was_recorded_once_stands_once() -> None:
    with_it, without = said("x", thinking="t"), said("x")
    bag = CountedMarks(sampled=item_digests([with_it, without]))
    assert not bag.missing(item_digests([without, with_it]))
    assert bag.missing(item_digests([with_it, with_it])) == item_digests([with_it])


LOST = (
    {"thinking": "LOST"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "LOST"}]},
    {"audio": {"transcript": "LOST"}},
    {"a_field_of_tomorrow": {"deep": [{"er": 42}]}},
    {"tool_calls": [{"x": "LOST"}]},
    {"provider_specific_fields": {"thinking": "LOST"}},
)


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("lost", LOST)
def test_text_in_a_field_that_is_not_read_is_a_turn_of_somebody(lost: dict[str, Any]) -> None:
    for message in (said("", **lost), said(None, **lost), said([{"type": "output_text", "text": "", **lost}])):
        assert is_model_authored(message)
        assert not stands(message)
        assert not stands(message, said("x"), said(""))
        assert stands(message, message)
        assert not CountedMarks(item_digests([message])).missing([]), "what is left out lacks nothing"
        assert len(CountedMarks(item_digests([message])).missing(item_digests([message, message]))) == 1
    for message in (said("x", **lost), said([{"type": "text", "text": "x", **lost}])):
        assert not stands(message, said("x"))
        assert not stands(message, said("x", thinking="something else"))
        assert stands(message, said("x", **lost))
        assert stands(said("x"), message), "a client may leave it out"


def test_a_part_that_is_text_and_refusal_hides_neither() -> None:
    both = said([{"type": "refusal", "text": "x", "refusal": "LOST"}])
    assert not stands(both, said("x"))
    assert stands(both, both)
    assert not stands(said([{"type": "output_text", "text": "x", "annotations": ["LOST"]}]), said("x"))


def test_fields_about_a_message_are_no_words() -> None:
    about = {"id": "m", "status": "completed", "name": "bot", "created_at": 1.5, "usage": {"output_tokens": 3}}
    empty = {"audio": None, "tool_calls": [], "annotations": [], "prefix": True, "reasoning": {"a": [None, ""]}}
    assert not is_model_authored(said("", **about, **empty))
    assert stands(said("x", **about, **empty), said("x"))
    parts = [{"type": "output_text", "text": "x", "annotations": [], "logprobs": [{"token": "x"}]}]
    assert stands(said(parts), said("x"))


def test_a_role_or_kind_that_is_not_known_may_be_a_policys() -> None:
    for role in ("Assistant", "ai", "model", None, 1, ["assistant"]):
        assert is_model_authored({"type": "message", "role": role, "content": "LOST"}), role
    for kind in ("agent_output", "image_generation_call_output", "some_approval_response", "_output"):
        assert is_model_authored({"type": kind, "text": "LOST"}), kind
        assert not stands({"type": kind, "text": "LOST"}), kind
    for kind in TOOL_RESULTS:
        assert not is_model_authored({"type": kind, "output": "x"})
        assert not item_digests([{"type": kind, "output": "x"}])


def test_values_that_json_cannot_carry_still_have_marks() -> None:
    strange = {"type": "x", "v": float("nan"), "s": "\ud800"}
    assert item_digests([strange, said("\ud800")]) == item_digests([dict(strange), said("\ud800")])


marks = st.builds(
    lambda kind, content, ids: f"{kind}:{content}:{','.join(ids)}",
    st.sampled_from(["message", "reasoning", "function_call", "item_reference"]),
    st.sampled_from(["a", "b", "-c"]),
    st.lists(st.sampled_from([*"xyz", "+f", "+g"]), max_size=3, unique=True),
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


@pytest.mark.promise("CP-9")
def test_what_items_say_tells_speakers_results_and_fields_apart_and_no_ids() -> None:
    message = {"type": "message", "role": "user", "content": "a"}
    reply = {"type": "message", "role": "assistant", "content": "a", "id": "m1"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a"}
    alike = [
        [message, {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "u1"}],
        [{**message, "role": "developer"}],
        [reply, {**reply, "id": "m2"}],
        [{**reply, "thinking": "x"}, {**reply, "thinking": "x", "id": "m2"}],
        [{**reply, "thinking": "y"}],
        [{**reply, "thinking": "y", "note": "x"}],
        [result, {**result, "call_id": "c2"}],
        [{**result, "output": "b"}],
    ]
    said = [{said_by_all([each], item_digests([each])) for each in group} for group in alike]
    assert [len(each) for each in said] == [1] * len(alike)
    assert len(set().union(*said)) == len(alike)

"""Chat messages and Responses items: every shape that real programs send, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.dialects.chat_history import items_from_messages, messages_from_items
from toprope.errors.tree import BadRequest

ODD_ARGUMENTS = '{"b": 1.0,"a":"caf\\u00e9", "n":1e2}'


def _call(call_id, arguments=ODD_ARGUMENTS, name="add"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.promise("MS-5")
def test_argument_bytes_survive_both_ways_any_number_of_times():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [_call("c1"), _call("c2", "")]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    seen = messages
    for _ in range(5):
        items = items_from_messages(seen)
        seen, lost = messages_from_items(items)
        assert lost == []
    assert seen == messages
    assert [i["arguments"] for i in items if i["type"] == "function_call"] == [ODD_ARGUMENTS, ""]


def test_one_assistant_turn_stays_one_turn_and_two_stay_two():
    messages = [
        {"role": "assistant", "content": "first", "reasoning_content": "hm"},
        {"role": "assistant", "content": "second"},
        {"role": "assistant", "content": "then", "tool_calls": [_call("c1")]},
        {"role": "assistant", "content": None, "reasoning_content": "again", "tool_calls": [_call("c2")]},
    ]
    back, _ = messages_from_items(items_from_messages(messages))
    assert back == messages


@pytest.mark.parametrize("empty", [{"content": ""}, {"content": None}, {}, {"content": [], "tool_calls": None}])
def test_an_empty_assistant_turn_is_kept_as_a_turn(empty):
    items = items_from_messages([{"role": "assistant", **empty}])
    assert [i["type"] for i in items] == ["message"]
    back, _ = messages_from_items(items)
    assert back == [{"role": "assistant", "content": ""}]


def test_what_openai_python_dumps_is_read_like_what_it_got():
    dumped = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "provider_specific_fields": {"generation_log_probs": [-0.1], "kept": 1},
    }
    (item,) = items_from_messages([dumped])
    assert item["content"] == [{"type": "output_text", "text": "hi", "annotations": []}]
    assert "prompt_token_ids" not in item
    assert item["provider_specific_fields"] == {"kept": 1}


def test_parts_left_from_other_providers_become_thoughts_and_calls():
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "answer"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c9", "name": "mul", "input": {"a": 2}},
    ]
    items = items_from_messages([{"role": "assistant", "content": content, "tool_calls": [_call("c1")]}])
    assert [i["type"] for i in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[2]["arguments"] == ODD_ARGUMENTS  # the wire's own string wins over the part's object
    assert items[3]["arguments"] == '{"a":2}'


def test_repeated_call_ids_stay_and_missing_ones_are_paired_by_occurrence():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [_call("c"), _call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "function", "name": "old", "content": "3"},
    ]
    items = items_from_messages(messages)
    assert [i["call_id"] for i in items[:4]] == ["c", "c", "c", "c"]
    assert items[4]["call_id"] == items[5]["call_id"]


def test_images_and_lists_cross_and_come_back():
    content = [
        {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
    ]
    messages = [{"role": "user", "content": content}]
    items = items_from_messages(messages)
    assert [p["type"] for p in items[0]["content"]] == ["input_text", "input_image"]
    assert messages_from_items(items)[0] == messages


def test_what_chat_cannot_say_is_named_and_not_guessed():
    items = [{"type": "web_search_call", "id": "w"}, {"type": "message", "role": "user", "content": "x"}]
    messages, lost = messages_from_items(items)
    assert messages == [{"role": "user", "content": "x"}]
    assert lost == ["items.web_search_call"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("x", r"messages\[0\]"),
        ({"role": "judge", "content": "x"}, r"messages\[0\].role: 'judge'"),
        ({"role": "user", "content": 7}, r"messages\[0\].content: 7"),
        ({"role": "assistant", "tool_calls": "x"}, r"messages\[0\].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, r"messages\[0\].tool_calls\[0\].function"),
    ],
)
def test_a_message_that_is_none_is_refused_by_name(message, named):
    with pytest.raises(BadRequest, match=named) as caught:
        items_from_messages([message])
    assert caught.value.status == 400


_text = st.text(max_size=8)
_assistant = st.builds(
    lambda content, thought, calls: {
        "role": "assistant",
        "content": content if content or not (thought or calls) else None,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": [_call(f"c{n}", a) for n, a in enumerate(calls)]} if calls else {}),
    },
    _text,
    _text,
    st.lists(_text, max_size=3),
).filter(lambda turn: len(turn) > 2 or turn["content"])  # what says nothing joins the turn before it
_other = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), _text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(_assistant, _other), min_size=1, max_size=6))
def test_a_second_crossing_changes_nothing(messages):
    once, _ = messages_from_items(items_from_messages(messages))
    items = items_from_messages(once)
    assert messages_from_items(items)[0] == once


def test_text_after_a_call_goes_before_it_so_that_nothing_parts_a_call_from_its_result():
    def said(text):
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    for items, text in (((call, said("late"), result), "late"), ((said("a "), call, said("late"), result), "a late")):
        messages, _ = messages_from_items(items)
        assert [message["role"] for message in messages] == ["assistant", "tool"]
        assert messages[0]["content"] == text

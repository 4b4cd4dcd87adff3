"""The loss table is the code's own, and the page in the docs is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.dialects.chat_request import clean_chat_body, request_from_chat, request_to_chat
from toprope.dialects.losses import RULES, fields_of, render_table
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "dialects.md"


def test_the_page_in_the_docs_is_the_table():
    assert PAGE.read_text(encoding="utf-8") == render_table()


@pytest.mark.parametrize("field", [name for name, _ in fields_of("responses -> pivot", "refused")])
def test_a_field_that_the_table_calls_refused_is_refused(field):
    body = {"input": [{"type": field, "id": "x"}]} if field == "item_reference" else {"input": "x", field: "x"}
    with pytest.raises(BadRequest, match=field):
        request_from_responses(body)


@pytest.mark.parametrize("field", [name for name, _ in fields_of("pivot -> chat", "dropped") if name.isidentifier()])
def test_a_field_that_the_table_calls_dropped_never_reaches_a_chat_upstream(field):
    body, _ = request_to_chat(request_from_responses({"input": "x", field: "x"}))
    assert field not in body


@pytest.mark.parametrize(
    "field", [name for name, _ in fields_of("messages -> pivot", "dropped") if name.replace("_", "").isalpha()]
)
def test_a_field_of_the_messages_provider_alone_goes_nowhere(field):
    body = {"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}
    request = request_from_messages(body)
    assert request == request_from_messages({k: v for k, v in body.items() if k != field})


@pytest.mark.parametrize("field", ["metadata", "min_p", "never_heard_of"])
def test_a_field_of_a_messages_body_that_the_table_does_not_name_passes_through(field):
    body = {"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}
    assert request_from_messages(body).extra[field] == {"a": 1}


@pytest.mark.parametrize("field", ["top_logprobs", "service_tier", "min_p", "chat_template_kwargs", "never_heard_of"])
def test_a_field_that_the_table_does_not_name_passes_through(field):
    ways = ("chat -> pivot", "responses -> pivot", "pivot -> chat")
    assert all(rule.field != field for rule in RULES if rule.way in ways)
    from_responses, _ = request_to_chat(request_from_responses({"input": "x", field: {"a": 1}}))
    from_chat, _ = request_to_chat(request_from_chat({"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}))
    assert from_responses[field] == from_chat[field] == {"a": 1}


def sent(reader, turns):
    field = "input" if reader is request_from_responses else "messages"
    body, lost = request_to_chat(reader({field: turns}))
    return body["messages"], lost


def test_fields_of_messages_calls_and_results_that_we_do_not_know_reach_chat():
    messages, lost = sent(
        request_from_responses,
        [
            {"role": "user", "content": "x", "foo": 1, "name": "bob", "id": "m", "status": "completed", "nil": None},
            {"type": "message", "role": "assistant", "content": "a", "bar": 2},
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}", "id": "i", "baz": 3},
            {"type": "function_call_output", "call_id": "c", "output": "o", "status": "completed", "qux": 4},
        ],
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "baz": 3}
    assert messages == [
        {"role": "user", "content": "x", "foo": 1, "name": "bob"},
        {"role": "assistant", "content": "a", "bar": 2, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "o", "qux": 4},
    ]
    assert lost == ()


def test_fields_of_turns_and_blocks_of_messages_that_we_do_not_know_reach_chat():
    image = {"type": "image", "source": {"type": "url", "url": "u"}, "alt": "a cat"}
    messages, lost = sent(
        request_from_messages,
        [
            {"role": "user", "content": "x", "foo": 1},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "o", "qux": 3}, image]},
        ],
    )
    assert (messages[0]["foo"], messages[2]["qux"], lost) == (1, 3, ())
    assert messages[3]["content"] == [{"type": "image_url", "image_url": {"url": "u"}, "alt": "a cat"}]


@pytest.mark.parametrize(
    ("item", "lost"),
    [
        ({"content": [{"type": "input_image", "image_url": "u"}]}, "items.message.input_image"),
        ({"content": [{"type": "weird", "w": 1}]}, "items.message.weird"),
        ({"content": [{"type": "output_text", "text": "b", "mood": "glad"}]}, "items.message.output_text.mood"),
        ({"content": "b", "bar": 3}, "items.message.bar"),
        ({"content": "b", "tool_call_id": "c"}, "items.message.tool_call_id"),
        ({"content": "b", "name": 5}, "items.message.name"),
        ({"type": "reasoning", "summary": [], "odd": 1}, "items.reasoning.odd"),
        ({"type": "reasoning", "content": [{"type": "picture", "text": "t"}]}, "items.reasoning.picture"),
        ({"type": "function_call", "name": "f", "call_id": "d", "function": 5}, "items.function_call.function"),
    ],
)
def test_what_an_assistant_turn_of_chat_cannot_hold_is_named(item, lost):
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}], "bar": 2},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
    ]
    assert sent(request_from_responses, turns)[1] == ()
    item = item if "type" in item else {"role": "assistant", **item}
    assert sent(request_from_responses, [*turns, item])[1] == (lost,)


def test_an_image_in_an_assistant_turn_of_messages_is_named():
    image = {"type": "image", "source": {"type": "url", "url": "u"}}
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, image]}, {"role": "user", "content": "y"}]
    assert sent(request_from_messages, turns) == (
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "y"}],
        ("items.message.input_image",),
    )


def test_a_name_that_a_client_chose_is_short_in_the_record_and_can_be_written():
    content = [{"type": "x" * 100_000}, {"type": "\ud800"}]
    _, lost = sent(request_from_responses, [{"role": "assistant", "content": content}])
    assert (len(lost), lost[1]) == (2, "items.message.\\ud800")
    assert max(map(len, lost)) <= 120


def test_a_chat_turn_with_thoughts_among_its_parts_keeps_its_other_parts_and_fields():
    image = {"type": "image_url", "image_url": {"url": "u"}}
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function, "extra_content": {"signature": "s"}}
    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, image]
    turn = {"role": "assistant", "content": content, "tool_calls": [call], "mood": "glad"}
    body, lost = clean_chat_body({"messages": [turn]})
    (clean,) = body["messages"]
    assert lost == ()
    assert clean == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": [{"type": "text", "text": "a"}, image],
        "mood": "glad",
        "tool_calls": [call],
    }

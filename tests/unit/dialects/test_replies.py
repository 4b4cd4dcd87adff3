"""Replies made from the pivot: what each dialect's clients must find, and what must never stand there."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from toprope.dialects.chat_reply import chat_reply, finish_from_chat, output_from_chat
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import request_from_responses, responses_reply
from toprope.wire.responses import Usage

UPSTREAM = {
    "role": "assistant",
    "content": "I add.",
    "reasoning": "hm",
    "refusal": None,
    "token_ids": [1],
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": '{ "a":2}'}},
    ],
    "provider_note": {"x": 1},
}
REQUEST = request_from_responses({"input": "x", "tools": [{"type": "function", "name": "add", "parameters": {}}]})
TRIPLE = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}


def _pivot(message=UPSTREAM, **changes):
    output = with_item_ids(output_from_chat(message, "r1"), "r1")
    given = {
        "output": output,
        "finish_reason": "tool_calls",
        "model": "m",
        "usage": Usage(3, 4),
        "reply_id": "r1",
        "created": 1,
    }
    return PivotReply(**{**given, **changes})


def test_two_calls_stay_two_in_both_dialects_each_with_its_own_id_and_bytes():
    chat = chat_reply(_pivot())["choices"][0]["message"]["tool_calls"]
    responses = [i for i in responses_reply(_pivot(), REQUEST)["output"] if i["type"] == "function_call"]
    for calls in (
        [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in chat],
        [(c["call_id"], c["name"], c["arguments"]) for c in responses],
    ):
        assert [(name, arguments) for _, name, arguments in calls] == [("add", '{"a":1}'), ("mul", '{ "a":2}')]
        assert calls[0][0] == "c1"
        assert calls[1][0] not in ("c1", "")
    assert len({item["id"] for item in responses}) == 2


def test_the_public_clients_types_accept_both_replies():
    completion = ChatCompletion.model_validate(chat_reply(_pivot()), strict=True)
    assert completion.choices[0].message.content == "I add."
    response = Response.model_validate(responses_reply(_pivot(), REQUEST))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.usage is not None
    assert response.usage.total_tokens == 7


def test_tokens_stand_on_the_carrier_only_where_they_were_asked_for():
    for reply in (chat_reply(_pivot()), responses_reply(_pivot(), REQUEST)):
        text = json.dumps(reply)
        assert "generation_token_ids" not in text
        assert "token_ids" not in text.replace("max_output_token", "")
    asked = responses_reply(_pivot(tokens=TRIPLE), REQUEST)["output"]
    assert {name: asked[-1][name] for name in TRIPLE} == TRIPLE
    assert all(TRIPLE.keys().isdisjoint(item) for item in asked[:-1])
    message = chat_reply(_pivot(tokens=TRIPLE))["choices"][0]["message"]
    assert {name: message[name] for name in TRIPLE} == TRIPLE


def test_foreign_fields_of_an_upstreams_message_pass_through():
    assert chat_reply(_pivot())["choices"][0]["message"]["provider_note"] == {"x": 1}


@pytest.mark.parametrize(
    ("message", "items"),
    [
        ({"role": "assistant", "content": None}, ["message"]),
        ({"role": "assistant", "content": ""}, ["message"]),
        ({}, ["message"]),
        ({"content": None, "reasoning_content": "hm"}, ["reasoning"]),
        ({"content": "a", "refusal": "no"}, ["message"]),
    ],
)
def test_there_is_always_an_item_that_can_carry_what_was_sampled(message, items):
    assert [item["type"] for item in output_from_chat(message, "r")] == items


def test_a_cut_reply_says_so_in_each_dialect():
    cut = _pivot({"content": "half"}, finish_reason="length")
    assert chat_reply(cut)["choices"][0]["finish_reason"] == "length"
    response = responses_reply(cut, REQUEST)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_unknown_usage_is_null_and_never_zero():
    unknown = _pivot(usage=Usage())
    assert chat_reply(unknown)["usage"] is None
    assert responses_reply(unknown, REQUEST)["usage"] is None


def test_finish_reasons_of_other_engines_are_read():
    output = output_from_chat(UPSTREAM, "r")
    assert finish_from_chat("eos", ()) == "stop"
    assert finish_from_chat(None, output) == "tool_calls"
    assert finish_from_chat("max_tokens", ()) == "length"

"""What Messages clients get, and argument strings that come back from them as objects."""

from __future__ import annotations

import json

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo
from openai.types import Model

from toprope.dialects.errors import messages_error
from toprope.dialects.messages_arguments import called_ids, restore_arguments, same_arguments
from toprope.dialects.messages_reply import count_tokens_reply, lost_in_messages, messages_reply
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.models import models_reply
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.errors.body import read_error_body
from toprope.errors.kinds import Kind
from toprope.errors.tree import BadRequest, EngineUnavailable, LimitReached, ModelContextLength, TooLarge
from toprope.wire.responses import Usage

SPELLED = '{"b": 1.0,"a":"caf\\u00e9", "n":1e2}'
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def _call(arguments=SPELLED, call_id="c1"):
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}


def _made(*items, finish="stop", usage=None, **fields):
    output = with_item_ids(items, "r1")
    return messages_reply(PivotReply(output, finish, "m", usage or Usage(7, 4, 2, 1), "r1", 1, **fields))


def _back(message, **fields):
    """The next turn's request of a client that sends `message` back."""
    turn = {"role": "assistant", "content": message["content"]}
    return request_from_messages({"messages": [{"role": "user", "content": "x"}, turn], **fields})


def test_the_public_clients_type_accepts_the_message():
    message = Message.model_validate(_made(THOUGHT, TEXT, _call(), finish="tool_calls"), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.id, message.stop_reason) == ("msg_r1", "tool_use")
    assert message.content[2].input == {"a": "café", "b": 1, "n": 100}
    counts = message.usage
    assert (counts.input_tokens, counts.cache_read_input_tokens, counts.output_tokens) == (5, 2, 4)
    assert counts.output_tokens_details.thinking_tokens == 1


@pytest.mark.parametrize(
    ("finish", "items", "reason"),
    [
        ("stop", [TEXT], "end_turn"),
        ("stop", [TEXT, _call()], "tool_use"),
        ("tool_calls", [_call()], "tool_use"),
        ("length", [_call()], "max_tokens"),
        ("content_filter", [TEXT], "refusal"),
    ],
)
def test_stop_reasons(finish, items, reason):
    assert _made(*items, finish=finish)["stop_reason"] == reason


def test_unknown_counts_are_integers_because_clients_demand_them():
    assert set(_made(TEXT, usage=Usage())["usage"].values()) == {0}


@pytest.mark.parametrize("item", [{**TEXT, "content": []}, {**TEXT, "content": [{"type": "output_text", "text": ""}]}])
def test_a_reply_that_says_nothing_has_no_block(item):
    assert _made(item)["content"] == []


def test_tokens_stand_in_the_message_only_where_they_were_asked_for():
    triple = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    assert "token_ids" not in json.dumps(_made(TEXT))
    asked = _made(TEXT, tokens=triple)
    assert {name: asked[name] for name in triple} == triple
    assert "token_ids" not in json.dumps(asked["content"])


def test_a_thought_comes_back_as_the_item_that_it_was():
    message = _made(THOUGHT, TEXT)
    items = _back(message).input[1:]
    assert items[0] == {**THOUGHT, "id": "rs_r1_0"}
    sealed = _made({"type": "reasoning", "summary": [], "encrypted_content": "c2VhbA=="}, TEXT)
    assert sealed["content"][0] == {"type": "redacted_thinking", "data": "c2VhbA=="}
    signed = _made({**THOUGHT, "signature": "EqoB"})
    assert signed["content"][0]["signature"] == "EqoB"


@pytest.mark.promise("MS-1")
@pytest.mark.parametrize(
    "arguments",
    [SPELLED, '{ "command" :  "echo hello-caf\\u00e9 > out.txt && cat out.txt" }', "", " ", "{}", '{"a": 1, "a": 2}',
     '{"n": 12345678901234567890123}', '{"cmd": "ls', "not json", "[1]", "null", '{"a": NaN}', '{"a": "\\ud83d"}'],
)  # fmt: skip
def test_argument_bytes_survive_the_way_through_an_object(arguments):
    record = {"c1": arguments}
    message = json.loads(json.dumps(_made(TEXT, _call(arguments), finish="tool_calls")))
    restored = restore_arguments(_back(message), record.get)
    assert restored.unmatched == ()
    assert restored.request.input[-1]["arguments"] == arguments


def test_a_javascript_client_that_rounds_and_reorders_still_means_the_same_call():
    sent_back = {"n": 100, "a": "café", "b": 1}
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": sent_back}]}
    request = request_from_messages({"messages": [turn]})
    restored = restore_arguments(request, {"c1": SPELLED}.get)
    assert restored.request.input[0]["arguments"] == SPELLED
    assert same_arguments('{"n":12345678901234567000}', '{"n": 12345678901234567890}')


@pytest.mark.parametrize(
    ("sent_back", "record"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"c1": '{"a": 2}'}),
        ({"a": True}, {"c1": '{"a": 1}'}),
        ({"a": 1}, {"c1": '{"a": "1"}'}),
        ({"a": [1]}, {"c1": '{"a": [1, 2]}'}),
        ({"a": None}, {"c1": "{}"}),
        ({"a": 1}, {"c1": '{"a": 1'}),
    ],
)
def test_a_call_without_a_record_of_its_value_is_named_and_never_guessed(sent_back, record):
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": sent_back}]}
    request = request_from_messages({"messages": [turn]})
    restored = restore_arguments(request, record.get)
    assert restored.unmatched == ("c1",)
    assert restored.request == request


def test_an_id_that_every_turn_uses_again_is_paired_by_occurrence():
    spelled = ['{"a":1}', '{ "a": 2}', '{"a" :1}']
    turns = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": value}}]}
        for value in (1, 2, 1)
    ]
    request = request_from_messages({"messages": turns})
    restored = restore_arguments(request, {"c1": spelled}.get)
    assert [item["arguments"] for item in restored.request.input] == spelled
    later = restore_arguments(request_from_messages({"messages": turns[1:2]}), {"c1": spelled}.get)
    assert [item["arguments"] for item in later.request.input] == ['{ "a": 2}']


def test_the_ids_to_ask_a_record_for_are_each_named_once():
    calls = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("b", "a", "b")]
    request = request_from_messages({"messages": [{"role": "assistant", "content": calls}]})
    assert called_ids(request) == ("b", "a")


def test_arguments_that_are_no_object_reach_the_tool_whole_and_not_as_an_empty_call():
    for arguments in ('{"cmd": "ls', "[1]", "x"):
        (block,) = _made(_call(arguments))["content"]
        assert block["input"] == {"raw_arguments": arguments}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (LimitReached("x"), 403, "permission_error"),
        (EngineUnavailable("x"), 503, "overloaded_error"),
        (BadRequest("x"), 422, "invalid_request_error"),
        (EngineUnavailable("x"), 500, "api_error"),
    ],
)
def test_errors_have_the_dialects_shape(error, status, kind):
    body = messages_error(error, status)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"]


def test_a_peer_of_ours_reads_kind_and_retryability_from_the_same_body():
    body = messages_error(ModelContextLength("too long", upstream_status=400), 400)
    read = read_error_body(400, body, "")
    assert (read.kind, read.retryable, read.upstream_status) == (Kind.MODEL_CONTEXT_LENGTH, False, 400)


def test_counts_and_models_are_what_the_public_clients_read():
    assert MessageTokensCount.model_validate(count_tokens_reply(7), strict=True).input_tokens == 7
    listed = models_reply(["m", "n"])
    assert [ModelInfo.model_validate(entry).id for entry in listed["data"]] == ["m", "n"]
    assert [Model.model_validate(entry).id for entry in listed["data"]] == ["m", "n"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "n", False)


def test_what_blocks_have_no_place_for_is_named():
    text = {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation", "url": "u"}]}
    image = {"type": "input_image", "image_url": "u"}
    refusal = {"type": "refusal", "refusal": "no"}
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "add", "arguments": "{}", "status": "completed"}
    output = (
        {"type": "reasoning", "summary": [], "odd": 1},
        {"type": "message", "role": "assistant", "content": [text, image, refusal], "images": [image], "audio": None},
        {**call, "extra_content": {"signature": "s"}},
        {"type": "web_search_call", "id": "w"},
    )
    assert lost_in_messages(output) == (
        "reply.message.images",
        "reply.message.annotations",
        "reply.message.input_image",
        "reply.function_call.extra_content",
        "reply.web_search_call",
    )
    assert lost_in_messages(({"type": "message", "role": "assistant", "content": "a"}, call)) == ()

"""Messages requests in the pivot: every shape that programs send, and one conversation in three dialects."""

from __future__ import annotations

import base64

import pytest

from toprope.canonical.json import canonical
from toprope.dialects.chat_request import request_from_chat, request_to_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.pivot import request_items
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest
from toprope.tokens.items import item_digests

PIXEL = base64.b64encode(b"\x89PNG").decode()
FIRST, SECOND = '{"b":1.5,"a":"caf\\u00e9"}', '{"a":2}'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}

CHAT = {
    "model": "m",
    "max_tokens": 9,
    "stop": ["END"],
    "top_k": 3,
    "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look \u2028 h\u00e9 \U0001f600"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm \ud83d",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b":1.5,"a":"café"}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": SECOND}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ],
}
RESPONSES = {
    "model": "m",
    "max_output_tokens": 9,
    "stop": ["END"],
    "top_k": 3,
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "look \u2028 h\u00e9 \U0001f600"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
            ],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm \ud83d"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"b":1.5,"a":"café"}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": SECOND},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "stop_sequences": ["END"],
    "top_k": 3,
    "system": "be brief",
    "tools": [{"name": "add", "description": "adds", "input_schema": PARAMETERS, "type": "custom"}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look \u2028 h\u00e9 \U0001f600"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm \ud83d", "signature": ""},
                {"type": "text", "text": "I add.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"b": 1.5, "a": "café"}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 2}, "cache_control": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": False},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
}


@pytest.mark.promise("MS-1")
def test_one_conversation_in_three_dialects_is_one_pivot_to_the_byte():
    pivots = [request_from_chat(CHAT), request_from_responses(RESPONSES), request_from_messages(MESSAGES)]
    assert len({canonical(list(request_items(each))) for each in pivots}) == 1
    names = ("model", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "top_k", "stop")
    assert [[getattr(each, name) for name in names] for each in pivots[1:]] == [
        [getattr(pivots[0], name) for name in names]
    ] * 2
    assert len({item_digests(request_items(each)) for each in pivots}) == 1
    assert len({canonical(request_to_chat(each)[0]) for each in pivots}) == 1


def _items(*turns, **fields):
    return request_from_messages({"messages": list(turns), **fields}).input


def _user(*blocks):
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


NONCE = "x-anthropic-billing-header: cc_version=2.1.154.{n}; cc_entrypoint=cli; cch={n}0a1f;"


@pytest.mark.parametrize(
    "system",
    [
        lambda n: [{"type": "text", "text": NONCE.format(n=n)}, {"type": "text", "text": "You code."}],
        lambda n: [{"type": "text", "text": NONCE.format(n=n) + "\nYou code."}],
        lambda n: NONCE.format(n=n) + "\n\nYou code.",
    ],
    ids=["block of its own", "head of a block", "string"],
)
def test_a_changing_billing_nonce_at_the_head_of_the_system_prompt_breaks_no_prefix(system):
    first, second = (_items(_user(), system=system(n)) for n in (1, 2))
    assert first == second
    text = request_to_chat(request_from_messages({"messages": [_user()], "system": system(3)}))[0]["messages"][0]
    assert text == {"role": "system", "content": "You code."}


def test_a_system_prompt_of_the_billing_line_alone_is_none():
    assert [item["role"] for item in _items(_user(), system=NONCE)] == ["user"]
    assert [item["role"] for item in _items(_user(), system=[{"type": "text", "text": NONCE}])] == ["user"]


def test_a_wandering_cache_control_changes_no_item():
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
        {"type": "image", "source": {"type": "url", "url": "http://x/i.png"}},
    ]
    marked = [{**block, **mark} for block in blocks]
    assert _items(_user(*blocks)) == _items(_user(*marked))
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    assert _items(_assistant(call)) == _items(_assistant({**call, **mark}))
    tool = {"name": "f", "input_schema": {"$schema": "x", "type": "object"}}
    plain = request_from_messages({"messages": [_user()], "tools": [tool]})
    noted = request_from_messages({"messages": [_user()], "tools": [{**tool, **mark, "eager_input_streaming": True}]})
    assert plain == noted
    assert plain.tools[0]["parameters"]["$schema"] == "x"


def test_claude_codes_system_turns_in_the_middle_keep_their_place():
    items = _items(_user({"type": "text", "text": "a"}), {"role": "system", "content": "note"}, _assistant())
    assert [item["role"] for item in items] == ["user", "system", "assistant"]


def test_a_result_may_hold_text_and_images_and_say_that_it_failed():
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "is_error": True,
        "content": [
            {"type": "text", "text": "no"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        ],
    }
    (item,) = _items(_user(result))
    assert (item["type"], item["is_error"]) == ("function_call_output", True)
    assert [part["type"] for part in item["output"]] == ["input_text", "input_image"]
    assert item["output"][1]["image_url"] == f"data:image/png;base64,{PIXEL}"


def test_results_without_an_id_are_paired_with_the_oldest_open_call():
    calls = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b", "a")]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "r"} for i in ("b", None, "a")]
    items = _items(_assistant(*calls), _user(*results, {"type": "tool_result", "content": None}))
    assert [item["call_id"] for item in items[3:]] == ["b", "a", "a", "call_unknown"]
    assert items[-1]["output"] == ""


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_assistant_turn_is_accepted_and_stays_a_turn(content):
    (item,) = _items({"role": "assistant", "content": content})
    assert (item["type"], item["role"]) == ("message", "assistant")
    body, _ = request_to_chat(request_from_messages({"messages": [{"role": "assistant", "content": content}]}))
    assert body["messages"] == [{"role": "assistant", "content": ""}]


def test_a_turn_without_content_is_accepted():
    assert _items({"role": "user"}) == ({"type": "message", "role": "user", "content": []},)


def test_a_thought_of_another_provider_keeps_its_signature_and_a_sealed_one_its_seal():
    items = _items(
        _assistant(
            {"type": "thinking", "thinking": "hm", "signature": "EqoB+/=="},
            {"type": "redacted_thinking", "data": "c2VhbA=="},
            {"type": "text", "text": "a"},
        )
    )
    assert items[0]["signature"] == "EqoB+/=="
    assert items[1]["encrypted_content"] == "c2VhbA=="
    body, _ = request_to_chat(request_from_messages({"messages": [_assistant({"type": "redacted_thinking"})]}))
    assert body["messages"] == [{"role": "assistant", "content": ""}]


def test_tools_and_blocks_of_the_provider_are_listed_and_not_an_error():
    body = {
        "messages": [
            _assistant(
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "text", "text": "found", "citations": [{"type": "char_location"}]},
            )
        ],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {}}],
        "mcp_servers": [{"type": "url", "url": "http://x"}],
    }
    chat, lost = request_to_chat(request_from_messages(body))
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]
    assert lost == ("tools.web_search_20250305", "items.server_tool_use", "items.web_search_tool_result")
    assert chat["messages"] == [{"role": "assistant", "content": "found"}]


@pytest.mark.parametrize(
    ("choice", "read", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "name": "f"}, None),
        (None, None, None),
    ],
)
def test_tool_choices_are_read(choice, read, parallel):
    body = {"messages": [_user()], "tools": [{"name": "f", "input_schema": {}}], "tool_choice": choice}
    request = request_from_messages(body)
    assert (request.tool_choice, request.parallel_tool_calls) == (read, parallel)
    assert request_from_messages({**body, "tools": None}).tool_choice is None


@pytest.mark.parametrize(
    "null",
    ["system", "tools", "tool_choice", "metadata", "temperature", "top_p", "top_k", "stop_sequences", "stream"],
)
def test_an_explicit_null_is_an_absent_field(null):
    plain = {"messages": [_user()]}
    assert request_from_messages({**plain, null: None}) == request_from_messages(plain)


def test_documents_become_files_or_text():
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    texts = {"type": "content", "content": [{"type": "text", "text": "b"}]}
    (item,) = _items(
        _user(
            {"type": "document", "source": source, "title": "a.pdf", "context": "x"},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
            {"type": "document", "source": texts},
            {"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}},
            {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
        )
    )
    assert item["content"] == [
        {"type": "input_file", "file_data": "data:application/pdf;base64,JVBERg==", "filename": "a.pdf"},
        {"type": "input_text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "input_file", "file_url": "http://x/a.pdf"},
        {"type": "input_file", "file_id": "file_1"},
    ]


def test_shape_and_effort_of_the_output_are_carried():
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    config = {"effort": "low", "format": schema}
    body, _ = request_to_chat(request_from_messages({"messages": [_user()], "output_config": config}))
    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"] == {"name": "output", "schema": {"type": "object"}}


def test_whole_message_objects_of_the_public_client_come_back_as_turns():
    sent = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "text", "text": "a", "citations": None, "prompt_token_ids": [1]},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}},
        ],
        "stop_sequence": None,
        "generation_token_ids": [1, 2],
    }
    items = _items(sent)
    assert [item["type"] for item in items] == ["message", "function_call"]
    assert "token_ids" not in repr(items)
    assert items[0]["content"] == [{"type": "output_text", "text": "a", "annotations": []}]
    assert items[1] == {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [_user({"type": "text"}, 3)]}, "messages[0].content[1]"),
        ({"messages": [_user({"type": 3})]}, "messages[0].content[0].type"),
        ({"messages": [_user({"type": "image"})]}, "messages[0].content[0].source"),
        ({"messages": [_assistant({"type": "message", "content": 3})]}, "messages[0].content[0].type"),
        ({"messages": [_user()], "system": 3}, "system"),
        ({"messages": [_user()], "tools": [{}]}, "tools[0].name"),
        ({"messages": [_user()], "tools": ["x"]}, "tools[0]"),
        ({"messages": [_user()], "stop_sequences": [1]}, "stop_sequences"),
        ({"messages": [_user()], "max_tokens": "x"}, "max_tokens"),
        ({"messages": [_user({"type": "document", "source": 1})]}, "messages[0].content[0].source"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_with_the_place(body, named):
    with pytest.raises(BadRequest) as caught:
        request_from_messages(body)
    assert str(caught.value).startswith(f"{named}:")
    assert caught.value.status == 400

"""What real agent programs put on the wire, program by program, and what an upstream then gets. Shapes, not copies."""

from __future__ import annotations

import json

import pytest

from toprope.dialects.chat_request import clean_chat_body, request_from_chat, request_to_chat, wants_usage
from toprope.dialects.messages_arguments import restore_arguments
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.pivot import request_items
from toprope.dialects.responses import request_from_responses
from toprope.tokens.items import item_digests

SPELLED = '{ "command" :  "echo hello-caf\\u00e9 > out.txt && cat out.txt" }'
RESPELLED = '{"command":"echo hello-café > out.txt && cat out.txt"}'
BROKEN = '{"cmd": "ls'
PARAMETERS = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}}


def _sent_on(request):
    """What an upstream that speaks Chat gets: checked to be free of nulls, of our extras and of what Chat has not."""
    body, lost = request_to_chat(request)
    text = json.dumps(body["messages"])
    for word in ("token_ids", "cache_control", "signature", "encrypted_content"):
        assert word not in text
    return body, lost


def _roles(body):
    return [message["role"] for message in body["messages"]]


def _arguments(body):
    return [call["function"]["arguments"] for m in body["messages"] for call in m.get("tool_calls", ())]


def _cleaned(body):
    request_from_chat(body)
    return clean_chat_body(body)[0]


def test_codex_cli_with_ids_of_its_own_and_tools_that_are_listed_and_not_run():
    body = {
        "model": "m",
        "stream": True,
        "input": [
            {"type": "message", "role": "developer", "id": "i1", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "id": "i2", "content": [{"type": "input_text", "text": "task"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c1",
                "name": "shell",
                "arguments": SPELLED,
                "status": "completed",
            },
            {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "ok"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "web_search", "external_web_access": True},
            {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": '{"b":1}'},
    }
    request = request_from_responses(body)
    sent, lost = _sent_on(request)
    assert _roles(sent) == ["developer", "user", "assistant", "tool"]
    assert _arguments(sent) == [SPELLED]
    assert sent["messages"][2]["reasoning_content"] == "hm"
    assert lost == ("tools.namespace", "tools.web_search", "tools.custom")
    assert sent.keys() == {"model", "messages", "tools", "tool_choice", "parallel_tool_calls"}
    assert request.stream


def test_codex_cli_compaction_has_no_tools_and_is_a_request_like_any_other():
    body = {"input": [{"role": "user", "content": "sum up"}], "tools": [], "parallel_tool_calls": False}
    sent, _ = _sent_on(request_from_responses(body))
    assert sent == {"messages": [{"role": "user", "content": "sum up"}]}


def test_mini_swe_agent_and_litellm_leave_content_out_and_send_their_own_fields_back():
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": SPELLED}}],
        "reasoning_content": "hm",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        "function_call": None,
        "provider_specific_fields": {"prompt_token_ids": [1], "refusal": None},
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, turn], "tools": []}
    assert [item["type"] for item in request_from_chat(body).input] == ["message", "reasoning", "function_call"]
    cleaned = _cleaned(body)["messages"][1]
    assert cleaned["tool_calls"] == turn["tool_calls"]
    assert "prompt_token_ids" not in json.dumps(cleaned)


def test_litellm_over_responses_drops_ids_and_sends_results_as_lists():
    body = {
        "input": [
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": SPELLED},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}],
    }
    sent, _ = _sent_on(request_from_responses(body))
    assert sent["messages"][1] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    assert sent["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_qwen_code_sends_lists_of_text_and_null_content_and_respelled_arguments():
    body = {
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": RESPELLED}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
        ],
    }
    assert wants_usage(body)
    assert "stream_options" not in _cleaned(body)
    assert _cleaned(body)["messages"] == body["messages"]
    sent, _ = _sent_on(request_from_chat(body))
    assert _arguments(sent) == [RESPELLED]
    sampled = [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": SPELLED}]
    assert item_digests(request_items(request_from_chat(body))) == item_digests(sampled)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}, "x"])
def test_usage_is_not_sent_to_who_did_not_ask(options):
    assert not wants_usage({"stream_options": options})


def test_opencode_over_messages_marks_caches_everywhere_and_thinks_in_effort():
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "max_tokens": 4096,
        "system": [{"type": "text", "text": "rules", **mark}],
        "tools": [{"name": "bash", "description": "d", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "task", **mark}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "bash", "input": json.loads(SPELLED), **mark}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok", **mark}]},
        ],
    }
    restored = restore_arguments(request_from_messages(body), {"c1": SPELLED}.get)
    assert restored.unmatched == ()
    sent, _ = _sent_on(restored.request)
    assert _roles(sent) == ["system", "user", "assistant", "tool"]
    assert _arguments(sent) == [SPELLED]
    assert sent["tools"][0]["function"]["parameters"] == PARAMETERS


def test_opencodes_invalid_call_keeps_its_id_and_new_name():
    body = {"input": [{"type": "function_call", "call_id": "c1", "name": "invalid", "arguments": '{"error":"x"}'}]}
    (call,) = _sent_on(request_from_responses(body))[0]["messages"][0]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c1", "invalid")


def test_pi_in_three_dialects_with_reasoning_on():
    chat = {
        "messages": [{"role": "developer", "content": "rules"}, {"role": "user", "content": "x"}],
        "store": False,
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": False}}],
    }
    responses = {
        "input": [{"role": "developer", "content": "rules"}, {"role": "user", "content": "x"}],
        "store": False,
        "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_output_tokens": 9,
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
    }
    messages = {
        "system": [{"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
        "tools": [{"name": "f", "input_schema": {}, "eager_input_streaming": True}],
    }
    sent = [
        _sent_on(request_from_chat(chat))[0],
        _sent_on(request_from_responses(responses))[0],
        _sent_on(request_from_messages(messages))[0],
    ]
    assert sent[0] == sent[1]
    assert sent[2]["messages"] == [{"role": "system", "content": "rules"}, {"role": "user", "content": "x"}]
    assert [body["max_tokens"] for body in sent] == [9, 9, 9]
    assert "thinking" not in sent[2]
    assert sent[2]["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_openai_librarys_stream_helper_sends_nulls_places_and_parsed_arguments_back():
    call = {
        "id": "c1",
        "index": 0,
        "type": "function",
        "function": {"name": "f", "arguments": SPELLED, "parsed_arguments": None},
    }
    turn = {
        "role": "assistant",
        "content": "",
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "parsed")),
        "tool_calls": [call],
        "prompt_token_ids": [1, 2],
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, turn]}
    plain = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": SPELLED}}
    assert _cleaned(body)["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [plain]}
    assert [item["type"] for item in request_from_chat(body).input] == ["message", "function_call"]


def test_openai_agents_over_responses_sends_whole_items_back():
    item = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        "generation_token_ids": [1],
    }
    body = {"input": [{"role": "user", "content": "x"}, item], "include": [], "model": "m"}
    sent, _ = _sent_on(request_from_responses(body))
    assert sent["messages"][1] == {"role": "assistant", "content": "a"}


def test_langchain_leaves_hollow_thoughts_and_parts_of_other_providers():
    hollow = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "status": "in_progress"}
    body = {"input": [{"role": "user", "content": "x"}, hollow, {"role": "assistant", "content": "a"}]}
    assert _sent_on(request_from_responses(body))[0]["messages"][1:] == [{"role": "assistant", "content": "a"}]
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"k": "v"}'}}
    chat = {"messages": [{"role": "assistant", "content": parts, "tool_calls": [call]}]}
    (cleaned,) = _cleaned(chat)["messages"]
    assert (cleaned["content"], cleaned["reasoning_content"], cleaned["tool_calls"]) == ("a", "hm", [call])


def test_smolagents_asks_with_stop_strings_and_tells_calls_in_text():
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "rules"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Calling tools:\n[{'id': 'c1'}]"}]},
            {"role": "user", "content": [{"type": "text", "text": "Observation:\nok"}]},
        ],
        "stop": ["Observation:", "Calling tools:"],
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    request = request_from_chat(body)
    assert (request.stop, request.tool_choice) == (("Observation:", "Calling tools:"), "required")
    assert _roles(_sent_on(request)[0]) == ["system", "assistant", "user"]


def test_claude_code_in_one_request():
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "max_tokens": 32000,
        "metadata": {"user_id": "u"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.154; cch=0a1f2;"},
            {"type": "text", "text": "You code.", **mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "task", **mark}],
            },
            {"role": "system", "content": [{"type": "text", "text": "a later rule"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "EqoB"},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "is_error": True,
                        "content": [
                            {"type": "text", "text": "no"},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                        ],
                    },
                ],
            },
        ],
        "tools": [{"name": "Read", "description": "d", "input_schema": PARAMETERS, **mark}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "stream": True,
    }
    sent, lost = _sent_on(request_from_messages(body))
    assert _roles(sent) == ["system", "user", "system", "assistant", "tool"]
    assert sent["messages"][0]["content"] == "You code."
    assert sent["messages"][3]["reasoning_content"] == "hm"
    assert [part["type"] for part in sent["messages"][4]["content"]] == ["text", "image_url"]
    assert sent["reasoning_effort"] == "high"
    assert lost == ()
    counted = request_from_messages({k: v for k, v in body.items() if k not in ("max_tokens", "stream", "metadata")})
    assert counted.input == request_from_messages(body).input  # count_tokens has the same body


def test_a_dataset_rows_explicit_null_never_reaches_an_engine():
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": None}
    assert "top_logprobs" not in _cleaned(body)
    assert "top_logprobs" not in _sent_on(request_from_chat(body))[0]


HISTORIES = {
    "chat": (
        request_from_chat,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": BROKEN}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "arguments were not valid JSON"},
                {"role": "user", "content": "go on"},
            ]
        },
    ),
    "responses": (
        request_from_responses,
        {
            "input": [
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": BROKEN},
                {"type": "function_call_output", "call_id": "c1", "output": "arguments were not valid JSON"},
                {"role": "user", "content": "go on"},
            ]
        },
    ),
    "messages": (
        request_from_messages,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"raw_arguments": BROKEN}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "arguments were not valid JSON"},
                        {"type": "text", "text": "go on"},
                    ],
                },
            ]
        },
    ),
}


@pytest.mark.parametrize("dialect", HISTORIES)
def test_a_broken_tool_call_in_the_history_poisons_nothing_and_keeps_its_bytes(dialect):
    read, body = HISTORIES[dialect]
    sent, _ = _sent_on(restore_arguments(read(body), {"c1": BROKEN}.get).request)
    assert _arguments(sent) == [BROKEN]
    assert _roles(sent) == ["assistant", "tool", "user"]
    if dialect == "chat":
        assert _arguments(_cleaned(body)) == [BROKEN]


def test_forty_images_of_a_megabyte_are_read():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}}
    request = request_from_messages({"messages": [{"role": "user", "content": [image] * 40}]})
    assert len(request.input[0]["content"]) == 40

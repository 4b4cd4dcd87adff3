"""Requests of two dialects in one pivot, and the Chat body that an upstream gets."""

from __future__ import annotations

import pytest

from toprope.dialects.chat_request import clean_chat_body, request_from_chat, request_to_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.pivot import has_media, request_items
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": False,
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": "END",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
    "reasoning_effort": "low",
    "min_p": 0.1,
}
RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": "hi",
    "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}],
    "tool_choice": {"type": "function", "name": "add"},
    "parallel_tool_calls": False,
    "max_output_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["END"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "min_p": 0.1,
}


def test_the_same_request_in_two_dialects_asks_an_upstream_for_the_same():
    from_chat, _ = request_to_chat(request_from_chat(CHAT))
    from_responses, lost = request_to_chat(request_from_responses(RESPONSES))
    assert from_chat == from_responses
    assert from_responses["messages"] == CHAT["messages"]
    assert from_responses["tools"] == CHAT["tools"]
    assert from_responses["tool_choice"] == CHAT["tool_choice"]
    assert from_responses["response_format"] == CHAT["response_format"]
    assert from_responses["reasoning_effort"] == "low"
    assert from_responses["min_p"] == 0.1
    assert lost == ()


@pytest.mark.parametrize("null", ["tools", "tool_choice", "metadata", "temperature", "stop", "stream", "seed", "n"])
def test_an_explicit_null_is_an_absent_field(null):
    plain = {"messages": [{"role": "user", "content": "x"}]}
    assert request_from_chat({**plain, null: None}) == request_from_chat(plain)


def test_a_tool_choice_without_tools_is_not_passed_on():
    assert request_from_responses({"input": "x", "tools": None, "tool_choice": "auto"}).tool_choice is None
    cleaned, _ = clean_chat_body({"messages": [{"role": "user", "content": "x"}], "tools": [], "tool_choice": "auto"})
    assert cleaned == {"messages": [{"role": "user", "content": "x"}]}


def test_unknown_tool_kinds_are_listed_but_not_an_error():
    tools = [{"type": "namespace", "name": "n", "tools": []}, {"type": "web_search"}, RESPONSES["tools"][0]]
    request = request_from_responses({"input": "x", "tools": tools})
    body, lost = request_to_chat(request)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add"]
    assert lost == ("tools.namespace", "tools.web_search")


def test_codex_items_without_id_status_or_type_and_chat_turns_inside_input_are_read():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{ }"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "z"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": None},
        {"role": "user", "content": "go", "generation_token_ids": [1]},
    ]
    request = request_from_responses({"input": items, "store": False, "include": [], "client_metadata": {"a": "b"}})
    kinds = [item["type"] for item in request.input]
    assert kinds == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "function_call_output",
        "reasoning",
        "message",
    ]
    assert request.input[2]["arguments"] == "{ }"
    assert "generation_token_ids" not in request.input[-1]
    body, lost = request_to_chat(request)
    assert [m["role"] for m in body["messages"]] == ["developer", "assistant", "tool", "tool", "assistant", "user"]
    assert lost == ()
    assert body.keys() == {"messages"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, r"input\[0\]: item_reference"),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, r"input\[0\].type"),
        ({"input": [{"role": "oracle", "content": "x"}]}, r"input\[0\].role: 'oracle'"),
        ({"input": "x", "temperature": "hot"}, "temperature: 'hot'"),
    ],
)
def test_a_responses_field_that_cannot_be_honoured_is_refused_by_name(body, named):
    with pytest.raises(BadRequest, match=named) as caught:
        request_from_responses(body)
    assert caught.value.status == 400


@pytest.mark.promise("MS-6")
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
@pytest.mark.parametrize("output", [5, [None], [5], {"a": 1}], ids=repr)
def test_an_output_of_a_tool_that_cannot_be_read_is_refused_by_its_field(kind, output):
    with pytest.raises(BadRequest, match=r"^input\[0\]\.output") as refused:
        request_from_responses({"input": [{"type": kind, "call_id": "c", "output": output}]})
    assert refused.value.status == 400


def test_several_choices_are_refused_and_not_cut_down_to_one():
    with pytest.raises(BadRequest, match="n: 2 is not supported"):
        request_from_chat({"messages": [{"role": "user", "content": "x"}], "n": 2})


def test_a_cleaned_chat_body_has_no_nulls_no_echoes_and_the_clients_own_strings():
    arguments = '{"b": 1.0,"a":"caf\\u00e9"}'
    body = {
        "model": "m",
        "top_logprobs": None,
        "stream": False,
        "messages": [
            {"role": "user", "content": "x", "name": None},
            {"role": "assistant", "content": None, "refusal": None, "token_ids": [9], "prompt_token_ids": [1],
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []},
        ],
    }  # fmt: skip
    cleaned, _ = clean_chat_body(body)
    assert cleaned["messages"][0] == {"role": "user", "content": "x"}
    assert cleaned["messages"][1]["tool_calls"][0]["function"]["arguments"] is arguments
    assert cleaned["messages"][1]["content"] is None
    assert "prompt_token_ids" not in cleaned["messages"][1]
    assert cleaned["messages"][2] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert "top_logprobs" not in cleaned


def test_instructions_stand_first_among_the_items():
    items = request_items(request_from_responses(RESPONSES))
    assert [item["role"] for item in items] == ["system", "user"]


READERS = {"chat": request_from_chat, "responses": request_from_responses, "messages": request_from_messages}


def read(dialect, *turns, **more):
    return READERS[dialect]({"input" if dialect == "responses" else "messages": list(turns), **more})


SEEN = ("video_url", "audio_url", "input_audio", "input_video", "image_embeds", "image_pil", "video", "a kind of 2031")


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("dialect", READERS)
def test_a_part_of_a_kind_that_is_not_known_to_be_words_counts_as_media(dialect, kind):
    part = {"type": kind, kind: {"url": "data:x"}}
    words = {"type": "input_text" if dialect == "responses" else "text", "text": "what is it?"}
    assert has_media(read(dialect, {"role": "user", "content": [part, words]}))
    assert not has_media(read(dialect, {"role": "user", "content": [words]}))


def test_media_in_a_result_in_an_untyped_part_and_beside_the_words_counts_too():
    part = {"type": "video_url", "video_url": {"url": "data:x"}}
    block = {"type": "video", "source": {"type": "url", "url": "u"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    quoted = {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "a"}, block]}
    assert has_media(read("chat", {"role": "tool", "tool_call_id": "c", "content": [part]}))
    for kind in ("function_call_output", "custom_tool_call_output"):
        assert has_media(read("responses", {"type": kind, "call_id": "c", "output": [part]}))
    assert has_media(read("messages", {"role": "user", "content": [result]}))
    assert has_media(read("messages", {"role": "user", "content": [quoted]}))
    for odd in (
        {"video_url": {"url": "u"}},
        {"text": "a", "audio_url": {"url": "u"}},
    ):  # engines take kinds from fields
        assert has_media(read("chat", {"role": "user", "content": [odd]}))
    assert has_media(read("chat", {"role": "user", "content": "a", "images": ["AA=="]}))


def test_a_conversation_of_words_thoughts_calls_and_quotes_holds_no_media():
    quote = {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "a"}]}
    named = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    plain = {"type": "document", "source": {"type": "text", "data": "a"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "w", "content": [{"type": "web_search_result"}]}
    thought = {"type": "redacted_thinking", "data": "x"}
    assert not has_media(read("messages", {"role": "user", "content": [quote, named, plain, "x"]}))
    assert not has_media(read("messages", {"role": "assistant", "content": [thought, found]}))
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "refusal", "refusal": "no"}, {"text": "x"}, "y"]
    assert not has_media(read("chat", {"role": "assistant", "content": parts, "audio": None}))
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None}
    assert not has_media(read("responses", thought, {"type": "web_search_call", "action": {"type": "search"}}))


TOOL = {
    "chat": {"type": "function", "function": {"name": "f"}},
    "responses": {"type": "function", "name": "f"},
    "messages": {"name": "f", "input_schema": {}},
}


@pytest.mark.parametrize("tools", [5, "f", {"a": 1}, [5], [[1]], [{"type": ["function"]}], [{"type": "allowed_tools"}]])
@pytest.mark.parametrize("dialect", READERS)
def test_a_choice_among_tools_that_cannot_be_read_is_refused_by_its_name(dialect, tools):
    flat = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    for choice in (flat, nested):
        with pytest.raises(BadRequest, match=r"^tool_choice\..*tools") as refused:
            read(dialect, {"role": "user", "content": "x"}, tools=[TOOL[dialect]], tool_choice=choice)
        assert refused.value.status == 400


@pytest.mark.parametrize("choice", [{"type": ["x"]}, {"type": "function", "name": 7}, {"type": "custom", "custom": 5}])
@pytest.mark.parametrize("dialect", READERS)
def test_a_choice_of_no_kind_or_name_is_refused_by_its_field(dialect, choice):
    with pytest.raises(BadRequest, match=r"^tool_choice\."):
        read(dialect, {"role": "user", "content": "x"}, tools=[TOOL[dialect]], tool_choice=choice)


def test_a_choice_among_tools_reaches_chat_from_each_spelling():
    asked = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL["chat"]]}}
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL["responses"]]}
    for dialect, choice in (("chat", asked), ("responses", flat)):
        request = read(dialect, {"role": "user", "content": "x"}, tools=[TOOL[dialect]], tool_choice=choice)
        assert request_to_chat(request)[0]["tool_choice"] == asked

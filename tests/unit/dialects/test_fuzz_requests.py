"""Whatever a client sends: a pivot that an upstream, the record and the lineage can use, or a refusal; no fault."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toprope.dialects.chat_request import clean_chat_body, request_from_chat, request_to_chat
from toprope.dialects.errors import error_status, messages_error, openai_error
from toprope.dialects.messages_arguments import called_ids, restore_arguments
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.pivot import has_media, request_items, sampling_of
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest
from toprope.tokens.items import item_digests
from toprope.wire.fields import read_object, write_object

BODIES = 4_000
READERS = {"chat": request_from_chat, "responses": request_from_responses, "messages": request_from_messages}

# fmt: off
WORDS = (
    "user", "assistant", "system", "developer", "tool", "function", "text", "input_text", "output_text", "refusal",
    "image", "image_url", "input_image", "document", "file", "input_file", "base64", "url", "content", "tool_use",
    "tool_result", "thinking", "redacted_thinking", "reasoning", "message", "function_call", "custom", "auto",
    "function_call_output", "custom_tool_call", "item_reference", "tool_call", "any", "none", "allowed_tools",
    "json_schema", "x-anthropic-billing-header: 1\nx", "a\u2028\ud83d", "", "{}", '{"a":', "c1", "dG9wcm9wZTpyc18w",
)
KEYS = (
    "type", "role", "content", "text", "id", "name", "arguments", "args", "input", "output", "call_id",
    "tool_calls", "tool_call_id", "tool_use_id", "function", "custom", "function_call", "refusal", "reasoning",
    "summary", "reasoning_content", "thinking", "thinking_blocks", "signature", "data", "source", "media_type", "url",
    "title", "image_url", "file", "file_id", "detail", "cache_control", "provider_specific_fields", "token_ids",
    "encrypted_content", "is_error", "prompt_token_ids", "citations", "index", "tools", "mode", "format", "effort",
)
FIELDS = (
    "model", "system", "instructions", "tools", "functions", "tool_choice", "parallel_tool_calls", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "text",
    "stop_sequences", "stream", "stream_options", "response_format", "verbosity", "reasoning_effort", "foreign",
    "reasoning", "output_config", "output_format", "thinking", "metadata", "mcp_servers", "include",
)
KINDS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "compaction", None,
    "text", "image_url", "file", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document",
    "input_text", "output_text", "input_image", "tool_call", "refusal",
)
ROLES = ("user", "assistant", "system", "developer", "tool", "function")
# fmt: on
LEAVES = (None, True, False, 0, -3, 2**70, 1.5, 1e300)


def _value(rng: random.Random, depth: int = 3) -> Any:
    roll = rng.random()
    if depth and roll < 0.2:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and roll < 0.45:
        return _object(rng, depth - 1)
    return rng.choice(WORDS) if roll < 0.8 else rng.choice(LEAVES)


def _object(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    made = {rng.choice(KEYS): _value(rng, depth) for _ in range(rng.randrange(5))}
    return {**made, "type": rng.choice(KINDS)} if rng.random() < 0.6 else made


def _turn(rng: random.Random) -> Any:
    """A turn or item that is nearly right: a known role or kind, whatever fields, blocks of known kinds."""
    if rng.random() < 0.05:
        return _value(rng)
    made = _object(rng)
    if rng.random() < 0.7:
        made["role"] = rng.choice(ROLES)
    for name in ("content", "output", "tool_calls", "summary"):
        if rng.random() < 0.4:
            made[name] = [_object(rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        made["function"] = {"name": rng.choice(WORDS), "arguments": _value(rng)}
    return made


def _tool(rng: random.Random) -> dict[str, Any]:
    """A tool that is nearly right, in one of the two spellings."""
    kind = rng.choice(("function", "custom", "function", "allowed_tools"))
    inner = {"name": rng.choice(WORDS), "parameters": {}, **_object(rng, 2)} if rng.random() < 0.7 else _value(rng)
    return {"type": kind, kind: inner} if rng.random() < 0.5 or not isinstance(inner, dict) else {**inner, "type": kind}


def _choice(rng: random.Random) -> dict[str, Any]:
    """A tool choice that is nearly right: one tool, or one among some, in one of the two spellings."""
    if rng.random() < 0.3:
        return _tool(rng)
    among = {"mode": "auto", "tools": [_tool(rng) for _ in range(rng.randrange(3))]}
    if rng.random() < 0.3:
        among["tools"] = _value(rng)
    kind = "allowed_tools"
    return {"type": kind, kind: among} if rng.random() < 0.5 else {"type": kind, **among}


def _body(rng: random.Random, dialect: str) -> dict[str, Any]:
    body = {rng.choice(FIELDS): _value(rng) for _ in range(rng.randrange(3))}
    if rng.random() < 0.3:
        body["tools"] = [(_object if rng.random() < 0.5 else _tool)(rng) for _ in range(rng.randrange(3))]
        if rng.random() < 0.5:
            body["tool_choice"] = _choice(rng)
    turns = [_turn(rng) for _ in range(rng.randrange(1, 4))]
    return {**body, "input" if dialect == "responses" else "messages": turns}


def _used(dialect: str, data: bytes) -> None:
    """All that is done with a request before anything is generated. Raises `BadRequest` only."""
    body = read_object(data)
    request = READERS[dialect](body)
    restored = restore_arguments(request, {"c1": '{"a":'}.get)
    assert set(restored.unmatched) <= set(called_ids(request))
    for each in (request, restored.request):
        chat, _ = request_to_chat(each)
        write_object(chat)
        item_digests(request_items(each))
        has_media(each)
        sampling_of(each)
    if dialect == "chat":
        write_object(clean_chat_body(body)[0])


def _refused(dialect: str, data: bytes) -> bool:
    try:
        _used(dialect, data)
    except BadRequest as error:
        refusal = error
    else:
        return False
    status = error_status(refusal)
    shape = messages_error if dialect == "messages" else openai_error
    assert 400 <= status < 500
    assert write_object(shape(refusal, status))
    return True


@pytest.mark.parametrize("dialect", READERS)
def test_no_body_of_known_words_makes_a_parser_fail(dialect):
    refused = 0
    for seed in range(BODIES):
        body = _body(random.Random(seed), dialect)
        try:
            refused += _refused(dialect, json.dumps(body).encode())
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(body)}")
            raise
    assert BODIES * 0.05 < refused < BODIES * 0.95  # both ways are walked


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("dialect", READERS)
def test_no_bytes_make_a_parser_fail(dialect):
    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
    def check(data):
        _refused(dialect, data)
        field = b'"input":' if dialect == "responses" else b'"messages":'
        _refused(dialect, b"{" + field + b"[" + data + b"]}")

    check()


DEEP = [
    b'{"messages":%s}' % (b"[" * 200_000),
    b'{"messages":[{"role":"user","content":%s"x"%s}],"input":"x"}' % (b"[" * 5_000, b"]" * 5_000),
    *(
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f","input":%s1%s}]}],'
        b'"input":[{"type":"function_call","name":"f","call_id":"c","arguments":%s1%s}]}'
        % (b'{"a":' * depth, b"}" * depth, b'{"a":' * depth, b"}" * depth)
        for depth in (100, 300, 480, 700, 950)
    ),
    *(
        b'{"messages":[{"role":"user","content":[%s{"type":"text","text":"x"}%s]}],"input":"x"}'
        % (
            b'{"type":"document","source":{"type":"content","content":[' * depth,
            b"]}}" * depth,
        )
        for depth in (2, 100, 300)
    ),
    *(
        b'{"messages":[{"role":"user","content":"x"}],"input":"x","tools":[{"name":"f","input_schema":{}}],'
        b'"tool_choice":%s"auto"%s}' % (b'{"type":"allowed_tools","allowed_tools":{"tools":[' * depth, b"]}}" * depth)
        for depth in (1, 200, 320)
    ),
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","metadata":%s}' % (b'{"a":' * 900 + b"1" + b"}" * 900),
]


@pytest.mark.parametrize("data", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize("dialect", READERS)
def test_depth_is_refused_or_carried(dialect, data):
    _refused(dialect, data)


@pytest.mark.parametrize("dialect", READERS)
def test_size_alone_is_no_reason_to_fail(dialect):
    turns = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(20_000)]
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2_000)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "r"} for n in reversed(range(2_000))]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}}
    blocks = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}} for n in range(2_000)]
    back = [{"type": "tool_result", "tool_use_id": f"c{n}"} for n in reversed(range(2_000))]
    bodies = {
        "chat": {"messages": [*turns, {"role": "assistant", "tool_calls": calls}, *results]},
        "responses": {"input": [*turns, {"role": "user", "content": [{"type": "input_text", "text": "x" * 2**22}]}]},
        "messages": {
            "messages": [
                *turns,
                {"role": "user", "content": [image] * 8},
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": back},
            ]
        },
    }
    assert not _refused(dialect, json.dumps(bodies[dialect]).encode())

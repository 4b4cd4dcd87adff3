"""Random shapes of requests: answered or refused by name, never a 500, and what was answered is on record."""

from __future__ import annotations

import random

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.dialects.chat_request import clean_chat_body, request_from_chat, request_to_chat
from toprope.dialects.responses import request_from_responses

ROLES = ["user", "assistant", "system", "developer", "tool", None]
TYPES = [
    "message", "reasoning", "function_call", "function_call_output", "text", "input_text", "output_text", "image_url",
    "input_image", "file", "input_file", "thinking", "tool_use", "custom", "function", "refusal", "summary_text",
    "allowed_tools", "json_schema", None,
]  # fmt: skip
NAMES = [
    "role", "content", "type", "tool_calls", "function", "id", "call_id", "arguments", "summary", "output", "text",
    "name", "image_url", "file", "refusal", "reasoning_content", "thinking_blocks", "function_call", "thinking",
    "input", "custom", "provider_specific_fields", "tools", "detail",
]  # fmt: skip


def _value(rng, depth):
    pick = rng.random()
    if depth > 3 or pick < 0.35:
        return rng.choice([None, True, 0, 1.5, "x", "", [], {}, *TYPES])
    return [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))] if pick < 0.65 else _thing(rng, depth + 1)


def _thing(rng, depth):
    thing = {name: _value(rng, depth) for name in rng.sample(NAMES, rng.randint(0, 5))}
    if rng.random() < 0.7:
        thing["role"] = rng.choice(ROLES)
    if rng.random() < 0.7:
        thing["type"] = rng.choice(TYPES)
    return thing


MORE = ["tools", "tool_choice", "text", "reasoning", "response_format", "functions", "stop", "instructions", "metadata"]


async def test_no_shape_of_a_request_breaks_the_server_or_a_converter(serve):
    rng = random.Random(20)
    store = MemoryStore()
    answered = 0
    async with serve(recorder=Recorder(store, reader=store)) as (peer, _):
        for number in range(1500):
            things = [_thing(rng, 0) for _ in range(rng.randint(1, 3))]
            more = {name: _value(rng, 0) for name in rng.sample(MORE, rng.randint(0, 2))}
            chat = number % 2
            path, name = ("/v1/chat/completions", "messages") if chat else ("/v1/responses", "input")
            body = {name: things, **more}
            key = f"r{number}"
            reply = await peer.request("POST", f"/ng-rollout/{key}/training-token-capture{path}", body=body)
            assert reply.status in (200, 400), (body, reply.text)
            if reply.status == 400:
                assert reply.headers["x-should-retry"] == "false"
                continue
            answered += 1
            snapshot = await store.freeze(key)
            assert (len(snapshot.entries), snapshot.incomplete) == (1, False), (body, snapshot.reasons)
            request_to_chat((request_from_chat if chat else request_from_responses)(body))
            if chat:
                clean_chat_body(body)
    assert answered > 300

"""The public `openai` client, unchanged, against a model server on a real socket: chat, responses, tools."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import openai
import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.http.serve import serve
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply
from toprope.trajectory.build import Trainable, build

SCRIPT = [
    ScriptedReply(reasoning="I need the tool.", calls=[ScriptedCall("add", '{ "a" : 2,"b":3 }')]),
    ScriptedReply(text="The sum is 5. \u2028 caf\u00e9"),
]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@asynccontextmanager
async def policy(script, **settings):
    store = MemoryStore()
    engine = ScriptedEngine(script=script)
    recorder = Recorder(store, reader=store)
    server = ModelServer(name="policy", engine=engine, recorder=recorder, **settings)
    await server.app.start()
    bound = await serve(server.app)
    base = f"{bound.url}/ng-rollout/task-1/training-token-capture/v1"
    client = openai.AsyncOpenAI(base_url=base, api_key="dummy", max_retries=2)
    try:
        yield client, store, engine
    finally:
        await client.close()
        await bound.close()
        await server.app.stop()
        await recorder.close()


def check_whole(snapshot, calls):
    """Every call is on record, each a continuation of the one before, and the rollout can be trained on."""
    assert len(snapshot.entries) == calls
    assert not snapshot.incomplete
    built = build(snapshot)
    assert isinstance(built, Trainable)
    (trace,) = built.traces
    sampled = np.concatenate([entry.generation_token_ids for entry in snapshot.entries])
    assert np.asarray(trace.token_ids)[np.asarray(trace.loss_mask, dtype=bool)].tolist() == sampled.tolist()


@pytest.mark.promise("MS-8")
async def test_chat_with_a_tool_over_two_turns():
    async with policy(SCRIPT) as (client, store, engine):
        messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "2 + 3?"}]
        tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}]
        first = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        (call,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        assert call.function.arguments == '{ "a" : 2,"b":3 }'
        messages += [
            first.choices[0].message.model_dump(),  # with every null and extra that the library keeps
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": str(sum(json.loads(call.function.arguments).values())),
            },
        ]
        second = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert second.choices[0].message.content == "The sum is 5. \u2028 caf\u00e9"
        assert second.usage.completion_tokens > 0
        check_whole(await store.freeze("task-1"), 2)
        assert engine.requests[-1].session == "task-1"


@pytest.mark.promise("MS-8")
async def test_responses_with_a_tool_over_two_turns():
    async with policy(SCRIPT) as (client, store, _):
        items = [{"role": "user", "content": "2 + 3?"}]
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
        first = await client.responses.create(model="m", instructions="add", input=items, tools=tools)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        call = first.output[-1]
        assert call.arguments == '{ "a" : 2,"b":3 }'
        items += [item.model_dump() for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        second = await client.responses.create(model="m", instructions="add", input=items, tools=tools)
        assert second.output_text == "The sum is 5. \u2028 caf\u00e9"
        assert second.status == "completed"
        snapshot = await store.freeze("task-1")
        check_whole(snapshot, 2)
        assert [entry.response_id for entry in snapshot.entries] == [first.id, second.id]


@pytest.mark.promise("MS-1")
async def test_the_same_conversation_in_two_dialects_gives_the_same_record():
    entries = {}
    async with policy([ScriptedReply(text="four", reasoning="2 and 2")]) as (client, store, _):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "2 + 2?"}])
        entries["chat"] = (await store.freeze("task-1")).entries[0].model_dump()
    async with policy([ScriptedReply(text="four", reasoning="2 and 2")]) as (client, store, _):
        await client.responses.create(model="m", input="2 + 2?")
        entries["responses"] = (await store.freeze("task-1")).entries[0].model_dump()
    for entry in entries.values():
        for minted in ("dialect", "model_call_id", "created_at", "response_id", "request_digest"):
            entry.pop(minted)
        for item in entry["output_items"]:
            item.pop("id")
    assert entries["chat"] == entries["responses"]


@pytest.mark.promise("MS-8")
async def test_the_library_repeats_what_may_pass_and_obeys_a_refusal():
    script = [
        {"text": "ok", "when": {"contains": "fine"}},
        {"fault": {"status": 401, "message": "bad key", "kind": "model_auth"}, "when": {"contains": "secret"}},
        {"fault": {"status": 503, "message": "busy"}, "when": {"contains": "busy"}},
    ]
    async with policy(script) as (client, store, engine):
        with pytest.raises(openai.AuthenticationError, match="bad key"):
            await client.responses.create(model="m", input="secret")
        assert engine.calls == 1
        with pytest.raises(openai.InternalServerError, match="busy"):
            await client.with_options(max_retries=1).responses.create(model="m", input="busy")
        assert engine.calls == 3
        await client.responses.create(model="m", input="fine")
        await store.freeze("task-1")
        with pytest.raises(openai.PermissionDeniedError):
            await client.responses.create(model="m", input="fine")
        assert engine.calls == 4


async def test_the_library_lists_models():
    async with policy(["x"]) as (client, _, _):
        assert [model.id async for model in client.models.list()] == ["scripted"]

"""The public `openai` and `anthropic` clients, unchanged, against a model server on a real socket.

Plain and streamed, with tools over two turns, with their own retries; what was captured is audited.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import anthropic
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
async def policy(script, *, family="openai", kind=ModelServer, **settings):
    store = MemoryStore()
    engine = ScriptedEngine(script=script)
    recorder = Recorder(store, reader=store)
    server = kind(name="policy", engine=engine, recorder=recorder, **settings)
    await server.app.start()
    bound = await serve(server.app)
    root = f"{bound.url}/ng-rollout/task-1/training-token-capture"
    client: Any = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="dummy", max_retries=2)
    if family == "anthropic":
        client = anthropic.AsyncAnthropic(base_url=root, api_key="dummy", max_retries=2)
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


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("MS-8")
async def test_chat_streamed_with_a_tool_over_two_turns():
    async with policy(SCRIPT) as (client, store, _):
        messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "2 + 3?"}]
        tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}]
        ask = {"model": "m", "tools": tools, "stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(messages=messages, **ask) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.delta") > 1
        (call,) = first.choices[0].message.tool_calls
        assert (first.choices[0].finish_reason, call.function.arguments) == ("tool_calls", '{ "a" : 2,"b":3 }')
        messages += [
            first.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        async with client.chat.completions.stream(messages=messages, **ask) as stream:
            second = await stream.get_final_completion()
        assert second.choices[0].message.content == "The sum is 5. \u2028 caf\u00e9"
        assert second.usage.completion_tokens > 0
        check_whole(await store.freeze("task-1"), 2)


@pytest.mark.promise("MS-8")
async def test_responses_streamed_with_a_tool_over_two_turns():
    async with policy(SCRIPT) as (client, store, _):
        items = [{"role": "user", "content": "2 + 3?"}]
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
        ask = {"model": "m", "instructions": "add", "tools": tools}
        async with client.responses.stream(input=items, **ask) as stream:
            first = await stream.get_final_response()
        call = first.output[-1]
        assert (first.status, call.arguments) == ("completed", '{ "a" : 2,"b":3 }')
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        async with client.responses.stream(input=items, **ask) as stream:
            kinds = {event.type async for event in stream}
            second = await stream.get_final_response()
        assert second.output_text == "The sum is 5. \u2028 caf\u00e9"
        assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
        snapshot = await store.freeze("task-1")
        check_whole(snapshot, 2)
        assert [entry.response_id for entry in snapshot.entries] == [first.id, second.id]


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("MS-5")
@pytest.mark.promise("MS-8")
@pytest.mark.parametrize("streamed", [False, True])
async def test_messages_with_a_tool_over_two_turns(streamed):
    """The client carries an object; what goes upstream the second time are the bytes that were sampled."""
    async with policy(SCRIPT, family="anthropic") as (client, store, engine):
        messages = [{"role": "user", "content": "2 + 3?"}]
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        ask = {"model": "m", "max_tokens": 100, "system": "add", "tools": tools}
        first = await said(client, streamed, messages=messages, **ask)
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        assert (first.stop_reason, first.content[1].input) == ("tool_use", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "5"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = await said(client, streamed, messages=messages, **ask)
        assert second.content[0].text == "The sum is 5. \u2028 caf\u00e9"
        assert (second.stop_reason, second.usage.output_tokens > 0) == ("end_turn", True)
        snapshot = await store.freeze("task-1")
        check_whole(snapshot, 2)
        assert [entry.response_id for entry in snapshot.entries] == [first.id, second.id]
        (call,) = [item for item in engine.requests[-1].request.input if item["type"] == "function_call"]
        assert call["arguments"] == '{ "a" : 2,"b":3 }'


async def said(client, streamed, **ask):
    """One message, read as a stream or plain."""
    if not streamed:
        return await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        return await stream.get_final_message()


async def test_the_anthropic_library_counts_tokens_and_lists_models():
    async with policy(["x"], family="anthropic") as (client, store, engine):
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "how many?"}])
        assert counted.input_tokens > 0
        assert [model.id async for model in client.models.list()] == ["scripted"]
        assert engine.calls == 0
        assert (await store.freeze("task-1")).reasons == ()


@pytest.mark.promise("MS-8")
async def test_the_anthropic_library_repeats_what_may_pass_and_obeys_a_refusal():
    script = [
        {"text": "ok", "when": {"contains": "fine"}},
        {"fault": {"status": 401, "message": "bad key", "kind": "model_auth"}, "when": {"contains": "secret"}},
        {"fault": {"status": 503, "message": "busy"}, "when": {"contains": "busy"}},
    ]

    async with policy(script, family="anthropic") as (client, store, engine):

        async def ask(text, **options):
            messages = [{"role": "user", "content": text}]
            return await client.with_options(**options).messages.create(model="m", max_tokens=9, messages=messages)

        with pytest.raises(anthropic.AuthenticationError, match="bad key"):
            await ask("secret")
        assert engine.calls == 1
        with pytest.raises(anthropic.APIStatusError, match="busy"):
            await ask("busy", max_retries=1)
        assert engine.calls == 3
        await ask("fine")
        await store.freeze("task-1")
        with pytest.raises(anthropic.PermissionDeniedError):
            await ask("fine")
        assert engine.calls == 4


@pytest.mark.promise("MS-4")
@pytest.mark.parametrize("family", ["openai", "anthropic"])
async def test_a7_a_library_that_times_out_and_retries_gets_the_one_answer_that_was_sampled(family):
    tried, go = [], asyncio.Event()

    async def slow(told):
        tried.append(told)
        await go.wait()
        return f"answer {len(tried)}"

    class Counting(ModelServer):
        async def answer(self, dialect, request):
            if request.headers.get("x-stainless-retry-count") == "1":
                go.set()
            return await super().answer(dialect, request)

    async with policy(slow, family=family, kind=Counting) as (client, store, _):
        impatient = client.with_options(timeout=0.5, max_retries=5)
        messages = [{"role": "user", "content": "x"}]
        if family == "openai":
            reply = await impatient.chat.completions.create(model="m", messages=messages)
            text = reply.choices[0].message.content
        else:
            reply = await impatient.messages.create(model="m", max_tokens=9, messages=messages)
            text = reply.content[0].text
        assert (text, len(tried)) == ("answer 1", 1)
        check_whole(await store.freeze("task-1"), 1)

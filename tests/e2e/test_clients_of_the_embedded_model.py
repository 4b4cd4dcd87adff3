"""The public clients, unchanged, read streams of the real model inside the server: what left is what was finished."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.http.serve import serve
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.servers.model.server import ModelServer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@asynccontextmanager
async def model():
    """The base URL of a captured rollout at a model server with the embedded engine, and its record."""
    store = MemoryStore()
    engine = EmbeddedEngine(context=512, max_sequences=2)
    server = ModelServer(name="policy", engine=engine, recorder=Recorder(store, reader=store))
    await server.app.start()
    bound = await serve(server.app)
    try:
        yield f"{bound.url}/ng-rollout/task-1/training-token-capture", store
    finally:
        await bound.close()
        await server.app.stop()


@pytest.mark.promise("MS-8")
async def test_streams_of_the_embedded_model_end_well_in_all_dialects_with_text_and_with_calls():
    async with model() as (root, store):
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="dummy", max_retries=0) as client:
            said = {"model": "m", "input": "2+2?", "max_output_tokens": 8}
            final = await responses(client, **said)
            (item,) = final.output
            assert (item.type, final.usage.output_tokens > 0) == ("message", True)
            tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
            final = await responses(client, **{**said, "max_output_tokens": 64}, tools=[tool], tool_choice="required")
            assert [each.type for each in final.output] == ["function_call"]
            ask = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 8}
            text, names, finish = await chat(client, **ask)
            assert (bool(text), names) == (True, [])
            assert finish in ("stop", "length")
            tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
            told = await chat(client, **{**ask, "max_tokens": 64}, tools=[tool], tool_choice="required")
            assert told == ("", ["add"], "tool_calls")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="dummy", max_retries=0) as client:
            async with client.messages.stream(**ask) as stream:
                told = await stream.get_final_message()
            assert [block.type for block in told.content] == ["text"]
            tool, choice = {"name": "add", "input_schema": SCHEMA, "strict": True}, {"type": "any"}
            async with client.messages.stream(**{**ask, "max_tokens": 64}, tools=[tool], tool_choice=choice) as stream:
                told = await stream.get_final_message()
            assert [block.type for block in told.content] == ["tool_use"]
        snapshot = await store.freeze("task-1")
    assert (len(snapshot.entries), list(snapshot.reasons)) == (6, [])


async def responses(client, **ask):
    """The final response; the ids of its items are those that its deltas carried."""
    seen, final = {}, None
    async for event in await client.responses.create(**ask, stream=True):
        if event.type == "response.output_item.added":
            seen[event.output_index] = event.item.id
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert final is not None
    assert [item.id for item in final.output] == list(seen.values())
    return final


async def chat(client, **ask):
    """(text, names of calls, finish reason) that the chunks add up to."""
    text, names, finish = "", [], None
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            names += [call.function.name for call in choice.delta.tool_calls or () if call.function.name]
            finish = choice.finish_reason or finish
    return text, names, finish

"""An engine behind a model server, all on real sockets: streams are real, faults cut, nobody leaks a connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.tree import TransportError
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer
from toprope.testing.upstream import ScriptedUpstream, completion, error, serving
from toprope.testing.upstream_stream import chunk, stream, usage_chunk
from toprope.trajectory.build import Trainable, build

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "m", "stream": True, "input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 99},
}
ENDS = (b"[DONE]", b'"finish_reason":"stop"', b"response.completed", b"message_stop", b'"stop_reason":"end_turn"')
STOP = chunk({}, finish_reason="stop")


@asynccontextmanager
async def house(upstream, recorder=None):
    """(client's peer, the server): client -> model server -> upstream, each over HTTP."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(upstream))
        client = await stack.enter_async_context(Client(transport_budget_s=1.0))
        ids = recorder is not None
        engine = OpenAIEngine(client=client, base_url=f"{url}/v1", max_attempts=1, return_token_ids=ids)
        server = ModelServer(name="policy", engine=engine, recorder=recorder)
        bound = await serve(server.app)
        stack.push_async_callback(bound.close, drain_s=1.0)
        yield client.peer(bound.url, None), server


async def read_until(reply, words):
    """What was read once `words` stood in it."""
    seen = b""
    while words not in seen:
        seen += await anext(reply)
    return seen


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("path", CALLS)
async def test_the_upstream_says_delta_k_plus_1_only_after_the_client_read_delta_k(path):
    words = [b"alpha", b"beta", b"gamma"]
    gates = [asyncio.Event() for _ in words]
    pieces = [
        each for word, gate in zip(words, gates, strict=True) for each in (chunk({"content": word.decode()}), gate.wait)
    ]
    async with (
        house(ScriptedUpstream([stream([*pieces, STOP])])) as (peer, _),
        peer.stream("POST", path, body=CALLS[path], timeout_s=30) as reply,
    ):
        assert reply.status == 200
        for word, gate in zip(words, gates, strict=True):
            seen = await read_until(reply, word)
            assert not any(end in seen for end in ENDS)
            gate.set()
        rest = b"".join([piece async for piece in reply])  # the body ends, cleanly
        assert any(end in rest for end in ENDS)


@pytest.mark.promise("MS-10")
@pytest.mark.parametrize("path", CALLS)
async def test_an_upstream_that_dies_in_mid_stream_cuts_the_client_and_one_before_it_is_a_status(path):
    upstream = ScriptedUpstream(
        [stream([chunk({"content": "alpha"})], end="cut"), stream([], end="cut"), error(429, "slow", retry_after="7")]
    )
    async with house(upstream) as (peer, _):
        async with peer.stream("POST", path, body=CALLS[path], timeout_s=30) as reply:
            await read_until(reply, b"alpha")
            with pytest.raises(TransportError, match="cut off"):
                await reply.whole()
        for words in (b"did not answer", b"slow"):
            async with peer.stream("POST", path, body=CALLS[path], timeout_s=30) as reply:
                refused = await reply.whole()
                assert (refused.status, words in refused.body) == (503, True)
        assert refused.headers["retry-after"] == "7"


@pytest.mark.promise("MS-3")
async def test_clients_that_leave_after_the_first_delta_leave_no_call_and_no_connection_upstream():
    gate = asyncio.Event()
    upstream = ScriptedUpstream(answer=lambda request: stream([chunk({"content": "alpha"}), gate.wait, STOP]))
    async with house(upstream) as (peer, server):
        for number in range(30):
            path = list(CALLS)[number % 3]
            async with peer.stream("POST", path, body=CALLS[path], timeout_s=30) as reply:
                await read_until(reply, b"alpha")
        gate.set()
        await asyncio.wait_for(upstream.idle.wait(), 20)
        await server.app.stop(drain_s=10)
        assert upstream.open == 0
    assert len(upstream.requests) == 30


ADD = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def sampled(delta, *ids, **more):
    return chunk(delta, token_ids=list(ids), log_probs=[-0.5] * len(ids), **more)


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "deltas",
    [
        [{"tool_calls": [ADD]}, {"content": "late"}],
        [{"content": "on time, "}, {"tool_calls": [ADD]}, {"content": "late"}],
        [{"content": "late"}, {"reasoning_content": "hm"}],
        [{"content": "late\ud83d"}, {"tool_calls": [ADD]}],
        [{"content": "late"}, {"tool_calls": [ADD]}, {"tool_calls": [ADD]}],
        [{"content": "x"}, {"reasoning": "b"}, {"refusal": "late"}],
        [{"content": "x"}, {"reasoning": "late"}, {"function_call": {"name": "f", "arguments": "{}"}}],
        [{"content": "x"}, {"reasoning": "b"}, {"content": [PICTURE]}, {"content": "late"}],
        [{"content": "late"}, {"images": [PICTURE]}],
    ],
    ids=[
        "text last",
        "text round a call",
        "a thought last",
        "half a character",
        "a call twice",
        "a refusal after a thought",
        "an old call after a thought",
        "an image after a thought",
        "images beside text",
    ],
)
async def test_a_stream_in_an_odd_order_comes_whole_and_trains_in_every_dialect(path, deltas):
    store = MemoryStore()
    said = [sampled(delta, 50 + place) for place, delta in enumerate(deltas)]
    end = [sampled({}, 2, finish_reason="stop"), usage_chunk(3, len(deltas) + 1)]
    upstream = ScriptedUpstream([stream([chunk({}, prompt_token_ids=[1, 2, 3]), *said, *end])])
    async with house(upstream, Recorder(store, reader=store)) as (peer, _):
        captured = f"/ng-rollout/r/training-token-capture{path}"
        async with peer.stream("POST", captured, body=CALLS[path], timeout_s=30) as reply:
            body = b"".join([piece async for piece in reply])
    assert b"late" in body
    assert any(end in body for end in ENDS)
    snapshot = await store.freeze("r")
    assert snapshot.entries[0].generation_token_ids.tolist() == [*range(50, 50 + len(deltas)), 2]
    assert isinstance(build(snapshot), Trainable)


SIGNED = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": "{}"},
    "extra_content": {"sign": "SIG"},
}
DETAILS = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "zzz"}]}


@pytest.mark.promise("MS-2")
@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", list(CALLS)[:2])
async def test_what_a_provider_wants_back_goes_to_the_client_and_back_and_the_turns_train(path, streamed):
    """Gemini signs its calls, OpenRouter seals its thoughts; both must see that again in the next turn."""
    store = MemoryStore()
    if streamed:
        told = [{"tool_calls": [{"index": 0, **SIGNED}]}, DETAILS]
        said = [sampled(delta, 50 + place) for place, delta in enumerate(told)]
        end = [sampled({}, 2, finish_reason="tool_calls"), usage_chunk(3, 3)]
        first = stream([chunk({}, prompt_token_ids=[1, 2, 3]), *said, *end])
    else:
        message = {"role": "assistant", "content": None, "tool_calls": [SIGNED], **DETAILS}
        ids = {"prompt_token_ids": [1, 2, 3], "token_ids": [50, 51, 2], "log_probs": [-0.5] * 3}
        first = completion(message, finish_reason="tool_calls", **ids)
    last = completion(prompt_token_ids=[1, 2, 3, 50, 51, 2, 9], token_ids=[60, 2], log_probs=[-0.5] * 2)
    upstream = ScriptedUpstream([first, last])
    chat = path.endswith("completions")
    async with house(upstream, Recorder(store, reader=store)) as (peer, _):
        captured = f"/ng-rollout/r/training-token-capture{path}"
        ask = {**CALLS[path], "stream": streamed}
        reply = await peer.request("POST", captured, body=ask)
        told = _put_together(reply, chat=chat, streamed=streamed)
        if chat:
            turn = {"role": "assistant", **told}
            more = [*ask["messages"], turn, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
            ask = {**ask, "stream": False, "messages": more}
        else:
            result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
            ask = {**ask, "stream": False, "input": [{"role": "user", "content": "x"}, *told, result]}
        assert (await peer.request("POST", captured, body=ask)).status == 200
    sent = upstream.requests[1].json()["messages"][1]
    assert {"content": None, **sent} == {"role": "assistant", "content": None, "tool_calls": [SIGNED], **DETAILS}
    snapshot = await store.freeze("r")
    trained = build(snapshot)
    assert isinstance(trained, Trainable), snapshot.reasons
    assert len(snapshot.entries) == 2


def _put_together(reply, *, chat, streamed):
    """What a client has of a reply with one call: the fields of its message, or the output items."""
    assert reply.status == 200
    if not streamed:
        body = json.loads(reply.body)
        return {k: v for k, v in body["choices"][0]["message"].items() if v is not None} if chat else body["output"]
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: {")]
    if not chat:
        return events[-1]["response"]["output"]
    whole, call = {}, {}
    for event in events:
        delta = event["choices"][0]["delta"]
        for piece in delta.pop("tool_calls", ()):
            call.update(piece)
        whole.update({k: v for k, v in delta.items() if v is not None})
    del call["index"]
    return {**whole, "tool_calls": [call]}


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("end", "why"),
    [
        ([sampled({}, 2, finish_reason="stop"), usage_chunk(30, 2)], "length_mismatch"),
        ([sampled({}, 2, finish_reason="stop"), {"choices": [], "usage": {"prompt_tokens": "x"}}], "length_mismatch"),
        ([sampled({}, 2), usage_chunk(3, 2)], "no_token_ids"),
        ([sampled({}, 2, finish_reason="banana"), usage_chunk(3, 2)], "no_token_ids"),
        ([sampled({}, 2, finish_reason="stop"), sampled({"content": "MORE"}, 9), usage_chunk(3, 3)], "no_token_ids"),
        ([sampled({}, 2, finish_reason="stop", prompt_token_ids=[9])], "no_token_ids"),
    ],
    ids=["another prompt", "a count that is none", "no finish", "an unknown finish", "more after it", "two prompts"],
)
async def test_a_reply_that_contradicts_itself_reaches_the_client_and_is_never_trained(path, end, why):
    store = MemoryStore()
    said = [chunk({}, prompt_token_ids=[1, 2, 3]), sampled({"content": "text"}, 50)]
    async with house(ScriptedUpstream([stream([*said, *end])]), Recorder(store, reader=store)) as (peer, _):
        captured = f"/ng-rollout/r/training-token-capture{path}"
        async with peer.stream("POST", captured, body=CALLS[path], timeout_s=30) as reply:
            body = b"".join([piece async for piece in reply])
    assert b"text" in body
    assert any(end in body for end in ENDS)
    snapshot = await store.freeze("r")
    assert (snapshot.entries, [reason.partition(":")[0] for reason in snapshot.reasons]) == ((), [why])

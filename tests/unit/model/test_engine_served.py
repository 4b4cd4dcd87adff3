"""An engine behind a model server, all on real sockets: streams are real, faults cut, nobody leaks a connection."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.tree import TransportError
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer
from toprope.testing.upstream import ScriptedUpstream, error, serving
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
    ],
    ids=["text last", "text round a call", "a thought last", "half a character", "a call twice"],
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

"""The vLLM engine against a stand-in on a real socket that follows stock vLLM's rules."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import ConfigError, EngineUnavailable, ModelAuth, ModelContextLength
from toprope.http.client import Client
from toprope.servers.model.engines.base import EngineRequest, StreamDied
from toprope.servers.model.engines.vllm import VllmEngine
from toprope.testing.upstream import ScriptedUpstream, error, serving
from toprope.testing.upstream_stream import chunk, stream
from toprope.testing.vllm_stand_in import EOS, VllmStandIn
from toprope.tokens.entry import BadRecord, as_log_probs

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
READ = {"chat": request_from_chat, "responses": request_from_responses, "messages": request_from_messages}
BODIES = {
    "chat": CHAT,
    "responses": {"model": "m", "input": "x"},
    "messages": {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]},
}


def ask(body=CHAT, *, dialect="chat", call_id="call-1", **more):
    return EngineRequest(READ[dialect](body), call_id, dialect=dialect, body=body, want_tokens=True, **more)


async def no_pause(delay):
    return None


@pytest.fixture
async def client():
    async with Client(connect_timeout_s=1.0, transport_budget_s=0.3) as made:
        yield made


def dead_url():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@asynccontextmanager
async def started(client, *upstreams, **more):
    async with AsyncExitStack() as stack:
        urls = [f"{await stack.enter_async_context(serving(each))}/v1" for each in upstreams]
        engine = VllmEngine(client=client, base_url=urls[0], replicas=urls[1:], pause=no_pause, **more)
        await engine.start()
        for each in upstreams:
            each.requests.clear()
        yield engine


# The probe


async def test_the_start_proves_ids_plain_and_streamed_and_prompts_of_ids(client):
    upstream = VllmStandIn(max_model_len=777)
    async with serving(upstream) as url:
        engine = VllmEngine(client=client, base_url=f"{url}/v1")
        await engine.start()
    plain, streamed = (request.json() for request in upstream.requests)
    assert (plain["max_tokens"], "stream" in plain) == (1, False)
    assert streamed["stream"] is True
    assert streamed["kv_transfer_params"]["prompt_token_ids"][:-1] == upstream.prompt_of(plain)
    assert engine.capabilities.returns_ids
    assert engine.capabilities.streams_ids
    assert engine.capabilities.accepts_token_prompt
    assert engine.max_model_len == 777


@pytest.mark.parametrize("how", ["ignored", "refused", "switched off"])
async def test_prompts_of_ids_that_are_not_obeyed_are_declared_so(client, how):
    upstream = VllmStandIn()
    upstream.obeys_prompts = how != "ignored"
    upstream.refuses = "kv_transfer_params" if how == "refused" else None
    async with started(client, upstream, token_prompts=how != "switched off") as engine:
        assert not engine.capabilities.accepts_token_prompt
        await engine.generate(ask(prompt_token_ids=np.array([7, 8], dtype=np.uint32)))
        assert "kv_transfer_params" not in upstream.requests[0].json()


@pytest.mark.parametrize("where", ["drops", "drops_in_streams"])
@pytest.mark.parametrize("lost", ["token_ids", "prompt_token_ids", "logprobs"])
async def test_an_endpoint_that_loses_ids_is_refused_at_the_start_by_what_it_lost(client, lost, where):
    upstream = VllmStandIn()
    getattr(upstream, where).add(lost)
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable, match=f"without {lost}") as caught:
            await VllmEngine(client=client, base_url=f"{url}/v1").start()
    assert url in caught.value.message
    assert ("streamed call" in caught.value.message) is (where == "drops_in_streams")
    assert "engine `openai`" in caught.value.message


async def test_a_placeholder_for_a_logprob_is_refused_at_the_start_and_by_the_record(client):
    upstream = VllmStandIn()
    async with started(client, upstream) as engine:
        upstream.placeholder = True
        for emit in (None, [].append):
            reply = await engine.generate(ask(emit=emit))
            with pytest.raises(BadRecord) as caught:
                as_log_probs(reply.tokens.generation_log_probs)
            assert caught.value.reason == "bad_logprob"
        with pytest.raises(EngineUnavailable, match="logprob"):
            await engine.start()


async def test_a_start_names_the_url_that_is_dead_wrong_or_silent(client):
    alive = VllmStandIn()
    silent = ScriptedUpstream(answer=lambda request: stream([], end="hang"))
    async with serving(alive) as url, serving(silent) as silent_url:
        for base_url, more, says in (
            (dead_url(), {}, "cannot be reached"),
            (url, {"model": "other"}, r"serves m; `model` is 'other'"),
            (silent_url, {"probe_timeout_s": 0.1}, r"within 0\.1 s"),
        ):
            with pytest.raises(EngineUnavailable, match=says) as caught:
                await VllmEngine(client=client, base_url=f"{base_url}/v1", **more).start()
            assert base_url in caught.value.message
        dead = dead_url()
        with pytest.raises(EngineUnavailable, match=dead):
            await VllmEngine(client=client, base_url=f"{url}/v1", replicas=[f"{dead}/v1"]).start()
        alive.models = error(401, "bad key")
        with pytest.raises(ModelAuth, match="bad key"):
            await VllmEngine(client=client, base_url=f"{url}/v1").start()


@pytest.mark.parametrize("model", [None, "a"])
async def test_replicas_that_serve_different_models_are_refused_at_the_start(client, model):
    async with serving(VllmStandIn(model="a")) as one, serving(VllmStandIn(model="b")) as two:
        engine = VllmEngine(client=client, base_url=f"{one}/v1", replicas=[f"{two}/v1"], model=model)
        with pytest.raises(EngineUnavailable, match="different models") as caught:
            await engine.start()
    assert f"{one}/v1 serves a; {two}/v1 serves b" in caught.value.message


async def test_replicas_that_render_a_prompt_differently_are_refused_at_the_start(client):
    other = VllmStandIn()
    other.closes_turns = True
    async with serving(VllmStandIn()) as one, serving(other) as two:
        with pytest.raises(EngineUnavailable, match="same tokeniser and the same chat template") as caught:
            await VllmEngine(client=client, base_url=f"{one}/v1", replicas=[f"{two}/v1"]).start()
    assert f"{two}/v1 renders a prompt to other ids than the one at {one}/v1" in caught.value.message


def test_a_probe_without_time_is_refused(client):
    with pytest.raises(ConfigError, match=r"probe_timeout_s 0: expected seconds above 0"):
        VllmEngine(client=client, base_url="http://a:1/v1", probe_timeout_s=0)


# Calls


@pytest.mark.promise("MS-1")
async def test_three_dialects_plain_and_streamed_have_the_same_ids(client):
    upstream = VllmStandIn(says="héllo 🦥")
    upstream.hold_back = True
    seen = []
    async with started(client, upstream) as engine:
        for dialect, body in BODIES.items():
            for emit in (None, [].append):
                reply = await engine.generate(ask(body, dialect=dialect, emit=emit))
                tokens = reply.tokens
                seen.append(
                    (
                        tokens.prompt_token_ids.tolist(),
                        tokens.generation_token_ids.tolist(),
                        tokens.generation_log_probs.tolist(),
                        reply.usage,
                        reply.finish_reason,
                        reply.output,
                    )
                )
    assert {request.path for request in upstream.requests} == {"/v1/chat/completions"}
    assert seen[0][1] == [*"héllo 🦥".encode(), EOS]
    assert all(each == seen[0] for each in seen)


@pytest.mark.promise("MS-6")
@pytest.mark.parametrize("asked", [{"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"top_logprobs": 3}])
async def test_no_client_switches_the_pins_off(client, asked):
    upstream = VllmStandIn()
    async with started(client, upstream) as engine:
        for emit in (None, [].append):
            reply = await engine.generate(ask({**CHAT, **asked, "return_token_ids": False}, emit=emit))
            assert reply.token_fault is None
            assert len(reply.tokens.generation_log_probs) == len(reply.tokens.generation_token_ids)
    for request in upstream.requests:
        sent = request.json()
        assert (sent["return_token_ids"], sent["logprobs"]) == (True, True)
        assert sent["top_logprobs"] == (asked.get("top_logprobs") or 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_of_ids_goes_beside_the_messages_and_comes_back(client, streamed):
    given = np.array([70_000, 8, 9], dtype=np.uint32)
    upstream = VllmStandIn()
    async with started(client, upstream) as engine:
        body = {**CHAT, "kv_transfer_params": {"mine": 1}}
        emit = [].append if streamed else None
        reply = await engine.generate(ask(body, prompt_token_ids=given, emit=emit))
    sent = upstream.requests[0].json()
    assert sent["messages"] == CHAT["messages"]
    assert sent["kv_transfer_params"] == {"mine": 1, "prompt_token_ids": [70_000, 8, 9]}
    assert reply.tokens.prompt_token_ids.tolist() == [70_000, 8, 9]


async def test_an_effort_beside_a_routers_settings_stands_where_vllm_reads_it(client):
    body = {**BODIES["responses"], "reasoning": {"effort": "low", "exclude": True}}
    upstream = VllmStandIn()
    async with started(client, upstream) as engine:
        await engine.generate(ask(body, dialect="responses"))
        await engine.generate(ask({**CHAT, "reasoning": {"effort": "low"}}))
    told, own = (request.json() for request in upstream.requests)
    assert (told["reasoning_effort"], told["reasoning"]) == ("low", {"effort": "low", "exclude": True})
    assert "reasoning_effort" not in own


async def test_a_prompt_beyond_the_context_is_the_clients_error_in_vllms_words(client):
    async with started(client, VllmStandIn(max_model_len=64)) as engine:
        for emit in (None, [].append):
            with pytest.raises(ModelContextLength, match="maximum context length is 64 tokens"):
                await engine.generate(ask({**CHAT, "messages": [{"role": "user", "content": "x" * 99}]}, emit=emit))


async def test_equal_response_ids_upstream_are_two_calls(client):
    upstream = VllmStandIn()
    async with started(client, upstream) as engine:
        one = await engine.generate(ask(call_id="call-1"))
        upstream.says = "other"
        two = await engine.generate(ask(call_id="call-2"))
    assert one.response_id == two.response_id
    assert one.output != two.output
    assert all("x-request-id" not in request.headers for request in upstream.requests)


@pytest.mark.promise("MS-10")
async def test_an_engine_that_dies_is_named_with_its_url(client):
    async with AsyncExitStack() as stack:
        upstream = VllmStandIn()
        url = await stack.enter_async_context(serving(upstream))
        engine = VllmEngine(client=client, base_url=f"{url}/v1", pause=no_pause)
        await engine.start()
        upstream._answer = lambda request: stream([chunk({"content": "a"}), asyncio.Event().wait])
        began = asyncio.Event()
        running = asyncio.create_task(engine.generate(ask(emit=lambda delta: began.set())))
        await asyncio.wait_for(began.wait(), 10)
        await stack.aclose()  # the engine goes down with the call in hand
        with pytest.raises(StreamDied, match=url):
            await running
        for emit in (None, [].append):
            with pytest.raises(EngineUnavailable, match=url):
                await engine.generate(ask(emit=emit))


async def test_the_shortest_context_of_all_replicas_counts_in_whichever_order(client):
    for sizes in ((64, 128), (128, 64)):
        async with started(client, *(VllmStandIn(max_model_len=size) for size in sizes)) as engine:
            assert engine.max_model_len == 64


# Replicas


async def test_a_rollout_stays_on_one_replica_and_new_ones_go_where_fewest_calls_are(client):
    one, two = VllmStandIn(says="one"), VllmStandIn(says="two")
    async with started(client, one, two) as engine:
        gate, arrived = asyncio.Event(), asyncio.Event()
        plain = one._answer

        def held(request):
            if b"held" not in request.body:
                return plain(request)
            arrived.set()
            return stream([gate.wait], done=False)

        one._answer = held
        busy = asyncio.create_task(engine.generate(ask({**CHAT, "user": "held"}, session="4-0", emit=[].append)))
        await asyncio.wait_for(arrived.wait(), 10)
        for _ in range(3):  # the first replica has a call in hand: the new rollouts live on the second
            for rollout in ("4-1", "4-2"):
                await engine.generate(ask(session=rollout))
        assert (len(one.requests), len(two.requests)) == (1, 6)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await engine.generate(ask(session="4-3"))
        await engine.generate(ask(session="4-2"))
        assert (len(one.requests), len(two.requests)) == (2, 7)


async def test_another_replica_takes_over_only_where_nothing_was_delivered(client):
    one, two = VllmStandIn(says="one"), VllmStandIn(says="two")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(one))
        async with serving(two) as second:
            engine = VllmEngine(client=client, base_url=f"{first}/v1", replicas=[f"{second}/v1"], pause=no_pause)
            await engine.start()
            two.requests.clear()
            one._answer = lambda request: stream([], end="cut")  # delivered, then dropped
            with pytest.raises(EngineUnavailable, match=first):
                await engine.generate(ask(session="4-1"))
            assert two.requests == []
            await stack.aclose()
            for emit in (None, [].append):
                reply = await engine.generate(ask(session="4-1", emit=emit))
                assert reply.output[0]["content"][0]["text"] == "two"
        with pytest.raises(EngineUnavailable):  # now both are gone
            await engine.generate(ask(session="4-1"))

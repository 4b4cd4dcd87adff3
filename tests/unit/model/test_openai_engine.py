"""The OpenAI-compatible engine against an endpoint on a real socket: what is sent, what is read, what is retried."""

from __future__ import annotations

import json
import socket
import time
from email.utils import formatdate

import pytest

from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, EngineError, EngineUnavailable, ModelAuth, ModelRejected
from toprope.http.client import Client
from toprope.servers.model.engines.base import EngineRequest
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, completion, error, serving
from toprope.testing.upstream_stream import event, stream

JSON = {"content-type": "application/json"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
GOOD = completion(prompt_token_ids=[1, 10], token_ids=[50, 2], log_probs=[-0.1, -0.2])


def ask(body=CHAT, *, dialect="chat", **more):
    pivot = request_from_chat(body) if dialect == "chat" else request_from_responses(body)
    return EngineRequest(pivot, "call-1", dialect=dialect, body=body, **more)


@pytest.fixture
async def client():
    async with Client(connect_timeout_s=1.0, transport_budget_s=1.0) as made:
        yield made


async def test_a_captured_call_pins_what_returns_ids_and_reads_them_exactly(client):
    upstream = ScriptedUpstream([GOOD])
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=f"{url}/v1", api_key="k", return_token_ids=True)
        reply = await engine.generate(ask({**CHAT, "top_logprobs": None}, want_tokens=True, session="4-2"))
    sent = upstream.requests[0]
    assert sent.path == "/v1/chat/completions"
    assert sent.headers["x-session-id"] == "4-2"
    assert sent.headers["authorization"] == "Bearer k"
    assert "x-toprope-protocol" not in sent.headers
    assert {name: sent.json()[name] for name in ("return_token_ids", "logprobs", "top_logprobs")} == {
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    assert reply.tokens is not None
    assert reply.tokens.prompt_token_ids.tolist() == [1, 10]
    assert reply.tokens.generation_token_ids.tolist() == [50, 2]
    assert reply.tokens.generation_log_probs.tolist() == [-0.1, -0.2]
    assert reply.token_fault is None


async def test_a_call_that_wants_no_tokens_is_sent_as_the_client_wrote_it(client):
    body = {**CHAT, "top_logprobs": None, "temperature": 0.25, "min_p": 0.1, "store": True, "n": 1}
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        reply = await OpenAIEngine(client=client, base_url=url, return_token_ids=True).generate(ask(body))
    assert upstream.requests[0].json() == {**CHAT, "temperature": 0.25, "min_p": 0.1, "store": True}
    assert (reply.tokens, reply.token_fault) == (None, None)


async def test_what_is_not_sent_of_a_chat_clients_own_turn_is_in_the_losses(client):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "signature": "s"}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "A"}]}
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        reply = await OpenAIEngine(client=client, base_url=url).generate(ask({**CHAT, "messages": [turn]}))
    sent = upstream.requests[0].json()["messages"]
    assert sent == [{"role": "assistant", "content": "A", "reasoning_content": "hm"}]
    assert reply.losses == ("items.message.thinking.signature",)


@pytest.mark.parametrize("stream_usage", [True, False])
async def test_stream_options_of_a_client_never_go_upstream(client, stream_usage):
    """Engines refuse them in a plain call with a 400; in a streamed one they are the server's."""
    upstream = ScriptedUpstream([completion(), completion()])
    own = {"include_usage": False, "include_obfuscation": True}
    body = {"model": "m", "max_tokens": 5, "messages": CHAT["messages"], "stream_options": own}
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url, stream_usage=stream_usage)
        for emit in (None, lambda delta: None):
            request = EngineRequest(request_from_messages(body), "call-1", dialect="messages", body=body, emit=emit)
            await engine.generate(request)
    sent = [request.json().get("stream_options") for request in upstream.requests]
    assert sent == [None, {"include_usage": True} if stream_usage else None]


async def test_other_dialects_are_converted_and_what_got_lost_is_said(client):
    body = {"input": "x", "instructions": "be brief", "tools": [{"type": "web_search"}], "max_output_tokens": 5}
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url, model="served")
        reply = await engine.generate(ask(body, dialect="responses"))
    assert upstream.requests[0].json() == {
        "model": "served",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}],
        "max_tokens": 5,
    }
    assert reply.losses == ("tools.web_search",)
    assert reply.output[0]["content"][0]["text"] == "hello"


async def test_an_image_that_an_assistant_turn_of_chat_cannot_hold_is_among_what_got_lost(client):
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    turn = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}, image]}
    body = {"input": [turn, {"role": "user", "content": "y"}]}
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url, model="served")
        reply = await engine.generate(ask(body, dialect="responses"))
    assert upstream.requests[0].json()["messages"][0] == {"role": "assistant", "content": "a"}
    assert reply.losses == ("items.message.input_image",)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_what_a_messages_client_is_not_told_of_a_reply_is_among_what_got_lost(client, dialect):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}, image], "images": [image]}
    read = {"chat": request_from_chat, "responses": request_from_responses, "messages": request_from_messages}[dialect]
    body = {"model": "m", "messages": CHAT["messages"], "input": "x"}
    upstream = ScriptedUpstream([completion(message)])
    async with serving(upstream) as url:
        request = EngineRequest(read(body), "call-1", dialect=dialect, body=body)
        reply = await OpenAIEngine(client=client, base_url=url, model="served").generate(request)
    told = ("reply.message.images", "reply.message.input_image")
    assert reply.losses == (told if dialect == "messages" else ())


@pytest.mark.parametrize("takes", [False, True])
async def test_custom_tools_go_to_an_endpoint_that_is_said_to_take_them_and_to_no_other(client, takes):
    """Open engines answer 400 to them: "'type' of tool must be 'function'"."""
    tools = [{"type": "function", "name": "a"}, {"type": "custom", "name": "sh"}]
    body = {"input": "x", "tools": tools, "tool_choice": {"type": "custom", "name": "sh"}}
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url, model="served", custom_tools=takes)
        reply = await engine.generate(ask(body, dialect="responses"))
    told = upstream.requests[0].json()
    custom = {"type": "custom", "custom": {"name": "sh"}}
    assert told["tools"] == [{"type": "function", "function": {"name": "a"}}, *([custom] if takes else [])]
    assert told.get("tool_choice") == (custom if takes else None)
    assert reply.losses == (() if takes else ("tools.custom", "tool_choice.custom"))


@pytest.mark.parametrize(
    ("upstream_reply", "pinned", "said"),
    [
        (completion(prompt_token_ids=[1], token_ids=[2]), True, "logprobs were asked for and not returned"),
        (completion(), True, "prompt ids, generated ids, logprobs were asked for and not returned"),
        (completion(), False, "not asked for"),
    ],
)
async def test_missing_ids_are_a_fault_with_words_and_not_a_failed_call(client, upstream_reply, pinned, said):
    async with serving(ScriptedUpstream([upstream_reply])) as url:
        engine = OpenAIEngine(client=client, base_url=url, return_token_ids=pinned)
        reply = await engine.generate(ask(want_tokens=True))
    assert reply.tokens is None
    assert reply.token_fault is not None
    assert reply.token_fault.startswith("no_token_ids: ")
    assert said in reply.token_fault


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (error(401, "bad key"), Kind.MODEL_AUTH, False),
        (error(402, "pay"), Kind.MODEL_QUOTA, False),
        (error(429, "no credit", code="insufficient_quota"), Kind.MODEL_QUOTA, False),
        (error(400, "maximum context length is 2048"), Kind.MODEL_CONTEXT_LENGTH, False),
        (
            UpstreamReply(b'{"error":{"message":"too long","param":"input_tokens"}}', 400),
            Kind.MODEL_CONTEXT_LENGTH,
            False,
        ),
        (error(400, "bad arguments"), Kind.MODEL_REJECTED, False),
        (error(404, "no such model"), Kind.MODEL_REJECTED, False),
        (UpstreamReply(b'{"detail":"no"}', 422), Kind.MODEL_REJECTED, False),
        (UpstreamReply(b"<html>bad gateway", 502), Kind.MODEL_UNAVAILABLE, True),
        (error(409, "locked"), Kind.MODEL_UNAVAILABLE, True),
    ],
)
async def test_a_providers_refusal_keeps_its_status_and_words(client, answer, kind, retryable):
    upstream = ScriptedUpstream(answer=lambda request: answer)
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url, pause=_no_pause)
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask())
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert caught.value.upstream_status == answer.status
    assert url in caught.value.message
    assert len(upstream.requests) == (3 if retryable else 1)


async def _no_pause(delay):
    return None


@pytest.mark.promise("MS-10")
async def test_429_and_5xx_share_one_counter_and_retry_after_is_honoured(client):
    pauses = []

    async def pause(delay):
        pauses.append(delay)

    upstream = ScriptedUpstream([error(429, "slow", retry_after="7"), error(500, "oops"), GOOD])
    async with serving(upstream) as url:
        reply = await OpenAIEngine(client=client, base_url=url, pause=pause).generate(ask())
    assert reply.finish_reason == "stop"
    assert pauses == [7.0, 1.0]


async def test_a_retry_after_beyond_the_bound_ends_it_at_once(client):
    upstream = ScriptedUpstream(answer=lambda request: error(429, "slow", retry_after="3600"))
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable) as caught:
            await OpenAIEngine(client=client, base_url=url, pause=_no_pause).generate(ask())
    assert len(upstream.requests) == 1
    assert caught.value.headers["retry-after"] == "3600"


@pytest.mark.parametrize("body", [b"<html>", b'{"choices":[]}', b'{"choices":[{"message":{"content":5}}]}'])
async def test_a_200_that_is_no_completion_is_the_engines_fault(client, body):
    async with serving(ScriptedUpstream([UpstreamReply(body)])) as url:
        with pytest.raises(EngineUnavailable, match="no chat completion"):
            await OpenAIEngine(client=client, base_url=url).generate(ask())


@pytest.mark.promise("MS-10")
async def test_a_dead_endpoint_is_named_at_start_with_its_url(client):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        engine = OpenAIEngine(client=client, base_url=url)
        with pytest.raises(EngineUnavailable, match=url):
            await engine.start()
        with pytest.raises(EngineUnavailable, match=url):
            await engine.generate(ask())


async def test_start_learns_the_only_model_and_accepts_endpoints_that_list_none(client):
    upstream = ScriptedUpstream([completion()])
    async with serving(upstream) as url:
        engine = OpenAIEngine(client=client, base_url=url)
        await engine.start()
        await engine.generate(ask({"input": "x"}, dialect="responses"))
        assert upstream.requests[0].json()["model"] == "m"
        upstream.models = error(404, "no such route")
        nameless = OpenAIEngine(client=client, base_url=url)
        await nameless.start()
        with pytest.raises(ModelRejected, match="names no model"):
            await nameless.generate(ask({"input": "x"}, dialect="responses"))
        upstream.models = error(401, "bad key")
        with pytest.raises(ModelAuth):
            await engine.start()


def test_a_base_url_that_is_none_is_a_configuration_error(client):
    with pytest.raises(ConfigError, match="base_url"):
        OpenAIEngine(client=client, base_url="localhost:8000/v1")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"retry_budget_s": -1.0}, "retry_budget_s -1.0: expected seconds, 0 or more"),
        ({"retry_budget_s": float("nan")}, "retry_budget_s nan: expected seconds, 0 or more"),
        ({"max_reply_bytes": 0}, "max_reply_bytes 0: expected at least 1"),
        ({"max_attempts": 0}, "max_attempts 0: expected at least 1"),
        ({"timeout_s": 0.0}, "timeout_s 0.0: expected seconds above 0"),
        ({"replicas": ["http://B:1/v1", "http://A:1/v1/"]}, "http://A:1/v1/ stands there twice"),
        ({"replicas": ["http://b:1/v1", "http://b:1/v1"]}, "http://b:1/v1 stands there twice"),
        ({"replicas": ["b:1/v1"]}, "replicas: URL"),
        ({"replicas": "http://b:1/v1"}, "expected a list of base URLs"),
    ],
)
async def test_bounds_and_replicas_that_cannot_be_are_refused_by_name(client, given, says):
    with pytest.raises(ConfigError) as caught:
        OpenAIEngine(client=client, base_url="http://a:1/v1", **given)
    assert says in caught.value.message
    OpenAIEngine(client=client, base_url="http://a:1/v1", replicas=["http://a:1/v2", "http://a:2/v1"], retry_budget_s=0)


def lists(*names):
    if not names:
        return UpstreamReply(b"{}", 404)
    return UpstreamReply(json.dumps({"data": [{"id": name} for name in names]}).encode())


async def test_replicas_that_list_the_same_models_in_any_order_are_one_engine(client):
    upstreams = [ScriptedUpstream() for _ in range(2)]
    for upstream, names in zip(upstreams, ("ab", "ba"), strict=True):
        upstream.models = lists(*names)
    async with serving(upstreams[0]) as one, serving(upstreams[1]) as two:
        engine = OpenAIEngine(client=client, base_url=f"{one}/v1", replicas=[f"{two}/v1"])
        await engine.start()
        with pytest.raises(ModelRejected, match="no single one"):
            await engine.generate(ask({**CHAT, "model": None}))


@pytest.mark.parametrize(
    ("first", "second", "model", "says"),
    [
        (("a",), ("b",), None, "without `model` they must all list the same"),
        (("a",), ("a", "b"), None, "without `model`"),
        (("a",), ("b",), "a", "`model` is 'a', which each must list"),
        (("a", "b"), ("b", "a"), "a", None),
        (("a",), ("b", "a"), "a", None),
        (("a",), (), None, None),
        ((), ("a",), "a", None),
        ((), (), "a", None),
    ],
)
async def test_replicas_that_serve_different_models_are_refused_at_the_start(client, first, second, model, says):
    upstreams = [ScriptedUpstream(answer=lambda request: GOOD) for _ in range(2)]
    for upstream, names in zip(upstreams, (first, second), strict=True):
        upstream.models = lists(*names)
    async with serving(upstreams[0]) as one, serving(upstreams[1]) as two:
        engine = OpenAIEngine(client=client, base_url=f"{one}/v1", replicas=[f"{two}/v1"], model=model)
        if says is None:
            await engine.start()
            reply = await engine.generate(ask({**CHAT, "model": None}))
            assert reply.finish_reason == "stop"
            assert {r.json()["model"] for each in upstreams for r in each.requests if r.body} == {"a"}
            return
        with pytest.raises(EngineUnavailable, match=says) as caught:
            await engine.start()
    assert not caught.value.retryable
    for url, names in ((one, first), (two, second)):
        assert f"{url}/v1 serves {', '.join(sorted(names))}" in caught.value.message


@pytest.mark.parametrize(
    ("told", "waits"),
    [
        (3_600.0, [(3_000.0, 3_600.0), (3_000.0, 3_600.0)]),
        (-60.0, [(0.0, 0.0), (0.0, 0.0)]),
        ("0", [(0.0, 0.0), (0.0, 0.0)]),
        *((odd, [(0.5, 0.5), (1.0, 1.0)]) for odd in ("nan", "-1", "inf", "-inf", "soon", "Mon, 99 Xyz 2026")),
    ],
)
async def test_a_retry_after_is_a_date_too_and_nonsense_is_not_at_once(client, told, waits):
    if isinstance(told, float):  # seconds from now
        told = formatdate(time.time() + told, usegmt=True)
    upstream, pauses = ScriptedUpstream(answer=lambda request: error(429, "slow", retry_after=told)), []

    async def pause(seconds):
        pauses.append(seconds)

    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable):
            await OpenAIEngine(client=client, base_url=url, retry_budget_s=9e9, pause=pause).generate(ask())
    assert [low <= seconds <= high for seconds, (low, high) in zip(pauses, waits, strict=True)] == [True, True]


@pytest.mark.parametrize("emit", [None, lambda delta: None])
@pytest.mark.parametrize(
    ("inner", "kind", "tries"),
    [
        ({"message": "You exceeded", "type": "insufficient_quota", "code": "insufficient_quota"}, Kind.MODEL_QUOTA, 1),
        ({"message": "no credit balance", "code": None}, Kind.MODEL_QUOTA, 1),
        ({"message": "maximum context length is 5", "code": "x"}, Kind.MODEL_CONTEXT_LENGTH, 1),
        ({"message": "no such model", "type": "invalid_request_error"}, Kind.MODEL_REJECTED, 1),
        ({"message": "bad key", "code": 401}, Kind.MODEL_AUTH, 1),
        ({"message": "slow down", "type": "rate_limit_exceeded"}, Kind.MODEL_UNAVAILABLE, 3),
        ({"message": "overloaded"}, Kind.MODEL_UNAVAILABLE, 3),
    ],
)
async def test_an_error_in_a_reply_of_200_is_read_as_one(client, inner, kind, tries, emit):
    upstream = ScriptedUpstream(answer=lambda request: UpstreamReply(json.dumps({"error": inner}).encode(), 200, JSON))

    async def pause(seconds):
        pass

    async with serving(upstream) as url:
        with pytest.raises(EngineError, match=inner["message"]) as caught:
            await OpenAIEngine(client=client, base_url=url, pause=pause).generate(ask(emit=emit))
    assert (caught.value.kind, len(upstream.requests)) == (kind, tries)
    assert caught.value.retryable == (tries > 1)


@pytest.mark.parametrize("emit", [None, lambda delta: None])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": "model overloaded"}, "model overloaded"),
        ({"error": "Bad", "message": "model overloaded"}, "model overloaded"),
        ({"error": True, "detail": "model overloaded"}, "model overloaded"),
        ({"error": {"message": "", "code": "overloaded"}}, '{"error": {"message": "", "code": "overloaded"}}'),
    ],
)
async def test_the_providers_words_are_shown_wherever_they_stand_and_nothing_round_them(
    client, body, says, status, emit
):
    upstream = ScriptedUpstream(answer=lambda request: UpstreamReply(json.dumps(body).encode(), status, JSON))
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable) as caught:
            await OpenAIEngine(client=client, base_url=url, pause=_no_pause).generate(ask(emit=emit))
    assert caught.value.message == f"{url}/chat/completions answered 500: {says}"


@pytest.mark.parametrize("emit", [None, lambda delta: None])
async def test_an_error_of_text_alone_in_a_200_is_read_for_what_it_means(client, emit):
    told = UpstreamReply(b'{"error": "maximum context length is 5"}', 200, JSON)
    upstream = ScriptedUpstream(answer=lambda request: told)
    async with serving(upstream) as url:
        with pytest.raises(EngineError) as caught:
            await OpenAIEngine(client=client, base_url=url, pause=_no_pause).generate(ask(emit=emit))
    assert (caught.value.kind, len(upstream.requests)) == (Kind.MODEL_CONTEXT_LENGTH, 1)


@pytest.mark.parametrize(
    ("bare", "kind"),
    [
        ({"message": "slow down", "code": 429}, Kind.MODEL_UNAVAILABLE),
        ({"message": "bad key", "code": 401}, Kind.MODEL_AUTH),
        ({"object": "error", "message": "no credit balance"}, Kind.MODEL_QUOTA),
        ({"detail": "too many tokens"}, Kind.MODEL_CONTEXT_LENGTH),
        ({"error": "no credit balance", "code": 402, "odd": float("nan")}, Kind.MODEL_QUOTA),
    ],
)
async def test_an_error_event_need_not_wrap_what_it_says(client, bare, kind):
    upstream = ScriptedUpstream(answer=lambda request: stream([event(bare, name="error")]))
    async with serving(upstream) as url:
        with pytest.raises(EngineError) as caught:
            await OpenAIEngine(client=client, base_url=url, pause=_no_pause).generate(ask(emit=lambda delta: None))
    says = next(value for value in bare.values() if isinstance(value, str) and value != "error")
    assert (caught.value.kind, caught.value.message.rpartition(": ")[2]) == (kind, says)

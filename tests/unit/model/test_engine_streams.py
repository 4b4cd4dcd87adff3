"""The OpenAI-compatible engine reading streams off a real socket: the same reply as a plain one, and every fault."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.deltas import TextDelta, ToolCallDelta
from toprope.errors.kinds import Kind
from toprope.errors.tree import EngineError, EngineUnavailable, ModelAuth, ModelContextLength
from toprope.http.client import Client
from toprope.servers.model.engines.base import EngineRequest, StreamDied
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, completion, error, serving
from toprope.testing.upstream_stream import (
    UpstreamStream,
    chunk,
    error_event,
    event,
    stream,
    streamed,
    usage_chunk,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
HI = chunk({"role": "assistant", "content": "hi"}, token_ids=[5], log_probs=[-0.5], prompt_token_ids=[1])
STOP = chunk({}, token_ids=[2], log_probs=[-0.1], finish_reason="stop")


def ask(emit=None, body=CHAT, **more):
    return EngineRequest(request_from_chat(body), "call-1", dialect="chat", body=body, emit=emit, **more)


async def no_pause(delay):
    return None


@pytest.fixture
async def client():
    async with Client(connect_timeout_s=1.0, transport_budget_s=1.0) as made:
        yield made


@pytest.fixture
async def served():
    upstream = ScriptedUpstream()
    async with serving(upstream) as url:
        yield upstream, url


def engine_at(client, url, **more):
    return OpenAIEngine(client=client, base_url=f"{url}/v1", return_token_ids=True, pause=no_pause, **more)


async def test_a_stream_is_asked_for_with_usage_and_the_pins_and_only_where_deltas_are_wanted(client):
    upstream = ScriptedUpstream([stream([HI, STOP]), completion()])
    async with serving(upstream) as url:
        deltas = []
        engine = engine_at(client, url)
        reply = await engine.generate(ask(deltas.append, {**CHAT, "top_logprobs": None}, want_tokens=True))
        await engine.generate(ask(None, {**CHAT, "stream": True, "stream_options": {"include_usage": False}}))
    assert upstream.requests[0].json() == {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    assert upstream.requests[1].json() == CHAT
    assert deltas == [TextDelta(0, "hi")]
    assert reply.tokens.prompt_token_ids.tolist() == [1]
    assert reply.tokens.generation_token_ids.tolist() == [5, 2]
    assert reply.tokens.generation_log_probs.tolist() == [-0.5, -0.1]


@pytest.mark.promise("MS-2")
async def test_a_delta_is_given_before_the_upstream_says_the_next(client):
    gates = [asyncio.Event() for _ in range(4)]
    pieces = [chunk({"content": letter}) for letter in "abc"]
    waits = [each for piece, gate in zip(pieces, gates, strict=False) for each in (piece, gate.wait)]
    got = []

    def emit(delta):
        got.append(delta.text)
        gates[len(got) - 1].set()  # the upstream goes on only when this delta was given

    async with serving(ScriptedUpstream([stream([*waits, STOP])])) as url:
        reply = await asyncio.wait_for(engine_at(client, url).generate(ask(emit)), 20)
    assert got == ["a", "b", "c"]
    assert reply.output[0]["content"][0]["text"] == "abc"


@pytest.mark.promise("MS-7")
async def test_ids_of_every_chunk_count_whatever_its_delta(client):
    pieces = [
        chunk({"role": "assistant", "content": ""}, prompt_token_ids=[9, 8]),
        chunk({"content": "a"}, token_ids=[60], log_probs=[-0.1]),
        chunk({}, token_ids=[61, 62], log_probs=[-0.2, -0.3]),
        {**(bare := chunk(token_ids=[63], log_probs=[-0.4])), "choices": [{**bare["choices"][0], "delta": None}]},
        chunk({"content": "b"}, token_ids=[64], log_probs=[-0.5]),
        chunk({}, token_ids=[2], log_probs=[-0.6], finish_reason="stop"),
        usage_chunk(2, 6),
    ]
    async with serving(ScriptedUpstream([stream(pieces)])) as url:
        reply = await engine_at(client, url).generate(ask([].append, want_tokens=True))
    assert reply.tokens.generation_token_ids.tolist() == [60, 61, 62, 63, 64, 2]
    assert reply.tokens.generation_log_probs.tolist() == [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (2, 6)


async def test_the_last_event_counts_though_its_blank_line_is_left_out(client):
    pieces = [event(HI), event(STOP).rstrip(b"\n")]
    async with serving(ScriptedUpstream([UpstreamStream(pieces)])) as url:
        deltas = []
        reply = await engine_at(client, url).generate(ask(deltas.append, want_tokens=True))
    assert (reply.finish_reason, deltas) == ("stop", [TextDelta(0, "hi")])
    assert reply.tokens.generation_token_ids.tolist() == [5, 2]


async def test_several_calls_in_one_delta_or_under_one_index_stay_apart(client):
    calls = [
        {"index": n, "id": f"c{n}", "type": "function", "function": {"name": name, "arguments": f'{{"a":{n}}}'}}
        for n, name in ((0, "add"), (1, "mul"))
    ]
    together = [chunk({"tool_calls": calls})]
    same_index = [chunk({"tool_calls": [{**call, "index": 0}]}) for call in calls]
    for pieces in (together, same_index):
        deltas = []
        async with serving(ScriptedUpstream([stream([*pieces, chunk({}, finish_reason="tool_calls")])])) as url:
            reply = await engine_at(client, url).generate(ask(deltas.append))
        assert [(item["call_id"], item["name"], item["arguments"]) for item in reply.output] == [
            ("c0", "add", '{"a":0}'),
            ("c1", "mul", '{"a":1}'),
        ]
        assert [d.name for d in deltas if isinstance(d, ToolCallDelta) and d.name] == ["add", "mul"]


_calls = st.lists(
    st.builds(
        lambda n, name, text: {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"a": text}, ensure_ascii=False)},
        },
        st.integers(0, 99),
        st.sampled_from(["add", "mul"]),
        st.text(max_size=12),
    ),
    max_size=3,
    unique_by=lambda call: call["id"],
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_a_streamed_reply_equals_the_plain_one_however_it_is_cut(client, served, data):
    text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=30) | st.just("a\u2028b\u0085c\u2029 é🦥")
    message = {"role": "assistant", "content": data.draw(st.none() | text)}
    if data.draw(st.booleans()):
        message["reasoning_content"] = data.draw(text)
    if calls := data.draw(_calls):
        message["tool_calls"] = calls
    ids = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=9))
    whole = completion(message, prompt_token_ids=[1, 2], token_ids=ids, log_probs=[-0.25 * n for n in range(len(ids))])
    style = {
        "newline": data.draw(st.sampled_from(["\n", "\r\n", "\r"])),
        "space": data.draw(st.sampled_from(["", " "])),
    }
    chunks = streamed(
        whole.body,
        size=data.draw(st.integers(1, 9)),
        hold_back=data.draw(st.booleans()),
        merge_finish=data.draw(st.booleans()),
    )
    made = stream([each for piece in chunks for each in (b": keep-alive\n\n", piece)], **style)
    body = b"".join(made.pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    made = replace(made, pieces=[body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b])
    deltas = []
    upstream, url = served
    upstream.replies.extend([whole, made])
    engine = engine_at(client, url)
    plain = await engine.generate(ask(want_tokens=True))
    reply = await engine.generate(ask(deltas.append, want_tokens=True))
    assert reply.output == plain.output
    assert (reply.finish_reason, reply.usage, reply.token_fault) == (
        plain.finish_reason,
        plain.usage,
        plain.token_fault,
    )
    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        assert getattr(reply.tokens, field).tolist() == getattr(plain.tokens, field).tolist()


_ODD_CALL = '{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": %s}, "score": %s}'
_FIELD = '{"content": "hi", "x": X}'
_DEEP = "[" * 3000 + "]" * 3000
_HALF_DEEP = "[" * 700 + "NaN" + "]" * 700


@pytest.mark.parametrize(
    ("message", "top"),
    [
        ('{"tool_calls": [%s]}' % (_ODD_CALL % ('"{}"', "NaN")), '"m"'),
        ('{"tool_calls": [%s]}' % (_ODD_CALL % ('"{}"', "-Infinity")), '"m"'),
        ('{"tool_calls": [%s]}' % (_ODD_CALL % ('{"a": NaN}', "1")), '"m"'),
        ('{"tool_calls": [%s]}' % (_ODD_CALL % ("NaN", "1e999")), '"m"'),
        ('{"content": "hi", "score": NaN, "scores": [NaN, {"a": Infinity}]}', '"m"'),
        ('{"content": "hi"}', "NaN"),
        ('{"content": "hi"}', '{"a": [Infinity]}'),
        (_FIELD.replace("X", _DEEP), '"m"'),
        ('{"content": "hi"}', _DEEP),
        ('{"tool_calls": [%s]}' % (_ODD_CALL % (_DEEP, "1")), '"m"'),
        (_FIELD.replace("X", _HALF_DEEP), '"m"'),
        ('{"tool_calls": [%s]}' % (_ODD_CALL % (_HALF_DEEP, "1")), '"m"'),
        ('{"content": "hi"}', _HALF_DEEP),
    ],
    ids=["a call's field", "an infinite one", "in arguments", "for arguments", "a message's", "a fingerprint",
         "in a fingerprint", "deep", "a deep fingerprint", "deep arguments", "deep and no number",
         "deep arguments of no number", "a deep fingerprint of no number"],
)  # fmt: skip
async def test_what_json_cannot_hold_is_read_of_a_stream_as_of_a_plain_reply(client, message, top):
    reply = (
        '{"id": "up", "model": "m", "created": 1, "system_fingerprint": %s, "usage": null, "prompt_token_ids": [1],'
        '"choices": [{"index": 0, "%s": %s, "finish_reason": "stop", "token_ids": [5],'
        '"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}]}'
    )
    data = [(reply % (top, kind, message)).encode() for kind in ("message", "delta")]
    told = []
    script = [UpstreamReply(data[0]), stream([b"data: " + data[1] + b"\n\n"])]
    async with serving(ScriptedUpstream(script)) as url:
        engine = engine_at(client, url, max_attempts=1)
        for emit in (None, lambda delta: None):
            try:
                told.append(await engine.generate(ask(emit, want_tokens=True)))
            except EngineError as error:
                told.append((error.kind, error.retryable))
    plain, streamed_ = told
    if isinstance(plain, tuple):
        assert plain == streamed_
        assert _DEEP in message + top or _HALF_DEEP in message + top
    else:
        assert plain.output == streamed_.output
        assert plain.extra == streamed_.extra
        assert [each.tokens.generation_token_ids.tolist() for each in told] == [[5], [5]]
        json.dumps([plain.output, dict(plain.extra)], allow_nan=False)


async def test_an_event_of_several_megabytes_is_read_and_one_over_the_limit_is_named(client):
    big = chunk({"content": "é\u2028" * 1_000_000})
    deltas = []
    async with serving(ScriptedUpstream([stream([big, STOP]), stream([big, STOP])])) as url:
        reply = await engine_at(client, url).generate(ask(deltas.append))
        assert len(reply.output[0]["content"][0]["text"]) == 2_000_000
        with pytest.raises(EngineUnavailable, match="1000000 bytes") as caught:
            await engine_at(client, url, max_reply_bytes=1_000_000).generate(ask(deltas.append))
    assert url in caught.value.message


EMPTY_ERRORS = [{"message": "", "code": None}, {"message": " ", "metadata": {}}, {}, "", " ", [], False, None]


@pytest.mark.parametrize("nothing", EMPTY_ERRORS)
async def test_an_error_that_says_nothing_beside_a_choice_is_none(client, nothing):
    whole = completion(prompt_token_ids=[1], token_ids=[5], log_probs=[-0.5], finish_reason="stop")
    whole = replace(whole, body=json.dumps({**json.loads(whole.body), "error": nothing}).encode())
    upstream = ScriptedUpstream([whole, stream([{**HI, "error": nothing}, {"error": nothing}, STOP])])
    async with serving(upstream) as url:
        replies = [await engine_at(client, url).generate(ask(emit, want_tokens=True)) for emit in (None, [].append)]
    assert [reply.finish_reason for reply in replies] == ["stop", "stop"]
    assert [reply.tokens.generation_token_ids.tolist() for reply in replies] == [[5], [5, 2]]


@pytest.mark.parametrize("end", ["[DONE] ", " [DONE]\t", "[DONE]"])
@pytest.mark.parametrize("blank", [b"data:\n\n", b"data: \n\n", b"data:\ndata: \n\n", b"event: ping\ndata:\n\n"])
async def test_events_of_nothing_and_blanks_about_the_last_one_are_no_garbage(client, blank, end):
    pieces = [blank, HI, blank, STOP, blank, usage_chunk(1, 2), event(end)]
    deltas = []
    async with serving(ScriptedUpstream([stream(pieces, done=False, end="hang")])) as url:
        reply = await engine_at(client, url, idle_timeout_s=30).generate(ask(deltas.append, want_tokens=True))
    assert deltas == [TextDelta(0, "hi")]
    assert (reply.finish_reason, reply.usage.output_tokens) == ("stop", 2)
    assert reply.tokens.generation_token_ids.tolist() == [5, 2]


async def test_an_endpoint_that_answers_whole_although_a_stream_was_asked_for_is_right_too(client):
    whole = completion(prompt_token_ids=[1], token_ids=[5], log_probs=[-0.5])
    async with serving(ScriptedUpstream([whole])) as url:
        reply = await engine_at(client, url).generate(ask([].append, want_tokens=True))
    assert reply.output[0]["content"][0]["text"] == "hello"
    assert reply.tokens.generation_token_ids.tolist() == [5]


# Faults


FAULTS = {
    "cut": [stream([HI], end="cut"), "cut off in its body"],
    "error event": [stream([HI, error_event("CUDA out of memory")]), "CUDA out of memory"],
    "named error event": [stream([HI, event({"message": "overloaded"}, name="error")]), ": overloaded"],
    "named error event of text": [stream([HI, event("overloaded", name="error")]), ": overloaded"],
    "named error event without words": [stream([HI, event("", name="error")]), "answered 500"],
    "named error event like a chunk": [
        stream([HI, event(chunk({"content": "overloaded"}), name="error")]),
        "overloaded",
    ],
    "garbage": [stream([HI, event("{not json")]), "no chat completion"],
    "a chunk that is a list": [stream([HI, event([1])]), "no chat completion"],
    "a clean end in the middle": [stream([HI], done=False), "without a finish reason"],
    "given up": [stream([HI, chunk({}, finish_reason="abort")]), "gave up on this generation"],
    "silence": [stream([HI], end="hang"), "no byte for 0.5 s"],
}


@pytest.mark.promise("MS-10")
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_upstream_that_dies_after_a_delta_is_named_and_never_asked_again(client, fault):
    reply, says = FAULTS[fault]
    upstream = ScriptedUpstream(answer=lambda request: reply)
    deltas = []
    async with serving(upstream) as url:
        with pytest.raises(StreamDied) as caught:
            await engine_at(client, url, idle_timeout_s=0.5).generate(ask(deltas.append))
        await asyncio.wait_for(upstream.idle.wait(), 10)
    assert deltas == [TextDelta(0, "hi")]
    assert says in caught.value.message
    assert url in caught.value.message
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("fault", [name for name in FAULTS if "error" not in name])
async def test_one_that_dies_before_its_first_delta_is_the_clients_turn(client, fault):
    reply, says = FAULTS[fault]
    upstream = ScriptedUpstream(answer=lambda request: replace(reply, pieces=reply.pieces[1:]))
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable, match=says) as caught:
            await engine_at(client, url, idle_timeout_s=0.5).generate(ask([].append))
    assert not isinstance(caught.value, StreamDied)
    assert url in caught.value.message
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_generation_that_the_engine_gave_up_is_no_turn(client, reason):
    upstream = ScriptedUpstream(answer=lambda request: completion(finish_reason=reason))
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable, match="gave up") as caught:
            await engine_at(client, url).generate(ask())
    assert url in caught.value.message
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("emit", [None, [].append])
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (UpstreamReply(b"", 307, {"location": "http://192.0.2.1/v1"}), "another origin"),
        (UpstreamReply(b"x" * 5000, 500), "4000 bytes"),
        (UpstreamReply(b"x" * 5000), "4000 bytes"),
    ],
)
async def test_a_redirect_elsewhere_and_a_reply_over_the_limit_are_the_engines_fault(client, emit, reply, says):
    upstream = ScriptedUpstream(answer=lambda request: reply)
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable, match=says) as caught:
            await engine_at(client, url, max_reply_bytes=4000).generate(ask(emit))
    assert url in caught.value.message
    assert not caught.value.retryable
    assert len(upstream.requests) == 1


async def test_a_page_in_place_of_the_models_is_named_at_the_start(client):
    upstream = ScriptedUpstream()
    upstream.models = UpstreamReply(b"<html>")
    async with serving(upstream) as url:
        with pytest.raises(EngineUnavailable, match="no JSON"):
            await engine_at(client, url).start()


async def test_what_a_provider_refuses_before_the_first_delta_is_repeated_within_one_counter(client):
    good = stream([HI, STOP])
    upstream = ScriptedUpstream([error(429, "slow"), stream([error_event("busy", code=503)]), good])
    deltas = []
    async with serving(upstream) as url:
        reply = await engine_at(client, url).generate(ask(deltas.append))
        assert (len(upstream.requests), deltas) == (3, [TextDelta(0, "hi")])
        assert reply.finish_reason == "stop"
        upstream.replies.extend([error(500, "oops")] * 9)
        with pytest.raises(EngineUnavailable, match="oops"):
            await engine_at(client, url).generate(ask(deltas.append))
    assert len(upstream.requests) == 6


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(401, "bad key"), ModelAuth),
        (error(400, "maximum context length is 2048"), ModelContextLength),
        (stream([error_event("maximum context length is 2048", code=400)]), ModelContextLength),
        (stream([error_event("bad key", code="401")]), ModelAuth),
    ],
)
async def test_a_terminal_refusal_keeps_the_providers_words_and_is_not_repeated(client, reply, kind):
    upstream = ScriptedUpstream(answer=lambda request: reply)
    async with serving(upstream) as url:
        with pytest.raises(kind, match=r"2048|bad key"):
            await engine_at(client, url).generate(ask([].append))
    assert len(upstream.requests) == 1


@pytest.mark.promise("MS-3")
async def test_fifty_cancelled_streams_leave_no_request_open_upstream(client):
    upstream = ScriptedUpstream(answer=lambda request: stream([HI], end="hang"))
    async with serving(upstream) as url:
        for number in range(50):
            first = asyncio.Event()
            running = asyncio.create_task(engine_at(client, url).generate(ask(lambda delta, first=first: first.set())))
            if number % 2:
                await asyncio.wait_for(first.wait(), 10)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        await asyncio.wait_for(upstream.idle.wait(), 10)
    assert upstream.open == 0


async def test_streams_that_end_use_one_connection_again(client):
    seen = set()

    class Counting(ScriptedUpstream):
        async def __call__(self, scope, receive, send):
            seen.add(tuple(scope["client"]))
            await super().__call__(scope, receive, send)

    async with serving(Counting(answer=lambda request: stream([HI, STOP]))) as url:
        for _ in range(10):
            await engine_at(client, url).generate(ask([].append))
    assert len(seen) == 1


def test_a_stream_that_is_scripted_to_die_is_told_apart_by_its_class():
    assert issubclass(StreamDied, EngineError)
    assert StreamDied("x").kind == Kind.MODEL_UNAVAILABLE
    assert isinstance(stream([HI]), UpstreamStream)

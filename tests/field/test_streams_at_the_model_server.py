"""Field cases A3, A4, A7, A9, A14, A24 and A28 where a stream or the Messages dialect stands between client and engine.

The upstream streams as vLLM does, all on real sockets, captured into sqlite.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.model.wire import ASK, ENDS, Wire, events

from toprope.http.app import Limits
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, completion
from toprope.testing.upstream_stream import UpstreamStream, chunk, stream, streamed, usage_chunk
from toprope.trajectory.build import Trainable, build

DIALECTS = sorted(ASK)
CAPTURED = "/ng-rollout/r/training-token-capture"
ARGUMENTS = '{"b": 1.0,"a":"caf\\u00e9", "n":1e2}'
TOOLS = {
    "chat": [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "mul")],
    "responses": [{"type": "function", "name": name, "parameters": {}} for name in ("add", "mul")],
    "messages": [{"name": name, "input_schema": {}} for name in ("add", "mul")],
}


def tokens(prompt, generated):
    return {
        "prompt_token_ids": prompt,
        "token_ids": generated,
        "log_probs": [-0.1 * (n + 1) for n in range(len(generated))],
    }


def wire_of(bench):
    return Wire(bench.server, int(bench.url.rpartition(":")[2]))


@pytest.mark.promise("MS-5")
@pytest.mark.parametrize("with_stream", [False, True])
async def test_a3_an_object_of_the_messages_dialect_goes_upstream_as_the_string_that_was_sampled(
    model_bench, with_stream
):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    first = completion(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        finish_reason="tool_calls",
        **tokens([1, 10], [50, 2]),
    )
    second = completion(**tokens([1, 10, 50, 2, 9, 11], [51, 2]))

    def engine(request):
        reply = first if len(request.json()["messages"]) == 1 else second
        return stream(streamed(reply.body)) if request.json().get("stream") else reply

    upstream = ScriptedUpstream(answer=engine)
    async with model_bench(upstream) as bench:
        history = [{"role": "user", "content": "go"}]
        body = {"model": "m", "max_tokens": 9, "messages": history, "tools": TOOLS["messages"], "stream": with_stream}
        wire = wire_of(bench)
        reply = await (await wire.call(CAPTURED + "/v1/messages", body)).end()
        if not with_stream:
            value = json.loads(reply)["content"][0]["input"]
        else:
            pieces = [
                json.loads(data)["delta"].get("partial_json", "")
                for kind, data in events(reply)
                if "_delta" in kind and "content_block" in kind
            ]
            value = json.loads("".join(pieces))
        assert value == {"b": 1.0, "a": "caf\u00e9", "n": 100.0}
        value = dict(reversed(value.items()))  # an object has no order, and a client's own spelling
        history += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": value}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ]
        assert (await _status(wire, "/v1/messages", body)) == 200
        built = build(await bench.snapshot())
    assert upstream.requests[1].json()["messages"][1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert isinstance(built, Trainable)
    assert built.traces[0].token_ids.tolist() == [1, 10, 50, 2, 9, 11, 51, 2]


@pytest.mark.promise("MS-5")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a3_argument_bytes_stay_over_many_turns(model_bench, dialect):
    """Eight turns; each calls a tool with another odd spelling, and the last prompt upstream holds all of them."""
    spellings = [f'{{ "n" :{n}.0,"s":"\\u00e9{n}" , "e":1e{n}}}' for n in range(8)]

    def engine(request):
        turn = sum(message["role"] == "assistant" for message in request.json()["messages"])
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "add", "arguments": spellings[turn]}}
        prompt = [1, *(each for n in range(turn) for each in (50 + n, 2, 9))]
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return completion(message, finish_reason="tool_calls", **tokens(prompt, [50 + turn, 2]))

    upstream = ScriptedUpstream(answer=engine)
    async with model_bench(upstream) as bench:
        history = [{"role": "user", "content": "go"}]
        for turn in range(8):
            body = {**ASK[dialect][1], "tools": TOOLS[dialect]}
            body["input" if dialect == "responses" else "messages"] = history
            reply = (await bench.call(ASK[dialect][0], body)).json()
            if dialect == "chat":
                history += [
                    reply["choices"][0]["message"],
                    {"role": "tool", "tool_call_id": f"c{turn}", "content": "3"},
                ]
            elif dialect == "responses":
                history += [*reply["output"], {"type": "function_call_output", "call_id": f"c{turn}", "output": "3"}]
            else:
                result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": "3"}
                history += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
        built = build(await bench.snapshot())
    sent = [m["tool_calls"] for m in upstream.requests[-1].json()["messages"] if m["role"] == "assistant"]
    assert [calls[0]["function"]["arguments"] for calls in sent] == spellings[:7]
    assert isinstance(built, Trainable)
    assert len(built.traces) == 1


@pytest.mark.promise("MS-5")
async def test_a3_an_object_that_no_record_bears_out_is_said_not_guessed(model_bench):
    upstream = ScriptedUpstream([completion(**tokens([1], [50, 2]))])
    async with model_bench(upstream) as bench:
        call = {"type": "tool_use", "id": "elsewhere", "name": "add", "input": {"a": 1}}
        history = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [call]}]
        history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "elsewhere", "content": "3"}]}]
        body = {"model": "m", "max_tokens": 9, "messages": history, "tools": TOOLS["messages"]}
        seen = []

        async def before_call(call):
            seen.append(call.losses)

        bench.server.before_call = before_call
        assert (await bench.call("/v1/messages", body)).status == 200
    assert seen == [("arguments.elsewhere",)]


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize("counted", [6, 7])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a4_ids_of_chunks_that_say_nothing_count_and_a_count_that_disagrees_masks(model_bench, dialect, counted):
    bare = chunk(token_ids=[61, 62], log_probs=[-0.2, -0.3])
    del bare["choices"][0]["delta"]
    chunks = [
        chunk({"role": "assistant", "content": "he"}, token_ids=[60], log_probs=[-0.1], prompt_token_ids=[1, 10]),
        bare,
        chunk({}, token_ids=[63], log_probs=[-0.4]),
        chunk({"content": "llo"}, token_ids=[64], log_probs=[-0.5]),
        chunk({}, token_ids=[2], log_probs=[-0.6], finish_reason="stop"),
        usage_chunk(2, counted),
    ]
    upstream = ScriptedUpstream([stream(chunks)])
    async with model_bench(upstream) as bench:
        call = await wire_of(bench).ask(dialect, stream=True, prefix=CAPTURED)
        assert ENDS[dialect] in await call.end()
        snapshot = await bench.snapshot()
    if counted == 6:
        assert [entry.generation_token_ids.tolist() for entry in snapshot.entries] == [[60, 61, 62, 63, 64, 2]]
        assert not snapshot.incomplete
    else:
        assert any(reason.startswith("length_mismatch") for reason in snapshot.reasons)


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "null", "-9999.0", "none at all"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a6_a_bad_logprob_in_a_stream_costs_the_row_and_not_the_text(model_bench, dialect, bad):
    plain = completion({"role": "assistant", "content": "hello"}, **tokens([1, 10], [50, 51, 2]))
    pieces = list(stream(streamed(plain.body)).pieces)
    pieces = [piece.replace(b"-0.2", bad.encode()) for piece in pieces]
    if bad == "none at all":
        chunks = streamed(plain.body)
        for each in chunks:
            for choice in each["choices"]:
                choice["logprobs"] = None
        pieces = list(stream(chunks).pieces)
    upstream = ScriptedUpstream([UpstreamStream(pieces, headers={"content-type": "text/event-stream"})])
    async with model_bench(upstream) as bench:
        call = await wire_of(bench).ask(dialect, stream=True, prefix=CAPTURED)
        body = await call.end()
        snapshot = await bench.snapshot()
    assert ENDS[dialect] in body
    assert b"hell" in body
    assert snapshot.entries == ()
    wanted = "no_token_ids" if bad == "none at all" else "bad_logprob"
    assert any(reason.startswith(wanted) for reason in snapshot.reasons), snapshot.reasons


@pytest.mark.parametrize("shape", ["one delta", "one index"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a9_two_calls_in_one_delta_or_under_one_index_are_two_calls(model_bench, dialect, shape):
    calls = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "mul", "arguments": '{"a":2}'}},
    ]
    if shape == "one delta":
        said = [chunk({"tool_calls": calls}, token_ids=[50], log_probs=[-0.1], prompt_token_ids=[1])]
    else:
        said = [
            chunk({"tool_calls": [calls[0]]}, token_ids=[50], log_probs=[-0.1], prompt_token_ids=[1]),
            chunk({"tool_calls": [{**calls[1], "index": 0}]}),
        ]
    end = chunk({}, token_ids=[2], log_probs=[-0.2], finish_reason="tool_calls")
    upstream = ScriptedUpstream([stream([*said, end, usage_chunk(1, 2)])])
    async with model_bench(upstream) as bench:
        call = await wire_of(bench).ask(dialect, stream=True, prefix=CAPTURED, more={"tools": TOOLS[dialect]})
        body = await call.end()
        (entry,) = (await bench.snapshot()).entries
    made = [(item["call_id"], item["name"], item["arguments"]) for item in entry.output_items]
    assert made == [("c1", "add", '{"a":1}'), ("c2", "mul", '{"a":2}')]
    if dialect == "responses":
        done = [json.loads(data)["item"] for kind, data in events(body) if kind == "response.output_item.done"]
        assert [(item["call_id"], item["arguments"]) for item in done] == [("c1", '{"a":1}'), ("c2", '{"a":2}')]
        assert len({item["id"] for item in done}) == 2
    elif dialect == "messages":
        starts = [json.loads(data) for kind, data in events(body) if kind == "content_block_start"]
        assert [(each["index"], each["content_block"]["id"]) for each in starts] == [(0, "c1"), (1, "c2")]


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_upstream_goes_on_only_when_the_client_has_read_each_delta(model_bench, dialect):
    read = [asyncio.Event() for _ in range(4)]
    pieces = []
    for number, word in enumerate("abcd"):
        first = {"prompt_token_ids": [1]} if number == 0 else {}
        pieces += [read[number].wait, chunk({"content": word}, token_ids=[50 + number], log_probs=[-0.1], **first)]
    pieces += [chunk({}, token_ids=[2], log_probs=[-0.1], finish_reason="stop"), usage_chunk(1, 5)]
    upstream = ScriptedUpstream([stream(pieces)])
    async with model_bench(upstream) as bench:
        read[0].set()
        call = await wire_of(bench).ask(dialect, stream=True, prefix=CAPTURED)
        for number, word in enumerate("abcd"):
            await asyncio.wait_for(call.read(lambda body, w=word: f'"{w}"'.encode() in body), 10)
            if number < 3:
                read[number + 1].set()
        await asyncio.wait_for(call.end(), 10)
        (entry,) = (await bench.snapshot()).entries
    assert entry.generation_token_ids.tolist() == [50, 51, 52, 53, 2]


@pytest.mark.promise("MS-9")
async def test_a14_128_streams_are_128_in_flight_upstream(model_bench):
    everyone, waiting = asyncio.Event(), 0

    async def hold():
        nonlocal waiting
        waiting += 1
        if waiting == 128:
            everyone.set()
        await everyone.wait()

    plain = completion(**tokens([1, 10], [50, 2]))
    upstream = ScriptedUpstream(answer=lambda request: stream([hold, *streamed(plain.body)]))
    async with model_bench(upstream) as bench:
        wire = wire_of(bench)
        calls = [
            await wire.ask(DIALECTS[n % 3], stream=True, prefix=CAPTURED.replace("/r/", f"/r{n}/")) for n in range(128)
        ]
        for n, call in enumerate(calls):
            assert ENDS[DIALECTS[n % 3]] in await call.end()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a24_line_separators_inside_a_string_end_no_event(model_bench, dialect):
    text = "a\u2028b\u0085c\u2029d"
    plain = completion({"role": "assistant", "content": text}, **tokens([1], [50, 2]))
    upstream = ScriptedUpstream([stream(streamed(plain.body, size=2), newline="\r\n", space="")])
    async with model_bench(upstream) as bench:
        call = await wire_of(bench).ask(dialect, stream=True, prefix=CAPTURED)
        assert ENDS[dialect] in await call.end()
        (entry,) = (await bench.snapshot()).entries
    assert entry.output_items[0]["content"][0]["text"] == text


async def test_a28_a_messages_history_of_many_images_passes_up_to_the_limit(model_bench):
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}
    images = [{"type": "image", "source": source}] * 12
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": images}]}
    upstream = ScriptedUpstream([completion(**tokens([1], [50, 2]))])
    async with model_bench(upstream, limits=Limits(max_body_bytes=16_000_000)) as bench:
        assert (await bench.call("/v1/messages", body)).status == 200
        body["messages"].append({"role": "user", "content": images})
        refused = await bench.call("/v1/messages", body)
        (entry,) = (await bench.snapshot()).entries
    assert (refused.status, refused.json()["type"]) == (413, "error")
    assert "16000000" in refused.json()["error"]["message"].replace(",", "").replace(" ", "")
    assert refused.headers["x-should-retry"] == "false"
    assert entry.media


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("capture", [True, False])
async def test_upstream_connections_are_none_after_fifty_clients_that_left(model_bench, capture):
    plain = completion({"role": "assistant", "content": "long enough to be left"}, **tokens([1], [50, 51, 2]))
    chunks = streamed(plain.body)
    gates = []

    def engine(request):
        gates.append(asyncio.Event())
        rest = [gates[-1].wait, *chunks[2:]]
        return stream([*chunks[:2], *rest])

    upstream = ScriptedUpstream(answer=engine)
    prefix = CAPTURED if capture else "/ng-rollout/r"
    async with model_bench(upstream) as bench:
        wire = wire_of(bench)
        for number in range(50):
            call = await wire.ask(DIALECTS[number % 3], stream=True, prefix=prefix, more={"seed": number})
            await call.read(lambda body: b"long" in body)
            call.leave()
            if capture:
                gates[number].set()
        async with asyncio.timeout(20):
            await upstream.idle.wait()
        assert upstream.open == 0
        snapshot = await _settled(bench) if capture else None
    if snapshot is not None:
        assert len(snapshot.entries) == 50
        assert not snapshot.incomplete


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_upstream_that_is_cut_in_the_middle_cuts_the_client_and_the_retry_is_clean(model_bench, dialect):
    plain = completion({"role": "assistant", "content": "said again"}, **tokens([1], [50, 2]))
    chunks = streamed(plain.body)
    replies = iter([UpstreamStream(stream(chunks[:3], done=False).pieces, end="cut"), stream(chunks)])
    upstream = ScriptedUpstream(answer=lambda request: next(replies))
    async with model_bench(upstream) as bench:
        wire = wire_of(bench)
        call = await wire.ask(dialect, stream=True, prefix=CAPTURED)
        with pytest.raises(EOFError):
            await call.end()
        assert b"said" in call.body
        assert ENDS[dialect] not in call.body
        again = await wire.ask(dialect, stream=True, prefix=CAPTURED, x_stainless_retry_count="1")
        assert ENDS[dialect] in await again.end()
        snapshot = await bench.snapshot()
    assert isinstance(build(snapshot), Trainable)
    assert len(upstream.requests) == 2


async def _settled(bench):
    assert await bench.store.settle("r", 20)
    await bench.server.app.stop()
    return await bench.snapshot()


async def _status(wire, path, body):
    call = await wire.call(CAPTURED + path, body)
    await call.end()
    return call.status


@pytest.mark.parametrize("with_stream", [False, True])
@pytest.mark.parametrize("met", ["END", 2, None])
async def test_the_stop_string_that_an_engine_names_is_the_stop_sequence_of_a_message(model_bench, with_stream, met):
    body = json.loads(completion({"role": "assistant", "content": "so"}, **tokens([1, 10], [50, 2])).body)
    body["choices"][0]["stop_reason"] = met
    whole = UpstreamReply(json.dumps(body).encode())
    last = chunk({}, finish_reason="stop")
    last["choices"][0]["stop_reason"] = met
    pieces = [chunk({"content": "so"}, token_ids=[50, 2], prompt_token_ids=[1, 10], log_probs=[-0.1, -0.2]), last]
    upstream = ScriptedUpstream(answer=lambda request: stream(pieces) if request.json().get("stream") else whole)
    async with model_bench(upstream) as bench:
        call = await wire_of(bench).ask(
            "messages", stream=with_stream, prefix=CAPTURED, more={"stop_sequences": ["END"]}
        )
        said = await call.end()
        told = json.loads(dict(events(said))["message_delta"])["delta"] if with_stream else json.loads(said)
        again = await wire_of(bench).ask(
            "messages",
            stream=with_stream,
            prefix=CAPTURED,
            more={"stop_sequences": ["END"]},
            x_stainless_retry_count="1",
        )
        assert (await again.end()).count(b"END") == said.count(b"END"), "a retry is told the same"
    wanted = ("stop_sequence", "END") if met == "END" else ("end_turn", None)
    assert (told["stop_reason"], told["stop_sequence"]) == wanted


async def test_a_stream_whose_engine_counts_nothing_ends_with_counts_that_no_call_can_have(model_bench):
    upstream = ScriptedUpstream(
        answer=lambda request: stream([chunk({"content": "so"}), chunk({}, finish_reason="stop")])
    )
    async with model_bench(upstream) as bench:
        wire = wire_of(bench)
        told = {}
        for dialect in DIALECTS:
            call = await wire.ask(
                dialect,
                stream=True,
                prefix="/ng-rollout/r",
                more={"stream_options": {"include_usage": True}} if dialect == "chat" else {},
            )
            told[dialect] = events(await call.end())
    completed = json.loads(dict(told["responses"])["response.completed"])["response"]
    assert (completed["usage"]["input_tokens"], completed["usage"]["total_tokens"]) == (0, 0)
    assert json.loads(dict(told["messages"])["message_delta"])["usage"]["input_tokens"] == 0
    assert json.loads(told["chat"][-2][1])["usage"] is None

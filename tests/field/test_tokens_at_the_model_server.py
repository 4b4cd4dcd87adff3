"""Field cases A3, A5, A6, A9, A10, A27, A28 where the model server stands: between a client and an engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from toprope.http.app import Limits
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, completion, error
from toprope.trajectory.build import Masked, Trainable, build

ARGUMENTS = '{"b": 1.0,"a":"caf\\u00e9", "n":1e2}'
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {"name": "add", "parameters": {"type": "object"}}


def tokens(prompt, generated, log_probs=None):
    return {
        "prompt_token_ids": prompt,
        "token_ids": generated,
        "log_probs": log_probs or [-0.1 * (n + 1) for n in range(len(generated))],
    }


@pytest.mark.promise("MS-5")
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a3_tool_arguments_reach_the_upstream_byte_for_byte(model_bench, path):
    upstream = ScriptedUpstream(
        [
            completion(
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                finish_reason="tool_calls",
                **tokens([1, 10], [50, 2]),
            ),
            completion(**tokens([1, 10, 50, 2, 9, 11], [51, 2])),
        ]
    )
    async with model_bench(upstream) as bench:
        if path == CHAT:
            history = [{"role": "user", "content": "go"}]
            body = {"model": "m", "messages": history, "tools": [{"type": "function", "function": TOOL}]}
            reply = (await bench.call(path, body)).json()
            history += [reply["choices"][0]["message"], {"role": "tool", "tool_call_id": "c1", "content": "3"}]
        else:
            history = [{"role": "user", "content": "go"}]
            body = {"model": "m", "input": history, "tools": [{"type": "function", **TOOL}]}
            reply = (await bench.call(path, body)).json()
            history += [*reply["output"], {"type": "function_call_output", "call_id": "c1", "output": "3"}]
        assert (await bench.call(path, body)).status == 200
        built = build(await bench.snapshot())
    sent = upstream.requests[1].json()["messages"][1]["tool_calls"][0]["function"]
    assert sent["arguments"] == ARGUMENTS
    assert json.dumps(ARGUMENTS).encode() in upstream.requests[1].body
    assert isinstance(built, Trainable)
    assert built.traces[0].token_ids.tolist() == [1, 10, 50, 2, 9, 11, 51, 2]


@pytest.mark.promise("MS-6")
async def test_a5_an_explicit_null_does_not_switch_logprobs_off(model_bench):
    def engine(request):
        """Derives how many logprobs from `top_logprobs`, and returns none where it is null."""
        body = request.json()
        if body.get("top_logprobs", 0) is None or body.get("logprobs") is not True:
            return completion(prompt_token_ids=[1], token_ids=[50, 2])
        return completion(**tokens([1], [50, 2]))

    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "top_logprobs": None}
    upstream = ScriptedUpstream(answer=engine)
    async with model_bench(upstream) as bench:
        for asked in (True, None, False):
            assert (await bench.call(CHAT, {**body, "logprobs": asked}, rollout=f"r{asked}")).status == 200
            assert isinstance(build(await bench.snapshot(f"r{asked}")), Trainable)
        assert (await bench.call(CHAT, {**body, "logprobs": True}, capture=False)).status == 200
    assert [request.json()["top_logprobs"] for request in upstream.requests[:3]] == [0, 0, 0]
    assert "top_logprobs" not in upstream.requests[3].json()


@pytest.mark.promise("MS-7")
async def test_a5_logprobs_that_still_do_not_come_mask_the_row_in_words(model_bench):
    upstream = ScriptedUpstream([completion(prompt_token_ids=[1], token_ids=[50, 2])])
    async with model_bench(upstream) as bench:
        reply = await bench.call(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}]})
        assert reply.json()["choices"][0]["message"]["content"] == "hello"
        snapshot = await bench.snapshot()
    assert snapshot.incomplete
    assert any(reason.startswith("no_token_ids") for reason in snapshot.reasons)
    assert isinstance(build(snapshot), Masked)


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "null", "-9999.0"])
async def test_a6_a_bad_logprob_costs_the_row_and_not_the_text(model_bench, tmp_path, bad):
    body = completion(**tokens([1, 10], [50, 51, 2], [-0.1, -0.77, -0.3])).body.replace(b"-0.77", bad.encode())
    async with model_bench(ScriptedUpstream([UpstreamReply(body)])) as bench:
        ask = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
        reply = await bench.call(CHAT, ask)
        assert reply.status == 200
        assert reply.json()["choices"][0]["message"]["content"] == "hello"
        snapshot = await bench.snapshot()
    assert snapshot.incomplete
    assert snapshot.entries == ()
    assert any(reason.startswith("bad_logprob") for reason in snapshot.reasons)
    assert all(b"NaN" not in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.promise("MS-7")
async def test_a4_a_usage_that_disagrees_with_the_ids_masks_the_row(model_bench):
    usage = {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
    upstream = ScriptedUpstream([completion(usage=usage, **tokens([1, 10], [60, 61, 62, 63, 64, 2]))])
    async with model_bench(upstream) as bench:
        assert (await bench.call(RESPONSES, {"model": "m", "input": "x"})).status == 200
        snapshot = await bench.snapshot()
    assert any(reason.startswith("length_mismatch") for reason in snapshot.reasons)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a9_two_calls_of_one_turn_stay_apart_and_in_order(model_bench, path):
    calls = [
        {"index": 0, "id": i, "type": "function", "function": {"name": n, "arguments": a}}
        for i, n, a in (("c1", "add", '{"a":1}'), ("c2", "mul", '{"a":2}'))
    ]
    upstream = ScriptedUpstream(
        [completion({"role": "assistant", "content": None, "tool_calls": calls}, **tokens([1], [50, 2]))]
    )
    names = [{"name": "add", "parameters": {}}, {"name": "mul", "parameters": {}}]
    async with model_bench(upstream) as bench:
        if path == CHAT:
            tools = [{"type": "function", "function": name} for name in names]
            body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "parallel_tool_calls": False}
            message = (await bench.call(path, body)).json()["choices"][0]["message"]
            seen = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
        else:
            tools = [{"type": "function", **name} for name in names]
            body = {"input": "x", "tools": tools, "parallel_tool_calls": False}
            output = (await bench.call(path, {**body, "model": "m"})).json()["output"]
            assert len({item["id"] for item in output}) == 2
            seen = [(c["call_id"], c["name"], c["arguments"]) for c in output]
        entry = (await bench.snapshot()).entries[0]
    assert seen == [("c1", "add", '{"a":1}'), ("c2", "mul", '{"a":2}')]
    assert [item["call_id"] for item in entry.output_items] == ["c1", "c2"]
    assert upstream.requests[0].json()["parallel_tool_calls"] is False


async def test_a10_a_turn_that_no_call_stands_behind_never_gets_tokens(model_bench):
    upstream = ScriptedUpstream(
        [
            completion(**tokens([1, 10], [50, 2])),
            completion({"role": "assistant", "content": "bye"}, **tokens([1, 10, 50, 2, 9, 70, 71, 9, 12], [51, 2])),
        ]
    )
    async with model_bench(upstream) as bench:
        history = [{"role": "user", "content": "go"}]
        reply = (await bench.call(CHAT, {"model": "m", "messages": history})).json()
        history += [reply["choices"][0]["message"], {"role": "user", "content": "and?"}]
        history += [{"role": "assistant", "content": "I could not finish."}, {"role": "user", "content": "end"}]
        await bench.call(CHAT, {"model": "m", "messages": history})
        snapshot = await bench.snapshot()
        empty = build(await bench.snapshot("never-called"))
    assert snapshot.entries[1].parent_decision == "unresolved"
    assert [entry.generation_token_ids.tolist() for entry in snapshot.entries] == [[50, 2], [51, 2]]
    assert isinstance(build(snapshot), Masked)
    assert isinstance(empty, Masked)
    assert upstream.requests[1].json()["messages"][3]["content"] == "I could not finish."


async def test_a27_a_broken_tool_call_does_not_poison_what_comes_after(model_bench):
    broken = '{"cmd": "ls'

    def engine(request):
        for message in request.json()["messages"]:
            for call in message.get("tool_calls") or ():
                try:
                    json.loads(call["function"]["arguments"])
                except ValueError:
                    return error(400, "invalid tool arguments in history")
        call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": broken}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return completion(message, finish_reason="tool_calls", **tokens([1], [50, 2]))

    upstream = ScriptedUpstream(answer=engine)
    async with model_bench(upstream) as bench:
        history = [{"role": "user", "content": "go"}]
        reply = (await bench.call(RESPONSES, {"model": "m", "input": history})).json()
        assert reply["output"][0]["arguments"] == broken
        history += [
            *reply["output"],
            {"type": "function_call_output", "call_id": "c1", "output": "arguments were not valid JSON"},
            {"role": "user", "content": "again"},
        ]
        refused = await bench.call(RESPONSES, {"model": "m", "input": history})
        snapshot = await bench.snapshot()
    assert (refused.status, refused.json()["error"]["kind"]) == (400, "model_rejected")
    assert refused.headers["x-should-retry"] == "false"
    assert "invalid tool arguments" in refused.json()["error"]["message"]
    sent = upstream.requests[1].json()["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert sent == broken
    assert snapshot.entries[0].output_items[0]["arguments"] == broken
    assert isinstance(build(snapshot), Trainable)  # the turn before the refusal is whole


async def test_a28_a_long_history_passes_up_to_the_limit_and_over_it_the_limit_is_named(model_bench):
    image = "data:image/png;base64," + "A" * 1_000_000
    parts = [{"type": "image_url", "image_url": {"url": image}}] * 12
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    upstream = ScriptedUpstream([completion(**tokens([1], [50, 2]))])
    async with model_bench(upstream, limits=Limits(max_body_bytes=16_000_000)) as bench:
        assert (await bench.call(CHAT, body)).status == 200
        body["messages"].append({"role": "user", "content": parts})
        refused = await bench.call(CHAT, body)
        entry = (await bench.snapshot()).entries[0]
    assert refused.status == 413
    assert "16000000" in refused.json()["error"]["message"].replace(",", "").replace(" ", "")
    assert refused.headers["x-should-retry"] == "false"
    assert len(upstream.requests) == 1
    assert len(upstream.requests[0].body) > 12_000_000
    assert entry.media


@pytest.mark.promise("MS-9")
async def test_128_concurrent_calls_are_128_in_flight_upstream(model_bench):
    everyone = asyncio.Event()
    waiting = 0

    async def hold():
        nonlocal waiting
        waiting += 1
        if waiting == 128:
            everyone.set()
        await everyone.wait()

    good = completion(**tokens([1, 10], [50, 2]))
    upstream = ScriptedUpstream(answer=lambda request: UpstreamReply(good.body, before=hold))
    async with model_bench(upstream) as bench:
        replies = await asyncio.gather(
            *(bench.call(RESPONSES, {"model": "m", "input": "x"}, rollout=f"r{n}") for n in range(128))
        )
    assert [reply.status for reply in replies] == [200] * 128

"""Our model server before stock vLLM: ids as sampled, streams as plain, tools, exact prefixes, recomputed logprobs.

Two models: random weights (most replies hold broken UTF-8, so that no text can stand for its ids), and SmolLM2. The
template drops thoughts as Qwen3's does, and writes an empty one into a last turn: re-tokenised text is never the
history that was sampled.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from itertools import pairwise

import numpy as np
import pytest

from toprope.canonical.digest import digest_tokens
from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.tree import EngineUnavailable
from toprope.http.client import Client
from toprope.servers.model.engines.vllm import VllmEngine
from toprope.servers.model.server import ModelServer
from toprope.telemetry.calls import CallLog, read_call_log
from toprope.trajectory.build import Trainable, build

pytestmark = pytest.mark.vllm

THRESHOLD = 1e-3
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [2, 20]}, "b": {"enum": [3, 30]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SAY = "Say something about whales."


class House:
    """Our server in front of `served`; `ask` makes one captured call of rollout `key`."""

    def __init__(self, peer, store, engine, log):
        self.peer, self.store, self.engine, self._log = peer, store, engine, log

    async def ask(self, body, key="r", dialect="chat"):
        path = f"/ng-rollout/{key}/training-token-capture{PATHS[dialect]}"
        reply = await self.peer.request("POST", path, body=json.dumps(body).encode(), timeout_s=300)
        assert reply.status == 200, reply.body
        return reply.body

    async def chat(self, messages, key="r", stream=False, **more):
        body = {"messages": messages, "temperature": 1, "max_tokens": 24, "stream": stream, **more}
        said = await self.ask(body, key)
        return assembled(said) if stream else json.loads(said)["choices"][0]["message"]

    async def entries(self, key="r"):
        return await self.store.open_entries(key, 0)

    def outcomes(self):
        return [record.token_in for record in read_call_log(self._log.path)]


@pytest.fixture
def house(served, tmp_path):
    @asynccontextmanager
    async def run(**settings):
        store = MemoryStore()
        recorder = Recorder(store, reader=store)
        log = CallLog(tmp_path / "calls.jsonl")
        async with Client() as outside:
            engine = VllmEngine(client=outside, base_url=served.url, model=served.model)
            server = ModelServer(name="policy", engine=engine, recorder=recorder, call_log=log, **settings)
            await server.app.start()
            async with Client(inline={"policy": server.app}) as client:
                yield House(client.peer("inline://policy", None), store, engine, log)
            await server.app.stop()
        await recorder.close()
        log.close()

    return run


def assembled(body):
    """A Chat stream as its message."""
    message = {"role": "assistant", "content": None}
    for line in body.decode().split("\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[call["index"]]["function"][name] += call["function"].get(name) or ""
    return message


def whole(entry):
    return [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]


async def test_captured_ids_are_the_engines_own_and_a_seed_repeats_them(house, served, results):
    async with house() as here:
        assert here.engine.capabilities.accepts_token_prompt
        assert here.engine.max_model_len == 2048
        ask = [{"role": "user", "content": SAY}]
        await asyncio.gather(*(here.chat(ask, key=f"r{n}", seed=n % 4, max_tokens=32) for n in range(12)))
        runs = [(await here.entries(f"r{n}"))[0] for n in range(12)]
        rendered = await here.engine._tokenize({"messages": ask, "add_generation_prompt": True})
        for n, entry in enumerate(runs):
            assert entry.prompt_token_ids.tolist() == rendered
            assert len(entry.generation_token_ids) == len(entry.generation_log_probs) > 0
            twin = runs[n % 4]
            assert entry.generation_token_ids.tolist() == twin.generation_token_ids.tolist()
            assert np.array_equal(entry.generation_log_probs, twin.generation_log_probs)
        tokens = sum(len(entry.generation_token_ids) for entry in runs)
        results.append({"check": "capture", "model": served.model, "figure": f"{tokens} ids in 12 calls at once"})
        digest = digest_tokens([token for entry in runs[:4] for token in whole(entry)])
        results.append({"check": "digest", "model": served.model, "figure": digest})


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_stream_is_recorded_as_the_plain_reply_is(house, served, results, dialect):
    async with house() as here:
        text = [{"role": "user", "content": SAY}]
        body = {
            "chat": {"messages": text, "max_tokens": 40},
            "responses": {"input": text, "max_output_tokens": 40},
            "messages": {"messages": text, "max_tokens": 40},
        }[dialect]
        for n in range(4):
            for stream in (False, True):
                await here.ask(
                    {"model": "m", "seed": n, "temperature": 1, "stream": stream, **body}, f"s{n}{stream}", dialect
                )
            (plain,), (streamed,) = await here.entries(f"s{n}False"), await here.entries(f"s{n}True")
            assert plain.generation_token_ids.tolist() == streamed.generation_token_ids.tolist()
            assert np.array_equal(plain.generation_log_probs, streamed.generation_log_probs)
            assert said(plain) == said(streamed)
        results.append({"check": "streams", "model": served.model, "figure": f"{dialect}: 4 of 4"})


def said(entry):
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in entry.output_items]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("served", ["smollm2"], indirect=True)  # random weights fill a call with white space
async def test_forced_tool_calls_are_parsed_and_their_ids_kept(house, served, results, stream):
    async with house() as here:
        for n in range(3):
            message = await here.chat(
                [{"role": "user", "content": "What is 2 + 3?"}],
                key=f"t{n}",
                stream=stream,
                tools=[ADD],
                tool_choice="required",
                seed=n,
                max_tokens=80,
            )
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "add"
            assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
            (entry,) = await here.entries(f"t{n}")
            assert len(entry.generation_token_ids) == len(entry.generation_log_probs) > 5
        results.append(
            {"check": "tools", "model": served.model, "figure": f"{'streamed' if stream else 'plain'}: 3 of 3"}
        )


async def talk(here, key, stream):
    """A tool call, its result, an answer, and a further question: every way in which a turn is followed.

    Random weights talk only: they fill a call with white space until they are cut.
    """
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    if here.engine.model == "random":
        for turn in range(4):
            messages.append(await here.chat(messages, key, stream, tools=[ADD], seed=turn))
            messages.append({"role": "user", "content": "And twice that?"})
        return
    first = await here.chat(messages, key, stream, tools=[ADD], tool_choice="required", seed=1, max_tokens=80)
    messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "5"}]
    messages.append(await here.chat(messages, key, stream, tools=[ADD], seed=2))
    messages.append({"role": "user", "content": "And twice that?"})
    messages.append(await here.chat(messages, key, stream, tools=[ADD], seed=3))
    messages.append({"role": "user", "content": "Thank you."})
    await here.chat(messages, key, stream, tools=[ADD], seed=4)


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("stream", [False, True])
async def test_every_later_turn_continues_the_sampled_ids_without_a_renderer(house, served, results, stream):
    async with house(token_in="required") as here:
        await talk(here, "r", stream)
        entries = await here.entries()
        assert here.outcomes() == ["first", "exact", "exact", "exact"]
        for before, after in pairwise(entries):
            assert after.prompt_token_ids.tolist()[: len(whole(before))] == whole(before)
            assert after.parent_call_id == before.model_call_id
        built = build(await here.store.freeze("r"))
        assert isinstance(built, Trainable)
        (trace,) = built.traces
        assert int(trace.loss_mask.sum()) == sum(len(entry.generation_token_ids) for entry in entries)
        kind = "streamed" if stream else "plain"
        results.append({"check": "token-in", "model": served.model, "figure": f"{kind}: 4 turns, one chain"})


async def test_what_follows_is_what_the_template_writes_there(house, served, results):
    """Where no thought is written, the engine's own rendering is the ids that we make without it."""
    async with house(token_in="required") as here:
        await here.chat([{"role": "user", "content": "Hi."}], stop=["."], max_tokens=24, seed=5)
        (first,) = await here.entries()
        messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": text_of(first)}]
        await here.chat([*messages, {"role": "user", "content": "And?"}])
        _, second = await here.entries()
        new = second.prompt_token_ids.tolist()[len(whole(first)) :]
        rendered = await here.engine._tokenize(
            {"messages": [*messages, {"role": "user", "content": "And?"}], "add_generation_prompt": True}
        )
        assert rendered[-len(new) :] == new
        results.append({"check": "tail", "model": served.model, "figure": f"{len(new)} ids equal the template's"})


SETTINGS = [
    ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
    ({"reasoning_effort": "low"}, ""),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
    ({"documents": [{"title": "t", "text": "Paris."}]}, "Paris."),
    ({"response_format": {"type": "json_object"}}, ""),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 80}, ""),
    ({"tools": [ADD], "tool_choice": "none"}, ""),
]


@pytest.mark.promise("MS-12")
async def test_the_next_turn_begins_with_the_head_that_the_settings_of_the_request_gave_the_first(
    house, served, results
):
    async with house(token_in="required") as here:
        for index, (settings, written) in enumerate(SETTINGS):
            messages = [{"role": "user", "content": "Hi."}]
            said = await here.chat(messages, f"r{index}", seed=index, **settings)
            answers = [{"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in said.get("tool_calls") or ()]
            messages += [said, *answers, {"role": "user", "content": "And?"}]
            await here.chat(messages, f"r{index}", seed=index, **settings)
            head = f"<|im_start|>assistant\n{written}"
            ids = await here.engine._tokenize({"prompt": head, "add_special_tokens": False})
            prompts = [entry.prompt_token_ids.tolist() for entry in await here.entries(f"r{index}")]
            assert [prompt[-len(ids) :] for prompt in prompts] == [ids, ids]
        assert here.outcomes() == ["first", "exact"] * len(SETTINGS)
        results.append({"check": "head", "model": served.model, "figure": f"{len(SETTINGS)} settings, 2 turns each"})


def text_of(entry):
    return "".join(part["text"] for item in entry.output_items for part in item.get("content", ()))


async def test_without_token_in_the_same_conversation_is_not_one_chain(house, served, results):
    async with house(token_in="off") as here:
        await talk(here, "r", False)
        built = build(await here.store.freeze("r"))
        assert not isinstance(built, Trainable)
        reasons = ", ".join(sorted({reason.partition(":")[0] for reason in built.reasons}))
        results.append({"check": "off", "model": served.model, "figure": f"masked: {reasons}"})


@pytest.mark.promise("CP-14")
async def test_an_independent_forward_pass_agrees_with_every_captured_logprob(house, served, results):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32).eval()
    async with house(token_in="required") as here:
        messages = [{"role": "user", "content": SAY}]
        for turn in range(3):
            message = await here.chat(messages, seed=turn, stream=turn % 2 == 1)
            messages += [message, {"role": "user", "content": "Go on."}]
        built = build(await here.store.freeze("r"))
        assert isinstance(built, Trainable)
        entries = await here.entries()
    worst, count = 0.0, 0
    for entry in entries:
        ids, first = whole(entry), len(entry.prompt_token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, first - 1 : -1].double()
        chosen = torch.tensor(ids[first:])[:, None]
        theirs = torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].numpy()
        worst = max(worst, float(np.abs(theirs - entry.generation_log_probs).max()))
        count += len(theirs)
    assert count >= 20
    assert worst < THRESHOLD
    results.append({"check": "recompute", "model": served.model, "figure": f"{worst:.1e} over {count} ids"})


async def test_an_engine_that_dies_of_its_first_call_is_named_at_the_start(start_vllm, results):
    with start_vllm("dying") as server:
        begun = time.monotonic()
        async with Client() as client:
            engine = VllmEngine(client=client, base_url=server.url, max_attempts=1)
            with pytest.raises(EngineUnavailable, match=server.url):
                await engine.start()
        took = time.monotonic() - begun
    results.append({"check": "dying", "model": "dying", "figure": f"named with its URL after {took:.1f} s"})

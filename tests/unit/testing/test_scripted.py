"""The scripted engine and its tokeniser: exact by construction, and able to show what is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.correlation.context import rollout_context
from toprope.dialects.chat_history import items_from_messages, messages_from_items
from toprope.dialects.chat_parts import plain_text
from toprope.dialects.deltas import Delta
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import ConfigError, EngineError
from toprope.servers.model.engines.base import EngineRequest
from toprope.testing import toy_tokenizer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, output_items
from toprope.wire.responses import ResponsesRequest


def ask(items, **more):
    return EngineRequest(ResponsesRequest(input=tuple(items), **more), "call-1")


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from([1, 2, 3]))
def test_text_and_ids_determine_each_other(text, width):
    ids = toy_tokenizer.encode(text, width=width)
    assert toy_tokenizer.decode(ids) == text
    assert all(16 <= token < 2**32 for token in ids)


_say = st.builds(
    ScriptedReply,
    text=st.none() | st.text(max_size=12),
    reasoning=st.none() | st.text(min_size=1, max_size=6),
    calls=st.lists(st.builds(ScriptedCall, name=st.just("add"), arguments=st.text(max_size=6)), max_size=2),
    finish_reason=st.sampled_from([None, "length"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_say, min_size=1, max_size=4))
async def test_the_next_prompt_is_this_prompt_and_generation_and_what_came_since(says):
    engine = ScriptedEngine(script=says)
    items = [{"type": "message", "role": "user", "content": "go"}]
    before: list[int] = []
    for _ in says:
        reply = await engine.generate(ask(items))
        assert reply.tokens is not None
        prompt = reply.tokens.prompt_token_ids.tolist()
        assert prompt[: len(before)] == before
        before = prompt + reply.tokens.generation_token_ids.tolist()
        items += reply.output
        items += [
            {"type": "function_call_output", "call_id": "c", "output": "3"}
            for item in reply.output
            if item["type"] == "function_call"
        ] or [{"type": "message", "role": "user", "content": "more"}]


async def test_a_history_that_went_through_chat_gives_the_same_prompt():
    engine = ScriptedEngine(script=[ScriptedReply(text="I add.", calls=[ScriptedCall("add", '{ "a":1}', "c")])])
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    reply = await engine.generate(ask(items))
    history = [*items, *reply.output, {"type": "function_call_output", "call_id": "c", "output": "3"}]
    crossed = items_from_messages(messages_from_items(history)[0])
    assert toy_tokenizer.prompt_ids(ask(crossed).request) == toy_tokenizer.prompt_ids(ask(history).request)


async def test_a_retokenised_history_reads_the_same_and_is_not_the_same():
    plain, other = ScriptedEngine(), ScriptedEngine(retokenise_history=True)
    items = [
        {"type": "message", "role": "user", "content": "go"},
        *output_items(ScriptedReply(text="forty two")),
        {"type": "message", "role": "user", "content": "more"},
    ]
    prompts = [(await engine.generate(ask(items))).tokens.prompt_token_ids.tolist() for engine in (plain, other)]
    assert prompts[0] != prompts[1]
    assert toy_tokenizer.decode(prompts[0]) == toy_tokenizer.decode(prompts[1])


async def test_a_list_goes_by_turns_taken_and_conditions_come_first():
    engine = ScriptedEngine(
        script=["first", {"text": "second"}, {"text": "special", "when": {"contains": "magic", "rollout": "4-2"}}]
    )
    user = {"type": "message", "role": "user", "content": "go"}
    said = {"type": "message", "role": "assistant", "content": "first"}

    async def text(items):
        return (await engine.generate(ask(items))).output[0]["content"][0]["text"]

    assert await text([user]) == "first"
    assert await text([user, said, user]) == "second"
    assert await text([user, said, user, said, user]) == "second"
    magic = {**user, "content": "magic"}
    assert await text([magic]) == "first"
    with rollout_context("4-2"):
        assert await text([magic]) == "special"


@pytest.mark.parametrize(
    ("damage", "fault", "tokens"),
    [("no_ids", True, False), ("no_logprobs", True, False), ("nan", False, True), ("short", False, True)],
)
async def test_a_damaged_bundle_is_damaged_as_asked(damage, fault, tokens):
    reply = await ScriptedEngine(script=[{"text": "abcdef", "tokens": damage}]).generate(ask([]))
    assert (reply.token_fault is not None, reply.tokens is not None) == (fault, tokens)
    if damage == "nan":
        assert str(reply.tokens.generation_log_probs[1]) == "nan"
    if damage == "short":
        assert len(reply.tokens.generation_log_probs) == len(reply.tokens.generation_token_ids) - 1


async def test_given_ids_replace_the_made_up_ones():
    script = [{"text": "x", "prompt_token_ids": [1, 10], "token_ids": [50, 2], "log_probs": [-0.1, -0.2]}]
    reply = await ScriptedEngine(script=script).generate(ask([]))
    assert reply.tokens.prompt_token_ids.tolist() == [1, 10]
    assert reply.tokens.generation_log_probs.tolist() == [-0.1, -0.2]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (2, 2)


async def test_a_script_file_is_read_and_a_bad_one_is_refused_with_what_is_accepted(tmp_path):
    path = tmp_path / "script.yaml"
    path.write_text("replies:\n  - text: hi\n  - calls: [{name: add, arguments: {a: 1}}]\n")
    reply = await ScriptedEngine(script=str(path)).generate(ask([{"role": "assistant", "content": "hi"}]))
    assert reply.output[0]["arguments"] == '{"a":1}'
    path.write_text("replies:\n  - txt: hi\n")
    with pytest.raises(ConfigError, match=r"txt.*accepted are text"):
        ScriptedEngine(script=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ScriptedEngine(script=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="module:function"):
        ScriptedEngine(script="toprope.nowhere:script")


async def test_a_scripted_fault_is_an_engine_error_with_its_status():
    engine = ScriptedEngine(script=[{"fault": {"status": 401, "message": "key", "kind": "model_auth"}}])
    with pytest.raises(EngineError, match="key") as caught:
        await engine.generate(ask([]))
    assert (caught.value.upstream_status, caught.value.retryable) == (401, False)


async def test_tools_are_part_of_the_prompt():
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    with_tools = request_from_responses({"input": "x", "tools": tools})
    assert toy_tokenizer.prompt_ids(with_tools) != toy_tokenizer.prompt_ids(request_from_responses({"input": "x"}))


# Streams


@settings(max_examples=200, deadline=None)
@given(_say)
async def test_the_deltas_of_a_reply_joined_are_its_items_and_streaming_changes_nothing(say):
    plain = await ScriptedEngine(script=[say]).generate(ask([]))
    deltas: list[Delta] = []
    streamed = await ScriptedEngine(script=[say]).generate(replace(ask([]), emit=deltas.append))
    assert streamed.output == plain.output
    assert streamed.tokens.generation_token_ids.tolist() == plain.tokens.generation_token_ids.tolist()
    assert sorted({delta.index for delta in deltas}) == list(range(len(plain.output)))
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    for index, item in enumerate(plain.output):
        mine = [delta for delta in deltas if delta.index == index]
        if item["type"] == "function_call":
            assert "".join(delta.arguments for delta in mine) == item["arguments"]
            assert [delta.name for delta in mine] == [item["name"]] + [None] * (len(mine) - 1)
        else:
            assert "".join(delta.text for delta in mine) == item["content"][0]["text"]


async def test_each_delta_waits_for_what_the_test_says_and_so_does_the_end():
    gates = [asyncio.Event() for _ in range(4)]
    arrived = [asyncio.Event() for _ in range(4)]
    deltas: list[Delta] = []

    async def pace(request: EngineRequest, number: int) -> None:
        arrived[number].set()
        await gates[number].wait()

    engine = ScriptedEngine(script=[{"pieces": ["a", "b", "c"]}], pace=pace)
    running = asyncio.create_task(engine.generate(replace(ask([]), emit=deltas.append)))
    for number in range(4):
        await arrived[number].wait()
        assert [delta.text for delta in deltas] == ["a", "b", "c"][:number]
        gates[number].set()
    assert plain_text((await running).output[0]["content"]) == "abc"


@pytest.mark.parametrize("after", [0, 1, 3, 99])
async def test_a_scripted_fault_comes_after_so_many_deltas(after):
    deltas: list[Delta] = []
    say = {"pieces": ["a", "b", "c"], "fault": {"message": "died"}, "fault_after": after}
    engine = ScriptedEngine(script=[say])
    with pytest.raises(EngineError, match="died"):
        await engine.generate(replace(ask([]), emit=deltas.append))
    assert [delta.text for delta in deltas] == ["a", "b", "c"][:after]
    with pytest.raises(EngineError, match="died"):
        await engine.generate(ask([]))


async def test_a_prompt_of_ids_is_obeyed_where_the_engine_was_told_to_accept_it():
    given_ids = np.array([5, 6, 7], dtype=np.uint32)
    for accepts in (True, False):
        engine = ScriptedEngine(accepts_token_prompt=accepts)
        assert engine.capabilities.accepts_token_prompt is accepts
        reply = await engine.generate(replace(ask([]), prompt_token_ids=given_ids))
        assert (reply.tokens.prompt_token_ids.tolist() == [5, 6, 7]) is accepts

"""Calls the model is made to write, and calls it writes by itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from toprope.errors.tree import ModelRejected
from toprope.servers.model.engines.embedded.replies import output_items, parse_call

TASK = "What is 7 + 8? use add"


async def test_over_32_seeds_the_forced_arguments_differ_and_some_are_wrong(talk) -> None:
    replies = await asyncio.gather(
        *[talk(TASK, tools=(talk.add,), tool_choice="required", max_output_tokens=80, seed=seed) for seed in range(32)]
    )
    whole = [reply for reply in replies if reply.finish_reason == "tool_calls"]
    assert len(whole) > 24
    said = [tuple(sorted(talk.arguments(reply).items())) for reply in whole]
    assert len(set(said)) > 1
    assert any(dict(pair) != {"a": 7, "b": 8} for pair in said)
    free = [
        logprob
        for reply in whole
        for logprob, forced in zip(talk.logprobs(reply), reply.tokens.grammar_forced, strict=True)
        if not forced
    ]
    assert min(free) < -0.01


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
async def test_a_forced_call_is_one_call_whose_frame_is_flagged(talk, vocabulary, choice) -> None:
    other = {"type": "function", "name": "subtract", "parameters": talk.add["parameters"], "strict": True}
    tools = (talk.add,) if choice == "required" else (other, talk.add)
    reply = await talk(TASK, tools=tools, tool_choice=choice, max_output_tokens=80, temperature=0.0)
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.output
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert set(json.loads(call["arguments"])) == {"a", "b"}
    forced = reply.tokens.grammar_forced.tolist()
    ids = talk.ids(reply)
    assert len(forced) == len(ids) == len(talk.logprobs(reply))
    assert vocabulary.decode(ids[: forced.index(False)]).startswith('<tool_call>\n{"name": "add", "arguments": {"a":')
    assert ids[-1] == 2
    assert forced[-1]
    # Forced ids keep the model's own logprob: it would not have opened a call by itself.
    assert talk.logprobs(reply)[0] < -0.5
    frame = '<tool_call>\n{"name": "add", "arguments": '
    assert vocabulary.decode(ids) == frame + call["arguments"] + "}\n</tool_call>"


async def test_runs_of_forced_ids_cost_one_pass(talk) -> None:
    before = talk.engine.forward_passes
    reply = await talk(TASK, tools=(talk.add,), tool_choice="required", max_output_tokens=80, seed=2)
    free = len(talk.ids(reply)) - int(reply.tokens.grammar_forced.sum())
    # One for the prompt with the first run, at most one a free id, one for the closing run.
    assert talk.engine.forward_passes - before <= free + 2
    assert free < len(talk.ids(reply)) / 2


async def test_a_forced_call_has_the_same_bits_alone_and_beside_others(talk) -> None:
    asked = {"tools": (talk.add,), "tool_choice": "required", "max_output_tokens": 60}
    alone = await talk(TASK, seed=9, **asked)
    together = await asyncio.gather(
        talk("Tell me a story.", seed=1), talk(TASK, seed=9, **asked), talk("Add 1 and 2.", seed=3, **asked)
    )
    assert talk.ids(together[1]) == talk.ids(alone)
    assert talk.logprobs(together[1]) == talk.logprobs(alone)


async def test_the_turn_after_a_forced_call_extends_its_prompt_and_ids_exactly(talk, vocabulary) -> None:
    first = await talk(TASK, session="f-1", tools=(talk.add,), tool_choice="required", max_output_tokens=80, seed=3)
    call = first.output[0]
    history = [talk.user(TASK), call, talk.result(call, "15")]
    second = await talk(history, session="f-1", tools=(talk.add,), tool_choice="none", max_output_tokens=4)
    said = talk.prompt(first) + talk.ids(first) + [198]
    assert talk.prompt(second)[: len(said)] == said
    tail = vocabulary.decode(talk.prompt(second)[len(said) :])
    assert tail.endswith("assistant\n")
    assert "15" in tail


async def test_a_strict_schema_that_cannot_be_enforced_is_refused_with_the_reason(talk) -> None:
    bad = {**talk.add, "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}
    with pytest.raises(ModelRejected, match=r"'add'.*Unimplemented keys: \[\"not\"\]") as caught:
        await talk(TASK, tools=(bad,), tool_choice="required")
    assert caught.value.status == 400


async def test_without_strict_the_arguments_are_some_object(talk) -> None:
    loose = {"type": "function", "name": "note", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    asked = {"tools": (loose,), "tool_choice": "required", "max_output_tokens": 80}
    replies = await asyncio.gather(*[talk(TASK, seed=seed, **asked) for seed in range(8)])
    calls = [reply.output[0] for reply in replies if reply.finish_reason == "tool_calls"]
    assert calls
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    assert all(call["name"] == "note" for call in calls)


async def test_a_forced_call_cut_by_length_stays_text(talk) -> None:
    reply = await talk(TASK, tools=(talk.add,), tool_choice="required", max_output_tokens=10, seed=1)
    assert reply.finish_reason == "length"
    assert reply.output[0]["type"] == "message"
    assert len(talk.ids(reply)) == len(talk.logprobs(reply)) == 10


def test_a_call_in_free_text_keeps_its_arguments_byte_for_byte() -> None:
    arguments = '{ "b":8,\n  "a" :7.0, "s": "\\u00e9}" }'
    text = f'I add.\n<tool_call>{{"arguments": {arguments} , "name":"add"}}</tool_call>'
    message, call = output_items(text, calls=True, complete=True)
    assert message["content"][0]["text"] == "I add.\n"
    assert (call["name"], call["arguments"]) == ("add", arguments)


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "add", "arguments": {"a": 7',
        '{"name": "add"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {}} and more',
        '{"name": "add" "arguments": {}}',
        "[" * 100_000,
        "",
    ],
)
def test_what_is_no_call_stays_text(block: str) -> None:
    assert parse_call(block) is None
    text = f"<tool_call>{block}</tool_call>"
    (item,) = output_items(text, calls=True, complete=True)
    assert item["content"][0]["text"] == text


def test_call_blocks_stay_text_where_calls_are_off_and_a_reply_is_never_empty() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert [item["type"] for item in output_items(text, calls=False, complete=True)] == ["message"]
    assert [item["type"] for item in output_items(text * 2, calls=True, complete=True)] == ["function_call"] * 2
    (empty,) = output_items("", calls=True, complete=False)
    assert (empty["content"][0]["text"], empty["status"]) == ("", "incomplete")

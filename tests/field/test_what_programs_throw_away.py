"""Answers that a program asked for and did not keep, and calls beside its conversation: on record, never in the row.

Qwen Code throws an answer away that was cut and asks again with more room; mini-swe-agent drops a turn with a broken
call and tells the model what was wrong; opencode asks for a title while its first call runs. All on real sockets.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests.unit.model.wire import Wire, on_the_wire

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.testing.scripted import ScriptedEngine
from toprope.testing.upstream import ScriptedUpstream, completion

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "go"}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]


def sampled(prompt, generated, text, finish="stop"):
    return completion(
        {"role": "assistant", "content": text},
        finish_reason=finish,
        prompt_token_ids=prompt,
        token_ids=generated,
        log_probs=[-0.1] * len(generated),
    )


async def delivered(bench, last):
    """What delivery makes of the rollout whose final answer is the text of `last`."""
    text = last.json()["choices"][0]["message"]["content"]
    content = [{"type": "output_text", "text": text, "annotations": []}]
    response = {"id": "r", "output": [{"type": "message", "role": "assistant", "content": content}]}
    row = {"_ng_rollout_id": "r", "_ng_attempt_index": 0, "response": response}
    made = await finalize_rollout_token_capture(row, bench.store, settle_s=0)
    assert made is not None
    assert made["metrics"]["mask_reasons"] == [], made
    trained = [
        item["generation_token_ids"] for item in made["rebuilt_response"]["output"] if "prompt_token_ids" in item
    ]
    return trained, made["metrics"]


async def test_an_answer_that_was_cut_and_asked_for_again_is_kept_and_not_delivered(model_bench):
    upstream = ScriptedUpstream(
        [
            sampled([1, 10], [50, 51], "half an", finish="length"),
            sampled([1, 10], [52, 2], "a whole answer"),
            sampled([1, 10, 52, 2, 9, 11], [53, 2], "the end"),
        ]
    )
    async with model_bench(upstream) as bench:
        asked = {"model": "m", "messages": [ASK], "tools": TOOLS}
        await bench.call(CHAT, {**asked, "max_tokens": 32})
        second = await bench.call(CHAT, {**asked, "max_tokens": 64})
        history = [ASK, second.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
        last = await bench.call(CHAT, {**asked, "messages": history})
        trained, metrics = await delivered(bench, last)
        assert trained == [[52, 2], [53, 2]]
        assert (metrics["n_calls"], metrics["generated_tokens_captured"]) == (3, 6)


async def test_a_turn_that_the_program_dropped_from_its_history_is_kept_and_not_delivered(model_bench):
    upstream = ScriptedUpstream(
        [sampled([1, 10], [50, 2], "no call at all"), sampled([1, 10, 9, 12], [52, 2], "a good answer")]
    )
    async with model_bench(upstream) as bench:
        await bench.call(CHAT, {"model": "m", "messages": [ASK], "tools": TOOLS})
        told = [ASK, {"role": "user", "content": "that was no call; try again"}]
        last = await bench.call(CHAT, {"model": "m", "messages": told, "tools": TOOLS})
        trained, metrics = await delivered(bench, last)
        assert trained == [[52, 2]]
        assert (metrics["n_calls"], metrics["generated_tokens_captured"]) == (2, 4)


async def test_a_title_asked_for_beside_the_first_call_joins_no_conversation(model_bench):
    under_way = asyncio.Barrier(2)

    def answer(request):
        if "tools" not in request.json():
            return replace(sampled([1, 80], [81, 2], "A title"), before=under_way.wait)
        if len(request.json()["messages"]) == 1:
            return replace(sampled([1, 10], [52, 2], "working"), before=under_way.wait)
        return sampled([1, 10, 52, 2, 9, 11], [53, 2], "the end")

    async with model_bench(ScriptedUpstream(answer=answer)) as bench:
        title = {"model": "m", "messages": [{"role": "system", "content": "Give a title."}, ASK]}
        main = {"model": "m", "messages": [ASK], "tools": TOOLS}
        first, _ = await asyncio.gather(bench.call(CHAT, main), bench.call(CHAT, title))
        history = [ASK, first.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
        last = await bench.call(CHAT, {**main, "messages": history})
        trained, metrics = await delivered(bench, last)
        assert trained == [[52, 2], [53, 2]]
        assert (metrics["n_calls"], metrics["generated_tokens_captured"]) == (3, 6)


@pytest.mark.parametrize("key", ["authorization", "x_api_key"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/v1/messages"])
async def test_a_messages_client_is_served_with_either_key_header_base_url_and_any_version(key, path):
    """Libraries add `/v1` to their base URL, and people give them one that has it already."""
    store = MemoryStore()
    engine = ScriptedEngine(script=[{"text": "hi"}])
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store), api_key="k") as wire:
        prefix = "/ng-rollout/4-2/training-token-capture"
        body = {"model": "m", "max_tokens": 9, "messages": [ASK]}
        given = {key: "Bearer k" if key == "authorization" else "k", "anthropic_version": "2039-01-01"}
        assert isinstance(wire, Wire)
        call = await wire.call(f"{prefix}{path}?beta=true", body, **given)
        said = json.loads(await call.end())
        counted = await wire.call(f"{prefix}{path}/count_tokens", body, **given)
        await counted.end()
        assert (call.status, counted.status, said["type"]) == (200, 200, "message")
        refused = await wire.call(f"{prefix}{path}", body, **{**given, key: "wrong"})
        assert json.loads(await refused.end())["type"] == "error"
    snapshot = await store.freeze("4-2")
    assert (len(snapshot.entries), snapshot.incomplete) == (1, False)

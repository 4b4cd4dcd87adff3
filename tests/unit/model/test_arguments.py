"""Argument strings are found in the record however many calls of a rollout look for them at once."""

from __future__ import annotations

import asyncio
import json

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.correlation.context import RolloutContext, bound_rollout
from toprope.dialects.messages_request import request_from_messages
from toprope.servers.model.arguments import SampledArguments
from toprope.servers.model.call import ModelCall
from toprope.tokens.sampled import SampledTokens

KEY = "task-1"


class SlowReads(MemoryStore):
    """A store whose readers wait at a gate once they have read."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.gate = asyncio.Semaphore(0), asyncio.Event()

    async def open_entries(self, rollout_id, since=0):
        entries = await super().open_entries(rollout_id, since)
        self.both.release()
        await self.gate.wait()
        return entries


async def recorded(store: MemoryStore, number: int, call_id: str, arguments: str) -> None:
    recorder = Recorder(store)
    name = f"call-{number}"
    call = {"type": "function_call", "id": f"fc_{number}", "call_id": call_id, "name": "f", "arguments": arguments}
    await recorder.begin(KEY, name)
    await recorder.record(
        CallEvidence(
            key=KEY,
            call_id=name,
            model="m",
            request_items=({"type": "message", "role": "user", "content": "go"},),
            output_items=(call,),
            tokens=SampledTokens([1, 2], [3, number + 4], [-0.5, -0.5]),
            token_fault=None,
            usage_output_tokens=2,
            finish_reason="tool_calls",
            response_id=name,
            sampling={},
            request_digest="",
            logprobs_mode="raw",
            dialect="messages",
        )
    )
    await recorder.close()


def asking(*calls: tuple[str, str]) -> ModelCall:
    """A request whose history has these calls, as objects, as a Messages client returns them."""
    messages = [{"role": "user", "content": "go"}]
    for call_id, arguments in calls:
        block = {"type": "tool_use", "id": call_id, "name": "f", "input": json.loads(arguments)}
        messages += [
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "ok"}]},
        ]
    body = {"model": "m", "max_tokens": 10, "messages": messages}
    return ModelCall(
        call_id="asks",
        dialect="messages",
        request=request_from_messages(body),
        body=body,
        request_digest="",
        rollout_id=KEY,
        captured=True,
    )


def strings(call: ModelCall) -> list[str]:
    return [item["arguments"] for item in call.request.input if item["type"] == "function_call"]


async def test_two_calls_that_read_the_record_at_once_skip_nothing_that_comes_later():
    store = SlowReads()
    await recorded(store, 0, "a", '{ "x" :1}')
    known = SampledArguments(Recorder(store, reader=store))
    with bound_rollout(RolloutContext(KEY, True)):
        both = [asyncio.ensure_future(known.restore(asking(("a", '{"x": 1}')))) for _ in range(2)]
        for _ in both:
            await store.both.acquire()
        store.gate.set()
        assert [strings(each) for each in await asyncio.gather(*both)] == [['{ "x" :1}'], ['{ "x" :1}']]
        await recorded(store, 1, "b", '{"y":  2}')
        later = await known.restore(asking(("a", '{"x": 1}'), ("b", '{"y": 2}')))
    assert (strings(later), later.losses) == (['{ "x" :1}', '{"y":  2}'], ())


async def test_an_id_that_an_engine_gives_again_is_paired_by_occurrence():
    store = MemoryStore()
    spellings = ['{ "x" :1}', '{"x":  1}']
    for number, arguments in enumerate(spellings):
        await recorded(store, number, "again", arguments)
    known = SampledArguments(Recorder(store, reader=store))
    done = await known.restore(asking(("again", '{"x": 1}'), ("again", '{"x": 1}')))
    assert (strings(done), done.losses) == (spellings, ())

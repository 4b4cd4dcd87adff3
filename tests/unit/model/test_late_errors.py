"""Errors that come after a stream's headers left and before anything was said: the terminal ones are told, not cut."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest
from tests.unit.model.wire import ASK, CAPTURED, Typist, events, on_the_wire

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.kinds import Kind
from toprope.errors.tree import ModelContextLength
from toprope.testing.scripted import ScriptedFault, ScriptedReply

TOO_LONG = ScriptedFault(status=400, message="maximum context length is 10", kind=Kind.MODEL_CONTEXT_LENGTH)
QUIET = {"chat": b": ", "responses": b": ", "messages": b"event: ping"}


class Late:
    """An engine's script that says nothing until `go`, and then fails."""

    def __init__(self, fault):
        self.fault, self.faults, self.go = fault, [], asyncio.Event()

    async def __call__(self, told):
        fault = self.faults.pop(0) if self.faults else self.fault
        await self.go.wait()
        if fault is TOO_LONG:
            raise ModelContextLength(fault.message, upstream_status=400)
        return ScriptedReply(fault=fault)


@pytest.mark.parametrize("prefix", ["", CAPTURED])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_terminal_error_after_a_long_silence_is_told_in_the_stream_and_ends_it(dialect, prefix):
    store, late = MemoryStore(), Late(TOO_LONG)
    settings = {"recorder": Recorder(store, reader=store), "keep_alive_s": 0.01}
    async with on_the_wire(engine=Typist(script=late), **settings) as wire:
        call = await wire.ask(dialect, stream=True, prefix=prefix)
        await call.read(lambda body: QUIET[dialect] in body)
        late.go.set()
        said = events(await call.end())
    name, told = said[-1][0], json.loads(said[-1][1])
    assert (call.status, call.whole) == (200, True)
    assert name == ("" if dialect == "chat" else "error")
    assert told["error"]["message"].endswith("maximum context length is 10")
    assert told["error"]["kind"] == Kind.MODEL_CONTEXT_LENGTH
    if dialect == "responses":
        numbers = [json.loads(data)["sequence_number"] for _, data in said]
        assert numbers == list(range(len(said)))
        assert (told["type"], told["code"]) == ("error", "context_length_exceeded")
    if dialect == "messages":
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    if prefix:
        assert f"truncated:{Kind.MODEL_CONTEXT_LENGTH}" in (await store.freeze("4-2")).reasons


@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_an_error_that_a_resend_may_mend_cuts_the_silent_stream(dialect):
    late = Late(ScriptedFault())
    async with on_the_wire(engine=Typist(script=late), keep_alive_s=0.01) as wire:
        call = await wire.ask(dialect, stream=True, prefix="")
        await call.read(lambda body: QUIET[dialect] in body)
        late.go.set()
        with pytest.raises(EOFError):
            await call.end()
    assert b"scripted fault" not in call.body


@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_terminal_error_after_a_delta_cuts_the_stream(dialect):
    script = [ScriptedReply(text="some words", fault=TOO_LONG, fault_after=1)]
    async with on_the_wire(engine=Talker(script=script), keep_alive_s=0.01) as wire:
        call = await wire.ask(dialect, stream=True, prefix="")
        with pytest.raises(EOFError):
            await call.end()
    assert b"maximum context" not in call.body


class Talker(Typist):
    """Says its deltas as the script has them."""

    async def generate(self, request):
        return await super(Typist, self).generate(request)


@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_held_retry_is_told_a_terminal_error_and_cut_at_any_other(dialect):
    """Marked retries wait for a call that fails, each with comments meanwhile, and are new calls then."""
    store, late = MemoryStore(), Late(ScriptedFault())
    recorder = Recorder(store, reader=store)
    async with on_the_wire(engine=Typist(script=late), recorder=recorder, keep_alive_s=0.01) as wire:
        calls = [await wire.ask(dialect, stream=True)]
        for count in (1, 2):
            await calls[-1].read(lambda body: QUIET[dialect] in body or b"\n: " in b"\n" + body)
            calls.append(await wire.ask(dialect, stream=True, x_stainless_retry_count=count))
        await calls[-1].read(lambda body: b": " in body)
        late.faults = [ScriptedFault(message="come again"), TOO_LONG]
        late.go.set()
        ends = await asyncio.gather(*[call.end() for call in calls], return_exceptions=True)
    assert [isinstance(end, EOFError) for end in ends] == [True, True, False]
    ((_, told),) = events(calls[-1].body)
    assert json.loads(told)["error"]["kind"] == Kind.MODEL_CONTEXT_LENGTH
    assert b"come again" not in calls[1].body


@pytest.mark.promise("MS-8")
async def test_public_clients_raise_at_a_late_terminal_error_and_do_not_send_it_again():
    late = Late(TOO_LONG)
    async with on_the_wire(engine=Typist(script=late), keep_alive_s=0.01) as wire:
        root = f"http://127.0.0.1:{wire.port}"
        asyncio.get_running_loop().call_later(0.05, late.go.set)
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=2) as client:
            for create, body in (
                (client.chat.completions.create, ASK["chat"][1]),
                (client.responses.create, ASK["responses"][1]),
            ):
                with pytest.raises(openai.APIError, match="maximum context length") as raised:
                    async for _ in await create(**body, stream=True):
                        pass
                assert not isinstance(raised.value, openai.APIConnectionError)
        async with anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=2) as client:
            with pytest.raises(anthropic.APIStatusError, match="maximum context length"):
                async with client.messages.stream(**ASK["messages"][1]) as stream:
                    await stream.get_final_message()
        assert wire.server.engine.calls == 3

"""Streamed replies on a real socket: deltas leave as they come, the end waits for the record, leavers lose nothing."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from tests.unit.model.wire import ASK, CAPTURED, ENDS, Typist, events, on_the_wire

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.tree import CaptureError
from toprope.http.app import Limits
from toprope.servers.model.retries import CLIENT_GONE
from toprope.telemetry.calls import CallLog, read_call_log
from toprope.testing.scripted import ScriptedCall, ScriptedReply
from toprope.trajectory.build import Trainable, build

DIALECTS = sorted(ASK)
RICH = ScriptedReply(
    reasoning="I shall add.",
    text="na\u00efve \u2028 \U0001f600",
    calls=[ScriptedCall("add", '{ "a" : 1e2 }', "c1"), ScriptedCall("mul", '{"b":"caf\\u00e9"}', "c2")],
)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def recorder(store):
    return Recorder(store, reader=store)


def at(body, dialect):
    """How much of the text came."""
    return body.count(b'"content":"') if dialect == "chat" else body.count(b'"delta":')


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("prefix", ["", CAPTURED])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_engine_goes_on_only_when_the_client_has_read_each_piece(recorder, dialect, prefix):
    read = [asyncio.Event() for _ in range(6)]
    engine = Typist(script=["abcdef"], before=lambda number: read[number].wait())
    async with on_the_wire(engine=engine, recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=True, prefix=prefix)
        for number in range(6):
            read[number].set()
            await asyncio.wait_for(call.read(lambda body, n=number: at(body, dialect) > n), 10)
        body = await asyncio.wait_for(call.end(), 10)
    assert call.status == 200
    assert call.headers["content-type"].startswith("text/event-stream")
    assert ENDS[dialect] in body


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_end_of_a_stream_waits_for_the_record_and_its_deltas_do_not(recorder, store, dialect):
    reached, durable = asyncio.Event(), asyncio.Event()
    put = store.put

    async def slow(entry):
        reached.set()
        await durable.wait()
        return await put(entry)

    store.put = slow
    async with on_the_wire(engine=Typist(script=["abc"]), recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=True)
        await call.read(lambda body: at(body, dialect) >= 3)
        await reached.wait()
        for ending in (b'finish_reason":"stop', b"completed", b"message_delta", b"message_stop", b"[DONE]"):
            assert ending not in call.body
        durable.set()
        assert ENDS[dialect] in await call.end()
    assert len((await store.freeze("4-2")).entries) == 1


@pytest.mark.promise("MS-1")
async def test_one_conversation_in_three_dialects_plain_and_streamed_gives_six_equal_records():
    image = "data:image/png;base64,iVBORw0KGgo="
    tools = {
        "chat": [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "mul")],
        "responses": [{"type": "function", "name": name, "parameters": {}} for name in ("add", "mul")],
        "messages": [{"name": name, "input_schema": {}} for name in ("add", "mul")],
    }
    words = "z\u00e4hle \u2028 \U0001f600"
    parts = {
        "chat": [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": image}}],
        "responses": [{"type": "input_text", "text": words}, {"type": "input_image", "image_url": image}],
        "messages": [
            {"type": "text", "text": words},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        ],
    }
    found = {}
    for dialect in DIALECTS:
        for stream in (False, True):
            store = MemoryStore(clock=lambda: 1.0)
            recorder = Recorder(store, reader=store, clock=lambda: 1.0)
            turns = [{"role": "user", "content": parts[dialect]}]
            limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
            history = "input" if dialect == "responses" else "messages"
            more = {"tools": tools[dialect], history: turns, limit: 100}
            async with on_the_wire(engine=Typist(script=[RICH], size=3), recorder=recorder) as wire:
                call = await wire.ask(dialect, stream=stream, more=more)
                await call.end()
                assert call.status == 200, call.body
            (entry,) = (await store.freeze("4-2")).entries
            dump = entry.model_dump()
            for minted in ("dialect", "model_call_id", "response_id", "request_digest"):
                dump.pop(minted)
            for item in dump["output_items"]:
                item.pop("id")
            found[dialect, stream] = json.dumps(dump, sort_keys=True)
    assert len(found) == 6
    assert len(set(found.values())) == 1, found
    assert json.loads(found["chat", True])["media"] is True


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_where_a_record_is_demanded_and_fails_the_stream_is_cut_and_never_finished(dialect, store):
    async def refuse(entry):
        raise CaptureError("the disk is full")

    store.put = refuse
    recorder = Recorder(store, reader=store, on_capture_error="fail")
    async with on_the_wire(engine=Typist(script=["abc"]), recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=True)
        with pytest.raises(EOFError):
            await call.end()
        assert at(call.body, dialect) >= 3
        assert ENDS[dialect] not in call.body
        plain = await wire.ask(dialect)
        await plain.end()
        assert plain.status == 500


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_upstream_that_dies_after_deltas_cuts_and_before_them_is_a_status(recorder, store, dialect):
    async with on_the_wire(engine=Typist(script=["abcdef"], fail_after=3), recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=True)
        with pytest.raises(EOFError):
            await call.end()
        assert at(call.body, dialect) == 3
        assert b"error" not in call.body.replace(b'"error":null', b"")
        wire.server.engine.fail_after = 0
        call = await wire.ask(dialect, stream=True)
        body = json.loads(await call.end())
        assert call.status == 500
        assert ("type" in body) == (dialect == "messages")
    snapshot = await store.freeze("4-2")
    assert (snapshot.entries, snapshot.incomplete) == ((), False)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_long_silence_is_filled_with_what_no_client_takes_for_an_event(recorder, dialect):
    spoken = asyncio.Event()
    engine = Typist(script=["ab"], before=lambda number: spoken.wait())
    async with on_the_wire(engine=engine, recorder=recorder, keep_alive_s=0.01) as wire:
        call = await wire.ask(dialect, stream=True)
        quiet = b"event: ping" if dialect == "messages" else b"\n: "
        await asyncio.wait_for(call.read(lambda body: (b"\n" + body).count(quiet) >= 3), 10)
        spoken.set()
        body = await call.end()
    assert ENDS[dialect] in body
    assert all(json.loads(data) for _, data in events(body) if data != "[DONE]")


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_client_that_leaves_aborts_the_intent_at_once_and_the_drained_record_removes_it(
    recorder, store, dialect, stream
):
    started, go_on, aborted, put = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    abort_call, put_entry = store.abort_call, store.put

    async def noticing(*given, **more):
        await abort_call(*given, **more)
        aborted.set()

    async def putting(entry):
        ack = await put_entry(entry)
        put.set()
        return ack

    async def before(number):
        started.set()
        if number == 2:
            await go_on.wait()

    store.abort_call, store.put = noticing, putting
    async with on_the_wire(engine=Typist(script=["abcdef"], before=before), recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=stream)
        await started.wait()
        if stream:
            await call.read(lambda body: at(body, dialect) >= 2)
        call.leave()
        await asyncio.wait_for(aborted.wait(), 10)
        ((_, told),) = [(each.call_id, each.abort) for each in await store.begun_calls("4-2")]
        assert told == "client_gone"
        go_on.set()
        await asyncio.wait_for(put.wait(), 10)
    snapshot = await store.freeze("4-2")
    assert [entry.client_gone for entry in snapshot.entries] == [True]
    assert not snapshot.incomplete
    assert snapshot.entries[0].output_items[0]["content"][0]["text"] == "abcdef"


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_call_was_sent_leaves_no_open_intent(recorder, store, stream):
    begun, go_on, aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()
    begin_call, abort_call = store.begin_call, store.abort_call

    async def slow(*given, **more):
        ack = await begin_call(*given, **more)
        begun.set()
        await go_on.wait()
        return ack

    async def noticing(*given, **more):
        await abort_call(*given, **more)
        aborted.set()

    store.begin_call, store.abort_call = slow, noticing
    recorder = Recorder(store, reader=store)
    engine = Typist(script=["abc"])
    async with on_the_wire(engine=engine, recorder=recorder) as wire:
        call = await wire.ask("chat", stream=stream)
        await begun.wait()
        call.leave()
        await asyncio.wait_for(aborted.wait(), 10)
    assert engine.calls == 0
    assert [each.abort for each in await store.begun_calls("4-2")] == ["not_sent"]
    assert not (await store.freeze("4-2")).incomplete


@pytest.mark.promise("MS-3")
async def test_a_drain_that_takes_too_long_is_ended_and_said(recorder, store):
    reached = asyncio.Event()

    async def never(number):
        reached.set()
        await asyncio.Event().wait()

    engine = Typist(script=["abc"], before=never)
    async with on_the_wire(engine=engine, recorder=recorder, limits=Limits(drain_s=0.05)) as wire:
        call = await wire.ask("chat", stream=True)
        await reached.wait()
        call.leave()
        await _until(lambda: _aborts(store, "upstream:drain_bound"))
    assert engine.running == 0
    assert not (await store.freeze("4-2")).incomplete


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("prefix", ["", CAPTURED])
async def test_nothing_is_left_running_after_fifty_clients_that_left(recorder, store, prefix):
    reached = asyncio.Queue()

    async def before(number):
        if number == 1:
            reached.put_nowait(number)
            await asyncio.sleep(0 if prefix else 3600)

    engine = Typist(script=["abcdef"], before=before)
    async with on_the_wire(engine=engine, recorder=recorder, limits=Limits(drain_s=5)) as wire:
        for number in range(50):
            dialect = DIALECTS[number % 3]
            call = await wire.ask(dialect, stream=number % 2 == 0, prefix=prefix, more={"seed": number})
            await reached.get()
            call.leave()
        await _until(lambda: _now(engine.running == 0 and wire.server._turns.running == 0))
    if prefix:
        snapshot = await store.freeze("4-2")
        assert len(snapshot.entries) == 50
        assert not snapshot.incomplete


async def test_a_client_that_closes_after_the_last_event_has_its_turn(recorder, store):
    async with on_the_wire(engine=Typist(script=["abc"]), recorder=recorder) as wire:
        for dialect in DIALECTS:
            call = await wire.ask(dialect, stream=True)
            await call.read(lambda body, end=ENDS[dialect]: end in body)
            call.leave()
    snapshot = await store.freeze("4-2")
    assert [entry.client_gone for entry in snapshot.entries] == [False] * 3
    assert [reason for call in await store.begun_calls("4-2") if (reason := call.abort)] == []


class Paced:
    """A typist that says its next piece, and its end, only when it is let: what was not let cannot be on its way."""

    def __init__(self):
        self._let, self._free = asyncio.Semaphore(0), asyncio.Event()
        self.engine = Typist(script=[RICH], size=4, before=lambda _: self._next(), at_end=self._next)
        reply = [{"type": "reasoning", "content": [{"text": RICH.reasoning}]}, {"content": [{"text": RICH.text}]}]
        calls = [{"type": "function_call", "name": c.name, "arguments": c.arguments} for c in RICH.calls]
        self.pieces = len(list(self.engine._pieces([reply[0], {"type": "message", **reply[1]}, *calls])))

    async def _next(self):
        if not self._free.is_set():
            await self._let.acquire()

    async def read(self, call, place):
        """Read up to byte `place` of the body, piece by piece; whether a byte of the end was among them."""
        for _ in range(self.pieces):
            self._let.release()
            before = len(call.body)
            await call.read(lambda body, n=before: len(body) > n)
            if len(call.body) >= place:
                return False
        self._let.release()
        await call.read(lambda body: len(body) >= place)
        return True

    def go_on(self):
        """Let all that is still to be said."""
        self._free.set()
        self._let.release()

    def hold(self):
        assert self._let.locked()
        self._free.clear()


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_cut_at_any_byte_a_call_is_aborted_at_once_and_recorded_or_was_recorded_before(dialect, store, recorder):
    rng, paced = random.Random(5), Paced()
    ends = []
    async with on_the_wire(engine=paced.engine, recorder=recorder) as wire:
        whole = await wire.ask(dialect, stream=True)
        await paced.read(whole, 1 << 30)
        size = len(whole.body)
        for number, place in enumerate(sorted([*rng.sample(range(size), 15), size - 1]), 1):
            call = await wire.ask(dialect, stream=True, more={"seed": number})  # an equal one would be a retry
            ended = await paced.read(call, place)
            ends.append(ended)
            if ended:  # not a byte of the end comes before the record
                assert (await store.begun_calls("4-2"))[number].recorded
            call.leave()
            if not ended:
                await _until(lambda n=number: _is_gone(store, n))
                assert not (await store.begun_calls("4-2"))[number].recorded
                paced.go_on()
            await _until(lambda: _now(wire.server._turns.running == 0))
            paced.hold()
        snapshot = await store.freeze("4-2")
    assert set(ends) == {True, False}
    calls = await store.begun_calls("4-2")
    assert [(call.recorded, call.abort) for call in calls] == [(True, None)] * 17
    assert not snapshot.incomplete
    gone = {entry.model_call_id: entry.client_gone for entry in snapshot.entries}
    assert all(gone[call.call_id] for call, ended in zip(calls[1:], ends, strict=True) if not ended)
    for entry in snapshot.entries:
        assert [item["type"] for item in entry.output_items][-2:] == ["function_call"] * 2
        assert entry.generation_token_ids.size == snapshot.entries[0].generation_token_ids.size


async def _is_gone(store, number):
    return (await store.begun_calls("4-2"))[number].abort == CLIENT_GONE


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_ids_stand_in_a_stream_only_for_a_caller_that_asks(recorder, dialect):
    async with on_the_wire(engine=Typist(script=["abc"]), recorder=recorder) as wire:
        call = await wire.ask(dialect, stream=True)
        assert b"generation_token_ids" not in await call.end()
        call = await wire.ask(dialect, stream=True, prefix="", X_Toprope_Include="token_ids")
        body = await call.end()
    assert b"generation_token_ids" in body
    assert b"generation_log_probs" in body


async def test_the_record_of_a_streamed_call_says_when_its_first_token_came(tmp_path, recorder):
    now = [100.0]
    log = CallLog(tmp_path / "calls.jsonl")

    async def before(number):
        now[0] += 1.0

    engine = Typist(script=["abc"], before=before)
    async with on_the_wire(engine=engine, recorder=recorder, call_log=log, clock=lambda: now[0]) as wire:
        await (await wire.ask("chat", stream=True)).end()
    log.close()
    (line,) = read_call_log(log.path)
    assert (line.streamed, line.time_to_first_token, line.ended - line.started) == (True, 1.0, 3.0)


async def test_an_engine_that_streams_nothing_is_streamed_whole_at_its_end(recorder, store):
    class Silent(Typist):
        def _pieces(self, output):
            return ()

    for dialect in DIALECTS:
        async with on_the_wire(engine=Silent(script=[RICH]), recorder=recorder) as wire:
            body = await (await wire.ask(dialect, stream=True)).end()
            assert ENDS[dialect] in body
            assert b"I shall add." in body
    assert isinstance(build(await store.freeze("4-2")), Trainable)


async def _until(true):
    """Ask again with every turn of the loop; the test's own time limit ends what never comes true."""
    async with asyncio.timeout(20):
        while not await true():  # noqa: ASYNC110 - nothing tells when the end of a connection was noticed
            await asyncio.sleep(0.001)


async def _now(value):
    return value


async def _aborts(store, reason):
    return any(call.abort == reason for call in await store.begun_calls("4-2"))

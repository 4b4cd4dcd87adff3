"""Retries at several workers that each know something else, and calls whose store is slow or broken."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.model.test_retries import Looked, Steps, _answer, _journal, call, gone, said
from tests.unit.model.wire import Typist, on_the_wire

from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.http.app import Limits
from toprope.servers.model import repeats
from toprope.servers.model.repeats import Repeats
from toprope.servers.model.retries import Replay, Seen, Wait, decide
from toprope.servers.model.server import ModelServer

pytestmark = pytest.mark.promise("MS-4")


@pytest.fixture
def steps():
    return Steps()


@pytest.mark.parametrize(
    "known", [{"left": {"a"}}, {"gave_up": {"a"}}, {"lost": {"a"}}, {"left": {"a"}, "writer_epoch": "here"}]
)
@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([call("a", recorded=True), call("b", recorded=True)], Replay("b")),
        ([call("a", recorded=True), call("b")], Wait("b")),
        ([call("a"), call("b")], Wait("b")),
        ([call("a"), gone("b")], Wait("b", drained=True)),
    ],
)
def test_what_one_process_alone_knows_changes_nothing_in_the_order_of_marked_retries(calls, verdict, known):
    assert decide([*calls, call("me", 1)], "me") == verdict
    assert decide([*calls, call("me", 1)], "me", Seen(**known)) == verdict


def test_a_lost_call_keeps_its_place_and_whoever_claims_it_is_a_new_call():
    calls = [call("a"), call("b"), call("r", 1, at="there"), call("me", 1)]
    assert decide(calls, "me") == Wait("a")
    assert decide(calls, "me", Seen(lost={"b"})) == Wait("a"), "b is the earlier retry's, as it is at its worker"
    assert decide(calls, "me", Seen(lost={"a"})) is None


@pytest.mark.parametrize(("count", "found"), [(0, "b"), (1, "b"), (2, "a")])
def test_a_retry_lets_go_of_what_the_journal_says_a_later_one_was_given(count, found):
    """A later one with a higher count may be its own next: that has left it, and takes the same."""
    calls = [call("a", recorded=True), call("b", recorded=True), call("me", 1)]
    later = call("r", count, abort="replay_of:a", at="there")
    assert decide([*calls, later], "me", Seen(claims={"me": "a"})) == Replay(found)


def test_a_call_at_another_worker_has_the_drain_bound_from_when_its_client_is_seen_to_be_gone():
    waits, since = Repeats(None, drain_s=120), {("a", False): 0.0, ("a", True): 1000.0}
    assert not waits._overdue(Wait("a"), since, 1200.0)
    assert waits._overdue(Wait("a"), since, 1202.0)
    assert not waits._overdue(Wait("a", drained=True), since, 1120.0)
    assert waits._overdue(Wait("a", drained=True), since, 1122.0)


# -- over the wire ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_two_marked_retries_at_two_workers_get_two_answers_whatever_only_one_of_them_knows(
    tmp_path, steps, stream
):
    """The client of the second sample leaves when it is on record, before its reply is sent: one worker knows."""
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    on_record, send, told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class SendsLate(ModelServer):
        async def after_call(self, call, reply):
            if not on_record.is_set():
                on_record.set()
                await send.wait()

    looks = Looked(two, reader=two)
    settings = {"engine": Typist(script=steps, size=99), "limits": Limits(drain_s=20)}
    async with (
        on_the_wire(SendsLate, recorder=Recorder(one, reader=one), **settings) as here,
        on_the_wire(recorder=looks, **settings) as there,
    ):
        left = here.server._repeats.left
        here.server._repeats.left = lambda call: (left(call), told.set())
        running = await here.ask("chat", stream=stream)
        await steps.next(go=False)
        recorded = await here.ask("chat", stream=stream)
        await steps.next()
        await asyncio.wait_for(on_record.wait(), 10)
        recorded.leave()
        await asyncio.wait_for(told.wait(), 10)
        send.set()
        again = [await there.ask("chat", stream=stream, x_stainless_retry_count="1")]
        await asyncio.wait_for(looks.looked.wait(), 10)
        running.leave()
        await _journal(one, 3, lambda calls: calls[0].abort == "client_gone")
        again.append(await here.ask("chat", stream=stream, x_stainless_retry_count="1"))
        await _journal(one, 4)
        steps.gates[0].set()
        assert sorted([said(await _answer(each)) for each in again]) == [0, 1]
    assert len(steps.gates) == 2
    await one.close()
    await two.close()


async def test_a_keyed_call_that_runs_at_another_worker_for_a_client_who_stayed_is_not_sampled_again(
    tmp_path, steps, monkeypatch
):
    monkeypatch.setattr(repeats, "_OPEN_BOUNDS", 1_000_000)
    monkeypatch.setattr(repeats, "_WORD_S", 0.0)
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    looks, long = [], asyncio.Event()

    class Watched(Recorder):
        async def recorded(self, key, since=0):
            looks.append(key)
            if len(looks) == 5:  # some 0.3 s
                long.set()
            return await super().recorded(key, since)

    settings = {"engine": Typist(script=steps), "limits": Limits(drain_s=0.001)}
    async with (
        on_the_wire(recorder=Recorder(one, reader=one), **settings) as here,
        on_the_wire(recorder=Watched(two, reader=two), **settings) as there,
    ):
        first = await here.ask("chat", idempotency_key="k")
        await steps.next(go=False)
        again = await there.ask("chat", idempotency_key="k")
        await asyncio.wait_for(long.wait(), 10)
        steps.gates[0].set()
        assert (said(await _answer(first)), said(await _answer(again))) == (0, 0)
    assert len(steps.gates) == 1
    await one.close()
    await two.close()


@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}, {}])
async def test_a_record_that_is_written_beyond_the_drain_bound_answers_the_retry(tmp_path, steps, mark, monkeypatch):
    monkeypatch.setattr(repeats, "_SAID_S", 0.0)

    class Slow(SqliteStore):
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def put(self, *told, **more):
            self.entered.set()
            await self.go_on.wait()
            return await super().put(*told, **more)

    store = Slow(tmp_path / "c.db")
    recorder = Looked(store, reader=store)
    settings = {"recorder": recorder, "limits": Limits(drain_s=0.0)}
    async with on_the_wire(engine=Typist(script=steps), **settings) as wire:
        keyed = {name: value for name, value in mark.items() if name == "idempotency_key"}
        first = await wire.ask("chat", **keyed)
        await steps.next()
        await asyncio.wait_for(store.entered.wait(), 10)
        recorder.looked.clear()
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")  # the bound of 0 s is over by now
        again = await wire.ask("chat", **mark)
        await asyncio.wait_for(recorder.looked.wait(), 10)
        store.go_on.set()
        assert said(await _answer(again)) == 0
    assert len(steps.gates) == 1
    await store.close()


@pytest.mark.parametrize("leaves", [False, True], ids=["the store fails", "the client leaves"])
@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}], ids=["marked", "keyed"])
async def test_an_intent_that_landed_although_its_begin_failed_keeps_no_retry_waiting(
    tmp_path, steps, mark, leaves, monkeypatch
):
    monkeypatch.setattr(repeats, "_SAID_S", 0.05)

    class Sick(SqliteStore):
        landed, failed = asyncio.Event(), asyncio.Event()

        async def begin_call(self, *told, **more):
            ack = await super().begin_call(*told, **more)
            if not self.landed.is_set():
                self.landed.set()
                if leaves:
                    await asyncio.Event().wait()
                raise OSError(5, "Input/output error")
            return ack

        async def abort_call(self, *told, **more):
            if leaves and not self.failed.is_set():
                self.failed.set()
                raise OSError(28, "No space left on device")
            return await super().abort_call(*told, **more)

    store = Sick(tmp_path / "c.db")
    settings = {"recorder": Recorder(store, reader=store), "limits": Limits(drain_s=600)}
    async with on_the_wire(engine=Typist(script=steps), **settings) as wire:
        keyed = {name: value for name, value in mark.items() if name == "idempotency_key"}
        first = await wire.ask("chat", **keyed)
        await asyncio.wait_for(store.landed.wait(), 10)
        if leaves:
            first.leave()
            await asyncio.wait_for(store.failed.wait(), 10)
        else:
            await first.end()
            assert first.status == 500
        again = await wire.ask("chat", **mark)
        await steps.next()
        assert said(await _answer(again)) == 0
    one, _ = await store.begun_calls("4-2")
    assert one.open
    assert (await store.freeze("4-2")).incomplete, "the word that was lost masks the rollout"
    await store.close()

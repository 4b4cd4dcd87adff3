"""Repeats of calls that came to nothing, were lost without a word, or were sent whole to somebody else."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests.unit.model.test_retries import (
    TOLD,
    Looked,
    Steps,
    U,
    _answer,
    _journal,
    asked,
    call,
    entry,
    gone,
    said,
    workers,
)
from tests.unit.model.wire import ASK, CAPTURED, Typist, on_the_wire

from toprope.canonical.digest import digest_bytes
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import Intent
from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.http.app import Limits
from toprope.servers.model import repeats
from toprope.servers.model.claims import DOUBT_S, Claims
from toprope.servers.model.retries import Doubt, Replay, Seen, Wait, decide, request_tag
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedFault, ScriptedReply

pytestmark = pytest.mark.promise("MS-4")

KEYED = request_tag("b" * 64, "chat", "k")
FAILED = "upstream:model_unavailable"
NOTHING = [
    {"abort": "not_sent"},
    {"abort": "writer_died"},
    {"abort": FAILED},
    {"live": False},
    {"abort": "waited_for:a"},
]
"""How a repeat may end without an answer."""


@pytest.mark.parametrize("last", NOTHING)
@pytest.mark.parametrize("before", [{}, {"abort": "replay_of:a"}, *NOTHING])
@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 1)], ids=["no counts", "counts"])
def test_a_keyed_repeat_goes_past_all_that_ended_with_nothing(before, last, counts):
    one, two, mine = counts
    between = [call("r", one, tag=KEYED, **(before or {"abort": "not_sent"})), call("s", two, tag=KEYED, **last)]
    me = call("me", mine, tag=KEYED)
    assert decide([call("a", recorded=True, tag=KEYED), *between, me], "me") == Replay("a")
    assert decide([call("a", tag=KEYED), *between, me], "me") == Wait("a")
    assert decide([gone("a", tag=KEYED), *between, me], "me") == Wait("a", drained=True)
    assert decide([call("a", abort=FAILED, tag=KEYED), *between, me], "me") is None
    assert decide([call("a", recorded=True, tag=U), *between, me], "me") is None


def test_a_keyed_repeat_takes_what_is_recorded_before_it_waits():
    calls = [call("a", recorded=True, tag=KEYED), call("b", tag=KEYED), call("me", tag=KEYED)]
    assert decide(calls, "me") == Replay("a")
    assert decide([call("a", tag=KEYED), call("r", tag=KEYED), calls[2]], "me") == Wait("r")
    known = Seen(claims={"r": "a"})
    assert decide([call("a", tag=KEYED), call("r", tag=KEYED), calls[2]], "me", known) == Wait("a"), "as r does"


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([gone("a"), call("b", recorded=True)], Wait("a", drained=True)),
        ([call("a", abort=FAILED), call("b", recorded=True)], None),
        ([call("a"), call("b", recorded=True)], Wait("a")),
        ([gone("a"), call("b")], Wait("a", drained=True)),
        ([call("a", abort=FAILED), call("b")], None),
        ([call("l", recorded=True), call("b", recorded=True)], Replay("l")),
        ([call("a", abort=FAILED), call("b", recorded=True, live=False)], Replay("b")),
        ([call("a", recorded=True, live=False), call("b", recorded=True)], Replay("a")),
        ([call("a", abort="truncated:limit_reached"), call("b", recorded=True)], Replay("b")),
        ([call("a", recorded=True), call("b", recorded=True)], Replay("b")),
        ([gone("a"), call("b", recorded=True), call("r", 1)], Replay("b")),
        ([call("a", abort=FAILED), gone("b")], Wait("b", drained=True)),
    ],
)
def test_a_marked_retry_takes_first_what_was_not_sent_whole(calls, verdict):
    """Journal order decides among equals; a call of a dead writer may or may not have been sent."""
    assert decide([*calls, call("me", 1)], "me", Seen(gone={"l"})) == verdict


def test_a_retry_of_a_repeat_that_was_answered_comes_after_one_that_was_not():
    calls = [
        call("a", recorded=True),
        call("b", recorded=True),
        call("r", 1, abort="waited_for:a"),
        call("s", 1, abort="replay_of:b"),
        call("me", 2),
    ]
    assert decide(calls, "me") == Replay("a")


def test_a_retry_stays_with_what_it_claimed_and_takes_nothing_that_a_later_one_has():
    calls = [call("a", recorded=True), call("b", recorded=True), call("me", 1), call("r", 1)]
    assert decide(calls, "me", Seen(claims={"me": "a"})) == Replay("a")
    assert decide([gone("a"), call("b"), *calls[2:]], "me", Seen(claims={"me": "b"})) == Wait("a", drained=True)
    both = [gone("a"), gone("b"), *calls[2:]]
    assert decide(both, "me") == Wait("b", drained=True)
    assert decide(both, "me", Seen(claims={"r": "b"})) == Wait("a", drained=True)
    assert decide(both, "me", Seen(claims={"r": "b"}, gave_up={"r"})) == Wait("b", drained=True)
    answered = [*both[:3], call("r", 1, abort="replay_of:b")]
    assert decide(answered, "me") == Wait("a", drained=True)


def test_what_a_left_repeat_stood_for_and_another_was_given_is_nobodys_any_more():
    calls = [call("a", recorded=True), gone("r", 1, live=False), call("s", abort="replay_of:a"), call("me")]
    assert decide(calls, "me") is None


@pytest.mark.parametrize("count", [0, 1])
def test_a_repeat_that_names_a_call_which_the_journal_lacks_leads_nowhere(count):
    calls = [call("r", recorded=False, abort="replay_of:lacking"), call("me", count)]
    assert decide(calls, "me", Seen(left={"r"})) is None


def test_a_call_elsewhere_that_is_known_to_claim_another_is_not_in_doubt():
    calls = [call("a", recorded=True), call("b", recorded=True), call("r", 1, at="there"), call("me")]
    assert decide(calls, "me", Seen({"a", "b"}, writer_epoch="here")) == Replay("a")


# -- over the wire ---------------------------------------------------------------------------------------------------


@pytest.fixture
def steps():
    return Steps()


class Gaps(SqliteStore):
    """A store that cannot write the first abort of which `loses` says so."""

    def __init__(self, path, loses):
        super().__init__(path)
        self.loses, self.lost = loses, asyncio.Event()

    async def abort_call(self, rollout_id, model_call_id, **told):
        if not self.lost.is_set() and told["reason"].startswith(self.loses):
            self.lost.set()
            raise OSError(28, "No space left on device")
        return await super().abort_call(rollout_id, model_call_id, **told)


@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}], ids=["marked", "keyed"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["upstream:", "not_sent"])
async def test_a_call_that_could_not_say_how_it_ended_is_not_waited_for(tmp_path, stream, mark, reason, monkeypatch):
    monkeypatch.setattr(repeats, "_SAID_S", 0.05)
    store = Gaps(tmp_path / "c.db", reason)
    replies = iter(
        [ScriptedReply(fault=ScriptedFault(status=503, message="busy")), *[ScriptedReply(text="answer 1")] * 2]
    )
    entered, never = asyncio.Event(), asyncio.Event()

    class Hooked(ModelServer):
        async def before_call(self, call):
            if reason == "not_sent" and not entered.is_set():
                entered.set()
                await never.wait()

    limits = Limits(drain_s=600)
    recorder = Recorder(store, reader=store)
    engine = Typist(script=lambda told: next(replies), size=99)
    async with on_the_wire(Hooked, engine=engine, recorder=recorder, limits=limits, keep_alive_s=0.05) as wire:
        keyed = {name: value for name, value in mark.items() if name == "idempotency_key"}
        first = await wire.ask("chat", stream=stream, **keyed)
        if reason == "not_sent":
            next(replies)
            await asyncio.wait_for(entered.wait(), 10)
            first.leave()
        else:
            await first.end()
            assert first.status == 503
        await asyncio.wait_for(store.lost.wait(), 10)
        again = await wire.ask("chat", stream=stream, **mark)
        assert said(await _answer(again)) == 1
    one, two = await store.begun_calls("4-2")
    assert (one.open, two.recorded) == (True, True)
    assert (await store.freeze("4-2")).incomplete, "the lost word masks the rollout"
    await store.close()


@pytest.mark.parametrize("keyed", [False, True], ids=["marked", "keyed"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_whose_leave_could_not_be_noted_takes_no_answer_away(
    tmp_path, steps, stream, keyed, monkeypatch
):
    monkeypatch.setattr(repeats, "_SAID_S", 0.05)
    store = Gaps(tmp_path / "c.db", "waited_for:")
    marks = [{"idempotency_key": "k"} if keyed else {"x_stainless_retry_count": str(count)} for count in range(3)]
    recorder = Looked(store, reader=store)
    settings = {"recorder": recorder, "limits": Limits(drain_s=600)}
    async with on_the_wire(engine=Typist(script=steps, size=99), **settings) as wire:
        first = await wire.ask("chat", stream=stream, **marks[0])
        await steps.next(go=False)
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")
        second = await wire.ask("chat", stream=stream, **marks[1])
        await asyncio.wait_for(recorder.looked.wait(), 10)
        second.leave()
        await asyncio.wait_for(store.lost.wait(), 10)
        steps.gates[0].set()
        await _journal(store, 2, lambda calls: calls[0].recorded)
        assert said(await _answer(await wire.ask("chat", stream=stream, **marks[2]))) == 0
    assert len(steps.gates) == 1
    await store.close()


@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}], ids=["marked", "keyed"])
async def test_nobody_waits_for_ever_for_a_call_that_is_open_at_another_worker(tmp_path, steps, mark):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    lost, limits = Recorder(one, reader=one), Limits(drain_s=0.01)
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(two, reader=two), limits=limits) as wire:
        path, body = ASK["chat"]
        tag = request_tag(digest_bytes(json.dumps(body).encode()), "chat", mark.get("idempotency_key"))
        await lost.begin("4-2", "lost", intent=Intent(request_digest=tag))
        again = await wire.call(CAPTURED + path, body, **mark)
        await steps.next()
        assert said(await _answer(again)) == 0
    assert [each.live for each in await one.begun_calls("4-2")] == [True, True], "its worker lives, and says nothing"
    await one.close()
    await two.close()


async def test_who_stops_waiting_for_another_workers_repeat_still_waits_for_the_call_that_runs_here(tmp_path, steps):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    lost, looks, looked_again = Recorder(one, reader=one), [], asyncio.Event()

    class Watched(Recorder):
        async def recorded(self, key, since=0):
            looks.append(key)
            if len(looks) == 2:
                looked_again.set()
            return await super().recorded(key, since)

    settings = {"recorder": Watched(two, reader=two), "limits": Limits(drain_s=-1.0)}  # a wait is over at once
    async with on_the_wire(engine=Typist(script=steps, size=99), **settings) as wire:
        first = await wire.ask("chat", idempotency_key="k")
        await steps.next(go=False)
        tag = (await one.begun_calls("4-2"))[0].intent.request_digest
        await lost.begin("4-2", "there", intent=Intent(request_digest=tag))
        again = await wire.ask("chat", idempotency_key="k")
        await asyncio.wait_for(looked_again.wait(), 10)
        steps.gates[0].set()
        assert (said(await _answer(first)), said(await _answer(again))) == (0, 0)
    assert len(steps.gates) == 1
    await one.close()
    await two.close()


async def test_a_keyed_repeat_that_left_before_it_knew_takes_no_answer_away(steps):
    store = MemoryStore()
    looking, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Recorder):
        held = False

        async def recorded(self, key, since=0):
            if self.held:
                looking.set()
                await go_on.wait()
            return await super().recorded(key, since)

    recorder = Slow(store, reader=store)
    async with on_the_wire(engine=Typist(script=steps), recorder=recorder) as wire:
        first = await wire.ask("chat", idempotency_key="k")
        await steps.next()
        assert said(await first.end()) == 0
        for number in (2, 3):
            looking.clear()
            recorder.held = True
            hasty = await wire.ask("chat", idempotency_key="k")
            await asyncio.wait_for(looking.wait(), 10)
            hasty.leave()
            await _journal(store, number, lambda calls: calls[-1].abort == "not_sent")
            recorder.held = False
        go_on.set()
        assert said(await _answer(await wire.ask("chat", idempotency_key="k"))) == 0
    assert len(steps.gates) == 1


async def test_a_repeat_that_waits_to_see_what_another_worker_claims_has_claimed_nothing(tmp_path, steps):
    """So another one waits for the same, and has it where the first one leaves."""
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    there, looked = Recorder(one, reader=one), {1: asyncio.Event(), 2: asyncio.Event()}
    who = set()

    class Watched(Recorder):
        async def recorded(self, key, since=0):
            found = await super().recorded(key, since)
            who.add(asyncio.current_task())
            looked[len(who)].set()
            return found

    settings = {"recorder": Watched(two, reader=two), "limits": Limits(drain_s=600)}
    async with on_the_wire(engine=Typist(script=steps), **settings) as wire:
        path, body = ASK["chat"]
        tag = request_tag(digest_bytes(json.dumps(body).encode()), "chat")
        for name in ("left", "silent"):
            await there.begin("4-2", name, intent=Intent(request_digest=tag))
        await there.abort("4-2", "left", "client_gone")
        first = await wire.call(CAPTURED + path, body)
        await asyncio.wait_for(looked[1].wait(), 10)
        second = await wire.call(CAPTURED + path, body)
        await asyncio.wait_for(looked[2].wait(), 10)
        first.leave()
        await _journal(one, 4, lambda calls: calls[2].abort == "waited_for:left")
        await one.put(replace(entry("left", [1], [2], client_gone=True, output_items=(TOLD,)), rollout_id="4-2"))
        assert said(await _answer(second)) == 7
    assert steps.gates == []
    await one.close()
    await two.close()


def test_who_gave_up_is_remembered_although_it_claims_nothing():
    claims = Claims()
    claims.give_up(asked("me"))
    claims.release(asked("me"))
    assert claims.seen(asked("next")).gave_up == {"me"}


def test_a_doubt_ends_when_nobody_is_left_to_claim_the_one_call():
    doubt = Doubt("a", (("old", "a", 0), ("other", "b", 40)))
    assert Claims().doubt(asked("me"), doubt, 10.0) == DOUBT_S


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 2])
async def test_the_retry_of_one_of_two_equal_samples_does_not_get_the_others_answer(tmp_path, steps, stream, number):
    async with workers(tmp_path, steps, number) as (*wires, store):
        first = await wires[0].ask("chat", stream=stream)
        await steps.next(go=False)
        other = await wires[-1].ask("chat", stream=stream)
        await steps.next()
        assert said(await _answer(other)) == 1
        first.leave()
        await _journal(store, 2, lambda calls: calls[0].abort == "client_gone")
        again = await wires[-1].ask("chat", stream=stream, x_stainless_retry_count="1")
        await _journal(store, 3)
        steps.gates[0].set()
        assert said(await _answer(again)) == 0
    assert len(steps.gates) == 2

"""Repeats of a request: which recorded call answers them, decided by the journal, and what they get."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.unit.model.wire import ASK, CAPTURED, ENDS, Typist, on_the_wire

from toprope.canonical.digest import digest_bytes
from toprope.capture.memory_store import MemoryStore
from toprope.capture.packing import pack, unpack
from toprope.capture.protocols import Intent, JournalledCall
from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import LimitReached
from toprope.http.app import Limits
from toprope.servers.model.call import ModelCall
from toprope.servers.model.claims import DOUBT_S, STAGGER_S, Claims
from toprope.servers.model.engines.base import EngineReply, SampledTokens, Usage
from toprope.servers.model.replies import recorded_reply, render_reply, reply_details
from toprope.servers.model.retries import Doubt, Replay, Seen, Wait, decide, extended, request_tag
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedReply
from toprope.tokens.entry import TokenEntry
from toprope.trajectory.build import Trainable, build
from toprope.wire.responses import ResponsesRequest

pytestmark = pytest.mark.promise("MS-4")

DIALECTS = sorted(ASK)
T, U = request_tag("b" * 64, "chat"), request_tag("c" * 64, "chat")


def call(name, count=0, *, tag=T, recorded=False, abort=None, live=True, at="here"):
    return JournalledCall(name, Intent(False, tag, count, at), recorded, abort, live)


def gone(name, count=0, **told):
    return call(name, count, abort="client_gone", **told)


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([call("a", recorded=True), call("me", 1)], Replay("a")),
        ([call("a"), call("me", 1)], Wait("a")),
        ([call("a", abort="client_gone"), call("me", 1)], Wait("a", drained=True)),
        ([call("a", live=False), call("me", 1)], None),
        ([call("a", abort="upstream:model_unavailable"), call("me", 1)], None),
        ([call("a", recorded=True), call("b", abort="truncated:limit_reached"), call("me", 1)], None),
        ([call("me", 1)], None),
        ([call("a", recorded=True, tag=U), call("me", 1)], None),
        ([call("a", recorded=True), call("me", 2)], None),
        ([call("a", recorded=True), call("b", 1, abort="replay_of:a"), call("me", 2)], Replay("a")),
        ([call("a"), call("b", 1, abort="waited_for:a"), call("me", 2)], Wait("a")),
        ([call("a", recorded=True), call("b", 1, abort="writer_died"), call("me", 2)], Replay("a")),
        ([call("a", abort="writer_died"), call("b", 1, abort="writer_died"), call("me", 2)], None),
        ([call("a", recorded=True), call("b", 1, recorded=True), call("me", 1)], None),
        ([call("a", recorded=True), call("b", recorded=True), call("c", 1), call("me", 1)], Replay("a")),
        ([call("a", recorded=True), call("me")], None),
        ([call("a", abort="client_gone"), call("me")], Wait("a", drained=True)),
        ([call("a"), call("me")], None),
        ([call("a", abort="client_gone"), call("b", 1), call("me")], None),
        ([call("a", abort="client_gone"), call("b", abort="waited_for:a"), call("me")], Wait("a", drained=True)),
        ([call("a", abort="client_gone"), call("b", abort="replay_of:a"), call("me")], None),
    ],
)
def test_what_a_repeat_is_answered_from(calls, verdict):
    assert decide(calls, "me") == verdict


def test_an_unmarked_repeat_goes_back_to_a_call_whose_client_is_known_to_have_left():
    calls = [call("a", recorded=True), call("b", recorded=True), call("me")]
    assert decide(calls, "me", Seen(left={"a"})) == Replay("a")
    assert decide([*calls[:2], call("c", abort="replay_of:a"), call("me")], "me", Seen(left={"a"})) is None
    assert decide([*calls[:2], call("c", abort="waited_for:a"), call("me")], "me", Seen(left={"a"})) == Replay("a")


@pytest.mark.parametrize(
    ("ended", "free"),
    [
        ({"abort": "waited_for:a"}, True),
        ({"abort": "not_sent"}, True),
        ({"abort": "writer_died"}, True),
        ({"live": False}, True),
        ({}, False),
        ({"abort": "replay_of:a"}, False),
        ({"recorded": True}, False),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_outer_round_gets_what_no_retry_of_the_round_before_was_given(count, ended, free):
    """An unmarked repeat that says nothing of what it claims is a call of its own, as far as the journal goes."""
    between = [call(f"m{number}", number, abort="waited_for:a") for number in range(1, count)]
    tells = count > 0 or "replay_of:a" in ended.values()
    for first, found in ((gone("a"), Wait("a", drained=True)), (call("a", recorded=True), Replay("a"))):
        calls = [first, *between, call("b", count, **ended), call("me")]
        assert decide(calls, "me", Seen(left={"a"})) == (found if free or not tells else None)


def test_an_outer_round_takes_an_attempt_from_the_retries_of_the_round_before():
    """Two samples, each in rounds of 0, 1, 2; one begins its second round before the other ended its first."""
    calls = [gone("a"), gone("d")]
    calls += [
        call("b", 1, abort="waited_for:d"),
        call("e", 1, abort="waited_for:a"),
        call("c", 2, abort="waited_for:a"),
    ]
    assert decide([*calls, call("g")], "g") == Wait("d", drained=True)
    for g, seen, found in (
        (call("g"), Seen(claims={"g": "d"}), "a"),
        (call("g", abort="replay_of:d"), Seen(), "a"),
        (call("g", abort="waited_for:d"), Seen(), "d"),
    ):
        assert decide([*calls, g, call("f", 2)], "f", seen).call_id == found
    # Its own first retry goes on from it, and a second one of that count does not get the same.
    again = [*calls, call("g", abort="waited_for:d"), call("h", 1), call("i", 1)]
    assert (decide(again, "h").call_id, decide(again, "i").call_id) == ("d", "a")


def test_of_repeats_at_once_each_claims_one_and_the_rest_are_calls_of_their_own():
    calls = [gone("a"), call("b", recorded=True), call("c"), *(call(name) for name in "efgh")]
    claims = {}
    for name, found in (("g", "b"), ("e", "a"), ("h", None), ("f", None)):
        verdict = decide(calls, name, Seen({"b"}, claims))
        assert (None if verdict is None else verdict.call_id) == found
        if found:
            claims[name] = found
    assert decide(calls, "e", Seen({"b", "c"}, claims)) == Wait("a", drained=True), "its claim, and no newer one"
    assert decide(calls, "h", Seen({"b"}, claims, gave_up={"g"})) == Replay("b")
    told = [calls[0], calls[1], call("g", abort="replay_of:b"), call("h")]
    assert decide(told, "h", Seen({"b"}, {"g": "b"}, gave_up={"g"})) == Replay("b"), "its client left before it came"


def test_a_repeat_goes_past_an_abandoned_call_that_never_will_be_recorded():
    assert decide([gone("a"), gone("b", live=False), call("me")], "me") == Wait("a", drained=True)
    assert decide([gone("a", live=False), call("me")], "me") is None


@pytest.mark.parametrize(
    ("between", "contested"),
    [
        (call("r", at="there"), True),
        (call("r", at="there", live=False), False),
        (call("r", at="here"), False),
        (call("r", at="there", recorded=True), False),
        (call("r", at="there", tag=U), False),
        (gone("r", at="there", live=False), False),
    ],
)
def test_an_open_call_of_another_worker_may_have_claimed_what_was_left_before_it(between, contested):
    mine = Seen({"a"}, writer_epoch="here")
    for first, found in ((gone("a"), Wait("a", drained=True)), (call("a", recorded=True), Replay("a"))):
        calls = [first, between, call("me"), call("later", at="there")]
        doubts = Doubt("a", (("r", "a", 0),)) if found == Replay("a") else Wait("a", drained=True, contested=True)
        assert decide(calls, "me", mine) == (doubts if contested else found)
        assert decide(calls, "me", Seen({"a"})) == found
        assert decide([calls[1], first, *calls[2:]], "me", mine) == found, "it was there before"
    assert (
        decide([call("a", recorded=True), call("r", abort="replay_of:a", at="there"), call("me")], "me", mine) is None
    )


def test_a_call_that_did_not_say_in_time_that_it_claims_a_recorded_one_is_a_sample_of_its_own():
    first, old = call("a", recorded=True), call("old", at="there")
    mine = Seen({"a"}, writer_epoch="here", own_way={("old", "a")})
    assert decide([first, old, call("me")], "me", mine) == Replay("a")
    new = [first, old, call("me"), call("r", at="there"), call("me2")]
    assert decide(new, "me2", mine) == Doubt("a", (("r", "a", 2),)), "a later one is doubted for itself"
    assert decide([gone("a"), old, call("me")], "me", Seen(writer_epoch="here", own_way={("old", "z")})).contested
    both = [first, call("b", recorded=True), old, call("me")]
    doubt = decide(both, "me", Seen({"a", "b"}, writer_epoch="here"))
    assert doubt == Doubt("b", (("old", "b", 0), ("old", "a", 0)))


def asked(name):
    return ModelCall(name, "chat", ResponsesRequest(input=()), {}, "b" * 64, rollout_id="k")


def test_a_doubt_lasts_about_a_second_and_no_equal_repeat_begins_it_anew():
    claims, once = Claims(), Doubt("a", (("old", "a", 0), ("old", "z", 0)))
    assert claims.doubt(asked("me"), once, 10.0) == DOUBT_S <= 1.0
    claims.give_up(asked("me"))
    claims.release(asked("me"))
    assert claims.doubt(asked("again"), once, 10.75) == DOUBT_S - 0.75
    assert not claims.seen(asked("again"), now=10.75).own_way
    claims.release(asked("again"))  # it has claimed nothing so far; what it doubts is kept
    assert claims.seen(asked("again"), now=10.0 + DOUBT_S).own_way == {("old", "a"), ("old", "z")}
    assert claims.doubt(asked("again"), once, 10.0 + DOUBT_S) == 0.0
    more = Doubt("a", (("new", "a", 2),))
    assert claims.doubt(asked("third"), more, 20.0) == pytest.approx(DOUBT_S + 2 * STAGGER_S)
    assert claims.seen(asked("third"), now=20.5).own_way == {("old", "a"), ("old", "z")}


def test_of_two_in_doubt_at_two_workers_the_earlier_one_speaks_first():
    calls = [call("a", recorded=True), call("old", at="there"), call("r", at="here"), call("s", at="there")]
    first = decide(calls, "r", Seen({"a"}, writer_epoch="here"))
    second = decide(calls, "s", Seen({"a"}, writer_epoch="there"))
    assert Claims().doubt(asked("r"), first, 5.0) < Claims().doubt(asked("s"), second, 5.0)
    told = [*calls[:2], call("r", abort="replay_of:a", at="here"), calls[3]]
    assert decide(told, "s", Seen({"a"}, writer_epoch="there")) is None


def test_four_equal_samples_that_retry_in_any_order_claim_four_different_calls():
    first = [call(name, recorded=True) for name in "abcd"]
    again = [call(name, 1) for name in "efgh"]
    claimed = {decide([*first, *again], each.call_id).call_id for each in again}
    assert claimed == set("abcd")


def test_an_idempotency_key_is_its_own_claim():
    keyed, other = (request_tag("b" * 64, "chat", key) for key in ("k", "l"))
    assert decide([call("a", recorded=True, tag=keyed), call("me", tag=keyed)], "me") == Replay("a")
    assert decide([call("a", recorded=True, tag=keyed), call("me", tag=other)], "me") is None


TOLD = {
    "type": "message",
    "id": "msg_x",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "answer 7", "annotations": []}],
}


def entry(name, prompt, said, **fields):
    return TokenEntry("k", name, "m", 1.0, prompt, said, [-0.5] * len(said), **fields)


@pytest.mark.parametrize(
    ("prompt", "fields", "goes_on"),
    [
        ([1, 2, 3, 4, 5], {}, True),
        ([1, 2, 3, 4], {}, True),
        ([1, 2, 3], {}, False),
        ([1, 9, 3, 4, 5], {}, False),
        ([1, 2, 3, 9, 5], {}, False),
        ([1, 2, 3, 4, 5], {"parent_decision": "root"}, False),
        ([7], {"parent_decision": "resolved", "parent_call_id": "a"}, True),
    ],
)
def test_a_call_is_extended_by_its_child_or_by_a_prompt_that_begins_with_all_of_it(prompt, fields, goes_on):
    first, second = entry("a", [1, 2], [3, 4]), entry("b", prompt, [6], **{"parent_decision": "unresolved", **fields})
    assert extended("a", [first, second]) is goes_on
    assert extended("a", [first]) is False
    like = [entry("a", [1, 2], [3, 3]), entry("b", [1, 2, 3], [6], parent_decision="unresolved")]
    assert extended("a", like) is False, "a part of what was said, although it is all of one token"


# -- over the wire ---------------------------------------------------------------------------------------------------


class Steps:
    """An engine whose answers are numbered, each held until it is let go."""

    def __init__(self):
        self.asked = asyncio.Queue()
        self.gates = []

    async def __call__(self, told):
        number = len(self.gates)
        gate = asyncio.Event()
        self.gates.append(gate)
        self.asked.put_nowait(number)
        await gate.wait()
        return ScriptedReply(text=f"answer {number}", token_ids=[100 + number, 2], log_probs=[-0.5, -0.25])

    async def next(self, *, go=True):
        number = await asyncio.wait_for(self.asked.get(), 10)
        if go:
            self.gates[number].set()
        return number


@pytest.fixture
def steps():
    return Steps()


def said(body):
    """The number in the text of a reply, plain or streamed."""
    return int(body.decode().split("answer ")[-1][0]) if b"answer " in body else None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a7_a_client_that_gives_up_waiting_and_retries_gets_the_one_answer(steps, dialect, stream):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps, size=99), recorder=Recorder(store, reader=store)) as wire:
        first = await wire.ask(dialect, stream=stream)
        await steps.next(go=False)
        first.leave()
        second = await wire.ask(dialect, stream=stream, x_stainless_retry_count="1")
        await _journal(store, 2)
        second.leave()
        third = await wire.ask(dialect, stream=stream, x_stainless_retry_count="2")
        await _journal(store, 3)
        steps.gates[0].set()
        body = await third.end()
        fourth = await wire.ask(dialect, stream=stream, x_stainless_retry_count="3")
        again = await fourth.end()
    assert (said(body), said(again)) == (0, 0)
    assert again == body
    assert len(steps.gates) == 1
    snapshot = await store.freeze("4-2")
    assert [(entry.client_gone, entry.dialect) for entry in snapshot.entries] == [(False, dialect)]
    assert isinstance(build(snapshot), Trainable)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_streamed_retry_that_waits_is_kept_alive_until_it_has_its_answer(steps, dialect):
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "keep_alive_s": 0.01}
    async with on_the_wire(engine=Typist(script=steps, size=99), **settings) as wire:
        first = await wire.ask(dialect, stream=True)
        await steps.next(go=False)
        first.leave()
        second = await wire.ask(dialect, stream=True, x_stainless_retry_count="1")
        await second.read(lambda body: body.count(b": keep-alive\n\n") > 2)
        assert (second.status, said(second.body)) == (200, None)
        second.leave()  # while it waits: what it stood for is still there for the next one
        await _journal(store, 2, lambda calls: calls[1].abort is not None)
        third = await wire.ask(dialect, stream=True, x_stainless_retry_count="2")
        await third.read(lambda body: b": keep-alive\n\n" in body)
        steps.gates[0].set()
        body = await third.end()
        assert (said(body), ENDS[dialect] in body) == (0, True)
    one, _, three = await store.begun_calls("4-2")
    assert (one.abort, three.abort) == (None, f"replay_of:{one.call_id}")
    assert len(steps.gates) == 1


async def test_a_retry_whose_awaited_attempt_fails_goes_on_as_a_new_call_in_the_stream_that_was_kept_alive(steps):
    store = MemoryStore()
    fail = asyncio.Event()

    async def before(number):
        if len(steps.gates) == 1:
            await fail.wait()
            raise ConnectionError("the upstream died")

    settings = {"recorder": Recorder(store, reader=store), "keep_alive_s": 0.01}
    async with on_the_wire(engine=Typist(script=steps, size=99, before=before), **settings) as wire:
        first = await wire.ask("chat", stream=True)
        await steps.next()
        first.leave()
        again = await wire.ask("chat", stream=True, x_stainless_retry_count="1")
        await again.read(lambda body: b": keep-alive\n\n" in body)
        fail.set()
        await steps.next()
        body = await again.end()
        assert (said(body), ENDS["chat"] in body) == (1, True)
    assert len((await store.freeze("4-2")).entries) == 1


async def test_a_replayed_reply_is_the_recorded_one_with_its_ids(steps):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        for dialect in DIALECTS:
            for stream in (False, True):
                more = {"seed": int(stream)}
                first = await wire.ask(dialect, stream=stream, more=more)
                await steps.next()
                before = await first.end()
                after = await (await wire.ask(dialect, stream=stream, more=more, x_stainless_retry_count="1")).end()
                if not stream:
                    times = {"created": 0, "created_at": 0}
                    assert {**json.loads(before), **times} == {**json.loads(after), **times}
                else:
                    entry = (await store.open_entries("4-2"))[-1]
                    assert entry.response_id.encode() in after
                    assert entry.response_id.encode() in before


async def test_four_equal_samples_that_all_retry_get_their_own_four_answers(steps):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        first = [await wire.ask("chat") for _ in range(4)]
        numbers = [await steps.next(go=False) for _ in range(4)]
        for each in first:
            each.leave()
        again = [await wire.ask("chat", x_stainless_retry_count="1") for _ in range(4)]
        await _journal(store, 8)
        for number in numbers:
            steps.gates[number].set()
        got = [said(await each.end()) for each in again]
    assert sorted(got) == [0, 1, 2, 3]
    assert len(steps.gates) == 4


async def test_equal_bodies_at_once_or_after_a_whole_reply_are_calls_of_their_own(steps):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        one, two = await wire.ask("chat"), await wire.ask("chat")
        await steps.next()
        await steps.next()
        assert sorted([said(await one.end()), said(await two.end())]) == [0, 1]
        three = await wire.ask("chat")
        await steps.next()
        assert said(await three.end()) == 2


async def test_an_unmarked_repeat_after_the_connection_closed_is_a_retry(steps):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        first = await wire.ask("chat")
        await steps.next(go=False)
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")
        again = await wire.ask("chat")
        await _journal(store, 2)
        steps.gates[0].set()
        assert said(await again.end()) == 0
        third = await wire.ask("chat")  # that answer was sent whole
        await steps.next()
        assert said(await third.end()) == 1


OUTER = {"x_stainless_retry_count": "0"}
"""What the first request of an outer round says, after one whose last retry said 1."""


class Looked(Recorder):
    """A recorder that says when the record was looked at: whoever asked waits, or has its answer, from then on."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.looked = asyncio.Event()

    async def recorded(self, key, since=0):
        found = await super().recorded(key, since)
        self.looked.set()
        return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, {"idempotency_key": "k"}, OUTER], ids=["unmarked", "keyed", "outer round"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_who_leaves_while_it_waits_leaves_the_answer_to_the_next_one(tmp_path, steps, workers, headers, stream):
    stores = [SqliteStore(tmp_path / "c.db") for _ in range(workers)]
    recorders = [Looked(each, reader=each) for each in stores]
    settings = {"engine": Typist(script=steps), "limits": Limits(drain_s=20)}
    async with (
        on_the_wire(recorder=recorders[0], **settings) as first,
        on_the_wire(recorder=recorders[-1], **settings) as other,
    ):
        last = first if workers == 1 else other
        left = await first.ask("chat", stream=stream, **headers)
        await steps.next(go=False)
        left.leave()
        await _journal(stores[0], 1, lambda calls: calls[0].abort == "client_gone")
        retry = {"x_stainless_retry_count": "1"} if headers is OUTER else headers
        waiting = await last.ask("chat", stream=stream, **retry)
        await asyncio.wait_for(recorders[-1].looked.wait(), 10)
        waiting.leave()
        await _journal(stores[0], 2, lambda calls: calls[1].abort is not None)
        third = await last.ask("chat", stream=stream, **headers)
        await _journal(stores[0], 3)
        steps.gates[0].set()
        assert said(await _answer(third)) == 0
    one, two, three = await stores[0].begun_calls("4-2")
    assert (one.recorded, two.abort, three.abort) == (True, f"waited_for:{one.call_id}", f"replay_of:{one.call_id}")
    assert len(steps.gates) == 1
    for each in stores:
        await each.close()


@pytest.mark.parametrize("durable", [False, True], ids=["running", "durable"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a7_outer_rounds_that_time_out_are_answered_by_the_one_generation(steps, stream, durable):
    """As `max_retries=2` inside a loop of the program's own: 0, 1, 2, then 0, 1, 2 again."""
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "limits": Limits(drain_s=20)}
    async with on_the_wire(engine=Typist(script=steps, size=99), **settings) as wire:
        for number in range(9):
            asked = await wire.ask("chat", stream=stream, x_stainless_retry_count=str(number % 3))
            if number == 0:
                await steps.next(go=False)
            else:
                await _journal(store, number + 1)
            asked.leave()
            await _journal(store, number + 1, lambda calls: calls[-1].abort is not None)
        if durable:
            steps.gates[0].set()
            await _journal(store, 9, lambda calls: calls[0].recorded)
        last = await wire.ask("chat", stream=stream, x_stainless_retry_count="0")
        await _journal(store, 10)
        steps.gates[0].set()
        assert said(await _answer(last)) == 0
    assert len(steps.gates) == 1
    snapshot = await store.freeze("4-2")
    assert [each.client_gone for each in snapshot.entries] == [False]
    assert isinstance(build(snapshot), Trainable)


@asynccontextmanager
async def workers(tmp_path, steps, number, **limits):
    """So many model servers on one store; the last thing given is what tells the journal."""
    stores = [SqliteStore(tmp_path / "c.db") for _ in range(number)]
    settings = {"engine": Typist(script=steps, size=99), "limits": Limits(drain_s=20, **limits)}
    async with AsyncExitStack() as stack:
        yield [
            *[await stack.enter_async_context(on_the_wire(recorder=Recorder(s, reader=s), **settings)) for s in stores],
            stores[0],
        ]
    for each in stores:
        await each.close()


@pytest.mark.parametrize("count", [None, "0"], ids=["unmarked", "outer round"])
@pytest.mark.parametrize("durable", [False, True], ids=["running", "durable"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 2])
async def test_equal_samples_that_all_come_again_unmarked_get_their_own_answers(
    tmp_path, steps, number, stream, durable, count
):
    mark = {} if count is None else {"x_stainless_retry_count": count}
    async with workers(tmp_path, steps, number) as (*wires, store):
        first = [await wires[at % number].ask("chat", stream=stream, **mark) for at in range(4)]
        for _ in first:
            await steps.next(go=False)
        for each in first:
            each.leave()
        await _journal(store, 4, lambda calls: all(each.abort == "client_gone" for each in calls))
        if durable:
            for gate in steps.gates:
                gate.set()
            await _journal(store, 4, lambda calls: all(each.recorded for each in calls))
        again = [await wires[-1 - at % number].ask("chat", stream=stream, **mark) for at in range(4)]
        await _journal(store, 8)
        for gate in steps.gates:
            gate.set()
        assert sorted([said(await _answer(each)) for each in again]) == [0, 1, 2, 3]
        assert len(steps.gates) == 4
        fifth = await wires[0].ask("chat", stream=stream, **mark)  # all of them were sent whole
        await steps.next()
        assert said(await _answer(fifth)) == 4


@pytest.mark.parametrize("durable", [False, True], ids=["running", "durable"])
@pytest.mark.parametrize("stream", [False, True])
async def test_of_equal_samples_at_once_after_one_that_was_left_one_is_its_retry(tmp_path, steps, stream, durable):
    async with workers(tmp_path, steps, 1) as (wire, store):
        first = await wire.ask("chat", stream=stream)
        await steps.next(go=False)
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")
        if durable:
            steps.gates[0].set()
            await _journal(store, 1, lambda calls: calls[0].recorded)
        again = [await wire.ask("chat", stream=stream) for _ in range(4)]
        for _ in range(3):
            await steps.next()
        steps.gates[0].set()
        assert sorted([said(await _answer(each)) for each in again]) == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_gives_up_leaves_what_it_had_claimed_and_nothing_else(tmp_path, steps, stream):
    async with workers(tmp_path, steps, 1) as (wire, store):
        first = [await wire.ask("chat", stream=stream) for _ in range(2)]
        for _ in first:
            await steps.next(go=False)
        for each in first:
            each.leave()
        await _journal(store, 2, lambda calls: all(each.abort == "client_gone" for each in calls))
        stays = await wire.ask("chat", stream=stream)
        await _journal(store, 3)
        gives_up = await wire.ask("chat", stream=stream)
        await _journal(store, 4)
        gives_up.leave()
        await _journal(store, 4, lambda calls: sum(each.abort is not None for each in calls) == 3)
        third = await wire.ask("chat", stream=stream)
        await _journal(store, 5)
        for gate in steps.gates:
            gate.set()
        assert sorted([said(await _answer(stays)), said(await _answer(third))]) == [0, 1]
        assert len(steps.gates) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_whose_client_leaves_while_its_answer_is_noted_got_nothing(steps, stream):
    store = MemoryStore()
    noting, note = asyncio.Event(), asyncio.Event()

    class Slow(Recorder):
        async def abort(self, key, call_id, reason, **more):
            if reason.startswith("replay_of:") and not noting.is_set():
                noting.set()
                try:
                    await note.wait()
                finally:
                    await super().abort(key, call_id, reason, **more)
            else:
                await super().abort(key, call_id, reason, **more)

    async with on_the_wire(engine=Typist(script=steps, size=99), recorder=Slow(store, reader=store)) as wire:
        first = await wire.ask("chat", stream=stream)
        await steps.next(go=False)
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")
        again = await wire.ask("chat", stream=stream)
        steps.gates[0].set()
        await asyncio.wait_for(noting.wait(), 10)
        again.leave()
        await _journal(store, 2, lambda calls: calls[1].abort is not None)
        third = await wire.ask("chat", stream=stream)
        assert said(await _answer(third)) == 0
    assert len(steps.gates) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_the_record_and_before_the_end_of_its_reply_comes_back_for_it(steps, stream):
    """Neither record nor journal tells that its client is gone; the server that it left does."""
    store = MemoryStore()
    left, go_on = asyncio.Event(), asyncio.Event()

    class Held(ModelServer):
        async def after_call(self, call, reply):
            await go_on.wait()

    class Told(Recorder):
        async def abort(self, key, call_id, reason, **more):
            await super().abort(key, call_id, reason, **more)
            if reason == "client_gone":
                left.set()

    async with on_the_wire(Held, engine=Typist(script=steps, size=99), recorder=Told(store, reader=store)) as wire:
        first = await wire.ask("chat", stream=stream)
        await steps.next()
        await _journal(store, 1, lambda calls: calls[0].recorded)
        first.leave()
        await asyncio.wait_for(left.wait(), 10)
        (told,) = await store.begun_calls("4-2")
        assert (told.recorded, told.abort) == (True, None)
        assert [entry.client_gone for entry in await store.open_entries("4-2")] == [False]
        go_on.set()
        again = await wire.ask("chat", stream=stream)
        await _journal(store, 2, lambda calls: calls[1].abort is not None or len(steps.gates) > 1)
        assert len(steps.gates) == 1
        assert said(await _answer(again)) == 0


@pytest.mark.parametrize("repeats", [False, True], ids=["a sample of its own", "a repeat"])
async def test_a_repeat_waits_to_see_what_an_earlier_one_at_another_worker_claimed(tmp_path, steps, repeats):
    async with workers(tmp_path, steps, 2) as (one, two, store):
        first = await one.ask("chat")
        await steps.next(go=False)
        if not repeats:
            other = await one.ask("chat")
            await steps.next(go=False)
        first.leave()
        await _journal(store, 1, lambda calls: calls[0].abort == "client_gone")
        if repeats:
            other = await one.ask("chat")
            await _journal(store, 2)
        again = await two.ask("chat")
        await _journal(store, 3)
        steps.gates[0].set()
        await _journal(store, 3, lambda calls: calls[0].recorded)
        if repeats:
            await steps.next()
            assert (said(await _answer(other)), said(await _answer(again))) == (0, 1)
        else:
            steps.gates[1].set()
            assert (said(await _answer(other)), said(await _answer(again))) == (1, 0)
    assert len(steps.gates) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_recorded_answer_does_not_wait_for_a_sample_that_is_open_at_another_worker(tmp_path, steps, stream):
    async with workers(tmp_path, steps, 2) as (one, two, store):
        lefts = [await one.ask("chat", stream=stream) for _ in range(2)]
        for _ in lefts:
            await steps.next(go=False)
        other = await one.ask("chat", stream=stream)
        await steps.next(go=False)
        for each in lefts:
            each.leave()
        await _journal(store, 3, lambda calls: sum(each.abort == "client_gone" for each in calls) == 2)
        for gate in steps.gates[:2]:
            gate.set()
        await _journal(store, 3, lambda calls: sum(each.recorded for each in calls) == 2)
        hasty = await two.ask("chat", stream=stream)
        await _journal(store, 4)
        hasty.leave()  # what it had begun to doubt is not doubted anew
        await _journal(store, 4, lambda calls: calls[3].abort is not None)
        again = [await two.ask("chat", stream=stream) for _ in range(2)]
        assert sorted([said(await _answer(each)) for each in again]) == [0, 1]  # the other one is open all the while
        steps.gates[2].set()
        assert said(await _answer(other)) == 2
    assert len(steps.gates) == 3


async def test_nobody_waits_long_to_see_whether_another_worker_claims_a_recorded_call(tmp_path, steps):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    lost, limits = Recorder(one, reader=one), Limits(drain_s=600)
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(two, reader=two), limits=limits) as wire:
        path, body = ASK["chat"]
        tag = request_tag(digest_bytes(json.dumps(body).encode()), "chat")
        await lost.begin("4-2", "left", intent=Intent(request_digest=tag))
        await one.put(replace(entry("left", [1], [2], client_gone=True, output_items=(TOLD,)), rollout_id="4-2"))
        await lost.begin("4-2", "silent", intent=Intent(request_digest=tag))
        again = await wire.call(CAPTURED + path, body)
        assert said(await _answer(again)) == 7
    assert steps.gates == []
    await one.close()
    await two.close()


def test_what_is_known_of_claims_is_bounded_and_a_claim_that_came_to_nothing_leaves_nothing():
    claims = Claims()
    made = [
        ModelCall(f"c{n}", "chat", ResponsesRequest(input=()), {}, f"{n:064x}", rollout_id="k") for n in range(5000)
    ]
    for each in made:
        claims.claim(each, "a")
        claims.release(each)
        claims.release(each)
    assert len(claims) == 0
    claims.claim(made[0], "a")
    for each in made:
        claims.left(each)
        claims.left(made[0])
    assert len(claims) == 4096
    assert claims.seen(made[0]).claims == {made[0].call_id: "a"}
    assert claims.know(made[-1])
    assert not claims.know(made[1])
    claims.give_up(made[-1])
    assert claims.seen(made[-1]).gave_up == {made[-1].call_id}


async def test_nobody_waits_beyond_the_drain_bound_for_a_call_that_a_live_worker_lost(tmp_path, steps):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    lost, limits = Recorder(one, reader=one), Limits(drain_s=0.01)
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(two, reader=two), limits=limits) as wire:
        path, body = ASK["chat"]
        tag = request_tag(digest_bytes(json.dumps(body).encode()), "chat")
        await lost.begin("4-2", "lost", intent=Intent(request_digest=tag))
        await lost.abort("4-2", "lost", "client_gone")
        again = await wire.call(CAPTURED + path, body)
        await steps.next()
        assert said(await again.end()) == 0
        # Who went on without it claims it no more: it is there for the next one, should it come after all.
        await one.put(replace(entry("lost", [1], [2], client_gone=True, output_items=(TOLD,)), rollout_id="4-2"))
        assert said(await _answer(await wire.call(CAPTURED + path, body))) == 7
    await one.close()
    await two.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reply_from_the_record_is_byte_for_byte_the_first_one(dialect):
    text = [{"type": "output_text", "text": "hi", "annotations": []}]
    item = {"type": "message", "id": "msg_x", "role": "assistant", "status": "completed", "content": text}
    first = ModelCall(
        "call-1", dialect, ResponsesRequest(input=()), {}, "b" * 64, rollout_id="k", captured=True, started=1000.0
    )
    made = EngineReply(
        output=(item,),
        finish_reason="stop",
        model="m",
        usage=Usage(2, 1, cached_tokens=1, reasoning_tokens=1),
        tokens=SampledTokens(*(np.array(ids, np.uint32) for ids in ([1, 2], [3])), np.array([-0.5])),
        response_id="x",
        logprobs={"content": [{"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
        extra={"system_fingerprint": "fp"},
    )
    kept = entry(
        "call-1", [1, 2], [3], output_items=(item,), finish_reason="stop", extra={"reply": reply_details(made)}
    )
    read_back = unpack(pack(replace(kept, created_at=1000.0))).entry()
    call, again = recorded_reply(replace(first, call_id="call-2", started=2000.0), read_back)
    assert render_reply(call, again).body == render_reply(first, made).body


async def test_a_failed_attempt_is_not_an_answer_and_neither_is_an_older_turn_after_a_refusal(steps):
    store = MemoryStore()

    class Mine(ModelServer):
        refuse = False

        async def before_call(self, call):
            if self.refuse:
                raise LimitReached("enough")

    script = [{"text": "answer 0"}, {"text": "answer 1"}]
    replies = iter([{"fault": {"status": 503, "message": "busy"}}, *script])

    def tell(told):
        return msgspec.convert(next(replies), ScriptedReply)

    async with on_the_wire(Mine, engine=Typist(script=tell), recorder=Recorder(store, reader=store)) as wire:
        failed = await wire.ask("chat")
        await failed.end()
        assert failed.status == 503
        assert said(await (await wire.ask("chat", x_stainless_retry_count="1")).end()) == 0
        wire.server.refuse = True  # the same body again, as after a compaction: refused, and its retry too
        for count in ("0", "1"):
            refused = await wire.ask("chat", x_stainless_retry_count=count)
            await refused.end()
            assert refused.status == 403
            assert refused.headers["x-should-retry"] == "false"


async def test_a_call_that_another_one_extends_is_never_given_again():
    store = MemoryStore()
    engine = Typist(script=lambda told: f"answer {told.index}")
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store)) as wire:
        message = json.loads(await (await wire.ask("chat")).end())["choices"][0]["message"]
        history = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "on"}]
        await (await wire.ask("chat", more={"messages": history})).end()
        (first, second) = await store.open_entries("4-2")
        assert second.parent_call_id == first.model_call_id
        assert said(await (await wire.ask("chat", x_stainless_retry_count="1")).end()) == 2


async def test_an_idempotency_key_gets_its_answer_again_and_no_other_body(steps):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        first = await wire.ask("chat", idempotency_key="k")
        await steps.next()
        assert said(await first.end()) == 0
        assert said(await (await wire.ask("chat", idempotency_key="k")).end()) == 0
        other = await wire.ask("chat", idempotency_key="k", more={"seed": 1})
        await other.end()
        assert other.status == 422
        assert other.headers["x-should-retry"] == "false"
        elsewhere = await wire.ask("chat", prefix=CAPTURED.replace("4-2", "5-2"), idempotency_key="k", more={"seed": 1})
        await steps.next()
        assert said(await elsewhere.end()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_of_two_bodies_at_once_under_one_key_the_first_has_it(stream):
    store, looked = MemoryStore(), []
    both = asyncio.Event()

    class Slow(Recorder):
        """Nobody learns that the key is free before everybody has asked."""

        async def journal(self, key):
            calls = await super().journal(key)
            looked.append(key)
            if len(looked) == 3:
                both.set()
            await both.wait()
            return calls

    async with on_the_wire(engine=Typist(script=["ok"]), recorder=Slow(store, reader=store)) as wire:
        calls = [
            await wire.ask("chat", idempotency_key="k", more={"seed": seed}, stream=stream and bool(seed))
            for seed in range(3)
        ]
        for call in calls:
            await call.end()
        assert sorted(call.status for call in calls) == [200, 422, 422]
        winner = next(seed for seed in range(3) if calls[seed].status == 200)
        for seed in range(3):  # what was refused did not take the key from whoever has it
            again = await wire.ask("chat", idempotency_key="k", more={"seed": seed}, stream=stream and bool(seed))
            assert (await again.end(), again.status)[1] == (200 if seed == winner else 422)
        assert wire.server.engine.calls == 1
    snapshot = await store.freeze("4-2")
    assert (len(snapshot.entries), snapshot.incomplete) == (1, False)


async def test_one_body_under_one_key_in_two_dialects_is_two_calls(steps):
    store = MemoryStore()
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        for number, path in enumerate(("/v1/messages", "/v1/chat/completions")):
            call = await wire.call(CAPTURED + path, body, idempotency_key="k")
            await steps.next()
            assert (said(await call.end()), call.status) == (number, 200)


@pytest.mark.parametrize("key", ["", "  "])
async def test_an_empty_key_is_none(steps, key):
    store = MemoryStore()
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        for number, seed in enumerate((1, 1, 2)):
            call = await wire.ask("chat", idempotency_key=key, more={"seed": seed})
            await steps.next()
            assert said(await call.end()) == number


async def test_the_same_bytes_in_another_dialect_are_another_request(steps):
    store = MemoryStore()
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    async with on_the_wire(engine=Typist(script=steps), recorder=Recorder(store, reader=store)) as wire:
        first = await wire.call(CAPTURED + "/v1/messages", body)
        await steps.next()
        await first.end()
        second = await wire.call(CAPTURED + "/v1/chat/completions", body, x_stainless_retry_count="1")
        await steps.next()
        assert said(await second.end()) == 1


async def test_two_workers_on_one_store_agree(tmp_path, steps):
    """The first one begins, the second one's retry waits for it, the third request finds it on record."""
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    settings = [
        {"engine": Typist(script=steps), "recorder": Recorder(each, reader=each), "limits": Limits(drain_s=20)}
        for each in (one, two)
    ]
    async with on_the_wire(**settings[0]) as left, on_the_wire(**settings[1]) as right:
        first = await left.ask("responses")
        await steps.next(go=False)
        first.leave()
        again = await right.ask("responses", x_stainless_retry_count="1")
        await _journal(one, 2)
        steps.gates[0].set()
        assert said(await again.end()) == 0
        more = await left.ask("responses", x_stainless_retry_count="2")
        assert said(await more.end()) == 0
        unmarked = await right.ask("responses")  # sent whole: a new sample
        await steps.next()
        assert said(await unmarked.end()) == 1
    snapshot = await two.freeze("4-2")
    assert len(snapshot.entries) == 2
    assert not snapshot.incomplete
    await one.close()
    await two.close()


async def test_an_early_leaver_at_one_worker_is_known_to_the_other(tmp_path, steps):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    first_of = {"engine": Typist(script=steps), "recorder": Recorder(one, reader=one)}
    other = {"engine": Typist(script=steps), "recorder": Recorder(two, reader=two)}
    async with on_the_wire(**first_of) as left, on_the_wire(**other) as right:
        first = await left.ask("chat")
        await steps.next(go=False)
        first.leave()
        await _journal(one, 1, lambda calls: calls[0].abort == "client_gone")
        again = await right.ask("chat")
        await _journal(one, 2)
        steps.gates[0].set()
        assert said(await again.end()) == 0
    await one.close()
    await two.close()


async def _answer(asked):
    """The whole body of a reply that is due; a call that waits for what nobody does fails, it does not hang."""
    async with asyncio.timeout(10):
        return await asked.end()


async def _journal(store, calls, holds=lambda calls: True):
    """Return when so many calls were begun; the journal is all there is to wait for."""
    async with asyncio.timeout(20):
        while len(found := await store.begun_calls("4-2")) < calls or not holds(found):  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0.002)

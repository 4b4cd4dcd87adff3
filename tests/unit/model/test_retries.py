"""Repeats of a request: which recorded call answers them, decided by the journal, and what they get."""

from __future__ import annotations

import asyncio
import json
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
from toprope.servers.model.engines.base import EngineReply, SampledTokens, Usage
from toprope.servers.model.replies import recorded_reply, render_reply, reply_details
from toprope.servers.model.retries import Replay, Wait, decide, extended, request_tag
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedReply
from toprope.tokens.entry import TokenEntry
from toprope.trajectory.build import Trainable, build
from toprope.wire.responses import ResponsesRequest

pytestmark = pytest.mark.promise("MS-4")

DIALECTS = sorted(ASK)
T, U = request_tag("b" * 64, "chat"), request_tag("c" * 64, "chat")


def call(name, count=0, *, tag=T, recorded=False, abort=None, live=True):
    return JournalledCall(name, Intent(request_digest=tag, retry_count=count), recorded, abort, live)


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
    assert decide(calls, "me", {"a"}) == Replay("a")
    assert decide([*calls[:2], call("c", abort="replay_of:a"), call("me")], "me", {"a"}) is None
    assert decide([*calls[:2], call("c", abort="waited_for:a"), call("me")], "me", {"a"}) == Replay("a")


def test_four_equal_samples_that_retry_in_any_order_claim_four_different_calls():
    first = [call(name, recorded=True) for name in "abcd"]
    again = [call(name, 1) for name in "efgh"]
    claimed = {decide([*first, *again], each.call_id).call_id for each in again}
    assert claimed == set("abcd")


def test_an_idempotency_key_is_its_own_claim():
    keyed, other = (request_tag("b" * 64, "chat", key) for key in ("k", "l"))
    assert decide([call("a", recorded=True, tag=keyed), call("me", tag=keyed)], "me") == Replay("a")
    assert decide([call("a", recorded=True, tag=keyed), call("me", tag=other)], "me") is None


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
@pytest.mark.parametrize("headers", [{}, {"idempotency_key": "k"}], ids=["unmarked", "keyed"])
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
        waiting = await last.ask("chat", stream=stream, **headers)
        await asyncio.wait_for(recorders[-1].looked.wait(), 10)
        waiting.leave()
        await _journal(stores[0], 2, lambda calls: calls[1].abort is not None)
        third = await last.ask("chat", stream=stream, **headers)
        await _journal(stores[0], 3)
        steps.gates[0].set()
        assert said(await third.end()) == 0
    one, two, three = await stores[0].begun_calls("4-2")
    assert (one.recorded, two.abort, three.abort) == (True, f"waited_for:{one.call_id}", f"replay_of:{one.call_id}")
    assert len(steps.gates) == 1
    for each in stores:
        await each.close()


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


async def _journal(store, calls, holds=lambda calls: True):
    """Return when so many calls were begun; the journal is all there is to wait for."""
    async with asyncio.timeout(20):
        while len(found := await store.begun_calls("4-2")) < calls or not holds(found):  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0.002)

"""What a rollout may spend, and what a trainer says while it runs: weights, aborts."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack

import pytest
from tests.unit.model.wire import ASK, CAPTURED, Typist, on_the_wire

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError
from toprope.servers.model.budgets import RolloutLimits
from toprope.servers.model.server import ModelServer
from toprope.servers.model.weights import WeightVersions
from toprope.testing.scripted import ScriptedFault, ScriptedReply
from toprope.tokens.entry import WeightSpan

KEY, LONGER = {"x_toprope_admin_key": "secret"}, {"x_toprope_admin_key": "secret and more"}


def kind_of(call):
    """What an error says, in whichever dialect."""
    return json.loads(call.body)["error"]["kind"]


async def turns(wire, dialect, count, *, prefix=CAPTURED, stream=False):
    """Calls with different bodies, one after another; the last of them."""
    for number in range(count):
        call = await wire.ask(dialect, more={"seed": number}, prefix=prefix, stream=stream)
        await call.end()
    return call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefix", ["/ng-rollout/4-2", CAPTURED])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_the_call_over_the_budget_is_refused_in_the_dialects_words(dialect, prefix, stream):
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "budget": RolloutLimits(calls=2)}
    async with on_the_wire(engine=Typist(script=["ok"]), **settings) as wire:
        assert (await turns(wire, dialect, 2, prefix=prefix, stream=stream)).status == 200
        call = await turns(wire, dialect, 3, prefix=prefix, stream=stream)
        assert (call.status, call.headers["x-should-retry"]) == (403, "false")
        assert kind_of(call) == Kind.LIMIT_REACHED
        assert (json.loads(call.body).get("type") == "error") == (dialect == "messages")
        assert b"limits.calls" in call.body
        other = await turns(wire, dialect, 1, prefix=prefix.replace("4-2", "5-2"), stream=stream)
        assert other.status == 200
        assert wire.server.engine.calls == 3


async def test_what_came_before_a_spent_budget_stays_trainable():
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "budget": RolloutLimits(calls=1)}
    async with on_the_wire(engine=Typist(script=["ok"]), **settings) as wire:
        reply = json.loads(await (await turns(wire, "responses", 1)).end())
        assert (await turns(wire, "responses", 2)).status == 403
    row = {"_ng_rollout_id": "4-2", "_ng_attempt_index": 0, "response": reply}
    delivered = await finalize_rollout_token_capture(row, store, settle_s=0)
    assert delivered["metrics"]["mask_reasons"] == []
    assert delivered["metrics"]["truncated"] is True
    assert delivered["rebuilt_response"] is not None


@pytest.mark.parametrize(("limits", "named"), [({"tokens": 3}, b"limits.tokens"), ({"seconds": 5}, b"limits.seconds")])
async def test_tokens_and_seconds_bound_a_rollout_too(limits, named):
    now, store = [100.0], MemoryStore()

    async def at_end():
        now[0] += 6.0

    settings = {"budget": RolloutLimits(**limits), "clock": lambda: now[0]}
    engine = Typist(script=["five words are too many"], at_end=at_end)
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store, clock=lambda: 100.0), **settings) as w:
        for prefix in ("/ng-rollout/4-2", CAPTURED.replace("4-2", "5-2")):
            now[0] = 100.0
            assert (await turns(w, "chat", 1, prefix=prefix)).status == 200
            call = await turns(w, "chat", 1, prefix=prefix)
            assert (call.status, named in call.body) == (403, True)


async def test_a_restart_and_another_worker_forget_nothing_that_was_spent(tmp_path):
    store = SqliteStore(tmp_path / "c.db")
    budget = RolloutLimits(calls=2)
    async with on_the_wire(engine=Typist(script=["ok"]), recorder=Recorder(store, reader=store), budget=budget) as w:
        await turns(w, "chat", 1)
    other = SqliteStore(tmp_path / "c.db")
    async with on_the_wire(engine=Typist(script=["ok"]), recorder=Recorder(other, reader=other), budget=budget) as w:
        statuses = []
        for number in range(3):
            call = await w.ask("chat", more={"seed": 10 + number})
            await call.end()
            statuses.append(call.status)
    assert statuses == [200, 403, 403]
    await store.close()
    await other.close()


async def test_calls_at_once_do_not_slip_past_a_budget_and_failed_ones_are_free():
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "budget": RolloutLimits(calls=2)}
    async with on_the_wire(engine=Typist(script=_fault_unless_ok), **settings) as wire:
        for _ in range(3):
            call = await wire.ask("responses", more={"input": "broken"})
            await call.end()
            assert call.status == 503
        calls = [await wire.ask("responses", more={"input": "ok", "seed": n}) for n in range(5)]
        for call in calls:
            await call.end()
        assert sorted(call.status for call in calls) == [200, 200, 403, 403, 403]


async def test_calls_that_read_the_record_at_once_count_what_it_holds_once():
    """One call is on record; three more ask before any of them was counted. All four fit."""
    store, asked = MemoryStore(), asyncio.Barrier(3)

    class Slow(Recorder):
        async def recorded(self, key, since=0):
            entries = await super().recorded(key, since)
            if entries and not since:
                await asked.wait()
            return entries

    budget = RolloutLimits(calls=4)
    async with on_the_wire(engine=Typist(script=["ok"]), recorder=Slow(store, reader=store), budget=budget) as wire:
        assert (await turns(wire, "chat", 1)).status == 200
        calls = [await wire.ask("chat", more={"seed": 10 + n}) for n in range(3)]
        for call in calls:
            await call.end()
        assert [call.status for call in calls] == [200, 200, 200]
        last = await wire.ask("chat", more={"seed": 20})
        await last.end()
        assert last.status == 403


@pytest.mark.parametrize("prefix", ["/ng-rollout/4-2", CAPTURED])
async def test_calls_under_way_count_until_they_end(prefix):
    store, go, reached = MemoryStore(), asyncio.Event(), []

    async def at_end():
        reached.append(1)
        if len(reached) < 3:
            await go.wait()

    engine, budget = Typist(script=["ok"], size=2, at_end=at_end), RolloutLimits(calls=2)
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store), budget=budget) as wire:
        running = [await wire.ask("chat", more={"seed": n}, prefix=prefix, stream=True) for n in range(2)]
        for call in running:
            await call.read(lambda body: b"ok" in body)
        over = await wire.ask("chat", more={"seed": 9}, prefix=prefix)
        await over.end()
        assert over.status == 403
        go.set()
        for call in running:
            assert b"[DONE]" in await call.end()


async def test_a_call_that_is_on_record_and_not_yet_over_counts_once():
    """Between the durable record and the end of the turn another call asks: both fit in a budget of two."""
    store, recorded, go = MemoryStore(), asyncio.Event(), asyncio.Event()

    class Lingering(Recorder):
        async def record(self, call):
            await super().record(call)
            recorded.set()
            await go.wait()

    budget = RolloutLimits(calls=2)
    recorder = Lingering(store, reader=store)
    async with on_the_wire(engine=Typist(script=["ok"], size=2), recorder=recorder, budget=budget) as wire:
        first = await wire.ask("chat", more={"seed": 1})
        await recorded.wait()
        second = await wire.ask("chat", more={"seed": 2}, stream=True)
        await second.read(lambda body: b"ok" in body)
        go.set()
        await first.end()
        await second.end()
        assert (first.status, second.status) == (200, 200)


async def test_plain_calls_of_a_rollout_count_beside_its_captured_ones():
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "budget": RolloutLimits(calls=3)}
    async with on_the_wire(engine=Typist(script=["ok"]), **settings) as wire:
        statuses = []
        for number, prefix in enumerate((CAPTURED, "/ng-rollout/4-2", CAPTURED, CAPTURED)):
            call = await wire.ask("chat", more={"seed": number}, prefix=prefix)
            await call.end()
            statuses.append(call.status)
    assert statuses == [200, 200, 200, 403]


async def test_seconds_run_from_the_first_call_on_record_also_after_a_restart():
    store, now = MemoryStore(), [100.0]
    budget = RolloutLimits(seconds=5)
    for _ in range(2):
        recorder = Recorder(store, reader=store, clock=lambda: now[0])
        engine = Typist(script=["ok"])
        async with on_the_wire(engine=engine, recorder=recorder, budget=budget, clock=lambda: now[0]) as wire:
            call = await wire.ask("chat", more={"seed": now[0]})
            await call.end()
        now[0] += 6
    assert (call.status, b"limits.seconds" in call.body) == (403, True)


def _fault_unless_ok(told):
    return ScriptedReply(text="ok") if told.last_text == "ok" else ScriptedReply(fault=ScriptedFault())


async def test_a_client_that_leaves_while_its_call_is_admitted_leaves_no_refusal():
    """Nothing was sent and nothing was refused: the trajectory is not truncated."""
    store, asked, aborted = MemoryStore(), asyncio.Event(), asyncio.Event()

    class Asking(ModelServer):
        async def before_call(self, call):
            asked.set()
            await asyncio.Event().wait()

    class Noticing(Recorder):
        async def abort(self, *given, **more):
            await super().abort(*given, **more)
            aborted.set()

    engine = Typist(script=["ok"])
    async with on_the_wire(Asking, engine=engine, recorder=Noticing(store, reader=store)) as wire:
        call = await wire.ask("chat", stream=True)
        await asked.wait()
        call.leave()
        await asyncio.wait_for(aborted.wait(), 10)
    assert [each.abort for each in await store.begun_calls("4-2")] == ["not_sent"]
    assert engine.calls == 0


def test_a_reply_of_no_tokens_has_no_span_of_weights():
    weights = WeightVersions("1")
    assert weights.spans("1", 0, changes=0) == ()
    weights.loaded("2")
    assert weights.spans("1", 0, changes=0) == ()
    assert weights.straddled == 0


@pytest.mark.parametrize("limits", [{"calls": 0}, {"tokens": -1}, {"seconds": 0}])
def test_a_budget_of_nothing_is_refused(limits):
    with pytest.raises(ConfigError, match=f"limits.{next(iter(limits))}"):
        RolloutLimits(**limits)


# -- a trainer's words -------------------------------------------------------------------------------------------------


async def test_admin_routes_want_their_key_and_are_shut_without_one():
    async with on_the_wire(engine=Typist(script=["ok"]), admin_key="secret") as wire:
        for headers, status in (({}, 401), ({"x_toprope_admin_key": "wrong"}, 401), (LONGER, 401), (KEY, 200)):
            call = await wire.call("/admin/weights", {"version": "1"}, **headers)
            await call.end()
            assert call.status == status
        call = await wire.call("/admin/weights", {"version": ""}, **KEY)
        await call.end()
        assert call.status == 422
    async with on_the_wire(engine=Typist(script=["ok"])) as wire:
        for path, body in (("/admin/weights", {"version": "1"}), ("/admin/abort", {"rollouts": ["4-2"]})):
            call = await wire.call(path, body, **KEY)
            await call.end()
            assert (call.status, b"admin_key" in call.body) == (403, True)


async def test_calls_carry_the_weights_they_were_sampled_under_and_one_astride_a_change_says_both():
    store, reached, go = MemoryStore(), asyncio.Event(), asyncio.Event()

    async def at_end():
        reached.set()
        await go.wait()

    engine = Typist(script=["ok"])
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store), admin_key="secret") as wire:
        await turns(wire, "chat", 1)
        assert json.loads(await (await wire.call("/admin/weights", {"version": "1"}, **KEY)).end()) == {
            "version": "1",
            "previous": None,
            "in_flight": 0,
        }
        await (await wire.ask("chat", more={"seed": 5})).end()
        engine.at_end = at_end
        astride = await wire.ask("messages", stream=True)
        await reached.wait()
        told = json.loads(await (await wire.call("/admin/weights", {"version": "2"}, **KEY)).end())
        assert told == {"version": "2", "previous": "1", "in_flight": 1}
        go.set()
        await astride.end()
        assert wire.server.weights.straddled == 1
    spans = [entry.weight_versions for entry in await store.open_entries("4-2")]
    size = len((await store.open_entries("4-2"))[0].generation_token_ids)
    assert spans == [(), (WeightSpan(0, size, "1"),), (WeightSpan(0, size, "1..2"),)]


@pytest.mark.parametrize(
    ("loaded", "span"),
    [("2", "1..2"), ("1", "1"), ("21", "1..2..1"), ("2131", "1..3..1"), ("23", "1..3"), ("111", "1")],
)
async def test_weights_that_change_and_come_back_under_a_call_do_not_leave_it_clean(loaded, span):
    store, reached, go = MemoryStore(), asyncio.Event(), asyncio.Event()

    async def at_end():
        reached.set()
        await go.wait()

    engine = Typist(script=["ok"], at_end=at_end)
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store), admin_key="secret") as wire:
        await (await wire.call("/admin/weights", {"version": "1"}, **KEY)).end()
        astride = await wire.ask("chat")
        await reached.wait()
        for version in loaded:
            await (await wire.call("/admin/weights", {"version": version}, **KEY)).end()
        go.set()
        await astride.end()
        assert wire.server.weights.straddled == (".." in span)
        await (await wire.ask("chat", more={"seed": 1})).end()
    spans = [each.version for entry in await store.open_entries("4-2") for each in entry.weight_versions]
    assert spans == [span, loaded[-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_an_aborted_rollout_is_refused_as_stale_and_its_work_stays(dialect, stream):
    store = MemoryStore()
    async with on_the_wire(
        engine=Typist(script=["ok"]), recorder=Recorder(store, reader=store), admin_key="secret"
    ) as wire:
        await turns(wire, dialect, 1, stream=stream)
        call = await wire.call("/admin/abort", {"rollouts": ["4-2", "9-9"]}, **KEY)
        assert json.loads(await call.end()) == {"aborted": 2}
        call = await turns(wire, dialect, 2, stream=stream)
        assert (call.status, call.headers["x-should-retry"], kind_of(call)) == (403, "false", Kind.STALE)
        other = await turns(wire, dialect, 1, prefix=CAPTURED.replace("4-2", "5-2"), stream=stream)
        assert other.status == 200
        assert wire.server.engine.calls == 2
    snapshot = await store.freeze("4-2")
    assert len(snapshot.entries) == 1
    assert "truncated:stale" in snapshot.reasons


async def test_another_worker_learns_of_an_abort_from_the_journal(tmp_path):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    first = {"engine": Typist(script=["ok"]), "recorder": Recorder(one, reader=one), "admin_key": "secret"}
    second = {"engine": Typist(script=["ok"]), "recorder": Recorder(two, reader=two), "admin_key": "secret"}
    async with on_the_wire(**first) as left, on_the_wire(**second) as right:
        assert (await turns(right, "chat", 1)).status == 200
        await (await left.call("/admin/abort", {"rollouts": ["4-2"]}, **KEY)).end()
        call = await right.ask("chat", more={"seed": 9})
        await call.end()
        assert (call.status, kind_of(call)) == (403, Kind.STALE)
    await one.close()
    await two.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_abort_before_the_first_call_reaches_other_workers_and_a_restarted_server(tmp_path, restarted):
    one, two = SqliteStore(tmp_path / "c.db"), SqliteStore(tmp_path / "c.db")
    first = {"engine": Typist(script=["ok"]), "recorder": Recorder(one, reader=one), "admin_key": "secret"}
    second = {"engine": Typist(script=["ok"]), "recorder": Recorder(two, reader=two), "admin_key": "secret"}
    async with AsyncExitStack() as stack:
        right = None if restarted else await stack.enter_async_context(on_the_wire(**second))
        async with on_the_wire(**first) as left:
            await (await left.call("/admin/abort", {"rollouts": ["4-2"]}, **KEY)).end()
        right = right or await stack.enter_async_context(on_the_wire(**second))
        for seed in range(2):
            call = await right.ask("chat", more={"seed": seed})
            await call.end()
            assert (call.status, kind_of(call)) == (403, Kind.STALE)
        assert (await turns(right, "chat", 1, prefix=CAPTURED.replace("4-2", "5-2"))).status == 200
        assert right.server.engine.calls == 1
    assert "truncated:stale" in (await two.freeze("4-2")).reasons
    await one.close()
    await two.close()


async def test_an_abort_of_a_rollout_that_was_delivered_is_nothing_to_write_down():
    store = MemoryStore()
    settings = {"recorder": Recorder(store, reader=store), "admin_key": "secret"}
    async with on_the_wire(engine=Typist(script=["ok"]), **settings) as wire:
        await turns(wire, "chat", 1)
        await store.freeze("4-2")
        call = await wire.call("/admin/abort", {"rollouts": ["4-2", "5-2"]}, **KEY)
        assert json.loads(await call.end()) == {"aborted": 2}
    assert "truncated:stale" not in (await store.freeze("4-2")).reasons
    assert "truncated:stale" in (await store.freeze("5-2")).reasons


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"temperature": 1.0, "top_p": 1}, None),
    ],
)
async def test_raw_logprobs_of_a_shaped_policy_are_warned_about_once(caplog, fields, named):
    store = MemoryStore()
    with caplog.at_level(logging.WARNING):
        async with on_the_wire(engine=Typist(script=["ok"]), recorder=Recorder(store, reader=store)) as wire:
            for seed in range(2):
                await (await wire.ask("chat", more={**fields, "seed": seed})).end()
    said = [record.getMessage() for record in caplog.records if "raw" in record.getMessage()]
    assert len(said) == (named is not None)
    assert named is None or named in said[0]
    assert (await store.open_entries("4-2"))[0].logprobs_mode == "raw"

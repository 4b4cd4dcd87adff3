"""Which of several endpoints gets a call: rollouts spread, stay, and move only from one that is down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from tests.unit.model.wire import ASK, CAPTURED, on_the_wire

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.kinds import Delivery
from toprope.errors.tree import EngineUnavailable
from toprope.http.client import Client
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.engines.replicas import DOWN_S, Replicas
from toprope.testing.upstream import ScriptedUpstream, completion, serving


class Cluster:
    """Replicas named a, b, ...; `down` are those that cannot be reached, `seen` who got the calls."""

    def __init__(self, names="ab"):
        self.now, self.down, self.seen = 0.0, set(), []
        self.replicas = Replicas(list(names), clock=lambda: self.now)

    async def call(self, key, gate=None):
        async def made(endpoint):
            self.seen.append(endpoint)
            if gate is not None:
                await gate.wait()
            if endpoint in self.down:
                raise EngineUnavailable("refused", delivery=Delivery.NOT_SENT)
            return endpoint

        return await self.replicas.run(key, made)


@pytest.mark.parametrize("between", [0, 1, 2])
async def test_rollouts_begun_one_after_another_spread_whatever_is_called_between(between):
    cluster, homes = Cluster(), []
    for number in range(8):
        homes.append(await cluster.call(f"r{number}"))
        for _ in range(between):  # calls of no rollout, and later calls of rollouts
            await cluster.call(None)
            assert await cluster.call(f"r{number}") == homes[-1]
    assert sorted(homes) == list("aaaabbbb")
    assert [await cluster.call(f"r{number}") for number in range(8)] == homes


async def test_a_busy_replica_gets_no_new_rollout_before_an_idle_one():
    cluster, gate = Cluster(), asyncio.Event()
    busy = asyncio.create_task(cluster.call("long", gate))
    await asyncio.sleep(0)  # it is under way
    assert cluster.seen == ["a"]
    assert [await cluster.call(f"r{number}") for number in range(3)] == ["b", "b", "b"]
    gate.set()
    assert await busy == "a"
    assert await cluster.call("later") == "a"


async def test_a_replica_that_is_down_is_left_alone_for_a_while_and_no_longer():
    cluster = Cluster()
    cluster.down = {"a"}
    assert await cluster.call("r0") == "b"
    assert cluster.seen == ["a", "b"]
    cluster.seen.clear()
    cluster.now = DOWN_S - 0.1
    assert [await cluster.call(f"r{number}") for number in range(3)] == ["b", "b", "b"]
    assert cluster.seen == ["b", "b", "b"]
    cluster.now, cluster.down = DOWN_S, set()
    assert await cluster.call("new") == "a"
    assert await cluster.call("r0") == "b"


async def test_a_replica_that_answers_although_it_is_taken_to_be_down_is_up_again():
    cluster = Cluster()
    cluster.down = {"a", "b"}
    with pytest.raises(EngineUnavailable):
        await cluster.call(None)
    cluster.down = set()
    first = await cluster.call("r0")  # both are taken to be down, so one of them is tried
    cluster.seen.clear()
    assert [await cluster.call(f"n{number}") for number in range(2)] == [first, first]


@pytest.mark.parametrize("prefix", ["/ng-rollout/4-2", CAPTURED])
async def test_a_rollout_with_many_sessions_lives_on_one_replica(prefix):
    """What shares a prefix is the rollout, whatever its client calls its sessions. Upstream they stay as they are."""
    store, path = MemoryStore(), ASK["chat"][0]
    upstreams = [ScriptedUpstream(answer=lambda request: completion()) for _ in range(2)]
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        urls = [await stack.enter_async_context(serving(upstream)) for upstream in upstreams]
        engine = OpenAIEngine(client=client, base_url=f"{urls[0]}/v1", replicas=[f"{urls[1]}/v1"])
        wire = await stack.enter_async_context(on_the_wire(engine=engine, recorder=Recorder(store, reader=store)))
        for number in range(8):
            body = {**ASK["chat"][1], "seed": number}
            call = await wire.call(prefix + path, body, x_session_id=f"s{number}")
            await call.end()
            assert call.status == 200
    asked = [[r for r in upstream.requests if r.path.endswith(path)] for upstream in upstreams]
    assert sorted(map(len, asked)) == [0, 8]
    assert [request.headers["x-session-id"] for request in max(asked, key=len)] == [f"s{n}" for n in range(8)]

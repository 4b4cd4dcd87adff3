"""One episode through our four servers, inline and over HTTP: one key in every handler, one state behind every tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from toprope.catalog.ledger import Ledger
from toprope.catalog.tool_loop import ToolLoop
from toprope.correlation.context import current_rollout_id
from toprope.http.app import ServerApp
from toprope.http.client import Client, Peer, Role
from toprope.http.reply import Reply
from toprope.http.request import Request
from toprope.http.serve import serve
from toprope.servers.agent.agent import Activation
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.episode import Episode
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply

SIGNING_KEY = b"k" * 32


class Watch:
    """Which rollout each handler saw, in child tasks and threads too."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str | None]] = {}

    async def look(self, where: str) -> None:
        child = asyncio.create_task(_seen())
        threaded = await asyncio.to_thread(current_rollout_id)
        self.seen.setdefault(where, set()).update({current_rollout_id(), await child, threaded})

    def look_here(self, where: str) -> None:
        self.seen.setdefault(where, set()).add(current_rollout_id())


async def _seen() -> str | None:
    return current_rollout_id()


class WatchedLedger(Ledger):
    """The ledger, watched."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        self.watch.look_here("seed")
        return super().seed(task)

    def balance(self, state: dict[str, int], account: str) -> int:
        self.watch.look_here("tool")  # `deposit` and `transfer` call it
        return super().balance(state, account)

    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> Any:
        self.watch.look_here("verify")
        return super().verify(state, task, response)

    def release(self, state: Any) -> None:
        self.watch.look_here("release")


class WatchedModel(ModelServer):
    """A user's own model server."""

    watch: Watch

    async def responses(self, request: Request) -> Reply:
        await self.watch.look("model")
        return await super().responses(request)


class WatchedAgent(ToolLoop):
    """The tool loop, watched."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    async def respond(self, activation: Activation) -> dict[str, Any]:
        await self.watch.look("agent")
        return await super().respond(activation)


class WatchedTurn(SingleAgentTurn):
    """The protocol, watched."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    async def run(self, episode: Episode, given: Any) -> dict[str, Any]:
        await self.watch.look("environment")
        return await super().run(episode, given)


class World:
    """All four, placed inline or on sockets."""

    def __init__(self, client: Client, stack: AsyncExitStack, *, inline: bool) -> None:
        self.client = client
        self.stack = stack
        self.inline = inline
        self.watch = Watch()

    async def place(self, app: ServerApp, role: Role) -> Peer:
        if self.inline:
            self.client.register(f"inline://{app.name}", app)
            await app.start()
            self.stack.push_async_callback(app.stop)
            return self.client.peer(f"inline://{app.name}", role)
        bound = await serve(app)
        self.stack.push_async_callback(bound.close)
        return self.client.peer(bound.url, role)

    async def build(self, script: Any) -> Peer:
        model = WatchedModel(name="policy", engine=ScriptedEngine(script=script))
        model.watch = self.watch
        self.resources = ResourcesServer(name="ledger", environment=WatchedLedger(self.watch), signing_key=SIGNING_KEY)
        self.agent = AgentServer(
            name="solver",
            agent=WatchedAgent(self.watch),
            model=await self.place(model.app, "model"),
            client=self.client,
            signing_key=SIGNING_KEY,
        )
        environment = EnvironmentServer(
            name="episode",
            protocol=WatchedTurn(self.watch),
            resources=await self.place(self.resources.app, "resources"),
            agent=await self.place(self.agent.app, "agent"),
            tools=["direct_http"],
        )
        return await self.place(environment.app, "environment")


@pytest.fixture(params=["inline", "http"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        yield World(client, stack, inline=request.param == "inline")


def solve(call: Any) -> ScriptedReply:
    """Do what the task's text asks, in two calls, then say so."""
    words = call.request.request.input[0]["content"].split()
    moved, source, target, added, third = words[1], words[3], words[5].rstrip(","), words[8], words[13].rstrip(".")
    if call.turn == 0:
        arguments = {"source": source, "target": target, "amount": int(moved)}
        return ScriptedReply(calls=[ScriptedCall("transfer", arguments)])
    if call.turn == 1:
        return ScriptedReply(calls=[ScriptedCall("deposit", {"account": third, "amount": int(added)})])
    return ScriptedReply(text=f"done: {call.last_text}")


@pytest.mark.promise("ID-2")
@pytest.mark.promise("ID-3")
async def test_one_key_is_seen_in_every_handler_with_capture_and_observability_off(world: World) -> None:
    environment = await world.build(solve)
    (task,) = Ledger().tasks(1, seed=1)
    reply = await environment.request(
        "POST", "/run", body={"episode_id": {"rollout_id": "4-2", "attempt": 3}, "task": task}
    )
    outcome = reply.json()
    assert outcome["failure"] is None
    assert outcome["result"]["reward"] == 1.0
    places = ["environment", "agent", "model", "seed", "tool", "verify", "release"]
    assert world.watch.seen == {place: {"4-2-a3"} for place in places}
    assert (len(world.resources.sessions), len(world.agent.sessions)) == (0, 0)
    assert current_rollout_id() is None


@pytest.mark.promise("ID-2")
async def test_many_episodes_at_once_never_see_each_other(world: World) -> None:
    environment = await world.build(solve)
    tasks = list(Ledger().tasks(40, seed=2))

    async def one(number: int) -> Any:
        body = {"episode_id": {"rollout_id": f"r.{number}", "attempt": 0}, "task": tasks[number]}
        return (await environment.request("POST", "/run", body=body)).json()

    outcomes = await asyncio.gather(*(one(number) for number in range(40)))
    assert [outcome["episode_id"]["rollout_id"] for outcome in outcomes] == [f"r.{number}" for number in range(40)]
    assert {outcome["result"]["reward"] for outcome in outcomes} == {1.0}
    assert world.watch.seen["tool"] == {f"r.{number}" for number in range(40)}
    assert (len(world.resources.sessions), len(world.agent.sessions)) == (0, 0)


async def test_what_a_model_refuses_is_the_failure_of_the_episode_with_its_words(world: World) -> None:
    fault = {"fault": {"status": 400, "message": "this prompt is 9000 tokens long", "kind": "model_context_length"}}
    environment = await world.build([fault])
    (task,) = Ledger().tasks(1, seed=1)
    reply = await environment.request(
        "POST", "/run", body={"episode_id": {"rollout_id": "4-2", "attempt": 0}, "task": task}
    )
    failure = reply.json()["failure"]
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "model_context_length", True)
    assert "this prompt is 9000 tokens long" in failure["failure_reason"]
    assert failure["upstream_status"] == 400
    assert (len(world.resources.sessions), len(world.agent.sessions)) == (0, 0)

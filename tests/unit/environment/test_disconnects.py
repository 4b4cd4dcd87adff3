"""A client that leaves cancels what only it wanted, and never what somebody else must rely on (over real sockets)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from toprope.http.client import Client, Peer
from toprope.http.serve import serve
from toprope.servers.agent.agent import Activation, Agent
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

KEY = b"k" * 32
EPISODE = {"rollout_id": "run.0-0", "attempt": 0}
TASK_ID = {"taskset": "t", "task_id": "1"}


class Step:
    """One piece of work: that it began, and how it ended."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work(self) -> None:
        self.began.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended.set_result("cancelled")
            raise
        self.ended.set_result("finished")


class Slow(Environment):
    """Everything takes until it is let go."""

    def __init__(self, steps: dict[str, Step]) -> None:
        self.steps = steps

    async def seed(self, task: dict[str, Any]) -> str:
        if "seed" in self.steps:
            await self.steps["seed"].work()
        return "state"

    @tool
    async def dig(self, state: str) -> str:
        """Dig."""
        await self.steps["tool"].work()
        return "dug"

    async def verify(self, state: str, task: dict[str, Any], response: dict[str, Any]) -> float:
        await self.steps["verify"].work()
        return 1.0

    async def release(self, state: str) -> None:
        if "close" in self.steps:
            await self.steps["close"].work()


class SlowAgent(Agent):
    """Thinks until it is let go."""

    def __init__(self, steps: dict[str, Step]) -> None:
        self.steps = steps

    async def respond(self, activation: Activation) -> dict[str, Any]:
        await self.steps["activation"].work()
        return {"object": "response", "status": "completed", "output": []}


class Place:
    """The three servers on sockets."""

    def __init__(self, client: Client, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack
        self.steps: dict[str, Step] = {}

    async def up(self, app: Any, role: Any) -> Peer:
        bound = await serve(app)
        self.stack.push_async_callback(bound.close)
        return self.client.peer(bound.url, role)

    async def build(self) -> None:
        resources = ResourcesServer(name="slow", environment=Slow(self.steps), signing_key=KEY)
        agent = AgentServer(
            name="solver",
            agent=SlowAgent(self.steps),
            model=self.client.peer("inline://nobody", "model"),
            client=self.client,
            signing_key=KEY,
            allow_sessionless=True,
        )
        self.resources = await self.up(resources.app, "resources")
        self.agent = await self.up(agent.app, "agent")
        episode = EnvironmentServer(
            name="episode", protocol=SingleAgentTurn(), resources=self.resources, agent=self.agent
        )
        self.environment = await self.up(episode.app, "environment")

    async def leave(self, name: str, peer: Peer, path: str, body: Any, **headers: str) -> Step:
        """Call, wait until the work began, and leave."""
        step = self.steps[name] = Step()
        call = asyncio.create_task(peer.request("POST", path, body=body, headers=headers))
        await asyncio.wait([call, asyncio.create_task(step.began.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not call.done(), call.result().text
        call.cancel()
        await asyncio.wait([call])
        return step

    async def seeded(self, name: str) -> dict[str, str]:
        body = {"resources_session_id": name, "episode_id": EPISODE, "task_id": TASK_ID, "task_data": {}}
        assert (await self.resources.request("POST", "/seed_session", body=body)).status == 200
        return {"x-toprope-session": name}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=1))
        made = Place(client, stack)
        await made.build()
        yield made
        for step in made.steps.values():
            step.go_on.set()


VERIFY = {"responses_create_params": {}, "response": {"output": []}}


@pytest.mark.parametrize(("name", "path", "body"), [("tool", "/dig", {}), ("verify", "/verify", VERIFY)])
async def test_a_client_that_leaves_cancels_a_tool_and_a_verify(place: Place, name: str, path: str, body: Any) -> None:
    headers = await place.seeded("s1")
    step = await place.leave(name, place.resources, path, body, **headers)
    assert await step.ended == "cancelled"


async def test_a_client_that_leaves_cancels_an_activation_of_no_session(place: Place) -> None:
    step = await place.leave("activation", place.agent, "/v1/responses", {"input": "x"})
    assert await step.ended == "cancelled"


async def test_a_client_that_leaves_cancels_no_bound_activation(place: Place) -> None:
    body = {"agent_session_id": "a1", "episode_id": EPISODE, "task_id": TASK_ID}
    assert (await place.agent.request("POST", "/v1/agent_sessions", body=body)).status == 200
    headers = {"x-toprope-session": "a1", "x-toprope-activation": "1"}
    step = await place.leave("activation", place.agent, "/v1/responses", {"input": "x"}, **headers)
    step.go_on.set()
    assert await step.ended == "finished"


async def test_a_client_that_leaves_cancels_neither_a_seed_nor_a_close(place: Place) -> None:
    body: dict[str, Any] = {"resources_session_id": "s2", "episode_id": EPISODE, "task_id": TASK_ID, "task_data": {}}
    step = await place.leave("seed", place.resources, "/seed_session", body)
    step.go_on.set()
    assert await step.ended == "finished"
    assert (await place.resources.request("POST", "/seed_session", body=body)).status == 200
    close = {"resources_session_id": "s2", "episode_id": EPISODE}
    step = await place.leave("close", place.resources, "/close_session", close)
    step.go_on.set()
    assert await step.ended == "finished"
    again = (await place.resources.request("POST", "/close_session", body=close)).json()
    assert again["outcome"] == "already_closed"


@pytest.mark.promise("EP-10")
async def test_a_client_that_leaves_a_run_has_its_agent_stopped_and_both_sessions_closed(place: Place) -> None:
    place.steps["close"] = closing = Step()
    task = {"task_id": TASK_ID, "task_input": {"responses_create_params": {"input": "x"}}}
    step = await place.leave("activation", place.environment, "/run", {"episode_id": EPISODE, "task": task})
    assert await step.ended == "cancelled"
    await closing.began.wait()
    closing.go_on.set()
    assert await closing.ended == "finished"

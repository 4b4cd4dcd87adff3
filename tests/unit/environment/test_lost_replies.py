"""EP-2 with our own servers: a reply that is lost after the server acted leaves no session open, and one allocation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from toprope.catalog.ledger import Ledger
from toprope.catalog.tool_loop import ToolLoop
from toprope.http.app import ServerApp
from toprope.http.client import Client
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptedEngine

SIGNING_KEY = b"k" * 32
CALLS = [
    "/seed_session",
    "/v1/agent_sessions",
    "/v1/responses",
    "/v1/agent_sessions/close",
    "/verify",
    "/close_session",
]


class Lossy:
    """An app whose replies to `path` are cut after the app did its work, the first `times` times."""

    def __init__(self, app: ServerApp) -> None:
        self.app = app
        self.path = ""
        self.times = 0
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = "/" + scope["path"].split("/", 3)[3]
        self.seen.append(path)
        if path != self.path or self.times <= 0:
            await self.app(scope, receive, send)
            return
        self.times -= 1
        sent: list[Any] = []

        async def swallow(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, swallow)
        await send(sent[0])


class CountingLedger(Ledger):
    """The ledger, with its allocations counted."""

    def __init__(self) -> None:
        self.held = 0
        self.seeds = 0

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        self.seeds += 1
        self.held += 1
        return super().seed(task)

    def release(self, state: Any) -> None:
        self.held -= 1


class House:
    """Our servers behind lossy lines."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.engine = ScriptedEngine(script=["done"])
        self.ledger = CountingLedger()
        self.model = ModelServer(name="policy", engine=self.engine)
        client.register("inline://policy", self.model.app)
        self.resources = ResourcesServer(name="books", environment=self.ledger, signing_key=SIGNING_KEY)
        self.agent = AgentServer(
            name="clerk",
            agent=ToolLoop(),
            model=client.peer("inline://policy", "model"),
            client=client,
            signing_key=SIGNING_KEY,
        )
        self.lines = {"books": Lossy(self.resources.app), "clerk": Lossy(self.agent.app)}
        for name, line in self.lines.items():
            client.register(f"inline://{name}", line)
        environment = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=client.peer("inline://books", "resources"),
            agent=client.peer("inline://clerk", "agent"),
        )
        client.register("inline://episode", environment.app)
        self.apps = [self.model.app, self.resources.app, self.agent.app, environment.app]

    def lose(self, path: str, times: int) -> None:
        line = self.lines["clerk" if path.startswith("/v1/") else "books"]
        line.path, line.times = path, times

    async def run(self) -> Any:
        (task,) = Ledger().tasks(1, seed=0)
        body = {"episode_id": {"rollout_id": "run.0-0", "attempt": 0}, "task": task}
        peer = self.client.peer("inline://episode", "environment")
        return (await peer.request("POST", "/run", body=body)).json()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=2, transport_budget_s=1.0))
        made = House(client)
        for app in made.apps:
            await app.start()
            stack.push_async_callback(app.stop)
        yield made


@pytest.mark.promise("EP-2")
@pytest.mark.parametrize("path", CALLS)
async def test_one_lost_reply_costs_the_episode_only_where_nothing_can_be_sent_again(house: House, path: str) -> None:
    house.lose(path, 1)
    outcome = await house.run()
    if path == "/verify":  # verify is not deduplicated: once it may have been delivered it is not sent again
        failure = outcome["failure"]
        assert (failure["stage"], failure["failure_kind"]) == ("verification", "transport_dropped")
        assert not failure["terminal"]
        assert failure["partial_response"]["output"]
    else:
        assert outcome["failure"] is None
    assert (len(house.resources.sessions), len(house.agent.sessions)) == (0, 0)
    assert (house.ledger.seeds, house.ledger.held) == (1, 0)
    assert house.engine.calls == 1


@pytest.mark.promise("EP-2")
@pytest.mark.parametrize("path", CALLS)
async def test_replies_that_are_always_lost_leave_no_session_open_either(house: House, path: str) -> None:
    house.lose(path, 1000)
    outcome = await house.run()
    stages = ["seed", "agent", "agent", "cleanup", "verification"]
    expected = {**dict(zip(CALLS[:5], stages, strict=True)), "/close_session": None}
    failure = outcome["failure"]
    assert (failure and failure["stage"]) == expected[path]
    assert (len(house.resources.sessions), len(house.agent.sessions)) == (0, 0)
    assert (house.ledger.seeds, house.ledger.held) == (1, 0)
    assert house.engine.calls <= 1
    assert house.lines["books"].seen.count("/verify") == (path in ("/verify", "/close_session"))

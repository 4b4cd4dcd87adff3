"""Both directions with servers that others wrote, over real sockets (EP-18)."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from toprope.catalog.tool_loop import ToolLoop
from toprope.http.app import ServerApp
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

from . import strangers

SIGNING_KEY = b"a signing key of 32 bytes or so."
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add n.",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "strict": False,
}
PARAMS = {"input": [{"role": "user", "content": "Add 5."}], "tools": [ADD]}
EPISODE = {"rollout_id": "run.0-0", "attempt": 2}
KEY = "run.0-0-a2"


class Counter(Environment):
    """The strangers' counter, written for us."""

    def __init__(self) -> None:
        self.released = 0

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        return {"n": 0}

    @tool
    def add(self, state: dict[str, int], n: int) -> dict[str, int]:
        """Add n."""
        state["n"] += n
        return state

    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(state["n"] == task["goal"])

    def release(self, state: Any) -> None:
        self.released += 1


class World:
    """Our servers on sockets, beside strangers on theirs. `host` is how everybody is addressed."""

    def __init__(self, client: Client, stack: AsyncExitStack, host: str) -> None:
        self.client = client
        self.stack = stack
        self.host = host

    async def ours(self, app: ServerApp) -> str:
        bound = await serve(app)
        self.stack.push_async_callback(bound.close)
        return bound.url.replace("127.0.0.1", self.host)

    def theirs(self, stranger: strangers.Stranger) -> str:
        running = strangers.Running(stranger.app(), self.host)
        self.stack.callback(running.stop)
        return running.url

    async def model(self) -> tuple[strangers.StrangerEndpoint, str]:
        endpoint = strangers.StrangerEndpoint()
        engine = OpenAIEngine(client=self.client, base_url=self.theirs(endpoint) + "/v1", model="stranger")
        return endpoint, await self.ours(ModelServer(name="policy", engine=engine).app)

    async def agent(self, model_url: str) -> tuple[AgentServer, str]:
        server = AgentServer(
            name="solver",
            agent=ToolLoop(),
            model=self.client.peer(model_url, "model"),
            client=self.client,
            signing_key=SIGNING_KEY,
        )
        return server, await self.ours(server.app)

    async def resources(self) -> tuple[ResourcesServer, str]:
        server = ResourcesServer(name="counter", environment=Counter(), signing_key=SIGNING_KEY)
        return server, await self.ours(server.app)

    async def environment(self, resources_url: str, agent_url: str, **options: Any) -> str:
        server = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=self.client.peer(resources_url, "resources"),
            agent=self.client.peer(agent_url, "agent"),
            tools=["direct_http"],
            **options,
        )
        return await self.ours(server.app)

    async def run(self, environment_url: str, goal: int, *, speaks: bool = True) -> Any:
        peer = self.client.peer(environment_url, "environment" if speaks else None)
        task_input = {"responses_create_params": PARAMS, "task_data": {"goal": goal}}
        task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": task_input}
        return await peer.request("POST", "/run", body={"episode_id": EPISODE, "task": task})


@pytest.fixture(params=["127.0.0.1", "localhost"])
def host(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def world(host: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=2, transport_budget_s=2.0))
        yield World(client, stack, host)


def test_the_strangers_import_nothing_of_ours() -> None:
    tree = ast.parse(Path(strangers.__file__).read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert modules
    assert not [name for name in modules if name.startswith("toprope")]
    assert "toprope" not in Path(strangers.__file__).read_text().lower()


@pytest.mark.promise("EP-18")
@pytest.mark.promise("EP-16")
async def test_their_resources_agent_and_endpoint_work_under_our_environment_server(world: World) -> None:
    endpoint, model_url = await world.model()
    resources, agent = strangers.StrangerResources(), strangers.StrangerAgent(model_url)
    environment_url = await world.environment(world.theirs(resources), world.theirs(agent))
    outcome = (await world.run(environment_url, goal=5)).json()
    assert outcome["failure"] is None
    result = outcome["result"]
    assert (result["reward"], result["final_n"], result["goal"]) == (1.0, 5, 5)
    assert [item["type"] for item in result["response"]["output"]] == [
        "function_call",
        "function_call_output",
        "message",
    ]
    assert result["ng_agent_observations"]["gaps"] == ["the agent's close gave no observations"]
    assert (resources.opened, resources.closed, agent.opened, agent.closed) == (1, 1, 1, 1)
    assert len(endpoint.keys) == 3  # /v1/models at the start, two completions


@pytest.mark.promise("ID-3")
async def test_every_call_to_a_stranger_carries_the_key(world: World) -> None:
    _, model_url = await world.model()
    resources, agent = strangers.StrangerResources(), strangers.StrangerAgent(model_url)
    environment_url = await world.environment(world.theirs(resources), world.theirs(agent))
    await world.run(environment_url, goal=5)
    assert resources.keys == [(path, KEY) for path in ("/seed_session", "/add", "/verify", "/close_session")]
    paths = ("/v1/agent_sessions", "/v1/responses", "/v1/agent_sessions/close")
    assert agent.keys == [(path, KEY) for path in paths]


@pytest.mark.promise("EP-18")
async def test_our_agent_works_with_their_resources_server_and_returns_its_cookies(world: World) -> None:
    _, model_url = await world.model()
    agent, agent_url = await world.agent(model_url)
    resources = strangers.StrangerResources()
    environment_url = await world.environment(world.theirs(resources), agent_url)
    result = (await world.run(environment_url, goal=5)).json()["result"]
    assert (result["reward"], result["final_n"]) == (1.0, 5)
    assert (resources.opened, resources.closed, len(agent.sessions)) == (1, 1, 0)


@pytest.mark.promise("EP-18")
async def test_their_agent_works_with_our_resources_server_and_gets_no_cookie_of_it(world: World) -> None:
    _, model_url = await world.model()
    server, resources_url = await world.resources()
    agent = strangers.StrangerAgent(model_url)
    environment_url = await world.environment(resources_url, world.theirs(agent))
    result = (await world.run(environment_url, goal=5)).json()["result"]
    assert result["reward"] == 1.0
    assert (agent.closed, len(server.sessions)) == (1, 0)


@pytest.mark.promise("EP-18")
async def test_our_servers_work_under_a_caller_of_theirs(world: World) -> None:
    _, model_url = await world.model()
    agent, agent_url = await world.agent(model_url)
    server, resources_url = await world.resources()
    verified = await asyncio.to_thread(strangers.drive_an_episode, resources_url, agent_url, "theirs-7", PARAMS, 5)
    assert (verified["reward"], verified["goal"]) == (1.0, 5)
    assert (len(server.sessions), len(agent.sessions)) == (0, 0)
    assert isinstance(server.environment, Counter)
    assert server.environment.released == 1


@pytest.mark.promise("EP-18")
@pytest.mark.parametrize("dead_agent", [False, True])
async def test_a_collector_of_theirs_parses_our_results_and_failures(world: World, dead_agent: bool) -> None:
    _, model_url = await world.model()
    _, agent_url = await world.agent(model_url)
    _, resources_url = await world.resources()
    environment_url = await world.environment(resources_url, "http://127.0.0.1:9" if dead_agent else agent_url)
    reply = await world.run(environment_url, goal=5, speaks=False)
    assert reply.status == 200
    parsed = strangers.RunReply.model_validate_json(reply.body)
    assert parsed.episode_id.rollout_id == "run.0-0"
    if dead_agent:
        assert parsed.failure is not None
        assert (parsed.failure.stage, parsed.failure.failure_kind) == ("agent", "transport_unreachable")
        assert not parsed.failure.terminal
    else:
        assert parsed.result is not None
        assert parsed.result["reward"] == 1.0


@pytest.mark.promise("EP-18")
@pytest.mark.promise("EP-16")
@pytest.mark.parametrize("their_agent", [False, True])
async def test_an_older_environment_is_driven_flat_by_its_cookie_and_owes_no_close(
    world: World, their_agent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, model_url = await world.model()
    resources = strangers.StrangerFlatResources()
    if their_agent:
        agent_url = world.theirs(strangers.StrangerAgent(model_url))
    else:
        _, agent_url = await world.agent(model_url)
    environment_url = await world.environment(world.theirs(resources), agent_url, resources_protocol="flat")
    outcome = (await world.run(environment_url, goal=5)).json()
    assert outcome["failure"] is None
    result = outcome["result"]
    assert (result["reward"], result["final_n"], result["goal"]) == (1.0, 5, 5)
    assert resources.keys == [(path, KEY) for path in ("/seed_session", "/add", "/verify", "/close_session")]
    assert "left open" not in caplog.text


@pytest.mark.promise("EP-18")
async def test_an_older_environment_driven_as_a_typed_one_is_a_terminal_failure_that_says_how(world: World) -> None:
    _, model_url = await world.model()
    _, agent_url = await world.agent(model_url)
    running = strangers.StrangerFlatResources()
    running.seed = _empty  # type: ignore[method-assign]  # NeMo Gym's base takes any seed and answers {}
    failure = (await world.run(await world.environment(world.theirs(running), agent_url), goal=5)).json()["failure"]
    assert (failure["stage"], failure["terminal"], failure["failure_kind"]) == ("seed", True, "bad_reply")
    assert "protocol: flat" in failure["failure_reason"]


async def _empty(request: object) -> Response:
    return JSONResponse({})

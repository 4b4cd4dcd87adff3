"""The agent's seed as it is sent, byte for byte, against the closed request model of NeMo Gym, written down again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, ValidationError

from toprope.http.app import Route, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.serve import serve
from toprope.protocol.grants import McpGrant, Stdio, StreamableHttp
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.resources.server import ResourcesServer

from .grants_house import Counter

NAME = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EpisodeId(Closed):
    rollout_id: str
    attempt: int


class TaskId(Closed):
    taskset: str
    task_id: str


class DirectHttp(Closed):
    kind: Literal["direct_http"]
    name: NAME
    required: bool
    base_url: AnyHttpUrl
    cookies: dict[str, str]
    headers: dict[str, str]


class HttpConnection(Closed):
    transport: Literal["streamable_http"]
    url: AnyHttpUrl
    headers: dict[str, str]


class StdioConnection(Closed):
    transport: Literal["stdio"]
    command: Annotated[str, Field(min_length=1)]
    args: list[str]
    env: dict[str, str]
    cwd: str | None = None


class Mcp(Closed):
    kind: Literal["mcp"]
    name: NAME
    required: bool
    connection: Annotated[HttpConnection | StdioConnection, Field(discriminator="transport")]


class AgentSeed(Closed):
    agent_session_id: Annotated[str, Field(min_length=1)]
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[Annotated[DirectHttp | Mcp, Field(discriminator="kind")]]
    sandbox_access: None = None


class Listener:
    """An agent that keeps what it was sent, and refuses what the closed model refuses."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.refused: list[str] = []
        routes = [
            Route("POST", "/v1/agent_sessions", self.seed),
            Route("POST", "/v1/responses", self.respond),
            Route("POST", "/v1/agent_sessions/close", self.close),
        ]
        self.app = build_app(name="clerk", role="agent", routes=routes)

    async def seed(self, request: Request) -> Reply:
        body = await request.body()
        self.bodies.append(body)
        try:
            asked = AgentSeed.model_validate_json(body, strict=True)
        except ValidationError as error:
            self.refused.append(str(error))
            return json_reply({"detail": str(error)}, 422)
        return json_reply({"agent_session_id": asked.agent_session_id})

    async def respond(self, request: Request) -> Reply:
        return json_reply({"id": "resp-1", "object": "response", "status": "completed", "output": []})

    async def close(self, request: Request) -> Reply:
        return json_reply({"agent_session_id": (await request.json())["agent_session_id"]})


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(transport_attempts=1) as client:
        yield client


RUN = {
    "episode_id": {"rollout_id": "r.0-0", "attempt": 1},
    "task": {
        "task_id": {"taskset": "t", "task_id": "1"},
        "task_input": {"responses_create_params": {"input": "go"}, "task_data": {}},
    },
}
FURTHER = [
    McpGrant("maps", StreamableHttp("https://maps.example/mcp", {"x-k": "1"}), required=False),
    McpGrant("clock", Stdio("clock", ["--utc"], {"TZ": "UTC"}, "/tmp")),
    McpGrant("bare", Stdio("bare")),
]


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("tools", [[], ["direct_http"], ["mcp"], ["direct_http", "mcp"]])
@pytest.mark.parametrize("further", [[], FURTHER])
async def test_the_agents_seed_validates_byte_for_byte(client: Client, tools: list[str], further: list[Any]) -> None:
    resources = ResourcesServer(name="counter", environment=Counter(), signing_key=b"k" * 32, mcp=True)
    listener = Listener()
    bound = [await serve(app, host="127.0.0.1", port=0) for app in (resources.app, listener.app)]
    episode = EnvironmentServer(
        name="episode",
        protocol=SingleAgentTurn(),
        resources=client.peer(bound[0].url, "resources"),
        agent=client.peer(bound[1].url, "agent"),
        tools=tools,
        further_grants=further,
    )
    client.register("inline://episode", episode.app)
    try:
        reply = await client.peer("inline://episode", "environment").request("POST", "/run", body=RUN)
        assert reply.json()["failure"] is None, reply.text
        assert listener.refused == []
        (sent,) = listener.bodies
        grants = AgentSeed.model_validate_json(sent, strict=True).tool_accesses
        own = {"direct_http": "environment", "mcp": "counter"}
        assert [grant.name for grant in grants] == [*(own[tool] for tool in tools), *(grant.name for grant in further)]
        for grant, kind in zip(grants, tools, strict=False):
            assert grant.kind == kind
            held = grant.headers if isinstance(grant, DirectHttp) else grant.connection.headers  # type: ignore[union-attr]
            assert list(held) == ["x-toprope-tools"]
            url = grant.base_url if isinstance(grant, DirectHttp) else grant.connection.url  # type: ignore[union-attr]
            assert str(url).startswith(f"{bound[0].url}/ng-rollout/r.0-0-a1")
            assert not isinstance(grant, DirectHttp) or grant.cookies == {}
    finally:
        for server in bound:
            await server.close(drain_s=0)


async def test_the_environments_mcp_grant_gets_a_name_of_its_own_where_the_servers_is_taken_or_no_name(
    client: Client,
) -> None:
    for name in ("environment", "two words"):
        resources = ResourcesServer(name=name, environment=Counter(), signing_key=b"k" * 32, mcp=True)
        listener = Listener()
        bound = [await serve(app, host="127.0.0.1", port=0) for app in (resources.app, listener.app)]
        episode = EnvironmentServer(
            name=f"episode-{name[:3]}",
            protocol=SingleAgentTurn(),
            resources=client.peer(bound[0].url, "resources"),
            agent=client.peer(bound[1].url, "agent"),
            tools=["direct_http", "mcp"],
        )
        client.register(f"inline://{episode.name}", episode.app)
        try:
            reply = await client.peer(f"inline://{episode.name}", "environment").request("POST", "/run", body=RUN)
            assert reply.json()["failure"] is None, reply.text
            grants = AgentSeed.model_validate_json(listener.bodies[0], strict=True).tool_accesses
            assert [grant.name for grant in grants] == ["environment", "environment.mcp"]
        finally:
            for server in bound:
                await server.close(drain_s=0)

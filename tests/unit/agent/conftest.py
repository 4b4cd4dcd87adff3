"""A model server that says what a test tells it, and an agent server in front of it, in one process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.correlation.context import current_rollout, rollout_context
from toprope.http.app import Route, build_app
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.servers.agent.server import AgentServer

KEY = "run.0-0"
EPISODE = {"rollout_id": KEY, "attempt": 0}
SEED = {"episode_id": EPISODE, "task_id": {"taskset": "t", "task_id": "1"}}
USAGE = {"input_tokens": 10, "output_tokens": 3, "total_tokens": 13, "input_tokens_details": {"cached_tokens": 1}}


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}


def say(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


@dataclass
class Model:
    """Answers from a list of turns: lists of items, replies, or functions of the request body."""

    turns: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    status: str = "completed"

    async def __call__(self, request: Request) -> Reply:
        body = await request.json()
        self.bodies.append(body)
        self.contexts.append(current_rollout())
        turn = self.turns[min(len(self.bodies), len(self.turns)) - 1]
        if callable(turn):
            turn = await turn(body)
        if isinstance(turn, Reply):
            return turn
        number = len(self.bodies)
        return json_reply(
            {"id": f"resp-{number}", "object": "response", "status": self.status, "output": turn, "usage": USAGE}
        )


@dataclass
class House:
    """An agent server, its model, and callers."""

    model: Model
    server: AgentServer
    peer: Peer
    stranger: Peer
    client: Client

    async def seed(self, session: str = "a1", *, token: str = "tok", **fields: Any) -> Reply:
        headers = {"x-toprope-close-token": token}
        body = {"agent_session_id": session, **SEED, **fields}
        return await self.peer.request("POST", "/v1/agent_sessions", body=body, headers=headers)

    async def activate(
        self, body: Any, *, number: int | None = 1, session: str | None = "a1", key: str = KEY, capture: bool = False
    ) -> Reply:
        headers = {} if session is None else {"x-toprope-session": session}
        if number is not None:
            headers["x-toprope-activation"] = str(number)
        with rollout_context(key):
            return await self.peer.request("POST", "/v1/responses", body=body, headers=headers, capture=capture)

    async def close(self, session: str = "a1", *, token: str = "tok") -> Reply:
        headers = {"x-toprope-close-token": token}
        body = {"agent_session_id": session, "episode_id": EPISODE}
        return await self.peer.request("POST", "/v1/agent_sessions/close", body=body, headers=headers)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(transport_attempts=1) as client:
        yield client


@pytest.fixture
async def make_house(client: Client) -> AsyncIterator[Callable[..., Any]]:
    servers: list[AgentServer] = []

    async def make(*turns: Any, agent: Any = None, **options: Any) -> House:
        model = Model(list(turns))
        app = build_app(name="policy", role="model", routes=[Route("POST", "/v1/responses", model)])
        client.register("inline://policy", app)
        server = AgentServer(
            name="solver",
            agent=agent or ToolLoop(),
            model=client.peer("inline://policy", "model"),
            client=client,
            signing_key=b"k" * 32,
            **options,
        )
        client.register("inline://solver", server.app)
        await server.app.start()
        servers.append(server)
        peers = client.peer("inline://solver", "agent"), client.peer("inline://solver", None)
        return House(model, server, *peers, client)

    yield make
    for server in servers:
        await server.app.stop()

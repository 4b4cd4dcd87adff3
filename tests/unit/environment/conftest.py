"""Participants that say what a test tells them, on one log, so that the order of calls can be read off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn

KEY = "run.0-0-a1"
EPISODE = {"rollout_id": "run.0-0", "attempt": 1}
TASK_ID = {"taskset": "t", "task_id": "1"}
PARAMS = {"input": [{"role": "user", "content": "hi"}]}
TASK = {"task_id": TASK_ID, "task_input": {"responses_create_params": PARAMS, "task_data": {"goal": 3}}}
RESPONSE = {"id": "resp-1", "object": "response", "status": "completed", "output": [], "terminal_response_id": "resp-1"}


@dataclass
class Seen:
    """One call that a participant received."""

    server: str
    raw_path: str
    headers: dict[str, str]
    body: Any

    @property
    def step(self) -> str:
        return f"{self.server} {self.raw_path.rpartition('/ng-rollout/' + KEY)[2]}"


Act = Callable[[Any], Awaitable[Any]]


async def hang(seen: Seen) -> Any:
    """Never answer; end when the caller leaves."""
    return "hang"


async def cut(seen: Seen) -> Any:
    """Begin a reply and drop the connection."""
    return "cut"


def answer(status: int, body: Any, **headers: str) -> Act:
    """A reply with a JSON (or bytes) body."""

    async def act(seen: Seen) -> Any:
        return status, body, headers

    return act


def error(status: int, kind: str, message: str, *, retryable: bool, **extra: Any) -> Act:
    """A typed error reply."""
    return answer(status, {"error": {"kind": kind, "message": message, "retryable": retryable, **extra}})


@dataclass
class Part:
    """One participant as a raw ASGI app: by default it does what the protocol says."""

    name: str
    log: list[Seen]
    speaks: bool = True
    acts: dict[str, Act] = field(default_factory=dict)
    cookie: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        raw_path = scope["raw_path"].decode()
        seen = Seen(self.name, raw_path, headers, json.loads(body) if body else None)
        self.log.append(seen)
        rest = raw_path.rpartition("/ng-rollout/" + KEY)[2].removeprefix("/training-token-capture")
        result = await (self.acts.get(rest) or self.usual(rest))(seen)
        if result == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        status, value, extra = (200, {}, {}) if result == "cut" else result
        fields = [(b"content-type", b"application/json")]
        fields += [(name.encode(), text.encode()) for name, text in extra.items()]
        if self.speaks:
            fields.append((b"x-toprope-protocol", b"1"))
        if self.cookie is not None and rest in ("/seed_session", "/v1/agent_sessions"):
            fields.append((b"set-cookie", f"session={self.cookie}; Path=/".encode()))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        if result == "cut":
            return
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        await send({"type": "http.response.body", "body": data})

    def usual(self, path: str) -> Act:
        async def act(seen: Seen) -> Any:
            body = seen.body
            if path in ("/seed_session", "/close_session"):
                return 200, {"resources_session_id": body["resources_session_id"]}, {}
            if path == "/v1/agent_sessions":
                return 200, {"agent_session_id": body["agent_session_id"]}, {}
            if path == "/v1/agent_sessions/close":
                observations = {"source": self.name, "records": [{"kind": "invocation"}], "gaps": []}
                return 200, {"agent_session_id": body["agent_session_id"], "agent_observations": observations}, {}
            if path == "/v1/responses":
                return 200, RESPONSE, {}
            if path == "/verify":
                return 200, {**body, "reward": 0.5, "own_field": [1, None]}, {}
            return 404, {}, {}

        return act


@dataclass
class House:
    """An environment server between two scripted participants."""

    client: Client
    log: list[Seen]
    resources: Part
    agent: Part
    server: EnvironmentServer
    speaks: bool = True
    task: Any = field(default_factory=lambda: TASK)

    @property
    def steps(self) -> list[str]:
        return [seen.step for seen in self.log]

    def calls(self, path: str) -> list[Seen]:
        return [seen for seen in self.log if seen.raw_path.endswith(path)]

    async def run(self, task: Any = None, episode: Any = EPISODE) -> Reply:
        peer = self.client.peer("inline://episode", "environment" if self.speaks else None)
        return await peer.request("POST", "/run", body={"episode_id": episode, "task": task or self.task})

    async def failure(self) -> dict[str, Any]:
        """Run once and return the failure, having checked that there is no result."""
        reply = await self.run()
        assert reply.status == 200, reply.text
        outcome = reply.json()
        assert outcome["result"] is None
        assert (outcome["episode_id"], outcome["task_id"]) == (EPISODE, TASK_ID)
        assert "reward" not in outcome["failure"]
        failure: dict[str, Any] = outcome["failure"]
        return failure

    async def result(self) -> dict[str, Any]:
        """Run once and return the result."""
        outcome = (await self.run()).json()
        assert outcome["failure"] is None, outcome["failure"]
        result: dict[str, Any] = outcome["result"]
        return result


@pytest.fixture
async def make_house() -> AsyncIterator[Callable[..., Any]]:
    async with Client(transport_budget_s=0.4, transport_attempts=2) as client:

        async def make(**options: Any) -> House:
            log: list[Seen] = []
            resources, agent = Part("resources", log), Part("agent", log)
            client.register("inline://resources", resources)
            client.register("inline://agent", agent)
            server = EnvironmentServer(
                name="episode",
                protocol=options.pop("protocol", None) or SingleAgentTurn(),
                models={name: client.peer(f"inline://{name}", "model") for name in options.pop("models", ())},
                resources=client.peer(options.pop("resources_url", "inline://resources"), "resources"),
                agent=client.peer(options.pop("agent_url", "inline://agent"), "agent"),
                **options,
            )
            client.register("inline://episode", server.app)
            await server.app.start()
            return House(client, log, resources, agent, server)

        yield make


@pytest.fixture
async def house(make_house: Callable[..., Any]) -> House:
    made: House = await make_house()
    return made

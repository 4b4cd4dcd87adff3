"""The servers of the matrix on real sockets, each behind a faulty front, with what they did counted by rollout."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from toprope.catalog.tool_loop import ToolLoop
from toprope.correlation.context import current_rollout_id
from toprope.http.client import Client, Peer
from toprope.http.replay import ReplayBounds, Replayer
from toprope.http.serve import serve
from toprope.servers.agent.agent import Activation
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer, EpisodeProtocol
from toprope.servers.environment.interactive import Interactive
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptCall, ScriptedCall, ScriptedEngine, ScriptedReply
from toprope.testing.upstream import serving
from toprope.tools.spec import tool

from .front import Detour, Faults, dead_port, fronting

SIGNING_KEY = b"k" * 32
PATIENT = {"episode_timeout_s": 240.0, "verify_timeout_s": 60.0, "cleanup_timeout_s": 60.0}
_SHORT_EPISODE = {"episode_timeout_s": 8.0, "verify_timeout_s": 1.0, "cleanup_timeout_s": 12.0}
HURRIED = {
    "seed": _SHORT_EPISODE,
    "agent_seed": _SHORT_EPISODE,
    "user": PATIENT,
    "activation": {**PATIENT, "agent_timeout_s": 8.0},
    "tool": {**PATIENT, "agent_timeout_s": 8.0},
    "agent_close": {**PATIENT, "cleanup_timeout_s": 12.0},
    "verify": {**PATIENT, "verify_timeout_s": 6.0},
    "resources_close": {**PATIENT, "cleanup_timeout_s": 12.0},
}
"""For rollouts that meet a hang: only the time of the call that hangs is short; all hangs are waited out at once."""


class Counted(Environment):
    """One slot an episode. `did` counts what was done, by (what, rollout)."""

    def __init__(self, did: Counter[tuple[str, str]]) -> None:
        self.did = did

    async def seed(self, task: dict[str, Any]) -> str:
        self.did["allocated", _key()] += 1
        return "slot"

    @tool
    async def look(self, state: str) -> str:
        """Look around."""
        self.did["looked", _key()] += 1
        return "a room"

    async def verify(self, state: str, task: dict[str, Any], response: dict[str, Any]) -> float:
        self.did["verified", _key()] += 1
        return 0.75

    async def release(self, state: str) -> None:
        self.did["released", _key()] += 1


class CountedAgent(ToolLoop):
    """The tool loop, with its activations counted."""

    def __init__(self, did: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.did = did

    async def respond(self, activation: Activation) -> dict[str, Any]:
        self.did["activated", _key()] += 1
        return await super().respond(activation)


class FlatCounted:
    """An older environment as a raw app: a flat seed with a cookie, a tool, verify; everything else is 404."""

    def __init__(self, did: Counter[tuple[str, str]]) -> None:
        self.did = did

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        _, _, key, path = scope["path"].split("/", 3)
        cookies = [value.decode() for name, value in scope["headers"] if name == b"cookie"]
        known = cookies == [f"slot={key}"]
        status, told, fields = 404, b"{}", []
        if path == "seed_session":
            self.did["allocated", key] += 1
            status, told, fields = 200, b"{}", [(b"set-cookie", f"slot={key}; Path=/".encode())]
        elif path == "look" and known:
            self.did["looked", key] += 1
            status, told = 200, b"a room"
        elif path == "verify" and known:
            self.did["verified", key] += 1
            status, told = 200, json.dumps({**json.loads(body), "reward": 0.75}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(told)), *fields]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": told})


def solve(call: ScriptCall) -> ScriptedReply | str:
    """Greet; when told to go, look around once; say what was seen."""
    if call.last_text == "go":
        return ScriptedReply(calls=[ScriptedCall("look", {})])
    return f"I see: {call.last_text}"


def play(call: ScriptCall) -> str:
    """The user's part, whose `hello` the task has said already."""
    return "go" if call.turn == 1 else "###STOP###"


@dataclass
class House:
    """Everything, up. `environments` by (protocol, the call that is hurried or None)."""

    faults: Faults
    resources: ResourcesServer
    agent: AgentServer
    environments: dict[tuple[str, str | None], Peer]
    did: Counter[tuple[str, str]] = field(default_factory=Counter)

    def left(self, key: str) -> list[str]:
        """The roles that still hold a session of the rollout."""
        servers = (("agent", self.agent), ("resources", self.resources))
        return [role for role, server in servers if key in server.sessions.keys()]  # noqa: SIM118

    async def run(self, protocol: str, key: str, *, hurried: str | None, played: bool) -> dict[str, Any]:
        """One episode of attempt 0; the reply to `/run`. `played`: by a model, where there is a user."""
        data: dict[str, Any] = {"goal": 1}
        params: dict[str, Any] = {"input": "go", "tools": [LOOK]}
        if protocol == "interactive":
            params["input"] = "hello"
            data["user"] = {"instructions": "Say go."} if played else {"script": ["go"]}
        task = {
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_input": {"responses_create_params": params, "task_data": data},
        }
        body = {"episode_id": {"rollout_id": key, "attempt": 0}, "task": task}
        reply = await self.environments[protocol, hurried].request("POST", "/run", body=body)
        assert reply.status == 200, reply.text
        outcome: dict[str, Any] = reply.json()
        return outcome


LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


@asynccontextmanager
async def a_house() -> AsyncIterator[House]:
    """The servers, up until the block ends."""
    faults, did = Faults(), Counter[tuple[str, str]]()
    async with AsyncExitStack() as stack:
        dead = await stack.enter_async_context(dead_port())
        replayer = Detour(faults, dead, Replayer(ReplayBounds(attempts=2, budget_s=6.0)))
        client = await stack.enter_async_context(Client(replayer=replayer))

        async def up(app: Any) -> str:
            bound = await serve(app)
            stack.push_async_callback(bound.close)
            return await stack.enter_async_context(fronting(bound.url, faults))

        model = ModelServer(name="policy", engine=ScriptedEngine(script=solve)).app
        client.register("inline://policy", model)
        await model.start()
        stack.push_async_callback(model.stop)
        resources = ResourcesServer(name="rooms", environment=Counted(did), signing_key=SIGNING_KEY)
        agent = AgentServer(
            name="solver",
            agent=CountedAgent(did),
            model=client.peer("inline://policy", "model"),
            client=client,
            signing_key=SIGNING_KEY,
        )
        resources_url, agent_url = await up(resources.app), await up(agent.app)
        flat_url = await stack.enter_async_context(serving(FlatCounted(did)))
        flat_url = await stack.enter_async_context(fronting(flat_url, faults))
        person = client.peer(await up(ModelServer(name="person", engine=ScriptedEngine(script=play)).app), "model")
        environments: dict[tuple[str, str | None], Peer] = {}
        for name in ("single_agent_turn", "interactive", "flat"):
            for hurried in (None, *HURRIED):
                protocol: EpisodeProtocol = SingleAgentTurn()
                if name == "interactive":
                    protocol = Interactive(user_model="person", user_timeout_s=6.0 if hurried == "user" else 60.0)
                server = EnvironmentServer(
                    name=f"{name}-{hurried or 'patient'}".replace("_", "-"),
                    protocol=protocol,
                    resources=client.peer(flat_url if name == "flat" else resources_url, "resources"),
                    agent=client.peer(agent_url, "agent"),
                    resources_protocol="flat" if name == "flat" else "typed",
                    models={"person": person},
                    tools=["direct_http"],
                    **(HURRIED[hurried] if hurried else PATIENT),  # type: ignore[arg-type]
                )
                bound = await serve(server.app)
                stack.push_async_callback(bound.close)
                environments[name, hurried] = client.peer(bound.url, "environment")
        yield House(faults, resources, agent, environments, did)


def _key() -> str:
    key = current_rollout_id()
    assert key is not None
    return key

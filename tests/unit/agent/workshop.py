"""A policy on a real socket, with its tokens captured, and an agent server in front of it whose agents are programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.correlation.context import rollout_context
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply
from toprope.http.serve import BoundServer, serve
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.desk import SandboxDesk, Terms
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.provider import SandboxProvider
from toprope.servers.agent.agent import Agent
from toprope.servers.agent.server import AgentServer
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedEngine

KEY = "run.0-0"
EPISODE = {"rollout_id": KEY, "attempt": 0}
SEED = {"episode_id": EPISODE, "task_id": {"taskset": "t", "task_id": "1"}}
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the program bwrap is not installed")
KINDS = ["directory", pytest.param("bubblewrap", marks=needs_bwrap)]

ASK = """
import json, os, sys, urllib.request
def ask(text, base=os.environ.get("OPENAI_BASE_URL"), key=os.environ.get("OPENAI_API_KEY")):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    asked = urllib.request.Request(base + "/chat/completions", body, headers)
    with urllib.request.urlopen(asked, timeout=30) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""
"""A program's first lines: `ask(text)` calls the model."""


@dataclass
class Workshop:
    """One agent session after the other, `a1` unless named."""

    agent: Peer
    model: BoundServer
    store: MemoryStore
    engine: ScriptedEngine
    desk: SandboxDesk
    leases: Path

    async def seed(self, session: str = "a1", access: SandboxAccess | None = None) -> Reply:
        body: dict[str, Any] = {"agent_session_id": session, **SEED}
        if access is not None:
            body["sandbox_access"] = access
        return await self.agent.request("POST", "/v1/agent_sessions", body=body)

    async def activate(self, body: Mapping[str, Any], session: str = "a1") -> Reply:
        with rollout_context(KEY):
            headers = {"x-toprope-session": session}
            return await self.agent.request("POST", "/v1/responses", body=body, headers=headers, capture=True)

    async def close(self, session: str = "a1") -> dict[str, Any]:
        body = {"agent_session_id": session, "episode_id": EPISODE}
        reply = await self.agent.request("POST", "/v1/agent_sessions/close", body=body)
        assert reply.status == 200, reply.text
        value: dict[str, Any] = reply.json()
        return value

    async def one(self, prompt: str = "go", **fields: Any) -> tuple[Reply, dict[str, Any]]:
        """A whole session: the reply of its one activation, and what its close told."""
        seeded = await self.seed()
        assert seeded.status == 200, seeded.text
        reply = await self.activate({"input": prompt, **fields})
        return reply, await self.close()

    def left(self) -> list[str]:
        return [path.name for path in self.leases.glob("*") if not path.name.startswith(".")]


@asynccontextmanager
async def workshop(
    agent: Agent,
    place: Path,
    client: Client,
    *,
    kind: str = "directory",
    script: Any = None,
    terms: Terms | None = None,
    api_key: str | None = None,
    own: bool = True,
    provider: SandboxProvider | None = None,
) -> AsyncIterator[Workshop]:
    store, engine = MemoryStore(), ScriptedEngine(script=script or ["said"])
    recorder = Recorder(store, reader=store)
    policy = ModelServer(name="policy", engine=engine, recorder=recorder, api_key=api_key)
    leases = place / "leases"
    made_by = PlainDirectory if kind == "directory" else Bubblewrap
    desk = SandboxDesk(provider or made_by(leases, name="box"), terms)
    await policy.app.start()
    bound = await serve(policy.app)
    server = AgentServer(
        name="solver",
        agent=agent,
        model=client.peer(bound.url, "model", api_key=api_key),
        model_over_http=client.peer(bound.url, "model"),
        model_key=api_key,
        client=client,
        signing_key=b"k" * 32,
        sandboxes={"box": desk},
        own_sandbox=desk if own else None,
    )
    client.register("inline://solver", server.app)
    await desk.open()
    await server.app.start()
    made = Workshop(client.peer("inline://solver", "agent"), bound, store, engine, desk, leases)
    try:
        yield made
    finally:
        await server.app.stop()
        await desk.close()
        await bound.close()
        await policy.app.stop()
        await recorder.close()
    assert made.left() == [], "a sandbox is left"


def text_of(reply: Reply) -> str:
    """The text of the one message of a Responses object."""
    assert reply.status == 200, reply.text
    (message,) = reply.json()["output"]
    return str(message["content"][0]["text"])


def told(reply: Reply) -> Any:
    """What a program printed as JSON."""
    return json.loads(text_of(reply))


def invocation(closed: Mapping[str, Any]) -> dict[str, Any]:
    """The last invocation record of a close reply."""
    records = closed["agent_observations"]["records"]
    found: dict[str, Any] = [record for record in records if record["kind"] == "invocation"][-1]
    return found

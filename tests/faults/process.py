"""One server as a process of its own, for tests that kill it: `python process.py ROLE DIR [URL ...]`.

Prints its URL once it serves. What its sessions hold is written to `DIR/ledger`, one line an event, as it happens:

    allocated KEY | holding KEY | released KEY | agent-sessions N

The tool `hold` writes `holding` and returns once `DIR/go` is there, so that a test knows when to kill and when to let
go.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from toprope.catalog.tool_loop import ToolLoop
from toprope.correlation.context import current_rollout_id
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply
from toprope.tools.spec import tool

TTL_S = 0.4
EPISODE_S = 8.0
CLEANUP_S = 4.0
SIGNING_KEY = b"k" * 32


class Ledger:
    """Appended by every process; a line is one write."""

    def __init__(self, place: Path) -> None:
        self.path = place / "ledger"

    def note(self, text: str) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{text}\n".encode())


class Held(Environment):
    """One allocation an episode, on the ledger."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ledger = Ledger(place)

    def seed(self, task: dict[str, Any]) -> str:
        self.ledger.note(f"allocated {current_rollout_id()}")
        return "held"

    @tool
    def hold(self, state: str) -> str:
        """Wait until the test lets go."""
        self.ledger.note(f"holding {current_rollout_id()}")
        while not (self.place / "go").exists():
            time.sleep(0.01)
        return "let go"

    def verify(self, state: str, task: dict[str, Any], response: dict[str, Any]) -> float:
        return 1.0

    def release(self, state: str) -> None:
        self.ledger.note(f"released {current_rollout_id()}")


async def resources(place: Path) -> None:
    server = ResourcesServer(name="held", environment=Held(place), signing_key=SIGNING_KEY, session_ttl_s=TTL_S)
    await up(server.app)


async def agent(place: Path) -> None:
    script = [ScriptedReply(calls=[ScriptedCall("hold", {})]), ScriptedReply(text="done")]
    async with Client() as client:
        model = ModelServer(name="policy", engine=ScriptedEngine(script=script)).app
        client.register("inline://policy", model)
        await model.start()
        server = AgentServer(
            name="solver",
            agent=ToolLoop(),
            model=client.peer("inline://policy", "model"),
            client=client,
            signing_key=SIGNING_KEY,
            session_ttl_s=TTL_S,
        )
        await asyncio.gather(up(server.app), count(server, Ledger(place)))


async def count(server: AgentServer, ledger: Ledger) -> None:
    """Note the number of agent sessions whenever it changes."""
    known = 0
    while True:
        if len(server.sessions) != known:
            known = len(server.sessions)
            ledger.note(f"agent-sessions {known}")
        await asyncio.sleep(0.01)


async def environment(resources_url: str, agent_url: str) -> None:
    async with Client(transport_attempts=2, transport_budget_s=2.0) as client:
        server = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=client.peer(resources_url, "resources"),
            agent=client.peer(agent_url, "agent"),
            tools=["direct_http"],
            episode_timeout_s=EPISODE_S,
            verify_timeout_s=0.5,
            cleanup_timeout_s=CLEANUP_S,
        )
        await up(server.app)


async def up(app: Any) -> None:
    bound = await serve(app)
    print(bound.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, place, *urls = sys.argv[1:]
    os.setpgrp()
    work = {"resources": resources, "agent": agent}
    asyncio.run(environment(*urls) if role == "environment" else work[role](Path(place)))

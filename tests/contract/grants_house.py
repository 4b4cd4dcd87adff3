"""A whole small world for tests of grants: environment, agent and model servers around one environment with tools."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.catalog.tool_loop import ToolLoop
from toprope.correlation.context import current_rollout_id
from toprope.errors.tree import ToolError
from toprope.http.app import Route, ServerApp, build_app
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.serve import serve
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

Turn = list[dict[str, Any]] | Callable[[dict[str, Any]], list[dict[str, Any]]]


def call(name: str, arguments: Any = None, call_id: str = "c1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}


def say(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def outputs(response: dict[str, Any]) -> list[str]:
    """What the tools gave the model, in order."""
    return [item["output"] for item in response["output"] if item["type"] == "function_call_output"]


class Counter(Environment):
    """One number a session; tools that say where they run; the reward is whether the number is the goal."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str | None]] = {}
        self.verified: list[str | None] = []
        self.aggregated = 0
        self.waiting = 0
        self.cut_off = 0

    def seed(self, task: dict[str, Any]) -> dict[str, Any]:
        return {"n": task.get("start", 0), "only": task.get("only")}

    def session_tools(self, state: dict[str, Any], task: dict[str, Any]) -> Any:
        return state["only"] or list(self.tools)

    @tool
    async def add(self, state: dict[str, Any], n: int) -> int:
        """Add n to the number."""
        me = asyncio.create_task(_current())
        self.seen.setdefault(str(current_rollout_id()), set()).update(
            {current_rollout_id(), await me, await asyncio.to_thread(current_rollout_id)}
        )
        await asyncio.sleep(0)
        state["n"] += n
        return int(state["n"])

    @tool
    def where(self, state: dict[str, Any]) -> dict[str, Any]:
        """The rollout of a plain function."""
        return {"rollout": current_rollout_id(), "n": state["n"]}

    @tool
    async def wait(self, state: Any) -> str:
        """Never ends by itself."""
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        return "never"

    @tool
    def refuse(self, state: Any) -> None:
        """Says no."""
        raise ToolError("not on a Monday")

    @tool
    def crash(self, state: Any) -> None:
        """Breaks."""
        raise ZeroDivisionError("broken inside")

    def verify(self, state: dict[str, Any], task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        self.verified.append(current_rollout_id())
        return Verdict(reward=float(state["n"] == task.get("goal", 0)), extra={"n": state["n"]})

    def aggregate_metrics(self, body: Any) -> dict[str, Any]:
        self.aggregated += 1
        return {}


async def _current() -> str | None:
    return current_rollout_id()


@dataclass
class Model:
    """Says what a test tells it, by how far the conversation is: `turns[n]` after n function outputs."""

    turns: list[Turn] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: Request) -> Reply:
        body = await request.json()
        self.bodies.append(body)
        done = sum(item.get("type") == "function_call_output" for item in body["input"])
        turn = self.turns[min(done, len(self.turns) - 1)]
        output = turn(body) if callable(turn) else turn
        return json_reply({"id": f"resp-{done}", "object": "response", "status": "completed", "output": output})


@dataclass
class House:
    """The servers, and callers that speak the protocol."""

    client: Client
    environment: Counter
    resources: ResourcesServer
    agent: AgentServer
    episode: EnvironmentServer
    model: Model
    books: Peer
    run: Peer

    async def episode_of(
        self, rollout: str, *, attempt: int = 0, tools: list[Any] | None = None, **task: Any
    ) -> dict[str, Any]:
        """The reply to one `/run`."""
        params = {"input": [{"role": "user", "content": "go"}], **({} if tools is None else {"tools": tools})}
        body = {
            "episode_id": {"rollout_id": rollout, "attempt": attempt},
            "task": {
                "task_id": {"taskset": "t", "task_id": "1"},
                "task_input": {"responses_create_params": params, "task_data": task},
            },
        }
        reply = await self.run.request("POST", "/run", body=body)
        found: dict[str, Any] = reply.require("run").json()
        return found

    def idle(self) -> bool:
        """Whether no session is open."""
        return len(self.resources.sessions) == len(self.agent.sessions) == 0


@asynccontextmanager
async def house(
    *turns: Turn, over: str = "inline", key: str | None = None, resources_url: str | None = None, **options: Any
) -> AsyncIterator[House]:
    """`over`: "inline" or "http". `key`: the resources server's API key. `resources_url`: one that runs elsewhere."""
    stdio = options.pop("mcp_stdio", ())
    apps: list[ServerApp] = []
    bound: list[Any] = []
    async with Client(transport_attempts=1) as client:

        async def up(app: ServerApp) -> str:
            client.register(f"inline://{app.name}", app)
            if over == "inline":
                await app.start()
                apps.append(app)
                return f"inline://{app.name}"
            bound.append(await serve(app, host="127.0.0.1", port=0))
            return str(bound[-1].url)

        environment, model = Counter(), Model(list(turns))
        resources = ResourcesServer(
            name="counter", environment=environment, signing_key=b"k" * 32, mcp=True, api_key=key
        )
        books = client.peer(resources_url or await up(resources.app), "resources", api_key=key)
        policy = await up(build_app(name="policy", role="model", routes=[Route("POST", "/v1/responses", model)]))
        agent = AgentServer(
            name="clerk",
            agent=ToolLoop(),
            model=client.peer(policy, "model"),
            client=client,
            signing_key=b"a" * 32,
            mcp_stdio=stdio,
        )
        clerk = client.peer(await up(agent.app), "agent")
        episode = EnvironmentServer(name="episode", protocol=SingleAgentTurn(), resources=books, agent=clerk, **options)
        run = client.peer(await up(episode.app), "environment")
        try:
            yield House(client, environment, resources, agent, episode, model, books, run)
        finally:
            for server in reversed(bound):
                await server.close(drain_s=0)
            for app in reversed(apps):
                await app.stop(drain_s=0)


@dataclass
class Process:
    """A server in a process of its own, that a test may kill."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


def server_process(script: Path, *arguments: str) -> Process:
    """Start `script`, which prints its URL when it can serve."""
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert process.stdout is not None
    return Process(process, process.stdout.readline().strip())

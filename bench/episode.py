"""PF-3: CPU of all roles for one reference episode of 10 exchanges, inline and over HTTP, without capture.

The exchanges: `/run`, both seeds, the activation, two model calls, one tool call, both closes, verify. All roles and
the caller share this process, so that its CPU time is the sum of them; the engine is the scripted one. Baseline of the
same run: ten posts of the same sizes from an aiohttp session to a bare starlette app that parses JSON and answers
JSON, over loopback. `python -m bench.episode` runs all of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.figures import Figure
from toprope.catalog.ledger import Ledger
from toprope.catalog.tool_loop import ToolLoop
from toprope.http.app import ServerApp
from toprope.http.client import Client, Peer, Role
from toprope.http.serve import serve
from toprope.protocol.episode import Task
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply

WARM, EPISODES, CONCURRENCY, ROUNDS = 50, 400, 16, 3
EXCHANGES = 10
KEY = b"a signing key of 32 bytes or so."


def say(call: Any) -> ScriptedReply:
    """One tool call, then an answer. Ids are given, so that the toy tokeniser's work is not counted."""
    if call.turn == 0:
        calls = [ScriptedCall("deposit", {"account": "ann", "amount": 5})]
        return ScriptedReply(calls=calls, prompt_token_ids=[1, 2, 3], token_ids=[4, 5])
    return ScriptedReply(text="The money is in the account. " * 8, prompt_token_ids=[1, 2, 3, 4, 5, 6], token_ids=[7])


async def place(app: ServerApp, role: Role, client: Client, stack: AsyncExitStack, inline: bool) -> Peer:
    """The app where it is to run, as a peer."""
    if inline:
        client.register(f"inline://{app.name}", app)
        await app.start()
        stack.push_async_callback(app.stop)
        return client.peer(f"inline://{app.name}", role)
    bound = await serve(app)
    stack.push_async_callback(bound.close)
    return client.peer(bound.url, role)


async def build(client: Client, stack: AsyncExitStack, *, inline: bool) -> Peer:
    """Our four servers; returns the environment server."""
    model = ModelServer(name="policy", engine=ScriptedEngine(script=say))
    model_peer = await place(model.app, "model", client, stack, inline)
    agent = AgentServer(name="clerk", agent=ToolLoop(), model=model_peer, client=client, signing_key=KEY)
    resources = ResourcesServer(name="books", environment=Ledger(), signing_key=KEY)
    environment = EnvironmentServer(
        name="episode",
        protocol=SingleAgentTurn(),
        resources=await place(resources.app, "resources", client, stack, inline),
        agent=await place(agent.app, "agent", client, stack, inline),
        tools=["direct_http"],
    )
    return await place(environment.app, "environment", client, stack, inline)


async def bare(stack: AsyncExitStack) -> Callable[[int], Awaitable[None]]:
    """The baseline: ten posts to a starlette app."""

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    app = Starlette(routes=[Route("/call", answer, methods=["POST"])])
    config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, lifespan="off", http="httptools")
    sock = config.bind_socket()
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    while not server.started:  # noqa: ASYNC110  # uvicorn offers no event
        await asyncio.sleep(0.01)

    async def stop() -> None:
        server.should_exit = True
        await running

    stack.push_async_callback(stop)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/call"
    bodies = sizes()

    async def one(number: int) -> None:
        for body in bodies:
            async with session.post(url, json=body) as reply:
                await reply.json()

    return one


def sizes() -> list[Any]:
    """Ten bodies like those of the reference episode: the task and the growing conversation."""
    task: Task = next(iter(Ledger().tasks(1, 0)))
    params = task.task_input["responses_create_params"]
    data = task.task_input["task_data"]
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 240}]}
    ids = {"resources_session_id": "s" * 34, "episode_id": {"rollout_id": "run.0-0", "attempt": 0}}
    verify = {**data, "responses_create_params": params, "response": {"output": [text, text]}}
    return [
        {"episode_id": ids["episode_id"], "task": task.task_input},
        {**ids, "task_data": data},
        {**ids, "tool_accesses": [{"base_url": "x" * 80}]},
        params,
        params,
        {**params, "more": [text, text]},
        {"account": "ann", "amount": 5},
        ids,
        verify,
        ids,
    ]


async def measure(one: Callable[[int], Awaitable[None]]) -> float:
    """CPU milliseconds of this process for one episode, the best of some rounds."""
    best = float("inf")
    numbers = iter(range(10**9))

    async def worker(count: int) -> None:
        for _ in range(count):
            await one(next(numbers))

    await worker(WARM)
    for _ in range(ROUNDS):
        began = time.process_time()
        await asyncio.gather(*(worker(EPISODES // CONCURRENCY) for _ in range(CONCURRENCY)))
        best = min(best, (time.process_time() - began) / EPISODES * 1000)
    return best


async def ours(*, inline: bool) -> float:
    """CPU milliseconds for one episode of ours."""
    task = next(iter(Ledger().tasks(1, 0)))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        environment = await build(client, stack, inline=inline)

        async def one(number: int) -> None:
            episode = {"rollout_id": f"run.{number}", "attempt": 0}
            reply = await environment.request("POST", "/run", body={"episode_id": episode, "task": task})
            outcome = json.loads(reply.body)
            if outcome["failure"] is not None:
                raise SystemExit(f"an episode failed: {outcome['failure']}")

        return await measure(one)


async def main() -> None:
    async with AsyncExitStack() as stack:
        base = await measure(await bare(stack))
    baseline = f"{EXCHANGES} bare starlette/aiohttp posts over loopback"
    inline, http = await ours(inline=True), await ours(inline=False)
    Figure("PF-3", "CPU of a reference episode, inline", inline, "ms", base, baseline, 4.0, 2.0).emit()
    Figure("PF-3", "CPU of a reference episode, over HTTP", http, "ms", base, baseline, 8.0).emit()


if __name__ == "__main__":
    uvloop.run(main())

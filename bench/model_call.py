"""PF-1: CPU of the server process for one captured, durable model call over HTTP.

Upstream and client are processes of their own, so that what is counted is the model server alone: all its threads, the
store's writer included. A request has 16 KB, an upstream reply 60 KB with 4,000 prompt ids and 300 generated ones.
Baseline of the same run: a bare starlette + aiohttp proxy that passes bytes through, records nothing and parses
nothing, on the same uvicorn. `python -m bench.model_call` runs all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import uvloop

from bench.figures import Figure

WARM, CALLS = 150, 600


def request_body() -> bytes:
    """A Chat request of 16 KB: a system prompt, six tools, a short conversation."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": "Does one thing and says what it did. " * 6,
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
                },
            },
        }
        for n in range(6)
    ]
    messages: list[dict[str, object]] = [{"role": "system", "content": "You are careful. " * 300}]
    for n in range(5):
        call = {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "tool_1", "arguments": '{"path": "a/b", "line": 7}'},
        }
        messages += [
            {"role": "user", "content": "Look at the file and tell me. " * 20},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": "line of output\n" * 40},
        ]
    body = {"model": "m", "messages": messages, "tools": tools, "temperature": 1.0}
    return json.dumps(body).encode()


async def serve_model(upstream: str, folder: str, capture: str) -> None:
    """Our server, captured into sqlite."""
    from toprope.capture.recorder import Recorder
    from toprope.capture.sqlite_store import SqliteStore
    from toprope.http.client import Client
    from toprope.http.serve import serve
    from toprope.servers.model.engines.openai import OpenAIEngine
    from toprope.servers.model.server import ModelServer

    store = SqliteStore(Path(folder, "capture.db"))
    client = Client()
    engine = OpenAIEngine(client=client, base_url=upstream, return_token_ids=capture == "captured")
    server = ModelServer(name="policy", engine=engine, recorder=Recorder(store, reader=store))
    await server.app.start()
    bound = await serve(server.app)
    print(bound.url, flush=True)
    await asyncio.Event().wait()


async def serve_proxy(upstream: str) -> None:
    """The baseline: bytes in, bytes out."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def forward(request: Request) -> Response:
        async with session.post(
            f"{upstream}/chat/completions",
            data=await request.body(),
            headers={"content-type": "application/json"},
        ) as reply:
            return Response(await reply.read(), reply.status, media_type="application/json")

    config = uvicorn.Config(
        Starlette(routes=[Route("/{rest:path}", forward, methods=["POST"])]), log_level="error", access_log=False
    )
    config.load()
    state = ServerState()
    listening = await asyncio.get_running_loop().create_server(
        lambda: HttpToolsProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child that prints its URL first; gone when the block ends."""
    child = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()


def cpu_s(pid: int) -> float:
    """Seconds on a CPU so far, all threads of the process (the kernel's scheduler counts ns)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def drive(url: str, path: str, calls: int, concurrency: int, first: int) -> None:
    """`calls` calls, each in a rollout of its own, `concurrency` at a time. Fails on anything but 200."""
    body = request_body()
    numbers = iter(range(first, first + calls))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker() -> None:
            for number in numbers:
                async with session.post(
                    url + path.format(number), data=body, headers={"content-type": "application/json"}
                ) as reply:
                    data = await reply.read()
                    if reply.status != 200:
                        raise RuntimeError(f"{reply.status}: {data[:300]!r}")

        await asyncio.gather(*(worker() for _ in range(concurrency)))


def measure(kind: str, path: str, upstream: str, concurrency: int) -> float:
    """CPU milliseconds of the server process for one call."""
    with (
        tempfile.TemporaryDirectory() as folder,
        process("bench.model_call", kind, upstream, folder) as (child, url),
    ):
        uvloop.run(drive(url, path, WARM, concurrency, 0))
        before = cpu_s(child.pid)
        uvloop.run(drive(url, path, CALLS, concurrency, WARM))
        return (cpu_s(child.pid) - before) / CALLS * 1000


def main() -> None:
    if len(sys.argv) > 1:
        kind, upstream, folder = sys.argv[1:4]
        uvloop.run(serve_proxy(upstream) if kind == "proxy" else serve_model(upstream, folder, kind))
        return
    captured = "/ng-rollout/b{}/training-token-capture/v1/chat/completions"
    with process("toprope.testing.upstream") as (_, upstream):
        for concurrency in (1, 32):
            proxy = measure("proxy", "/v1/chat/completions", upstream, concurrency)
            plain = measure("plain", "/ng-rollout/b{}/v1/chat/completions", upstream, concurrency)
            ours = measure("captured", captured, upstream, concurrency)
            at = f"CPU a model call, {concurrency} at a time"
            is_proxy = f"a proxy without capture, {proxy:.3g} ms"
            Figure("PF-1", f"{at}, captured and durable", ours, "ms", proxy, is_proxy, 0.9, 0.5).emit()
            Figure("PF-1", f"{at}, without capture", plain, "ms", proxy, is_proxy).emit()


if __name__ == "__main__":
    main()

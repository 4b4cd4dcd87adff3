"""PF-1: CPU of the server process for one captured, durable model call over HTTP. PF-2: such calls a second.

Upstream and client are processes of their own, so that what is counted is the model server alone: all its threads, the
store's writer included. A request has 16 KB, an upstream reply 60 KB with 4,000 prompt ids and 300 generated ones; a
streamed one has 304 events. Baseline of the same run: a bare starlette + aiohttp proxy that passes bytes through (those
of a stream as they come), records nothing and parses nothing, on the same uvicorn. The servers take turns, and of each
the best of several rounds counts: what another program of the machine takes away comes and goes.
`python -m bench.model_call` runs all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from bench.figures import Figure

WARM, CALLS, ROUNDS = 150, 200, 4


def request_body(*, stream: bool = False) -> bytes:
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
    body = {"model": "m", "messages": messages, "tools": tools, "temperature": 1.0, "stream": stream}
    return json.dumps(body).encode()


async def serve_model(upstream: str, folder: str, capture: str) -> None:
    """Our server, captured into sqlite, in a process that is set as a command's is."""
    from toprope.capture.recorder import Recorder
    from toprope.capture.sqlite_store import SqliteStore
    from toprope.cli.interrupts import collect_rarely
    from toprope.http.client import Client
    from toprope.http.serve import serve
    from toprope.servers.model.engines.openai import OpenAIEngine
    from toprope.servers.model.server import ModelServer

    collect_rarely()
    store = SqliteStore(Path(folder, "capture.db"))
    client = Client()
    engine = OpenAIEngine(client=client, base_url=upstream, return_token_ids=capture != "plain")
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
    from starlette.responses import Response, StreamingResponse
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

    async def forward_stream(request: Request) -> Response:
        reply = await session.post(
            f"{upstream}/chat/completions",
            data=await request.body(),
            headers={"content-type": "application/json"},
        )
        return StreamingResponse(reply.content.iter_any(), reply.status, media_type="text/event-stream")

    routes = [
        Route("/streamed/{rest:path}", forward_stream, methods=["POST"]),
        Route("/{rest:path}", forward, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", access_log=False)
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


async def drive(url: str, path: str, body: bytes, calls: int, concurrency: int, first: int) -> None:
    """`calls` calls, each in a rollout of its own, `concurrency` at a time. Fails on anything but 200."""
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


@dataclass
class Runner:
    """One server process under load: CPU milliseconds a call and calls a second, the best of all rounds."""

    pid: int
    url: str
    path: str
    body: bytes
    calls: int = 0
    cpu_ms: float = float("inf")
    rate: float = 0.0

    def warm(self) -> None:
        """Calls that are not counted."""
        self._drive(WARM, 8)

    def round(self, concurrency: int) -> None:
        """`CALLS` calls, `concurrency` at a time."""
        before, started = cpu_s(self.pid), time.perf_counter()
        self._drive(CALLS, concurrency)
        self.rate = max(self.rate, CALLS / (time.perf_counter() - started))
        self.cpu_ms = min(self.cpu_ms, (cpu_s(self.pid) - before) / CALLS * 1000)

    def _drive(self, calls: int, concurrency: int) -> None:
        uvloop.run(drive(self.url, self.path, self.body, calls, concurrency, self.calls))
        self.calls += calls


def measure(upstream: str, concurrency: int) -> None:
    """The figures of all servers at one concurrency."""
    with contextlib.ExitStack() as stack:
        runners = {}
        for kind, path in PATHS.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            child, url = stack.enter_context(process("bench.model_call", kind, upstream, folder))
            runners[kind] = Runner(child.pid, url, path, request_body(stream=kind.startswith("streamed")))
            runners[kind].warm()
        for _ in range(ROUNDS):
            for runner in runners.values():
                runner.round(concurrency)
    proxy, plain, ours, streamed_proxy, streamed = (runners[kind] for kind in PATHS)
    at = f"a model call, {concurrency} at a time"
    is_proxy = f"a proxy without capture, {proxy.cpu_ms:.3g} ms"
    Figure("PF-1", f"CPU of {at}, captured and durable", ours.cpu_ms, "ms", proxy.cpu_ms, is_proxy, 0.9, 0.5).emit()
    Figure("PF-1", f"CPU of {at}, without capture", plain.cpu_ms, "ms", proxy.cpu_ms, is_proxy).emit()
    is_streamed = f"a proxy that passes the stream on, {streamed_proxy.cpu_ms:.3g} ms"
    what = f"CPU of a streamed call, {concurrency} at a time, captured and durable"
    Figure("PF-2", what, streamed.cpu_ms, "ms", streamed_proxy.cpu_ms, is_streamed).emit()
    if concurrency > 1:
        is_proxy = f"a proxy without capture, {proxy.rate:.0f} calls/s"
        what = f"{concurrency} model calls at a time"
        Figure("PF-2", f"{what}, captured and durable", ours.rate, "calls/s", proxy.rate, is_proxy, 1200, 2000).emit()
        Figure("PF-2", f"{what}, without capture", plain.rate, "calls/s", proxy.rate, is_proxy).emit()
        is_streamed = f"a proxy that passes the stream on, {streamed_proxy.rate:.0f} calls/s"
        Figure("PF-2", f"{what}, streamed", streamed.rate, "calls/s", streamed_proxy.rate, is_streamed, 1200).emit()


PATHS = {
    "proxy": "/v1/chat/completions",
    "plain": "/ng-rollout/b{}/v1/chat/completions",
    "captured": "/ng-rollout/b{}/training-token-capture/v1/chat/completions",
    "streamed-proxy": "/streamed/v1/chat/completions",
    "streamed": "/ng-rollout/b{}/training-token-capture/v1/chat/completions",
}


def main() -> None:
    if len(sys.argv) > 1:
        kind, upstream, folder = sys.argv[1:4]
        uvloop.run(serve_proxy(upstream) if kind.endswith("proxy") else serve_model(upstream, folder, kind))
        return
    with process("toprope.testing.upstream") as (_, upstream):
        for concurrency in (1, 32):
            measure(upstream, concurrency)


if __name__ == "__main__":
    main()

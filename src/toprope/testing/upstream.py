"""A scripted OpenAI-compatible endpoint, as an ASGI app that can stand on a real socket or in its own process.

It imports nothing else of Toprope, so that what it accepts and sends is not our own opinion of the format. Replies are
bytes, whole or in pieces (`upstream_stream`): queue them (`replies`), or give a function from request to reply.
`python -m toprope.testing.upstream` serves a fixed completion and prints its URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from toprope.testing.upstream_stream import UpstreamStream, stream, streamed

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class UpstreamRequest:
    """What arrived: method, path, headers (lower-case names) and body bytes."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as the standard library parses it."""
        return json.loads(self.body)


@dataclass(frozen=True)
class UpstreamReply:
    """What is answered. `before` is awaited first, so that a test can hold the answer back."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    before: Callable[[], Awaitable[object]] | None = None


Answer = Callable[[UpstreamRequest], UpstreamReply | UpstreamStream]


class ScriptedUpstream:
    """The endpoint. `requests` holds what came to any path but `/models`; `replies` are used up in order.

    With `answer` every request gets what that function returns; a queue that is used up gives status 500. `open` counts
    the requests in hand; `idle` is set while there is none.
    """

    def __init__(self, replies: Iterable[UpstreamReply | UpstreamStream] = (), *, answer: Answer | None = None) -> None:
        self.open = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.requests: list[UpstreamRequest] = []
        self.replies: deque[UpstreamReply | UpstreamStream] = deque(replies)
        self.models: UpstreamReply = UpstreamReply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.open += 1
        self.idle.clear()
        try:
            await self._answer_one(scope, receive, send)
        except asyncio.CancelledError:  # the server goes down with this call in hand
            return
        finally:
            self.open -= 1
            if self.open == 0:
                self.idle.set()

    async def _answer_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = UpstreamRequest(scope["method"], scope["path"], headers, b"".join(pieces))
        reply = self._reply(request)
        if reply.before is not None:
            await reply.before()
        if isinstance(reply, UpstreamStream):
            await _until_left(receive, _send_stream(reply, send))
            return
        fields = {"content-type": "application/json", "content-length": str(len(reply.body)), **reply.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": raw})
        await send({"type": "http.response.body", "body": reply.body})

    def _reply(self, request: UpstreamRequest) -> UpstreamReply | UpstreamStream:
        if request.path.endswith("/models"):
            return self.models
        self.requests.append(request)
        if self._answer is not None:
            return self._answer(request)
        return self.replies.popleft() if self.replies else error(500, "the script has no reply left")


async def _until_left(receive: Receive, sending: Coroutine[Any, Any, None]) -> None:
    """Run `sending` until it ends or the client leaves."""
    work = asyncio.ensure_future(sending)

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _send_stream(reply: UpstreamStream, send: Send) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    for piece in reply.pieces:
        if isinstance(piece, bytes):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            await piece()
    if reply.end == "hang":
        await asyncio.Event().wait()
    if reply.end == "clean":  # else the server below cuts what did not end
        await send({"type": "http.response.body", "body": b""})


def completion(
    message: dict[str, Any] | None = None,
    *,
    prompt_token_ids: list[int] | None = None,
    token_ids: list[int] | None = None,
    log_probs: list[float | None] | None = None,
    finish_reason: str | None = "stop",
    usage: dict[str, Any] | None = None,
    **more: Any,
) -> UpstreamReply:
    """A chat completion as vLLM writes it. NaN and infinities are written bare, as some engines do."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": message or {"role": "assistant", "content": "hello"},
        "finish_reason": finish_reason,
        "logprobs": None,
    }
    if token_ids is not None:
        choice["token_ids"] = token_ids
    if log_probs is not None:
        named = zip(token_ids or range(len(log_probs)), log_probs, strict=False)
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{t}", "logprob": v, "bytes": None, "top_logprobs": []} for t, v in named
        ]
        choice["logprobs"] = {"content": content}
    body = {"id": "up-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more}
    if prompt_token_ids is not None:
        body["prompt_token_ids"] = prompt_token_ids
    body["usage"] = usage
    if usage is None and prompt_token_ids is not None and token_ids is not None:
        counts = len(prompt_token_ids), len(token_ids)
        body["usage"] = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
    return UpstreamReply(json.dumps(body).encode())


def error(status: int, message: str, *, code: str | None = None, **headers: str) -> UpstreamReply:
    """An error in OpenAI's shape; keyword names become header names with dashes."""
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return UpstreamReply(json.dumps(body).encode(), status, names)


@asynccontextmanager
async def serving(app: Any, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Any ASGI app on a real socket in this loop; the value is its base URL without a path.

    On leaving, connections are cut and calls still in hand are cancelled.
    """
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    config.load()
    state = ServerState()

    def connection() -> asyncio.Protocol:
        return HttpToolsProtocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connection, host, 0)
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for open_connection in list(state.connections):
            open_connection.shutdown()
        await server.wait_closed()


def main() -> None:
    """Serve one fixed completion with `--prompt` + `--generated` ids for ever, streamed a word an event to who asks for
    a stream; the first line printed is the URL."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--generated", type=int, default=300)
    wanted = parser.parse_args()
    prompt = [17 * n % 50_000 for n in range(wanted.prompt)]
    generated = [29 * n % 50_000 for n in range(wanted.generated)]
    log_probs: list[float | None] = [-((n * 37) % 4000 + 1) / 1000 for n in range(wanted.generated)]
    reply = completion(
        {"role": "assistant", "content": "word " * wanted.generated},
        prompt_token_ids=prompt,
        token_ids=generated,
        log_probs=log_probs,
    )

    events = stream(streamed(reply.body, size=len("word ")))

    def answer(request: UpstreamRequest) -> UpstreamReply | UpstreamStream:
        return events if request.json().get("stream") else reply

    async def serve() -> None:
        async with serving(ScriptedUpstream(answer=answer)) as url:
            print(f"{url}/v1", flush=True)
            await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()

"""A client of raw bytes on a real socket, and an engine that says its reply piece by piece."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

from toprope.dialects.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from toprope.http.serve import serve as bind
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedEngine

CAPTURED = "/ng-rollout/4-2/training-token-capture"
USER = [{"role": "user", "content": "hi"}]
ASK = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": USER}),
    "responses": ("/v1/responses", {"model": "m", "input": "hi"}),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 100, "messages": USER}),
}
ENDS = {"chat": b"data: [DONE]\n\n", "responses": b"event: response.completed\n", "messages": b"event: message_stop\n"}


class Typist(ScriptedEngine):
    """A scripted engine that emits its output in `size` characters at a time.

    `before(k)` is awaited before piece k, `at_end()` when all of them were said; `fail_after` raises after so many.
    """

    def __init__(self, *, size=1, before=None, at_end=None, fail_after=None, **settings):
        super().__init__(**settings)
        self.size, self.before, self.at_end, self.fail_after = size, before, at_end, fail_after
        self.running = 0

    async def generate(self, request):
        self.running += 1
        try:
            reply = await super().generate(replace(request, emit=None))
            for number, delta in enumerate(self._pieces(reply.output)):
                if self.before is not None:
                    await self.before(number)
                if number == self.fail_after:
                    raise ConnectionError("the upstream died")
                if request.emit is not None:
                    request.emit(delta)
            if self.at_end is not None:
                await self.at_end()
            return reply
        finally:
            self.running -= 1

    def _pieces(self, output):
        for index, item in enumerate(output):
            if item["type"] == "function_call":
                yield ToolCallDelta(index, name=item["name"], call_id=item.get("call_id"))
                yield from (ToolCallDelta(index, piece) for piece in self._cut(item["arguments"]))
            else:
                kind = ReasoningDelta if item["type"] == "reasoning" else TextDelta
                yield from (kind(index, piece) for piece in self._cut(item["content"][0]["text"]))

    def _cut(self, text):
        return [text[at : at + self.size] for at in range(0, len(text), self.size)] or [""]


class RawCall:
    """One request on a connection of its own; `body` is what came so far, `whole` whether its end came."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._raw = b""
        self.status, self.headers, self.body, self.whole = 0, {}, b"", False

    async def read(self, until):
        """Read until `until(body)` or the end; raises `EOFError` where the connection ended before the body did."""
        while not (self.status and (self.whole or until(self.body))):
            data = await self._reader.read(65536)
            if not data:
                raise EOFError(self.body)
            self._raw += data
            self._parse()
        return self.body

    async def end(self):
        """Read to the end of the body."""
        return await self.read(lambda body: False)

    def leave(self):
        """Close the connection as a program does that was told to stop."""
        self._writer.transport.abort()

    def close(self):
        self._writer.close()

    def _parse(self):
        if not self.status:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return
            first, *lines = head.decode("latin-1").split("\r\n")
            self.status = int(first.split(" ")[1])
            self.headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
            self._raw = rest
        if self.headers.get("transfer-encoding") != "chunked":
            self.body += self._raw
            self._raw = b""
            self.whole = len(self.body) >= int(self.headers["content-length"])
            return
        while not self.whole:
            size, found, rest = self._raw.partition(b"\r\n")
            if not found or len(rest) < int(size, 16) + 2:
                return
            self.body += rest[: int(size, 16)]
            self._raw = rest[int(size, 16) + 2 :]
            self.whole = int(size, 16) == 0


class Wire:
    """A bound server and calls to it."""

    def __init__(self, server, port):
        self.server, self.port = server, port

    async def call(self, path, body, **headers):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": "x", "content-type": "application/json", "content-length": str(len(data)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        return RawCall(reader, writer)

    async def ask(self, dialect, *, stream=False, prefix=CAPTURED, more=None, **headers):
        path, body = ASK[dialect]
        return await self.call(
            prefix + path, {**body, **({"stream": True} if stream else {}), **(more or {})}, **headers
        )


@asynccontextmanager
async def on_the_wire(kind=ModelServer, **settings):
    """`async with on_the_wire(engine=..., recorder=...) as wire`: a model server on a real socket."""
    server = kind(name="policy", **settings)
    await server.app.start()
    bound = await bind(server.app)
    try:
        yield Wire(server, bound.port)
    finally:
        await bound.close(drain_s=5)


def events(body):
    """The (event name, data) pairs of a stream, comments left out."""
    found = []
    for block in body.split(b"\n\n"):
        lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
        if lines:
            fields = dict(line.split(b": ", 1) for line in lines)
            found.append((fields.get(b"event", b"").decode(), fields[b"data"].decode()))
    return found

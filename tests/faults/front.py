"""A faulty front: a proxy on a real socket that does to one call of a rollout what its plan says.

    before the effect    refused (by `Detour`, since a refused call is never seen here), 500, 429, dropped_before, hang
    after the effect     dropped_after, hang_after, cut, wrong_id, garbage: the server behind has done it all the same

One front stands before each server. Left to others: which call of which rollout, and what must come of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from toprope.http.exchange import Exchange, Origin, Transport
from toprope.http.replay import Replayer, ReplayPolicy
from toprope.http.reply import Reply

KEY = re.compile(r"/ng-rollout/([^/]+)(?:/training-token-capture)?(/.*)")


@dataclass(slots=True)
class Fault:
    """`fault` for the calls of `path`, `times` times; `activation`: only for that number, "" only for none."""

    fault: str
    path: str
    times: int
    activation: str | None = None
    met: int = 0
    was_met: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Faults:
    """The plan: at most one fault a rollout."""

    planned: dict[str, Fault] = field(default_factory=dict)

    def meet(self, target: str, headers: dict[str, str], *, refused: bool) -> str | None:
        """The fault that this call meets now, counted."""
        match = KEY.fullmatch(target)
        fault = self.planned.get(match[1]) if match else None
        if match is None or fault is None or fault.path != match[2] or (fault.fault == "refused") is not refused:
            return None
        if fault.activation is not None and headers.get("x-toprope-activation", "") != fault.activation:
            return None
        if fault.met >= fault.times:
            return None
        fault.met += 1
        fault.was_met.set()
        return fault.fault


class Detour(Replayer):
    """Sends calls that are to be refused to a port that refuses, so that the operating system says so."""

    def __init__(self, faults: Faults, dead: Origin, replayer: Replayer) -> None:
        self.faults = faults
        self.dead = dead
        self.replayer = replayer

    async def send(self, transport: Transport, exchange: Exchange, policy: ReplayPolicy) -> Reply:
        return await self.replayer.send(_Refusing(self, transport), exchange, policy)


@dataclass(slots=True)
class _Refusing:
    owner: Detour
    transport: Transport

    async def send(self, exchange: Exchange) -> Reply:
        headers = {name.decode(): value.decode() for name, value in exchange.headers}
        on_a_socket = exchange.origin.scheme == "http"
        if on_a_socket and self.owner.faults.meet(exchange.target, headers, refused=True) is not None:
            exchange = dataclasses.replace(exchange, origin=self.owner.dead)
        return await self.transport.send(exchange)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)  # streams and the end of it are the transport's own


@asynccontextmanager
async def dead_port() -> AsyncIterator[Origin]:
    """A port of ours on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield Origin("http", f"127.0.0.1:{held.getsockname()[1]}")


@asynccontextmanager
async def fronting(url: str, faults: Faults) -> AsyncIterator[str]:
    """A front before the server at `url`; the value is the front's own URL."""
    host, port = url.removeprefix("http://").split(":")
    tasks: set[asyncio.Task[None]] = set()

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while await _one(reader, writer, host, int(port), faults):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # a caller that left, or a server that was dropped on purpose
        except asyncio.CancelledError:
            pass  # the front is closed
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(met, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, faults: Faults
) -> bool:
    """One request; False when the connection is to be closed."""
    head = await _head(reader)
    if head is None:
        return False
    line, headers, raw = head
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    fault = faults.meet(line.split(" ")[1], headers, refused=False)
    if fault == "500":
        writer.write(_reply("500 Internal Server Error", b"out of order"))
    elif fault == "429":
        writer.write(_reply("429 Too Many Requests", b"later", "retry-after: 0.02\r\n"))
    elif fault == "dropped_before":
        return False
    elif fault == "hang":
        await reader.read(1)  # until the caller leaves
        return False
    else:
        status, told = await _ask(host, port, raw + body)
        if fault == "hang_after":
            await reader.read(1)
        if fault in ("hang_after", "dropped_after"):
            return False
        if fault == "cut":
            writer.write(status + told[: len(told) // 2])
            await writer.drain()
            return False
        if fault == "garbage":
            writer.write(_reply("200 OK", b"<html>who are you?</html>"))
        elif fault == "wrong_id":
            writer.write(_reply("200 OK", _with_wrong_id(told), "x-toprope-protocol: 1\r\n"))
        else:
            writer.write(status + told)
    await writer.drain()
    return True


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *fields = raw.decode("latin-1").split("\r\n")
    pairs = (field.split(":", 1) for field in fields if field)
    return line, {name.lower(): value.strip() for name, value in pairs}, raw


async def _ask(host: str, port: int, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the reply of the server behind."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        await writer.drain()
        head = await _head(reader)
        if head is None:
            raise ConnectionResetError("the server behind dropped the call")
        return head[2], await reader.readexactly(int(head[1].get("content-length", "0")))
    finally:
        writer.close()


def _reply(status: str, body: bytes, extra: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{extra}content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _with_wrong_id(body: bytes) -> bytes:
    told = json.loads(body)
    return json.dumps({**told, **{name: "another" for name in told if name.endswith("_session_id")}}).encode()

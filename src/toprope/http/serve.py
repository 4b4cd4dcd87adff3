"""A server of ours on a real socket, in the running loop.

The process that serves binds the socket itself, so port 0 is a port nobody else can take in between, and a taken port
ends the start with the server's name. uvicorn's HTTP/1.1 protocol (httptools) does the bytes; life and drain are ours:
no signal handlers, no polling.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from toprope.errors.tree import ConfigError
from toprope.http.app import ServerApp

log = logging.getLogger("toprope.http")

KEEP_ALIVE_S = 75
"""Seconds an idle connection stays open: longer than any client of ours keeps it (`overhttp.KEEP_ALIVE_S`)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 2048
_uvicorn_log = logging.getLogger("toprope.http.uvicorn")
_uvicorn_log.setLevel(logging.WARNING)
# A stream that the kit cut has its reason in the log already (`ServerApp`); this line would only look like a fault.
_uvicorn_log.addFilter(lambda record: "returned without completing response" not in record.getMessage())
_FLUSH_S = 5.0


class BoundServer:
    """A server that listens. `url` is its base URL, with the port that was bound."""

    def __init__(self, app: ServerApp, url: str, server: asyncio.Server, state: ServerState) -> None:
        self.app = app
        self.url = url
        self._server = server
        self._state = state
        self._closed: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.url.rpartition(":")[2])

    async def close(self, *, drain_s: float | None = None) -> None:
        """On return the port is free, the app was stopped (drained) and every connection is closed. Idempotent.

        `drain_s`: as `ServerApp.stop`.
        """
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closed)

    async def _close(self, drain_s: float | None) -> None:
        self._server.close()
        try:
            await self.app.stop(drain_s=drain_s)
        finally:
            for connection in list(self._state.connections):
                connection.shutdown()  # idle ones close; one that still writes its reply closes after it
            if self._state.tasks:
                await asyncio.wait(set(self._state.tasks), timeout=_FLUSH_S)
            for connection in list(self._state.connections):
                transport: Any = connection.transport
                transport.abort()


async def serve(app: ServerApp, *, host: str = "127.0.0.1", port: int = 0) -> BoundServer:
    """Bind, start the app, listen; on return it can be called at `url`. Port 0 is a free port of the system's choice.

    Raises `ConfigError` naming the server for a host that is not this machine's loopback unless the app has an API key,
    and for an address that cannot be bound; what the app's startup raises comes out, the socket closed.
    """
    if host not in LOOPBACK and not app.has_api_key:
        raise ConfigError(
            f"{app.name}: host {host!r} can be reached from other machines; without an api_key a server is bound to "
            "127.0.0.1 or localhost only"
        )
    sock = _bind(app.name, host, port)
    try:
        await app.start()
        state = ServerState()
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        loop = asyncio.get_running_loop()

        def connection() -> HttpToolsProtocol:
            protocol = HttpToolsProtocol(config, state, {}, loop)
            protocol.logger = _uvicorn_log
            return protocol

        server = await loop.create_server(connection, sock=sock, backlog=_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return BoundServer(app, _url(host, sock.getsockname()[1]), server, state)


def _bind(name: str, host: str, port: int) -> socket.socket:
    address = "127.0.0.1" if host == "localhost" else host
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The protocol is named because asyncio sets TCP_NODELAY only where it is; without, each reply waits 40 ms for
        # a delayed ACK between its head and its body.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"{name}: no socket for {host!r}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted sockets inherit these
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        sock.bind((address, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"{name}: cannot bind {host}:{port}: {getattr(error, 'strerror', None) or error}; give another port, or 0 "
            "for any free one"
        ) from None
    return sock


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"

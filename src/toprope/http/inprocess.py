"""The in-process transport: an ASGI app called with the same bytes, and the same semantics, as over HTTP.

    caller's task                     callee's task, in an EMPTY context (nothing of the caller's is seen)
    send(exchange) --- scope, body -->  app(scope, receive, send)
        waits      <-- start, body ---
        cancelled  --- disconnect ---->  receive() says http.disconnect; the task itself is never cancelled

An exception of the callee is a 500 (or a cut body, once the reply began), never the caller's exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from urllib.parse import unquote

from toprope.errors.kinds import Delivery, Kind
from toprope.http.asgi import AsgiApp, Message, Scope
from toprope.http.exchange import Exchange, failure, reply_too_large, whole_reply
from toprope.http.headers import Headers
from toprope.http.reply import Reply

log = logging.getLogger("toprope.http")

CLOSE_S = 1.0

Parts = tuple[int, Headers, bytes]


class InlineTransport:
    """Reaches the apps of `apps` by name; the mapping may grow while it is used."""

    def __init__(self, apps: Mapping[str, AsgiApp]) -> None:
        self._apps = apps
        self._running: dict[asyncio.Task[None], _InlineCall] = {}  # a task that nobody holds may vanish in mid-work
        self._closed = False

    async def send(self, exchange: Exchange) -> Reply:
        """The app's reply. Raises as `Transport.send` says; an unknown name is `transport_unreachable`."""
        if self._closed:
            raise RuntimeError("this client is closed")
        app = self._apps.get(exchange.origin.authority)
        if app is None:
            known = ", ".join(sorted(self._apps)) or "none"
            why = f"no inline server has this name; known are: {known}"
            raise failure(Kind.TRANSPORT_UNREACHABLE, exchange, Delivery.NOT_SENT, why)
        loop = asyncio.get_running_loop()
        call = _InlineCall(exchange, loop.create_future())
        task = loop.create_task(call.run(app), context=Context())
        self._running[task] = call
        task.add_done_callback(self._running.pop)
        timer = None if exchange.timeout_s is None else loop.call_later(exchange.timeout_s, call.time_out)
        try:
            status, headers, body = await call.done
        except asyncio.CancelledError:
            call.disconnect()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return whole_reply(exchange, status, headers, body)

    async def close(self) -> None:
        """Every call that still waits for its reply fails as dropped, and its callee learns that the client is gone.

        Callees get `CLOSE_S` to end; one that is detached goes on, held by its server.
        """
        self._closed = True
        for call in self._running.values():
            call.drop("the client was closed")
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_S)


class _InlineCall:
    """The server's half of one call: what `receive` gives, what `send` takes, and the reply made of it."""

    __slots__ = ("_body", "_left", "_pieces", "_read", "_size", "_start", "done", "exchange")

    def __init__(self, exchange: Exchange, done: asyncio.Future[Parts]) -> None:
        self.exchange = exchange
        self.done = done
        self._body = exchange.body or b""
        self._read = False
        self._left: asyncio.Event | None = None
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    async def run(self, app: AsgiApp) -> None:
        try:
            await app(self._scope(), self.receive, self.send)
        except Exception:  # what an HTTP server does: log it, answer 500 or cut the reply
            log.exception("%s: exception in the application", self.exchange.origin)
        except asyncio.CancelledError:
            self._finish_broken()
            raise
        self._finish_broken()

    def _scope(self) -> Scope:
        exchange = self.exchange
        raw_path, _, query = exchange.target.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": exchange.method,
            "scheme": "http",
            "path": unquote(raw_path) if "%" in raw_path else raw_path,
            "raw_path": raw_path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": list(exchange.headers),
            "client": ("127.0.0.1", 0),
            "server": (exchange.origin.authority, None),
            "state": {},
        }

    async def receive(self) -> Message:
        if self.done.done():
            return {"type": "http.disconnect"}
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if self._left is None:
            self._left = asyncio.Event()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.done.done():
            return  # the client is gone; HTTP servers swallow this too
        if message["type"] == "http.response.start":
            self._start = message
            return
        if message["type"] != "http.response.body" or self._start is None:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        piece = bytes(message.get("body", b""))
        self._size += len(piece)
        if self._size > self.exchange.max_bytes:
            self._fail(reply_too_large(self.exchange))
            return
        self._pieces.append(piece)
        if not message.get("more_body", False):
            self._finish(self._start["status"], self._start.get("headers", ()), b"".join(self._pieces))

    def _finish(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        bodiless = self.exchange.method == "HEAD" or status in (204, 304)
        fields = Headers([(name.lower(), value) for name, value in headers])
        self.done.set_result((status, fields, b"" if bodiless else body))
        self._tell_left()

    def _finish_broken(self) -> None:
        """The app is through. If the reply is not, answer as an HTTP server does."""
        if self.done.done():
            return
        if self._start is None:
            self._finish(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
        else:
            self._fail(
                failure(Kind.TRANSPORT_DROPPED, self.exchange, Delivery.DELIVERED, "the reply was cut off in its body")
            )

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self._tell_left()

    def time_out(self) -> None:
        why = f"no complete reply within {self.exchange.timeout_s:g} s"
        self._fail(failure(Kind.TRANSPORT_TIMEOUT, self.exchange, Delivery.POSSIBLY_DELIVERED, why))

    def drop(self, why: str) -> None:
        self._fail(failure(Kind.TRANSPORT_DROPPED, self.exchange, Delivery.POSSIBLY_DELIVERED, why))

    def disconnect(self) -> None:
        """The caller is gone: from now on receive() says so."""
        if not self.done.done():
            self.done.cancel()
        self._tell_left()

    def _tell_left(self) -> None:
        if self._left is None:
            self._left = asyncio.Event()
        self._left.set()

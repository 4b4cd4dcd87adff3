"""The in-process transport: an ASGI app called with the same bytes, and the same semantics, as over HTTP.

    caller's task                     callee's task, in an EMPTY context (nothing of the caller's is seen)
    send(exchange) --- scope, body -->  app(scope, receive, send)
        waits      <-- start, body ---
        cancelled  --- disconnect ---->  receive() says http.disconnect; the task itself is never cancelled

An exception of the callee is a 500 (or a cut body, once the reply began), never the caller's exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import Context

from toprope.errors.kinds import Delivery, Kind
from toprope.http.asgi import AsgiApp, Message
from toprope.http.exchange import Exchange, failure, reply_too_large, whole_reply
from toprope.http.headers import Headers
from toprope.http.inline_call import InlineCall
from toprope.http.inline_stream import InlineStream
from toprope.http.reply import Reply

CLOSE_S = 1.0

Parts = tuple[int, Headers, bytes]


class InlineTransport:
    """Reaches the apps of `apps` by name; the mapping may grow while it is used."""

    def __init__(self, apps: Mapping[str, AsgiApp]) -> None:
        self._apps = apps
        self._running: dict[asyncio.Task[None], InlineCall] = {}  # a task that nobody holds may vanish in mid-work
        self._closed = False

    async def send(self, exchange: Exchange) -> Reply:
        """The app's reply. Raises as `Transport.send` says; an unknown name is `transport_unreachable`."""
        app = self._app(exchange)
        loop = asyncio.get_running_loop()
        call = _WholeCall(exchange, loop.create_future())
        self._run(call, app)
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

    async def open(self, exchange: Exchange) -> InlineStream:
        """As `Transport.open`; an unknown name is `transport_unreachable`."""
        app = self._app(exchange)
        call = InlineStream(exchange)
        self._run(call, app)
        try:
            await call.head
        except asyncio.CancelledError:
            call.disconnect()
            raise
        return call

    def _app(self, exchange: Exchange) -> AsgiApp:
        if self._closed:
            raise RuntimeError("this client is closed")
        app = self._apps.get(exchange.origin.authority)
        if app is None:
            known = ", ".join(sorted(self._apps)) or "none"
            why = f"no inline server has this name; known are: {known}"
            raise failure(Kind.TRANSPORT_UNREACHABLE, exchange, Delivery.NOT_SENT, why)
        return app

    def _run(self, call: InlineCall, app: AsgiApp) -> None:
        task = asyncio.get_running_loop().create_task(call.run(app), context=Context())
        self._running[task] = call
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Every call that still waits for its reply fails as dropped, and its callee learns that the client is gone.

        Callees get `CLOSE_S` to end; one that is detached goes on, held by its server.
        """
        self._closed = True
        for call in self._running.values():
            call.drop("the client was closed")
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_S)


class _WholeCall(InlineCall):
    """A call whose reply is wanted whole."""

    __slots__ = ("_pieces", "_size", "_start", "done")

    def __init__(self, exchange: Exchange, done: asyncio.Future[Parts]) -> None:
        super().__init__(exchange)
        self.done = done
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def over(self) -> bool:
        return self.done.done()

    async def send(self, message: Message) -> None:
        if self.over:
            return  # the client is gone; HTTP servers swallow this too
        if message["type"] == "http.response.start":
            self._start = message
            return
        if message["type"] != "http.response.body" or self._start is None:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        piece = bytes(message.get("body", b""))
        self._size += len(piece)
        if self._size > self.exchange.max_bytes:
            self.fail(reply_too_large(self.exchange))
            return
        self._pieces.append(piece)
        if not message.get("more_body", False):
            self._finish(self._start["status"], self._start.get("headers", ()), b"".join(self._pieces))

    def _finish(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        bodiless = self.exchange.method == "HEAD" or status in (204, 304)
        fields = Headers([(name.lower(), value) for name, value in headers])
        self.done.set_result((status, fields, b"" if bodiless else body))
        self.tell_left()

    def finish_broken(self) -> None:
        if self.over:
            return
        if self._start is None:
            self._finish(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
        else:
            self.fail(self.cut())

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self.tell_left()

    def disconnect(self) -> None:
        if not self.done.done():
            self.done.cancel()
        self.tell_left()

    def delivery(self) -> Delivery:
        return Delivery.POSSIBLY_DELIVERED

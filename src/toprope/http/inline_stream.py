"""The in-process transport's streams: what an app sends reaches the reader piece by piece, with a bound between them.

An app whose reader is slow waits in its `send`, as it would for a full socket. Left to others: the call itself
(`inprocess`), limits and idle times (`replystream`).
"""

from __future__ import annotations

import asyncio
from collections import deque

from toprope.errors.kinds import Delivery
from toprope.http.asgi import Message
from toprope.http.exchange import Exchange
from toprope.http.headers import Headers
from toprope.http.inline_call import InlineCall

ROOM = 1 << 18
"""Bytes that may wait for the reader before the app waits."""


class InlineStream(InlineCall):
    """A call whose reply is read in pieces: an `OpenReply` once `head` is done."""

    __slots__ = ("_error", "_moved", "_over", "_pieces", "_timer", "_waiting", "head", "headers", "status")

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._over = False
        self.status = 0
        self.headers = Headers()
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[None] = loop.create_future()
        self._pieces: deque[bytes] = deque()
        self._waiting = 0
        self._moved = asyncio.Event()
        self._error: Exception | None = None
        self._timer = None if exchange.timeout_s is None else loop.call_later(exchange.timeout_s, self.time_out)

    @property
    def over(self) -> bool:
        return self._over or self.head.cancelled()

    async def send(self, message: Message) -> None:
        if self.over:
            return  # the client is gone; HTTP servers swallow this too
        if message["type"] == "http.response.start" and not self.head.done():
            self.status = message["status"]
            self.headers = Headers([(name.lower(), value) for name, value in message.get("headers", ())])
            self.head.set_result(None)
            return
        if message["type"] != "http.response.body" or not self.head.done():
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        piece = bytes(message.get("body", b""))
        if piece and self.exchange.method != "HEAD" and self.status not in (204, 304):
            self._pieces.append(piece)
            self._waiting += len(piece)
        if not message.get("more_body", False):
            self._end()
        self._moved.set()
        while self._waiting > ROOM and not self.over:
            self._moved.clear()
            await self._moved.wait()

    async def read(self) -> bytes:
        """The next piece, b"" at the end. Raises what `OpenReply.read` says, after the pieces that came before."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                return b""
            self._moved.clear()
            await self._moved.wait()
        piece = self._pieces.popleft()
        self._waiting -= len(piece)
        self._moved.set()
        return piece

    async def close(self) -> None:
        """On return the app has been told that its client is gone, unless its reply had ended."""
        self.disconnect()

    def finish_broken(self) -> None:
        if self.over:
            return
        if self.head.done():
            self.fail(self.cut())
            return
        self.status = 500
        self.headers = Headers([(b"content-type", b"text/plain; charset=utf-8")])
        self._pieces.append(b"Internal Server Error")
        self.head.set_result(None)
        self._end()

    def fail(self, error: Exception) -> None:
        if self.over:
            return
        if self.head.done():
            self._error = error
        else:
            self.head.set_exception(error)
        self._end()

    def disconnect(self) -> None:
        if not self.head.done():
            self.head.cancel()
        self._end()

    def delivery(self) -> Delivery:
        return Delivery.DELIVERED if self.head.done() else Delivery.POSSIBLY_DELIVERED

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._moved.set()
        self.tell_left()

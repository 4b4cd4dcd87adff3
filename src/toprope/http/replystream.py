"""A peer's reply read piece by piece, within bounds: bytes in all, seconds without a byte, seconds in all.

    Opening.send     one attempt: until the head of the reply came; a status that is no 2xx is read whole
    StreamedReply    the pieces of a 2xx, content encoding undone
    Opening.close    the connection is in its pool again, or closed: nothing leaks, however the reading ended

Left to others: sending again, which ends with the head (`replay`), what the bytes mean (`wire.sse`).
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import PeerError, TransportError
from toprope.http.exchange import (
    Exchange,
    OpenReply,
    Transport,
    bad_reply,
    failure,
    reply_too_large,
    whole_reply,
)
from toprope.http.headers import Headers
from toprope.http.reply import Reply

_INFLATED = 1 << 20


class StreamedReply:
    """Status and headers, and the body as an iterator of bytes: each piece as soon as it came, none of them empty.

    Iterating raises `TransportError` for a body that was cut, that paused or that took too long, and `PeerError` for
    one over the limit or in a content encoding that cannot be read in pieces. `attempts` says how often it was asked.
    """

    def __init__(self, opened: _Opened, attempts: int) -> None:
        self.status: int = opened.status
        self.headers: Headers = opened.headers
        self.url: str = opened.exchange.shown_url
        self.attempts = attempts
        self._opened = opened

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._opened.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def whole(self) -> Reply:
        """What is not read yet, as a whole reply: the words of an error, mostly."""
        body = b"".join([piece async for piece in self])
        return Reply(self.status, body, self.headers, url=self.url, attempts=self.attempts)

    async def settle(self, within_s: float) -> None:
        """Read on to the body's end, for `within_s` seconds at most: for a reader that knows that nothing more comes,
        so that the connection can be used again. Never raises what the reading does."""
        try:
            async with asyncio.timeout(within_s):
                async for _ in self:
                    pass
        except (TimeoutError, TransportError, PeerError):  # then the connection is closed on leaving
            return


class Opening:
    """What the replay loop sends through when a stream is wanted: it holds the one reply that is open.

    A `Transport` as far as that loop looks. The head counts as the first byte: after it nothing is sent again, unless
    the status is an error that the policy repeats.
    """

    def __init__(self, transport: Transport, idle_timeout_s: float | None) -> None:
        self._transport = transport
        self._idle_s = idle_timeout_s
        self._opened: _Opened | None = None

    async def send(self, exchange: Exchange) -> Reply:
        """One attempt. The reply's body is empty where it is to be streamed."""
        await self.close()
        try:
            async with asyncio.timeout(self._idle_s) as limit:
                raw = await self._transport.open(exchange)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _idle(exchange, self._idle_s, Delivery.POSSIBLY_DELIVERED) from None
        self._opened = opened = _Opened(raw, exchange, self._idle_s)
        if 200 <= raw.status < 300:
            return Reply(raw.status, b"", raw.headers, url=exchange.shown_url)
        return await opened.read_whole()

    async def open(self, exchange: Exchange) -> OpenReply:
        """As the transport's own."""
        return await self._transport.open(exchange)

    def reply(self, attempts: int) -> StreamedReply:
        """The reply that is open now."""
        assert self._opened is not None
        return StreamedReply(self._opened, attempts)

    async def close(self) -> None:
        """As `OpenReply.close`, of what is open."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()


class _Opened:
    """One open reply, its bounds kept and its encoding undone."""

    def __init__(self, raw: OpenReply, exchange: Exchange, idle_s: float | None) -> None:
        self.status = raw.status
        self.headers = raw.headers
        self.exchange = exchange
        self._raw = raw
        self._idle_s = idle_s
        self._size = 0
        self._unpacked = _unpacker(exchange, raw.headers)
        self._ready: deque[bytes] = deque()

    async def read(self) -> bytes:
        """The next piece, b"" at the end."""
        while not self._ready:
            raw = await self._read_raw()
            if self._unpacked is None:
                return self._counted(raw)
            if not raw:
                self._unpacked.end()
                return b""
            for piece in self._unpacked.feed(raw):
                self._ready.append(self._counted(piece))
        return self._ready.popleft()

    async def read_whole(self) -> Reply:
        """All of it; what is read here is read again from memory."""
        self._unpacked = None
        pieces = []
        while piece := self._counted(await self._read_raw()):
            pieces.append(piece)
        reply = whole_reply(self.exchange, self.status, self.headers, b"".join(pieces))
        self._ready.extend(piece for piece in (reply.body,) if piece)
        return reply

    async def close(self) -> None:
        await self._raw.close()

    async def _read_raw(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s) as limit:
                return await self._raw.read()
        except TimeoutError:
            if not limit.expired():
                raise
            raise _idle(self.exchange, self._idle_s, Delivery.DELIVERED) from None

    def _counted(self, piece: bytes) -> bytes:
        self._size += len(piece)
        if self._size > self.exchange.max_bytes:
            raise reply_too_large(self.exchange)
        return piece


class _Unpacker:
    """gzip or deflate, undone as it comes, at most `_INFLATED` bytes at a time."""

    def __init__(self, exchange: Exchange, wbits: int) -> None:
        self._exchange = exchange
        self._stream = zlib.decompressobj(wbits)
        self._began = False

    def feed(self, data: bytes) -> list[bytes]:
        self._began = True
        pieces = []
        size, full = 0, False
        try:
            while (data or full) and not self._stream.eof:
                piece = self._stream.decompress(data, _INFLATED)
                data, full = self._stream.unconsumed_tail, len(piece) == _INFLATED
                size += len(piece)
                if piece:
                    pieces.append(piece)
                if size > self._exchange.max_bytes:
                    raise reply_too_large(self._exchange)
        except zlib.error as error:
            raise bad_reply(self._exchange, f"the reply does not decompress: {error}") from None
        return pieces

    def end(self) -> None:
        if self._began and not self._stream.eof:
            raise bad_reply(self._exchange, "the reply ends inside its compressed data")


def _unpacker(exchange: Exchange, headers: Headers) -> _Unpacker | None:
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Unpacker(exchange, 47 if encoding != "deflate" else 15)
    return _Refusing(exchange, encoding)


class _Refusing(_Unpacker):
    """A content encoding that nothing here undoes piece by piece, and that was not asked for."""

    def __init__(self, exchange: Exchange, encoding: str) -> None:
        super().__init__(exchange, 15)
        self._error: PeerError = bad_reply(exchange, f"the reply is a stream in content-encoding {encoding!r}")

    def feed(self, data: bytes) -> list[bytes]:
        raise self._error

    def end(self) -> None:
        return


def _idle(exchange: Exchange, idle_s: float | None, delivery: Delivery) -> Exception:
    return failure(Kind.TRANSPORT_TIMEOUT, exchange, delivery, f"no byte for {idle_s:g} s")

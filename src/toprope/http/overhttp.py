"""The HTTP transport: aiohttp without the defaults that would cap a run.

No pool limit (theirs: 100), no total timeout (theirs: 300 s), no cookie jar, TCP keep-alive on, idle connections given
up before any common server does. Each failure is named: refused, DNS, connect timeout, dropped, cut body, timeout.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import TransportError
from toprope.http.exchange import Exchange, failure, reply_too_large, whole_reply
from toprope.http.headers import Headers
from toprope.http.reply import Reply

# Shorter than the shortest keep-alive among common servers (uvicorn and Node: 5 s; ours: `serve.KEEP_ALIVE_S`), so
# that a pooled connection is not reused in the moment in which the server closes it.
KEEP_ALIVE_S = 4.0
_FIELD_LIMIT = 65536
_PIECE = 1 << 18
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}


class HttpTransport:
    """Connections are made on first use, in the loop that uses them, and shared by all peers of one client."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def send(self, exchange: Exchange) -> Reply:
        """As `Transport.send`."""
        try:
            async with await self._request(exchange) as response:
                return await _read(response, exchange)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _named(error, exchange) from error

    async def open(self, exchange: Exchange) -> _OpenHttp:
        """As `Transport.open`."""
        try:
            return _OpenHttp(await self._request(exchange), exchange)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _named(error, exchange) from error

    async def _request(self, exchange: Exchange) -> aiohttp.ClientResponse:
        session = self._open()
        # A peer's FIN that has arrived is seen by the loop only on its next turns; after two of them a connection that
        # was closed while it idled is out of the pool, and a call that may not be sent twice does not try it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await session.request(
            exchange.method,
            URL(f"{exchange.origin}{exchange.target}", encoded=True),
            data=_sendable(exchange.body),
            headers=[(name.decode("ascii"), value.decode("utf-8")) for name, value in exchange.headers],
            timeout=aiohttp.ClientTimeout(total=exchange.timeout_s, connect=exchange.connect_timeout_s),
            allow_redirects=False,
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_socket_with_keepalive
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),
                skip_auto_headers=("user-agent", "content-type", "accept", "accept-encoding"),
                auto_decompress=False,
                trust_env=False,
                max_line_size=_FIELD_LIMIT,
                max_field_size=_FIELD_LIMIT,
                read_bufsize=1 << 20,
            )
        return self._session

    async def close(self) -> None:
        """Once it returns no connection is open, and nothing is sent any more (`RuntimeError`)."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _OpenHttp:
    """An `OpenReply` over a socket."""

    def __init__(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        self.status = response.status
        self.headers = _fields(response)
        self._response = response
        self._exchange = exchange

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            named = _named(error, self._exchange)
            named.delivery = Delivery.DELIVERED
            raise named from error

    async def close(self) -> None:
        self._response.close()  # what was read to its end has given its connection back already


def _socket_with_keepalive(address: Any) -> socket.socket:
    """A peer that vanishes without a word is noticed after about two minutes and not never."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _sendable(body: bytes | None) -> bytes | AsyncIterator[bytes] | None:
    """A long body goes out in pieces, each when the last has left, so that no buffer holds a copy."""
    return _pieces(body) if body is not None and len(body) > _PIECE else body


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]


async def _read(response: aiohttp.ClientResponse, exchange: Exchange) -> Reply:
    pieces: list[bytes] = []
    size = 0
    while piece := await response.content.readany():
        size += len(piece)
        if size > exchange.max_bytes:
            response.close()  # the rest is not worth reading
            raise reply_too_large(exchange)
        pieces.append(piece)
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return whole_reply(exchange, response.status, _fields(response), body)


def _fields(response: aiohttp.ClientResponse) -> Headers:
    return Headers([(name.lower(), value) for name, value in response.raw_headers])


def _named(error: aiohttp.ClientError | OSError, exchange: Exchange) -> TransportError:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return failure(Kind.TRANSPORT_UNREACHABLE, exchange, Delivery.NOT_SENT, f"the name does not resolve ({error})")
    if isinstance(error, aiohttp.ClientConnectorError):
        return _named_os_error(error, exchange, connecting=True)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        why = f"no connection within {exchange.connect_timeout_s:g} s"
        return failure(Kind.TRANSPORT_TIMEOUT, exchange, Delivery.NOT_SENT, why)
    if isinstance(error, aiohttp.ServerTimeoutError):
        return failure(Kind.TRANSPORT_TIMEOUT, exchange, Delivery.POSSIBLY_DELIVERED, f"timed out ({error})")
    if isinstance(error, aiohttp.ClientPayloadError):
        return failure(Kind.TRANSPORT_DROPPED, exchange, Delivery.DELIVERED, "the reply was cut off in its body")
    if isinstance(error, aiohttp.ClientResponseError):
        why = f"what came back is no HTTP ({error.message})"
        return failure(Kind.BAD_REPLY, exchange, Delivery.DELIVERED, why)
    if isinstance(error, TimeoutError):
        why = f"no complete reply within {exchange.timeout_s:g} s" if exchange.timeout_s else "timed out"
        return failure(Kind.TRANSPORT_TIMEOUT, exchange, Delivery.POSSIBLY_DELIVERED, why)
    if isinstance(error, OSError):
        return _named_os_error(error, exchange)
    why = f"the connection was dropped before a reply ({error or type(error).__name__})"
    return failure(Kind.TRANSPORT_DROPPED, exchange, Delivery.POSSIBLY_DELIVERED, why)


def _named_os_error(error: OSError, exchange: Exchange, *, connecting: bool = False) -> TransportError:
    text = error.strerror or str(error) or type(error).__name__
    delivery = Delivery.NOT_SENT if connecting else Delivery.POSSIBLY_DELIVERED
    if error.errno in _OUT_OF_RESOURCES:
        return failure(Kind.TRANSPORT_RESOURCE, exchange, delivery, f"this machine is out of resources ({text})")
    if not connecting:
        return failure(Kind.TRANSPORT_DROPPED, exchange, delivery, f"the connection was dropped ({text})")
    refused = "connection refused" if error.errno == errno.ECONNREFUSED else f"no connection ({text})"
    return failure(Kind.TRANSPORT_UNREACHABLE, exchange, delivery, refused)

"""One request on its way out, and what both transports promise about it.

A transport sends once. It returns the peer's reply whatever its status, or raises `TransportError` with the kind and
what is known of delivery. Left to others: sending again (`replay`), whose request it is (`peer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import BadRequest, PeerError, TooLarge, TransportError
from toprope.http.encoding import decode_content
from toprope.http.headers import Headers, RawHeaders
from toprope.http.reply import Reply


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme and authority, as in `http://127.0.0.1:8000` or `inline://model`."""

    scheme: str
    authority: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What goes out, once: `target` is the raw path with its query; times in seconds, sizes in bytes.

    `timeout_s` bounds the time from sending to the last byte of the reply; None leaves it to the caller.
    """

    method: str
    origin: Origin
    target: str
    headers: RawHeaders
    body: bytes | None
    timeout_s: float | None
    connect_timeout_s: float
    max_bytes: int

    @property
    def shown_url(self) -> str:
        """The URL for messages: no query and no credentials, which may be secrets."""
        return shown(f"{self.origin}{self.target}")


class OpenReply(Protocol):
    """A reply whose head came and whose body is still to be read."""

    status: int
    headers: Headers

    async def read(self) -> bytes:
        """The next piece of the body as it came, b"" once at its end. Raises `TransportError` (delivered)."""

    async def close(self) -> None:
        """Once it returns the connection is back in its pool (the body was read whole) or closed. Idempotent."""


class Transport(Protocol):
    """One way to reach a peer."""

    async def send(self, exchange: Exchange) -> Reply:
        """The whole reply. Raises `TransportError`, or `PeerError` for a reply over `max_bytes`.

        Cancelling it reaches the peer as a disconnect.
        """

    async def open(self, exchange: Exchange) -> OpenReply:
        """The reply as soon as its head came; whoever gets it closes it. Raises `TransportError`; cancelling likewise.

        `timeout_s` bounds all of it, the reading too; `max_bytes` is the reader's to keep.
        """

    async def close(self) -> None:
        """Once it returns no connection is open."""


def shown(url: str) -> str:
    """`url` without query, fragment and credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def failure(kind: Kind, exchange: Exchange, delivery: Delivery, why: str) -> TransportError:
    """The error for one failed send. `why` is a phrase: "connection refused"."""
    url = exchange.shown_url
    return TransportError(f"{exchange.method} {url}: {why}", kind=kind, url=url, delivery=delivery)


def whole_reply(exchange: Exchange, status: int, headers: Headers, body: bytes) -> Reply:
    """The reply with its content encoding undone. Raises `PeerError` if it is too large then, or damaged."""
    encoding = headers.get("content-encoding")
    if encoding is not None and body:
        try:
            body = decode_content(body, encoding, limit=exchange.max_bytes, what="the reply")
        except TooLarge:
            raise reply_too_large(exchange) from None
        except BadRequest as error:
            raise bad_reply(exchange, error.message) from None
    return Reply(status, body, headers, url=exchange.shown_url)


def bad_reply(exchange: Exchange, why: str) -> PeerError:
    """The error for a reply that came and cannot be used."""
    return PeerError(
        f"{exchange.method} {exchange.shown_url}: {why}",
        kind=Kind.BAD_REPLY,
        retryable=False,
        delivery=Delivery.DELIVERED,
    )


def reply_too_large(exchange: Exchange) -> PeerError:
    """The error for a reply that is longer than the caller takes."""
    limit = exchange.max_bytes
    return bad_reply(
        exchange, f"the reply is larger than the limit of {limit} bytes (max_bytes); decompressed size counts"
    )

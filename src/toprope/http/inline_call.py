"""The server's half of one in-process call: the scope that an app is called with, and what its `receive` gives.

Left to others: what becomes of what the app sends (`inprocess` for whole replies, `inline_stream` for pieces).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from urllib.parse import unquote

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import TransportError
from toprope.http.asgi import AsgiApp, Message, Scope
from toprope.http.exchange import Exchange, failure

log = logging.getLogger("toprope.http")


class InlineCall(ABC):
    """One call."""

    __slots__ = ("_body", "_left", "_read", "exchange")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._body = exchange.body or b""
        self._read = False
        self._left: asyncio.Event | None = None

    async def run(self, app: AsgiApp) -> None:
        """Call the app to its end. What it raises is logged, and answered as an HTTP server does."""
        try:
            await app(self._scope(), self.receive, self.send)
        except Exception:  # what an HTTP server does: log it, answer 500 or cut the reply
            log.exception("%s: exception in the application", self.exchange.origin)
        except asyncio.CancelledError:
            self.finish_broken()
            raise
        self.finish_broken()

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
        if self.over:
            return {"type": "http.disconnect"}
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if self._left is None:
            self._left = asyncio.Event()
        await self._left.wait()
        return {"type": "http.disconnect"}

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the reply is complete, or failed, or the client is gone."""

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Take one ASGI message of the app."""

    @abstractmethod
    def finish_broken(self) -> None:
        """The app is through. If the reply is not, answer 500, or cut it if it began."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """The reply will not be complete: the client gets `error`, the app learns that the client is gone."""

    @abstractmethod
    def disconnect(self) -> None:
        """The caller is gone: from now on receive() says so."""

    @abstractmethod
    def delivery(self) -> Delivery:
        """What the client knows of the request's delivery now."""

    def time_out(self) -> None:
        """The caller's time is up."""
        why = f"no complete reply within {self.exchange.timeout_s:g} s"
        self.fail(failure(Kind.TRANSPORT_TIMEOUT, self.exchange, self.delivery(), why))

    def drop(self, why: str) -> None:
        """The connection, were there one, is gone."""
        self.fail(failure(Kind.TRANSPORT_DROPPED, self.exchange, self.delivery(), why))

    def cut(self) -> TransportError:
        """The error of a reply that began and did not end."""
        why = "the reply was cut off in its body"
        return failure(Kind.TRANSPORT_DROPPED, self.exchange, Delivery.DELIVERED, why)

    def tell_left(self) -> None:
        """The call is over; who waits in receive() hears of it."""
        if self._left is not None:
            self._left.set()

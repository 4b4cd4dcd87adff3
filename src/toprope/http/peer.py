"""A peer: one base URL in one role, and the calls to it, each stamped with the rollout that the caller works for.

The role decides what a call carries: `model`, `agent` and `resources` get the rollout prefix (never twice), these and
`environment` our protocol header, a foreign peer (None) neither. Left to others: sending again (`replay`), bytes
(`inprocess`, `overhttp`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from toprope.correlation.context import current_rollout
from toprope.correlation.path import format_prefix, has_prefix
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import PeerError
from toprope.http.cookies import cookie_header
from toprope.http.exchange import Exchange, Origin, Transport, shown
from toprope.http.headers import RawHeaders, raw_field
from toprope.http.jsonbody import encode
from toprope.http.replay import BEFORE_DELIVERY, Replayer, ReplayPolicy
from toprope.http.reply import Reply
from toprope.http.replystream import Opening, StreamedReply
from toprope.protocol.headers import PROTOCOL, PROTOCOL_VERSION

Role = Literal["model", "agent", "resources", "environment"]

MAX_REPLY_BYTES = 256 * 2**20
_STAMPED = frozenset({"model", "agent", "resources"})
_PLAIN_TARGET = re.compile(r"[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*")
_AUTHORITY = re.compile(r"([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_SAFE = "/._~!$&'()*+,;=:@%?-"
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Peer:
    """Calls to one base URL. Made by `Client.peer`; cheap, and safe to share between tasks.

    `keyed`: its calls carry an API key.
    """

    def __init__(
        self,
        base_url: str,
        role: Role | None,
        *,
        transport: Transport,
        replayer: Replayer,
        connect_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self.origin, path = read_base_url(base_url)
        self.role = role
        self.keyed = api_key is not None
        self._base = _raw_target(path)
        self._transport = transport
        self._replayer = replayer
        self._connect_timeout_s = connect_timeout_s
        self._fixed: RawHeaders = [raw_field("host", self.origin.authority), (b"user-agent", b"toprope")]
        if role is not None:
            self._fixed.append((PROTOCOL.encode(), PROTOCOL_VERSION.encode()))
        if api_key is not None:
            self._fixed.append(raw_field("authorization", f"Bearer {api_key}"))

    def __repr__(self) -> str:
        return f"Peer({self.origin}{self._base}, {self.role})"

    def url(self, path: str = "", *, capture: bool | None = None) -> str:
        """The absolute URL of `path`, stamped as a call made now would be."""
        return f"{self.origin}{self._target(path, capture)}"

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        policy: ReplayPolicy = BEFORE_DELIVERY,
        timeout_s: float | None = None,
        capture: bool | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> Reply:
        """The peer's reply, whatever its status. `body` is sent as it is if bytes, else as JSON.

        `timeout_s` bounds each attempt from sending to the last byte (None: the caller's own deadline does).
        `capture` None takes the bound context's flag for a model and False for every other role. Raises
        `TransportError` (kind, url, delivery, attempts, elapsed_s) when no usable answer came, `PeerError` for a reply
        over `max_bytes` or a redirect that must not be followed. Cancelling it reaches the peer as a disconnect.
        """
        exchange = self._exchange(method, path, body, headers, cookies, timeout_s, capture, max_bytes)
        reply = await self._replayer.send(self._transport, exchange, policy)
        if reply.status not in _REDIRECTS:
            return reply
        return await self._follow(reply, exchange, policy, self._transport)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        policy: ReplayPolicy = BEFORE_DELIVERY,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        capture: bool | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> AsyncIterator[StreamedReply]:
        """The peer's reply as soon as its head came, whatever its status; its body is read by iterating it.

        As `request`; `timeout_s` bounds all of it, the reading too, and `idle_timeout_s` each wait for a next byte, the
        first included. Errors of the body come out of the iteration. Nothing is sent again once a head came (but for
        an error status that the policy repeats). Leaving the context, however, gives the connection back to its pool if
        the body was read to its end, and closes it otherwise, which the peer sees as a disconnect.
        """
        exchange = self._exchange(method, path, body, headers, cookies, timeout_s, capture, max_bytes)
        opening = Opening(self._transport, idle_timeout_s)
        try:
            reply = await self._replayer.send(opening, exchange, policy)
            if reply.status in _REDIRECTS:
                reply = await self._follow(reply, exchange, policy, opening)
            yield opening.reply(reply.attempts)
        finally:
            await opening.close()

    def _exchange(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
        timeout_s: float | None,
        capture: bool | None,
        max_bytes: int,
    ) -> Exchange:
        data = None if body is None else body if isinstance(body, bytes) else encode(body)
        return Exchange(
            method,
            self.origin,
            self._target(path or ("" if self._base else "/"), capture),
            self._fields(method, data, not isinstance(body, bytes), headers, cookies),
            data,
            timeout_s,
            self._connect_timeout_s,
            max_bytes,
        )

    def _target(self, path: str, capture: bool | None) -> str:
        target = self._base + ("/" + path.lstrip("/") if path else "")
        if _PLAIN_TARGET.fullmatch(target) is None:
            target = _raw_target(target)
        bound = current_rollout() if self.role in _STAMPED else None
        if bound is None or has_prefix(target):
            return target
        if capture is None:
            capture = bound.capture and self.role == "model"
        return format_prefix(bound.key, capture=capture) + target

    def _fields(
        self,
        method: str,
        data: bytes | None,
        json: bool,
        headers: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
    ) -> RawHeaders:
        fields = list(self._fixed)
        if headers:
            own = [raw_field(name, value) for name, value in headers.items()]
            given = {name for name, _ in own}
            fields = [field for field in fields if field[0] not in given] + own
        if cookies:
            fields.append(raw_field("cookie", cookie_header(cookies)))
        if data is not None:
            if json or not any(name == b"content-type" for name, _ in fields):
                fields.append((b"content-type", b"application/json"))
            fields.append((b"content-length", b"%d" % len(data)))
        elif method in ("POST", "PUT", "PATCH"):
            fields.append((b"content-length", b"0"))
        return fields

    async def _follow(self, reply: Reply, exchange: Exchange, policy: ReplayPolicy, transport: Transport) -> Reply:
        """Follow redirects on the same origin, the prefix kept; refuse every other."""
        method, body = exchange.method, exchange.body
        for _ in range(_MAX_REDIRECTS):
            location = reply.headers.get("location")
            if location is None or reply.status not in _REDIRECTS:
                return reply
            if reply.status < 307 and method not in ("GET", "HEAD"):
                raise self._refused_redirect(reply, location, f"a {reply.status} would turn the {method} into a GET")
            exchange = Exchange(
                method,
                self.origin,
                self._redirected(reply, location, exchange.target),
                exchange.headers,
                body,
                exchange.timeout_s,
                exchange.connect_timeout_s,
                exchange.max_bytes,
            )
            reply = await self._replayer.send(transport, exchange, policy)
        if reply.status not in _REDIRECTS:
            return reply
        raise self._refused_redirect(reply, reply.headers.get("location", ""), f"more than {_MAX_REDIRECTS} in a row")

    def _redirected(self, reply: Reply, location: str, target: str) -> str:
        parts = urlsplit(location)
        scheme = "http" if self.origin.scheme == "inline" else self.origin.scheme
        if (parts.scheme or scheme) not in (scheme, self.origin.scheme) or (
            parts.netloc and parts.netloc.lower() != self.origin.authority.lower()
        ):
            raise self._refused_redirect(reply, location, "it leads to another origin")
        if not parts.path.startswith("/"):
            raise self._refused_redirect(reply, location, "its path is not absolute")
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        if has_prefix(target) and not has_prefix(path):
            _, _, key, rest = target.split("/", 3)
            capture = rest.startswith("training-token-capture/")
            path = format_prefix(key, capture=capture) + path
        return _raw_target(path)

    def _refused_redirect(self, reply: Reply, location: str, why: str) -> PeerError:
        return PeerError(
            f"{reply.url} redirects ({reply.status}) to {shown(location)}, which is not followed: {why}",
            kind=Kind.BAD_REPLY,
            retryable=False,
            delivery=Delivery.DELIVERED,
            upstream_status=reply.status,
        )


def read_base_url(url: str) -> tuple[Origin, str]:
    """Origin and path (without a slash at its end) of a server's URL. Raises `ValueError` for what is none."""
    what = f"URL {shown(url)!r}: expected http://host:port, https://host or inline://name, path allowed"
    try:
        parts = urlsplit(url)
        port = parts.port  # a property that raises for 'x' and 70000
    except ValueError as error:
        raise ValueError(f"{what} ({error})") from None
    if parts.scheme not in ("http", "https", "inline") or not parts.netloc or parts.query or parts.fragment:
        raise ValueError(what)
    if "@" in parts.netloc:
        raise ValueError(f"URL {shown(url)!r}: credentials do not belong into a URL; give an api_key")
    if not _AUTHORITY.fullmatch(parts.netloc) or port == 0:
        raise ValueError(f"{what}; {parts.netloc!r} is no host")
    if any(character.isspace() for character in url):
        raise ValueError(f"{what}; white space stands in it")
    return Origin(parts.scheme, parts.netloc), parts.path.rstrip("/")


def _raw_target(path: str) -> str:
    """`path` with everything escaped that may not stand in a URL; what is escaped already stays."""
    return quote(path, safe=_SAFE)

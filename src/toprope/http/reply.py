"""A reply: what a handler gives and what a client gets, the same class on both sides.

A body is whole, or on a server's side an iterator of pieces (`streaming`). A client reads streams through
`replystream.StreamedReply`; what it gets as a `Reply` is always whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from toprope.canonical.json import NotJson
from toprope.errors.body import ErrorInfo, read_error_body, shorten
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import PeerError
from toprope.http.cookies import SetCookie, read_set_cookies, set_cookie_header
from toprope.http.headers import EMPTY, Headers, RawHeaders, raw_field
from toprope.http.jsonbody import decode_any, decode_as, encode

T = TypeVar("T")

EXCERPT = 500


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, headers and the whole body.

    A handler's: `cookies` are set on the caller (session cookies, Path=/). A client's: `url` says who answered (no
    query, no credentials), `attempts` how often it was asked. `stream` is a handler's body that comes in pieces
    (made by `streaming_reply`; `body` is empty then).
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = EMPTY
    cookies: Mapping[str, str] | None = None
    url: str = field(default="", compare=False)
    attempts: int = field(default=1, compare=False)
    stream: AsyncIterator[bytes] | None = field(default=None, compare=False)

    @property
    def set_cookies(self) -> tuple[SetCookie, ...]:
        """The cookies that this reply sets or deletes."""
        own = () if self.cookies is None else tuple(SetCookie(*pair) for pair in self.cookies.items())
        return own + read_set_cookies(Headers.of(self.headers).get_all("set-cookie"))

    @property
    def text(self) -> str:
        """The body as UTF-8, damaged bytes replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as plain values. Raises `PeerError` (bad_reply) with an excerpt if it is no JSON."""
        try:
            return decode_any(self.body)
        except NotJson as error:
            raise self._bad(f"is no JSON ({error})") from None

    def decode(self, wanted: type[T]) -> T:
        """The body as a `wanted`, strictly typed. Raises `PeerError` (bad_reply) naming field and value."""
        try:
            return decode_as(self.body, wanted)
        except (NotJson, msgspec.ValidationError, ValueError) as error:
            raise self._bad(f"is no {getattr(wanted, '__name__', wanted)}: {error}") from None

    def require(self, what: str) -> Reply:
        """This reply if its status is below 400. Raises `PeerError` saying what the peer said otherwise.

        `what` names the call in the message ("seed of the resources session"). Kind, retryable and upstream_status
        are the peer's own where its body is typed; else kind bad_reply, the status table, and the status.
        """
        if self.status < 400:
            return self
        info = self.error_info()
        raise PeerError(
            f"{what}: {self.url or 'the peer'} answered {self.status}: {info.message}",
            kind=info.kind or Kind.BAD_REPLY,
            retryable=info.retryable,
            stage=info.stage,
            delivery=Delivery.DELIVERED,
            upstream_status=info.upstream_status if info.upstream_status is not None else self.status,
        )

    def error_info(self) -> ErrorInfo:
        """What an error reply says, whoever wrote it."""
        try:
            body = decode_any(self.body)
        except NotJson:
            body = None
        return read_error_body(self.status, body, self._excerpt())

    def _bad(self, why: str) -> PeerError:
        return PeerError(
            f"{self.url or 'the peer'} answered {self.status} with a body that {why}; it begins with "
            f"{self._excerpt()!r}",
            kind=Kind.BAD_REPLY,
            retryable=False,
            delivery=Delivery.DELIVERED,
            upstream_status=self.status,
        )

    def _excerpt(self) -> str:
        return shorten(self.body[: EXCERPT * 4].decode("utf-8", "replace"), EXCERPT)


_JSON = (b"content-type", b"application/json")


def raw_headers(reply: Reply, *extra: tuple[bytes, bytes]) -> RawHeaders:
    """The reply's header fields for the wire, a whole body's length included. Raises `ValueError` for what HTTP cannot
    carry."""
    fields: RawHeaders = [*Headers.of(reply.headers).raw, *extra]
    if reply.stream is None and reply.status >= 200 and reply.status not in (204, 304):
        fields.append((b"content-length", b"%d" % len(reply.body)))
    if reply.cookies:
        fields.extend(raw_field("set-cookie", set_cookie_header(name, value)) for name, value in reply.cookies.items())
    return fields


def json_reply(
    value: Any,
    status: int = 200,
    *,
    headers: Mapping[str, str] = EMPTY,
    cookies: Mapping[str, str] | None = None,
) -> Reply:
    """A JSON reply of plain values or msgspec structs. Raises `NotJson` naming the path of a NaN or infinity."""
    fields = _JSON_HEADERS if not headers else Headers((_JSON, *Headers.of(headers).raw))
    return Reply(status, encode(value), fields, cookies)


_JSON_HEADERS = Headers((_JSON,))
_TEXT_HEADERS = Headers(((b"content-type", b"text/plain; charset=utf-8"),))


def text_reply(text: str, status: int = 200, *, cookies: Mapping[str, str] | None = None) -> Reply:
    """A plain text reply in UTF-8."""
    return Reply(status, text.encode("utf-8", "surrogatepass"), _TEXT_HEADERS, cookies)

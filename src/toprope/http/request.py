"""A request as a handler sees it: the prefix is gone from the path, the body is here, whole and within its limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from toprope.canonical.json import NotJson
from toprope.correlation.context import RolloutContext
from toprope.errors.tree import BadRequest
from toprope.http.asgi import ROLLOUT_KEY, Scope
from toprope.http.cookies import read_cookies
from toprope.http.headers import Headers
from toprope.http.jsonbody import decode_any, decode_as
from toprope.protocol.headers import PROTOCOL

T = TypeVar("T")


class Request:
    """One request. `path` has no rollout prefix and is percent-decoded; `rollout` is what the prefix said, or None."""

    __slots__ = ("_body", "_cookies", "_query", "headers", "method", "path", "path_params", "rollout", "scope")

    def __init__(self, scope: Scope, body: bytes = b"") -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = Headers(scope["headers"])
        self.path_params: Mapping[str, Any] = {}
        self.rollout: RolloutContext | None = scope.get(ROLLOUT_KEY)
        self._body = body
        self._query: dict[str, str] | None = None
        self._cookies: dict[str, str] | None = None

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters; of a repeated one the last."""
        if self._query is None:
            self._query = dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
        return self._query

    @property
    def cookies(self) -> Mapping[str, str]:
        """The cookies that came with it."""
        if self._cookies is None:
            self._cookies = read_cookies(self.headers.get_all("cookie"))
        return self._cookies

    @property
    def speaks_protocol(self) -> bool:
        """Whether the caller sent `X-Toprope-Protocol`, so that extended replies are welcome."""
        return PROTOCOL in self.headers

    async def body(self) -> bytes:
        """The whole body, content encoding undone, within the server's limit (the kit read it before the handler)."""
        return self._body

    async def json(self) -> Any:
        """The body as plain values. Raises `BadRequest` (422) if it is no JSON."""
        try:
            return decode_any(self._body)
        except NotJson as error:
            raise BadRequest(f"{self.method} {self.path}: the body is no JSON: {error}") from None

    async def decode(self, wanted: type[T]) -> T:
        """The body as a `wanted`, strictly typed. Raises `BadRequest` (422) naming the field and what is accepted."""
        try:
            return decode_as(self._body, wanted)
        except NotJson as error:
            raise BadRequest(f"{self.method} {self.path}: the body is no JSON: {error}") from None
        except (msgspec.ValidationError, ValueError) as error:
            raise BadRequest(f"{self.method} {self.path}: {error}") from None

"""Session cookies: merged per server, never replaced, and signed by the server that sets them.

Cookies are values that the caller holds, one mapping for each server, so that one server's never reach another; no
client-wide jar exists (a jar that ignores IP hosts hides both leaks and losses on 127.0.0.1). Values are kept as they
were sent, quotes included, and go back byte for byte.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toprope.http.reply import Reply

_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff;]")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*")


@dataclass(frozen=True, slots=True)
class SetCookie:
    """One Set-Cookie field. `deleted` says that it takes the cookie away (Max-Age <= 0 or Expires in the past)."""

    name: str
    value: str
    deleted: bool = False


def read_set_cookies(fields: Iterable[str], *, now: float | None = None) -> tuple[SetCookie, ...]:
    """The Set-Cookie fields of a reply, in order. One without a name, or with a control character, is skipped, as
    RFC 6265 section 5.2 and its successor say: nobody could send it back."""
    found = []
    for text in fields:
        pair, *attributes = text.split(";")
        name, equals, value = pair.partition("=")
        if equals and name.strip() and _sendable(name, value):
            found.append(SetCookie(name.strip(), value.strip(), _is_deleted(attributes, now)))
    return tuple(found)


def _is_deleted(attributes: list[str], now: float | None) -> bool:
    expired = False
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        match name.strip().lower():
            case "max-age":  # wins over Expires, whatever the order
                try:
                    return int(value.strip()) <= 0
                except ValueError:
                    continue
            case "expires":
                try:
                    moment = parsedate_to_datetime(value.strip().replace("-", " ")).timestamp()
                except (ValueError, OverflowError):
                    continue
                expired = moment <= (time.time() if now is None else now)
    return expired


def _sendable(name: str, value: str) -> bool:
    return "=" not in name and not _UNSENDABLE.search(name) and not _UNSENDABLE.search(value)


def told_cookies(told: object) -> dict[str, str]:
    """The cookies in a value that somebody else's body gave for a mapping of them: those that can be sent."""
    pairs = told.items() if isinstance(told, Mapping) else ()
    named = ((str(name).strip(), str(value)) for name, value in pairs)
    return {name: value for name, value in named if name and _sendable(name, value)}


def merge_cookies(current: Mapping[str, str], reply: Reply) -> dict[str, str]:
    """What to send to the same server next: `current`, with what the reply set laid over it and what it deleted gone.

    A reply without Set-Cookie changes nothing. `current` itself is left as it is.
    """
    merged = dict(current)
    for cookie in reply.set_cookies:
        if cookie.deleted:
            merged.pop(cookie.name, None)
        else:
            merged[cookie.name] = cookie.value
    return merged


def read_cookies(fields: Iterable[str]) -> dict[str, str]:
    """The Cookie fields of a request. Of a name sent twice the first stands: it has the longest path."""
    found: dict[str, str] = {}
    for text in fields:
        for part in text.split(";"):
            name, equals, value = part.partition("=")
            if equals and name.strip():
                found.setdefault(name.strip(), value.strip())
    return found


def cookie_header(cookies: Mapping[str, str]) -> str:
    """The Cookie field for these cookies, values as they are."""
    return "; ".join(f"{name}={value}" for name, value in cookies.items())


def set_cookie_header(name: str, value: str) -> str:
    """A Set-Cookie field for a session of ours. Raises `ValueError` for a name or value outside RFC 6265."""
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError(f"cookie {name!r}: a name is a token; a value has no spaces, quotes, commas, semicolons")
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Lax"


class CookieSigner:
    """Makes and checks cookie values that only the holder of `key` can make: `<session id>.<HMAC-SHA256, hex>`."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ValueError(f"a signing key has at least 16 bytes, this one has {len(key)}")
        self._key = key

    def sign(self, session_id: str) -> str:
        """The cookie value that stands for `session_id`."""
        return f"{session_id}.{self._mac(session_id)}"

    def verify(self, value: str) -> str | None:
        """The session id, or None for a value that this key did not sign. Constant time in the signature."""
        session_id, dot, mac = value.rpartition(".")
        if not dot or not hmac.compare_digest(mac.encode("utf-8"), self._mac(session_id).encode("ascii")):
            return None
        return session_id

    def _mac(self, session_id: str) -> str:
        return hmac.new(self._key, session_id.encode("utf-8"), hashlib.sha256).hexdigest()

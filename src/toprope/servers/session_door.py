"""How a request names its session, and whose rollout it then works for.

By the header `X-Toprope-Session`, or by the signed cookie that the seed reply set (strangers know only that). The
rollout is the path's; a request without a prefix works for the rollout that its session was seeded for. Left to
others: what the session may do (`sessions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from toprope.correlation.context import RolloutContext, bound_rollout, current_rollout
from toprope.errors.tree import BadRequest, Conflict, SessionLost
from toprope.http.cookies import CookieSigner
from toprope.http.request import Request
from toprope.protocol.headers import CLOSE_TOKEN, LEASE, SESSION

COOKIE = "toprope_session"


class SessionDoor:
    """The cookie and header rules of one server."""

    def __init__(self, signing_key: bytes) -> None:
        self._signer = CookieSigner(signing_key)

    def session_id(self, request: Request) -> str | None:
        """The session that the request names, or None.

        Raises `SessionLost` for a session cookie that this server did not sign: its session is not here.
        """
        named = request.headers.get(SESSION)
        if named:
            return named
        cookie = request.cookies.get(COOKIE)
        if cookie is None:
            return None
        session_id = self._signer.verify(cookie)
        if session_id is None:
            raise SessionLost(f"{request.path}: the session cookie was not signed by this server")
        return session_id

    def cookies(self, session_id: str) -> dict[str, str]:
        """What a seed reply sets."""
        return {COOKIE: self._signer.sign(session_id)}


def close_token(request: Request) -> str | None:
    """The close token that came with the request."""
    return request.headers.get(CLOSE_TOKEN) or None


def lease_s(request: Request) -> float:
    """The lease that a seed asks for, in seconds; 0 without one. Raises `BadRequest` for what is no such number."""
    text = request.headers.get(LEASE)
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 30 * 86400:
        raise BadRequest(f"{LEASE}: {text!r} is not a number of seconds between 0 and 30 days")
    return seconds


def check_key(request: Request, key: str) -> None:
    """Return if the path's rollout, if any, is `key`. Raises `Conflict` otherwise."""
    if request.rollout is not None and request.rollout.key != key:
        raise Conflict(f"{request.path}: the path names rollout {request.rollout.key}, the body {key}")


@contextmanager
def working_for(key: str) -> Iterator[None]:
    """Work for `key` in the block, unless the request's path bound a rollout already."""
    if not key or current_rollout() is not None:
        yield
        return
    with bound_rollout(RolloutContext(key)):
        yield

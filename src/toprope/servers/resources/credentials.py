"""Tools-only credentials: what a grant carries, so that an agent can call the tools of one session and nothing else.

Random, and no session id can be read out of one; known here by its digest only. Where the server has an API key, a
credential stands for the key on tool routes. Left to others: what a session is (`servers.sessions`), when a credential
is given out (`server`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection

from toprope.errors.tree import Forbidden, SessionLost
from toprope.http.request import Request
from toprope.protocol.headers import TOOLS


class ToolCredentials:
    """The credentials of one server's open sessions. `closed_paths` are its routes that no credential opens."""

    def __init__(self, closed_paths: Collection[str]) -> None:
        self._closed_paths = frozenset(closed_paths)
        self._sessions: dict[bytes, str] = {}
        self._digests: dict[str, bytes] = {}

    def issue(self, session_id: str) -> str:
        """A fresh credential for the session; one that it had before is void."""
        self.revoke(session_id)
        credential = secrets.token_urlsafe(24)
        digest = _digest(credential)
        self._sessions[digest] = session_id
        self._digests[session_id] = digest
        return credential

    def revoke(self, session_id: str) -> None:
        """The session's credential, if it had one, opens nothing any more."""
        digest = self._digests.pop(session_id, None)
        if digest is not None:
            self._sessions.pop(digest, None)

    def session_named(self, request: Request) -> str | None:
        """The session of the request's credential; None where it carries none.

        Raises `Forbidden` on a path that no credential opens, `SessionLost` for one that is not known (any more).
        """
        credential = request.headers.get(TOOLS)
        if credential is None:
            return None
        self.refuse(request)
        session_id = self._sessions.get(_digest(credential))
        if session_id is None:
            raise SessionLost(f"{request.path}: the session of this tools-only credential is not open here")
        return session_id

    def refuse(self, request: Request) -> None:
        """Return unless the request comes with a credential to a path that none opens: `Forbidden` (403)."""
        if request.path in self._closed_paths and TOOLS in request.headers:
            raise Forbidden(f"{request.path}: {TOOLS} is a credential for tools only")

    def stands_for_key(self, request: Request) -> bool:
        """Whether a request without the server's API key may pass: a known credential, on a route of tools."""
        credential = request.headers.get(TOOLS)
        if credential is None or _digest(credential) not in self._sessions:
            return False
        self.refuse(request)
        return True


def _digest(credential: str) -> bytes:
    # Looked up by digest, so that how long a look-up takes says nothing of how much of a guess was right.
    return hashlib.sha256(credential.encode("utf-8", "surrogatepass")).digest()

"""The one client: every call between servers of ours, and to strangers, leaves through it.

It owns the transports and the bounds of replay; a `Peer` adds address, role and stamp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from toprope.http.asgi import AsgiApp
from toprope.http.inprocess import InlineTransport
from toprope.http.peer import Peer as Peer
from toprope.http.peer import Role as Role
from toprope.http.replay import ReplayBounds, Replayer

if TYPE_CHECKING:
    from toprope.http.overhttp import HttpTransport


class Client:
    """Calls over HTTP and in process. Times in seconds.

    `connect_timeout_s` bounds one connection, `transport_budget_s` and `transport_attempts` the replay loop of a call.
    There is no limit on concurrent connections and no limit on the time a peer may take for its answer: callers give
    `timeout_s` or cancel. Raises `ValueError` for a bound that is not positive.
    """

    def __init__(
        self,
        *,
        inline: Mapping[str, AsgiApp] | None = None,
        connect_timeout_s: float = 5.0,
        transport_budget_s: float = 15.0,
        transport_attempts: int = 4,
        replayer: Replayer | None = None,
    ) -> None:
        if not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s {connect_timeout_s!r}: expected seconds above 0")
        self._apps: dict[str, AsgiApp] = dict(inline or {})
        self._inline = InlineTransport(self._apps)
        self._http: HttpTransport | None = None
        self._closed = False
        self._connect_timeout_s = connect_timeout_s
        self._replayer = replayer or Replayer(ReplayBounds(transport_attempts, transport_budget_s))

    def register(self, url: str, app: AsgiApp) -> None:
        """Make `app` reachable under `url` (`inline://name`, or the bare name). Raises `ValueError` if taken."""
        name = url.removeprefix("inline://").rstrip("/")
        if not name or "/" in name or ":" in name:
            raise ValueError(f"inline server {url!r}: expected inline://name")
        if self._apps.get(name, app) is not app:
            raise ValueError(f"inline server {url!r}: the name is taken")
        self._apps[name] = app

    def peer(self, base_url: str, role: Role | None, *, api_key: str | None = None) -> Peer:
        """The peer at `base_url`. `role` None is a foreign peer, never stamped. Raises `ValueError` for a bad URL."""
        return Peer(
            base_url,
            role,
            transport=self._inline if base_url.startswith("inline://") else self._over_http(),
            replayer=self._replayer,
            connect_timeout_s=self._connect_timeout_s,
            api_key=api_key,
        )

    async def close(self) -> None:
        """Once it returns no connection is open, and every later call is a `RuntimeError`. Idempotent."""
        self._closed = True
        await self._inline.close()
        if self._http is not None:
            await self._http.close()

    def _over_http(self) -> HttpTransport:
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._http is None:
            from toprope.http.overhttp import HttpTransport  # aiohttp takes 0.3 s to import; inline runs need none

            self._http = HttpTransport()
        return self._http

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

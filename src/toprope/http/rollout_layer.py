"""The ASGI layer that reads the rollout prefix: it binds the rollout, strips the prefix, forwards.

`build_app` installs it in every server of ours; third-party ASGI apps wrap themselves. A request without prefix runs
with no rollout bound, whatever its surroundings had; a prefix that does not parse is a 400. Left to others: the
grammar (`correlation.path`), who else may name an identity (`servers.model`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from toprope.correlation.context import RolloutContext, bound_rollout
from toprope.correlation.path import RolloutPath, parse_path
from toprope.errors.tree import BadPath
from toprope.http.asgi import CAPTURE_STATE, ROLLOUT_KEY, AsgiApp, Receive, Scope, Send
from toprope.http.faults import typed_error
from toprope.http.reply import Reply, raw_headers
from toprope.protocol.headers import PROTOCOL, PROTOCOL_VERSION

PROTOCOL_FIELD = (PROTOCOL.encode(), PROTOCOL_VERSION.encode())


class RolloutContextMiddleware:
    """Binds the prefix's rollout for each request of `app` and strips the prefix from `path` and `raw_path`.

    `current_rollout_id()` answers in the app, its tasks and its `asyncio.to_thread` calls; whether the path asked for
    capture stands in `scope["state"]["training_token_capture"]`.
    """

    strips = True

    def __init__(self, app: AsgiApp, *, refuse: Callable[[BadPath], Reply] = typed_error) -> None:
        self.app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            root, found = _locate(scope)
        except ValueError as error:
            await _send_refusal(scope, receive, send, self._refuse(BadPath(str(error))))
            return
        if found is None:
            bound: RolloutContext | None = scope.get(ROLLOUT_KEY)  # set where a layer of ours stands further out
        else:
            bound = RolloutContext(found.key, found.capture)
        inner = dict(scope)
        inner[ROLLOUT_KEY] = bound
        inner["state"] = {**scope.get("state", {}), CAPTURE_STATE: bound is not None and bound.capture}
        if found is not None and self.strips:
            inner["raw_path"] = (root + found.rest).encode("latin-1")
            inner["path"] = root + unquote(found.rest)
        with bound_rollout(bound):
            await self.app(inner, receive, send)


class RolloutContextPeekMiddleware(RolloutContextMiddleware):
    """The same, but `path` and `raw_path` stay as they came: for apps that route on the prefix themselves."""

    strips = False


def _locate(scope: Scope) -> tuple[str, RolloutPath | None]:
    """The part of the path that belongs to a mount, and what the rest says. Raises `ValueError` as `parse_path`."""
    raw: Any = scope.get("raw_path")
    # raw_path is optional in ASGI; some servers leave the query in it.
    path = (
        raw.partition(b"?")[0].decode("latin-1") if raw is not None else quote(scope["path"], safe="/%:@!$&'()*+,;=~")
    )
    root: str = scope.get("root_path") or ""
    if root and path.startswith(root + "/"):
        return root, parse_path(path[len(root) :])
    return "", parse_path(path)


async def _send_refusal(scope: Scope, receive: Receive, send: Send, reply: Reply) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "the rollout prefix does not parse"})
        return
    await send_reply(reply, scope["method"], send)


async def send_reply(reply: Reply, method: str, send: Send) -> None:
    """Send a whole reply and our protocol header. Raises `ValueError`, nothing sent, for headers HTTP cannot carry."""
    fields = raw_headers(reply, PROTOCOL_FIELD)
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else reply.body})

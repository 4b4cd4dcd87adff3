"""The server kit: one way to build a server, so that none exists without identity, limits, drain and error mapping.

Layers, outermost first: rollout prefix, health routes, admission (started, not stopping, key), body limit, route,
handler, error mapping. Pure ASGI. Left to others: sockets (`serve`), routes and what they do (the servers).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from toprope.errors.tree import Forbidden, NotReady, TopropeError
from toprope.http.asgi import Receive, Scope, Send
from toprope.http.faults import RenderError, reply_for, typed_error
from toprope.http.inbound import ClientLeft, read_body
from toprope.http.inflight import InFlight
from toprope.http.reply import Reply, json_reply, raw_headers
from toprope.http.request import Request
from toprope.http.rollout_layer import PROTOCOL_FIELD, RolloutContextMiddleware, send_reply
from toprope.http.routing import Route as Route
from toprope.http.routing import Router
from toprope.http.streaming import close_stream, send_stream

T = TypeVar("T")

log = logging.getLogger("toprope.http")

Hook = Callable[[], Awaitable[None]]
HEALTH_PATHS = ("/livez", "/readyz", "/health", "/")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server bounds: bytes of a request body (decompressed), seconds that detached work gets at stop()."""

    max_body_bytes: int = 256 * 2**20
    drain_s: float = 120.0


def always_ready() -> str | None:
    """The readiness of a server that can serve as soon as it started."""
    return None


class ServerApp:
    """A server of ours as an ASGI app. Made by `build_app`."""

    def __init__(
        self,
        *,
        name: str,
        role: str,
        router: Router,
        ready: Callable[[], str | None],
        startup: Hook | None,
        shutdown: Hook | None,
        limits: Limits,
        api_key: str | None,
        stands_for_key: Callable[[Request], bool] | None,
        render_error: RenderError,
    ) -> None:
        self.name = name
        self.role = role
        self.limits = limits
        self.has_api_key = api_key is not None
        self._api_key = None if api_key is None else api_key.encode("utf-8")
        self._stands_for_key = stands_for_key
        self._router = router
        self._ready = ready
        self._startup = startup
        self._shutdown = shutdown
        self._render = render_error
        self._calls = InFlight(name)
        self._started = startup is None
        self._life = asyncio.Lock()
        self._stopped = False
        self._layered = RolloutContextMiddleware(self._http, refuse=lambda error: self._render(error, None))

    # Life

    async def start(self) -> None:
        """On return the server can serve (its startup ran, once). What startup raises comes out; it may be repeated."""
        async with self._life:
            if self._startup is not None and not self._started:
                await self._startup()
            self._started = True
            self._stopped = self._calls.stopping = False

    async def stop(self, *, drain_s: float | None = None) -> None:
        """On return nothing of this server runs: attached calls were cancelled (503 to their clients), detached ones
        ended within the drain bound or were cancelled there, and shutdown ran, once.

        `drain_s`: a shorter bound than the limits', of whoever knows that nobody waits for those calls any more.
        """
        self._calls.stopping = True  # refuse from now on, also while another stop() drains
        async with self._life:
            if self._stopped:
                return
            await self._calls.drain(self.limits.drain_s if drain_s is None else min(drain_s, self.limits.drain_s))
            if self._shutdown is not None and self._started:
                await self._shutdown()
            self._started = self._startup is None
            self._stopped = True

    def detach(self, work: Coroutine[Any, Any, T], label: str) -> asyncio.Task[T]:
        """`work` as a task of its own, which goes on when the client of the running call leaves.

        It runs in a copy of the caller's context (its rollout stays bound). stop() waits for it and cancels it at the
        drain bound; `label` names it in the log then.
        """
        return self._calls.keep(work, label)

    def not_ready(self) -> str | None:
        """Why this server cannot serve now, or None."""
        if self._calls.stopping:
            return f"{self.name} is shutting down"
        if not self._started:
            return f"{self.name} has not started yet"
        return self._ready()

    # ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._layered(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:  # websockets: nothing here speaks them; refused before they are accepted
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            reply, detached = await self._reply(request, receive)
        except ClientLeft:
            return
        if reply.stream is not None:
            await self._stream(reply, request, receive, send, drained=detached)
            return
        try:
            await send_reply(reply, request.method, send)
        except ValueError as error:  # a handler's header that HTTP cannot carry: nothing was sent yet
            await send_reply(reply_for(error, request, typed_error, self.name), request.method, send)

    async def _stream(self, reply: Reply, request: Request, receive: Receive, send: Send, *, drained: bool) -> None:
        """Send a streamed reply. One that does not come to its end is left without end: the server below cuts it."""
        assert reply.stream is not None
        where = f"{request.method} {request.path}"
        try:
            fields = raw_headers(reply, PROTOCOL_FIELD)
            if self._calls.stopping and not drained:
                raise NotReady(f"{self.name} is shutting down")
        except (ValueError, NotReady) as error:  # nothing was sent yet
            await close_stream(reply.stream)
            await send_reply(reply_for(error, request, typed_error, self.name), request.method, send)
            return
        try:
            await self._calls.attached(
                lambda: send_stream(reply, fields, request.method, send), receive, drained=drained
            )
        except ClientLeft:
            return
        except TopropeError as error:
            log.warning("%s: %s: the stream was cut: %s", self.name, where, error)
        except Exception as error:  # a fault in mid-stream cannot be answered any more: it is logged, the stream is cut
            log.error("%s: %s: the stream was cut", self.name, where, exc_info=error)

    async def _reply(self, request: Request, receive: Receive) -> tuple[Reply, bool]:
        """The reply, and whether stop() lets the call run to the drain bound."""
        try:
            if request.path in HEALTH_PATHS and request.method in ("GET", "HEAD"):
                return self._health(request.path), False
            self._admit(request)
            route = self._router.find(request)
            request._body = await read_body(receive, request.headers, self.limits.max_body_bytes)
            if _holds(route.detached, request):
                label = f"{route.method} {route.path}"
                return await self._calls.detached(lambda: self._answer(route, request), label), True
            drained = _holds(route.drained, request)
            answer = self._calls.attached(lambda: self._answer(route, request), receive, drained=drained)
            return await answer, drained
        except TopropeError as error:  # a refusal of the kit, or the end of a call by stop()
            return reply_for(error, request, self._render, self.name), False

    async def _answer(self, route: Route, request: Request) -> Reply:
        try:
            return await route.handler(request)
        except Exception as error:  # every error becomes a reply; what is not ours is logged there
            return reply_for(error, request, self._render, self.name)

    def _admit(self, request: Request) -> None:
        if self._calls.stopping or not self._started:
            raise NotReady(self.not_ready() or f"{self.name} is not serving")
        if self._api_key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        header = request.headers.get("x-api-key", "")
        # Both compared always (no short circuit), each in constant time.
        if not (_same(bearer, self._api_key) | _same(header, self._api_key)):
            if self._stands_for_key is not None and self._stands_for_key(request):
                return
            raise Forbidden(
                f"{self.name}: this server wants its API key, as `authorization: Bearer <key>` or `x-api-key`",
                status=401,
            )

    def _health(self, path: str) -> Reply:
        about = {"status": "ok", "name": self.name, "role": self.role}
        if path == "/readyz" and (reason := self.not_ready()) is not None:
            return typed_error(NotReady(reason))
        return json_reply(about)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as error:  # told to the server that runs us, which ends the process
                    log.error("%s did not start", self.name, exc_info=error)
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                try:
                    await self.stop()
                except Exception as error:  # as above
                    log.error("%s did not stop cleanly", self.name, exc_info=error)
                    await send({"type": "lifespan.shutdown.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.shutdown.complete"})
                return


def _holds(rule: bool | Callable[[Request], bool], request: Request) -> bool:
    return rule if isinstance(rule, bool) else rule(request)


def _same(given: str, key: bytes) -> bool:
    return hmac.compare_digest(given.encode("utf-8"), key)


def build_app(
    *,
    name: str,
    role: str,
    routes: Iterable[Route],
    ready: Callable[[], str | None] = always_ready,
    startup: Hook | None = None,
    shutdown: Hook | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    stands_for_key: Callable[[Request], bool] | None = None,
    render_error: RenderError | None = None,
) -> ServerApp:
    """A server named `name` in `role`, with every layer of the kit installed.

    `ready` gives the reason why it cannot serve yet, or None. `startup` runs once before the first request is
    admitted, `shutdown` once after the last one ended. `stands_for_key` says whether a request without `api_key` may
    pass by what else it carries. `render_error` replaces the typed error body. Raises `ValueError` for a route given
    twice or one that would hide a health route.
    """
    listed = list(routes)
    for route in listed:
        if route.path in HEALTH_PATHS and route.method.upper() in ("GET", "HEAD"):
            raise ValueError(f"{name}: GET {route.path} is a health route of every server and cannot be given")
    return ServerApp(
        name=name,
        role=role,
        router=Router(listed),
        ready=ready,
        startup=startup,
        shutdown=shutdown,
        limits=limits or Limits(),
        api_key=api_key,
        stands_for_key=stands_for_key,
        render_error=render_error or typed_error,
    )

"""The model server: one engine behind the dialects, every call tied to its rollout, captured before it is answered.

One call, in this order: parse once; identity; `before_call`; with capture the intent, durable before anything goes
upstream; the engine; with capture the record, durable before the reply; `after_call`; the reply in the client's
dialect. After dispatch a capture failure never fails the call: the recorder marks the rollout. Left to others: what
dialects mean (`toprope.dialects`), tokens and parents (`toprope.capture.recorder`), engines (`engines`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from toprope.canonical.digest import digest_bytes
from toprope.capture.recorder import Recorder
from toprope.correlation.context import bound_rollout, current_rollout
from toprope.correlation.ids import mint_model_call_id
from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest, ConfigError, RefusedError, TopropeError
from toprope.http.app import Limits, ServerApp, build_app
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.routing import Route
from toprope.protocol.headers import CLIENT_SESSION, INCLUDE
from toprope.servers.model.call import ModelCall
from toprope.servers.model.custody import Custody, abort_reason
from toprope.servers.model.engines.base import Dialect, Engine, EngineReply, EngineRequest, NamesModel
from toprope.servers.model.identity import SESSION_ROUTE, IdentityPlaces
from toprope.servers.model.notes import CallNotes
from toprope.servers.model.replies import finished, render_error, render_reply, response_id
from toprope.telemetry.calls import CallLog
from toprope.wire.fields import read_object
from toprope.wire.responses import ResponsesRequest

log = logging.getLogger(__name__)

_READ: dict[Dialect, Callable[[dict[str, Any]], ResponsesRequest]] = {
    "chat": request_from_chat,
    "responses": request_from_responses,
}


class ModelServer:
    """A model server named `name` in front of `engine`; `app` is its server, whose start and stop are the engine's.

    `recorder` keeps what captured calls sampled; without one a call on a capture path is refused. `identity` names
    further places of an identity (`header`, `api_key`, `session_path`), `capture_unprefixed` captures calls that were
    identified there. `return_token_ids` gives every caller the token triple, as native agents want it. `api_key` is
    asked of every caller.

    Subclasses override `chat_completions` or `responses` (calling `super()` or `answer`), the hooks `before_call` and
    `after_call`, or `routes`; `current_rollout_id()` answers in all of them.
    """

    non_generating: frozenset[str] = frozenset({"/v1/models"})
    """Paths whose answers hold nothing sampled: under a capture prefix they leave the rollout clean."""

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        recorder: Recorder | None = None,
        identity: Sequence[str] = (),
        capture_unprefixed: bool = False,
        return_token_ids: bool = False,
        call_log: CallLog | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if api_key is not None and "api_key" in identity:
            raise ConfigError(
                f"{name}: the API key cannot be both this server's secret and the caller's identity; "
                "give either `api_key` or `identity: [api_key]`"
            )
        self.name = name
        self.engine = engine
        self._custody = Custody(recorder, server=name, logprobs_mode=engine.capabilities.logprobs_mode)
        self._identity = IdentityPlaces(identity, capture=capture_unprefixed)
        self._return_token_ids = return_token_ids
        self._notes = CallNotes(call_log, server=name, clock=clock)
        self._clock = clock
        self.app: ServerApp = build_app(
            name=name,
            role="model",
            routes=[self._guarded(route) for route in self.routes()],
            startup=engine.start,
            shutdown=engine.close,
            limits=limits,
            api_key=api_key,
            render_error=self.render_error,
        )

    # What a subclass may replace

    def routes(self) -> list[Route]:
        """The routes of this server. Each runs with its rollout bound; captured requests run to their end."""
        heads = ["", SESSION_ROUTE] if self._identity.session_path else [""]
        return [
            route
            for head in heads
            for route in (
                Route("POST", f"{head}/v1/chat/completions", self.chat_completions),
                Route("POST", f"{head}/v1/responses", self.responses),
                Route("GET", f"{head}/v1/models", self.models),
            )
        ]

    async def chat_completions(self, request: Request) -> Reply:
        """`POST /v1/chat/completions`. An override that answers by itself leaves a captured rollout incomplete."""
        return await self.answer("chat", request)

    async def responses(self, request: Request) -> Reply:
        """`POST /v1/responses`, likewise."""
        return await self.answer("responses", request)

    async def models(self, request: Request) -> Reply:
        """`GET /v1/models`: the one model that the engine serves, under the server's name if it has none."""
        model = self.engine.model if isinstance(self.engine, NamesModel) else None
        entry = {"id": model or self.name, "object": "model", "created": 0, "owned_by": "toprope"}
        return json_reply({"object": "list", "data": [entry]})

    async def before_call(self, call: ModelCall) -> None:
        """Runs before anything is recorded or sent. Raising a `RefusedError` refuses the call."""

    async def after_call(self, call: ModelCall, reply: EngineReply) -> None:
        """Runs when the call is on record, before the reply leaves. What it raises is logged and changes nothing."""

    def render_error(self, error: TopropeError, request: Request | None) -> Reply:
        """An error in the shape that the called dialect's clients read."""
        return render_error(error, request)

    # One call

    async def answer(self, dialect: Dialect, request: Request) -> Reply:
        """Serve one call of `dialect` whole; what `chat_completions` and `responses` do unless overridden."""
        call_id, started = mint_model_call_id(), self._clock()
        try:
            call = await self._read(dialect, request, call_id, started)
            await self._admit(call)
            made = await self._generate(call)
        except Exception as error:  # noted here, answered by the kit
            self._notes.failed(dialect, request, call_id, started, error)
            raise
        self._notes.answered(call, made)
        try:
            await self.after_call(call, made)
        except Exception:  # the turn is on record and paid for: an observer's fault does not take it away
            log.exception("%s: after_call raised for %s", self.name, call_id)
        return render_reply(call, made)

    async def _read(self, dialect: Dialect, request: Request, call_id: str, started: float) -> ModelCall:
        data = await request.body()
        body = read_object(data)
        pivot = _READ[dialect](body)
        if pivot.stream:
            raise BadRequest(
                "stream: true is not supported by this server yet; send stream: false for the whole reply", status=400
            )
        bound = current_rollout()
        key = None if bound is None else bound.key
        client_session = request.headers.get(CLIENT_SESSION)
        asked = request.headers.get(INCLUDE)
        count = request.headers.get("x-stainless-retry-count", "")
        return ModelCall(
            call_id=call_id,
            dialect=dialect,
            request=pivot,
            body=body,
            request_digest=digest_bytes(data),
            rollout_id=key,
            captured=bound is not None and bound.capture,
            session=client_session or key,
            client_session_id=client_session,
            include_tokens=self._return_token_ids or (asked is not None and "token_ids" in _words(asked)),
            retry_count=int(count) if count.isascii() and count.isdigit() else None,
            started=started,
        )

    async def _admit(self, call: ModelCall) -> None:
        """Refuse what must not be dispatched. A refusal ends the trajectory, so that of a captured call is recorded."""
        if call.captured:
            self._custody.require()
        try:
            await self.before_call(call)
        except RefusedError as refusal:
            await self._custody.begin(call)
            await self._custody.abort(call, f"truncated:{refusal.kind}")
            raise

    async def _generate(self, call: ModelCall) -> EngineReply:
        await self._custody.begin(call)
        try:
            made = await self.engine.generate(
                EngineRequest(call.request, call.call_id, call.session, call.want_tokens, call.dialect, call.body)
            )
        except BaseException as error:
            await self._custody.abort(call, abort_reason(error))
            raise
        made = finished(call, made)
        await self._custody.record(call, made, response_id(call))
        return made

    def _guarded(self, route: Route) -> Route:
        """The route with the request's identity bound, and with an eye on answers that went round the recorder."""

        def is_captured(request: Request) -> bool:
            bound = self._identity.of(request)
            return bound is not None and bound.capture

        async def handler(request: Request) -> Reply:
            bound = self._identity.of(request)
            with bound_rollout(bound), self._custody.watched() as begun:
                reply = await route.handler(request)
            silent = not begun and reply.status < 400 and not _ends_in(request.path, self.non_generating)
            if silent and bound is not None and bound.capture:
                await self._custody.unobserved(bound, request.method, request.path)
            return reply

        return Route(route.method, route.path, handler, is_captured)


def _words(value: str) -> set[str]:
    return {word.strip() for word in value.split(",")}


def _ends_in(path: str, tails: frozenset[str]) -> bool:
    return any(path.endswith(tail) for tail in tails)

"""The model server: one engine behind three dialects, every call tied to its rollout, captured before it is answered.

One call, in this order: parse once; identity; with capture the intent, durable before anything goes upstream; a retry
is answered from the record; `before_call`, budgets; the engine; with capture the record, durable before the reply ends;
`after_call`; the reply in the client's dialect. After dispatch a capture failure never fails the call: the recorder
marks the rollout. Left to others: what dialects mean (`toprope.dialects`), one dispatched call (`turns`), its stream
(`streams`), retries (`repeats`), tokens and parents (`toprope.capture.recorder`), engines (`engines`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from toprope.capture.recorder import Recorder
from toprope.correlation.context import bound_rollout
from toprope.correlation.ids import mint_model_call_id
from toprope.dialects.models import models_reply
from toprope.errors.tree import ConfigError, TopropeError
from toprope.http.app import Limits, ServerApp, build_app
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.routing import Route
from toprope.http.streaming import streaming_reply
from toprope.servers.model.admin import Admin, StaleRollouts
from toprope.servers.model.budgets import Budgets, ReadRecord, RolloutLimits
from toprope.servers.model.call import ModelCall
from toprope.servers.model.custody import Custody, abort_reason
from toprope.servers.model.engines.base import ContinuesTurns, Dialect, Engine, EngineReply, NamesModel
from toprope.servers.model.identity import SESSION_ROUTE, IdentityPlaces
from toprope.servers.model.notes import CallNotes
from toprope.servers.model.reading import CallReader
from toprope.servers.model.repeats import Repeats
from toprope.servers.model.replies import pivot_reply, recorded_reply, render_error, render_reply, stream_writer
from toprope.servers.model.retries import NOT_SENT
from toprope.servers.model.streams import HeldStream, TurnStream
from toprope.servers.model.token_in.supply import TokenIn, TokenInMode
from toprope.servers.model.turns import Turns
from toprope.servers.model.weights import WeightVersions
from toprope.telemetry.calls import CallLog


class ModelServer:
    """A model server named `name` in front of `engine`; `app` is its server, whose start and stop are the engine's.

    `recorder` keeps what captured calls sampled; without one a call on a capture path is refused. `identity` names
    further places of an identity (`header`, `api_key`, `session_path`), `capture_unprefixed` captures calls that were
    identified there. `return_token_ids` gives every caller the token triple, as native agents want it. `budget` bounds
    each rollout. `api_key` is asked of every caller, `admin_key` of a trainer. `limits.drain_s` also bounds how long a
    captured call goes on whose client left; a stream that is silent for `keep_alive_s` says so. `token_in` builds a
    captured turn from the recorded ids of the one before, where the engine takes them: `auto` lets the engine render
    what cannot be built so, `required` refuses it; `token_in_renderer` renders what is new, where the engine cannot.

    Subclasses override `chat_completions`, `responses` or `messages` (calling `super()` or `answer`), the hooks
    `before_call` and `after_call`, or `routes`; `current_rollout_id()` answers in all of them.
    """

    non_generating: frozenset[str] = frozenset({"/v1/models", "/v1/messages/count_tokens"})
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
        budget: RolloutLimits | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        keep_alive_s: float = 15.0,
        token_in: TokenInMode = "auto",
        token_in_renderer: ContinuesTurns | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if api_key is not None and "api_key" in identity:
            raise ConfigError(
                f"{name}: the API key cannot be both this server's secret and the caller's identity; "
                "give either `api_key` or `identity: [api_key]`"
            )
        self.name = name
        self.engine = engine
        self.weights = WeightVersions()
        limits = limits or Limits()
        self._recorder = recorder
        self._custody = Custody(recorder, server=name, logprobs_mode=engine.capabilities.logprobs_mode)
        self._identity = IdentityPlaces(identity, capture=capture_unprefixed)
        self._notes = CallNotes(call_log, server=name, clock=clock)
        self._reader = CallReader(recorder, self.weights, return_token_ids=return_token_ids)
        self._repeats = Repeats(recorder, drain_s=limits.drain_s)
        self._budgets = Budgets(budget or RolloutLimits())
        self._stale = StaleRollouts(recorder if admin_key is not None else None)
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._token_in = TokenIn(token_in, server=name, engine=engine, recorder=recorder, renderer=token_in_renderer)
        self._turns = Turns(
            engine=engine,
            custody=self._custody,
            token_in=self._token_in,
            repeats=self._repeats,
            notes=self._notes,
            weights=self.weights,
            budgets=self._budgets,
            after_call=lambda call, made: self.after_call(call, made),
            detach=lambda work, label: self.app.detach(work, label),
            drain_s=limits.drain_s,
            clock=clock,
        )
        admin = Admin(admin_key, weights=self.weights, stale=self._stale, in_flight=lambda: self._turns.running)
        self.app: ServerApp = build_app(
            name=name,
            role="model",
            routes=[*(self._guarded(route) for route in self.routes()), *admin.routes()],
            startup=self._start,
            shutdown=engine.close,
            limits=limits,
            api_key=api_key,
            render_error=self.render_error,
        )

    async def _start(self) -> None:
        await self.engine.start()
        try:
            self._token_in.check()
        except ConfigError:
            await self.engine.close()
            raise

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
                Route("POST", f"{head}/v1/messages", self.messages),
                Route("POST", f"{head}/v1/messages/count_tokens", self.count_tokens),
                # What a base URL that ends with /v1 becomes in libraries that add theirs.
                Route("POST", f"{head}/v1/v1/messages", self.messages),
                Route("POST", f"{head}/v1/v1/messages/count_tokens", self.count_tokens),
                Route("GET", f"{head}/v1/models", self.models),
            )
        ]

    async def chat_completions(self, request: Request) -> Reply:
        """`POST /v1/chat/completions`. An override that answers by itself leaves a captured rollout incomplete."""
        return await self.answer("chat", request)

    async def responses(self, request: Request) -> Reply:
        """`POST /v1/responses`, likewise."""
        return await self.answer("responses", request)

    async def messages(self, request: Request) -> Reply:
        """`POST /v1/messages`, likewise."""
        return await self.answer("messages", request)

    async def count_tokens(self, request: Request) -> Reply:
        """`POST /v1/messages/count_tokens`: the engine's own count, or an estimate that is marked as one."""
        return await self._reader.count_tokens(request, self.engine)

    async def models(self, request: Request) -> Reply:
        """`GET /v1/models`: the one model that the engine serves, under the server's name if it has none."""
        return json_reply(models_reply([self._model]))

    @property
    def _model(self) -> str:
        return (self.engine.model if isinstance(self.engine, NamesModel) else None) or self.name

    async def before_call(self, call: ModelCall) -> None:
        """Runs before anything is sent. Raising a `RefusedError` refuses the call, which ends a captured trajectory."""

    async def after_call(self, call: ModelCall, reply: EngineReply) -> None:
        """Runs when the call is on record, before the end of the reply leaves. What it raises is logged and changes
        nothing. Not run for a retry that is answered from the record."""

    def render_error(self, error: TopropeError, request: Request | None) -> Reply:
        """An error in the shape that the called dialect's clients read."""
        return render_error(error, request)

    # One call

    async def answer(self, dialect: Dialect, request: Request) -> Reply:
        """Serve one call of `dialect`; what `chat_completions`, `responses` and `messages` do unless overridden."""
        call_id, started = mint_model_call_id(), self._clock()
        try:
            call = await self._reader.read(dialect, request, call_id, started)
            await self._repeats.check_key(call)
            try:
                await self._custody.begin(call)
            except BaseException:  # its intent may stand all the same, and no retry need wait for it
                self._repeats.ended(call)
                raise
        except Exception as error:  # noted here, answered by the kit
            self._notes.failed(dialect, request, call_id, started, error)
            raise
        if not (call.stream and self._repeats.may_be_one(call)):
            return await self._serve(call, request)
        work = self.app.detach(self._serve(call, request), f"reply of {call_id}")
        held = HeldStream(work, dialect, self._keep_alive_s)
        return await held.ready() or streaming_reply(held)

    async def _serve(self, call: ModelCall, request: Request) -> Reply:
        """The reply to a call that was begun: from the record, or the engine's."""
        try:
            replayed = await self._from_record(call)
            if replayed is not None:
                return replayed
            await self._admit(call)
        except Exception as error:  # as above
            self._notes.failed(call.dialect, request, call.call_id, call.started, error)
            raise
        if not call.stream:
            return render_reply(call, await self._turns.whole(call))
        turn = self._turns.streamed(call)
        stream = TurnStream(
            turn,
            stream_writer(call, call.request.model or self._model),
            lambda made: pivot_reply(call, made),
            turns=self._turns,
            keep_alive_s=self._keep_alive_s,
        )
        await stream.ready()
        return streaming_reply(stream)

    async def _from_record(self, call: ModelCall) -> Reply | None:
        entry = await self._repeats.answer(call)
        if entry is None:
            return None
        first, made = recorded_reply(call, entry)
        self._notes.answered(call, made, replay_of=entry.model_call_id)
        return render_reply(first, made)

    async def _admit(self, call: ModelCall) -> None:
        """Refuse what must not be dispatched. A refusal ends the trajectory, so that of a captured call is recorded."""
        try:
            await self._stale.check(call)
            await self.before_call(call)
            await self._budgets.admit(call, self._record_of(call))
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            await self._custody.abort(call, NOT_SENT if cancelled else abort_reason(error))
            self._repeats.ended(call)
            raise

    def _record_of(self, call: ModelCall) -> ReadRecord | None:
        recorder = self._recorder
        return recorder.recorded if call.captured and recorder is not None and recorder.readable else None

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

        return Route(route.method, route.path, handler, drained=is_captured)


def _ends_in(path: str, tails: frozenset[str]) -> bool:
    return any(path.endswith(tail) for tail in tails)

"""The agent server: one agent behind HTTP. Seeds, activations, closes.

    POST /v1/agent_sessions, /v1/responses, /v1/agent_sessions/close

An activation belongs to its session and to its session's rollout; the client's leaving does not end it, the session's
close does. Left to others: the life of a session (`servers.sessions`), numbers of activations (`activations`), what
the agent does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from toprope.canonical.digest import digest_bytes
from toprope.errors.body import error_body, said_by, shorten
from toprope.errors.kinds import Kind
from toprope.errors.tree import BadRequest, TopropeError
from toprope.http.app import Limits, Route, build_app
from toprope.http.client import Client, Peer
from toprope.http.headers import whole_number
from toprope.http.jsonbody import decode_any, encode
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.protocol.grants import Stdio
from toprope.protocol.headers import ACTIVATION, SHOULD_RETRY
from toprope.protocol.sessions import (
    AgentCloseSessionRequest,
    AgentCloseSessionResponse,
    AgentObservations,
    AgentSeedSessionRequest,
    AgentSeedSessionResponse,
)
from toprope.sandbox.desk import SandboxDesk
from toprope.servers.agent.activations import Activations
from toprope.servers.agent.agent import Activation, Agent, ModelAccess, Observations
from toprope.servers.agent.sandboxes import AgentSandboxes, SessionSandbox
from toprope.servers.authored import plain_errors, text_of
from toprope.servers.session_door import SessionDoor, check_key, close_token, lease_s, working_for
from toprope.servers.sessions import SeedCall, Session, SessionRegistry, payload_digest
from toprope.tools.access import ToolAccess
from toprope.tools.workers import contained


@dataclass(slots=True)
class AgentState:
    """What one agent session holds."""

    tools: ToolAccess
    observations: Observations
    activations: Activations = field(default_factory=Activations)
    current: Activation | None = None
    ended: bool = True
    session_id: str = ""
    sandbox: SessionSandbox | None = None


class AgentServer:
    """Serves `agent` under `name`; `.app` is the ASGI app. `model` is the agent's model server.

    `allow_sessionless` also answers `POST /v1/responses` of no session, without tools. `mcp_stdio` are the programs
    that a grant may have started here, and no other. `signing_key` signs the session cookies. `model_over_http` is the
    model server as programs of others reach it, `model_key` the key that it asks for. `sandboxes` are the providers of
    which a sandbox can be borrowed, by name; `own_sandbox` makes one for a session that was lent none.
    """

    def __init__(
        self,
        *,
        name: str,
        agent: Agent,
        model: Peer,
        client: Client,
        signing_key: bytes,
        allow_sessionless: bool = False,
        max_steps: int | None = None,
        session_ttl_s: float = 900.0,
        max_sessions: int | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        mcp_stdio: Collection[Stdio] = (),
        model_over_http: Peer | None = None,
        model_key: str | None = None,
        sandboxes: Mapping[str, SandboxDesk] | None = None,
        own_sandbox: SandboxDesk | None = None,
    ) -> None:
        self.name = name
        self.agent = agent
        self._mcp_stdio = tuple(mcp_stdio)
        self._model_over_http = model_over_http
        self._model_key = model_key
        self._ttl_s = session_ttl_s
        self._sandboxes = AgentSandboxes(name, agent, sandboxes or {}, own_sandbox)
        self.sessions: SessionRegistry[AgentState] = SessionRegistry(
            noun="agent",
            release=self._release,
            quiesce=_quiesce,
            ttl_s=session_ttl_s,
            max_sessions=max_sessions,
        )
        self._model = model
        self._client = client
        self._door = SessionDoor(signing_key)
        self._allow_sessionless = allow_sessionless
        self._max_steps = max_steps
        self._sweeper: asyncio.Task[None] | None = None
        self.app = build_app(
            name=name,
            role="agent",
            routes=[
                Route("POST", "/v1/agent_sessions", self._seed, detached=True),
                Route("POST", "/v1/agent_sessions/close", self._close, detached=True),
                Route("POST", "/v1/responses", self._respond, detached=self._is_bound),
            ],
            startup=self._start,
            shutdown=self._stop,
            limits=limits,
            api_key=api_key,
        )

    async def _start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self.sessions.sweep_forever())

    async def _stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.sessions.release_all()

    # -- sessions ------------------------------------------------------------------------------------------------

    async def _seed(self, request: Request) -> Reply:
        seed = await request.decode(AgentSeedSessionRequest)
        key = seed.episode_id.key
        check_key(request, key)
        payload = payload_digest(seed)
        call = SeedCall(seed.agent_session_id, key, payload, close_token(request), lease_s(request))
        with working_for(key):
            answer = await self.sessions.seed(call, partial(self._allocate, seed, max(call.lease_s, self._ttl_s)))
        return json_reply(answer, cookies=self._door.cookies(seed.agent_session_id))

    async def _allocate(
        self, seed: AgentSeedSessionRequest, life_s: float
    ) -> tuple[AgentState, AgentSeedSessionResponse]:
        tools = await ToolAccess.open(seed.tool_accesses, self._client, stdio=self._mcp_stdio)
        observations = Observations(self.name)
        for gap in tools.gaps:
            observations.gap(gap)
        try:
            sandbox = await self._sandboxes.open(seed.sandbox_access, observations, life_s=life_s)
        except BaseException:
            await tools.close()
            raise
        state = AgentState(tools, observations, session_id=seed.agent_session_id, sandbox=sandbox)
        return state, AgentSeedSessionResponse(seed.agent_session_id)

    async def _close(self, request: Request) -> Reply:
        close = await request.decode(AgentCloseSessionRequest)
        check_key(request, close.episode_id.key)
        receipt = await self.sessions.close(close.agent_session_id, close_token(request))
        kept: AgentCloseSessionResponse = receipt.value or AgentCloseSessionResponse(close.agent_session_id)
        extended = request.speaks_protocol
        return json_reply(
            msgspec.structs.replace(
                kept,
                outcome=receipt.outcome if extended else None,
                partial_response=kept.partial_response if extended else None,
            )
        )

    async def _release(self, session: Session[AgentState]) -> AgentCloseSessionResponse:
        state = session.value
        assert state is not None
        partial = state.current.partial if state.current is not None and not state.ended else None
        await state.tools.close()  # first: it never fails, and a sandbox may
        if state.sandbox is not None:
            await state.sandbox.end()
        had: dict[str, Any] | None = None
        try:
            had = None if partial is None else await contained(_plain(partial))
        except Exception as error:  # an agent's own code: what it cannot say must not keep its session open
            state.observations.gap(f"the partial response could not be had: {said_by(error)}")
        return AgentCloseSessionResponse(
            session.session_id,
            await _told(state.observations.snapshot()),
            state.tools.resources_cookies,
            partial_response=had,
        )

    # -- activations ---------------------------------------------------------------------------------------------

    def _is_bound(self, request: Request) -> bool:
        return self._door.session_id(request) is not None

    async def _respond(self, request: Request) -> Reply:
        body = await request.json()
        if not isinstance(body, dict) or not isinstance(body.get("input"), str | list):
            raise BadRequest("POST /v1/responses: input: a string or a list of items is needed")
        session_id = self._door.session_id(request)
        if session_id is None:
            return await self._respond_alone(request, body)
        number = _activation_number(request)
        rollout = request.rollout
        with (
            self.sessions.use(session_id, key=rollout.key if rollout else None) as session,
            working_for(session.key),
        ):
            state = session.value
            assert state is not None
            digest = digest_bytes(await request.body())
            start = partial(self._activate, state, body, request.speaks_protocol)
            reply: Reply = await state.activations.run(number, digest, start)
            return reply

    async def _activate(self, state: AgentState, body: dict[str, Any], extended: bool, number: int) -> Reply:
        model = self._model_access()
        activation = Activation(
            body,
            model,
            state.tools,
            state.observations,
            number,
            self._max_steps,
            extended,
            session_id=state.session_id,
            sandbox=None if state.sandbox is None else state.sandbox.handle,
        )
        state.current, state.ended = activation, False
        record = state.observations.record("invocation", number=number, status="cancelled")
        activation.invocation = record
        try:
            if state.tools.speaks_mcp:
                activation.request = {**body, "tools": state.tools.offered(body.get("tools") or [])}
            record["status"], reply = await contained(self._answered(activation))
            state.ended = True
            return reply
        except Exception as error:  # the outcome of the activation: kept, and answered again to its retries
            failure = self._failure(error)
            record["status"], record["error"] = "failed", str(failure.kind)
            # To send this activation again gives this failure again; whether the episode is worth another attempt
            # stands in the body.
            return json_reply(error_body(failure), failure.status, headers={SHOULD_RETRY: "false"})
        finally:
            record["model_calls"] = model.calls

    async def _answered(self, activation: Activation) -> tuple[str, Reply]:
        """The agent's answer, its status first. Its response, and what it raises, may be code: run it contained."""
        with plain_errors(self.name):
            response = await self.agent.respond(activation)
            return text_of(response.get("status", "completed")), json_reply(response)

    async def _respond_alone(self, request: Request, body: dict[str, Any]) -> Reply:
        if not self._allow_sessionless:
            raise BadRequest(
                "POST /v1/responses: no session is named; send x-toprope-session or the cookie of the seed reply "
                "(allow_sessionless lets this agent answer without one)"
            )
        observations = Observations(self.name)
        sandbox = await self._sandboxes.open(None, observations, life_s=self._ttl_s)
        activation = Activation(
            body,
            self._model_access(),
            ToolAccess(),
            observations,
            max_steps=self._max_steps,
            extended=request.speaks_protocol,
            sandbox=None if sandbox is None else sandbox.handle,
        )
        try:
            return (await contained(self._answered(activation)))[1]
        except Exception as error:  # as for an activation of a session
            raise self._failure(error) from error
        finally:
            if sandbox is not None:
                await asyncio.shield(sandbox.end())

    def _model_access(self) -> ModelAccess:
        return ModelAccess(self._model, over_http=self._model_over_http, api_key=self._model_key)

    def _failure(self, error: Exception) -> TopropeError:
        if isinstance(error, TopropeError):
            # A refusal by somebody behind the agent is no refusal by the agent: the body says whether it can be
            # tried again, the status only that this activation brought nothing.
            return error if error.status >= 500 else _restated(error)
        message = f"{self.name}: {said_by(error)}"
        return TopropeError(message, kind=Kind.AGENT_FAILED, status=500, retryable=True)


def _restated(error: TopropeError) -> TopropeError:
    return TopropeError(
        error.message,
        kind=error.kind,
        status=502,
        retryable=error.retryable,
        stage=error.stage,
        delivery=error.delivery,
        upstream_status=error.upstream_status or error.status,
    )


async def _plain(give: Callable[[], Any]) -> Any:
    """What `give` gives, as plain values. Runs an agent's code: await it contained."""
    return decode_any(encode(give()))


async def _told(seen: AgentObservations) -> AgentObservations:
    """`seen` as plain values. An agent may add what cannot be written: then that is a gap, and the rest is told."""
    records: list[dict[str, Any]] = []
    gaps: list[str] = []
    for record in seen.records:
        try:
            records.append(await contained(_plain(partial(dict, record))))
        except Exception as error:  # as for the partial response
            gaps.append(f"a record of what the agent did could not be written: {said_by(error)}")
    for gap in seen.gaps:
        try:
            gaps.append(text_of(await contained(_plain(partial(text_of, gap)))))
        except Exception as error:
            gaps.append(f"a gap could not be told: {said_by(error)}")
    return AgentObservations(seen.source, records, gaps)


def _quiesce(session: Session[AgentState]) -> None:
    if session.value is not None:
        session.value.activations.stop()


def _activation_number(request: Request) -> int | None:
    text = request.headers.get(ACTIVATION)
    if text is None:
        return None
    number = whole_number(text)
    if number is None:
        raise BadRequest(f"{ACTIVATION}: {shorten(text, 40)!r} is not a number")
    return number

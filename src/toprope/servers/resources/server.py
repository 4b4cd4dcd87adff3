"""The resources server: one environment behind HTTP. Seeds, tools, verify, close.

    POST /seed_session, /<tool>, /verify, /close_session [, /mcp] [, /aggregate_metrics]

Tools of one session run one at a time unless the environment says otherwise. A session that was seeded with a close
token verifies and closes only with it, so that an agent which holds the session's name can do neither. What a grant
carries is a credential for tools only (`credentials`). Left to others: the life of a session (`servers.sessions`), MCP
(`mcp`), what a verdict is worth (whoever reads the reply).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from toprope.errors.body import error_body
from toprope.errors.kinds import Kind
from toprope.errors.tree import BadRequest, ConfigError, NotFound, SessionLost, ToolError, TopropeError
from toprope.http.app import Limits, Route, build_app
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.protocol.headers import TOOLS
from toprope.protocol.sessions import (
    ResourcesCloseSessionRequest,
    ResourcesCloseSessionResponse,
    ResourcesSeedSessionRequest,
    ResourcesSeedSessionResponse,
    ResourcesTools,
)
from toprope.sandbox.desk import SandboxDesk
from toprope.servers.resources.author import handle_reader, json_reader, names_reader, run_author
from toprope.servers.resources.credentials import ToolCredentials
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.sandboxes import SessionSandboxes
from toprope.servers.resources.verdict import verify_reply
from toprope.servers.session_door import SessionDoor, check_key, close_token, lease_s, working_for
from toprope.servers.session_table import State
from toprope.servers.sessions import SeedCall, Session, SessionRegistry, payload_digest
from toprope.tools.spec import TOOL_ERROR_TYPE, ToolSpec
from toprope.tools.workers import WorkerThreads

if TYPE_CHECKING:
    from toprope.servers.resources.mcp import McpDoor

log = logging.getLogger("toprope.resources")

# Plain functions that run longer are named in the log: a thread that never ends is lost to the pool.
STUCK_AFTER_S = 60.0
_OWN_VERIFY_FIELDS = ("response", "responses_create_params")
# What an agent must not reach with what a grant carries.
_CLOSED_TO_TOOLS = ("/seed_session", "/verify", "/close_session", "/aggregate_metrics")
MCP_MISSING = "MCP needs the official SDK, which is not installed; `pip install toprope[mcp]` brings it"


@dataclass(frozen=True, slots=True)
class _Held:
    """What a session holds: the author's state, and the tools it may call (None: all)."""

    state: Any
    tools: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Seeded:
    """The answer to a seed, and the credential that goes with it."""

    answer: ResourcesSeedSessionResponse
    credential: str


_NOTHING = _Held(None, None)


class ResourcesServer:
    """Serves `environment` under `name`; `.app` is the ASGI app. `signing_key` signs the session cookies.

    `sandboxes` makes the sandbox of each session, for an environment that wants one; it is opened and closed by whoever
    gives it. `mcp` also serves the tools over MCP, at `/mcp`; raises `ConfigError` where the SDK is not installed.
    """

    def __init__(
        self,
        *,
        name: str,
        environment: Environment,
        signing_key: bytes,
        session_ttl_s: float = 900.0,
        max_sessions: int | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        sandboxes: SandboxDesk | None = None,
        mcp: bool = False,
    ) -> None:
        limits = limits or Limits()
        self.name = name
        self.environment = environment
        self.sandboxes = SessionSandboxes(name, environment, sandboxes)
        self.tools = dict(environment.tools)
        self._ttl_s = session_ttl_s
        self.workers = WorkerThreads(environment.worker_threads, name=f"toprope-{name}")
        self.sessions: SessionRegistry[_Held] = SessionRegistry(
            noun="resources", release=self._release, ttl_s=session_ttl_s, max_sessions=max_sessions
        )
        self._door = SessionDoor(signing_key)
        self._credentials = ToolCredentials(_CLOSED_TO_TOOLS)
        self._mcp = self._mcp_door(limits) if mcp else None
        self._watchers: list[asyncio.Task[None]] = []
        routes = [
            Route("POST", "/seed_session", self._seed, detached=True),
            Route("POST", "/verify", self._verify),
            Route("POST", "/close_session", self._close, detached=True),
            Route("POST", "/aggregate_metrics", self._aggregate),
        ]
        routes += [Route("POST", f"/{tool}", partial(self._tool, spec)) for tool, spec in self.tools.items()]
        if self._mcp is not None:
            routes.append(Route("POST", "/mcp", self._mcp.handle))
        self.app = build_app(
            name=name,
            role="resources",
            routes=routes,
            startup=self._start,
            shutdown=self._stop,
            limits=limits,
            api_key=api_key,
            stands_for_key=self._credentials.stands_for_key,
        )

    def _mcp_door(self, limits: Limits) -> McpDoor:
        if find_spec("mcp") is None:
            raise ConfigError(f"{self.name}: {MCP_MISSING}")
        from toprope.servers.resources.mcp import McpDoor  # the SDK takes most of a second to import

        return McpDoor(name=self.name, tools_of=self._tools_of, run=self._run, max_body_bytes=limits.max_body_bytes)

    async def _start(self) -> None:
        if self._mcp is not None:
            await self._mcp.start()
        loop = asyncio.get_running_loop()
        self._watchers = [loop.create_task(self.sessions.sweep_forever()), loop.create_task(self._watch_workers())]

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(STUCK_AFTER_S)
            if stuck := self.workers.stuck(STUCK_AFTER_S):
                log.warning(
                    "%s: %d of %d worker threads have run one call for over %g s",
                    self.name,
                    stuck,
                    self.workers.size,
                    STUCK_AFTER_S,
                )

    async def _stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        if self._mcp is not None:
            await self._mcp.stop()
        await self.sessions.release_all()
        await self.sandboxes.stop_all()
        self.workers.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    async def _seed(self, request: Request) -> Reply:
        self._credentials.refuse(request)
        seed = await request.decode(ResourcesSeedSessionRequest)
        key = seed.episode_id.key
        check_key(request, key)
        call = SeedCall(
            seed.resources_session_id,
            key,
            payload_digest(seed),
            close_token(request),
            lease_s(request),
        )
        with working_for(key):
            allocate = partial(self._allocate, seed, max(call.lease_s, self._ttl_s))
            seeded: _Seeded = await self.sessions.seed(call, allocate)
        cookies = self._door.cookies(seed.resources_session_id)
        if not request.speaks_protocol:
            return json_reply(msgspec.structs.replace(seeded.answer, env_session_id=None), cookies=cookies)
        return json_reply(seeded.answer, headers={TOOLS: seeded.credential}, cookies=cookies)

    async def _allocate(self, seed: ResourcesSeedSessionRequest, life_s: float) -> tuple[_Held, _Seeded]:
        session_id = seed.resources_session_id
        own: dict[str, Any] = {}
        if self.sandboxes.wanted is not None:
            own["sandbox"] = await self.sandboxes.make(session_id, life_s=life_s)
        state, made = None, False
        try:
            if self.environment.stateful:
                given: partial[dict[str, Any]] = partial(dict, own)
                state = await self._author("seed", Kind.SEED_FAILED, self.environment.seed, seed.task_data, given=given)
                made = True
            tools = await self._allowed(state, seed.task_data)
            handle = await self._handle(state)
        except BaseException:
            try:
                if made:
                    await self._give_back(state)
            except TopropeError as error:  # what the seed failed of is told, not what came of its clean-up
                log.warning("%s: session %s, whose seed failed: %s", self.name, session_id, error.message)
            finally:
                await self.sandboxes.stop(session_id)
            raise
        credential = self._credentials.issue(session_id)
        answer = ResourcesSeedSessionResponse(
            session_id,
            resources_tools=None if self._mcp is None else ResourcesTools(self.name, headers={TOOLS: credential}),
            sandbox_access=self.sandboxes.access(session_id),
            env_session_id=handle,
        )
        return _Held(state, tools), _Seeded(answer, credential)

    async def _handle(self, state: Any) -> str | None:
        if type(self.environment).env_session_id is Environment.env_session_id:
            return None
        asked, read = self.environment.env_session_id, handle_reader(self.name)
        handle: str | None = await self._author("env_session_id", Kind.SEED_FAILED, asked, state, read=read)
        return handle

    async def _allowed(self, state: Any, task: dict[str, Any]) -> frozenset[str] | None:
        if type(self.environment).session_tools is Environment.session_tools:
            return None
        asked, read = self.environment.session_tools, names_reader(self.name, self.tools)
        named: frozenset[str] = await self._author("session_tools", Kind.SEED_FAILED, asked, state, task, read=read)
        return named

    async def _close(self, request: Request) -> Reply:
        self._credentials.refuse(request)
        close = await request.decode(ResourcesCloseSessionRequest)
        check_key(request, close.episode_id.key)
        receipt = await self.sessions.close(close.resources_session_id, close_token(request))
        outcome = receipt.outcome if request.speaks_protocol else None
        return json_reply(ResourcesCloseSessionResponse(close.resources_session_id, outcome))

    async def _release(self, session: Session[_Held]) -> None:
        self._credentials.revoke(session.session_id)
        await self._give_back(None if session.value is None else session.value.state)
        await self.sandboxes.stop(session.session_id)

    async def _give_back(self, state: Any) -> None:
        if type(self.environment).release is not Environment.release:
            await self._author("release", Kind.SESSION_RELEASE_FAILED, self.environment.release, state)

    # -- tools and verify ----------------------------------------------------------------------------------------

    async def _tool(self, spec: ToolSpec, request: Request) -> Reply:
        try:
            value = await self._run(spec, request, await request.body())
        except ToolError as error:
            body = error_body(error)
            body["error"]["type"] = TOOL_ERROR_TYPE
            return json_reply(body, error.status)
        if isinstance(value, str):
            return text_reply(value)
        return Reply(200, value, {"content-type": "application/json"})

    async def _run(self, spec: ToolSpec, request: Request, arguments: bytes) -> bytes | str:
        """What the tool returns: a text as it is, everything else as JSON.

        Raises `ToolError` for what is the model's to read, other errors for trouble.
        """
        function = getattr(self.environment, spec.attribute)
        async with AsyncExitStack() as stack:
            held = await self._enter(stack, request, alone=self.environment.serial_tools)
            if held.tools is not None and spec.name not in held.tools:
                available = ", ".join(sorted(held.tools)) or "none"
                raise ToolError(f"no tool named {spec.name!r} in this session; available: {available}", status=404)
            what, given = f"tool {spec.name}", partial(spec.read, arguments)
            read = json_reader(self.name, what, Kind.TOOL_UNAVAILABLE, text=True)
            said: bytes | str = await self._author(
                what, Kind.TOOL_UNAVAILABLE, function, held.state, given=given, read=read
            )
        return said

    def _tools_of(self, request: Request) -> Mapping[str, ToolSpec]:
        """The tools that the request's session may call. Raises what is wrong with the session."""
        session_id = self._session_id(request)
        if session_id is None:
            return self.tools
        rollout = request.rollout
        held = self.sessions.open_session(session_id, key=rollout.key if rollout else None).value
        if held is None or held.tools is None:
            return self.tools
        return {name: spec for name, spec in self.tools.items() if name in held.tools}

    async def _verify(self, request: Request) -> Reply:
        self._credentials.refuse(request)
        body = await request.json()
        for field in _OWN_VERIFY_FIELDS:
            if not isinstance(body, dict) or not isinstance(body.get(field), dict):
                raise BadRequest(f"POST /verify: {field}: an object is needed, beside the fields of the task")
        task = {name: value for name, value in body.items() if name not in _OWN_VERIFY_FIELDS}
        async with AsyncExitStack() as stack:
            held = await self._enter(stack, request, alone=True, authorised=True)
            read = partial(verify_reply, self.name, body, extended=request.speaks_protocol)
            reply = await self._author(
                "verify", Kind.VERIFY_FAILED, self.environment.verify, held.state, task, body["response"], read=read
            )
        return Reply(200, reply, {"content-type": "application/json"})

    async def _aggregate(self, request: Request) -> Reply:
        self._credentials.refuse(request)
        aggregate = getattr(self.environment, "aggregate_metrics", None)
        if aggregate is None:
            raise NotFound(f"{self.name}: this environment aggregates no metrics of its own")
        read = json_reader(self.name, "aggregate_metrics", Kind.INTERNAL)
        asked = await request.json()
        found = await self._author("aggregate_metrics", Kind.INTERNAL, aggregate, asked, read=read)
        return Reply(200, found, {"content-type": "application/json"})

    def _session_id(self, request: Request) -> str | None:
        """The session that the request names; None only where the environment keeps no state."""
        session_id = self._credentials.session_named(request) or self._door.session_id(request)
        if session_id is None and self.environment.stateful:
            raise BadRequest(
                f"{request.path}: no session is named; send x-toprope-session, the credential of a grant, or the "
                "cookie of the seed reply"
            )
        return session_id

    async def _enter(self, stack: AsyncExitStack, request: Request, *, alone: bool, authorised: bool = False) -> _Held:
        """What the request's session holds, in use until `stack` ends."""
        session_id = self._session_id(request)
        if session_id is None:
            return _NOTHING
        rollout = request.rollout
        session = stack.enter_context(self.sessions.use(session_id, key=rollout.key if rollout else None))
        if authorised:
            self.sessions.authorise(session, close_token(request))
        stack.enter_context(working_for(session.key))
        if alone:
            await stack.enter_async_context(session.turn)
            if session.state is not State.OPEN:
                raise SessionLost(f"resources session {session_id}: closed while this call waited for its turn")
        held: _Held | None = session.value
        return held or _NOTHING

    async def _author(self, what: str, kind: Kind, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """As `run_author`, in this server's threads."""
        return await run_author(self.workers, self.name, what, kind, function, *args, **more)

"""The resources server: one environment behind HTTP. Seeds, tools, verify, close.

    POST /seed_session, /<tool>, /verify, /close_session [, /aggregate_metrics]

Tools of one session run one at a time unless the environment says otherwise. A session that was seeded with a close
token verifies and closes only with it, so that an agent which holds the session's name can do neither. Left to
others: the life of a session (`servers.sessions`), what a verdict is worth (whoever reads the reply).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from toprope.errors.body import error_body
from toprope.errors.kinds import Kind
from toprope.errors.tree import BadRequest, NotFound, SessionLost, ToolError, TopropeError
from toprope.http.app import Limits, Route, build_app
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.protocol.sessions import (
    ResourcesCloseSessionRequest,
    ResourcesCloseSessionResponse,
    ResourcesSeedSessionRequest,
    ResourcesSeedSessionResponse,
)
from toprope.sandbox.desk import SandboxDesk
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.sandboxes import SessionSandboxes
from toprope.servers.session_door import SessionDoor, check_key, close_token, lease_s, working_for
from toprope.servers.session_table import State
from toprope.servers.sessions import SeedCall, Session, SessionRegistry, payload_digest
from toprope.tools.spec import TOOL_ERROR_TYPE, ToolSpec
from toprope.tools.workers import WorkerThreads

log = logging.getLogger("toprope.resources")

# Plain functions that run longer are named in the log: a thread that never ends is lost to the pool.
STUCK_AFTER_S = 60.0
_OWN_VERIFY_FIELDS = ("response", "responses_create_params")
_VERDICT_FIELDS = ("failure_kind", "failure_reason", "reward_components")


class ResourcesServer:
    """Serves `environment` under `name`; `.app` is the ASGI app. `signing_key` signs the session cookies.

    `sandboxes` makes the sandbox of each session, for an environment that wants one; it is opened and closed by whoever
    gives it.
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
    ) -> None:
        self.name = name
        self.environment = environment
        self.sandboxes = SessionSandboxes(name, environment, sandboxes)
        self._ttl_s = session_ttl_s
        self.workers = WorkerThreads(environment.worker_threads, name=f"toprope-{name}")
        self.sessions: SessionRegistry[Any] = SessionRegistry(
            noun="resources", release=self._release, ttl_s=session_ttl_s, max_sessions=max_sessions
        )
        self._door = SessionDoor(signing_key)
        self._watchers: list[asyncio.Task[None]] = []
        routes = [
            Route("POST", "/seed_session", self._seed, detached=True),
            Route("POST", "/verify", self._verify),
            Route("POST", "/close_session", self._close, detached=True),
            Route("POST", "/aggregate_metrics", self._aggregate),
        ]
        routes += [Route("POST", f"/{tool}", partial(self._tool, spec)) for tool, spec in environment.tools.items()]
        self.app = build_app(
            name=name,
            role="resources",
            routes=routes,
            startup=self._start,
            shutdown=self._stop,
            limits=limits,
            api_key=api_key,
        )

    async def _start(self) -> None:
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
        await self.sessions.release_all()
        await self.sandboxes.stop_all()
        self.workers.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    async def _seed(self, request: Request) -> Reply:
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
            answer: ResourcesSeedSessionResponse = await self.sessions.seed(call, allocate)
        if not request.speaks_protocol:
            answer = msgspec.structs.replace(answer, env_session_id=None)
        return json_reply(answer, cookies=self._door.cookies(seed.resources_session_id))

    async def _allocate(
        self, seed: ResourcesSeedSessionRequest, life_s: float
    ) -> tuple[Any, ResourcesSeedSessionResponse]:
        session_id, own = seed.resources_session_id, {}
        if self.sandboxes.wanted is not None:
            own["sandbox"] = await self.sandboxes.make(session_id, life_s=life_s)
        try:
            state = None
            if self.environment.stateful:
                state = await self._author("seed", Kind.SEED_FAILED, self.environment.seed, seed.task_data, **own)
            return state, ResourcesSeedSessionResponse(
                session_id,
                sandbox_access=self.sandboxes.access(session_id),
                env_session_id=self.environment.env_session_id(state),
            )
        except BaseException:
            await self.sandboxes.stop(session_id)
            raise

    async def _close(self, request: Request) -> Reply:
        close = await request.decode(ResourcesCloseSessionRequest)
        check_key(request, close.episode_id.key)
        receipt = await self.sessions.close(close.resources_session_id, close_token(request))
        outcome = receipt.outcome if request.speaks_protocol else None
        return json_reply(ResourcesCloseSessionResponse(close.resources_session_id, outcome))

    async def _release(self, session: Session[Any]) -> None:
        if type(self.environment).release is not Environment.release:
            await self.workers.call(self.environment.release, session.value)
        await self.sandboxes.stop(session.session_id)

    # -- tools and verify ----------------------------------------------------------------------------------------

    async def _tool(self, spec: ToolSpec, request: Request) -> Reply:
        function = getattr(self.environment, spec.attribute)
        try:
            async with AsyncExitStack() as stack:
                state = await self._enter(stack, request, alone=self.environment.serial_tools)
                arguments = spec.read(await request.body())
                work = f"tool {spec.name}"
                value = await self._author(work, Kind.TOOL_UNAVAILABLE, function, state, **arguments)
        except ToolError as error:
            body = error_body(error)
            body["error"]["type"] = TOOL_ERROR_TYPE
            return json_reply(body, error.status)
        return text_reply(value) if isinstance(value, str) else json_reply(value)

    async def _verify(self, request: Request) -> Reply:
        body = await request.json()
        for field in _OWN_VERIFY_FIELDS:
            if not isinstance(body, dict) or not isinstance(body.get(field), dict):
                raise BadRequest(f"POST /verify: {field}: an object is needed, beside the fields of the task")
        task = {name: value for name, value in body.items() if name not in _OWN_VERIFY_FIELDS}
        async with AsyncExitStack() as stack:
            state = await self._enter(stack, request, alone=True, authorised=True)
            verdict = await self._author(
                "verify", Kind.VERIFY_FAILED, self.environment.verify, state, task, body["response"]
            )
        return json_reply(_verify_reply(body, verdict, extended=request.speaks_protocol))

    async def _aggregate(self, request: Request) -> Reply:
        aggregate = getattr(self.environment, "aggregate_metrics", None)
        if aggregate is None:
            raise NotFound(f"{self.name}: this environment aggregates no metrics of its own")
        return json_reply(await self._author("aggregate_metrics", Kind.INTERNAL, aggregate, await request.json()))

    async def _enter(self, stack: AsyncExitStack, request: Request, *, alone: bool, authorised: bool = False) -> Any:
        """The state of the request's session, in use until `stack` ends; None where the environment keeps none."""
        session_id = self._door.session_id(request)
        if session_id is None:
            if self.environment.stateful:
                raise BadRequest(
                    f"{request.path}: no session is named; send x-toprope-session, or the cookie of the seed reply"
                )
            return None
        rollout = request.rollout
        session = stack.enter_context(self.sessions.use(session_id, key=rollout.key if rollout else None))
        if authorised:
            self.sessions.authorise(session, close_token(request))
        stack.enter_context(working_for(session.key))
        if alone:
            await stack.enter_async_context(session.turn)
            if session.state is not State.OPEN:
                raise SessionLost(f"resources session {session_id}: closed while this call waited for its turn")
        return session.value

    async def _author(self, what: str, kind: Kind, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the author's code. What it raises that is no error of ours keeps its type and text."""
        try:
            return await self.workers.call(function, *args, **kwargs)
        except TopropeError:
            raise
        except Exception as error:  # the author's own: told to the caller, who decides whether to try again
            message = f"{self.name}: {what}: {type(error).__name__}: {error}"
            raise TopropeError(message, kind=kind, status=500, retryable=True) from error


def _verify_reply(body: dict[str, Any], verdict: Any, *, extended: bool) -> dict[str, Any]:
    found = verdict if isinstance(verdict, Verdict) else Verdict(reward=verdict)
    clash = {"reward", "mask_sample", *_VERDICT_FIELDS, *_OWN_VERIFY_FIELDS} & set(found.extra)
    if clash:
        raise TopropeError(
            f"verify: extra[{min(clash)!r}] is a field of the verdict itself",
            kind=Kind.VERIFY_FAILED,
            status=500,
            retryable=False,
        )
    reply = {**body, **found.extra, "reward": _finite(found.reward), "mask_sample": found.mask_sample}
    reply.update({name: getattr(found, name) for name in _VERDICT_FIELDS if getattr(found, name) is not None})
    if extended and found.env_session_id is not None:
        reply["env_session_id"] = found.env_session_id
    return reply


def _finite(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise TopropeError(
            f"verify: the reward is {reward!r}; a finite number is needed",
            kind=Kind.BAD_REWARD,
            status=500,
            retryable=False,
        )
    return float(reward)

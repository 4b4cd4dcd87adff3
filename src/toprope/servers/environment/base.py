"""The environment server: one `POST /run` is one episode, whatever its protocol.

Admission, the rollout's context, failures as data, and a clean-up that is owed on every road out, cancellation too.
It keeps no state between requests but the keys in flight and the latest session reports. Left to others: the order of
calls (a protocol), one episode's deadlines and participants (`episode`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from toprope.correlation.context import rollout_context
from toprope.errors.kinds import Kind, Stage
from toprope.errors.tree import ConfigError, Conflict, TopropeError
from toprope.http.app import Limits, Route, build_app
from toprope.http.client import Peer
from toprope.http.headers import whole_number
from toprope.http.replay import SAFE
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.protocol.episode import RunReply, RunRequest
from toprope.protocol.grants import Grant
from toprope.protocol.sessions import is_handle
from toprope.servers.authored import plain_errors
from toprope.servers.environment.episode import Episode, OnSession, Plan, Timeouts
from toprope.servers.environment.judging import failure_of
from toprope.servers.environment.participant import SessionReport
from toprope.tools.workers import contained

log = logging.getLogger("toprope.episode")

TOOL_KINDS = ("direct_http", "mcp")
KEPT_REPORTS = 10_000


class EpisodeProtocol:
    """The order of calls of one kind of episode."""

    name = ""

    models: tuple[str, ...] = ()
    """The names of the model servers that the protocol itself calls; `episode.plan.models` has them."""

    def read(self, task_input: Mapping[str, Any]) -> Any:
        """The task's input in the protocol's own form. Raises `BadRequest` naming the field."""
        raise TypeError(f"{type(self).__name__} does not define read(task_input)")

    async def run(self, episode: Episode, given: Any) -> dict[str, Any]:
        """The result of a verified episode. Raises what went wrong; clean-up is the base's."""
        raise TypeError(f"{type(self).__name__} does not define run(episode, given)")


class EnvironmentServer:
    """Runs episodes of `protocol` with one resources and one agent peer; `.app` is the ASGI app.

    `capture`: the agent is selected for token capture. `tools` are the grants given to the agent (none by default).
    `resources_protocol` is `typed`, or `flat` for an older environment that knows a session by its cookie only.
    `models` are the model servers that the protocol itself calls, by the names in its `models`.
    `tools_peer` is the resources server as the agent reaches it, where that is not as this server does (inline).
    `further_grants` are given to every agent session as they stand, beside those of the environment's own tools.
    `on_session` hears of each seed reply before the next step, `on_session_closed` of each answered close. Times are in
    seconds. Raises `ConfigError` for settings that leave the agent no time.
    """

    def __init__(
        self,
        *,
        name: str,
        protocol: EpisodeProtocol,
        resources: Peer,
        agent: Peer,
        capture: bool = False,
        tools: Sequence[str] = (),
        tools_peer: Peer | None = None,
        further_grants: Sequence[Grant] = (),
        resources_protocol: str = "typed",
        models: Mapping[str, Peer] | None = None,
        gradable_on_timeout: bool = False,
        close_reply: str = "required",
        max_concurrent_episodes: int | None = None,
        queue_timeout_s: float = 600.0,
        episode_timeout_s: float = 3600.0,
        agent_timeout_s: float | None = None,
        verify_timeout_s: float = 300.0,
        cleanup_timeout_s: float = 30.0,
        on_session: OnSession | None = None,
        on_session_closed: OnSession | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
    ) -> None:
        unknown = [kind for kind in tools if kind not in TOOL_KINDS]
        if unknown or len(set(tools)) < len(tools):
            raise ConfigError(f"tools: {list(tools)} given; accepted: each of {', '.join(TOOL_KINDS)} at most once")
        if close_reply not in ("required", "optional"):
            raise ConfigError(f"close_reply: {close_reply!r} given; accepted: required, optional")
        if resources_protocol not in ("typed", "flat"):
            raise ConfigError(f"protocol: {resources_protocol!r} given; accepted: typed, flat")
        absent = [model for model in protocol.models if model not in (models or {})]
        if absent:
            raise ConfigError(f"{protocol.name}: no model server {absent[0]!r} is given; it is needed by this protocol")
        if max_concurrent_episodes is not None and max_concurrent_episodes < 1:
            raise ConfigError(f"max_concurrent_episodes: {max_concurrent_episodes} given; accepted: 1 or more")
        self.name = name
        self.protocol = protocol
        self._on_session = on_session
        self._plan = Plan(
            resources=resources,
            agent=agent,
            timeouts=Timeouts(episode_timeout_s, agent_timeout_s, verify_timeout_s, cleanup_timeout_s),
            capture=capture,
            tools=tuple(tools),
            tools_peer=tools_peer or resources,
            further_grants=tuple(further_grants),
            gradable_on_timeout=gradable_on_timeout,
            close_reply_optional=close_reply == "optional",
            on_session=self._report,
            on_closed=self._report_closed,
            flat_resources=resources_protocol == "flat",
            models=dict(models or {}),
        )
        self._slots = None if max_concurrent_episodes is None else asyncio.Semaphore(max_concurrent_episodes)
        self._queue_timeout_s = queue_timeout_s
        self._in_flight: set[str] = set()
        self._reports: deque[tuple[int, SessionReport]] = deque(maxlen=KEPT_REPORTS)
        self._reported = 0
        self._closed: dict[str, None] = {}
        self._on_session_closed = on_session_closed
        self.app = build_app(
            name=name,
            role="environment",
            routes=[
                Route("POST", "/run", self._run),
                Route("POST", "/aggregate_metrics", self._aggregate),
                Route("GET", "/sessions", self._sessions),
            ],
            limits=limits,
            api_key=api_key,
        )

    @property
    def running(self) -> int:
        """How many episodes run or wait for admission."""
        return len(self._in_flight)

    # -- episodes ------------------------------------------------------------------------------------------------

    async def _run(self, request: Request) -> Reply:
        asked = await request.decode(RunRequest)
        given = await contained(self._read(asked))
        key = asked.episode_id.key
        if request.rollout is not None and request.rollout.key != key:
            raise Conflict(f"/run: the path names rollout {request.rollout.key}, the body {key}")
        if key in self._in_flight:
            raise Conflict(f"/run: an episode for {key} is in flight here")
        self._in_flight.add(key)
        try:
            with rollout_context(key):
                outcome = await self._admitted(asked, given)
        finally:
            self._in_flight.discard(key)
        try:
            return await contained(_reply(outcome, request.speaks_protocol))
        except Exception as error:  # a protocol of somebody's own gave what JSON cannot carry
            failure = failure_of(error, Stage.VERIFICATION)
            return await _reply(RunReply(outcome.episode_id, outcome.task_id, None, failure), request.speaks_protocol)

    async def _read(self, asked: RunRequest) -> Any:
        with plain_errors(self.name):
            return self.protocol.read(asked.task.task_input)

    async def _admitted(self, asked: RunRequest, given: Any) -> RunReply:
        try:
            async with self._slot():
                return await self._episode(asked, given)
        except _QueueFull as error:
            failure = failure_of(error, Stage.ADMISSION)
            return RunReply(asked.episode_id, asked.task.task_id, None, failure)

    async def _episode(self, asked: RunRequest, given: Any) -> RunReply:
        episode = Episode(self._plan, asked.episode_id, asked.task.task_id)
        result: dict[str, Any] | None = None
        failure = None
        try:
            result = await contained(self._result(episode, given))
        except Exception as error:  # every error of an episode is its outcome, and data
            failure = episode.failure(error)
        finally:
            await episode.unwind()
        if failure is not None:
            return RunReply(asked.episode_id, asked.task.task_id, None, episode.annotated(failure))
        assert result is not None
        return RunReply(asked.episode_id, asked.task.task_id, result, None)

    async def _result(self, episode: Episode, given: Any) -> dict[str, Any]:
        """The protocol's result with the handle on it. It, and what is raised, may be code: run it contained."""
        with plain_errors(self.name):
            return _with_handle(await self.protocol.run(episode, given), episode)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise _QueueFull(
                f"no episode slot became free within {self._queue_timeout_s:g} s (queue_timeout_s)",
                kind=Kind.ADMISSION_TIMEOUT,
            ) from None
        try:
            yield
        finally:
            self._slots.release()

    # -- beside them ---------------------------------------------------------------------------------------------

    async def _report(self, report: SessionReport) -> None:
        self._reported += 1
        self._reports.append((self._reported, report))
        if self._on_session is not None:
            told = self._on_session(report)
            if told is not None:
                await told

    async def _report_closed(self, report: SessionReport) -> None:
        self._closed[report.session_id] = None
        if len(self._closed) > KEPT_REPORTS:
            del self._closed[next(iter(self._closed))]
        if self._on_session_closed is not None:
            told = self._on_session_closed(report)
            if told is not None:
                await told

    async def _sessions(self, request: Request) -> Reply:
        """The latest reports, by name: no caller learns an id here, with which it could call another's tools."""
        after = whole_number(request.query.get("since", "")) or 0
        kept = [
            {
                "number": number,
                **{k: v for k, v in dataclasses.asdict(report).items() if v is not None},
                "closed": report.session_id in self._closed,
            }
            for number, report in self._reports
            if number > after
        ]
        return json_reply({"sessions": kept, "next": self._reported})

    async def _aggregate(self, request: Request) -> Reply:
        reply = await self._plan.resources.request("POST", "/aggregate_metrics", body=await request.body(), policy=SAFE)
        return Reply(reply.status, reply.body, {"content-type": reply.headers.get("content-type", "application/json")})


class _QueueFull(TopropeError):
    """No slot within the queue time: nothing was started."""

    status = 429
    retryable = True


def _with_handle(result: dict[str, Any], episode: Episode) -> dict[str, Any]:
    """The provider's handle on the result: verify's own wins, and where they differ the seed's stands beside it."""
    for field in ("env_session_id", "seed_env_session_id"):
        if result.get(field) is not None and not is_handle(result[field]):
            key = episode.episode_id.key
            log.warning("rollout %s: verify's %s is no short printable text; left out", key, field)
            result = {name: value for name, value in result.items() if name != field}
    seeded, verified = episode.env_session_id, result.get("env_session_id")
    if seeded is None:
        return result
    if verified is None:
        return {**result, "env_session_id": seeded}
    return result if verified == seeded else {**result, "seed_env_session_id": seeded}


async def _reply(outcome: RunReply, extended: bool) -> Reply:
    return json_reply(outcome if extended else _for_stranger(outcome))


def _for_stranger(outcome: RunReply) -> RunReply:
    """The outcome without the fields that NeMo Gym's closed models do not know."""
    failure = None if outcome.failure is None else outcome.failure.for_stranger()
    result = outcome.result
    if result is not None:
        result = {k: v for k, v in result.items() if k not in ("env_session_id", "seed_env_session_id")}
    return RunReply(outcome.episode_id, outcome.task_id, result, failure)

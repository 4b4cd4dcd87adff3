"""One episode: its stage, its deadlines, its two participants, and the clean-up that is owed to them.

    mint ids -> owe clean-up -> seed ... verify          inside the episode's deadline
    unwind: close what is still open, last first         outside it, shielded, each within its own share

The outcome of a clean-up never replaces the outcome of the episode. Left to others: the order of calls (a protocol such
as `single_agent_turn`), admission and HTTP (`base`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from toprope.errors.kinds import Delivery, Kind, Stage
from toprope.errors.tree import ConfigError, TopropeError
from toprope.http.client import Peer
from toprope.protocol.episode import Failure
from toprope.protocol.grants import Grant
from toprope.protocol.ids import EpisodeId, TaskId
from toprope.protocol.sessions import is_handle
from toprope.servers.environment.flat import FlatResources
from toprope.servers.environment.judging import failure_of
from toprope.servers.environment.participant import AGENT, RESOURCES, Door, Participant, SessionReport, with_session
from toprope.tools.workers import contained

log = logging.getLogger("toprope.episode")

OnSession = Callable[[SessionReport], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds in seconds. `agent_s` None: what the episode leaves. `cleanup_s` is shared by the two participants."""

    episode_s: float = 3600.0
    agent_s: float | None = None
    verify_s: float = 300.0
    cleanup_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("episode", self.episode_s), ("verify", self.verify_s), ("cleanup", self.cleanup_s)):
            if not value > 0:
                raise ConfigError(f"{name}_timeout_s: {value!r} given; accepted: seconds above 0")
        if self.agent_budget_s() <= 0:
            raise ConfigError(
                f"no time is left for the agent: episode_timeout_s {self.episode_s:g} less verify_timeout_s "
                f"{self.verify_s:g} less half of cleanup_timeout_s {self.cleanup_s:g} must be above 0"
                + ("" if self.agent_s is None else f", and so must agent_timeout_s {self.agent_s:g}")
            )

    @property
    def share_s(self) -> float:
        """What each participant's closes may take: a hung agent cannot eat the resources' part."""
        return self.cleanup_s / 2

    def agent_budget_s(self, elapsed_s: float = 0.0) -> float:
        """The longest that an activation may take that begins `elapsed_s` into the episode: what is left of it without
        the time for verify and for the agent's close, and no more than `agent_s`."""
        left = self.episode_s - elapsed_s - self.verify_s - self.share_s
        return left if self.agent_s is None else min(self.agent_s, left)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every episode of one environment server has in common."""

    resources: Peer
    agent: Peer
    timeouts: Timeouts
    capture: bool = False
    tools: tuple[str, ...] = ()
    tools_peer: Peer | None = None
    further_grants: tuple[Grant, ...] = ()
    gradable_on_timeout: bool = False
    close_reply_optional: bool = False
    on_session: OnSession | None = None
    on_closed: OnSession | None = None
    flat_resources: bool = False
    models: Mapping[str, Peer] = field(default_factory=dict)


class DeadlinePassed(TopropeError):
    """A deadline really expired; the stage is in it."""

    status = 504
    retryable = True


class Episode:
    """The state of one `/run`. A protocol drives it; `failure` and `unwind` are the base's.

    `partial_response` is what the agent has said so far, as one Responses object; `earlier` are the items of its turns
    before the one that runs, and `answering` says that one runs whose answer is not known.
    """

    def __init__(self, plan: Plan, episode_id: EpisodeId, task_id: TaskId) -> None:
        self.plan = plan
        self.episode_id = episode_id
        self.task_id = task_id
        self.stage = Stage.SEED
        self.partial_response: dict[str, Any] | None = None
        self.earlier: list[dict[str, Any]] = []
        self.answering = False
        self.env_session_id: str | None = None
        self.resources: Participant | None = None
        self.agent: Participant | None = None
        self._open: list[Participant] = []
        self._began = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def tools_url(self, path: str = "") -> str:
        """The URL under which the agent reaches the resources server, stamped with the rollout."""
        return (self.plan.tools_peer or self.plan.resources).url(path)

    @property
    def deadline(self) -> float:
        """The loop time at which steps 2 to 6 must be over."""
        return self._began + self.plan.timeouts.episode_s

    @property
    def agent_deadline(self) -> float:
        """The loop time at which an activation that begins now must be over."""
        return self.now + self.plan.timeouts.agent_budget_s(self.now - self._began)

    @asynccontextmanager
    async def at(
        self, stage: Stage, *, deadline: float | None = None, kind: Kind = Kind.EPISODE_TIMEOUT
    ) -> AsyncIterator[None]:
        """Be in `stage` until the block ends, at the latest at `deadline` or the episode's, whichever is first.

        Raises `DeadlinePassed` only if it was this deadline that expired; a timeout inside stays what it is.
        """
        self.stage = stage
        until = self.deadline if deadline is None else min(deadline, self.deadline)
        timer = asyncio.timeout_at(until)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            named = kind if until < self.deadline else Kind.EPISODE_TIMEOUT
            raise DeadlinePassed(
                f"{stage}: the time for it is used up ({named})",
                kind=named,
                stage=stage,
                delivery=Delivery.POSSIBLY_DELIVERED,
            ) from None

    def mint_resources(self) -> Participant:
        """A resources session with its clean-up registered; nothing was sent yet."""
        kind = FlatResources if self.plan.flat_resources else Participant
        self.resources = self._mint(RESOURCES, self.plan.resources, kind)
        return self.resources

    def mint_agent(self) -> Participant:
        """An agent session with its clean-up registered; nothing was sent yet."""
        self.agent = self._mint(AGENT, self.plan.agent, Participant)
        return self.agent

    async def report(self, participant: Participant, seeded: dict[str, Any]) -> None:
        """Tell whoever listens of a seed reply, before the next step. A listener that fails is logged."""
        handle = seeded.get("env_session_id")
        if handle is not None and not is_handle(handle):
            key = self.episode_id.key
            log.warning("rollout %s: the seed's env_session_id is no short printable text; left out", key)
            handle = None
        if participant is self.resources:
            self.env_session_id = handle
        await self._tell(self.plan.on_session, participant, handle)

    async def closed(self, participant: Participant) -> None:
        """Tell whoever listens that a close was answered."""
        await self._tell(self.plan.on_closed, participant, None)

    async def _tell(self, listener: OnSession | None, participant: Participant, handle: str | None) -> None:
        if listener is None:
            return
        report = SessionReport(self.episode_id, participant.door.role, participant.session_name, handle)

        async def tell() -> None:
            told = listener(report)
            if inspect.isawaitable(told):
                await told

        try:
            await contained(tell())
        except Exception:  # a diagnostic must not cost the episode
            log.exception("rollout %s: the session report could not be delivered", self.episode_id.key)

    def answered(self, response: dict[str, Any]) -> None:
        """The running turn has its answer: it ends the conversation so far."""
        self.answering = False
        self.partial_response = (
            {**response, "output": [*self.earlier, *response["output"]]} if self.earlier else response
        )

    def keep_partial(self, closed: Mapping[str, Any]) -> None:
        """Keep the partial response of an agent's close reply, unless the activation gave a whole one."""
        partial = closed.get("partial_response")
        if self.answering and isinstance(partial, dict):
            output = partial.get("output")
            self.answered({**partial, "output": output if isinstance(output, list) else [], "status": "incomplete"})

    def failure(self, error: BaseException) -> Failure:
        """The failure that `error` makes of this episode, with what is known of it."""
        failure = failure_of(error, self.stage)
        log.warning("rollout %s failed in %s: %s", self.episode_id.key, failure.stage, failure.failure_reason)
        return failure

    def annotated(self, failure: Failure) -> Failure:
        """`failure` with the session handle and the partial response, which the clean-up may have brought."""
        return with_session(failure, self.env_session_id, self.partial_response)

    async def unwind(self) -> None:
        """Close what is still open, last registered first. Never raises; runs to its end although it is cancelled."""
        await shielded(self._unwind())

    async def _unwind(self) -> None:
        while self._open:
            participant = self._open.pop()
            closed = await participant.close_quietly()
            if closed is None:
                continue
            await self.closed(participant)
            if participant is self.agent:
                self.keep_partial(closed)

    def _mint(self, door: Door, peer: Peer, kind: type[Participant]) -> Participant:
        limits = self.plan.timeouts
        participant = kind(
            door, peer, self.episode_id, lease_s=limits.episode_s + limits.cleanup_s, budget_s=limits.share_s
        )
        self._open.append(participant)
        return participant


async def shielded(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, however often the caller is cancelled; then let the cancellation through."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.result()
    if cancelled is not None:
        raise cancelled

"""Sessions as a server keeps them: one registry for agent and resources servers.

A seed allocates once, however often it is sent; a close releases once and is answered again; an id that was closed
stays closed. The caller mints the ids. Close tokens are kept as digests only. What nobody closes expires. All of it
follows the table in `session_table`. Left to others: routes and bodies, what a session holds, and the caller's side
(`servers.environment.participant`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from toprope.canonical.digest import digest_bytes, digest_value
from toprope.correlation.context import RolloutContext, bound_rollout
from toprope.errors.body import said_by
from toprope.errors.kinds import Kind
from toprope.errors.tree import CapacityReached, Conflict, Forbidden, SessionLost, TopropeError
from toprope.protocol.sessions import CloseOutcome
from toprope.servers.session_table import Action, Event, State, step

log = logging.getLogger("toprope.sessions")

S = TypeVar("S")
REMEMBER_CLOSED_S = 300.0
# A close that is sent again comes within the transport budget of its caller (15 s). Observations of finished rollouts
# must not pile up for as long as ids are remembered: at 250 rollouts a second that would be hundreds of megabytes.
KEEP_RECEIPT_S = 30.0
QUIESCE_S = 10.0


@dataclass(frozen=True, slots=True)
class SeedCall:
    """One seed request: who, for which rollout, what was sent (as a digest), and how long it may live unattended."""

    session_id: str
    key: str
    payload_digest: str
    token: str | None = None
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a close: `closed` once, `already_closed` after; `value` is what the release returned, if it ran."""

    outcome: CloseOutcome
    value: Any = None


@dataclass(eq=False, slots=True)
class Session(Generic[S]):
    """One session id at this server. `value` is the role's own; it is there while the session is open."""

    session_id: str
    key: str
    payload_digest: str
    token_digest: bytes | None
    lease_until: float
    last_used: float
    state: State = State.ABSENT
    expired: bool = False
    users: int = 0
    closed_at: float = 0.0
    value: S | None = None
    reply: Any = None
    receipt: Any = None
    seeding: asyncio.Task[Any] | None = None
    closing: asyncio.Task[Any] | None = None
    idle: asyncio.Event | None = None
    _turn: asyncio.Lock | None = None

    @property
    def turn(self) -> asyncio.Lock:
        """Held by whoever must be alone with the session (tools of one session run one at a time)."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    def shrink(self, now: float) -> None:
        """Keep only what a closed id is remembered for: its token, its receipt, when it was closed."""
        self.value = self.reply = self.seeding = self.closing = self.idle = self._turn = None
        self.payload_digest = self.key = ""
        self.lease_until = self.last_used = 0.0
        self.closed_at = now


class SessionRegistry(Generic[S]):
    """The sessions of one server.

    `quiesce` tells whatever uses a session to stop; `release`, called when nothing uses it any more, frees what the
    seed allocated, and its result is the close's receipt. A release that raised is called again by the next close.
    """

    def __init__(
        self,
        *,
        noun: str,
        release: Callable[[Session[S]], Awaitable[Any]],
        quiesce: Callable[[Session[S]], None] | None = None,
        ttl_s: float = 900.0,
        remember_closed_s: float = REMEMBER_CLOSED_S,
        quiesce_s: float = QUIESCE_S,
        max_sessions: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noun = noun
        self._release_value = release
        self._quiesce = quiesce
        self._ttl_s = ttl_s
        self._remember_closed_s = remember_closed_s
        self._quiesce_s = quiesce_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: dict[str, Session[S]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """How many sessions hold, or may hold, an allocation."""
        return sum(session.state is not State.CLOSED for session in self._sessions.values())

    def keys(self) -> list[str]:
        """The rollouts of the sessions that hold, or may hold, an allocation; one entry a session."""
        return [session.key for session in self._sessions.values() if session.state is not State.CLOSED]

    @property
    def remembered(self) -> int:
        """How many closed ids are remembered."""
        return len(self._sessions) - len(self)

    # -- seed ----------------------------------------------------------------------------------------------------

    async def seed(self, call: SeedCall, allocate: Callable[[], Awaitable[tuple[S, Any]]]) -> Any:
        """The reply of the one allocation for this id, made now or before.

        Cancelling the caller does not stop the allocation. Raises `Conflict` for another payload or token, or after a
        close; `CapacityReached` where no session is free; whatever `allocate` raised, to all who wait (a later seed
        with the same id then tries again).
        """
        session = self._sessions.get(call.session_id)
        if session is None:
            self._check_room()
            session = self._record(call)
            same = True
        else:
            same = session.payload_digest == call.payload_digest and _same(session.token_digest, _digest(call.token))
        _, action = self._step(session, Event.SEED if same else Event.SEED_OTHER)
        if action is Action.REPLAY:
            return session.reply
        if action is Action.CONFLICT:
            raise Conflict(self._conflict_text(session, same=same))
        if action is Action.ALLOCATE:
            session.seeding = self._spawn(self._allocate(session, allocate))
        assert session.seeding is not None
        return await asyncio.shield(session.seeding)

    async def _allocate(self, session: Session[S], allocate: Callable[[], Awaitable[tuple[S, Any]]]) -> Any:
        try:
            session.value, session.reply = await allocate()
        except BaseException:
            self._step(session, Event.SEED_FAILED)
            raise
        _, action = self._step(session, Event.SEEDED)
        session.last_used = self._clock()
        if action is Action.RELEASE:
            session.closing = self._spawn(self._release(session))
            raise Conflict(f"{self._noun} session {session.session_id}: closed while it was being seeded")
        return session.reply

    # -- use -----------------------------------------------------------------------------------------------------

    @contextmanager
    def use(self, session_id: str, *, key: str | None = None) -> Iterator[Session[S]]:
        """The open session, kept from expiry and from release until the block ends.

        Raises `SessionLost` (kind session_lost or session_expired) where it is not open, `Conflict` while it is being
        seeded or if `key` is not the key that it was seeded for.
        """
        session = self.open_session(session_id, key=key)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.last_used = self._clock()
            if session.users == 0 and session.idle is not None:
                session.idle.set()

    def open_session(self, session_id: str, *, key: str | None = None) -> Session[S]:
        """The open session itself; errors as `use`."""
        session = self._sessions.get(session_id)
        _, action = step(State.ABSENT if session is None else session.state, Event.USE)
        if session is None or action is Action.LOST:
            if session is not None and session.expired:
                raise SessionLost(f"{self._noun} session {session_id}: expired", kind=Kind.SESSION_EXPIRED)
            raise SessionLost(f"{self._noun} session {session_id}: not known here")
        if action is Action.CONFLICT:
            raise Conflict(f"{self._noun} session {session_id}: still being seeded")
        if key is not None and key != session.key:
            raise Conflict(f"{self._noun} session {session_id}: belongs to rollout {session.key}, not to {key}")
        return session

    def authorise(self, session: Session[S], token: str | None) -> None:
        """Return if `token` is the one that was registered, or none was. Raises `Forbidden` otherwise."""
        if session.token_digest is not None and not _same(session.token_digest, _digest(token)):
            raise Forbidden(
                f"{self._noun} session {session.session_id}: this needs the close token that the session was seeded "
                f"with, and {'another' if token else 'none'} was sent"
            )

    # -- close ---------------------------------------------------------------------------------------------------

    async def close(self, session_id: str, token: str | None) -> Receipt:
        """On return the session is released and its id fenced; `already_closed` if it was before, or was never known.

        Cancelling the caller does not stop the release. Raises `Forbidden` for a wrong or absent token, and
        `TopropeError` of kind session_release_failed (retryable) where the release failed: the session then stays.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._record(SeedCall(session_id, "", ""))
        else:
            self.authorise(session, token)
        before = session.state
        _, action = self._step(session, Event.CLOSE)
        if action in (Action.FENCE, Action.ALREADY_CLOSED):
            return Receipt("already_closed", session.receipt)
        if action is Action.RELEASE:
            session.closing = self._spawn(self._release(session))
        elif session.state is State.CLOSE_PENDING:
            assert session.seeding is not None
            await asyncio.wait([session.seeding])
        if session.closing is not None:
            await asyncio.shield(session.closing)
        outcome: CloseOutcome = "closed" if action is Action.RELEASE or before is State.SEEDING else "already_closed"
        return Receipt(outcome, session.receipt)

    async def _release(self, session: Session[S]) -> None:
        try:
            with bound_rollout(RolloutContext(session.key) if session.key else None):
                if self._quiesce is not None:
                    self._quiesce(session)
                await self._wait_idle(session)
                session.receipt = await self._release_value(session)
        except BaseException as error:
            self._step(session, Event.RELEASE_FAILED)
            log.warning("%s session %s: release failed: %s", self._noun, session.session_id, said_by(error))
            if not isinstance(error, Exception):
                raise
            raise TopropeError(
                f"{self._noun} session {session.session_id}: release failed: {said_by(error)}",
                kind=Kind.SESSION_RELEASE_FAILED,
                status=500,
                retryable=True,
            ) from error
        self._step(session, Event.RELEASED)
        session.shrink(self._clock())

    async def _wait_idle(self, session: Session[S]) -> None:
        if session.users == 0:
            return
        session.idle = asyncio.Event()
        try:
            async with asyncio.timeout(self._quiesce_s):
                await session.idle.wait()
        except TimeoutError:
            raise TopropeError(f"{session.users} calls still use the session after {self._quiesce_s:g} s") from None

    # -- expiry --------------------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Begin the release of what expired and forget what was closed long ago; returns how many releases began.

        A session expires `ttl_s` after its last use, or at the end of its lease if that is later; never while in use.
        """
        now = self._clock()
        begun = 0
        for session_id, session in list(self._sessions.items()):
            if session.state in (State.OPEN, State.UNRELEASED):
                if session.users == 0 and now >= max(session.last_used + self._ttl_s, session.lease_until):
                    self._step(session, Event.EXPIRE)
                    session.expired = True
                    session.closing = self._spawn(self._release(session))
                    log.warning(
                        "%s session %s of rollout %s expired: nobody closed it", self._noun, session_id, session.key
                    )
                    begun += 1
            elif session.state is State.CLOSED:
                if now >= session.closed_at + KEEP_RECEIPT_S:
                    session.receipt = None
                if now >= session.closed_at + self._remember_closed_s:
                    self._step(session, Event.FORGET)
        return begun

    @property
    def sweep_every_s(self) -> float:
        """Seconds between two sweeps, and so the longest that an expired session waits: a quarter of the TTL, at most
        15 s."""
        return max(0.05, min(15.0, self._ttl_s / 4))

    async def sweep_forever(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Sweep until cancelled, every `sweep_every_s` seconds."""
        while True:
            await sleep(self.sweep_every_s)
            self.sweep()

    async def release_all(self, timeout_s: float = 30.0) -> None:
        """Release every session that is left, for a server that stops; at most for `timeout_s`. Failures are logged."""
        until = asyncio.get_running_loop().time() + timeout_s
        waiting: list[asyncio.Task[Any]] = []
        for session in self._sessions.values():
            if session.state in (State.SEEDING, State.OPEN, State.UNRELEASED):
                _, action = self._step(session, Event.CLOSE)
                if action is Action.RELEASE:
                    session.closing = self._spawn(self._release(session))
            waiting.extend(task for task in (session.seeding, session.closing) if task is not None and not task.done())
        while waiting:
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                log.error("%d %s sessions could not be released within %g s", len(self), self._noun, timeout_s)
                return
            await asyncio.wait(waiting, timeout=left)
            waiting = [task for task in self._tasks if not task.done()]

    # -- book-keeping --------------------------------------------------------------------------------------------

    def _record(self, call: SeedCall) -> Session[S]:
        now = self._clock()
        session = Session[S](
            session_id=call.session_id,
            key=call.key,
            payload_digest=call.payload_digest,
            token_digest=_digest(call.token),
            lease_until=now + call.lease_s,
            last_used=now,
            closed_at=now,
        )
        self._sessions[call.session_id] = session
        return session

    def _step(self, session: Session[S], event: Event) -> tuple[State, Action]:
        session.state, action = step(session.state, event)
        if session.state is State.ABSENT:
            self._sessions.pop(session.session_id, None)
        elif event is Event.SEED_FAILED:
            session.shrink(self._clock())
        return session.state, action

    def _check_room(self) -> None:
        if self._max_sessions is not None and len(self) >= self._max_sessions:
            raise CapacityReached(f"all {self._max_sessions} {self._noun} sessions are in use")

    def _conflict_text(self, session: Session[S], *, same: bool) -> str:
        if session.state in (State.SEEDING, State.OPEN) and not same:
            return f"{self._noun} session {session.session_id}: seeded before with another payload or close token"
        return f"{self._noun} session {session.session_id}: was closed; a closed id is never seeded again"

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # logged where it was raised; whoever waits sees it too


def payload_digest(payload: msgspec.Struct) -> str:
    """A digest of what a seed says, whatever the order of its keys."""
    try:
        # It was decoded from JSON, so it is finite, and the quick road is exact.
        return digest_bytes(_sorted_encoder.encode(payload))
    except (UnicodeEncodeError, OverflowError):
        return digest_value(msgspec.to_builtins(payload))


_sorted_encoder = msgspec.json.Encoder(order="sorted")


def _digest(token: str | None) -> bytes | None:
    return None if token is None else hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _same(one: bytes | None, other: bytes | None) -> bool:
    if one is None or other is None:
        return one is other
    return hmac.compare_digest(one, other)

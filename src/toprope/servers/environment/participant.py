"""The caller's side of one session: ids minted first, cookies merged, a close that is owed until it was answered.

One class for agent and resources sessions. Session id and close token exist before anything is sent, so that what a
lost reply left behind can still be closed. Left to others: bodies and the order of calls (`episode`), retries of one
call (`toprope.http`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from toprope.correlation.ids import mint_close_token, mint_session_id
from toprope.errors.kinds import Delivery, Stage
from toprope.errors.tree import TopropeError, TransportError
from toprope.http.client import Peer
from toprope.http.cookies import merge_cookies
from toprope.http.replay import BEFORE_DELIVERY, DEDUPLICATED, ReplayPolicy
from toprope.http.reply import Reply
from toprope.protocol.episode import Failure
from toprope.protocol.headers import ACTIVATION, CLOSE_TOKEN, LEASE, PROTOCOL, SESSION, TOOLS
from toprope.protocol.ids import EpisodeId
from toprope.protocol.sessions import session_name
from toprope.servers.environment.judging import accepted, bad_reply, read_object

log = logging.getLogger("toprope.episode")

ParticipantRole = Literal["resources", "agent"]


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One seed reply, told at once: whose session it is, and the provider's own handle where one was given.

    `session_id` is its `session_name`: reports are listed, and written to files, for whoever may read them.
    """

    episode_id: EpisodeId
    participant: ParticipantRole
    session_id: str
    env_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Door:
    """Where a role's sessions are seeded and closed, and the field that holds the session id."""

    role: ParticipantRole
    seed_path: str
    close_path: str
    id_field: str


RESOURCES = Door("resources", "/seed_session", "/close_session", "resources_session_id")
AGENT = Door("agent", "/v1/agent_sessions", "/v1/agent_sessions/close", "agent_session_id")


class Participant:
    """One session at one peer. `budget_s` is what all its closes together may take."""

    def __init__(self, door: Door, peer: Peer, episode_id: EpisodeId, *, lease_s: float, budget_s: float) -> None:
        self.door = door
        self.peer = peer
        self.session_id = mint_session_id()
        self.cookies: dict[str, str] = {}
        self.speaks_protocol = False
        self.tools_credential: str | None = None
        self.owes_close = True
        self.close_failure: str | None = None
        self._token = mint_close_token()
        self._episode_id = episode_id
        self._lease_s = lease_s
        self._budget_s = budget_s

    async def seed(self, fields: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
        """The seed reply, its session id checked. The close stays owed unless nothing can have been delivered."""
        what = f"seed of the {self.door.role} session"
        body = {self.door.id_field: self.session_id, "episode_id": self._episode_id, **fields}
        headers = {CLOSE_TOKEN: self._token, LEASE: f"{self._lease_s:g}"}
        try:
            reply = await self._send(self.door.seed_path, body, headers, DEDUPLICATED)
        except TransportError as error:
            if error.delivery is Delivery.NOT_SENT:
                self.owes_close = False
            raise
        value = read_object(accepted(reply, stage, what), what)
        if value.get(self.door.id_field) != self.session_id:
            raise bad_reply(reply, what, self._of_another() + _older(value))
        self.tools_credential = reply.headers.get(TOOLS)
        return value

    async def activate(self, number: int, body: Any, *, capture: bool) -> Reply:
        """One activation. Sent again after an ambiguous outcome only to a peer that joins and replays."""
        headers = {SESSION: self.session_id, ACTIVATION: str(number)}
        policy = DEDUPLICATED if self.speaks_protocol else BEFORE_DELIVERY
        return await self._send("/v1/responses", body, headers, policy, capture=capture)

    async def call(self, path: str, body: Any) -> Reply:
        """One call that is sent again only if nothing was delivered (verify)."""
        headers = {SESSION: self.session_id, CLOSE_TOKEN: self._token}
        return await self._send(path, body, headers, BEFORE_DELIVERY)

    async def close(self, stage: Stage = Stage.CLEANUP) -> dict[str, Any]:
        """The close reply. Draws on the budget; on success nothing is owed any more.

        Raises the error of the last try, or `TimeoutError` when the budget is used up.
        """
        what = f"close of the {self.door.role} session"
        body = {self.door.id_field: self.session_id, "episode_id": self._episode_id}
        # One attempt gets half of what is left: a peer that went away without a word leaves time for another.
        timeout_s = self._budget_s / 2
        async with self._within_budget():
            headers = {CLOSE_TOKEN: self._token}
            reply = await self._send(self.door.close_path, body, headers, DEDUPLICATED, timeout_s=timeout_s)
        value = read_object(accepted(reply, stage, what), what)
        self.owes_close = False
        if value.get(self.door.id_field) != self.session_id:
            raise bad_reply(reply, what, self._of_another())
        return value

    def _of_another(self) -> str:
        return f"has not the {self.door.id_field} of {self.session_name}, which was sent"

    @asynccontextmanager
    async def _within_budget(self) -> AsyncIterator[None]:
        """Draw on what the closes may take. Raises `TimeoutError` when it is used up."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self._budget_s)):
                yield
        finally:
            self._budget_s -= loop.time() - began

    async def close_quietly(self) -> dict[str, Any] | None:
        """Close if that is still owed. A failure is logged and kept in `close_failure`, never raised."""
        if not self.owes_close:
            return None
        try:
            return await self.close()
        except Exception as error:  # whatever it is, other participants are waiting to be closed
            known = isinstance(error, TopropeError | TimeoutError)
            unnamed = "no reply within the clean-up time" if known else f"{type(error).__name__}: {error}"
            self.close_failure = getattr(error, "message", unnamed)
            log.warning(
                "rollout %s: %s session %s may be left open: %s",
                self._key,
                self.door.role,
                self.session_name,
                self.close_failure,
                exc_info=None if known else error,
            )
            return None

    @property
    def session_name(self) -> str:
        """What the session is called in reports and logs."""
        return session_name(self.session_id)

    @property
    def _key(self) -> str:
        return self._episode_id.key

    def tool_credentials(self) -> tuple[dict[str, str], dict[str, str]]:
        """Headers and cookies for a grant: the tools-only credential that the seed gave, or else the session's name,
        which with a token registered can call tools but neither verify nor close; to a stranger, who knows sessions by
        cookie only, the cookies."""
        if self.tools_credential is not None:
            return {TOOLS: self.tools_credential}, {}
        if self.speaks_protocol:
            return {SESSION: self.session_id}, {}
        return {}, dict(self.cookies)

    async def _send(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        policy: ReplayPolicy,
        *,
        capture: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        cookies = self.cookies or None
        reply = await self.peer.request(
            "POST",
            path,
            body=body,
            headers=headers,
            cookies=cookies,
            policy=policy,
            capture=capture,
            timeout_s=timeout_s,
        )
        self.cookies = merge_cookies(self.cookies, reply)
        self.speaks_protocol = self.speaks_protocol or PROTOCOL in reply.headers
        return reply


def _older(value: Mapping[str, Any]) -> str:
    return "" if value else " (an empty reply is that of an older server, which needs `protocol: flat`)"


def with_session(failure: Failure, handle: str | None, partial: dict[str, Any] | None) -> Failure:
    """`failure` with what is known beside it."""
    return Failure(
        failure.failure_reason,
        failure.terminal,
        failure.failure_kind,
        failure.stage,
        failure.delivery,
        failure.upstream_status,
        handle,
        partial,
    )

"""Attempts whose `/run` brought no reply: what sessions they had, asked of their environment server afterwards.

A server of ours in this process tells its sessions as they are seeded; one elsewhere is asked with `GET /sessions`. So
that an orphaned container can be traced to the aborted rollout it belonged to, also when the reply was lost or the call
was cancelled. Both tell a session by its name (`session_name`) and not by its id, with which its tools can be called.
A diagnostic: it costs the run at most `ASK_S`, and never a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from toprope.errors.tree import TopropeError
from toprope.http.client import Peer
from toprope.http.replay import SAFE
from toprope.protocol.ids import EpisodeId
from toprope.servers.environment.participant import SessionReport

log = logging.getLogger(__name__)

ASK_S = 5.0

Tell = Callable[[SessionReport, str], object]


class LostAttempts:
    """The keys of lost attempts by the peer that they went to. `tell` gets each session, opened and closed."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lost: dict[Peer, set[str]] = {}

    def add(self, peer: Peer, key: str) -> None:
        """`key` went to `peer`, and nothing came back."""
        self._lost.setdefault(peer, set()).add(key)

    async def ask(self) -> None:
        """Ask every peer concerned, all at once. On return what they know was told, or the time was up."""
        lost, self._lost = self._lost, {}
        await asyncio.gather(*(self._ask(peer, keys) for peer, keys in lost.items()))

    async def _ask(self, peer: Peer, keys: set[str]) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                reply = await peer.request("GET", "/sessions?since=0", policy=SAFE)
            found = reply.json() if reply.status == 200 else {}
        except (TopropeError, TimeoutError) as error:
            log.warning("%d attempts without a reply: their sessions are not known (%s)", len(keys), error)
            return
        entries = found.get("sessions") if isinstance(found, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            report = _read(entry)
            if report is None or report.episode_id.key not in keys:
                continue
            self._tell(report, "opened")
            if entry.get("closed") is True:
                self._tell(report, "closed")


def _read(entry: Any) -> SessionReport | None:
    """One entry of the reply; None for what is none."""
    try:
        episode = EpisodeId(entry["episode_id"]["rollout_id"], entry["episode_id"]["attempt"])
        handle = entry.get("env_session_id")
        role = entry["participant"]
        if role not in ("resources", "agent"):
            return None
        return SessionReport(episode, role, str(entry["session_id"]), handle if isinstance(handle, str) else None)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None

"""A session at an older environment (`protocol: flat`): NeMo Gym's servers that know no typed seed.

    POST /seed_session   the flat task; the reply is empty, its cookie is the session
    POST /verify         the flat task and the response
    POST /close_session  most have none: a refusal is fine

Nobody but the cookie names such a session. A seed whose reply was lost leaves one that nothing can close, so it is sent
again only if it was never delivered. Left to others: sessions with ids of ours (`participant`), the order of calls.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from toprope.errors.kinds import Delivery, Stage
from toprope.errors.tree import TransportError
from toprope.http.replay import BEFORE_DELIVERY
from toprope.http.reply import Reply
from toprope.servers.environment.judging import accepted, read_object
from toprope.servers.environment.participant import Participant

log = logging.getLogger("toprope.episode")

_NO_SUCH_ROUTE = (404, 405, 410, 422, 501)
"""How a server says that it closes no sessions, or none of this kind."""


class FlatResources(Participant):
    """The caller's side of a cookie session."""

    async def seed(self, fields: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
        """The seed reply ({} where it is empty). `fields` is the flat task, sent as it is."""
        what = f"seed of the {self.door.role} session"
        try:
            reply = await self._send(self.door.seed_path, fields, {}, BEFORE_DELIVERY)
        except TransportError as error:
            self.owes_close = False
            if error.delivery is not Delivery.NOT_SENT:
                log.warning("rollout %s: a session of %s may be left open: its cookie was lost", self._key, self.peer)
            raise
        value = _object(accepted(reply, stage, what), what)
        if "mcp" in value:
            value.setdefault("resources_tools", value["mcp"])
        return value

    async def call(self, path: str, body: Any) -> Reply:
        """One call with the session's cookies, sent again only if nothing was delivered."""
        return await self._send(path, body, {}, BEFORE_DELIVERY)

    async def close(self, stage: Stage = Stage.CLEANUP) -> dict[str, Any]:
        """One close, for servers that have it; a server that has none owes nothing. Errors as `Participant.close`."""
        what = f"close of the {self.door.role} session"
        body = {self.door.id_field: self.session_id, "episode_id": self._episode_id}
        async with self._within_budget():
            reply = await self._send(self.door.close_path, body, {}, BEFORE_DELIVERY)
        self.owes_close = False
        return {} if reply.status in _NO_SUCH_ROUTE else _object(accepted(reply, stage, what), what)

    def tool_credentials(self) -> tuple[dict[str, str], dict[str, str]]:
        """The cookies: nothing else names the session."""
        return {}, dict(self.cookies)


def _object(reply: Reply, what: str) -> dict[str, Any]:
    """The body as a JSON object; {} where it is empty or null. Raises as `read_object`."""
    return {} if reply.body.strip() in (b"", b"null") else read_object(reply, what)

"""Several endpoints that serve one model: which of them gets a call.

A rollout stays on the replica that its first call went to, where its prefix is cached; a new one goes where the fewest
calls are in hand, and among equals where the last new one came longest ago, so that rollouts begun one after another
spread. Another replica takes over only where it is certain that nothing was delivered; the one that could
not be reached is left alone for a while. Left to others: sending a call, and sending it again (`chat_endpoint`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from toprope.errors.kinds import Delivery
from toprope.errors.tree import EngineUnavailable
from toprope.servers.model.engines.chat_endpoint import ChatEndpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

DOWN_S = 10.0
"""Seconds for which a replica that could not be reached gets no call, as long as another one is left."""
_REMEMBERED = 65_536
"""Rollouts whose replica is remembered; the one that called longest ago is forgotten first."""


@dataclass(slots=True, eq=False)
class Replica:
    """One endpoint, the calls in hand there, which new rollout it got last, and until when it is taken to be down."""

    endpoint: ChatEndpoint
    calls: int = 0
    newest: int = 0
    down_until: float = 0.0


class Replicas:
    """The endpoints of one engine, in the order in which ties are decided."""

    def __init__(self, endpoints: Sequence[ChatEndpoint], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.all = [Replica(endpoint) for endpoint in endpoints]
        self._clock = clock
        self._given = 0  # new rollouts so far
        self._homes: OrderedDict[str, Replica] = OrderedDict()

    async def run(self, key: str | None, call: Callable[[ChatEndpoint], Awaitable[T]]) -> T:
        """What `call` makes of the replica that `key` lives on (None: of the least loaded one).

        Raises what the last replica tried raised; the others are tried only after `EngineUnavailable` with nothing
        delivered.
        """
        untried = list(self.all)
        while True:
            replica = self._choose(key, untried)
            untried.remove(replica)
            replica.calls += 1
            try:
                made = await call(replica.endpoint)
            except EngineUnavailable as error:
                if error.delivery is not Delivery.NOT_SENT:
                    raise
                replica.down_until = self._clock() + DOWN_S
                if not untried:
                    raise
                log.warning("%s; another replica takes the call", error)
            else:
                replica.down_until = 0.0
                return made
            finally:
                replica.calls -= 1

    def _choose(self, key: str | None, among: list[Replica]) -> Replica:
        now = self._clock()
        up = [replica for replica in among if replica.down_until <= now] or among
        home = None if key is None else self._homes.get(key)
        settled = home is not None and home in up
        replica = home if home is not None and settled else min(up, key=lambda each: (each.calls, each.newest))
        if key is not None:
            if not settled:
                self._given += 1
                replica.newest = self._given
            self._homes[key] = replica
            self._homes.move_to_end(key)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return replica

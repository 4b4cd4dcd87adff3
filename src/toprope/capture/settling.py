"""Waiting for calls in flight: woken by what happens in this process, looking now and then for what others do.

A store asks `wait_settled` with a question that says which open calls may still end, and tells `Changes` whenever a
call of a key ended. Which intents of the dead are settled how: `tokens.settling`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOOK_S = 0.02
"""Seconds between looks at calls of another process, which cannot wake us; a look is one short read."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The open calls of a key whose writers may be alive: how many are this process's own, and how many others'."""

    ours: int = 0
    others: int = 0


class Changes:
    """Wakes whoever waits for a key, on any event loop. Telling costs next to nothing while nobody waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._guard = threading.Lock()

    def tell(self, key: str) -> None:
        """A call of `key` has ended, durably."""
        if key not in self._waiting:
            return
        with self._guard:
            waiting = list(self._waiting.get(key, ()))
        for loop, event in waiting:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                continue  # that loop is closed: nobody waits there any more

    @contextmanager
    def watched(self, key: str) -> Iterator[asyncio.Event]:
        """An event that is set by every `tell` of `key` inside the `with` statement."""
        place = (asyncio.get_running_loop(), asyncio.Event())
        with self._guard:
            self._waiting.setdefault(key, []).append(place)
        try:
            yield place[1]
        finally:
            with self._guard:
                left = self._waiting[key]
                left.remove(place)
                if not left:
                    del self._waiting[key]


async def wait_settled(
    changes: Changes, key: str, in_flight: Callable[[], Awaitable[InFlight]], timeout_s: float
) -> bool:
    """On return nothing of `key` is in flight (True), or `timeout_s` seconds have passed (False)."""
    try:
        async with asyncio.timeout(timeout_s):
            with changes.watched(key) as changed:
                while True:
                    changed.clear()
                    flying = await in_flight()
                    if not flying.ours and not flying.others:
                        return True
                    try:
                        async with asyncio.timeout(LOOK_S if flying.others else None):
                            await changed.wait()
                    except TimeoutError:
                        continue  # time for another look
    except TimeoutError:
        return False

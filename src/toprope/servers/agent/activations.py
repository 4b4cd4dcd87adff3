"""The activations of one agent session: numbered, joined, replayed, stopped by the session's close.

    same number, same body     joins the one that runs, or gets its outcome again (a failure too)
    n+1 after n finished       a new activation
    anything else              409

Left to others: what an activation does (`agent`), HTTP (`server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from toprope.errors.kinds import Kind
from toprope.errors.tree import Conflict, TopropeError


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    digest: str
    task: asyncio.Task[Any]


class Activations:
    """At most one activation runs at a time; the last outcome is kept for its retries."""

    def __init__(self) -> None:
        self._last: _Running | None = None
        self._stopped = False

    @property
    def next_number(self) -> int:
        """The number of an activation whose caller gave none."""
        return 1 if self._last is None else self._last.number + 1

    async def run(self, number: int | None, digest: str, start: Callable[[int], Awaitable[Any]]) -> Any:
        """The outcome of activation `number` (None: the next one), run now or before.

        Cancelling the caller does not stop it. Raises `Conflict` as the module says, kind cancelled (retryable) when
        the close of the session stopped it, and what `start` raised.
        """
        last = self._last
        if number is not None and last is not None and number == last.number:
            if digest != last.digest:
                raise Conflict(f"activation {number}: was sent before with another body")
            return await self._outcome(last)
        if last is not None and not last.task.done():
            raise Conflict(f"activation {number or last.number + 1}: activation {last.number} still runs")
        if number is not None and number != self.next_number and last is not None:
            raise Conflict(f"activation {number}: the next one of this session is {self.next_number}")
        if self._stopped:
            raise Conflict("activation: the session is being closed")
        number = self.next_number if number is None else number
        task = asyncio.ensure_future(start(number))
        self._last = _Running(number, digest, task)
        return await self._outcome(self._last)

    def stop(self) -> None:
        """Cancel the activation that runs, if any, and admit no new one."""
        self._stopped = True
        if self._last is not None:
            self._last.task.cancel()

    async def _outcome(self, running: _Running) -> Any:
        await asyncio.wait([running.task])
        if running.task.cancelled():
            raise TopropeError(
                f"activation {running.number}: stopped, since its session was closed",
                kind=Kind.CANCELLED,
                status=503,
                retryable=True,
            )
        return running.task.result()

"""What is found out about an engine once, by asking it, and shared by all who need it.

    asked for together    it is found out once; who leaves does not take it away from the others
    found out             kept, also where the answer is no
    the engine failed     kept for a short time, so that calls in a row do not each pay for the same failure

Left to others: what is found out, and how (`vllm_turns`).
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from toprope.errors.tree import EngineError

UNANSWERED_S = 1.0
"""Seconds for which an engine that did not answer is not asked again: as long as the `retry-after` of its 503."""
REFUSED_S = 60.0
"""The same for one that answered with an error which asking again would not change."""
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Outcome:
    """`told` None: it holds; a text: why not; an error: nobody knows."""

    told: str | EngineError | None
    until: float


class Proofs:
    """Answers by key. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Outcome] = OrderedDict()
        self._running: dict[str, asyncio.Task[_Outcome]] = {}

    async def why_not(self, key: str, ask: Callable[[], Awaitable[str | None]]) -> str | None:
        """What `ask` said of `key`, now or before: None where it holds, else why it does not.

        Raises the `EngineError` that `ask` raised. A caller that is cancelled leaves `ask` to go on.
        """
        outcome = self._known.get(key)
        if outcome is None or outcome.until <= self._clock():
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._find_out(key, ask))
            outcome = await asyncio.shield(task)
        elif outcome.until == math.inf:
            self._known.move_to_end(key)
        if isinstance(outcome.told, EngineError):
            raise copy.copy(outcome.told)  # its own for each who waited: raising adds to an error's traceback
        return outcome.told

    async def _find_out(self, key: str, ask: Callable[[], Awaitable[str | None]]) -> _Outcome:
        try:
            outcome = _Outcome(await ask(), math.inf)
        except EngineError as error:
            outcome = _Outcome(error, self._clock() + (UNANSWERED_S if error.retryable else REFUSED_S))
        finally:
            del self._running[key]
        self._known[key] = outcome
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return outcome

    async def close(self) -> None:
        """On return nothing is being found out any more."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

"""The check of the conformance suite that comes before all that depend on it: every call of an environment ends, and
none blocks the event loop.

Left to others: what a call answers (`environment_suite`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from toprope.testing.environment_kit import House, Nonconforming, Subject, must, sample_arguments, served

BLOCK_S = 0.25
"""A call that blocks the loop for longer, every time, is a finding: the other sessions wait as long, one by one."""

TRIES = 3
BEAT_S = 0.01


async def every_call_ends_and_leaves_the_loop_free(subject: Subject) -> None:
    """Seed, each tool, verify and release end, and none blocks the event loop, in which every session is served."""
    async with served(subject) as house:
        blocked = await _longest_blocks(subject, house)
        for _ in range(TRIES - 1):  # a machine that stood still looks alike; an environment does it every time
            if not any(seconds > BLOCK_S for seconds in blocked.values()):
                return
            again = await _longest_blocks(subject, house)
            blocked = {what: min(seconds, again[what]) for what, seconds in blocked.items()}
        worst = max(blocked, key=lambda what: blocked[what])
        must(
            blocked[worst] <= BLOCK_S,
            f"{worst} blocked the event loop for {blocked[worst]:.2g} s, in which no other session was served; make it "
            "a plain function, which runs in a thread, or await what it waits for",
        )


async def _longest_blocks(subject: Subject, house: House) -> dict[str, float]:
    """Each call of one session once; for how many seconds it blocked the loop at most. Raises if one never ends."""
    caller = house.caller()
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {"seed": caller.seed}
    for name, spec in subject.environment.tools.items():
        calls[f"tool {name}"] = partial(caller.post, f"/{name}", sample_arguments(spec.parameters)[0])
    calls |= {"verify": caller.verify, "release": caller.close}
    longest = {}
    for what, call in calls.items():
        task = asyncio.ensure_future(call())
        async with Pulse() as pulse:
            await asyncio.wait({task}, timeout=subject.call_timeout_s)
        if not task.done():
            subject.stuck.append(f"{what} did not end within {subject.call_timeout_s:g} s")
            task.cancel()
            raise Nonconforming(subject.stuck[0])
        longest[what] = pulse.longest_s
    return longest


class Pulse:
    """The longest time, in seconds, in which the event loop did nothing else: what blocks it blocks every session."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pulse:
        self._task = asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)  # it has begun
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await asyncio.sleep(0)  # what blocked until now is seen
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            try:
                await asyncio.sleep(BEAT_S)
            finally:
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - last - BEAT_S)
                last = now

"""Bounded dispatch: at most `concurrency` attempts in flight, until the schedule is empty or the run is stopped.

A stop comes from outside (SIGINT, the wall-clock budget, the mask limit) or from a fatal error. It ends dispatching;
requests in flight are cancelled or left to drain; what has begun to finish is always let finish, so that a verdict
that came back is on disk. Nothing runs on behind the caller's back once `dispatch` returns or raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from toprope.collector.schedule import Attempt, Schedule, Wait

T = TypeVar("T")


class Stopped(Exception):
    """The request was given up because the run stops."""


class StopSignal:
    """Asked once or more; the first reason stands, and a later call may still turn draining into cancelling."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.message = ""
        self.cancelling = False
        self._requests: set[asyncio.Task[Any]] = set()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` with every request to stop."""
        self._listeners.append(listener)

    def request(self, reason: str, message: str = "", *, cancel: bool) -> None:
        """Stop dispatching; with `cancel` also give up the requests in flight. From the loop's own thread."""
        if self.reason is None:
            self.reason, self.message = reason, message
        if cancel:
            self.cancelling = True
            for task in self._requests:
                task.cancel()
        for listener in self._listeners:
            listener()

    async def cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; raises `Stopped` once a stop has cancelled it and it has ended."""
        if self.cancelling:
            work.close()
            raise Stopped
        task = asyncio.ensure_future(work)
        self._requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.cancelling and current is not None and not current.cancelling():
                raise Stopped from None
            raise
        finally:
            self._requests.discard(task)


async def dispatch(
    schedule: Schedule,
    run: Callable[[Attempt], Awaitable[None]],
    *,
    concurrency: int,
    stop: StopSignal,
    clock: Callable[[], float],
) -> None:
    """Run attempts until nothing is left or `stop` is asked for; on return none is in flight.

    `run` reports to the schedule itself; an exception from it is fatal: the others are stopped and awaited, then it
    is raised.
    """
    wake = asyncio.Event()
    stop.listen(wake.set)
    running: set[asyncio.Task[None]] = set()
    fatal: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            fatal.append(error)
        wake.set()

    def fill() -> Wait | None:
        """Start what may start; the wait until more is due, or None."""
        while len(running) < concurrency and stop.reason is None:
            step = schedule.next(clock())
            if not isinstance(step, Attempt):
                return step
            task = asyncio.ensure_future(run(step))
            running.add(task)
            task.add_done_callback(ended)
        return None

    try:
        while not fatal:
            wake.clear()
            wait = fill()
            if not running and wait is None:
                return
            await _woken(wake, None if wait is None else wait.seconds)
        raise fatal[0]
    finally:
        if running:
            stop.request("failed", cancel=True)
            await asyncio.gather(*running, return_exceptions=True)


async def _woken(wake: asyncio.Event, timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            await wake.wait()
    except TimeoutError:
        pass  # a retry is due

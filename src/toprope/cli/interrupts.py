"""One event loop for a command, and what Ctrl-C does to it: once stops in order, twice ends at once.

The process is the command's, so its garbage collector is set here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from toprope.cli.reporting import INTERRUPTED

T = TypeVar("T")


SAME_S = 0.25
"""One Ctrl-C can arrive twice: from the terminal, and passed on by a parent such as make or timeout."""


class Interrupts:
    """Counts SIGINT and SIGTERM. The first calls `on_first` (default: cancel the command), the second ends at once."""

    def __init__(self, task: asyncio.Task[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self.on_first: Callable[[], object] = task.cancel
        self._clock = clock
        self._first = 0.0

    def __call__(self) -> None:
        now = self._clock()
        if self.count and now - self._first < SAME_S:
            return
        self.count += 1
        if self.count == 1:
            self._first = now
            self.on_first()
        else:
            # Rows and records are appended whole and synced, so there is nothing that leaving now could tear.
            print("\ntoprope: interrupted twice, ended at once", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)


def run_async(command: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run `command` to its end. If a signal cancelled it, says so and ends with exit status 130."""

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        interrupts = Interrupts(task)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError):  # not the main thread: the caller has signals
                loop.add_signal_handler(number, interrupts)
        try:
            return await command(interrupts)
        except asyncio.CancelledError:
            if interrupts.count:
                print("toprope: interrupted", file=sys.stderr, flush=True)
                raise SystemExit(INTERRUPTED) from None
            raise

    return _with_uvloop(main)


def collect_rarely() -> None:
    """Look for cycles less often than Python does by itself.

    A run holds many objects and makes hardly any cycles; looking every 700 allocations took 9 % of the CPU of a
    captured model call, this takes 3 %.
    """
    gc.set_threshold(10_000, 20, 50)


def _with_uvloop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    import uvloop

    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())

"""Where an author's plain functions run: a sized pool of worker threads, with the caller's context kept.

Daemon threads of our own and not an executor's, because an executor joins its threads when the interpreter ends, so
that one stuck scorer would keep the whole process from ending. A cancelled caller waits for its thread: a thread
cannot be stopped, and to go on as if it had would let two calls touch one session's state. What is stuck is counted.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, TypeVar

from toprope.errors.body import said_by

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class Escaped(Exception):
    """What an author's code raised that is no `Exception` (sys.exit(), KeyboardInterrupt): an error like any other.

    Let through, it would end the event loop, and with it every other episode of the process.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(said_by(error))


async def contained(work: Awaitable[T]) -> T:
    """The outcome of an author's `work`. Raises `Escaped` for what is no `Exception`, but for a real cancellation."""
    me = asyncio.current_task()
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and me is not None and me.cancelling():
            raise
        if isinstance(error, GeneratorExit) and asyncio.current_task() is not me:
            raise  # nobody raised it: this coroutine is being thrown away
        raise Escaped(error) from error


class WorkerThreads:
    """At most `size` threads, started as they are needed. Use from one event loop at a time."""

    def __init__(self, size: int = 8, *, name: str = "toprope-worker") -> None:
        if size < 1:
            raise ValueError(f"worker threads: {size} given, at least 1 needed")
        self.size = size
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = 0
        self._running: dict[int, float] = {}

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function`: awaited if it is a coroutine function, else run in a thread in today's context.

        Raises what it raised; `Escaped` for what is no `Exception`.
        """
        if inspect.iscoroutinefunction(function):
            return await contained(function(*args, **kwargs))
        context = copy_context()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting += 1
        if self._waiting > len(self._threads) and len(self._threads) < self.size:
            self._grow()
        self._jobs.put((lambda: context.run(function, *args, **kwargs), future, loop))
        try:
            result = await _uninterrupted(future)
        finally:
            self._waiting -= 1
        return await contained(result) if inspect.isawaitable(result) else result

    def stuck(self, longer_than_s: float) -> int:
        """How many calls have been running for longer than `longer_than_s` seconds."""
        now = time.monotonic()
        return sum(now - began > longer_than_s for began in list(self._running.values()))

    def close(self) -> None:
        """Tell idle threads to end. A thread that still runs a call ends after it."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _grow(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        me = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            call, future, loop = job
            self._running[me] = time.monotonic()
            outcome: Any = None
            failure: BaseException | None = None
            try:
                outcome = call()
            except BaseException as error:  # goes to whoever awaits the call, whatever it is
                failure = error
            finally:
                self._running.pop(me, None)
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, failure)
            except RuntimeError:
                pass  # the loop is gone, and with it everybody who waited
            del call, future, loop, job, outcome, failure


def _settle(future: asyncio.Future[Any], outcome: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(failure, StopIteration):
        failure = RuntimeError("the function raised StopIteration")  # a future cannot carry it
    if failure is not None and not isinstance(failure, Exception):
        escaped = Escaped(failure)
        escaped.__cause__ = failure
        failure = escaped
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(outcome)


async def _uninterrupted(future: asyncio.Future[Any]) -> Any:
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # seen, so that the loop does not report it
        raise cancelled
    return future.result()

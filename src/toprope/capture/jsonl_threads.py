"""Blocking work on threads: one at a time for a key, many keys at once.

A key that waits (for a lock that another process holds, for a slow sync) holds one thread, however much is queued for
it, so that it cannot starve the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class KeyedThreads:
    """A pool of threads with one queue a key. Use from any event loop; the pool starts with the first work."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._guard = threading.Lock()
        self._queues: dict[str, deque[Callable[[], None]]] = {}
        self._idle = threading.Condition(self._guard)
        self._closed = False

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises, after everything that was queued for the key before.

        A caller that is cancelled while it waits does not know: the work may be done all the same.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                answer: Any = work()
            except BaseException as error:  # told to whoever waits; the thread goes on
                _tell(loop, future, None, error)
            else:
                _tell(loop, future, answer, None)

        with self._guard:
            if self._closed:
                raise RuntimeError("the capture store is closed")
            queue = self._queues.get(key)
            if queue is None:
                self._queues[key] = deque([job])
                self._pool.submit(self._one, key)
            else:
                queue.append(job)
        return await future

    async def close(self) -> None:
        """On return everything queued before is done and no thread is left. Twice: no-op."""
        with self._guard:
            self._closed = True
        await asyncio.to_thread(self._drain)

    def _drain(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._queues)
        self._pool.shutdown()

    def _one(self, key: str) -> None:
        with self._guard:
            job = self._queues[key].popleft()
        job()
        with self._idle:
            if self._queues[key]:
                self._pool.submit(self._one, key)  # behind the other keys
            else:
                del self._queues[key]
                self._idle.notify_all()


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], answer: Any, error: BaseException | None
) -> None:
    def tell() -> None:
        if future.done():
            return  # its caller was cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:
        pass  # that loop is closed: nobody waits there any more, and the work is done

"""One writer thread that turns many waiting writers into one commit.

Callers on any event loop submit items and wait; the thread takes everything that has gathered while the last commit
ran and hands it on as one group, so that a single device sync serves all of them. What a commit does with a group is
the caller's affair (`rows`, `capture.sqlite_writer`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_GROUP = 1024
"""Items in one commit. Far above what gathers in one sync at any sane concurrency; bounds the time a lock is held."""


class _Waiter(Generic[Item, Result]):
    __slots__ = ("future", "item", "loop")

    def __init__(self, item: Item, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Result]) -> None:
        self.item = item
        self.loop = loop
        self.future = future


class GroupCommit(Generic[Item, Result]):
    """A queue of items, a thread, and one answer for each item.

    `commit(items)` runs on the thread and returns one result or exception per item, in order; an exception that it
    raises instead is given to every item of the group. `finish`, if given, runs on the thread when it ends. The
    thread starts with the first item and is a daemon: what was not acknowledged may be lost with the process.
    """

    def __init__(
        self,
        name: str,
        commit: Callable[[Sequence[Item]], Sequence[Result | BaseException]],
        *,
        finish: Callable[[], None] | None = None,
        max_group: int = MAX_GROUP,
    ) -> None:
        self._name = name
        self._commit = commit
        self._finish = finish
        self._max_group = max_group
        self._queue: SimpleQueue[_Waiter[Item, Result] | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def submit(self, item: Item) -> Result:
        """On return `item` is committed; raises what its commit raised.

        A caller that is cancelled while it waits does not know: the item may be committed all the same.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._guard:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(_Waiter(item, loop, future))
        return await future

    async def close(self) -> None:
        """On return everything submitted before is committed and answered, and the thread has ended."""
        with self._guard:
            thread, first = self._thread, not self._closed
            self._closed = True
            if first and thread is not None:
                self._queue.put(None)
        if thread is not None:
            await asyncio.to_thread(thread.join)
        elif first and self._finish is not None:
            await asyncio.to_thread(self._finish)

    def _run(self) -> None:
        running = True
        while running:
            group, running = self._gather()
            if group:
                self._answer(group, self._results(group))
        if self._finish is not None:
            self._finish()

    def _gather(self) -> tuple[list[_Waiter[Item, Result]], bool]:
        group: list[_Waiter[Item, Result]] = []
        waiter = self._queue.get()
        while waiter is not None:
            group.append(waiter)
            if len(group) >= self._max_group:
                return group, True
            try:
                waiter = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _results(self, group: Sequence[_Waiter[Item, Result]]) -> Sequence[Result | BaseException]:
        try:
            results = self._commit([waiter.item for waiter in group])
        except BaseException as error:  # the thread must live on; every waiter of the group is told
            return [error] * len(group)
        if len(results) != len(group):
            return [RuntimeError(f"{self._name}: {len(results)} answers for {len(group)} items")] * len(group)
        return results

    @staticmethod
    def _answer(group: Sequence[_Waiter[Item, Result]], results: Sequence[Result | BaseException]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Result], Result | BaseException]]] = {}
        for waiter, result in zip(group, results, strict=True):
            by_loop.setdefault(waiter.loop, []).append((waiter.future, result))
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers)
            except RuntimeError:
                continue  # that loop is closed: nobody waits there any more, and the work is done


def _resolve(answers: Sequence[tuple[asyncio.Future[Result], Result | BaseException]]) -> None:
    for future, result in answers:
        if future.done():
            continue  # its caller was cancelled
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

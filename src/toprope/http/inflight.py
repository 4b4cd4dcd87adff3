"""The calls that a server has in hand, and who may end each of them.

    attached   the client's leaving cancels the handler; so does stop()
    drained    the client's leaving cancels it; stop() lets it run to the drain bound (a detached call's streamed body)
    detached   the handler runs to its end in a task of its own; only stop() ends it, after the drain bound
    kept       work that a handler handed over (`keep`); like detached

Left to others: what a handler does, how its outcome becomes a reply (`app`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

from toprope.errors.tree import NotReady, TopropeError
from toprope.http.asgi import Receive
from toprope.http.inbound import ClientLeft
from toprope.http.reply import Reply
from toprope.http.streaming import close_stream

T = TypeVar("T")

log = logging.getLogger("toprope.http")

# Handlers that end within this need no watcher task; one that takes longer learns of a leaving client this late at
# most. A task costs about 15 us, a timer that is cancelled about 1.
WATCH_AFTER_S = 0.01
# What a cancelled handler gets for its own clean-up when the server stops, before it is named in the log and left.
UNWIND_S = 10.0

Answer = Callable[[], Awaitable[Reply]]
_Cause = Literal["client_left", "stopping"]


class InFlight:
    """The attached and detached calls of one server."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._attached: set[_Attached] = set()
        self._detached: set[asyncio.Task[Any]] = set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._attached) + len(self._detached)

    async def attached(self, answer: Callable[[], Awaitable[T]], receive: Receive, *, drained: bool = False) -> T:
        """Run `answer` here. Raises `ClientLeft` when the client's leaving ended it, `NotReady` when stop() did: at
        once, or if `drained` at the drain bound."""
        task = asyncio.current_task()
        assert task is not None
        call = _Attached(task, receive, drained)
        self._attached.add(call)
        timer = task.get_loop().call_later(WATCH_AFTER_S, call.watch)
        try:
            reply = await answer()
        except asyncio.CancelledError:
            if call.cause is not None:
                task.uncancel()
            if task.cancelling():  # whoever runs the server cancels this task
                raise
            raise call.outcome(self._server) from None
        finally:
            timer.cancel()
            call.end()
            self._attached.discard(call)
        if call.cause is not None:  # cancelled in the very step in which it ended: take that cancellation back
            await _absorb_cancellation(task)
            if call.cause == "client_left":
                if isinstance(reply, Reply) and reply.stream is not None:  # nobody will read it
                    await close_stream(reply.stream)
                raise ClientLeft
        return reply

    async def detached(self, answer: Answer, label: str) -> Reply:
        """Run `answer` in a task of its own; it goes on when whoever waits here is cancelled."""
        return await asyncio.shield(self.keep(self._guard(answer), label))

    def keep(self, work: Coroutine[Any, Any, T], label: str) -> asyncio.Task[T]:
        """`work` as a task that stop() waits for and cancels at the drain bound."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._server}: {label}")
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)
        return task

    async def _guard(self, answer: Answer) -> Reply:
        try:
            return await answer()
        except asyncio.CancelledError:
            if self.stopping:
                raise NotReady(f"{self._server} is shutting down; the call was stopped at the drain bound") from None
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _stray(self._server) from None

    async def drain(self, bound_s: float) -> None:
        """End everything: attached calls now, the others when done or after `bound_s`. Nothing runs on return, work
        that was handed over meanwhile included.

        A handler that resists its cancellation for `UNWIND_S` is named in the log and left behind.
        """
        self.stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + bound_s
        own = asyncio.current_task()  # a handler may stop its own server
        left: set[asyncio.Task[Any]] = set() if own is None else {own}
        while True:
            ended = {call.task for call in self._attached if not call.drained and call.task not in left}
            for call in self._attached:
                if call.task in ended:
                    call.cancel("stopping")
            while (working := self._working() - left) and (wait_s := deadline - loop.time()) > 0:
                await asyncio.wait(working, timeout=wait_s)
            ended |= self._cut(left, bound_s)
            ended = {task for task in ended if not task.done()}
            if ended:
                _, resisting = await asyncio.wait(ended, timeout=UNWIND_S)
                for task in resisting:
                    log.error("%s: %s resists its cancellation and is left behind", self._server, task.get_name())
                left |= resisting
            if not (self._working() | {call.task for call in self._attached}) - left:
                return

    def _working(self) -> set[asyncio.Task[Any]]:
        return self._detached | {call.task for call in self._attached if call.drained}

    def _cut(self, left: set[asyncio.Task[Any]], bound_s: float) -> set[asyncio.Task[Any]]:
        """Cancel what still works at the drain bound."""
        late = self._working() - left
        for task in late:
            log.warning("%s: stopped after %g s of draining", task.get_name(), bound_s)
        for call in self._attached:
            if call.task in late:
                call.cancel("stopping")
        for task in late & self._detached:
            task.cancel()
        return late


class _Attached:
    """One attached call: its task, the watcher on its client, and why it was cancelled, if it was."""

    __slots__ = ("_receive", "_watcher", "cause", "drained", "task")

    def __init__(self, task: asyncio.Task[Any], receive: Receive, drained: bool) -> None:
        self.task = task
        self.cause: _Cause | None = None
        self.drained = drained
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        self._watcher = self.task.get_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cancel("client_left")

    def cancel(self, cause: _Cause) -> bool:
        if self.cause is not None:
            return False
        self.cause = cause
        return self.task.cancel()

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def outcome(self, server: str) -> Exception:
        match self.cause:
            case "client_left":
                return ClientLeft()
            case "stopping":
                return NotReady(f"{server} is shutting down")
        return _stray(server)


def _stray(server: str) -> TopropeError:
    """A handler ended in a CancelledError that nobody sent to it: something that it awaited was cancelled."""
    return TopropeError(f"{server}: something that the handler waited for was cancelled")


async def _absorb_cancellation(task: asyncio.Task[object]) -> None:
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        task.uncancel()

"""The body of a streamed reply: deltas as they come, the finish once the turn is done, keep-alives in between.

A turn is done when its record is durable (`turns`), so that no client sees the end of a turn that could still be lost.
What goes wrong after the first delta cuts the connection: clients resend cleanly after a cut, and some make up a tool
result after an error event. Where only keep-alives have left, a terminal error is told by its event: after a cut it
would be sent again for nothing. Left to others: the bytes of events (`dialects.stream`), sending them (the http kit).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from toprope.dialects.emitted import COMMENT
from toprope.dialects.pivot import PivotReply
from toprope.dialects.stream import StreamWriter
from toprope.errors.tree import NotReady, TopropeError
from toprope.http.reply import Reply
from toprope.http.streaming import close_stream
from toprope.servers.model.engines.base import Dialect, EngineReply
from toprope.servers.model.replies import late_error
from toprope.servers.model.turns import Turn, Turns

Finish = Callable[[EngineReply], PivotReply]


class TurnStream:
    """The chunks of one turn's stream. `finish` makes the reply to end with of the engine's.

    Closed before its end was sent, it tells `turns` that the client left. To be iterated by one task.
    """

    def __init__(self, turn: Turn, writer: StreamWriter, finish: Finish, *, turns: Turns, keep_alive_s: float) -> None:
        assert turn.task is not None
        self._turn = turn
        self._task = turn.task
        self._writer = writer
        self._finish = finish
        self._turns = turns
        self._keep_alive_s = keep_alive_s
        self._news: asyncio.Future[bool] | None = None  # what `_wait` waits for; True: there is something new
        self._head = b""
        self._opened = self._said = self._finished = self._sent = False
        turn.wake = self._wake
        self._task.add_done_callback(lambda _: self._wake())

    async def ready(self) -> None:
        """On return there is something to say. Raises what the turn raised where nothing was sampled before it.

        After a long silence it returns too: a keep-alive is something.
        """
        try:
            await self._wait()
        except asyncio.CancelledError:
            self._turns.leave(self._turn)
            raise
        if self._task.done() and not self._turn.deltas:
            self._made()

    def __aiter__(self) -> TurnStream:
        return self

    async def __anext__(self) -> bytes:
        if self._finished:
            self._sent = True  # whoever asks for more has sent what came before
            raise StopAsyncIteration
        head = b""
        if not self._opened:
            self._opened, head = True, self._writer.open()
            self._head = head
        elif not await self._wait():
            return self._writer.keep_alive()
        deltas, self._turn.deltas = self._turn.deltas, []
        self._said = self._said or bool(deltas)
        body = head + b"".join(map(self._writer.delta, deltas))
        if not self._task.done() or (deltas and not self._plain_end()):
            return body
        end = self._end()
        self._finished = True
        return body + end

    def _end(self) -> bytes:
        """The turn's end, or what tells its failure. Raises that failure where the connection is to be cut."""
        try:
            made = self._made()
        except TopropeError as error:
            told = None if self._said else late_error(self._turn.call.dialect, error, self._head)
            if told is None:
                raise
            return told
        return self._writer.finish(self._finish(made))

    async def aclose(self) -> None:
        """On return the turn knows that nobody reads it, unless its end was sent."""
        self._turn.wake = None
        if not self._sent:
            self._turns.leave(self._turn)

    async def _wait(self) -> bool:
        """Whether there is something new, or the turn is done; False after a long silence."""
        loop = asyncio.get_running_loop()
        while not self._turn.deltas and not self._task.done():
            news = self._news = loop.create_future()
            silence = loop.call_later(self._keep_alive_s, self._wake, False)
            try:
                if not await news:
                    return False
            finally:
                silence.cancel()
                self._news = None
        return True

    def _wake(self, told: bool = True) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(told)

    def _made(self) -> EngineReply:
        if self._task.cancelled():
            raise NotReady(f"call {self._turn.call.call_id} was stopped before it was done")
        return self._task.result()

    def _plain_end(self) -> bool:
        """Whether the turn ended well, so that its last deltas and its end may leave together."""
        return not self._task.cancelled() and self._task.exception() is None


class HeldStream:
    """The chunks of a streamed reply that waits for another call's: comments until it is known, then its own.

    It speaks `dialect` where there is an error to tell. `work` makes the reply, in a task of its own that keeps the
    caller's rollout. Closed before that, it is cancelled. To be iterated by one task.
    """

    def __init__(self, work: asyncio.Task[Reply], dialect: Dialect, keep_alive_s: float) -> None:
        self._work = work
        self._dialect = dialect
        self._keep_alive_s = keep_alive_s
        self._due = False
        self._chunks: AsyncIterator[bytes] | None = None
        work.add_done_callback(_looked_at)

    async def ready(self) -> Reply | None:
        """The reply, or None after a long silence: then this is its body. Raises what `work` raised."""
        try:
            await asyncio.wait({self._work}, timeout=self._keep_alive_s)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._work.done():
            return self._made()
        self._due = True
        return None

    def __aiter__(self) -> HeldStream:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks is None:
            if self._due or not await self._known():
                self._due = False
                return COMMENT
            self._chunks = self._begun()
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """On return nobody works on the reply any more, or its turn knows that nobody reads it."""
        if not self._work.done():
            self._work.cancel()  # what it had begun is written down in its own task, which the server waits for
        elif self._work.cancelled() or self._work.exception() is not None:
            return
        elif (stream := self._work.result().stream) is not None:
            await close_stream(stream)

    def _begun(self) -> AsyncIterator[bytes]:
        try:
            reply = self._made()
        except TopropeError as error:
            told = late_error(self._dialect, error, b"")
            if told is None:
                raise
            return _once(told)
        return _once(reply.body) if reply.stream is None else reply.stream

    async def _known(self) -> bool:
        await asyncio.wait({self._work}, timeout=self._keep_alive_s)
        return self._work.done()

    def _made(self) -> Reply:
        if self._work.cancelled():
            raise NotReady("the call was stopped before it was answered")
        return self._work.result()


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _looked_at(work: asyncio.Task[Reply]) -> None:
    """Look at what `work` raised, so that one whose client left is not logged as never looked at."""
    with contextlib.suppress(asyncio.CancelledError):
        work.exception()

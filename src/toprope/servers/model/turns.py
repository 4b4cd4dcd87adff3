"""One dispatched call: its generation, its record, and what becomes of both when the client leaves.

    there        deltas go to the client; the record is durable before the turn is done
    leaves       captured: the intent is aborted at once (`client_gone`), the generation goes on within the drain bound
                 and is recorded in full, which removes the abort; not captured: the generation is cancelled
    drain bound  a generation that still goes on is cancelled and its abort says so; a record is not cut

A captured generation, and a streamed one, runs in a task of its own, which the server's stop() waits for. Left to
others: how deltas become events (`streams`), which calls are dispatched at all (`server`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from toprope.dialects.deltas import Delta
from toprope.servers.model.budgets import Budgets
from toprope.servers.model.call import ModelCall
from toprope.servers.model.custody import Custody, abort_reason
from toprope.servers.model.engines.base import Engine, EngineReply, EngineRequest
from toprope.servers.model.notes import CallNotes
from toprope.servers.model.repeats import Repeats
from toprope.servers.model.replies import finished, response_id
from toprope.servers.model.retries import CLIENT_GONE
from toprope.servers.model.token_in.supply import Supply, TokenIn, obeyed
from toprope.servers.model.weights import WeightVersions

log = logging.getLogger(__name__)

DRAIN_BOUND = "upstream:drain_bound"
"""The abort of a call whose client left and whose generation did not end within the drain bound."""

Detach = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
AfterCall = Callable[[ModelCall, EngineReply], Awaitable[None]]


class Turn:
    """One call under way. `first_token` is when its first delta came, in seconds since 1970; `gone`: its client left.

    `deltas` are those that nobody took yet; `wake` is called when there is something new; `supply` is the prompt ids
    that it was given; `settling`: the engine is done, its record or abort is being written.
    """

    __slots__ = ("call", "clock", "deltas", "first_token", "gone", "late", "settling", "supply", "task", "wake")

    def __init__(self, call: ModelCall, clock: Callable[[], float]) -> None:
        self.call = call
        self.clock = clock
        self.deltas: list[Delta] = []
        self.first_token: float | None = None
        self.gone = False
        self.late = False
        self.settling = False
        self.supply: Supply | None = None
        self.task: asyncio.Task[EngineReply] | None = None
        self.wake: Callable[[], None] | None = None

    def emit(self, delta: Delta) -> None:
        """What an engine calls with each delta."""
        if self.first_token is None:
            self.first_token = self.clock()
        if not self.gone:
            self.deltas.append(delta)
            if self.wake is not None:
                self.wake()


class Turns:
    """The turns of one server; `running` counts those under way. `detach` starts a task that stop() waits for."""

    def __init__(
        self,
        *,
        engine: Engine,
        custody: Custody,
        token_in: TokenIn,
        repeats: Repeats,
        notes: CallNotes,
        weights: WeightVersions,
        budgets: Budgets,
        after_call: AfterCall,
        detach: Detach,
        drain_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._custody = custody
        self._token_in = token_in
        self._repeats = repeats
        self._notes = notes
        self._weights = weights
        self._budgets = budgets
        self._after_call = after_call
        self._detach = detach
        self._drain_s = drain_s
        self._clock = clock
        self.running = 0

    async def whole(self, call: ModelCall) -> EngineReply:
        """The whole reply of a call whose intent was begun; recorded on return. Raises what the engine does.

        Cancelled, because the client left, it lets a captured call go on without it.
        """
        turn = Turn(call, self._clock)
        if not call.captured:
            return await self._run(turn)
        task = self._start(turn)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.leave(turn)
            raise

    def streamed(self, call: ModelCall) -> Turn:
        """The turn of a streamed call whose intent was begun; it runs until it is done or `leave` is told."""
        turn = Turn(call, self._clock)
        self._start(turn)
        return turn

    def leave(self, turn: Turn) -> None:
        """The client of `turn` left before its reply was sent whole."""
        call, task = turn.call, turn.task
        self._repeats.left(call)
        if turn.gone or task is None or task.done() or task.cancelling():
            return
        turn.gone = True
        turn.deltas.clear()
        if not call.captured:
            task.cancel()
            return
        self._detach(self._say_gone(turn), f"abort of {call.call_id}")
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._cut, turn)
        task.add_done_callback(lambda _: timer.cancel())

    async def _say_gone(self, turn: Turn) -> None:
        if turn.task is None or not turn.task.done():  # what the turn itself said of its end must stay the last word
            await self._custody.abort(turn.call, CLIENT_GONE)

    @staticmethod
    def _cut(turn: Turn) -> None:
        if turn.task is not None and not turn.settling:  # a record that is being written would land all the same
            turn.late = True
            turn.task.cancel()

    def _start(self, turn: Turn) -> asyncio.Task[EngineReply]:
        if turn.call.captured:
            self._repeats.began(turn.call)
        task = turn.task = self._detach(self._run(turn), f"call {turn.call.call_id}")
        task.add_done_callback(_retrieved)
        return task

    async def _run(self, turn: Turn) -> EngineReply:
        call, made = turn.call, None
        self.running += 1
        try:
            made = await self._generate(turn)
            self._notes.answered(call, made, first_token=turn.first_token, client_gone=turn.gone, supply=turn.supply)
        except BaseException as error:
            self._notes.broken(call, error, first_token=turn.first_token, client_gone=turn.gone)
            raise
        finally:
            self.running -= 1
            self._repeats.ended(call)
            self._budgets.ended(call, made)
        try:
            await self._after_call(call, made)
        except Exception:  # the turn is on record and paid for: an observer's fault does not take it away
            log.exception("after_call raised for %s", call.call_id)
        return made

    async def _generate(self, turn: Turn) -> EngineReply:
        call = turn.call
        try:
            supply = turn.supply = await self._token_in.supply(call)
            asked = EngineRequest(
                call.request,
                call.call_id,
                call.session,
                call.want_tokens,
                call.dialect,
                call.body,
                turn.emit if call.stream else None,
                None if supply is None else supply.prompt_token_ids,
                call.rollout_id,
            )
            said = await self._engine.generate(asked)
            turn.settling = True
            made = obeyed(said, supply)
        except BaseException as error:
            turn.settling = True
            await self._custody.abort(call, DRAIN_BOUND if turn.late else abort_reason(error))
            raise
        made = finished(call, made)
        generated = 0 if made.tokens is None else len(made.tokens.generation_token_ids)
        await self._custody.record(
            call,
            made,
            response_id(call),
            client_gone=turn.gone,
            weights=self._weights.spans(call.began_under, generated, changes=call.weight_changes),
            supply=supply,
        )
        return made


def _retrieved(task: asyncio.Task[EngineReply]) -> None:
    """Look at what a turn raised, so that one whose client left is not logged as never looked at."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()

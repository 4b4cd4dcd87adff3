"""Requests that clients send again: answered from the record, held until it is there, or let through as new calls.

The retry's own intent stands in the journal before this is asked, so that the place of each is the same for every
worker. Left to others: which attempt a retry claims (`retries`), what is known of claims before the journal tells it
(`claims`), what a reply from the record looks like (`replies`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from toprope.capture.protocols import JournalledCall
from toprope.capture.recorder import Recorder
from toprope.errors.tree import BadRequest
from toprope.servers.model.call import ModelCall
from toprope.servers.model.claims import Claims
from toprope.servers.model.retries import (
    CLIENT_GONE,
    NOT_SENT,
    Doubt,
    Replay,
    Verdict,
    Wait,
    decide,
    extended,
    key_conflict,
    replay_of,
    waited_for,
)
from toprope.tokens.entry import TokenEntry

log = logging.getLogger(__name__)

_LOOK_S = (0.02, 0.5)
"""First and longest pause between looks at a call of another process, which cannot wake us."""
_SAID_S = 1.0
"""How long what became of a call may take to reach the journal, after it ended here; then it was lost on the way."""
_OPEN_BOUNDS = 10
"""Drain bounds that a call may be open at another worker without a word: its client may have stayed."""
_WORD_S = 1.0
"""How long the last word of another worker may take to get here, beyond its bound."""
_MAX_OVER = 4096
"""Calls that ended here and are remembered; one that is forgotten is waited for as if it were another worker's."""


class Repeats:
    """The repeats that reach one server. `drain_s` bounds how long a call goes on whose client left.

    Another worker may lose a call without a word. So nobody waits longer than that bound for one that goes on there
    since its client is known to have left, nor longer than `_OPEN_BOUNDS` of it for one that is open there; nor for one
    that ended here and could not say so.
    """

    def __init__(self, recorder: Recorder | None, *, drain_s: float) -> None:
        self._recorder = recorder
        self._drain_s = drain_s
        self._running: dict[str, asyncio.Event] = {}
        self._over: OrderedDict[str, float] = OrderedDict()  # calls that ended here, and when
        self._claims = Claims()

    def began(self, call: ModelCall) -> None:
        """`call` was dispatched here; until `ended` a retry of it waits."""
        self._running[call.call_id] = asyncio.Event()

    def ended(self, call: ModelCall) -> None:
        """Nothing more becomes of `call`: what did stands in the journal, or could not be written."""
        if call.captured:
            self._over[call.call_id] = time.monotonic()
            if len(self._over) > _MAX_OVER:
                self._over.popitem(last=False)
        waiting = self._running.pop(call.call_id, None)
        if waiting is not None:
            waiting.set()

    def left(self, call: ModelCall) -> None:
        """The client of `call` left before its reply was sent whole."""
        if call.captured and call.rollout_id is not None:
            self._claims.left(call)

    def may_be_one(self, call: ModelCall) -> bool:
        """Whether `call` can be a repeat at all. Most are not, and cost no look at the journal."""
        if self._recorder is None or not call.captured or call.rollout_id is None:
            return False
        marked = bool(call.retry_count) or call.idempotency_key is not None
        return marked or self._claims.know(call) or self._recorder.shares(call.rollout_id)

    async def check_key(self, call: ModelCall) -> None:
        """Raises `BadRequest` (422) for an `Idempotency-Key` that this rollout used with another body.

        Asked before the intent is begun, so that a refusal leaves nothing behind; two at once are told apart by
        `answer`.
        """
        if call.idempotency_key is None or self._recorder is None or call.rollout_id is None:
            return
        _require_own_key(call, await self._recorder.journal(call.rollout_id))

    async def answer(self, call: ModelCall) -> TokenEntry | None:
        """The record that answers `call`, whose intent was begun and is closed then; None: it is a new call.

        Waits for an attempt that may still be recorded; a client that leaves meanwhile closes the intent too. Raises
        as `check_key`: of two bodies that came at once under one key, the one that was begun first has it.
        """
        if not self.may_be_one(call):
            return None
        assert self._recorder is not None
        assert call.rollout_id is not None
        waits: list[Wait | Doubt] = []
        entry: TokenEntry | None = None
        goes_on = answered = False
        try:
            entry = await self._record_of(call, waits)
            goes_on = entry is None
            if entry is not None:
                await self._recorder.abort(call.rollout_id, call.call_id, replay_of(entry.model_call_id))
                answered = True
        except BadRequest:
            await self._recorder.abort(call.rollout_id, call.call_id, NOT_SENT)
            raise
        except asyncio.CancelledError:
            self._claims.give_up(call)  # before anything is awaited: whoever comes next may have what it waited for
            if entry is None:
                reason = waited_for(waits[-1].call_id) if waits else NOT_SENT
                await self._recorder.abort(call.rollout_id, call.call_id, reason)
            raise
        finally:
            if not answered:
                self._claims.release(call)
            if not goes_on:
                self.ended(call)
        return entry

    async def _record_of(self, call: ModelCall, waits: list[Wait | Doubt]) -> TokenEntry | None:
        """The record that answers `call`, once it is there; None: a new call. `waits` holds what it waits for."""
        pause = _LOOK_S[0]
        since: dict[tuple[str, bool], float] = {}
        lost: set[str] = set()
        while True:
            verdict, entry = await self._look(call, lost, since)
            if verdict is None or isinstance(verdict, Replay):
                return entry
            waits[:] = [verdict]
            if isinstance(verdict, Doubt):
                await asyncio.sleep(min(pause, self._claims.doubt(call, verdict, time.monotonic())))
            elif verdict.call_id in self._running:
                await self._running[verdict.call_id].wait()
            elif self._overdue(verdict, since, time.monotonic()):
                lost.add(verdict.call_id)
            else:
                await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOK_S[1])

    def _overdue(self, wait: Wait, since: Mapping[tuple[str, bool], float], now: float) -> bool:
        """Whether another worker has had its time to say something. Its clock is not ours: what counts is our looks."""
        first = since.get((wait.call_id, wait.drained), now)
        return now - first > self._drain_s * (1 if wait.drained else _OPEN_BOUNDS) + _WORD_S

    async def _look(
        self, call: ModelCall, lost: Collection[str], since: dict[tuple[str, bool], float]
    ) -> tuple[Verdict, TokenEntry | None]:
        """What journal and record say now; the entry to replay, None where the verdict is no replay or must not be.

        What the verdict claims is claimed on return. Nothing more is expected of the calls in `lost`. `since` learns
        when an equal call was first seen open (False) and with its client gone (True).
        """
        assert self._recorder is not None
        assert call.rollout_id is not None
        try:
            asked = time.monotonic()
            calls = await self._recorder.journal(call.rollout_id)
            if call.idempotency_key is not None:
                _require_own_key(call, calls)
            if sum(each.intent.request_digest == call.tag for each in calls) < 2:
                return None, None  # the first of its kind; the record need not be read
            entries = {each.model_call_id: each for each in await self._recorder.recorded(call.rollout_id)}
        except BadRequest:
            raise
        except Exception:  # what cannot be read cannot be repeated; the call itself can still be made
            log.exception("%s: the journal could not be read; a repeated request is sampled anew", call.rollout_id)
            return None, None
        # From here to the end nothing is awaited: of repeats at once one decides after the other.
        for each in calls:
            if each.intent.request_digest == call.tag and (each.open or each.abort == CLIENT_GONE):
                since.setdefault((each.call_id, each.abort == CLIENT_GONE), asked)
        gone = [entry.model_call_id for entry in entries.values() if entry.client_gone]
        own = self._recorder.writer_epoch
        over = {each.call_id for each in calls if asked - self._over.get(each.call_id, asked) > _SAID_S}
        seen = self._claims.seen(call, gone=gone, lost=over.union(lost), writer_epoch=own, now=time.monotonic())
        verdict = decide(calls, call.call_id, seen)
        if verdict is None or isinstance(verdict, Doubt) or (isinstance(verdict, Wait) and verdict.contested):
            self._claims.release(call)
        else:
            self._claims.claim(call, verdict.call_id)
        if not isinstance(verdict, Replay):
            return verdict, None
        entry = entries.get(verdict.call_id)
        return verdict, None if extended(verdict.call_id, list(entries.values())) else entry


def _require_own_key(call: ModelCall, calls: Iterable[JournalledCall]) -> None:
    if key_conflict(calls, call.tag):
        raise BadRequest("this Idempotency-Key was used with another body; a new request needs a new key")

"""Recorders for random call trees: the real one, on stores that tell it more or less, alone, restarted and in crowds.

What a tree's records hold comes from here; what truly happened, `call_trees` labels by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import Intent
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.tokens.entry import TokenEntry
from toprope.tokens.sampled import SampledTokens
from toprope.tokens.snapshot import TokenCaptureSnapshot

KEY = "r"


class Silent(MemoryStore):
    """Its `begin_call` and `put` return nothing, as NeMo Gym's signatures have it."""

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> Any:
        await super().begin_call(rollout_id, model_call_id, intent=intent)

    async def put(self, entry: TokenEntry) -> Any:
        await super().put(entry)


class Flaky:
    """A reader that fails now and then."""

    def __init__(self, store: MemoryStore, dice: random.Random) -> None:
        self._store = store
        self._dice = dice

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        if self._dice.random() < 0.5:
            raise OSError("unreadable")
        return await self._store.open_entries(rollout_id, since)


class Plain:
    """Exactly NeMo Gym's three verbs over a store: no abort, no intent, no answer."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._store.begin_call(rollout_id, model_call_id)

    async def put(self, entry: TokenEntry) -> None:
        await self._store.put(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._store.mark_incomplete(rollout_id, model_call_id)

    async def close(self) -> None: ...


class Beginless(Plain):
    """No intents either: what is aborted leaves no trace at all."""

    begin_call = None  # type: ignore[assignment]


KINDS = (
    "alone",
    "pair",
    "crowd",
    "silent crowd",
    "flaky crowd",
    "unread",
    "unread silent crowd",
    "plain",
    "beginless crowd",
)
"""A pair takes turns on one store. A crowd are several, which come, forget and go between any two calls."""


ENDS = ("client_gone", "client_gone", "upstream:transport_dropped", "upstream:model_unavailable", "writer_died")
"""Why calls come to nothing after a part of what they said was read."""


class Recorders:
    """The custody of one tree. Runs on a loop of its own; nothing here waits for anything but the recorder."""

    def __init__(self, kind: str, dice: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        self._kind = kind
        self._dice = dice
        self._loop = loop
        self._clock = itertools.count(1)
        self._crowd = "crowd" in kind
        self._store = Silent() if "silent" in kind or "flaky" in kind else MemoryStore()
        self._reader: Any = Flaky(self._store, dice) if "flaky" in kind else self._store
        self._sink: Any = self._store
        if "unread" in kind or "plain" in kind:
            self._reader = None
        if "plain" in kind or "beginless" in kind:
            self._sink = (Plain if "plain" in kind else Beginless)(self._store)
        self._recorders = [self._new() for _ in range(2 if kind == "pair" else 1)]

    def _new(self) -> Recorder:
        return Recorder(self._sink, reader=self._reader, clock=lambda: float(next(self._clock)))

    def _one(self) -> Recorder:
        """Whichever recorder the next call comes to."""
        if not self._crowd:
            return self._dice.choice(self._recorders)
        luck = self._dice.random()
        if luck < 0.2:
            self._recorders.append(self._new())
        elif luck < 0.3:
            self._recorders = [self._new()]
        one = self._dice.choice(self._recorders)
        if self._dice.random() < 0.1:
            one._let_go(KEY)  # for memory: the rollout goes on
        return one

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    def begin(self, call_id: str, *, stream: bool = True) -> Recorder:
        recorder = self._one()
        self._run(recorder.begin(KEY, call_id, intent=Intent(stream=stream)))
        return recorder

    def knows_silence(self, calls: int) -> bool:
        """Whether the recorder of the next call knows that none of so many calls, all of them open, said anything."""
        return self._kind == "alone" or (calls == 0 and self._kind in ("pair", "crowd"))

    def record(
        self,
        recorder: Recorder,
        call_id: str,
        items: Sequence[Mapping[str, Any]],
        prompt: Sequence[int],
        sampled: Mapping[int, float],
        output: Sequence[Mapping[str, Any]],
        **about: Any,
    ) -> None:
        tokens = SampledTokens(
            np.array(prompt, dtype=np.uint32),
            np.array(list(sampled), dtype=np.uint32),
            np.array(list(sampled.values()), dtype=np.float64),
        )
        self._run(recorder.record(CallEvidence(KEY, call_id, "m", items, output, tokens, **about)))

    def lose(self, recorder: Recorder, call_id: str, items: Sequence[Mapping[str, Any]]) -> None:
        """The call came to nothing after it had said something; rarely, its loss is all that can be said."""
        if self._dice.random() < 0.2:
            self._run(recorder.incomplete(KEY, call_id, "no_token_ids"))
        else:
            self._run(recorder.abort(KEY, call_id, self._dice.choice(ENDS), request_items=items))

    def delivered(self, row: Mapping[str, Any], **how: Any) -> dict[str, Any]:
        """What becomes of a row of this rollout, on the store as any caller finds it."""
        work = finalize_rollout_token_capture(row, self._store, settle_s=0, format="trace", **how)
        return dict(self._loop.run_until_complete(work) or {})

    def frozen(self) -> TokenCaptureSnapshot:
        return self._loop.run_until_complete(self._store.freeze(KEY))

"""The recorded calls of each rollout, as conversations: which of them a request continues, item by item.

A call is indexed once it is durable, read from the store, so that it does not matter which process recorded it or
whether this one was started since. What its record needs for that is its `note`. Memory is a segment a turn and the ids
of the calls that were recorded last. Left to others: what is forgiven (`said`), the ids that come after (`supply`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.capture.recorder import Recorder
from toprope.servers.model.engines.base import CannotContinue
from toprope.servers.model.token_in.said import (
    Conversation,
    Reader,
    Segment,
    forgiven,
    segment_from_json,
    segment_of,
)
from toprope.tokens.entry import TokenEntry

NOTE = "token_in"
"""Where a record keeps what its call's conversation is known by."""

_MAX_ROLLOUTS = 4096
_MAX_IDS = 16_000_000

NOT_RECORDED = "history_not_recorded"
EDITED = "turn_edited"
AMBIGUOUS = "ambiguous_parent"


@dataclass(frozen=True, slots=True)
class Parent:
    """The recorded call that a request continues, and what had to be forgiven for that."""

    call_id: str
    prompt_token_ids: NDArray[np.uint32]
    generation_token_ids: NDArray[np.uint32]
    forgiven: Counter[str]
    steering: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One call. `segments` are all that the model said in its conversation, its own reply last."""

    call_id: str
    position: int
    segments: tuple[Segment, ...]
    steering: Mapping[str, str]


class _Rollout:
    __slots__ = ("by_id", "by_skeleton", "lock", "read", "reader")

    def __init__(self) -> None:
        self.by_skeleton: dict[str, list[_Recorded]] = {}
        self.by_id: dict[str, _Recorded] = {}
        self.read = 0  # entries that were looked at
        self.lock = asyncio.Lock()
        self.reader = Reader()


class Conversations:
    """What one server's record knows of conversations."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._ids: OrderedDict[str, tuple[NDArray[np.uint32], NDArray[np.uint32]]] = OrderedDict()
        self._held = 0

    def reader(self, key: str) -> Reader:
        """The reader of this rollout's requests."""
        return self._rollout(key).reader

    async def parent_of(self, key: str, said: Conversation) -> Parent | None:
        """The recorded call whose request and reply `said` continues; None where nothing is recorded yet.

        Raises `CannotContinue` where no recorded call says the same, or several do that nothing tells apart.
        """
        rollout = self._rollout(key)
        async with rollout.lock:
            await self._read(key, rollout)
        if not rollout.read:
            return None
        count = len(said.segments)
        alike = rollout.by_skeleton.get(said.skeleton(count - 1), ())
        fitting = [(each, counts) for each in alike if (counts := forgiven(each.segments, said.segments)) is not None]
        if not fitting:
            if alike:
                raise CannotContinue(EDITED, "the model's own words are not those that were recorded")
            raise CannotContinue(
                NOT_RECORDED, "no recorded call has this history: what others said, the tools or a setting differ"
            )
        return await self._chosen(key, fitting, said.segments[-1].ids)

    async def _chosen(self, key: str, fitting: list[tuple[_Recorded, Counter[str]]], ids: frozenset[str]) -> Parent:
        """The one that the echoed ids name, else the one with the least to forgive, else any if all ids are equal."""
        named = [each for each in fitting if ids and not ids.isdisjoint(each[0].segments[-1].ids)]
        fitting = named or fitting
        least = min(counts.total() for _, counts in fitting)
        found = []
        for each, counts in sorted(fitting, key=lambda one: one[0].call_id):
            if counts.total() == least:
                prompt, generation = await self._ids_of(key, each)
                found.append(Parent(each.call_id, prompt, generation, counts, each.steering))
        first = found[0]
        for other in found[1:]:
            same = np.array_equal(other.prompt_token_ids, first.prompt_token_ids)
            if not same or not np.array_equal(other.generation_token_ids, first.generation_token_ids):
                raise CannotContinue(AMBIGUOUS, f"{len(found)} recorded calls say the same with other ids")
        return first

    async def _ids_of(self, key: str, call: _Recorded) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        held = self._ids.get(call.call_id)
        if held is not None:
            self._ids.move_to_end(call.call_id)
            return held
        for entry in await self._recorder.recorded(key, call.position):
            if entry.model_call_id == call.call_id:
                self._hold(entry)
                return entry.prompt_token_ids, entry.generation_token_ids
        raise CannotContinue(NOT_RECORDED, f"the record of {call.call_id} is gone")

    async def _read(self, key: str, rollout: _Rollout) -> None:
        for entry in await self._recorder.recorded(key, rollout.read):
            position, rollout.read = rollout.read, rollout.read + 1
            note = entry.extra.get(NOTE)
            if isinstance(note, Mapping) and not entry.prompt_is_delta:
                self._index(rollout, entry, note, position)

    def _index(self, rollout: _Rollout, entry: TokenEntry, note: Mapping[str, Any], position: int) -> None:
        try:
            before = rollout.by_id[note["after"]].segments if "after" in note else _segments(note)
            skeleton, steering = str(note["skeleton"]), dict(note.get("steering", {}))
        except (KeyError, TypeError, ValueError):
            return  # written by another version, or after a call that is not here: it is nobody's parent
        call = _Recorded(
            call_id=entry.model_call_id,
            position=position,
            segments=(*before, segment_of(entry.output_items)),
            steering=steering,
        )
        rollout.by_id[call.call_id] = call
        if len(entry.generation_token_ids) and not entry.media:
            rollout.by_skeleton.setdefault(skeleton, []).append(call)
            self._hold(entry)

    def _hold(self, entry: TokenEntry) -> None:
        ids = (entry.prompt_token_ids, entry.generation_token_ids)
        self._held -= sum(map(len, self._ids.pop(entry.model_call_id, ())))  # of a rollout that was forgotten and read
        self._ids[entry.model_call_id] = ids
        self._held += sum(map(len, ids))
        while self._held > _MAX_IDS and len(self._ids) > 1:
            self._held -= sum(map(len, self._ids.popitem(last=False)[1]))

    def _rollout(self, key: str) -> _Rollout:
        rollout = self._rollouts.setdefault(key, _Rollout())
        self._rollouts.move_to_end(key)
        if len(self._rollouts) > _MAX_ROLLOUTS:
            self._rollouts.popitem(last=False)
        return rollout


def _segments(note: Mapping[str, Any]) -> tuple[Segment, ...]:
    return tuple(segment_from_json(each) for each in note.get("segments", ()))

"""Whole prompts out of stored suffixes, without copying a conversation once for every call in it.

A turn that extends its parent begins with the parent's ids. `PromptArena` lays the ids of a rollout into growing
buffers, one for every line of descent, and hands out prompts as views of them: a thousand turns cost the memory of the
longest, not of their sum. `RecentCalls` is a store's bounded memory of the ids of recent calls, against which the next
turn is compared and from which it is completed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
Key = TypeVar("Key")

_FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class CallIds:
    """The ids of one call: whole prompt (P,) and generation (G,)."""

    prompt: Ids
    generation: Ids

    @property
    def count(self) -> int:
        return len(self.prompt) + len(self.generation)

    def begins(self, prompt: Ids) -> bool:
        """Whether `prompt` begins with this call's prompt + generation, id by id."""
        cut = len(self.prompt)
        return (
            self.count <= len(prompt)
            and _same(self.prompt, prompt[:cut])
            and _same(self.generation, prompt[cut : self.count])
        )

    def followed_by(self, suffix: Ids) -> Ids:
        """The whole prompt of a call that adds `suffix` (N,) to this one: a read-only (P + G + N,) array."""
        whole = np.concatenate([self.prompt, self.generation, suffix])
        whole.flags.writeable = False
        return whole


def _same(left: Ids, right: Ids) -> bool:
    if left.ctypes.data == right.ctypes.data:
        return True  # both are views of one buffer
    return bool((left == right).all())


class _Buffer:
    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids: Ids = np.empty(capacity, dtype=np.uint32)
        self.used = 0

    def append(self, ids: Ids) -> None:
        end = self.used + len(ids)
        if end > len(self.ids):
            grown = np.empty(max(end, 2 * len(self.ids)), dtype=np.uint32)
            grown[: self.used] = self.ids[: self.used]
            self.ids = grown
        self.ids[self.used : end] = ids
        self.used = end


class PromptArena:
    """Whole prompts of one rollout's calls, given in an order in which parents come before children."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[_Buffer, int]] = {}

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._ends

    def place(self, call_id: str, parent: str | None, suffix: Ids, generation: Ids) -> Ids:
        """The whole prompt (read-only) of a call whose prompt is `suffix` after `parent`'s ids, or `suffix` alone.

        Raises `KeyError` for a parent that was not placed.
        """
        if parent is not None:
            buffer, end = self._ends[parent]
        else:
            buffer, end = _Buffer(max(_FIRST_CAPACITY, len(suffix) + len(generation))), 0
        if end != buffer.used:  # another child already continued here: this line of descent gets its own buffer
            fork = _Buffer(max(_FIRST_CAPACITY, end + len(suffix) + len(generation)))
            fork.append(buffer.ids[:end])
            buffer = fork
        buffer.append(suffix)
        whole = buffer.ids[: buffer.used]
        whole.flags.writeable = False
        buffer.append(generation)
        self._ends[call_id] = (buffer, buffer.used)
        return whole


class RecentCalls(Generic[Key]):
    """The ids of recently used calls, the oldest forgotten beyond `max_bytes`. Safe to use from several threads."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._calls: OrderedDict[Key, CallIds] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is held now; ids that several calls share are counted for each of them."""
        return self._bytes

    def get(self, key: Key) -> CallIds | None:
        with self._guard:
            ids = self._calls.get(key)
            if ids is not None:
                self._calls.move_to_end(key)
            return ids

    def keep(self, key: Key, ids: CallIds, *, after: Key | None = None) -> None:
        """Remember `ids`; `after`, its parent, becomes the first to go, since its continuation is here now."""
        with self._guard:
            if key in self._calls:
                return
            self._calls[key] = ids
            self._bytes += 4 * ids.count
            if after is not None and after in self._calls:
                self._calls.move_to_end(after, last=False)
            while self._bytes > self._max_bytes:
                _, gone = self._calls.popitem(last=False)
                self._bytes -= 4 * gone.count

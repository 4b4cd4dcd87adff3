"""Continuous batching: sequences come and go between passes, all that wait for one id share a pass.

The cache is one array; running sequences hold its first rows without a gap, so that a pass binds neighbouring rows and
copies nothing. Prompts start from the longest prefix that is in the cache or was kept (`PrefixStore`). Synchronous and
used from one thread. Left to others: threads, requests and replies (`engine`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from toprope.servers.model.engines.embedded.forward import Cache, Forward
from toprope.servers.model.engines.embedded.sequence import Sequence

Job = TypeVar("Job")
Ids = NDArray[np.int64]

WORTH = 8
"""Shorter prefixes are computed again: copying them costs as much."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt and its cache: ids (n,), cache (layers, 2, kv_heads, n, head_dim)."""

    ids: Ids
    cache: NDArray[np.float32]


class PrefixStore:
    """The caches of the latest prompts, up to `tokens` in all (46 KB each)."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._kept: OrderedDict[int, Prefix] = OrderedDict()
        self._next = 0

    def longest(self, ids: Ids) -> tuple[int, Prefix | None]:
        """The kept prompt that shares the most leading ids, and how many."""
        best, key = 0, -1
        for number, prefix in self._kept.items():
            if (size := common(prefix.ids, ids)) > best:
                best, key = size, number
        if key < 0:
            return 0, None
        self._kept.move_to_end(key)
        return best, self._kept[key]

    def put(self, ids: Ids, cache: NDArray[np.float32]) -> None:
        """Keeps a copy, unless a kept prompt begins with these ids; prompts that these ids begin with go."""
        if len(ids) > self._tokens:
            return
        for number, prefix in list(self._kept.items()):
            size = common(prefix.ids, ids)
            if size == len(ids):
                self._kept.move_to_end(number)
                return
            if size == len(prefix.ids):
                del self._kept[number]
        self._kept[self._next] = Prefix(ids, cache.copy())
        self._next += 1
        while sum(len(prefix.ids) for prefix in self._kept.values()) > self._tokens:
            self._kept.popitem(last=False)


def common(left: Ids, right: Ids) -> int:
    """How many leading ids are equal."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


@dataclass(slots=True, eq=False)
class Row(Generic[Job]):
    """A running sequence and whom it is for; its place in the list is its row of the cache."""

    job: Job
    sequence: Sequence
    prompt: Ids

    @property
    def prefix(self) -> int:
        """How much of the prompt is in the cache. Generated ids are left out: computed one by one, their cache differs
        in the last bits from that of the same ids in a prompt, and reuse must not show in any result."""
        return min(self.sequence.fed, len(self.prompt))


class Batch(Generic[Job]):
    """The running sequences. `gone` says of a job that nobody waits for it; `passes` counts forward passes."""

    def __init__(self, forward: Forward, cache: Cache, kept_tokens: int, gone: Callable[[Job], bool]) -> None:
        self._forward = forward
        self._gone = gone
        self._cache = cache
        self._store = PrefixStore(kept_tokens)
        self._rows: list[Row[Job]] = []
        self.passes = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        rows: int = self._cache.shape[2]
        return len(self._rows) == rows

    @property
    def jobs(self) -> list[Job]:
        return [row.job for row in self._rows]

    def add(self, job: Job, sequence: Sequence) -> None:
        """The sequence runs from the next step on. The batch must not be full."""
        self._rows.append(Row(job, sequence, np.asarray(sequence.prompt, dtype=np.int64)))

    def drop(self, job: Job) -> None:
        """The job is gone and its row free on return."""
        for place, row in enumerate(self._rows):
            if row.job is job:
                self._remove(place)
                return

    def step(self) -> list[tuple[Job, Sequence]]:
        """One round: each sequence that has several ids to feed gets a pass of its own, then all that have one share a
        pass. Gives the jobs that are done; their rows are free, and those of jobs that are gone before each pass."""
        for row in list(self._rows):
            self._drop_gone()
            if row not in self._rows:
                continue
            place = self._rows.index(row)
            if row.sequence.fed == 0:
                self._reuse(place)
            feed = row.sequence.feed()
            if len(feed.ids) > 1:
                ids = np.array([feed.ids], dtype=np.int64)
                logits = self._forward(place, ids, [row.sequence.fed], feed.keep)
                self.passes += 1
                row.sequence.take(feed, logits[0])
        self._drop_gone()
        for first, block in list(self._single_steps()):
            feeds = [row.sequence.feed() for row in block]
            ids = np.array([feed.ids for feed in feeds], dtype=np.int64)
            logits = self._forward(first, ids, [row.sequence.fed for row in block], 1)
            self.passes += 1
            for row, feed, scores in zip(block, feeds, logits, strict=True):
                row.sequence.take(feed, scores)
        done = [row for row in self._rows if row.sequence.done]
        for row in done:
            self._remove(self._rows.index(row))
        return [(row.job, row.sequence) for row in done]

    def _drop_gone(self) -> None:
        for job in [job for job in self.jobs if self._gone(job)]:
            self.drop(job)

    def _single_steps(self) -> Iterator[tuple[int, list[Row[Job]]]]:
        """Blocks of neighbouring rows with one id to feed; a single block, unless a grammar forced a run just now."""
        block: list[Row[Job]] = []
        for place, row in enumerate([*self._rows, None]):
            if row is not None and not row.sequence.done and len(row.sequence.feed().ids) == 1:
                block.append(row)
            elif block:
                yield place - len(block), block
                block = []

    def _reuse(self, place: int) -> None:
        """Fills the row from the longest known prefix of its prompt, leaving at least two ids to compute."""
        row = self._rows[place]
        size, kept = self._store.longest(row.prompt)
        source = None if kept is None else kept.cache
        for other, donor in enumerate(self._rows):
            shared = min(common(donor.prompt, row.prompt), donor.prefix)
            if shared > size:
                size, source = shared, self._cache[:, :, other]
        size = min(size, len(row.prompt) - 2)
        if source is not None and size >= WORTH:
            self._cache[:, :, place, :, :size] = source[:, :, :, :size]
            row.sequence.fed = size

    def _remove(self, place: int) -> None:
        """Takes a row out and moves the last row into the hole."""
        row = self._rows[place]
        if row.prefix >= WORTH:
            self._store.put(row.prompt[: row.prefix], self._cache[:, :, place, :, : row.prefix])
        last = self._rows.pop()
        if last is not row:
            used = last.sequence.fed
            self._cache[:, :, place, :, :used] = self._cache[:, :, len(self._rows), :, :used]
            self._rows[place] = last

"""The index of lineage: a radix tree over the ids of one rollout's calls. Pure.

Every strand holds only ids that no strand before it holds, a call stands at the position where its prompt + generation
ends. Finding a parent walks one path down the tree and compares each id of the prompt once, however many calls came
before. Left to others: which call is whose continuation (`lineage`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.asked import Asked
from toprope.tokens.hashing import common_prefix
from toprope.tokens.items import CountedMarks


@dataclass(slots=True)
class Node:
    """One recorded call, at the end of its prompt + generation."""

    call_id: str
    prompt_len: int
    cum_len: int
    strand: Strand
    blocks: bytes
    parent: Node | None
    own_request: tuple[str, ...]
    """The marks of its request that no call before it accounts for."""
    own_output: tuple[str, ...]
    asked: Asked | None
    seen: CountedMarks | None = None


@dataclass(slots=True)
class Strand:
    """Ids [start, start + size) of some sequences; the ids before `start` stand on the strand that it forks from."""

    start: int
    memory: bytearray = field(default_factory=bytearray)
    ids: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))  # a view of `memory`
    size: int = 0
    forks: dict[tuple[int, int], Strand] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    calls: dict[int, list[Node]] = field(default_factory=dict)

    def append(self, ids: NDArray[np.uint32]) -> None:
        need = self.size + len(ids)
        if need > len(self.ids):
            memory = bytearray(4 * max(need, 2 * len(self.ids)))
            grown = np.frombuffer(memory, dtype=np.uint32)
            grown[: self.size] = self.ids[: self.size]
            self.memory, self.ids = memory, grown
        self.ids[self.size : need] = ids
        self.size = need

    def followed_by(self, at: int, ids: NDArray[np.uint32]) -> int:
        """How many of the first `ids` stand on this strand from its `at`-th id on."""
        size = min(self.size - at, len(ids))
        # Nearly always all of them do, and a memory compare says so in a third of the time.
        if size > 0 and self.memory.startswith(np.ascontiguousarray(ids[:size]).data.cast("B"), 4 * at):
            return size
        return common_prefix(self.ids[at : at + size], ids[:size])

    def place(self, node: Node) -> None:
        if node.cum_len not in self.calls:
            insort(self.ends, node.cum_len)
        self.calls.setdefault(node.cum_len, []).append(node)

    def last_end(self, limit: int) -> int | None:
        """The greatest end of a call on this strand that is at most `limit`."""
        where = bisect_right(self.ends, limit)
        return self.ends[where - 1] if where else None

    def next_end(self, limit: int) -> int | None:
        """The smallest end of a call on this strand that is beyond `limit`."""
        where = bisect_right(self.ends, limit)
        return self.ends[where] if where < len(self.ends) else None

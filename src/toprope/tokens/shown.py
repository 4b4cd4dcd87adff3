"""Turns that a first request shows and nobody sampled: when a later beginning may hold the same ones. Pure.

A few-shot prompt stands at the beginning of an agent's first request and of its sub-agents'. Where a call was lost, a
request that goes on from it may hold what it said in the very words of such a turn: then words alone prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.canonical.digest import digest_bytes
from toprope.tokens.items import CountedMarks, MarkBags, is_mark, is_model_authored, said_by_all

_INSTRUCTIONS = ("system", "developer")


def shown_beginning(items: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> tuple[str, ...]:
    """What the items of a request say up to its last model-authored one, users' and tools' included.

    `marks` are the `item_digests` of `items`. Instructions at the very beginning are left out: a sub-agent has its own.
    Empty where nothing is model-authored.
    """
    last = next((at for at in reversed(range(len(items))) if is_model_authored(items[at])), -1) if marks else -1
    return _after_instructions(items[: last + 1], marks)


def _after_instructions(items: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> tuple[str, ...]:
    first = next((at for at, item in enumerate(items) if item.get("role") not in _INSTRUCTIONS), len(items))
    skipped = sum(map(is_model_authored, items[:first]))  # a thought may carry any role
    return said_by_all(items[first:], marks[skipped:])


class ShownTurns:
    """The requests of recorded roots that show turns, and the requests of lost calls."""

    def __init__(self) -> None:
        self._requests = MarkBags()
        self._beginnings: set[tuple[str, ...]] = set()
        self._prompts: dict[str, list[CountedMarks]] = {}
        self._lost: list[tuple[str, ...]] = []

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    def add_root(self, marks: tuple[str, ...], prompt: NDArray[np.uint32], beginning: tuple[str, ...]) -> None:
        """A recorded root with these marks, one at least; `beginning` is empty where its items are not known."""
        self._requests.add(marks)
        self._prompts.setdefault(_digest(prompt), []).append(CountedMarks(marks))
        self._beginnings.add(beginning)

    def note_lost(self, items: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> None:
        """A call with this request came to nothing; without items it may have been asked anything.

        `marks` are the `item_digests` of `items`.
        """
        self._lost.append(_after_instructions(items, marks))

    def hold(self, marks: tuple[str, ...]) -> bool:
        """Whether all of `marks`, one at least, stand in the request of one root."""
        return self._requests.holds(marks)

    def are_shown(
        self, marks: tuple[str, ...], prompt: NDArray[np.uint32], beginning: tuple[str, ...], *, unseen: bool
    ) -> bool:
        """Whether nobody's reply can be among `marks`, which a root was shown, whatever was lost.

        So it is where nothing was; where the prompt is that of a root, id by id; and where the request begins as a
        root's did, users' items included, and no lost call can have been asked with a part of that beginning only:
        what it said would come after some of it, and so after the first item, where that is a user's.
        """
        if any(not bag.missing(marks) for bag in self._prompts.get(_digest(prompt), ())):
            return True
        if unseen or not self._lost:
            return not unseen
        size = len(beginning)
        if not any(size and each[:size] == beginning for each in self._beginnings):
            return False
        first = beginning[0]
        elsewhere = not is_mark(first)
        return all(each and (each[:size] == beginning or (elsewhere and first not in each)) for each in self._lost)


def _digest(prompt: NDArray[np.uint32]) -> str:
    return digest_bytes(prompt.tobytes())

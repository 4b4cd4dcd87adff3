"""Turns that a first request shows and nobody sampled: when a later beginning may hold the same ones. Pure.

A few-shot prompt stands at the beginning of an agent's first request and of its sub-agents'. Where a call was lost, a
request that goes on from it may hold what it said in the very words of such a turn: then words alone prove nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.canonical.digest import digest_bytes
from toprope.tokens.items import CountedMarks, MarkBags, is_mark, is_model_authored, item_digests, said_by_all

_INSTRUCTIONS = ("system", "developer")
_MOST_LOST = 64
"""Requests of lost calls that are told apart; more of them than that may have been asked anything."""
_THEN = ""
"""Stands between the beginning of a lost request and what is said somewhere in it. No digest is empty."""

Said = tuple[str, ...]
"""One digest for each item, whoever wrote it (`items.said_by_all`)."""


@dataclass(frozen=True, slots=True)
class ShownBeginning:
    """What a root's request says up to its last model-authored item, as `shown_beginning` has it.

    `known`: the request of a root before it began so. Empty where the items are not known.
    """

    said: Said
    known: bool

    def stands_beside(self, lost: Said) -> bool:
        """Whether no call that was asked `lost` (`asked_for`, empty for anything) and was lost can have said any of it.

        So it is where that call was shown all of it. What a call said comes after what it was asked: a known beginning,
        whose first item is no policy's and was not asked of that call, is also none of its. Of one that is not known
        this proves nothing: a client may say what it asked in other words.
        """
        size = len(self.said)
        if size == 0 or not lost:
            return False
        if lost[:size] == self.said:
            return True
        first = self.said[0]
        return self.known and not is_mark(first) and first not in lost


def shown_beginning(items: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> Said:
    """What the items of a request say up to its last model-authored one, users' and tools' included.

    `marks` are the `item_digests` of `items`. Instructions at the very beginning are left out: a sub-agent has its own.
    Empty where nothing is model-authored.
    """
    last = next((at for at in reversed(range(len(items))) if is_model_authored(items[at])), -1) if marks else -1
    return _after_instructions(items[: last + 1], marks)


def asked_for(items: Sequence[Mapping[str, Any]]) -> Said:
    """What all items of a request say, instructions at the very beginning left out. Reads the whole conversation."""
    return _after_instructions(items, item_digests(items))


def _after_instructions(items: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> Said:
    first = _first(items)
    skipped = sum(map(is_model_authored, items[:first]))  # a thought may carry any role
    return said_by_all(items[first:], marks[skipped:])


def _first(items: Sequence[Mapping[str, Any]]) -> int:
    """The place of the first item that is no instruction."""
    return next((at for at, item in enumerate(items) if item.get("role") not in _INSTRUCTIONS), len(items))


class ShownTurns:
    """The requests of recorded roots that show turns, and what must be known of the requests of lost calls.

    Memory is the beginnings of roots, and of each of 64 lost requests what can be compared with them.
    """

    def __init__(self) -> None:
        self._requests = MarkBags()
        self._beginnings: list[Said] = []  # sorted: those that begin alike stand together
        self._prompts: dict[str, list[CountedMarks]] = {}
        self._lost: set[Said] = set()
        self._cut = False  # a lost request was cut to what the beginnings known then can ask of it

    def add_root(self, marks: tuple[str, ...], prompt: NDArray[np.uint32], beginning: Said) -> None:
        """A recorded root with these marks, one at least; `beginning` is empty where its items are not known."""
        self._requests.add(marks)
        self._prompts.setdefault(_digest(prompt), []).append(CountedMarks(marks))
        if beginning and not self._cut:
            at = bisect_left(self._beginnings, beginning)
            if self._beginnings[at : at + 1] != [beginning]:
                self._beginnings.insert(at, beginning)

    def note_lost(self, items: Sequence[Mapping[str, Any]], *, first: bool) -> None:
        """A call with this request came to nothing; without items it may have been asked anything.

        `first`: nothing is recorded yet, so that any beginning may come. Later only those of recorded roots are asked
        about: where none shows turns, the items are not looked at.
        """
        if () in self._lost:
            return  # whatever is asked, that call may have said it
        said: Said = ()
        if first:
            said = asked_for(items)
        elif self._beginnings:
            said, self._cut = self._comparable(items), True
        self._lost = {()} if not said or len(self._lost) >= _MOST_LOST else self._lost | {said}

    def _comparable(self, items: Sequence[Mapping[str, Any]]) -> Said:
        """Of `asked_for` the longest part that a root begins with, and which first items of roots stand anywhere.

        Mostly the lost call is of a conversation that begins as a root does, and the rest is not looked at.
        """
        end = _first(items) + max(map(len, self._beginnings))
        start = asked_for(items[:end])
        if not start:
            return ()
        common = max((_common(start, each) for each in self._beginnings), key=len)
        firsts = {each[0] for each in self._beginnings}.difference(common)
        rest = said_by_all(items[end:], item_digests(items[end:])) if firsts else ()
        return (*common, _THEN, *sorted(firsts.intersection((*start, *rest))))

    def hold(self, marks: tuple[str, ...]) -> bool:
        """Whether all of `marks`, one at least, stand in the request of one root."""
        return self._requests.holds(marks)

    def is_root_prompt(self, marks: tuple[str, ...], prompt: NDArray[np.uint32]) -> bool:
        """Whether a recorded root was shown `marks` and `prompt`, id by id: then nobody's reply is among them."""
        return any(not bag.missing(marks) for bag in self._prompts.get(_digest(prompt), ()))

    def judged(self, beginning: Said) -> ShownBeginning:
        """`beginning`, and whether a root is known that began as it does, users' items included."""
        at = bisect_left(self._beginnings, beginning)
        alike = self._beginnings[at][: len(beginning)] if at < len(self._beginnings) else ()
        return ShownBeginning(beginning, alike == beginning != ())

    def is_nobodys_reply(self, shown: ShownBeginning) -> bool:
        """Whether none of the lost calls can have said what stands in this beginning."""
        return all(map(shown.stands_beside, self._lost))


def _common(one: Said, other: Said) -> Said:
    """What both begin with."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return one[:at]
    return one[: len(other)]


def _digest(prompt: NDArray[np.uint32]) -> str:
    return digest_bytes(prompt.tobytes())

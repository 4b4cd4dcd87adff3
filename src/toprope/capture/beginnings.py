"""How a rollout begins: calls that are open before anything is recorded, and what the first record showed. Pure.

A first request with model-authored items is a beginning if nothing was lost before it. A call that began earlier and is
open still may be lost later, its client having gone on with what it said: then the record that stands is in doubt.
Kept apart from the index, which is forgotten when memory is short: this lasts as long as the calls that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toprope.tokens.items import CountedMarks


@dataclass(slots=True)
class _Beginning:
    """`opening`: open calls, each with those that were open when it began. `watched`: those before the first record."""

    opening: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    watched: set[str] = field(default_factory=set)


class Beginnings:
    """The beginnings of a recorder's rollouts. Memory is the calls that are open."""

    def __init__(self) -> None:
        self._of: dict[str, _Beginning] = {}

    def __len__(self) -> int:
        return len(self._of)

    def began(self, key: str, call_id: str) -> None:
        """A call began while nothing of `key` was known to be recorded."""
        opening = self._of.setdefault(key, _Beginning()).opening
        opening.setdefault(call_id, tuple(opening))

    def recorded(self, key: str, call_id: str, shown: tuple[str, ...] = ()) -> None:
        """A call has its record; `shown` are the marks of its request if it was decided to be the first of all."""
        it = self._of.get(key)
        if it is None:
            return
        before = it.opening.pop(call_id, tuple(it.opening))
        if shown:
            it.shown = shown
            it.watched = {each for each in before if each in it.opening}
        self._ended(key, it, call_id)

    def lost(self, key: str, call_id: str, marks: tuple[str, ...]) -> bool:
        """A call came to nothing; `marks` are those of its request. True if the first record may hold what it said."""
        it = self._of.get(key)
        if it is None:
            return False
        it.opening.pop(call_id, None)
        doubt = call_id in it.watched and bool(CountedMarks(marks).missing(it.shown))
        self._ended(key, it, call_id)
        return doubt

    def outlived(self, key: str) -> None:
        """The key was made new: what is open of it is an earlier attempt's, and no record is in doubt for it."""
        self._of.pop(key, None)

    def _ended(self, key: str, it: _Beginning, call_id: str) -> None:
        it.watched.discard(call_id)
        if not it.opening:
            del self._of[key]

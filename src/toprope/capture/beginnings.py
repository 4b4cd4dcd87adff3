"""How the calls of a rollout follow each other: which were open when one began, and which roots may be in doubt. Pure.

A request that shows turns is a root where no call before it can have said them. A call that began earlier and is open
still may be lost later, its client having gone on with what it said: then the record that stands is in doubt. A request
that came before any call can have said anything holds no reply, whatever becomes of the others.
Kept apart from the index, which is forgotten when memory is short: this lasts as long as the calls that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.tokens.shown import ShownBeginning, asked_for

_ANYBODY_SPOKE = -1


@dataclass(slots=True)
class _Calls:
    """`open`: the numbers in which the open calls began, oldest first, and whether before any reply.

    `watched`: what roots show, with the latest number in which one began, and `oldest` the open call for which the rest
    was let go. `silent`: how many calls the rollout had when none of them can have said anything.
    """

    open: dict[str, tuple[int, bool]] = field(default_factory=dict)
    watched: dict[ShownBeginning, int] = field(default_factory=dict)
    oldest: int = 0
    begun: int = 0
    silent: int = 0


class Beginnings:
    """The open calls of a recorder's rollouts. Memory is those calls and what is watched for them."""

    def __init__(self) -> None:
        self._of: dict[str, _Calls] = {}

    def __len__(self) -> int:
        return len(self._of)

    def began(self, key: str, call_id: str, place: int = 0, *, stream: bool = True) -> None:
        """A call began as the `place`-th of its rollout, whoever writes there, and nothing is recorded in it yet.

        0 where that is not known or not so (`known_rollout.place_of`).

        `stream`: a part of what it says may leave before it has ended.
        """
        it = self._of.get(key)
        if it is None:
            it = self._of[key] = _Calls()
        if call_id in it.open:
            return
        # All that began before are ours, open, and not streamed: nothing left yet.
        before_any_reply = place == 1 or (place > 0 and place == it.silent + 1)
        it.silent = place if before_any_reply and not stream else _ANYBODY_SPOKE
        it.begun += 1
        it.open[call_id] = (it.begun, before_any_reply)

    def before_any_reply(self, key: str, call_id: str) -> bool:
        """Whether an open call began when no call of its rollout can have said anything."""
        it = self._of.get(key)
        return it is not None and it.open.get(call_id, (0, False))[1]

    def recorded(self, key: str, call_id: str, doubtful: ShownBeginning | None = None) -> None:
        """A call has its record, or nothing of it can stand anywhere.

        `doubtful` is what it shows, if it is a root and an open call may turn out to have said it.
        """
        it = self._of.get(key)
        if it is None:
            return
        began = it.open.pop(call_id, None)
        if doubtful is not None:
            number = began[0] if began is not None else it.begun + 1
            it.watched[doubtful] = max(number, it.watched.get(doubtful, 0))
        self._ended(key, it)

    def lost(self, key: str, call_id: str, items: Sequence[Mapping[str, Any]] = ()) -> bool:
        """A call with this request came to nothing. True if a root that began later may hold what it said."""
        it = self._of.get(key)
        if it is None:
            return False
        number, _ = it.open.pop(call_id, (0, False))
        shown = [each for each, latest in it.watched.items() if number < latest]
        lost = asked_for(items) if shown else ()
        self._ended(key, it)
        return not all(each.stands_beside(lost) for each in shown)

    def outlived(self, key: str) -> None:
        """The key ended or was made new: what is open of it is an earlier attempt's, and puts no record in doubt."""
        self._of.pop(key, None)

    def _ended(self, key: str, it: _Calls) -> None:
        it.silent = _ANYBODY_SPOKE
        if not it.open:
            del self._of[key]
        elif it.watched:
            oldest = next(iter(it.open.values()))[0]
            if oldest != it.oldest:  # else all that is watched began later: beside a hung call every end would read it
                it.oldest = oldest
                it.watched = {each: number for each, number in it.watched.items() if number > oldest}

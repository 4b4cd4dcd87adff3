"""What one server knows of equal requests before the journal tells it: who left, and which repeat claims which call.

A claim stands from the step in which it was decided, so that of repeats at once each gets a call of its own. An open
call of another worker is doubted once, by all repeats here together. Left to others: deciding (`retries`), reading the
journal (`repeats`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from toprope.servers.model.call import ModelCall
from toprope.servers.model.retries import Doubt, Seen

_MAX_REQUESTS = 4096
"""Requests that are remembered; what is forgotten is sampled anew."""

DOUBT_S = 1.0
"""How long a call at another worker may take to say that it claims a call on record, before it is its own sample.

It says so when it looks again: at once where that call ran, within the longest pause of `repeats` (0.5 s) elsewhere. As
much again is for a busy machine.
"""
STAGGER_S = 0.05
"""More for each open call before it, of which it may be in doubt itself: of two in doubt the earlier speaks first."""


@dataclass(slots=True)
class _Known:
    left: set[str] = field(default_factory=set)
    claims: dict[str, str] = field(default_factory=dict)
    gave_up: set[str] = field(default_factory=set)
    doubts: dict[tuple[str, str], float] = field(default_factory=dict)  # of (a call, a recorded one): when it is over


class Claims:
    """The early leavers and the repeats of one server. Every change is done when its method returns."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str | None, str], _Known] = OrderedDict()

    def __len__(self) -> int:
        """How many requests are remembered."""
        return len(self._known)

    def left(self, call: ModelCall) -> None:
        """The client of `call`, which was dispatched, left before its reply was sent whole."""
        self._of(call).left.add(call.call_id)

    def claim(self, call: ModelCall, target: str) -> None:
        """`call` waits for `target`, or is answered from it; nobody else is, until `release`."""
        self._of(call).claims[call.call_id] = target

    def release(self, call: ModelCall) -> None:
        """`call` claims nothing (any more): it goes its own way."""
        known = self._known.get((call.rollout_id, call.tag))
        if known is not None:
            known.claims.pop(call.call_id, None)
            if not (known.left or known.claims or known.gave_up or known.doubts):
                del self._known[call.rollout_id, call.tag]

    def give_up(self, call: ModelCall) -> None:
        """The client of `call`, a repeat, left before it had an answer: what it claimed is still to be had."""
        self._of(call).gave_up.add(call.call_id)

    def doubt(self, call: ModelCall, doubt: Doubt, now: float) -> float:
        """Seconds from `now` (of a monotonic clock) until nobody is left in doubt to claim `doubt.call_id`.

        `seen` tells it then. What any repeat here has doubted before is not doubted anew.
        """
        doubts = self._of(call).doubts
        for each, target, before in doubt.of:
            doubts.setdefault((each, target), now + DOUBT_S + before * STAGGER_S)
        ends = [doubts[each, target] for each, target, _ in doubt.of if target == doubt.call_id]
        return max(0.0, max(ends, default=now) - now)

    def know(self, call: ModelCall) -> bool:
        """Whether anything is known of requests equal to `call`."""
        return (call.rollout_id, call.tag) in self._known

    def seen(
        self,
        call: ModelCall,
        *,
        gone: Collection[str] = (),
        lost: Collection[str] = (),
        writer_epoch: str | None = None,
        now: float = 0.0,
    ) -> Seen:
        """What is known `now` of requests equal to `call`; `gone`, `lost` and `writer_epoch` as in `Seen`."""
        known = self._known.get((call.rollout_id, call.tag)) or _Known()
        own_way = {pair for pair, end in known.doubts.items() if end <= now}
        return Seen(known.left, known.claims, known.gave_up, writer_epoch, own_way, gone, lost)

    def _of(self, call: ModelCall) -> _Known:
        key = (call.rollout_id, call.tag)
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        if len(self._known) > _MAX_REQUESTS:
            self._known.popitem(last=False)
        return known

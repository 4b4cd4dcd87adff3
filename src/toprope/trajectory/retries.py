"""One prompt sampled more than once, and replies nobody waited for. Step 5 of the builder.

Calls that continue the same call with the same prompt are retries of one another. Evidence decides which one the agent
used; the others are quarantined with everything behind them: kept and counted, delivered in no single trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from toprope.trajectory.evidence import Call


@dataclass(slots=True)
class Sorted:
    """What became of the sampling calls: ids cut as unread leaves, quarantined, collapsed (quarantined because a twin
    with equal tokens was kept), and the groups that nothing decides."""

    cut: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    collapsed: set[str] = field(default_factory=set)
    undecided: list[frozenset[str]] = field(default_factory=list)

    def open_questions(self) -> list[frozenset[str]]:
        """The groups that nothing decides and that are not quarantined as a whole."""
        return [group for group in self.undecided if not group <= self.quarantined]

    def is_live(self, call: Call) -> bool:
        """Whether a call still counts."""
        return call.id not in self.cut and call.id not in self.quarantined


def sort_out(calls: list[Call], named: frozenset[str], terminal_path: Iterable[Call]) -> Sorted:
    """Cut unread leaves, then settle retries. `calls` are all that sampled; the path's members always win."""
    path = {call.id for call in terminal_path}
    out = Sorted()
    for call in calls:
        # The client left, nobody continued it, no witness names it: the agent never saw this reply.
        if call.is_unread and call.id not in named and call.id not in path:
            out.cut.add(call.id)
    groups: dict[tuple[str | None, bytes], list[Call]] = defaultdict(list)
    for call in calls:
        if call.fault is None and call.id not in out.cut:
            groups[call.parent.id if call.parent else None, call.lead.tobytes()].append(call)
    for members in groups.values():
        if len(members) > 1:
            _settle(members, path, out)
    return out


def _settle(members: list[Call], path: set[str], out: Sorted) -> None:
    """Keep what the evidence says was used: on the terminal path, else continued, else all the same anyway."""
    kept = [call for call in members if call.id in path] or [call for call in members if call.extended]
    if not kept and _all_equal(members):
        kept = [min(members, key=lambda call: call.id)]
        out.collapsed.update(call.id for call in members if call is not kept[0])
    if not kept:
        out.undecided.append(frozenset(call.id for call in members))
        return
    for call in members:
        if not any(call is each for each in kept):
            out.quarantined |= {call.id} | call.descendants()


def _all_equal(members: list[Call]) -> bool:
    return all(np.array_equal(members[0].generated, call.generated) for call in members[1:])

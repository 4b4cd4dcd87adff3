"""Every cell of the life-cycle table, asked of a transport and compared with `tokens.lifecycle.step`.

For each phase and verb a fresh key is brought into the phase, the verb is called, and what it answers and what a freeze
then shows is held against the pure table. Verbs that a transport does not have are left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from toprope.capture.protocols import AbortingSink, SupersedingSource
from toprope.testing.capture_kit import Connect, Nonconforming, Scale, Transport, client, demand, new_key, sample_entry
from toprope.tokens.lifecycle import (
    Abort,
    Begin,
    Call,
    Drop,
    Event,
    Freeze,
    Head,
    Mark,
    Phase,
    Put,
    Supersede,
    Verdict,
    step,
)

_PHASES = (Phase.ABSENT, Phase.OPEN, Phase.FROZEN, Phase.RETIRED)
_UNKNOWN, _STANDING = Call(), Call(put=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """A key brought into a phase: its head as the table has it (but for the version, which is the transport's own)."""

    key: str
    head: Head
    pair: tuple[str, int]

    @property
    def standing(self) -> Call:
        """The state of call c1."""
        return Call() if self.head.phase is Phase.ABSENT else _STANDING


@dataclass(frozen=True, slots=True)
class _Cell:
    name: str
    act: Callable[[], Awaitable[Any]]
    event: Event
    call: Call = _UNKNOWN
    puts: str = ""


async def every_cell_of_the_table_holds(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        for phase in _PHASES:
            for name in [cell.name for cell in _cells(one, _Place("", Head(), ("", 0)))]:
                place = await _brought_to(one, phase)
                cell = next(cell for cell in _cells(one, place) if cell.name == name)
                await _check(one, place, cell)


def _cells(one: Transport, place: _Place) -> Iterator[_Cell]:
    key, (snapshot_id, version) = place.key, place.pair
    sink, source = one.sink, one.source
    if getattr(sink, "begin_call", None) is not None:
        yield _Cell("begin_call of a new call", lambda: sink.begin_call(key, "n1"), Begin())
        yield _Cell("begin_call of a call that was put", lambda: sink.begin_call(key, "c1"), Begin(), place.standing)
    yield _Cell("put of a new call", lambda: sink.put(sample_entry(key, "n1")), Put("n1"), puts="n1")
    same = place.standing.put
    yield _Cell("put of the same", lambda: sink.put(sample_entry(key, "c1")), Put("c1", same), place.standing, "c1")
    other = sample_entry(key or "k", "c1", generated=3)
    yield _Cell("put of other bytes", lambda: sink.put(other), Put("c1"), place.standing, "c1")
    if isinstance(sink, AbortingSink):
        yield _Cell("abort_call of a new call", lambda: sink.abort_call(key, "n1", reason="client_gone"), Abort("x"))
        yield _Cell(
            "abort_call after the put",
            lambda: sink.abort_call(key, "c1", reason="client_gone"),
            Abort("client_gone"),
            place.standing,
        )
    yield _Cell("mark_incomplete", lambda: sink.mark_incomplete(key, "n1"), Mark("write_failed:n1"))
    yield _Cell("freeze", lambda: source.freeze(key), Freeze(snapshot_id or "s"))
    told = Drop(snapshot_id, version)
    yield _Cell("drop of the right pair", lambda: source.drop(key, snapshot_id=snapshot_id, version=version), told)
    stale = Drop(snapshot_id, version + 1)
    yield _Cell("drop of a stale pair", lambda: source.drop(key, snapshot_id=snapshot_id, version=version + 1), stale)
    if isinstance(source, SupersedingSource):
        yield _Cell("supersede", lambda: source.supersede(key), Supersede())


async def _brought_to(one: Transport, phase: Phase) -> _Place:
    key = new_key()
    if phase is Phase.ABSENT:
        return _Place(key, Head(), ("never", 1))
    await one.sink.put(sample_entry(key, "c1"))
    if phase is Phase.OPEN:
        return _Place(key, Head(phase, entries=1, calls=1), ("never", 1))
    snapshot = await one.source.freeze(key)
    pair = (snapshot.snapshot_id, snapshot.version)
    if phase is Phase.RETIRED:
        demand(
            await one.source.drop(key, snapshot_id=pair[0], version=pair[1]) is True, "drop with the right pair fails"
        )
    return _Place(key, Head(phase, snapshot.version, snapshot.snapshot_id, entries=1, calls=1), pair)


async def _check(one: Transport, place: _Place, cell: _Cell) -> None:
    before = place.head
    where = f"{cell.name} on a key that is {before.phase}"
    done = step(before, cell.call, cell.event)
    refuses = done.verdict in (Verdict.REFUSED, Verdict.CONFLICT)
    try:
        answer = await cell.act()
    except Nonconforming:
        raise
    except Exception as error:  # which error is the transport's own affair
        demand(refuses, f"{where} is refused ({type(error).__name__}: {error}); the table says {done.verdict}")
    else:
        demand(not refuses, f"{where} is accepted; the table says {done.verdict}")
        if isinstance(cell.event, Drop):
            expected = done.verdict in (Verdict.DONE, Verdict.NOTHING)
            demand(answer is expected, f"{where} answers {answer!r}; the table says {expected}")
    if done.head.phase not in (Phase.RETIRED, Phase.FENCED):
        await _look(one, place, cell, done.head, where)


async def _look(one: Transport, place: _Place, cell: _Cell, head: Head, where: str) -> None:
    """Hold what a freeze shows now against the table's head."""
    snapshot = await one.source.freeze(place.key)
    calls = set() if head.phase is Phase.ABSENT or place.head.phase is Phase.ABSENT else {"c1"}
    if head.entries > len(calls):
        calls.add(cell.puts)
    found = {entry.model_call_id for entry in snapshot.entries}
    demand(found == calls, f"after {where} a freeze shows {sorted(found)}, not {sorted(calls)}")
    lost = head.incomplete or head.open_intents > 0
    demand(snapshot.incomplete == lost, f"after {where} incomplete is {snapshot.incomplete}, not {lost}")
    if place.head.phase is Phase.FROZEN and head.phase is Phase.FROZEN:
        moved, due = snapshot.version - place.head.version, head.version - place.head.version
        demand((moved > 0) == (due > 0), f"{where} moves the version by {moved}, the table says {due}")
        demand(snapshot.snapshot_id == place.head.snapshot_id, f"{where} changes the snapshot id")

"""Every cell of the life-cycle table, asked of a transport and compared with `tokens.lifecycle.step`.

For each phase and verb a fresh key is brought into the phase, the verb is called, and what it answers and what a freeze
then shows is held against the pure table. Each is asked twice: with one entry on the key, and with an open call and an
aborted one beside it. Verbs that a transport does not have are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toprope.capture.protocols import (
    AbortingSink,
    EntryConflict,
    ReceiptSource,
    SupersedingSource,
    TokenSource,
    own_verb,
)
from toprope.errors.tree import CaptureClosed
from toprope.testing.capture_kit import (
    Connect,
    Nonconforming,
    Scale,
    Transport,
    client,
    demand,
    new_key,
    refused,
    sample_entry,
)
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
_UNKNOWN, _STANDING, _OPEN = Call(), Call(put=True), Call(intent=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """A key brought into a phase: its head as the table has it (but for the version, which is the transport's own).

    `busy`: call b1 is open there, and a1 aborted.
    """

    key: str
    head: Head
    pair: tuple[str, int]
    busy: bool = False

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
        async for place, cell in _all(one):
            await _check(one, place, cell)


async def a_refusal_says_what_it_is(connect: Connect, scale: Scale) -> None:
    """A recorder tells a capture that is closed (the agent's call is refused, once and for all) and a conflict (marked
    already) from a store that fails (the call goes on, and is marked) by the class of the error alone."""
    async with client(connect) as one:
        async for place, cell in _all(one, verdicts=(Verdict.REFUSED, Verdict.CONFLICT)):
            verdict = step(place.head, cell.call, cell.event).verdict
            due = CaptureClosed if verdict is Verdict.REFUSED else EntryConflict
            try:
                await cell.act()
            except due:
                continue
            except Exception as error:
                where = f"{cell.name} on a key that is {place.head.phase}"
                raise Nonconforming(f"{where} raises {type(error).__name__}, not {due.__name__}: {error}") from error


async def _all(
    one: Transport, *, verdicts: Collection[Verdict] = tuple(Verdict)
) -> AsyncIterator[tuple[_Place, _Cell]]:
    """Every cell, each on a key of its own; `verdicts`: only those with one of these."""
    for busy in (False, True):
        for phase in _PHASES if not busy else _PHASES[1:]:
            model = _Place("", Head(phase), ("", 0), busy)
            names = [c.name for c in _cells(one, model) if step(model.head, c.call, c.event).verdict in verdicts]
            for name in names:
                place = await _brought_to(one, phase, busy=busy)
                yield place, next(cell for cell in _cells(one, place) if cell.name == name)


def _cells(one: Transport, place: _Place) -> Iterator[_Cell]:
    key, (snapshot_id, version) = place.key, place.pair
    sink, source = one.sink, one.source
    if own_verb(sink, "begin_call") is not None:
        yield _Cell("begin_call of a new call", lambda: sink.begin_call(key, "n1"), Begin())
        yield _Cell("begin_call of a call that was put", lambda: sink.begin_call(key, "c1"), Begin(), place.standing)
        if place.busy:
            yield _Cell("begin_call of an open call", lambda: sink.begin_call(key, "b1"), Begin(), _OPEN)
            yield _Cell("put of an open call", lambda: sink.put(sample_entry(key, "b1")), Put("b1"), _OPEN, "b1")
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
        if place.busy:
            gone = Abort("client_gone")
            yield _Cell(
                "abort_call of an open call", lambda: sink.abort_call(key, "b1", reason=gone.reason), gone, _OPEN
            )
            late = sample_entry(key, "a1")
            yield _Cell("put of an aborted call", lambda: sink.put(late), Put("a1"), Call(abort="upstream:500"), "a1")
    yield _Cell("mark_incomplete", lambda: sink.mark_incomplete(key, "n1"), Mark("write_failed:n1"))
    yield _Cell("freeze", lambda: source.freeze(key), Freeze(snapshot_id or "s"))
    told = Drop(snapshot_id, version)
    yield _Cell("drop of the right pair", lambda: source.drop(key, snapshot_id=snapshot_id, version=version), told)
    yield _drop_of(source, key, snapshot_id, version + 1, "a version to come")
    yield _drop_of(source, key, snapshot_id, version - 1, "a version before")
    yield _drop_of(source, key, f"{snapshot_id}0", version, "another snapshot")
    if isinstance(source, SupersedingSource):
        yield _Cell("supersede", lambda: source.supersede(key), Supersede())


def _drop_of(source: TokenSource, key: str, snapshot_id: str, version: int, what: str) -> _Cell:
    told = Drop(snapshot_id, version)
    return _Cell(f"drop of {what}", lambda: source.drop(key, snapshot_id=snapshot_id, version=version), told)


async def _brought_to(one: Transport, phase: Phase, *, busy: bool) -> _Place:
    key = new_key()
    if phase is Phase.ABSENT:
        return _Place(key, Head(), ("never", 1))
    opened = int(busy and own_verb(one.sink, "begin_call") is not None)
    if opened:
        await one.sink.begin_call(key, "b1")
    await one.sink.put(sample_entry(key, "c1"))
    aborted = int(busy and isinstance(one.sink, AbortingSink))
    if busy and isinstance(one.sink, AbortingSink):
        await one.sink.abort_call(key, "a1", reason="upstream:500")
    head = Head(phase, entries=1, calls=1 + opened + aborted, open_intents=opened)
    if phase is Phase.OPEN:
        return _Place(key, head, ("never", 1), busy)
    snapshot = await one.source.freeze(key)
    pair = (snapshot.snapshot_id, snapshot.version)
    if phase is Phase.RETIRED:
        demand(
            await one.source.drop(key, snapshot_id=pair[0], version=pair[1]) is True, "drop with the right pair fails"
        )
    told = replace(head, version=snapshot.version, snapshot_id=snapshot.snapshot_id, incomplete=bool(opened))
    return _Place(key, told, pair, busy)


async def _check(one: Transport, place: _Place, cell: _Cell) -> None:
    before = place.head
    where = f"{cell.name} on a key that is {before.phase}"
    done = step(before, cell.call, cell.event)
    refuses = done.verdict in (Verdict.REFUSED, Verdict.CONFLICT)
    try:
        answer = await cell.act()
    except Nonconforming:
        raise
    except Exception as error:
        demand(refuses, f"{where} is refused ({type(error).__name__}: {error}); the table says {done.verdict}")
    else:
        demand(not refuses, f"{where} is accepted; the table says {done.verdict}")
        if isinstance(cell.event, Drop):
            expected = done.verdict in (Verdict.DONE, Verdict.NOTHING)
            demand(answer is expected, f"{where} answers {answer!r}; the table says {expected}")
    if done.head.phase is Phase.RETIRED:
        await _look_at_the_tombstone(one, place, where)
    else:
        await _look(one, place, cell, done.head, where)


async def _look_at_the_tombstone(one: Transport, place: _Place, where: str) -> None:
    """What was refused, or done twice, left it as it was."""
    key, (snapshot_id, version) = place.key, place.pair
    await refused(one.source.freeze(key), f"after {where} it can be frozen again")
    done = await one.source.drop(key, snapshot_id=snapshot_id, version=version)
    demand(done is True, f"after {where} a drop of the pair that was delivered says {done!r}")
    if isinstance(one.source, ReceiptSource):
        kept = [receipt.model_call_id for receipt in await one.source.receipts(key) or ()]
        demand(kept == ["c1"], f"after {where} its receipts are of {kept}, not of c1")


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

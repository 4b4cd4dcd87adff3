"""What a store answers besides snapshots: counts, reads for lineage, the list. What others rely on without a freeze.

Plain async functions like those of `capture_checks`, one promise each. All are of optional parts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from toprope.capture.protocols import (
    AbortingSink,
    BeginAck,
    CallJournal,
    CaptureInfo,
    CaptureLister,
    CaptureReader,
    Intent,
    PutAck,
    ReceiptSource,
    SupersedingSource,
    own_verb,
)
from toprope.testing.capture_kit import Connect, Scale, Skipped, Transport, client, demand, new_key, sample_entry, takes

_CLOCKS_S = 60.0
"""Seconds that the clock of a store may be ahead of ours."""


class _Holdings:
    """What a key must hold, and whether acknowledgements say so."""

    def __init__(self, key: str) -> None:
        self.key, self.version, self.acks = key, 0, 0
        self.calls: set[str] = set()
        self.entries: set[str] = set()

    async def begin(self, by: Transport, call_id: str) -> None:
        self.calls.add(call_id)
        ack: object = await by.sink.begin_call(self.key, call_id)
        if isinstance(ack, BeginAck):
            self.acks += 1
            due, found = (len(self.calls), len(self.entries)), (ack.calls, ack.entries)
            demand(found == due, f"begin_call says (calls, entries) {found} of a key that holds {due}")

    async def put(self, by: Transport, call_id: str, *, frozen_at: int | None = None) -> None:
        new = call_id not in self.entries
        self.calls.add(call_id)
        self.entries.add(call_id)
        ack: object = await by.sink.put(sample_entry(self.key, call_id))
        if not isinstance(ack, PutAck):
            return
        self.acks += 1
        demand(
            ack.entries == len(self.entries), f"put says {ack.entries} entries of a key that holds {len(self.entries)}"
        )
        if frozen_at is not None:
            demand(ack.version == frozen_at, f"put says version {ack.version} of a key that is frozen at {frozen_at}")
            return
        moved = ack.version > self.version if new else ack.version == self.version
        demand(moved, f"version {self.version} became {ack.version} by a put that was {'new' if new else 'there'}")
        self.version = ack.version


async def begin_and_put_say_what_the_key_holds(connect: Connect, scale: Scale) -> None:
    """By these counts a recorder learns whether it knows every call before a first one: too few, and a turn that
    nobody recorded is taken for the user's."""
    async with client(connect) as one, client(connect) as other:
        if own_verb(one.sink, "begin_call") is None:
            raise Skipped("the sink has no begin_call")
        holds = _Holdings(new_key())
        await holds.begin(one, "a")
        if not holds.acks:
            raise Skipped("begin_call returns no BeginAck: its callers take nothing for known")
        await holds.begin(other, "a")
        await holds.begin(other, "b")
        await holds.put(one, "never-begun")
        await holds.begin(one, "d")
        await holds.put(other, "a")
        await holds.put(one, "a")
        await holds.begin(one, "a")
        if isinstance(one.sink, AbortingSink):
            await one.sink.abort_call(holds.key, "b", reason="client_gone")
            await one.sink.abort_call(holds.key, "f", reason="client_gone")
            holds.calls.add("f")
            await holds.begin(other, "g")
            await holds.put(other, "f")
        await one.sink.mark_incomplete(holds.key, "h")
        holds.version = 0  # a mark moved it, by how much is not said
        await holds.begin(other, "i")
        await holds.put(one, "b")
        frozen = await other.source.freeze(holds.key)
        demand(frozen.version > holds.version, "a freeze does not move the version")
        await holds.put(one, "a", frozen_at=frozen.version)
        await one.sink.mark_incomplete(holds.key, "j")
        await holds.put(other, "a", frozen_at=(await one.source.freeze(holds.key)).version)
        if isinstance(one.source, SupersedingSource):
            await one.source.supersede(holds.key)
            again = _Holdings(holds.key)
            await again.begin(other, "a")
            await again.put(one, "a")
            await again.begin(one, "b")


async def entries_are_read_in_the_order_of_their_arrival(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        readers = [each.source for each in (one, other) if isinstance(each.source, CaptureReader)]
        if len(readers) < 2:
            raise Skipped("the source has no open_entries")
        key, names = new_key(), ("c3", "c1", "c4", "c2")
        for n, name in enumerate(names):
            await (one, other)[n % 2].sink.put(sample_entry(key, name, prompt=(1, n)))
            for reader in readers:
                found = [e.model_call_id for e in await reader.open_entries(key)]
                demand(found == list(names[: n + 1]), f"{names[: n + 1]} were put in this order, {found} are read")
                new = [e.model_call_id for e in await reader.open_entries(key, n)]
                demand(new == [name], f"after the first {n} entries {name} was put, {new} are read")
        await one.sink.put(sample_entry(key, "c4", prompt=(1, 2)))
        with suppress(Exception):
            await other.sink.put(sample_entry(key, "c1", prompt=(1, 9)))
        await one.source.freeze(key)
        for reader in readers:
            found = [e.model_call_id for e in await reader.open_entries(key)]
            demand(found == list(names), f"a repeated put, a refused one and a freeze made {found} of {names}")
            demand(await reader.open_entries(key, len(names)) == (), "there are entries after the last one")


async def a_dropped_payload_is_not_read_again(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        if not isinstance(other.source, CaptureReader):
            raise Skipped("the source has no open_entries")
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        snapshot = await one.source.freeze(key)
        await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        demand(await other.source.open_entries(key) == (), "the entries of a retired rollout can still be read")


async def every_capture_is_listed(connect: Connect, scale: Scale) -> None:
    """What is not listed is evidence that nobody finds, and disk that nobody frees."""
    async with client(connect) as one, client(connect) as other:
        lister = other.source
        if not isinstance(lister, CaptureLister):
            raise Skipped("the source has no list_captures")
        began = time.monotonic()
        due = await _one_of_each(one)
        looked_at = await _only_looked_at(other)
        first = next(iter(due))
        await one.sink.put(sample_entry(first, "c2", prompt=(1, 2)))  # it is no younger for that
        listed = await lister.list_captures()
        mine = [info.rollout_id for info in listed if info.rollout_id in due]
        demand(mine == [key for key in due if key in mine], "the list does not begin with the oldest")
        ages = [info.age_s for info in listed if info.rollout_id in due]
        demand(
            ages == sorted(ages, reverse=True) and ages[0] > ages[-1], f"the oldest come first; their ages are {ages}"
        )
        told_s = time.monotonic() - began
        demand(
            0 <= ages[-1] <= ages[0] < told_s + _CLOCKS_S, f"captures of the last {told_s:.1f} s have the ages {ages}"
        )
        found = {info.rollout_id: info for info in listed}
        everything = {info.rollout_id: info for info in await lister.list_captures(retired=True)}
        demand(looked_at not in everything, "a key that was only looked at is listed")
        for key, (what, told) in due.items():
            retired = told["state"] == "retired"
            demand((key in found) != retired, f"a capture with {what} is {'' if retired else 'not '}listed")
            demand(key in everything, f"a capture with {what} is not listed among all")
            wrong = [name for name, value in told.items() if getattr(everything[key], name) != value]
            demand(not wrong, f"the list is wrong about a capture with {what}: {_said(everything[key], wrong, told)}")


def _said(info: CaptureInfo, names: list[str], told: dict[str, Any]) -> str:
    return ", ".join(f"{name} is {getattr(info, name)!r}, not {told[name]!r}" for name in names)


async def _one_of_each(one: Transport) -> dict[str, tuple[str, dict[str, Any]]]:
    """Captures in every state, each with what it is and what a list must say of it."""
    sink, source = one.sink, one.source
    due: dict[str, tuple[str, dict[str, Any]]] = {}

    def expect(key: str, what: str, state: str, calls: int, entries: int, **more: Any) -> str:
        told = {"state": state, "calls": calls, "entries": entries, "incomplete": False, "abandoned": False, **more}
        if state == "retired":
            del told["calls"], told["entries"]  # counted of what was delivered, or of what is left: not said
        due[key] = (what, told)
        return key

    await sink.put(sample_entry(expect(new_key(), "two entries", "open", 2, 2, open_intents=0, snapshot_id=None), "c1"))
    await sink.mark_incomplete(expect(new_key(), "nothing but a mark", "open", 0, 0, incomplete=True), "c1")
    if own_verb(sink, "begin_call") is not None:
        await sink.begin_call(expect(new_key(), "nothing but an intent", "open", 1, 0, open_intents=1), "c1")
    begin: Any = own_verb(sink, "begin_call")
    if takes(begin, "intent"):
        key, epoch = new_key(), f"{new_key()}-writer"
        expect(key, "a writer at work", "open", 2, 1, open_intents=1, writer_epochs=(epoch,), writer="live")
        for call_id in ("c1", "c2"):
            await begin(key, call_id, intent=Intent(writer_epoch=epoch))
        await sink.put(sample_entry(key, "c1"))
        key = expect(
            new_key(), "a writer whose call ended", "open", 1, 1, open_intents=0, writer_epochs=(), writer="live"
        )
        await begin(key, "c1", intent=Intent(writer_epoch=epoch))
        await sink.put(sample_entry(key, "c1"))
    if isinstance(sink, AbortingSink):
        told: dict[str, Any] = {"aborts": (("client_gone", 1),), "open_intents": 0}
        key = expect(new_key(), "nothing but an abort", "open", 1, 0, **told)
        await sink.abort_call(key, "c1", reason="client_gone")
    for what, entries, marked in (
        ("nothing, frozen", 0, False),
        ("a frozen entry", 1, False),
        ("a lost call", 1, True),
    ):
        key = new_key()
        for _ in range(entries):
            await sink.put(sample_entry(key, "c1"))
        if marked:
            await sink.mark_incomplete(key, "c2")
        seen = await source.freeze(key)
        pair: dict[str, Any] = {"snapshot_id": seen.snapshot_id, "version": seen.version}
        expect(key, what, "frozen", entries, entries, incomplete=marked, reasons=seen.reasons, **pair)
    if isinstance(source, SupersedingSource):
        key = new_key()
        await sink.put(sample_entry(key, "c1"))
        expect(str(await source.supersede(key)), "an attempt that was set aside", "open", 1, 1, abandoned=True)
    key = new_key()
    await sink.put(sample_entry(key, "c1"))
    seen = await source.freeze(key)
    await source.drop(key, snapshot_id=seen.snapshot_id, version=seen.version)
    expect(key, "a tombstone", "retired", 1, 1, writer=None, snapshot_id=seen.snapshot_id, version=seen.version)
    return due


async def _only_looked_at(other: Transport) -> str:
    """A key that every reading verb was asked about."""
    key, source = new_key(), other.source
    if isinstance(source, CaptureReader):
        await source.open_entries(key)
    if isinstance(source, CallJournal):
        await source.begun_calls(key)
    if isinstance(source, ReceiptSource):
        await source.receipts(key)
    if isinstance(source, SupersedingSource):
        await source.supersede(key)
    await source.drop(key, snapshot_id="never", version=1)
    return key

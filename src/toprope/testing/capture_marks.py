"""That a lost call stays lost: marks are sticky, name the call, and stay with the attempt that they were made for.

Plain async functions like those of `capture_checks`, one promise each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from toprope.capture.protocols import (
    AbortingSink,
    CallJournal,
    CaptureReader,
    ReceiptSource,
    SupersedingSource,
    own_verb,
)
from toprope.testing.capture_kit import (
    Connect,
    Scale,
    Skipped,
    Transport,
    client,
    demand,
    frozen_ids,
    new_key,
    refused,
    sample_entry,
    takes,
)

_Act: TypeAlias = Callable[[str], Awaitable[Any]]

_HISTORIES = (
    "mark other, put",
    "mark itself, put",
    "mark itself, put, put, begin",
    "mark none, put",
    "put, mark other, freeze",
    "put, mark other, begin other, put other",
    "put, mark other, abort other",
    "put, freeze, mark other, put, freeze",
    "put, freeze, mark itself, mark other, freeze",
    "put, clash, put",
    "put, freeze, clash, put, freeze",
    "put, begin other, freeze, abort other, freeze",
    "put, begin other, freeze, put, freeze",
)
"""What may happen to a call `c1` (itself) and to another of its rollout, each with a loss in it."""


async def a_mark_is_never_taken_back(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        acts = _acts(one)
        for history in _HISTORIES:
            steps = history.split(", ")
            if not all(each in acts for each in steps):
                continue
            key = new_key()
            for each in steps:
                await acts[each](key)
            for _ in range(2):
                snapshot = await other.source.freeze(key)
                demand(snapshot.incomplete, f"after {history}: a rollout that lacks a call looks whole")
                demand({e.model_call_id for e in snapshot.entries} >= {"c1"}, f"after {history}: c1 is gone")


def _acts(one: Transport) -> Mapping[str, _Act]:
    sink = one.sink

    async def clash(key: str) -> None:
        with suppress(Exception):  # that it is refused is another check's
            await sink.put(sample_entry(key, "c1", generated=3))

    acts: dict[str, _Act] = {
        "put": lambda key: sink.put(sample_entry(key, "c1")),
        "put other": lambda key: sink.put(sample_entry(key, "c2")),
        "mark itself": lambda key: sink.mark_incomplete(key, "c1"),
        "mark other": lambda key: sink.mark_incomplete(key, "c2"),
        "mark none": lambda key: sink.mark_incomplete(key),
        "freeze": one.source.freeze,
        "clash": clash,
    }
    if own_verb(sink, "begin_call") is not None:
        acts["begin"] = lambda key: sink.begin_call(key, "c1")
        acts["begin other"] = lambda key: sink.begin_call(key, "c2")
    if isinstance(sink, AbortingSink):
        aborting = sink
        acts["abort other"] = lambda key: aborting.abort_call(key, "c2", reason="client_gone")
    return acts


async def a_lost_call_is_named(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        mark: Any = one.sink.mark_incomplete
        if not takes(mark, "reason"):
            raise Skipped("mark_incomplete takes no reason: who gives none is told none")
        acts = _acts(one)
        due = {"clash": ("conflict", "c1"), "begin other": ("dangling_intent", "c2")}
        keys = {name: new_key() for name in due if name in acts}
        for name, key in keys.items():
            await one.sink.put(sample_entry(key, "c1"))
            await acts[name](key)
        keys["mark"] = new_key()
        await mark(keys["mark"], "c9", reason="no_token_ids")
        due["mark"] = ("no_token_ids", "c9")
        for name, key in keys.items():
            kind, call_id = due[name]
            for _ in range(2):
                found = (await other.source.freeze(key)).reasons
                named = any(each.partition(":")[0] == kind and call_id in each.split(":") for each in found)
                demand(named, f"{kind} of call {call_id}: the snapshot says {list(found)}")


async def what_is_set_aside_keeps_its_marks(connect: Connect, scale: Scale) -> None:
    """And the new attempt has none of them: no mark, intent, abort, entry or receipt of the old one."""
    async with client(connect) as one, client(connect) as other:
        source = one.source
        if not isinstance(source, SupersedingSource):
            raise Skipped("the source has no supersede")
        for phase in ("open", "frozen", "retired"):
            key = new_key()
            await _used(one, key, doubtful=phase != "retired")
            before = await one.source.freeze(key) if phase != "open" else None
            if before is not None and phase == "retired":
                await one.source.drop(key, snapshot_id=before.snapshot_id, version=before.version)
            kept = await source.receipts(key) if isinstance(source, ReceiptSource) else None
            name = await source.supersede(key)
            demand(isinstance(name, str) and name != key, f"an attempt that was {phase} is not set aside by name")
            await _is_new(one, other, key, phase)
            if phase == "retired":
                await refused(other.source.freeze(str(name)), "a retired attempt that was set aside can be frozen")
                if isinstance(other.source, ReceiptSource):
                    demand(await other.source.receipts(str(name)) == kept, "receipts did not move with their attempt")
                continue
            old = await other.source.freeze(str(name))
            demand(old.incomplete, f"the marks of an attempt that was {phase} are gone with it")
            demand(before is None or old.snapshot_id == before.snapshot_id, "a frozen attempt has another snapshot id")
            demand([e.model_call_id for e in old.entries] == ["c1"], "an attempt that was set aside lacks its entries")
            told = not takes(one.sink.mark_incomplete, "reason") or any("c2" in each for each in old.reasons)
            demand(told, f"the marks of an attempt that was set aside are {list(old.reasons)}, and not of c2")
            demand(await source.supersede(key) not in (None, name), "two attempts were set aside under one name")


async def _used(one: Transport, key: str, *, doubtful: bool) -> None:
    """A key with an entry; `doubtful`: a lost call and an open one too."""
    if doubtful and own_verb(one.sink, "begin_call") is not None:
        await one.sink.begin_call(key, "c3")
    await one.sink.put(sample_entry(key, "c1"))
    if isinstance(one.sink, AbortingSink):
        await one.sink.abort_call(key, "c4", reason="truncated:limit_reached")
    if doubtful:
        await one.sink.mark_incomplete(key, "c2")


async def _is_new(one: Transport, other: Transport, key: str, phase: str) -> None:
    """A key that was made new shows nothing of what stood there while it was `phase`."""
    source, where = other.source, f"of an attempt that was {phase} and set aside"
    if isinstance(source, CaptureReader):
        demand(await source.open_entries(key) == (), f"entries {where} are read for the new one")
    if isinstance(source, CallJournal):
        demand(await source.begun_calls(key) == (), f"calls {where} are in the journal of the new one")
    if isinstance(source, ReceiptSource):
        demand(await source.receipts(key) is None, f"receipts {where} are told for the new one")
    await one.sink.put(sample_entry(key, "c5"))
    demand(await frozen_ids(other, key) == ["c5"], f"entries {where} are in the new one")
    snapshot = await source.freeze(key)
    demand(not snapshot.incomplete, f"marks {where} are on the new one")
    demand(snapshot.reasons == (), f"reasons {where} are on the new one: {list(snapshot.reasons)}")

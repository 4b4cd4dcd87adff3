"""That nothing goes but what was told to go, nothing comes back, and what happens at once or alike stays apart.

Plain async functions like those of `capture_checks`, one promise each.
"""

from __future__ import annotations

import asyncio
from typing import Any

from toprope.capture.protocols import AbortingSink, CaptureLister, DiscardingStore, Intent, SupersedingSource, own_verb
from toprope.testing.capture_kit import (
    Connect,
    Scale,
    Skipped,
    Transport,
    client,
    demand,
    new_key,
    refused,
    sample_entry,
    takes,
)


async def a_sweep_takes_nothing_but_tombstones(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        if not isinstance(one.source, CaptureLister):
            raise Skipped("the source has no sweep_retired")
        kinds = await _undelivered(one)
        frozen = {key: await one.source.freeze(key) for key, what in kinds.items() if what.startswith("frozen")}
        for _ in range(2):
            await one.source.sweep_retired(0.0)
        for key, what in kinds.items():
            now = await other.source.freeze(key)
            then = frozen.get(key)
            demand(then is None or now == then, f"a sweep took or changed a capture that was {what}")
            entries = [e.model_call_id for e in now.entries]
            demand(entries == (["c1"] if "put" in what else []), f"a sweep left {entries} of a capture that was {what}")
            lost = "marked" in what or "begun" in what
            demand(now.incomplete == lost, f"a sweep took the intent or the mark of a capture that was {what}")


async def _undelivered(one: Transport) -> dict[str, str]:
    """Captures in every state before delivery, by what was done to them; those that begin with `frozen` will be."""
    kinds: dict[str, str] = {}
    for what in ("put", "marked", "put marked", "frozen", "frozen put", "frozen marked", "frozen put marked"):
        kinds[new_key()] = what
    if own_verb(one.sink, "begin_call") is not None:
        kinds |= {new_key(): "begun", new_key(): "frozen put begun"}
    if isinstance(one.sink, AbortingSink):
        kinds[new_key()] = "aborted"
    if isinstance(one.source, SupersedingSource):
        kinds |= {new_key(): "aside put marked"}
    named = {}
    for key, what in kinds.items():
        if "begun" in what:
            await one.sink.begin_call(key, "c2")
        if "put" in what:
            await one.sink.put(sample_entry(key, "c1"))
        if "marked" in what:
            await one.sink.mark_incomplete(key, "c3")
        if what == "aborted" and isinstance(one.sink, AbortingSink):
            await one.sink.abort_call(key, "c4", reason="client_gone")
        if what.startswith("aside") and isinstance(one.source, SupersedingSource):
            named[str(await one.source.supersede(key))] = what
        else:
            named[key] = what
    return named


async def an_earlier_attempt_stays_out(connect: Connect, scale: Scale) -> None:
    """A worker of an attempt that was given up writes nothing once a later attempt began, swept or not."""
    async with client(connect) as one, client(connect) as old_worker:
        if not isinstance(one.source, CaptureLister):
            raise Skipped("the source has no sweep_retired: what it retires stays closed by its tombstone")
        rollout = new_key()
        tenth = f"{rollout}-a10"
        await one.sink.put(sample_entry(tenth, "c1"))
        early = (rollout, f"{rollout}-a9")
        for key in early:
            await _stays_out(old_worker, key, "a later one began")
        seen = await one.source.freeze(tenth)
        await one.source.drop(tenth, snapshot_id=seen.snapshot_id, version=seen.version)
        await one.source.sweep_retired(0.0)
        for key in (*early, tenth):
            await _stays_out(old_worker, key, "it or a later one was swept")
        await one.sink.put(sample_entry(f"{rollout}-a11", "c1"))
        if isinstance(one.source, DiscardingStore):
            told = {key: await one.source.was_swept(key) for key in (*early, tenth, f"{rollout}-a11", new_key())}
            demand(list(told.values()) == [True, True, True, False, False], f"attempts 0, 9, 10 were swept: {told}")


async def _stays_out(worker: Transport, key: str, why: str) -> None:
    what = f"after {why}, an attempt takes"
    if own_verb(worker.sink, "begin_call") is not None:
        await refused(worker.sink.begin_call(key, "c2"), f"{what} an intent")
    await refused(worker.sink.put(sample_entry(key, "c2")), f"{what} an entry")
    await refused(worker.sink.mark_incomplete(key, "c2"), f"{what} a mark")
    await refused(worker.source.freeze(key), f"{what} a freeze")
    demand(await worker.source.drop(key, snapshot_id="never", version=1) is False, f"{what} a drop")


async def a_discard_takes_what_it_was_told_and_no_live_one(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        source, begin = other.source, own_verb(one.sink, "begin_call")
        if not isinstance(source, DiscardingStore):
            raise Skipped("the source has no discard")
        asked, kept, living, retired = (new_key() for _ in range(4))
        told: dict[str, Any] = {"intent": Intent(writer_epoch=f"{living}-w")} if takes(begin, "intent") else {}
        if told and begin is not None:
            await begin(living, "c1", **told)
        for key in (asked, kept, living, retired):
            await one.sink.put(sample_entry(key, "c1"))
        pair = await one.source.freeze(retired)
        await one.source.drop(retired, snapshot_id=pair.snapshot_id, version=pair.version)
        gone = await source.discard([asked, living, retired, new_key()])
        demand(set(gone) <= {asked, living}, "a discard says that it took what was delivered, or was never there")
        demand(not told or living not in gone, "a discard took the capture of a live writer")
        for key in gone:
            await _stays_out(one, key, "it was discarded")
            demand(await source.was_swept(key), "a discarded capture is not known as swept")
        for key in {asked, kept, living} - set(gone):
            found = [e.model_call_id for e in (await one.source.freeze(key)).entries]
            demand(found == ["c1"], "a discard took what it did not name as gone")
        done = await one.source.drop(retired, snapshot_id=pair.snapshot_id, version=pair.version)
        demand(done is True, "a discard took a tombstone")


async def keys_that_look_alike_do_not_meet(connect: Connect, scale: Scale) -> None:
    """Rollout ids may hold letters of both cases, digits, and `. _ -`, and be 200 long, as call ids, of any text."""
    async with client(connect) as one, client(connect) as other:
        base = new_key()
        tails = ("", "x", "X", ".", "_", "-", "-a0", ".tokens", ".json", ".jsonl", ".lock", "-a1", "-a11")
        long = [base.ljust(199, "l") + last for last in "pq"]
        keys = [*(base + tail for tail in tails), *long]
        same = "c".ljust(199, "l")
        calls = ("c1", "C1", "c1 ", "c1\n", "c/1", "c~1", "\u00e71", "c\u03271", "1", f"{same}p", f"{same}q")
        for n, key in enumerate(keys):
            for each, call_id in enumerate(calls):
                await one.sink.put(sample_entry(key, call_id, prompt=(1, n, each)))
        marked, retired = keys[0], keys[1]
        await one.sink.mark_incomplete(marked, "c2")
        pair = await one.source.freeze(retired)
        await one.source.drop(retired, snapshot_id=pair.snapshot_id, version=pair.version)
        for n, key in enumerate(keys):
            if key == retired:
                continue
            snapshot = await other.source.freeze(key)
            found = {e.model_call_id: e.prompt_token_ids.tolist() for e in snapshot.entries}
            demand(found == {c: [1, n, each] for each, c in enumerate(calls)}, f"{key!r} met one that looks like it")
            demand(snapshot.incomplete == (key == marked), f"{key!r} has the mark of one that looks like it")
            demand(snapshot.rollout_id == key, f"the snapshot of {key!r} says that it is of {snapshot.rollout_id!r}")


async def two_at_once_agree(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        for _ in range(max(5, scale.races // 10)):
            await _two_freezes(one, other)
            await _two_records_of_one_call(one, other)
            await _a_mark_and_a_drop(one, other)


async def _two_freezes(one: Transport, other: Transport) -> None:
    key = new_key()
    entry = sample_entry(key, "c1")
    await asyncio.gather(one.sink.put(entry), other.sink.put(entry))
    seen = await asyncio.gather(one.source.freeze(key), other.source.freeze(key))
    demand(seen[0].snapshot_id == seen[1].snapshot_id, "two freezes at once gave two snapshot ids")
    demand(seen[0].entries == seen[1].entries == (entry,), "one entry, put by two at once, is not one entry")
    demand(not seen[0].incomplete, "one entry, put by two at once, masks its rollout")
    pair: dict[str, Any] = {"snapshot_id": seen[0].snapshot_id, "version": max(each.version for each in seen)}
    done = await asyncio.gather(one.source.drop(key, **pair), other.source.drop(key, **pair))
    demand(all(each is True for each in done), f"two drops of one pair at once say {done}")


async def _two_records_of_one_call(one: Transport, other: Transport) -> None:
    key = new_key()
    entry, clash = sample_entry(key, "c1"), sample_entry(key, "c1", generated=3)
    answers = await asyncio.gather(one.sink.put(entry), other.sink.put(clash), return_exceptions=True)
    failed = [isinstance(each, BaseException) for each in answers]
    snapshot = await one.source.freeze(key)
    demand(sorted(failed) == [False, True], "two records of one call at once: not exactly one was refused")
    stands = clash if failed[0] else entry
    demand(snapshot.entries == (stands,), "of two records of one call at once, the refused one stands there")
    demand(snapshot.incomplete, "two records of one call at once leave the rollout looking whole")


async def _a_mark_and_a_drop(one: Transport, other: Transport) -> None:
    key = new_key()
    await one.sink.put(sample_entry(key, "c1"))
    seen = await one.source.freeze(key)
    dropped, mark = await asyncio.gather(
        one.source.drop(key, snapshot_id=seen.snapshot_id, version=seen.version),
        other.sink.mark_incomplete(key, "c2"),
        return_exceptions=True,
    )
    demand(
        (dropped is True) == isinstance(mark, Exception), "a mark was accepted and dropped unseen, or neither stands"
    )

"""What a transport keeps beside the records: why a call is missing, what was cut short, which reply was read; receipts.

A record that comes back whole with the wrong word beside it makes a row that is masked for nothing, or trained on for
nothing. Plain async functions like those of `capture_checks`, one promise each.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

from toprope.capture.protocols import AbortingSink, ReceiptSource, SupersedingSource, own_verb
from toprope.testing.capture_kit import Connect, Scale, Skipped, client, demand, new_key, sample_entry, takes
from toprope.tokens.receipts import receipts_of

_SETTLE_S = 30.0
"""Seconds that `settle` may take to notice a put: only a transport that never notices waits for so long."""


async def a_mark_keeps_its_reason(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        mark: Any = one.sink.mark_incomplete
        if not takes(mark, "reason"):
            raise Skipped("mark_incomplete takes no reason")
        for frozen_before in (False, True):
            key = new_key()
            await one.sink.put(sample_entry(key, "c1"))
            if frozen_before:
                await other.source.freeze(key)
            await mark(key, "c2", reason="bad_logprob:nan")
            found = (await other.source.freeze(key)).reasons
            demand(
                any(reason.partition(":")[0] == "bad_logprob" for reason in found),
                f"a call was marked as lost for bad_logprob, the snapshot says {list(found)}",
            )


async def a_reply_that_was_cut_short_is_told(connect: Connect, scale: Scale) -> None:
    """A server that ended the trajectory says so by an abort; the calls before it stay good."""
    async with client(connect) as one, client(connect) as other:
        if not isinstance(one.sink, AbortingSink):
            raise Skipped("the sink has no abort_call")
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        await one.sink.begin_call(key, "c2")
        await one.sink.abort_call(key, "c2", reason="truncated:context_overflow")
        snapshot = await other.source.freeze(key)
        demand("truncated:context_overflow" in snapshot.reasons, "a reply that was cut short is not told")
        demand(not snapshot.incomplete, "a reply that was cut short counts as lost")
        plain = new_key()
        await one.sink.put(sample_entry(plain, "c1"))
        for n, reason in enumerate(("client_gone", "upstream:500", "writer_died", "replay_of:c1", "not_sent")):
            await one.sink.begin_call(plain, f"a{n}")
            await one.sink.abort_call(plain, f"a{n}", reason=reason)
        found = (await other.source.freeze(plain)).reasons
        demand(
            found == (), f"calls failed, were replayed or not sent; the snapshot says {list(found)} of a whole rollout"
        )


async def a_reply_that_was_fetched_again_was_read(connect: Connect, scale: Scale) -> None:
    """An abort `replay_of:<call>` says that the client came back; one after freeze changes no entry any more."""
    async with client(connect) as one, client(connect) as other:
        if not isinstance(one.sink, AbortingSink):
            raise Skipped("the sink has no abort_call")
        read, late = new_key(), new_key()
        for key in (read, late):
            await one.sink.begin_call(key, "c1")
            await one.sink.put(sample_entry(key, "c1", client_gone=True))
            await one.sink.put(sample_entry(key, "c2", client_gone=True))
            await one.sink.begin_call(key, "c3")
        await one.sink.abort_call(read, "c3", reason="replay_of:c1")
        await one.sink.abort_call(late, "c3", reason="client_gone")
        before = await other.source.freeze(late)
        await one.sink.abort_call(late, "c4", reason="replay_of:c1")
        gone = {e.model_call_id: e.client_gone for e in (await other.source.freeze(read)).entries}
        demand(gone == {"c1": False, "c2": True}, f"c1 was fetched again, c2 was not: client_gone is {gone}")
        after = await other.source.freeze(late)
        demand(after.entries == before.entries, "an abort after freeze changed the entries of a snapshot id")


async def the_pair_of_another_snapshot_drops_nothing(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        old = await one.source.freeze(key)
        if isinstance(one.source, SupersedingSource):
            await one.source.supersede(key)
            await one.sink.put(sample_entry(key, "c1"))
        now = await one.source.freeze(key)
        other_id = old.snapshot_id if old.snapshot_id != now.snapshot_id else f"{now.snapshot_id}0"
        done = await one.source.drop(key, snapshot_id=other_id, version=now.version)
        demand(done is False, "a drop with the right version and another snapshot id was taken")
        demand((await one.source.freeze(key)).entries == now.entries, "a drop with another snapshot id erased entries")
        await one.source.drop(key, snapshot_id=now.snapshot_id, version=now.version)
        done = await one.source.drop(key, snapshot_id=other_id, version=now.version)
        demand(done is False, "a retired rollout says that another snapshot of it was delivered")


async def settle_waits_for_what_is_in_flight(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        begin, settle = own_verb(one.sink, "begin_call"), own_verb(other.source, "settle")
        if begin is None or settle is None:
            raise Skipped("the source has no settle, or the sink no begin_call")
        key = new_key()
        demand(await settle(new_key(), _SETTLE_S) is True, "settle waits for a key that nobody began")
        await begin(key, "c1")
        demand(await settle(key, 0.05) is False, "settle says that nothing is in flight while a call is")
        settled, _ = await asyncio.gather(settle(key, _SETTLE_S), one.sink.put(sample_entry(key, "c1")))
        demand(settled is True, "settle does not notice that a call has ended")
        if isinstance(one.sink, AbortingSink):
            await begin(key, "c2")
            await one.sink.abort_call(key, "c2", reason="client_gone")
            demand(await settle(key, 0.05) is True, "settle waits for a call that was aborted")
        await begin(key, "c3")
        await one.source.freeze(key)
        demand(await settle(key, 0.05) is True, "settle waits for a call of a rollout that is frozen")


async def receipts_outlive_the_payload(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        if not isinstance(one.source, ReceiptSource) or not isinstance(other.source, ReceiptSource):
            raise Skipped("the source keeps no receipts")
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        told: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": "c1"}
        await one.sink.put(sample_entry(key, "c2", prompt=(1, 2, 3, 100, 101, 7), generated=3, **told))
        demand(await one.source.receipts(key) is None, "there are receipts of a rollout that was not delivered")
        snapshot = await one.source.freeze(key)
        await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        kept, due = await other.source.receipts(key), receipts_of(snapshot.entries)
        demand(kept is not None and len(kept) == len(due), f"{len(due)} calls were delivered, receipts are {kept}")
        for receipt, right in zip(kept or (), due, strict=True):
            wrong = [each.name for each in fields(right) if getattr(receipt, each.name) != getattr(right, each.name)]
            demand(not wrong, f"the receipt of call {right.model_call_id} is wrong: {', '.join(wrong)}")

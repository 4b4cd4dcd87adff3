"""Transports that break one promise each, as real ones have: what the conformance suite must catch.

Each is one of our stores with one fault, so that nothing else is wrong with it: the sqlite store, or where one process
is enough the one in memory. Those that break a capture's life stand in `broken_custody`, those that change what was put
in `broken_records`; `BROKEN` lists all. Never use them for anything else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import BeginAck, Intent, JournalledCall, PutAck
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.broken_custody import BROKEN_CUSTODY
from toprope.testing.broken_records import BROKEN_RECORDS
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot


class NoTombstone(SqliteStore):
    """Forgets a dropped rollout, so that an old worker can bring it back."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        done = await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)
        if done:
            await super().supersede(rollout_id)
        return done

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        return await super().receipts(f"{rollout_id}~1")


class AppendsEveryPut(SqliteStore):
    """A put that is repeated after a lost reply stands there twice."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._again: dict[str, list[TokenEntry]] = {}

    async def put(self, entry: TokenEntry) -> PutAck:
        there = await self.open_entries(entry.rollout_id)
        ack = await super().put(entry)
        if any(each.model_call_id == entry.model_call_id for each in there):
            self._again.setdefault(entry.rollout_id, []).append(entry)
        return ack

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=(*snapshot.entries, *self._again.get(rollout_id, ())))


class LosesIntents(SqliteStore):
    """Says that an intent is written and writes none."""

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        return BeginAck(1, 0)


class TellsOnlyItsOwnCalls(SqliteStore):
    """A journal without what other clients began: a retry that reaches another server is sampled again."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._own: set[tuple[str, str]] = set()

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        self._own.add((rollout_id, model_call_id))
        return await super().begin_call(rollout_id, model_call_id, intent=intent)

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        calls = await super().begun_calls(rollout_id)
        return tuple(call for call in calls if (rollout_id, call.call_id) in self._own)


class SortsTheJournal(SqliteStore):
    """A journal in the order of names: of two equal calls the second is taken for the first."""

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        return tuple(sorted(await super().begun_calls(rollout_id), key=lambda call: call.call_id))


class DropsWhatIsStale(SqliteStore):
    """Drops what is there now, whatever the caller saw."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        now = next((info for info in await self.list_captures() if info.rollout_id == rollout_id), None)
        if now is None or now.snapshot_id is None:
            return await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)
        return await super().drop(rollout_id, snapshot_id=now.snapshot_id, version=now.version)


class SeesNoOthers(SqliteStore):
    """A client that goes on reading the state of the moment when it was opened, and its own writes."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._seen: set[tuple[str, str]] = self._reader.ask(
            lambda connection: set(
                connection.execute("SELECT k.key, c.call_id FROM call c JOIN capture k ON k.id = c.capture")
            ),
            set(),
        )

    async def put(self, entry: TokenEntry) -> PutAck:
        ack = await super().put(entry)
        self._seen.add((entry.rollout_id, entry.model_call_id))
        return ack

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=tuple(e for e in snapshot.entries if self._sees(rollout_id, e)))

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        found = await super().open_entries(rollout_id, since)
        return tuple(entry for entry in found if self._sees(rollout_id, entry))

    def _sees(self, rollout_id: str, entry: TokenEntry) -> bool:
        return (rollout_id.partition("~")[0], entry.model_call_id) in self._seen


class AcceptsNan(SqliteStore):
    """Takes a logprob that is no number for one that is."""

    async def put(self, entry: TokenEntry) -> PutAck:
        if not np.isfinite(entry.generation_log_probs).all():
            mended = np.nan_to_num(entry.generation_log_probs, nan=-1.0)
            return await super().put(replace(entry, generation_log_probs=mended))
        return await super().put(entry)


class ComparesOnlyIds(MemoryStore):
    """Takes a record with the same ids and other logprobs, or another parent, for one that was repeated."""

    async def put(self, entry: TokenEntry) -> PutAck:
        for there in await self.open_entries(entry.rollout_id):
            same = (there.prompt_token_ids, there.generation_token_ids)
            mine = (entry.prompt_token_ids, entry.generation_token_ids)
            if there.model_call_id == entry.model_call_id and all(map(np.array_equal, same, mine)):
                return await super().put(there)
        return await super().put(entry)


class DropsByVersion(MemoryStore):
    """Drops whatever has the right version: a pair from before the key was made new erases the new attempt."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        now = next((info for info in await self.list_captures(retired=True) if info.rollout_id == rollout_id), None)
        mine = now.snapshot_id if now is not None and now.snapshot_id is not None else snapshot_id
        return await super().drop(rollout_id, snapshot_id=mine, version=version)


class ForgetsReplays(MemoryStore):
    """Goes on saying of a reply that was fetched again that nobody read it: its row loses its last turn."""

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        await super().abort_call(rollout_id, model_call_id, reason=reason.removeprefix("replay_of:"))


class ForgetsReasons(MemoryStore):
    """Says that a call is lost, and not why."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
        await super().mark_incomplete(rollout_id, model_call_id)


class ForgetsWhatWasCutShort(MemoryStore):
    """A trajectory that a server ended looks as if the agent had ended it."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, reasons=tuple(each for each in snapshot.reasons if "truncated" not in each))


class ReceiptsOfNothing(MemoryStore):
    """Receipts that name the calls and prove none of their logprobs."""

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        kept = await super().receipts(rollout_id)
        return tuple(replace(each, logprobs_hash="0" * 64) for each in kept) if kept is not None else None


class NeverWaits(MemoryStore):
    """Says that nothing is in flight, whatever is: side calls of a rollout are lost."""

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        return True


class NeedsItsLastLine(SqliteStore):
    """Keeps a list beside the records; a line that was not written to its end makes all of it unreadable."""

    async def put(self, entry: TokenEntry) -> PutAck:
        ack = await super().put(entry)
        with self._list.open("a") as file:
            file.write(json.dumps([entry.rollout_id, entry.model_call_id]) + "\n")
        return ack

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        for line in self._list.read_text().splitlines() if self._list.exists() else ():
            json.loads(line)
        return await super().freeze(rollout_id)

    @property
    def _list(self) -> Path:
        return self.path.with_name(self.path.name + ".list")


BROKEN: dict[type[SqliteStore | MemoryStore], str] = {
    NoTombstone: "a_dropped_rollout_stays_gone",
    AppendsEveryPut: "the_same_put_twice_is_one_entry",
    LosesIntents: "an_open_intent_masks_and_a_put_satisfies_it",
    TellsOnlyItsOwnCalls: "the_journal_tells_every_begun_call_in_order",
    SortsTheJournal: "the_journal_tells_every_begun_call_in_order",
    DropsWhatIsStale: "a_mark_after_freeze_makes_the_old_pair_useless",
    SeesNoOthers: "put_is_visible_to_another_client_at_once",
    AcceptsNan: "a_logprob_that_is_no_number_is_refused",
    ComparesOnlyIds: "other_bytes_under_a_call_id_mask_the_rollout",
    DropsByVersion: "the_pair_of_another_snapshot_drops_nothing",
    ForgetsReplays: "a_reply_that_was_fetched_again_was_read",
    ForgetsReasons: "a_mark_keeps_its_reason",
    ForgetsWhatWasCutShort: "a_reply_that_was_cut_short_is_told",
    ReceiptsOfNothing: "receipts_outlive_the_payload",
    NeverWaits: "settle_waits_for_what_is_in_flight",
    NeedsItsLastLine: "a_torn_last_write_takes_nothing_along",
    **BROKEN_RECORDS,
    **BROKEN_CUSTODY,
}
"""Each broken transport with the one check that fails it."""

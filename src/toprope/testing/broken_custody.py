"""Transports that break one promise of a capture's life each: sticky marks, fences, sweeps, counts, lists, settling.

Like those of `broken_transports`, which also lists these: one of our stores with one fault. Never use them for
anything else.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toprope.capture.epochs import WriterEpochs
from toprope.capture.fence import Fence, fence_key
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import BeginAck, CaptureInfo, Intent, PutAck
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureClosed
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import Phase
from toprope.tokens.settling import WRITER_DIED
from toprope.tokens.snapshot import TokenCaptureSnapshot


class TakesMarksBack(MemoryStore):
    """A call that is recorded clears the mark that another one is lost."""

    async def put(self, entry: TokenEntry) -> PutAck:
        ack = await super().put(entry)
        capture = self._captures[entry.rollout_id]
        if capture.head.phase is Phase.OPEN:
            capture.head = replace(capture.head, incomplete=False)
        return ack


class ForgetsWhichCall(MemoryStore):
    """Says what kind of loss it was, and not of which call."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        short = (each if each.startswith("truncated:") else each.partition(":")[0] for each in snapshot.reasons)
        return replace(snapshot, reasons=tuple(dict.fromkeys(short)))


class PassesMarksOn(MemoryStore):
    """An attempt that lost a call makes every later attempt of its key doubtful."""

    async def supersede(self, rollout_id: str) -> str | None:
        before = self._captures.get(rollout_id)
        name = await super().supersede(rollout_id)
        if before is not None and before.head.incomplete:
            await self.mark_incomplete(rollout_id)
        return name


class CleansWhatIsSetAside(MemoryStore):
    """Evidence that was set aside looks whole, whatever it lacks."""

    async def supersede(self, rollout_id: str) -> str | None:
        name = await super().supersede(rollout_id)
        if name is not None:
            aside = self._captures[name]
            aside.calls = {call_id: call for call_id, call in aside.calls.items() if not call.open}
            aside.head = replace(aside.head, incomplete=False, open_intents=0)
        return name


class SaysAllIsRecorded(MemoryStore):
    """Whatever was begun before, `begin_call` says that it is on record: a lost turn passes for the user's."""

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        ack = await super().begin_call(rollout_id, model_call_id, intent=intent)
        return BeginAck(ack.calls, ack.calls - 1)


class CountsOneEntry(MemoryStore):
    """Every put says that it was the first: a recorder never learns that others write, too."""

    async def put(self, entry: TokenEntry) -> PutAck:
        return replace(await super().put(entry), entries=1)


class ReadsInOrderOfNames(MemoryStore):
    """`open_entries` after the first n misses what came later under a smaller name."""

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        found = sorted(await super().open_entries(rollout_id), key=lambda entry: entry.model_call_id)
        return tuple(found[since:])


class KeepsThePayload(MemoryStore):
    """Says that it dropped the payload, and only hides it from freeze."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        there = self._captures.get(rollout_id)
        entries = dict(there.entries) if there is not None else {}
        done = await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)
        if done:
            self._captures[rollout_id].entries.update(entries)
        return done


class ListsOnlyRecords(MemoryStore):
    """A capture with nothing but an intent, an abort or a mark is not listed."""

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        found = await super().list_captures(retired=retired)
        return tuple(info for info in found if info.entries or info.state != Phase.OPEN)


class FoldsCase(MemoryStore):
    """Two rollouts whose ids differ in case stand under one name, as in files of some file systems."""

    async def put(self, entry: TokenEntry) -> PutAck:
        return await super().put(replace(entry, rollout_id=entry.rollout_id.lower()))

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return replace(await super().freeze(rollout_id.lower()), rollout_id=rollout_id)


class RefusesWithAnyError(MemoryStore):
    """A closed capture looks like a store that fails: its callers go on."""

    async def put(self, entry: TokenEntry) -> PutAck:
        try:
            return await super().put(entry)
        except CaptureClosed as error:
            raise RuntimeError(str(error)) from error


class MarksWhatItRefuses(MemoryStore):
    """A call that comes too late masks the rollout by itself, even one that its caller would let go."""

    async def put(self, entry: TokenEntry) -> PutAck:
        try:
            return await super().put(entry)
        except CaptureClosed:
            if self._phase(entry.rollout_id) is Phase.FROZEN:
                await self.mark_incomplete(entry.rollout_id, entry.model_call_id)
            raise


class LosesReceiptsToLateCalls(MemoryStore):
    """A late mark is refused, and takes the receipts of the tombstone along."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
        try:
            await super().mark_incomplete(rollout_id, model_call_id, reason=reason)
        except CaptureClosed:
            if self._phase(rollout_id) is Phase.RETIRED:
                self._captures[rollout_id].receipts = ()
            raise


class ErasesByAbort(MemoryStore):
    """An abort that comes after the put takes the entry along."""

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        await super().abort_call(rollout_id, model_call_id, reason=reason)
        capture = self._captures[rollout_id]
        if capture.head.phase is Phase.OPEN and not reason.startswith("replay_of:"):
            capture.entries.pop(model_call_id, None)


class SweepsTheDoubtful(MemoryStore):
    """A sweep takes frozen captures that lack a call along: they will not be delivered."""

    async def sweep_retired(self, older_than: float) -> int:
        for key, capture in list(self._captures.items()):
            if capture.head.phase is Phase.FROZEN and capture.head.incomplete:
                del self._captures[key]
        return await super().sweep_retired(older_than)


class FencesOnlyWhatWasSwept(MemoryStore):
    """A worker of an earlier attempt may begin its key while a later attempt runs."""

    def _phase(self, key: str) -> Phase:
        phase = super()._phase(key)
        rollout, attempt = fence_key(key)
        if phase is Phase.FENCED and attempt > self._fences.get(rollout, Fence()).swept:
            return Phase.ABSENT
        return phase


class DiscardsTheLiving(MemoryStore):
    """A discard takes what it is told, also while its writer is at work."""

    async def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        gone = [key for key in keys if key in self._captures and self._phase(key) is not Phase.RETIRED]
        for key in gone:
            del self._captures[key]
            rollout, attempt = fence_key(key)
            self._fences[rollout] = self._fences.get(rollout, Fence()).swept_to(attempt)
        return tuple(gone)


class ChecksThenFreezes(MemoryStore):
    """Two freezes at once both find the key open; each makes an id of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._freezing: Counter[str] = Counter()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        self._freezing[rollout_id] += 1
        alone = self._freezing[rollout_id] == 1
        try:
            await asyncio.sleep(0)
            snapshot = await super().freeze(rollout_id)
        finally:
            self._freezing[rollout_id] -= 1
        return snapshot if alone else replace(snapshot, snapshot_id=f"{snapshot.snapshot_id}-2")


class WaitsForTheAborted(MemoryStore):
    """`settle` takes a call that was aborted for one in flight: every failed call costs its time."""

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        aborted = any(call.abort is not None for call in await self.begun_calls(rollout_id))
        return not aborted and await super().settle(rollout_id, timeout_s)


class Owned(SqliteStore):
    """A store that knows which process did something to a key, and whether that one lives. Breaks nothing yet."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._place = self.path.with_name(self.path.name + ".memory")
        self._owner = f"{os.getpid()}-{id(self):x}"
        self._alive = WriterEpochs(self._place / "alive")

    def note(self, key: str) -> None:
        """This client did it."""
        self._alive.hold(self._owner)
        with (self._place / f"{self._owner}.keys").open("a") as file:
            file.write(key + "\n")

    def noted_by_the_dead(self, key: str) -> bool:
        """Whether a client did it whose process was killed."""
        dead = (each for each in self._place.glob("*.keys") if not self._alive.is_live(each.stem))
        return any(key in keys.read_text().splitlines() for keys in dead)

    async def close(self) -> None:
        (self._place / f"{self._owner}.keys").unlink(missing_ok=True)
        self._alive.close()
        await super().close()


class MemoryOnly(Owned):
    """Claims to be durable; what a process put is gone when it is killed, as if it stood in that process's memory."""

    async def put(self, entry: TokenEntry) -> PutAck:
        self.note(entry.rollout_id)
        return await super().put(entry)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        if self.noted_by_the_dead(rollout_id):
            await super().supersede(rollout_id)
        return await super().freeze(rollout_id)


class AbortsOnlyInMemory(Owned):
    """An abort is gone when its process is killed: every call that failed upstream masks its rollout then."""

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        self.note(rollout_id)
        await super().abort_call(rollout_id, model_call_id, reason=reason)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        if self.noted_by_the_dead(rollout_id):
            await super().mark_incomplete(rollout_id, reason="dangling_intent")
        return await super().freeze(rollout_id)


class BuriesTheLiving(SqliteStore):
    """Takes every writer but its own for dead: what another process has in flight is forgotten at freeze."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        for call in await super().begun_calls(rollout_id):
            epoch = call.intent.writer_epoch
            if call.open and not call.intent.stream and epoch and not self._epochs.mine(epoch):
                await super().abort_call(rollout_id, call.call_id, reason=WRITER_DIED)
        return await super().freeze(rollout_id)


BROKEN_CUSTODY: dict[type[SqliteStore | MemoryStore], str] = {
    TakesMarksBack: "a_mark_is_never_taken_back",
    ForgetsWhichCall: "a_lost_call_is_named",
    PassesMarksOn: "what_is_set_aside_keeps_its_marks",
    CleansWhatIsSetAside: "what_is_set_aside_keeps_its_marks",
    SaysAllIsRecorded: "begin_and_put_say_what_the_key_holds",
    CountsOneEntry: "begin_and_put_say_what_the_key_holds",
    ReadsInOrderOfNames: "entries_are_read_in_the_order_of_their_arrival",
    KeepsThePayload: "a_dropped_payload_is_not_read_again",
    ListsOnlyRecords: "every_capture_is_listed",
    FoldsCase: "keys_that_look_alike_do_not_meet",
    RefusesWithAnyError: "a_refusal_says_what_it_is",
    MarksWhatItRefuses: "every_cell_of_the_table_holds",
    LosesReceiptsToLateCalls: "every_cell_of_the_table_holds",
    ErasesByAbort: "every_cell_of_the_table_holds",
    SweepsTheDoubtful: "a_sweep_takes_nothing_but_tombstones",
    FencesOnlyWhatWasSwept: "an_earlier_attempt_stays_out",
    DiscardsTheLiving: "a_discard_takes_what_it_was_told_and_no_live_one",
    ChecksThenFreezes: "two_at_once_agree",
    WaitsForTheAborted: "settle_waits_for_what_is_in_flight",
    MemoryOnly: "what_was_acknowledged_survives_the_death_of_its_process",
    AbortsOnlyInMemory: "what_was_ended_stays_ended_after_a_death",
    BuriesTheLiving: "calls_of_dead_writers_are_settled_and_of_live_ones_not",
}
"""Each broken transport with the one check that fails it."""

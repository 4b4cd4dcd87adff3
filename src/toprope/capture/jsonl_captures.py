"""The verbs of custody on files: each under the rollout's lock, each durable before it returns. Blocking.

    <key>.tokens.jsonl       a line a recorded call
    <key>.tokens.intents     a line a call that was begun and not aborted      <key>.tokens.begun     what it was like
    <key>.tokens.aborted     a line an aborted call                            <key>.tokens.receipts  after retirement
    <key>.tokens.state.json  the whole; every change of phase, and every loss, is one atomic rewrite of it
    <key>.tokens.incomplete  the same losses once more, where NeMo Gym looks   <key>.tokens.lock      held by each verb

The first thing that stands on disk of a key is its state, so that logs without one show that it was lost. A verb that
needs several steps has one that decides; what comes after it can be done again by whoever opens the key next, and is.
What becomes of a key is `tokens.lifecycle`'s, reading `jsonl_shelf`'s and `jsonl_records`', files are `jsonl_desk`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toprope.canonical.digest import digest_tokens
from toprope.capture import jsonl_names as names
from toprope.capture.epochs import WriterEpochs
from toprope.capture.jsonl_desk import Desk
from toprope.capture.jsonl_files import Files
from toprope.capture.jsonl_lines import encode_entry, seal, text_line
from toprope.capture.jsonl_records import Recent, keep_ids, parent_ids, read_entry, read_records
from toprope.capture.jsonl_shelf import Place, Shelf
from toprope.capture.jsonl_state import Tombstone, decode_tombstone
from toprope.capture.packing import pack
from toprope.capture.prompts import RecentCalls
from toprope.capture.protocols import (
    BeginAck,
    CaptureInfo,
    EntryConflict,
    Intent,
    JournalledCall,
    PutAck,
    closed,
    writer_state,
)
from toprope.capture.settling import InFlight
from toprope.errors.tree import CaptureError
from toprope.tokens.entry import BadRecord, TokenEntry
from toprope.tokens.lifecycle import (
    Abort,
    Begin,
    Call,
    Drop,
    Event,
    Freeze,
    Mark,
    Phase,
    Put,
    Step,
    Supersede,
    Sweep,
    Verdict,
    snapshot_reasons,
    step,
)
from toprope.tokens.receipts import receipts_of
from toprope.tokens.settling import WRITER_DIED, to_abort
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot


class JsonlCaptures:
    """Called from threads, for one key one at a time."""

    def __init__(
        self, directory: Path, files: Files, recent_bytes: int, clock: Callable[[], float], epochs: WriterEpochs
    ) -> None:
        self._desk = Desk(directory, files, clock)
        self._epochs = epochs
        self._clock = clock
        self._recent: Recent = RecentCalls(recent_bytes)

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin(self, key: str, call_id: str, intent: Intent) -> BeginAck:
        with self._desk.opened(key, write=True) as shelf:
            done = self._decide(shelf, shelf.call(call_id), Begin())
            if done.verdict is Verdict.DONE:
                self._desk.exist(shelf)
                self._epochs.hold(intent.writer_epoch)
                if intent != Intent():
                    told = {**_intent_values(call_id, intent), "entries": len(shelf.entries)}
                    self._desk.append(shelf, names.BEGUN, _line(told))
                    shelf.begun[call_id] = intent
                self._desk.append(shelf, names.INTENTS, text_line(call_id))
                shelf.saw_intent(call_id)
            return BeginAck(done.head.calls, done.head.entries)

    def put(self, entry: TokenEntry) -> PutAck:
        key, call_id = entry.rollout_id, entry.model_call_id
        data = pack(entry)  # refuses what no store could keep
        with self._desk.opened(key, write=True) as shelf:
            same = call_id in shelf.entries and pack(self._stored(shelf, call_id)) == data
            done = self._decide(shelf, shelf.call(call_id), Put(call_id, same))
            if done.verdict is Verdict.CONFLICT:
                self._desk.commit(shelf, done.head, done.reasons)
                raise EntryConflict(f"call {call_id!r} of {key!r} is recorded with other content")
            if done.verdict is Verdict.DONE:
                self._desk.exist(shelf)
                self._append_entry(shelf, entry)
            return PutAck(done.head.version, done.head.entries)

    def abort(self, key: str, call_id: str, reason: str) -> None:
        with self._desk.opened(key, write=True) as shelf:
            done = self._decide(shelf, shelf.call(call_id), Abort(reason))
            if done.verdict is not Verdict.DONE:
                return
            self._desk.exist(shelf)
            assert shelf.state is not None
            if shelf.state.frozen:
                self._desk.commit(shelf, done.head, aborts={**shelf.state.aborts, call_id: reason})
            self._write_aborts(shelf, {call_id: reason})

    def mark(self, key: str, reason: str) -> None:
        with self._desk.opened(key, write=True) as shelf:
            done = self._decide(shelf, Call(), Mark(reason))
            self._desk.exist(shelf)
            self._desk.commit(shelf, done.head, done.reasons)

    def freeze(self, key: str, snapshot_id: str) -> TokenCaptureSnapshot:
        with self._desk.opened(key, write=True) as shelf:
            frozen = shelf.state is not None and shelf.state.frozen
            died = {} if frozen else self._left_by_the_dead(shelf)
            dangling = () if frozen else tuple(call for call in shelf.dangling() if call not in died)
            done = self._decide(shelf, Call(), Freeze(snapshot_id, dangling))
            records = read_records(shelf, self._recent, whole=False)
            shelf.damage |= dict.fromkeys(records.lost)
            if done.verdict is Verdict.DONE:
                self._desk.exist(shelf)
                self._desk.commit(shelf, done.head, done.reasons, aborts=died)
                if died:
                    self._write_aborts(shelf, died)
            state = shelf.state
            assert state is not None
            assert state.snapshot_id is not None
            return TokenCaptureSnapshot(
                key,
                tuple(records.entries),
                shelf.incomplete,
                state.snapshot_id,
                state.version + shelf.unindexed,
                snapshot_reasons(shelf.reasons(), shelf.standing_aborts()),
            )

    def drop(self, key: str, snapshot_id: str, version: int) -> bool:
        with self._desk.opened(key, write=True, make=False) as shelf:
            done = self._decide(shelf, Call(), Drop(snapshot_id, version))
            if done.verdict is Verdict.DONE:
                receipts = receipts_of(read_records(shelf, self._recent, whole=False).entries)
                kept = Tombstone(snapshot_id, version, self._clock(), receipts)
                self._desk.rewrite(shelf, names.RECEIPTS, kept.encode())
                self._desk.commit(shelf, done.head, retired_at=kept.at)
            if done.verdict in (Verdict.DONE, Verdict.NOTHING):
                self._desk.remove(shelf, names.PAYLOAD)
                return True
            return False

    def supersede(self, key: str) -> str | None:
        with self._desk.opened(key, write=True, make=False) as shelf:
            done = self._decide(shelf, Call(), Supersede())
            if shelf.stands:
                return self._desk.move(shelf)
            if done.verdict is Verdict.DONE:
                self._desk.lift_fence(key)
            return None

    def retired_before(self, limit: float) -> list[str]:
        """The keys of tombstones that were made at `limit` or earlier."""
        old = []
        for key in self._desk.captures():
            with self._desk.opened(key, write=False, make=False) as shelf:
                state = shelf.state
                if state is not None and state.retired and _retired_at(shelf) <= limit:
                    old.append(key)
        return old

    def sweep(self, key: str, limit: float) -> bool:
        with self._desk.opened(key, write=True, make=False) as shelf:
            state = shelf.state
            if state is None or not state.retired or _retired_at(shelf) > limit:
                return False
            if self._decide(shelf, Call(), Sweep()).verdict is not Verdict.DONE:
                return False
            self._desk.sweep(shelf)
            return True

    def discard(self, key: str) -> bool:
        """Evidence goes for good, its fence stays; a capture of a live writer, or a tombstone, does not go."""
        found = self.info(key)
        if found is None or found[1].writer == "live" or found[1].state not in (Phase.OPEN, Phase.FROZEN):
            return False
        snapshot = self.freeze(key, "discarded")
        return self.drop(key, snapshot.snapshot_id, snapshot.version) and self.sweep(key, math.inf)

    def was_swept(self, key: str) -> bool:
        return self._desk.was_swept(key)

    def remove_scraps(self, older_than: float) -> None:
        self._desk.remove_scraps(older_than)

    def settle(self, key: str) -> int:
        """How many intents of dead writers were closed."""
        with self._desk.opened(key, write=True, make=False) as shelf:
            died = self._left_by_the_dead(shelf) if shelf.head(Phase.ABSENT).phase is Phase.OPEN else {}
            if died:
                self._write_aborts(shelf, died)
            return len(died)

    # -- reading ------------------------------------------------------------------------------------------------------

    def open_entries(self, key: str, since: int) -> tuple[TokenEntry, ...]:
        with self._desk.opened(key, write=False, make=False) as shelf:
            if shelf.state is not None and shelf.state.retired:
                return ()
            return tuple(read_records(shelf, self._recent, since=since, whole=True).entries)

    def begun_calls(self, key: str) -> tuple[JournalledCall, ...]:
        """In the order of the lines that say so, which the lock of the key made one order."""
        with self._desk.opened(key, write=False, make=False) as shelf:
            live = {epoch: self._epochs.is_live(epoch) for epoch in {i.writer_epoch for i in shelf.begun.values()}}
            return tuple(
                JournalledCall(
                    call_id,
                    intent,
                    call_id in shelf.entries,
                    None if call_id in shelf.entries else shelf.aborts.get(call_id),
                    live[intent.writer_epoch],
                )
                for call_id, intent in shelf.begun.items()
                if call_id in shelf.known
            )

    def receipts(self, key: str) -> tuple[Receipt, ...] | None:
        with self._desk.opened(key, write=False, make=False) as shelf:
            if shelf.state is None or not shelf.state.retired:
                return None
            kept = decode_tombstone(shelf.files.read(shelf.path(names.RECEIPTS)))
            return kept.receipts if kept is not None else None

    def keys(self) -> list[str]:
        return self._desk.captures()

    def info(self, key: str, now: float | None = None) -> tuple[float, CaptureInfo] | None:
        """When the key was first written, and what a list of `now` says of it; None where nothing stands."""
        now = self._clock() if now is None else now
        with self._desk.opened(key, write=False, make=False) as shelf:
            if not shelf.stands:
                return None
            head, state = shelf.head(Phase.OPEN), shelf.state
            dangling = () if head.phase is Phase.RETIRED else shelf.dangling()
            created = state.created if state is not None else None
            if created is None:
                created = min((stat.mtime_ns for stat in shelf.stats.values() if stat is not None), default=0) / 1e9
            abandoned = state is not None and state.abandoned
            writer = None
            if head.phase is not Phase.RETIRED:
                writer = writer_state(shelf.writers(), {each: self._epochs.is_live(each) for each in shelf.writers()})
            epochs = {shelf.begun.get(call, Intent()).writer_epoch for call in dangling}
            return created, CaptureInfo(
                rollout_id=key,
                state=head.phase,
                age_s=max(0.0, now - created),
                calls=head.calls,
                entries=head.entries,
                open_intents=head.open_intents if head.phase is Phase.RETIRED else len(dangling),
                incomplete=head.incomplete,
                version=head.version,
                snapshot_id=head.snapshot_id,
                reasons=snapshot_reasons(shelf.reasons(), shelf.standing_aborts()),
                aborts=tuple(sorted(Counter(shelf.standing_aborts()).items())),
                writer_epochs=tuple(sorted(epochs)),
                abandoned=abandoned,
                writer=writer,
            )

    def in_flight(self, key: str) -> InFlight:
        """The open calls whose writers may be alive."""
        with self._desk.opened(key, write=False, make=False) as shelf:
            if shelf.head(Phase.ABSENT).phase is not Phase.OPEN:
                return InFlight()
            writers = [shelf.begun.get(call, Intent()).writer_epoch for call in shelf.dangling()]
        live = [epoch for epoch in writers if self._epochs.is_live(epoch)]
        ours = sum(self._epochs.mine(epoch) for epoch in live)
        return InFlight(ours, len(live) - ours)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _decide(self, shelf: Shelf, call: Call, event: Event) -> Step:
        absent = Phase.ABSENT if shelf.stands else self._desk.absent(shelf.key)
        done = step(shelf.head(absent), call, event)
        if done.verdict is Verdict.REFUSED:
            raise closed(shelf.key, done.head.phase, event.verb)
        return done

    def _left_by_the_dead(self, shelf: Shelf) -> dict[str, str]:
        """The open calls that are to be aborted, since their writers died, with the reason."""
        if not shelf.open:
            return {}
        return dict.fromkeys(to_abort(shelf.begun_calls(), self._epochs.may_have_answered), WRITER_DIED)

    def _write_aborts(self, shelf: Shelf, aborts: Mapping[str, str]) -> None:
        """On return they stand in the file of aborts, and their intents nowhere, durably.

        Once the rollout is frozen its state decides: it has them already, and tells NeMo Gym what was open.
        """
        late = shelf.state is not None and shelf.state.frozen
        lines = []
        for call_id, reason in aborts.items():
            told = _intent_values(call_id, shelf.begun[call_id]) if call_id in shelf.begun else {}
            lines.append(_line({**told, "model_call_id": call_id, "reason": reason, "late": late, "at": self._clock()}))
        self._desk.append(shelf, names.ABORTED, b"".join(lines))
        for call_id, reason in aborts.items():
            shelf.saw_abort(call_id, reason, late=late)
        if any(call_id in shelf.intents for call_id in aborts):
            for call_id in aborts:
                shelf.intents.pop(call_id, None)
            self._desk.rewrite(shelf, names.INTENTS, b"".join(map(text_line, shelf.intents)))

    def _stored(self, shelf: Shelf, call_id: str) -> TokenEntry:
        """The entry that stands under the call's id, as it was put. Raises `CaptureError` if it is damaged."""
        try:
            return read_entry(shelf, call_id, self._recent)
        except BadRecord as error:
            raise CaptureError(f"call {call_id!r} of {shelf.key!r} was put before and its record is damaged") from error

    def _append_entry(self, shelf: Shelf, entry: TokenEntry) -> None:
        ids = parent_ids(shelf, entry, self._recent)
        digest = None
        if not entry.prompt_is_delta:
            digest = digest_tokens(np.concatenate([entry.prompt_token_ids, entry.generation_token_ids]))
        line = encode_entry(entry, skip=ids.count if ids is not None else 0, digest=digest)
        offset = self._desk.append(shelf, names.TOKENS, line + b"\n")
        shelf.lines += 1
        shelf.saw_entry(entry.model_call_id, Place.of(offset, line, entry))
        keep_ids(shelf, entry, self._recent, after=entry.parent_call_id if ids is not None else None)


def _retired_at(shelf: Shelf) -> float:
    """When a rollout was retired; of one that NeMo Gym retired, when its state file was last written."""
    if shelf.state is not None and shelf.state.retired_at is not None:
        return shelf.state.retired_at
    stat = shelf.stats.get(names.STATE)
    return stat.mtime_ns / 1e9 if stat is not None else 0.0


def _intent_values(call_id: str, intent: Intent) -> dict[str, Any]:
    return {
        "model_call_id": call_id,
        "stream": intent.stream,
        "request_digest": intent.request_digest,
        "retry_count": intent.retry_count,
        "writer_epoch": intent.writer_epoch,
    }


def _line(values: dict[str, Any]) -> bytes:
    return seal(values) + b"\n"

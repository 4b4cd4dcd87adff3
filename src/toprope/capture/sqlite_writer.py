"""The writing half of the sqlite store: operations in, one transaction and one device sync for all that waited.

Runs on one thread. Each operation has a savepoint of its own, so that one that fails takes nothing else along; each
asks `tokens.lifecycle.step` what becomes of it and writes that down. What is known of keys is remembered between
transactions for as long as no other process has committed (SQLite's `data_version` says so).
"""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toprope.capture.fence import Fence, fence_key
from toprope.capture.packing import pack
from toprope.capture.prompts import CallIds, RecentCalls
from toprope.capture.protocols import BeginAck, EntryConflict, Intent, PutAck, closed
from toprope.capture.sqlite_file import SqliteFile
from toprope.capture.sqlite_records import DamagedRecord, line_entries, load_ids, read_record, record_hash
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.tokens.entry import TokenEntry
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
    Step,
    Supersede,
    Sweep,
    Verdict,
    step,
)

_KNOWN_KEYS = 8192
"""Keys whose state is remembered: more than run at once; about 1 KB each."""

_REPLAY = "replay_of:"
UNKNOWN = Call()

Operation = Callable[["SqliteWriter"], Any]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row of `capture`. `id` is None while nothing stands under the key."""

    key: str
    id: int | None
    head: Head
    last_call: int | None = None
    last_entry: int | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class CallRow:
    """One row of `call`; `id` is None for a call that is not known."""

    id: int | None = None
    call: Call = UNKNOWN
    entry: int | None = None


class SqliteWriter:
    """`commit` is the function of a `GroupCommit`; the methods below it are operations, called inside a transaction."""

    def __init__(
        self, file: SqliteFile, recent: RecentCalls[tuple[int, str]], clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._recent = recent
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._data_version: int | None = None
        self._keys: OrderedDict[str, KeyRow] = OrderedDict()
        self._staged: dict[tuple[int, str], tuple[CallIds, tuple[int, str] | None]] = {}

    # -- transactions ---------------------------------------------------------------------------------------------

    def commit(self, operations: Sequence[Operation]) -> Sequence[Any]:
        """One answer or exception for each operation, all durable on return. Raises what made all of them fail."""
        with self._file.locked():
            if self._connection is None:
                self._connection = self._file.open_writer()
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._notice_other_writers(connection)
                answers = [self._one(connection, operation) for operation in operations]
                connection.execute("COMMIT")
            except BaseException:
                self._keys.clear()
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            else:
                for key, (ids, after) in self._staged.items():
                    self._recent.keep(key, ids, after=after)
            finally:
                self._staged.clear()
        return answers

    def finish(self) -> None:
        """Close the connection; afterwards the file holds everything without its log if nobody else has it open."""
        if self._connection is not None:
            self._file.close(self._connection)
            self._connection = None

    def _one(self, connection: sqlite3.Connection, operation: Operation) -> Any:
        connection.execute("SAVEPOINT one")
        touched = list(self._staged)
        try:
            answer = operation(self)
        except Exception as error:  # given to the caller of this operation; the others go on
            if not connection.in_transaction:
                raise  # SQLite gave up the whole transaction (disk full, I/O error): nobody's write stands
            connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
            if not isinstance(error, CaptureClosed):
                self._keys.clear()  # what it wrote is gone again; a refusal wrote nothing
            for key in self._staged.keys() - set(touched):
                del self._staged[key]
            return error
        connection.execute("RELEASE one")
        return answer

    def _notice_other_writers(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA data_version").fetchone()[0]
        if version != self._data_version:
            self._keys.clear()
            self._data_version = version

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    # -- operations -----------------------------------------------------------------------------------------------

    def begin(self, key: str, call_id: str, intent: Intent) -> BeginAck:
        row = self._key(key)
        found = self._call(row, call_id)
        done = self._decide(row, found.call, Begin())
        if done.verdict is Verdict.DONE:
            row = self._insert_call(self._exist(row), call_id, done.call, intent)
            self._write_head(KeyRow(key, row.id, done.head, row.last_call, row.last_entry, row.abandoned))
        return BeginAck(done.head.calls, done.head.entries)

    def put(self, entry: TokenEntry) -> PutAck | EntryConflict:
        key, call_id = entry.rollout_id, entry.model_call_id
        row = self._key(key)
        found = self._call(row, call_id)
        done = self._decide(row, found.call, Put(call_id, self._stands(row, found, entry)))
        if done.verdict is Verdict.DONE:
            row = self._exist(row)
            call_row = found.id
            if call_row is None:
                row = self._insert_call(row, call_id, done.call, None)
                call_row = row.last_call
            assert call_row is not None
            entry_row = self._insert_entry(row, call_row, entry, done.head.entries)
            self._db.execute("UPDATE call SET entry = ?, abort = NULL WHERE id = ?", (entry_row, call_row))
            self._write_head(KeyRow(key, row.id, done.head, row.last_call, entry_row, row.abandoned))
        elif done.verdict is Verdict.CONFLICT:
            self._write_head(replace(row, head=done.head))
            self._add_reasons(row, done.reasons)
            return EntryConflict(f"call {call_id!r} of {key!r} is recorded with other content")
        return PutAck(done.head.version, done.head.entries)

    def abort(self, key: str, call_id: str, reason: str) -> None:
        row = self._key(key)
        found = self._call(row, call_id)
        done = self._decide(row, found.call, Abort(reason))
        if done.verdict is not Verdict.DONE:
            return
        row = self._exist(row)
        if found.id is None:
            row = self._insert_call(row, call_id, done.call, None)
        else:
            self._db.execute("UPDATE call SET abort = ? WHERE id = ?", (reason, found.id))
        if reason.startswith(_REPLAY) and row.head.phase is not Phase.FROZEN:
            self._db.execute(
                "UPDATE call SET replayed = 1 WHERE call_id = ? AND capture = ?", (reason[len(_REPLAY) :], row.id)
            )
        self._write_head(replace(row, head=done.head))

    def mark(self, key: str, reason: str) -> None:
        row = self._key(key)
        done = self._decide(row, Call(), Mark(reason))
        row = self._exist(row)
        self._write_head(replace(row, head=done.head))
        self._add_reasons(row, done.reasons)

    def freeze(self, key: str, snapshot_id: str) -> None:
        row = self._key(key)
        dangling = self._open_intents(row) if row.head.open_intents else ()
        done = self._decide(row, Call(), Freeze(snapshot_id, dangling))
        if done.verdict is Verdict.DONE:
            row = self._exist(row)
            self._write_head(replace(row, head=done.head))
            self._add_reasons(row, done.reasons)

    def drop(self, key: str, snapshot_id: str, version: int, receipts: bytes | None) -> bool:
        row = self._key(key)
        done = self._decide(row, Call(), Drop(snapshot_id, version))
        if done.verdict is Verdict.DONE:
            if receipts is None:
                return False  # frozen after the caller's receipts were read: its pair can only be a guess
            self._delete_lines(row)
            self._db.execute(
                "UPDATE capture SET receipts = ?, retired = ? WHERE id = ?", (receipts, self._clock(), row.id)
            )
            self._write_head(replace(row, head=done.head, last_call=None, last_entry=None))
        return done.verdict in (Verdict.DONE, Verdict.NOTHING)

    def supersede(self, key: str) -> str | None:
        row = self._key(key)
        done = self._decide(row, Call(), Supersede())
        if done.verdict is Verdict.DONE:
            rollout, attempt = fence_key(key)
            self._write_fence(rollout, Fence(attempt, -1))
        self._keys.pop(key, None)
        if row.id is None:
            return None
        taken = [
            int(name.rpartition("~")[2])
            for (name,) in self._db.execute(
                "SELECT key FROM capture WHERE key > ? AND key < ?", (f"{key}~", f"{key}\x7f")
            )
            if name.rpartition("~")[2].isdigit()
        ]
        name = f"{key}~{max(taken, default=0) + 1}"
        self._db.execute("UPDATE capture SET key = ?, abandoned = 1 WHERE id = ?", (name, row.id))
        return name

    def sweep(self, older_than: float) -> int:
        limit = self._clock() - older_than
        old = self._db.execute(
            "SELECT key FROM capture WHERE retired IS NOT NULL AND retired <= ?", (limit,)
        ).fetchall()
        for (key,) in old:
            row = self._key(key)
            if step(row.head, Call(), Sweep()).verdict is not Verdict.DONE:
                continue
            self._db.execute("DELETE FROM reason WHERE capture = ?", (row.id,))
            self._db.execute("DELETE FROM capture WHERE id = ?", (row.id,))
            self._keys.pop(key, None)
            if not row.abandoned:
                rollout, attempt = fence_key(key)
                self._write_fence(rollout, self._fence(rollout).swept_to(attempt))
        return len(old)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _decide(self, row: KeyRow, call: Call, event: Event) -> Step:
        done = step(row.head, call, event)
        if done.verdict is Verdict.REFUSED:
            raise closed(row.key, row.head.phase, event.verb)
        return done

    def _key(self, key: str) -> KeyRow:
        known = self._keys.get(key)
        if known is not None:
            self._keys.move_to_end(key)
            return known
        found = self._db.execute(
            "SELECT id, phase, version, snapshot_id, incomplete, calls, entries, open_intents, last_call, last_entry,"
            " abandoned FROM capture WHERE key = ?",
            (key,),
        ).fetchone()
        if found is None:
            rollout, attempt = fence_key(key)
            fenced = self._fence(rollout).keeps_out(attempt)
            return KeyRow(key, None, Head(phase=Phase.FENCED if fenced else Phase.ABSENT))
        row_id, phase, version, snapshot_id, incomplete, *counts, last_call, last_entry, abandoned = found
        head = Head(Phase(phase), version, snapshot_id, bool(incomplete), *counts)
        return self._remember(KeyRow(key, row_id, head, last_call, last_entry, bool(abandoned)))

    def _remember(self, row: KeyRow) -> KeyRow:
        self._keys[row.key] = row
        if len(self._keys) > _KNOWN_KEYS:
            self._keys.popitem(last=False)
        return row

    def _exist(self, row: KeyRow) -> KeyRow:
        """The row with an id: made now if nothing stood there, together with the rollout's fence."""
        if row.id is not None:
            return row
        cursor = self._db.execute(
            "INSERT INTO capture (key, phase, version, incomplete, calls, entries, open_intents, created)"
            " VALUES (?, ?, 0, 0, 0, 0, 0, ?)",
            (row.key, Phase.OPEN, self._clock()),
        )
        rollout, attempt = fence_key(row.key)
        fence = self._fence(rollout)
        if attempt > fence.seen:
            self._write_fence(rollout, fence.seen_up_to(attempt))
        return replace(row, id=cursor.lastrowid)

    def _write_head(self, row: KeyRow) -> None:
        head = row.head
        self._db.execute(
            "UPDATE capture SET phase = ?, version = ?, snapshot_id = ?, incomplete = ?, calls = ?, entries = ?,"
            " open_intents = ?, last_call = ?, last_entry = ? WHERE id = ?",
            (
                head.phase,
                head.version,
                head.snapshot_id,
                head.incomplete,
                head.calls,
                head.entries,
                head.open_intents,
                row.last_call,
                row.last_entry,
                row.id,
            ),
        )
        self._remember(row)

    def _add_reasons(self, row: KeyRow, reasons: Sequence[str]) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO reason (capture, reason) VALUES (?, ?)", [(row.id, reason) for reason in reasons]
        )

    def _fence(self, rollout: str) -> Fence:
        found = self._db.execute("SELECT seen, swept FROM fence WHERE rollout = ?", (rollout,)).fetchone()
        return Fence(*found) if found is not None else Fence()

    def _write_fence(self, rollout: str, fence: Fence) -> None:
        self._db.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (rollout, fence.seen, fence.swept))

    def _call(self, row: KeyRow, call_id: str) -> CallRow:
        if row.id is None:
            return CallRow()
        found = self._db.execute(
            "SELECT id, intent, entry, abort FROM call WHERE call_id = ? AND capture = ?", (call_id, row.id)
        ).fetchone()
        if found is None:
            return CallRow()
        call_row, intent, entry, abort = found
        return CallRow(call_row, Call(bool(intent), entry is not None, abort), entry)

    def _insert_call(self, row: KeyRow, call_id: str, call: Call, intent: Intent | None) -> KeyRow:
        told: tuple[Any, ...] = (None,) * 5
        if intent is not None:
            told = (intent.stream, intent.retry_count, self._clock(), intent.request_digest, intent.writer_epoch)
        cursor = self._db.execute(
            "INSERT INTO call (capture, prev, call_id, intent, abort, stream, retry, begun, digest, epoch)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row.id, row.last_call, call_id, call.intent, call.abort, *told),
        )
        return KeyRow(row.key, row.id, row.head, cursor.lastrowid, row.last_entry, row.abandoned)

    def _insert_entry(self, row: KeyRow, call_row: int, entry: TokenEntry, ordinal: int) -> int:
        parent, ids = self._parent(row, entry)
        skip = ids.count if ids is not None else 0
        data = pack(entry, skip=skip)
        digest = record_hash(row.last_entry, ordinal, call_row, parent, data)
        cursor = self._db.execute(
            "INSERT INTO entry (prev, ordinal, call, parent, hash, data) VALUES (?, ?, ?, ?, ?, ?)",
            (row.last_entry, ordinal, call_row, parent, digest, data),
        )
        assert row.id is not None
        assert cursor.lastrowid is not None
        if not entry.prompt_is_delta:
            after = (row.id, entry.parent_call_id) if skip and entry.parent_call_id is not None else None
            whole = CallIds(entry.prompt_token_ids, entry.generation_token_ids)
            self._staged[row.id, entry.model_call_id] = whole, after
        return cursor.lastrowid

    def _parent(self, row: KeyRow, entry: TokenEntry) -> tuple[int | None, CallIds | None]:
        """The parent's row, and its ids if this whole prompt really begins with them and can go without."""
        if entry.parent_call_id is None or not (entry.parent_decision == "resolved" or entry.prompt_is_delta):
            return None, None
        parent = self._call(row, entry.parent_call_id).entry
        if parent is None or entry.prompt_is_delta:
            return parent, None
        assert row.id is not None
        place = (row.id, entry.parent_call_id)
        staged = self._staged.get(place)
        ids = staged[0] if staged is not None else self._recent.get(place)
        if ids is None:
            try:
                ids = load_ids(self._db, row.id, parent, self._recent)
            except DamagedRecord:
                return None, None  # nothing is built on a damaged record: the prompt is stored whole
        return (parent, ids) if ids.begins(entry.prompt_token_ids) else (None, None)

    def _stands(self, row: KeyRow, found: CallRow, entry: TokenEntry) -> bool:
        """Whether the entry that stands under the call's id has the same bytes as `entry`."""
        if found.entry is None or row.id is None:
            return False
        record = read_record(self._db, found.entry)
        there = line_entries(self._db, row.id, [record], self._recent, whole=False).entries
        if not there:
            raise CaptureError(f"call {entry.model_call_id!r} of {row.key!r} was put before and its record is damaged")
        return pack(there[0]) == pack(replace(entry, client_gone=there[0].client_gone) if record.replayed else entry)

    def _open_intents(self, row: KeyRow) -> tuple[str, ...]:
        rows = self._db.execute(
            "WITH RECURSIVE line (id, prev) AS ("
            " SELECT id, prev FROM call WHERE id = ? UNION ALL"
            " SELECT c.id, c.prev FROM line JOIN call c ON c.id = line.prev LIMIT ?)"
            " SELECT c.call_id FROM line JOIN call c ON c.id = line.id"
            " WHERE c.intent AND c.entry IS NULL AND c.abort IS NULL ORDER BY c.id",
            (row.last_call, row.head.calls),
        )
        return tuple(call_id for (call_id,) in rows)

    def _delete_lines(self, row: KeyRow) -> None:
        for table, last, count in (
            ("entry", row.last_entry, row.head.entries),
            ("call", row.last_call, row.head.calls),
        ):
            self._db.execute(
                f"DELETE FROM {table} WHERE id IN (WITH RECURSIVE line (id, prev) AS ("
                f" SELECT id, prev FROM {table} WHERE id = ? UNION ALL"
                f" SELECT t.id, t.prev FROM line JOIN {table} t ON t.id = line.prev LIMIT ?) SELECT id FROM line)",
                (last, count),
            )

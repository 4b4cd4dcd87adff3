"""The writing half of the sqlite store: operations in, one transaction and one device sync for all that waited.

Runs on one thread. Each operation asks `tokens.lifecycle.step` what becomes of it and writes that down; one that fails
takes nothing else along. `begin` and `put`, which run for every model call, only decide, and what they decided is
written together; where that fails, the transaction is undone and every operation runs again, alone in a savepoint. The
rare verbs always do. Rows are `sqlite_rows`' affair.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from toprope.capture.fence import Fence, fence_key
from toprope.capture.packing import pack
from toprope.capture.prompts import CallIds, RecentCalls
from toprope.capture.protocols import BeginAck, EntryConflict, Intent, PutAck, closed
from toprope.capture.sqlite_file import SqliteFile
from toprope.capture.sqlite_records import DamagedRecord, line_entries, load_ids, read_record
from toprope.capture.sqlite_rows import CallRow, KeyRow, SqliteRows
from toprope.capture.sqlite_settle import keys_with_open_intents, settle_dead
from toprope.capture.sqlite_sweep import discard
from toprope.errors.tree import CaptureError
from toprope.tokens.entry import TokenEntry
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
    step,
)

_REPLAY = "replay_of:"

Operation = Callable[["SqliteWriter"], Any]
P = ParamSpec("P")
T = TypeVar("T")


class _NotTogether(Exception):
    """Some operation of the group cannot be written with the others, or needs to read what was not written yet."""


def _alone(verb: Callable[Concatenate[SqliteWriter, P], T]) -> Callable[Concatenate[SqliteWriter, P], T]:
    """A rare verb, which has statements of its own: it runs in a savepoint."""

    @wraps(verb)
    def told(writer: SqliteWriter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return writer._in_savepoint(lambda _: verb(writer, *args, **kwargs))

    return told


class SqliteWriter:
    """`commit` is the function of a `GroupCommit`; the methods below it are operations, called inside a transaction."""

    def __init__(
        self,
        file: SqliteFile,
        recent: RecentCalls[tuple[int, str]],
        clock: Callable[[], float] = time.time,
        is_live: Callable[[str], bool] = lambda epoch: True,
        may_have_answered: Callable[[str], bool] = lambda epoch: True,
    ) -> None:
        self._file = file
        self._recent = recent
        self._clock = clock
        self._is_live = is_live
        self._may_have_answered = may_have_answered
        self._connection: sqlite3.Connection | None = None
        self._rows = SqliteRows(clock)
        self._staged: dict[tuple[int, str], tuple[CallIds, tuple[int, str] | None]] = {}

    # -- transactions ---------------------------------------------------------------------------------------------

    def commit(self, operations: Sequence[Operation]) -> Sequence[Any]:
        """One answer or exception for each operation, all durable on return. Raises what made all of them fail.

        A commit that the disk refuses is tried again with each operation by itself: the small ones may fit.
        """
        with self._file.locked_to_write() if self._connection is not None else self._file.locked():
            if self._connection is None:
                self._connection = self._file.open_writer()
                self._rows.use(self._connection)
            try:
                return self._transaction(operations, self._together)
            except _NotTogether:
                return self._transaction(operations, self._one_by_one)
            except sqlite3.Error:
                if len(operations) == 1:
                    raise
                return [self._by_itself(operation) for operation in operations]

    def finish(self) -> None:
        """Close the connection; afterwards the file holds everything without its log if nobody else has it open."""
        if self._connection is not None:
            self._file.close(self._connection)
            self._connection = None

    def _transaction(
        self, operations: Sequence[Operation], run: Callable[[Sequence[Operation]], list[Any]]
    ) -> Sequence[Any]:
        connection = self._rows.db
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._rows.notice_other_writers()
            answers = run(operations)
            connection.execute("COMMIT")
        except BaseException:
            self._rows.forget_all()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        else:
            for key, (ids, after) in self._staged.items():
                self._recent.keep(key, ids, after=after)
        finally:
            self._staged.clear()
        return answers

    def _by_itself(self, operation: Operation) -> Any:
        try:
            return self._transaction([operation], self._one_by_one)[0]
        except sqlite3.Error as error:
            return error

    def _together(self, operations: Sequence[Operation]) -> list[Any]:
        answers = [self._answer(operation) for operation in operations]
        self._flush_all()
        return answers

    def _one_by_one(self, operations: Sequence[Operation]) -> list[Any]:
        return [self._answer(partial(SqliteWriter._in_savepoint, operation=each)) for each in operations]

    def _answer(self, operation: Operation) -> Any:
        try:
            return operation(self)
        except _NotTogether:
            raise
        except Exception as error:  # given to the caller of this operation; the others go on
            if not self._rows.db.in_transaction:
                raise  # SQLite gave up the whole transaction (disk full, I/O error): nobody's write stands
            return error

    def _flush_all(self) -> None:
        try:
            self._rows.flush()
        except Exception as error:
            if not self._rows.db.in_transaction:
                raise
            raise _NotTogether from error

    def _in_savepoint(self, operation: Callable[[SqliteWriter], T]) -> T:
        """Run `operation` with everything before it flushed; if it raises, nothing of it stands."""
        self._flush_all()
        connection, staged = self._rows.db, len(self._staged)
        connection.execute("SAVEPOINT one")
        try:
            answer = operation(self)
            self._rows.flush()
        except Exception:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO one")
                connection.execute("RELEASE one")
            self._rows.forget_all()
            while len(self._staged) > staged:
                self._staged.popitem()
            raise
        self._rows.forget_calls()  # it may have changed some with statements of its own
        connection.execute("RELEASE one")
        return answer

    # -- operations -----------------------------------------------------------------------------------------------

    def begin(self, key: str, call_id: str, intent: Intent) -> BeginAck:
        row = self._rows.key(key)
        found = self._rows.call(row, call_id)
        done = self._decide(row, found.call, Begin())
        if done.verdict is Verdict.DONE:
            row = self._rows.insert_call(self._rows.exist(row), call_id, done.call, intent)
            self._rows.write_head(KeyRow(key, row.id, done.head, row.last_call, row.last_entry, row.abandoned))
        return BeginAck(done.head.calls, done.head.entries)

    def put(self, entry: TokenEntry) -> PutAck | EntryConflict:
        key, call_id = entry.rollout_id, entry.model_call_id
        row = self._rows.key(key)
        found = self._rows.call(row, call_id)
        done = self._decide(row, found.call, Put(call_id, self._stands(row, found, entry)))
        if done.verdict is Verdict.DONE:
            parent, ids = self._parent(row, entry)
            skip = ids.count if ids is not None else 0
            data = pack(entry, skip=skip)  # the last that can fail: from here on rows are staged
            row = self._rows.exist(row)
            if found.id is None:
                row = self._rows.insert_call(row, call_id, done.call, None)
                found = CallRow(row.last_call, done.call)
            entry_row = self._rows.insert_entry(row, call_id, found, done.head.entries, parent, data)
            self._rows.write_head(KeyRow(key, row.id, done.head, row.last_call, entry_row, row.abandoned))
            self._remember_ids(row, entry, skip)
        elif done.verdict is Verdict.CONFLICT:
            self._rows.write_head(replace(row, head=done.head))
            self._rows.add_reasons(row, done.reasons)
            return EntryConflict(f"call {call_id!r} of {key!r} is recorded with other content")
        return PutAck(done.head.version, done.head.entries)

    @_alone
    def abort(self, key: str, call_id: str, reason: str) -> None:
        row = self._rows.key(key)
        found = self._rows.call(row, call_id)
        done = self._decide(row, found.call, Abort(reason))
        if done.verdict is not Verdict.DONE:
            return
        row = self._rows.exist(row)
        if found.id is None:
            row = self._rows.insert_call(row, call_id, done.call, None)
        else:
            self._rows.db.execute("UPDATE call SET abort = ? WHERE id = ?", (reason, found.id))
        if reason.startswith(_REPLAY) and row.head.phase is not Phase.FROZEN:
            self._rows.db.execute(
                "UPDATE call SET replayed = 1 WHERE call_id = ? AND capture = ?", (reason[len(_REPLAY) :], row.id)
            )
        self._rows.write_head(replace(row, head=done.head))

    @_alone
    def mark(self, key: str, reason: str) -> None:
        row = self._rows.key(key)
        done = self._decide(row, Call(), Mark(reason))
        row = self._rows.exist(row)
        self._rows.write_head(replace(row, head=done.head))
        self._rows.add_reasons(row, done.reasons)

    @_alone
    def freeze(self, key: str, snapshot_id: str) -> None:
        row = settle_dead(self._rows, self._rows.key(key), self._may_have_answered)
        dangling = self._rows.open_intents(row) if row.head.open_intents else ()
        done = self._decide(row, Call(), Freeze(snapshot_id, dangling))
        if done.verdict is Verdict.DONE:
            row = self._rows.exist(row)
            self._rows.write_head(replace(row, head=done.head))
            self._rows.add_reasons(row, done.reasons)

    @_alone
    def settle(self, keys: Sequence[str] | None = None) -> int:
        """Settle the intents of dead writers, of every open key if `keys` is None; how many were closed."""
        closed_now = 0
        for key in keys_with_open_intents(self._rows.db) if keys is None else keys:
            before = self._rows.key(key)
            after = settle_dead(self._rows, before, self._may_have_answered)
            closed_now += before.head.open_intents - after.head.open_intents
        return closed_now

    @_alone
    def drop(self, key: str, snapshot_id: str, version: int, receipts: bytes | None) -> bool:
        row = self._rows.key(key)
        done = self._decide(row, Call(), Drop(snapshot_id, version))
        if done.verdict is Verdict.DONE:
            if receipts is None:
                return False  # frozen after the caller's receipts were read: its pair can only be a guess
            self._rows.delete_lines(row)
            self._rows.db.execute(
                "UPDATE capture SET receipts = ?, retired = ? WHERE id = ?", (receipts, self._clock(), row.id)
            )
            self._rows.write_head(replace(row, head=done.head, last_call=None, last_entry=None))
        return done.verdict in (Verdict.DONE, Verdict.NOTHING)

    @_alone
    def supersede(self, key: str) -> str | None:
        row = self._rows.key(key)
        done = self._decide(row, Call(), Supersede())
        if done.verdict is Verdict.DONE:
            rollout, attempt = fence_key(key)
            self._rows.write_fence(rollout, Fence(attempt, -1))
        self._rows.forget(key)
        if row.id is None:
            return None
        taken = [
            int(name.rpartition("~")[2])
            for (name,) in self._rows.db.execute(
                "SELECT key FROM capture WHERE key > ? AND key < ?", (f"{key}~", f"{key}\x7f")
            )
            if name.rpartition("~")[2].isdigit()
        ]
        name = f"{key}~{max(taken, default=0) + 1}"
        self._rows.db.execute("UPDATE capture SET key = ?, abandoned = 1 WHERE id = ?", (name, row.id))
        return name

    @_alone
    def sweep(self, older_than: float) -> int:
        limit = self._clock() - older_than
        old = self._rows.db.execute(
            "SELECT key FROM capture WHERE retired IS NOT NULL AND retired <= ?", (limit,)
        ).fetchall()
        for (key,) in old:
            row = self._rows.key(key)
            if step(row.head, Call(), Sweep()).verdict is not Verdict.DONE:
                continue
            self._rows.db.execute("DELETE FROM reason WHERE capture = ?", (row.id,))
            self._rows.db.execute("DELETE FROM capture WHERE id = ?", (row.id,))
            self._rows.forget(key)
            if not row.abandoned:
                rollout, attempt = fence_key(key)
                self._rows.write_fence(rollout, self._rows.fence(rollout).swept_to(attempt))
        return len(old)

    @_alone
    def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        return discard(self._rows, keys, self._is_live)

    # -- entries --------------------------------------------------------------------------------------------------

    def _decide(self, row: KeyRow, call: Call, event: Event) -> Step:
        done = step(row.head, call, event)
        if done.verdict is Verdict.REFUSED:
            raise closed(row.key, row.head.phase, event.verb)
        return done

    def _remember_ids(self, row: KeyRow, entry: TokenEntry, skip: int) -> None:
        if entry.prompt_is_delta:
            return
        assert row.id is not None
        after = (row.id, entry.parent_call_id) if skip and entry.parent_call_id is not None else None
        whole = CallIds(entry.prompt_token_ids, entry.generation_token_ids)
        self._staged[row.id, entry.model_call_id] = whole, after

    def _parent(self, row: KeyRow, entry: TokenEntry) -> tuple[int | None, CallIds | None]:
        """The parent's row, and its ids if this whole prompt really begins with them and can go without."""
        if entry.parent_call_id is None or not (entry.parent_decision == "resolved" or entry.prompt_is_delta):
            return None, None
        parent = self._rows.call(row, entry.parent_call_id).entry
        if parent is None or entry.prompt_is_delta:
            return parent, None
        assert row.id is not None
        place = (row.id, entry.parent_call_id)
        staged = self._staged.get(place)
        ids = staged[0] if staged is not None else self._recent.get(place)
        if ids is None:
            self._must_be_written(parent)
            try:
                ids = load_ids(self._rows.db, row.id, parent, self._recent)
            except DamagedRecord:
                return None, None  # nothing is built on a damaged record: the prompt is stored whole
        return (parent, ids) if ids.begins(entry.prompt_token_ids) else (None, None)

    def _stands(self, row: KeyRow, found: CallRow, entry: TokenEntry) -> bool:
        """Whether the entry that stands under the call's id has the same bytes as `entry`."""
        if found.entry is None or row.id is None:
            return False
        self._must_be_written(found.entry)
        record = read_record(self._rows.db, found.entry)
        there = line_entries(self._rows.db, row.id, [record], self._recent, whole=False).entries
        if not there:
            raise CaptureError(f"call {entry.model_call_id!r} of {row.key!r} was put before and its record is damaged")
        return pack(there[0]) == pack(replace(entry, client_gone=there[0].client_gone) if record.replayed else entry)

    def _must_be_written(self, entry: int) -> None:
        if self._rows.is_unwritten(entry):
            raise _NotTogether

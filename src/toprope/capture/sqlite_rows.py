"""Rows of keys, calls, reasons and fences in the sqlite store: read, remembered, written. One transaction at a time.

What is known of keys is remembered between transactions for as long as no other process has committed (SQLite's
`data_version` says so). What is decided about them is `sqlite_writer`'s affair.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toprope.capture.fence import Fence, fence_key
from toprope.capture.protocols import Intent
from toprope.tokens.lifecycle import Call, Head, Phase

_KNOWN_KEYS = 8192
"""Keys whose state is remembered: more than run at once; about 1 KB each."""

UNKNOWN = Call()


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


class SqliteRows:
    """The rows as one connection sees them. `connection` is set by who opens it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._data_version: int | None = None
        self._keys: OrderedDict[str, KeyRow] = OrderedDict()

    @property
    def db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    def use(self, connection: sqlite3.Connection | None) -> None:
        """Read and write through `connection` from now on."""
        self._connection = connection
        self.forget_all()

    def notice_other_writers(self) -> None:
        """Forget what is known if another connection has committed. To be called first in a transaction."""
        version = self.db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._data_version:
            self._keys.clear()
            self._data_version = version

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def forget_all(self) -> None:
        self._keys.clear()

    def key(self, key: str) -> KeyRow:
        known = self._keys.get(key)
        if known is not None:
            self._keys.move_to_end(key)
            return known
        found = self.db.execute(
            "SELECT id, phase, version, snapshot_id, incomplete, calls, entries, open_intents, last_call, last_entry,"
            " abandoned FROM capture WHERE key = ?",
            (key,),
        ).fetchone()
        if found is None:
            rollout, attempt = fence_key(key)
            fenced = self.fence(rollout).keeps_out(attempt)
            return KeyRow(key, None, Head(phase=Phase.FENCED if fenced else Phase.ABSENT))
        row_id, phase, version, snapshot_id, incomplete, *counts, last_call, last_entry, abandoned = found
        head = Head(Phase(phase), version, snapshot_id, bool(incomplete), *counts)
        return self._remember(KeyRow(key, row_id, head, last_call, last_entry, bool(abandoned)))

    def _remember(self, row: KeyRow) -> KeyRow:
        self._keys[row.key] = row
        if len(self._keys) > _KNOWN_KEYS:
            self._keys.popitem(last=False)
        return row

    def exist(self, row: KeyRow) -> KeyRow:
        """The row with an id: made now if nothing stood there, together with the rollout's fence."""
        if row.id is not None:
            return row
        cursor = self.db.execute(
            "INSERT INTO capture (key, phase, version, incomplete, calls, entries, open_intents, created)"
            " VALUES (?, ?, 0, 0, 0, 0, 0, ?)",
            (row.key, Phase.OPEN, self._clock()),
        )
        rollout, attempt = fence_key(row.key)
        fence = self.fence(rollout)
        if attempt > fence.seen:
            self.write_fence(rollout, fence.seen_up_to(attempt))
        return replace(row, id=cursor.lastrowid)

    def write_head(self, row: KeyRow) -> None:
        head = row.head
        self.db.execute(
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

    def add_reasons(self, row: KeyRow, reasons: Sequence[str]) -> None:
        self.db.executemany(
            "INSERT OR IGNORE INTO reason (capture, reason) VALUES (?, ?)", [(row.id, reason) for reason in reasons]
        )

    def fence(self, rollout: str) -> Fence:
        found = self.db.execute("SELECT seen, swept FROM fence WHERE rollout = ?", (rollout,)).fetchone()
        return Fence(*found) if found is not None else Fence()

    def write_fence(self, rollout: str, fence: Fence) -> None:
        self.db.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (rollout, fence.seen, fence.swept))

    def call(self, row: KeyRow, call_id: str) -> CallRow:
        if row.id is None:
            return CallRow()
        found = self.db.execute(
            "SELECT id, intent, entry, abort FROM call WHERE call_id = ? AND capture = ?", (call_id, row.id)
        ).fetchone()
        if found is None:
            return CallRow()
        call_row, intent, entry, abort = found
        return CallRow(call_row, Call(bool(intent), entry is not None, abort), entry)

    def insert_call(self, row: KeyRow, call_id: str, call: Call, intent: Intent | None) -> KeyRow:
        told: tuple[Any, ...] = (None,) * 5
        if intent is not None:
            told = (intent.stream, intent.retry_count, self._clock(), intent.request_digest, intent.writer_epoch)
        cursor = self.db.execute(
            "INSERT INTO call (capture, prev, call_id, intent, abort, stream, retry, begun, digest, epoch)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row.id, row.last_call, call_id, call.intent, call.abort, *told),
        )
        return KeyRow(row.key, row.id, row.head, cursor.lastrowid, row.last_entry, row.abandoned)

    def open_intents(self, row: KeyRow) -> tuple[str, ...]:
        rows = self.db.execute(
            "WITH RECURSIVE line (id, prev) AS ("
            " SELECT id, prev FROM call WHERE id = ? UNION ALL"
            " SELECT c.id, c.prev FROM line JOIN call c ON c.id = line.prev LIMIT ?)"
            " SELECT c.call_id FROM line JOIN call c ON c.id = line.id"
            " WHERE c.intent AND c.entry IS NULL AND c.abort IS NULL ORDER BY c.id",
            (row.last_call, row.head.calls),
        )
        return tuple(call_id for (call_id,) in rows)

    def delete_lines(self, row: KeyRow) -> None:
        for table, last, count in (
            ("entry", row.last_entry, row.head.entries),
            ("call", row.last_call, row.head.calls),
        ):
            self.db.execute(
                f"DELETE FROM {table} WHERE id IN (WITH RECURSIVE line (id, prev) AS ("
                f" SELECT id, prev FROM {table} WHERE id = ? UNION ALL"
                f" SELECT t.id, t.prev FROM line JOIN {table} t ON t.id = line.prev LIMIT ?) SELECT id FROM line)",
                (last, count),
            )

"""Rows of keys, calls, entries and fences in the sqlite store: read, remembered, written. One transaction at a time.

What is written gathers in memory, where what reads it through here finds it, and goes into the file with `flush`: one
statement a table for all that share a commit. (A statement lets go of the interpreter lock and takes it again, which a
busy event loop makes dear.) What is known of keys and calls is remembered between transactions for as long as no other
process has committed (SQLite's `data_version` says so). What is decided about them is `sqlite_writer`'s affair.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toprope.capture.fence import Fence, fence_key
from toprope.capture.protocols import Intent
from toprope.capture.sqlite_records import record_hash
from toprope.tokens.lifecycle import Call, Head, Phase

_KNOWN_KEYS = 8192
"""Keys whose state is remembered: more than run at once; about 1 KB each."""
_KNOWN_CALLS = 16384
"""Calls that are remembered: those in flight, and the parents of the next; about 300 bytes each."""

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


class _Unwritten:
    """What a transaction has decided and not written yet."""

    def __init__(self) -> None:
        self.created: dict[int, float] = {}
        self.heads: dict[int, KeyRow] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.entries: list[tuple[Any, ...]] = []
        self.puts: list[tuple[int, int]] = []
        self.reasons: list[tuple[int | None, str]] = []
        self.fences: dict[str, Fence] = {}


class SqliteRows:
    """The rows as one connection sees them. `connection` is set by who opens it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._data_version: int | None = None
        self._keys: OrderedDict[str, KeyRow] = OrderedDict()
        self._calls: OrderedDict[tuple[int, str], CallRow] = OrderedDict()
        self._fences: dict[str, Fence] = {}
        self._last: dict[str, int] = {}
        self._unwritten = _Unwritten()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, for statements on what was flushed."""
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
            self.forget_all()
            self._data_version = version

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def forget_calls(self) -> None:
        """To be called after statements of somebody's own that change calls."""
        self._calls.clear()

    def forget_all(self) -> None:
        """Know nothing, and let go of what was not flushed."""
        self._keys.clear()
        self._calls.clear()
        self._fences.clear()
        self._last.clear()
        self._unwritten = _Unwritten()

    def flush(self) -> None:
        """On return everything decided so far stands in the transaction."""
        new, self._unwritten = self._unwritten, _Unwritten()
        many = self.db.executemany
        if new.created:
            many(
                "INSERT INTO capture (phase, version, snapshot_id, incomplete, calls, entries, open_intents, last_call,"
                " last_entry, id, key, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*_columns(new.heads[row_id]), new.heads[row_id].key, at) for row_id, at in new.created.items()],
            )
        changed = [_columns(row) for row_id, row in new.heads.items() if row_id not in new.created]
        if changed:
            many(
                "UPDATE capture SET phase = ?, version = ?, snapshot_id = ?, incomplete = ?, calls = ?, entries = ?,"
                " open_intents = ?, last_call = ?, last_entry = ? WHERE id = ?",
                changed,
            )
        if new.calls:
            many(
                "INSERT INTO call (id, capture, prev, call_id, intent, entry, abort, stream, retry, begun, digest,"
                " epoch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                new.calls,
            )
        if new.entries:
            many(
                "INSERT INTO entry (id, prev, ordinal, call, parent, hash, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
                new.entries,
            )
        if new.puts:
            many("UPDATE call SET entry = ?, abort = NULL WHERE id = ?", new.puts)
        if new.reasons:
            many("INSERT OR IGNORE INTO reason (capture, reason) VALUES (?, ?)", new.reasons)
        if new.fences:
            many(
                "INSERT OR REPLACE INTO fence VALUES (?, ?, ?)",
                [(rollout, fence.seen, fence.swept) for rollout, fence in new.fences.items()],
            )

    # -- keys -----------------------------------------------------------------------------------------------------

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
        """The row with an id: made now if nothing stood there, together with the rollout's fence.

        To be followed by `write_head`.
        """
        if row.id is not None:
            return row
        made = KeyRow(row.key, self._next("capture"), row.head)
        assert made.id is not None
        self._unwritten.created[made.id] = self._clock()
        rollout, attempt = fence_key(row.key)
        fence = self.fence(rollout)
        if attempt > fence.seen:
            self.write_fence(rollout, fence.seen_up_to(attempt))
        return made

    def write_head(self, row: KeyRow) -> None:
        assert row.id is not None
        self._unwritten.heads[row.id] = row
        self._remember(row)

    def add_reasons(self, row: KeyRow, reasons: Sequence[str]) -> None:
        self._unwritten.reasons.extend((row.id, reason) for reason in reasons)

    def fence(self, rollout: str) -> Fence:
        known = self._fences.get(rollout)
        if known is not None:
            return known
        found = self.db.execute("SELECT seen, swept FROM fence WHERE rollout = ?", (rollout,)).fetchone()
        return self._know_fence(rollout, Fence(*found) if found is not None else Fence())

    def write_fence(self, rollout: str, fence: Fence) -> None:
        self._unwritten.fences[rollout] = self._know_fence(rollout, fence)

    def _know_fence(self, rollout: str, fence: Fence) -> Fence:
        if len(self._fences) >= _KNOWN_KEYS:
            self._fences = dict(self._unwritten.fences)
        self._fences[rollout] = fence
        return fence

    # -- calls and entries ----------------------------------------------------------------------------------------

    def call(self, row: KeyRow, call_id: str) -> CallRow:
        if row.id is None or row.last_call is None:
            return CallRow()
        known = self._calls.get((row.id, call_id))
        if known is not None:
            return known
        found = self.db.execute(
            "SELECT id, intent, entry, abort FROM call WHERE call_id = ? AND capture = ?", (call_id, row.id)
        ).fetchone()
        if found is None:
            return CallRow()
        call_row, intent, entry, abort = found
        return CallRow(call_row, Call(bool(intent), entry is not None, abort), entry)

    def insert_call(self, row: KeyRow, call_id: str, call: Call, intent: Intent | None) -> KeyRow:
        assert row.id is not None
        told: tuple[Any, ...] = (None,) * 5
        if intent is not None:
            told = (intent.stream, intent.retry_count, self._clock(), intent.request_digest, intent.writer_epoch)
        made = self._next("call")
        self._unwritten.calls.append((made, row.id, row.last_call, call_id, call.intent, None, call.abort, *told))
        self._know(row.id, call_id, CallRow(made, call))
        return KeyRow(row.key, row.id, row.head, made, row.last_entry, row.abandoned)

    def insert_entry(
        self, row: KeyRow, call_id: str, call: CallRow, ordinal: int, parent: int | None, data: bytes
    ) -> int:
        """Put an entry at the end of the line of `row` and into its call, which any abort leaves; its row id."""
        assert row.id is not None
        assert call.id is not None
        made = self._next("entry")
        digest = record_hash(row.last_entry, ordinal, call.id, parent, data)
        self._unwritten.entries.append((made, row.last_entry, ordinal, call.id, parent, digest, data))
        self._unwritten.puts.append((made, call.id))
        self._know(row.id, call_id, CallRow(call.id, Call(call.call.intent, True), made))
        return made

    def is_unwritten(self, entry: int) -> bool:
        """Whether this row of `entry` was not flushed yet, so that no statement finds it."""
        unwritten = self._unwritten.entries
        return bool(unwritten) and entry >= unwritten[0][0]

    def _know(self, row_id: int, call_id: str, call: CallRow) -> None:
        self._calls[row_id, call_id] = call
        if len(self._calls) > _KNOWN_CALLS:
            self._calls.popitem(last=False)

    def _next(self, table: Literal["capture", "call", "entry"]) -> int:
        """The row id after the greatest of `table`; of a key's row, after the greatest that there ever was."""
        last = self._last.get(table)
        if last is None:
            found = self.db.execute(f"SELECT max(id) FROM {table}").fetchone()[0]
            last = found or 0
            if table == "capture":
                ever = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'capture'").fetchone()
                last = max(last, ever[0] if ever is not None else 0)
        self._last[table] = last + 1
        return last + 1

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


def _columns(row: KeyRow) -> tuple[Any, ...]:
    head = row.head
    return (
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
    )

"""Intents in the sqlite store: whose they are, what became of them, and the end of those whose writers died.

Called inside a transaction of the writer (`settle_dead`) or of a reader (`open_writers`). The rule is
`tokens.settling`'s, who is alive `epochs` knows.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from toprope.capture.protocols import Intent, JournalledCall
from toprope.capture.sqlite_records import DamagedRecord, read_record
from toprope.capture.sqlite_rows import KeyRow, SqliteRows
from toprope.tokens.lifecycle import Abort, Phase, Verdict, step
from toprope.tokens.settling import WRITER_DIED, BegunCall, is_doubtful, to_abort

_LINE = (
    "WITH RECURSIVE line (id, prev) AS ("
    " SELECT id, prev FROM call WHERE id = ? UNION ALL"
    " SELECT c.id, c.prev FROM line JOIN call c ON c.id = line.prev LIMIT ?)"
    " SELECT c.call_id, c.intent AND c.entry IS NULL AND c.abort IS NULL, c.stream, c.digest, c.retry, c.epoch, c.entry"
    " FROM line JOIN call c ON c.id = line.id ORDER BY c.id"
)


def settle_dead(rows: SqliteRows, row: KeyRow, is_live: Callable[[str], bool]) -> KeyRow:
    """The row after the intents of dead writers are settled as far as anything can be said; nothing while frozen."""
    if row.id is None or row.head.phase is not Phase.OPEN or not row.head.open_intents:
        return row
    for call_id in to_abort(_calls(rows.db, row), is_live):
        found = rows.call(row, call_id)
        done = step(row.head, found.call, Abort(WRITER_DIED))
        if done.verdict is Verdict.DONE:
            rows.db.execute("UPDATE call SET abort = ? WHERE id = ?", (WRITER_DIED, found.id))
            row = replace(row, head=done.head)
            rows.write_head(row)
    return row


def keys_with_open_intents(connection: sqlite3.Connection) -> tuple[str, ...]:
    """The open keys that have an intent without an end, oldest first."""
    found = connection.execute(
        "SELECT key FROM capture WHERE phase = ? AND open_intents > 0 ORDER BY id", (Phase.OPEN,)
    )
    return tuple(key for (key,) in found)


def open_writers(connection: sqlite3.Connection, key: str) -> Counter[str]:
    """How many intents of `key` are open, by the epoch of their writer (empty: of unknown origin)."""
    found = connection.execute(
        "SELECT last_call, calls FROM capture WHERE key = ? AND phase = ? AND open_intents > 0", (key, Phase.OPEN)
    ).fetchone()
    if found is None:
        return Counter()
    return Counter(epoch or "" for _, is_open, *_, epoch, _ in connection.execute(_LINE, found) if is_open)


def begun_calls(connection: sqlite3.Connection, key: str, is_live: Callable[[str], bool]) -> tuple[JournalledCall, ...]:
    """The calls of `key` that were begun, in order; each writer's life is asked for once."""
    found = connection.execute("SELECT last_call, calls FROM capture WHERE key = ?", (key,)).fetchone()
    if found is None:
        return ()
    rows = connection.execute(
        "WITH RECURSIVE line (id, prev) AS ("
        " SELECT id, prev FROM call WHERE id = ? UNION ALL"
        " SELECT c.id, c.prev FROM line JOIN call c ON c.id = line.prev LIMIT ?)"
        " SELECT c.call_id, c.stream, c.digest, c.retry, c.epoch, c.entry IS NOT NULL, c.abort"
        " FROM line JOIN call c ON c.id = line.id WHERE c.intent ORDER BY c.id",
        found,
    ).fetchall()
    live = {epoch: is_live(epoch or "") for epoch in {row[4] for row in rows}}
    return tuple(
        JournalledCall(
            call_id,
            Intent(bool(stream), digest or "", retry or 0, epoch or ""),
            bool(recorded),
            abort,
            live[epoch],
        )
        for call_id, stream, digest, retry, epoch, recorded, abort in rows
    )


def _calls(connection: sqlite3.Connection, row: KeyRow) -> list[BegunCall]:
    return [
        BegunCall(
            call_id=call_id,
            open=bool(is_open),
            stream=bool(stream),
            request_digest=digest or "",
            retry_count=retry or 0,
            writer_epoch=epoch or "",
            doubtful=entry is not None and _doubtful(connection, entry),
        )
        for call_id, is_open, stream, digest, retry, epoch, entry in connection.execute(
            _LINE, (row.last_call, row.head.calls)
        ).fetchall()
    ]


def _doubtful(connection: sqlite3.Connection, entry: int) -> bool:
    try:
        packed = read_record(connection, entry).packed
    except DamagedRecord:
        return True
    if packed is None:
        return True
    return is_doubtful(packed.meta.get("parent_decision", "root"), packed.meta.get("parent_resolution_reason"))

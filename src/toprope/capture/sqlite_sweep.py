"""Explicit garbage collection in the sqlite store: kept evidence goes for good, its fence stays.

Called inside a transaction of the writer. What may go is decided by whoever asks; a capture of a live writer never
goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toprope.capture.fence import fence_key
from toprope.capture.sqlite_rows import KeyRow, SqliteRows
from toprope.tokens.lifecycle import Call, Drop, Freeze, Phase, Sweep, Verdict, step

_DISCARDED = "discarded"


def discard(rows: SqliteRows, keys: Sequence[str], is_live: Callable[[str], bool]) -> tuple[str, ...]:
    """The keys that went: frozen, dropped and swept in one step, without receipts. Tombstones are left alone."""
    gone = []
    for key in keys:
        row = rows.key(key)
        if row.id is None or row.head.phase not in (Phase.OPEN, Phase.FROZEN) or _alive(rows, row, is_live):
            continue
        head = step(row.head, Call(), Freeze(_DISCARDED)).head
        assert head.snapshot_id is not None
        head = step(head, Call(), Drop(head.snapshot_id, head.version)).head
        assert step(head, Call(), Sweep()).verdict is Verdict.DONE
        rows.delete_lines(row)
        rows.db.execute("DELETE FROM reason WHERE capture = ?", (row.id,))
        rows.db.execute("DELETE FROM capture WHERE id = ?", (row.id,))
        rows.forget(key)
        if not row.abandoned:
            rollout, attempt = fence_key(key)
            rows.write_fence(rollout, rows.fence(rollout).swept_to(attempt))
        gone.append(key)
    return tuple(gone)


def _alive(rows: SqliteRows, row: KeyRow, is_live: Callable[[str], bool]) -> bool:
    found = rows.db.execute("SELECT DISTINCT epoch FROM call WHERE capture = ? AND epoch != ''", (row.id,))
    return any(is_live(epoch) for (epoch,) in found.fetchall())

"""The reading half of the sqlite store: values of one moment, from a connection that never writes.

Runs on one thread. Every question sees one consistent state of the file; a file that does not exist is asked nothing
and not made.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from toprope.capture.fence import fence_key
from toprope.capture.prompts import RecentCalls
from toprope.capture.protocols import CaptureInfo, writer_state
from toprope.capture.sqlite_file import SqliteFile
from toprope.capture.sqlite_records import line_entries, read_line
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import Phase, snapshot_reasons
from toprope.tokens.receipts import receipts_of
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot

T = TypeVar("T")
_Recent = RecentCalls[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class _Key:
    id: int
    phase: Phase
    version: int
    snapshot_id: str | None
    incomplete: bool
    entries: int
    last_entry: int | None
    last_call: int | None
    calls: int


class SqliteReader:
    """Answers questions; `ask` is to be called on one thread only."""

    def __init__(
        self,
        file: SqliteFile,
        recent: _Recent,
        clock: Callable[[], float] = time.time,
        is_live: Callable[[str], bool] = lambda epoch: True,
    ) -> None:
        self._file = file
        self._recent = recent
        self._clock = clock
        self._is_live = is_live
        self._connection: sqlite3.Connection | None = None

    def ask(self, question: Callable[[sqlite3.Connection], T], default: T) -> T:
        """What `question` finds in one consistent state of the file; `default` where there is no file yet."""
        # Beginning to read can recover a dead writer's log, so it happens under the lock; reading on needs none.
        with self._file.locked() if self._file.exists() else nullcontext():
            if self._connection is None:
                self._connection = self._file.open_reader()
            connection = self._connection
            if connection is None:
                return default
            connection.execute("BEGIN")
            try:
                connection.execute("SELECT 1 FROM fence LIMIT 1").fetchone()
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        try:
            return question(connection)
        finally:
            connection.execute("ROLLBACK")

    def close(self) -> None:
        if self._connection is not None:
            self._file.close(self._connection)
            self._connection = None

    # -- questions ------------------------------------------------------------------------------------------------

    def snapshot(self, key: str) -> TokenCaptureSnapshot | None:
        """The frozen capture of `key` as of now; None if it is not frozen. Damaged records are left out and named."""
        return self.ask(lambda connection: self._snapshot(connection, key), None)

    def open_entries(self, key: str, since: int) -> tuple[TokenEntry, ...]:
        return self.ask(lambda connection: self._open_entries(connection, key, since), ())

    def receipts(self, key: str) -> tuple[Receipt, ...] | None:
        return self.ask(lambda connection: _receipts(connection, key), None)

    def receipts_to_keep(self, key: str) -> bytes | None:
        """The receipts of a frozen capture, packed for its tombstone; None if it is not frozen."""
        snapshot = self.snapshot(key)
        return pack_receipts(receipts_of(snapshot.entries)) if snapshot is not None else None

    def was_swept(self, key: str) -> bool:
        rollout, attempt = fence_key(key)
        question = "SELECT swept FROM fence WHERE rollout = ?"
        swept = self.ask(lambda connection: connection.execute(question, (rollout,)).fetchone(), None)
        return swept is not None and attempt <= swept[0]

    def captures(self, *, retired: bool) -> tuple[CaptureInfo, ...]:
        return self.ask(lambda connection: self._captures(connection, retired), ())

    # -- answers --------------------------------------------------------------------------------------------------

    def _snapshot(self, connection: sqlite3.Connection, key: str) -> TokenCaptureSnapshot | None:
        row = _find(connection, key)
        if row is None or row.phase is not Phase.FROZEN or row.snapshot_id is None:
            return None
        records = read_line(connection, row.last_entry, row.entries)
        line = line_entries(connection, row.id, records, self._recent, whole=False)
        lost = [f"write_failed:{call_id}: its stored record is damaged" for call_id in line.damaged]
        if len(records) != row.entries:
            lost.append(f"write_failed:{row.entries - len(records)} of {row.entries} stored records are missing")
        elif [record.ordinal for record in records] != list(range(1, row.entries + 1)):
            lost.append(
                f"write_failed:{row.entries} stored records are not the first {row.entries}: the count is damaged"
            )
        known = [r for (r,) in connection.execute("SELECT reason FROM reason WHERE capture = ? ORDER BY n", (row.id,))]
        calls = connection.execute(
            "WITH RECURSIVE line (id, prev) AS ("
            " SELECT id, prev FROM call WHERE id = ? UNION ALL"
            " SELECT c.id, c.prev FROM line JOIN call c ON c.id = line.prev LIMIT ?)"
            " SELECT c.abort, c.entry IS NOT NULL FROM line JOIN call c ON c.id = line.id ORDER BY c.id",
            (row.last_call, row.calls),
        ).fetchall()
        put = sum(is_put for _, is_put in calls)
        if not lost and (len(calls), put) != (row.calls, row.entries):
            lost.append(
                f"write_failed:{len(calls)} calls with {put} records, {row.calls} with {row.entries} were counted"
            )
        return TokenCaptureSnapshot(
            rollout_id=key,
            entries=tuple(line.entries),
            incomplete=row.incomplete or bool(lost),
            snapshot_id=row.snapshot_id,
            version=row.version,
            reasons=snapshot_reasons([*known, *lost], (abort for abort, _ in calls)),
        )

    def _open_entries(self, connection: sqlite3.Connection, key: str, since: int) -> tuple[TokenEntry, ...]:
        row = _find(connection, key)
        if row is None:
            return ()
        records = read_line(connection, row.last_entry, row.entries, since)
        return tuple(line_entries(connection, row.id, records, self._recent, whole=True).entries)

    def _captures(self, connection: sqlite3.Connection, retired: bool) -> tuple[CaptureInfo, ...]:
        now = self._clock()
        reasons: defaultdict[int, list[str]] = defaultdict(list)
        aborts: defaultdict[int, dict[str, int]] = defaultdict(dict)
        epochs: defaultdict[int, set[str]] = defaultdict(set)
        for capture, reason in connection.execute("SELECT capture, reason FROM reason ORDER BY n"):
            reasons[capture].append(reason)
        for capture, abort, count in connection.execute(
            "SELECT capture, abort, count(*) FROM call WHERE abort IS NOT NULL GROUP BY capture, abort ORDER BY min(id)"
        ):
            aborts[capture][abort] = count
        for capture, epoch in connection.execute(
            "SELECT DISTINCT capture, epoch FROM call WHERE intent AND entry IS NULL AND abort IS NULL"
        ):
            epochs[capture].add(epoch or "")
        began: defaultdict[int, set[str]] = defaultdict(set)
        for capture, epoch in connection.execute(
            "SELECT DISTINCT c.capture, c.epoch FROM call c JOIN capture k ON k.id = c.capture WHERE k.phase != ?",
            (Phase.RETIRED,),
        ):
            began[capture].add(epoch or "")
        alive = {epoch: self._is_live(epoch) for epoch in set[str]().union(*began.values())}
        rows = connection.execute(
            "SELECT id, key, phase, created, calls, entries, open_intents, incomplete, version, snapshot_id, abandoned"
            " FROM capture WHERE ? OR phase != ? ORDER BY created, id",
            (retired, Phase.RETIRED),
        )
        return tuple(
            CaptureInfo(
                rollout_id=key,
                state=phase,
                age_s=max(0.0, now - created),
                calls=calls,
                entries=entries,
                open_intents=open_intents,
                incomplete=bool(incomplete),
                version=version,
                snapshot_id=snapshot_id,
                reasons=snapshot_reasons(reasons[row_id], aborts[row_id]),
                aborts=tuple(sorted(aborts[row_id].items())),
                writer_epochs=tuple(sorted(epochs[row_id])),
                abandoned=bool(abandoned),
                writer=writer_state(began[row_id], alive) if phase != Phase.RETIRED else None,
            )
            for (
                row_id,
                key,
                phase,
                created,
                calls,
                entries,
                open_intents,
                incomplete,
                version,
                snapshot_id,
                abandoned,
            ) in rows
        )


def pack_receipts(receipts: tuple[Receipt, ...]) -> bytes:
    """Receipts as JSON."""
    return msgspec.json.encode(receipts)


def _receipts(connection: sqlite3.Connection, key: str) -> tuple[Receipt, ...] | None:
    found = connection.execute("SELECT receipts FROM capture WHERE key = ? AND phase = ?", (key, Phase.RETIRED))
    row = found.fetchone()
    return msgspec.json.decode(row[0], type=tuple[Receipt, ...]) if row is not None else None


def _find(connection: sqlite3.Connection, key: str) -> _Key | None:
    found = connection.execute(
        "SELECT id, phase, version, snapshot_id, incomplete, entries, last_entry, last_call, calls"
        " FROM capture WHERE key = ?",
        (key,),
    ).fetchone()
    if found is None:
        return None
    row_id, phase, version, snapshot_id, incomplete, *rest = found
    return _Key(row_id, Phase(phase), version, snapshot_id, bool(incomplete), *rest)

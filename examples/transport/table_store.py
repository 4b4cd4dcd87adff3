"""A capture transport of one's own: both ends over one table of an SQLite file, every verb one transaction.

The life cycle is not written again: `step` says what becomes of a verb, this file says where the state is kept. Written
to be read, not to be fast.
"""

import asyncio
import json
import secrets
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from toprope.capture.protocols import EntryConflict, closed
from toprope.storage.lock import FileLock
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import (
    Abort,
    Begin,
    Call,
    Drop,
    Freeze,
    Head,
    Mark,
    Phase,
    Put,
    Verdict,
    snapshot_reasons,
    step,
)
from toprope.tokens.snapshot import TokenCaptureSnapshot


class TableStore:
    """A sink and a source in one. Any number of processes of one machine may open the same `path`."""

    def __init__(self, path: str):
        self.path = path
        self.lock = FileLock(Path(path + ".lock"))  # SQLite's own lock lets a busy writer starve the others
        with closing(self._open()) as db:
            db.execute("CREATE TABLE IF NOT EXISTS head (key TEXT PRIMARY KEY, state TEXT, reasons TEXT)")
            db.execute(
                "CREATE TABLE IF NOT EXISTS call (key TEXT, id TEXT, state TEXT, entry TEXT, PRIMARY KEY (key, id))"
            )

    async def begin_call(self, rollout_id, model_call_id):
        await self._happen(rollout_id, model_call_id, lambda call, calls: Begin())

    async def put(self, entry):
        text = json.dumps(entry.model_dump(), allow_nan=False)  # a logprob that is no number is refused here
        told = await self._happen(
            entry.rollout_id,
            entry.model_call_id,
            lambda call, calls: Put(entry.model_call_id, same=calls.get(entry.model_call_id, (None, None))[1] == text),
            text,
        )
        if told is Verdict.CONFLICT:
            raise EntryConflict(f"call {entry.model_call_id!r} is recorded with other content")

    async def abort_call(self, rollout_id, model_call_id, *, reason):
        await self._happen(rollout_id, model_call_id, lambda call, calls: Abort(reason))

    async def mark_incomplete(self, rollout_id, model_call_id=""):
        await self._happen(rollout_id, None, lambda call, calls: Mark(f"write_failed:{model_call_id}"))

    async def freeze(self, rollout_id):
        def now(call, calls):
            return Freeze(secrets.token_hex(16), tuple(each for each, (state, _) in calls.items() if state.open))

        await self._happen(rollout_id, None, now)
        return await asyncio.to_thread(self._snapshot, rollout_id)

    async def drop(self, rollout_id, *, snapshot_id, version):
        told = await self._happen(rollout_id, None, lambda call, calls: Drop(snapshot_id, version))
        return told in (Verdict.DONE, Verdict.NOTHING)

    async def close(self):
        self.lock.close()

    async def _happen(self, key, call_id, event_of, entry=None):
        return await asyncio.to_thread(self._transaction, key, call_id, event_of, entry)

    def _transaction(self, key, call_id, event_of, entry):
        with self.lock.held(), closing(self._open()) as db:
            db.execute("BEGIN IMMEDIATE")
            head, reasons, calls = self._read(db, key)
            call = calls.get(call_id, (Call(), None))[0]
            event = event_of(call, calls)
            if head.phase is Phase.FROZEN and isinstance(event, Abort):
                event = Abort(f"late:{event.reason}")  # recorded; it changes nothing that a snapshot showed
            done = step(head, call, event)
            if done.verdict is Verdict.REFUSED:
                raise closed(key, head.phase, event.verb)
            if done.verdict in (Verdict.DONE, Verdict.CONFLICT):
                reasons = [*reasons, *(reason for reason in done.reasons if reason not in reasons)]
                db.execute(
                    "REPLACE INTO head VALUES (?, ?, ?)", (key, json.dumps(asdict(done.head)), json.dumps(reasons))
                )
                if done.head.phase is Phase.RETIRED:
                    db.execute("DELETE FROM call WHERE key = ?", (key,))  # the head stays: it is the tombstone
                elif call_id is not None and done.verdict is Verdict.DONE:
                    kept = entry if entry is not None else calls.get(call_id, (None, None))[1]
                    db.execute(
                        "REPLACE INTO call VALUES (?, ?, ?, ?)", (key, call_id, json.dumps(asdict(done.call)), kept)
                    )
            db.execute("COMMIT")  # returns once the bytes are on the device
            return done.verdict

    def _snapshot(self, key):
        with closing(self._open()) as db:
            head, reasons, calls = self._read(db, key)
        if head.phase is not Phase.FROZEN:
            raise closed(key, head.phase, "freeze")
        aborts = [state.abort for state, _ in calls.values() if state.abort is not None]
        dumps = [json.loads(text) for _, text in calls.values() if text is not None]
        for dump in dumps:
            if f"replay_of:{dump['model_call_id']}" in aborts:
                dump["client_gone"] = False  # its client came back and was given the recorded reply
        return TokenCaptureSnapshot(
            key,
            tuple(TokenEntry.from_dump(dump) for dump in dumps),
            head.incomplete,
            head.snapshot_id,
            head.version,
            snapshot_reasons(reasons, aborts),
        )

    @staticmethod
    def _read(db, key):
        row = db.execute("SELECT state, reasons FROM head WHERE key = ?", (key,)).fetchone()
        calls = {
            call_id: (Call(**json.loads(state)), entry)
            for call_id, state, entry in db.execute(
                "SELECT id, state, entry FROM call WHERE key = ? ORDER BY rowid", (key,)
            )
        }
        if row is None:
            return Head(), [], calls
        state = json.loads(row[0])
        return Head(**{**state, "phase": Phase(state["phase"])}), json.loads(row[1]), calls

    def _open(self):
        db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        db.execute("PRAGMA synchronous=EXTRA")  # a deleted journal is synced too: what was committed stays committed
        return db

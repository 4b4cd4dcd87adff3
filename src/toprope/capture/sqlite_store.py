"""`SqliteStore`: the default custody. One file per run on a local disk, written and read by several processes.

Puts together the writer (one thread, group commit), the reader (one thread) and the file. What is true when a verb
returns stands at the verb; how it is made true is theirs.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from toprope.capture.epochs import WriterEpochs
from toprope.capture.prompts import RecentCalls
from toprope.capture.protocols import BeginAck, CaptureInfo, Intent, JournalledCall, PutAck, check_ids, closed
from toprope.capture.settling import Changes, InFlight, wait_settled
from toprope.capture.sqlite_file import SqliteFile
from toprope.capture.sqlite_reader import SqliteReader
from toprope.capture.sqlite_settle import begun_calls, open_writers
from toprope.capture.sqlite_writer import Operation, SqliteWriter
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.storage.group_commit import GroupCommit
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import typed_reason
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot

T = TypeVar("T")


class SqliteStore:
    """Sink, source, reader, and every optional verb, over the file `path`, which the first write makes.

    Any number of stores in any number of processes of one machine may use one file. Raises `ConfigError` for a path on
    a network file system. All verbs raise `CaptureClosed` where the life cycle refuses them, `CaptureError` for a file
    that is no store of ours and when the disk refuses. A caller cancelled while a verb waits does not
    know whether it took effect. `freeze_listeners` are told the keys that this store froze or made new.
    """

    durable = True

    def __init__(
        self,
        path: str | Path,
        *,
        recent_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._file = SqliteFile(self.path)
        recent: RecentCalls[tuple[int, str]] = RecentCalls(recent_bytes)
        self._epochs = WriterEpochs(self.path.with_name(self.path.name + ".writers"))
        self._changes = Changes()
        self._reader = SqliteReader(self._file, recent, clock, self._epochs.is_live)
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="capture-read")
        writer = SqliteWriter(self._file, recent, clock, self._epochs.is_live, self._epochs.may_have_answered)
        self._group: GroupCommit[Operation, Any] = GroupCommit("capture-write", writer.commit, finish=writer.finish)
        self._closed = False
        self.freeze_listeners: list[Callable[[str], None]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        """Once it returns the intent survives a power cut. Known already: no-op."""
        check_ids("begin_call", rollout_id, model_call_id)
        told = intent or Intent()
        self._epochs.hold(told.writer_epoch)
        return cast(BeginAck, await self._write(lambda writer: writer.begin(rollout_id, model_call_id, told)))

    async def put(self, entry: TokenEntry) -> PutAck:
        """Once it returns the entry survives a power cut and every process sees it. Same bytes again: no-op.

        Other bytes under the same id raise `EntryConflict`, after the rollout was marked incomplete.
        """
        ack = cast(PutAck, await self._write(lambda writer: writer.put(entry)))
        self._changes.tell(entry.rollout_id)
        return ack

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        """Once it returns the intent is closed, durably, and does not count as lost. After its put: no-op."""
        check_ids("abort_call", rollout_id, model_call_id)
        await self._write(lambda writer: writer.abort(rollout_id, model_call_id, reason))
        self._changes.tell(rollout_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
        """Once it returns the loss is durable; `reason` is one of the typed reasons, a detail after a colon.

        Where the disk refuses, the call's open intent says it, also after this process died.
        """
        try:
            await self._write(lambda writer: writer.mark(rollout_id, typed_reason(reason, model_call_id)))
        except CaptureClosed:
            raise
        except Exception:
            self._epochs.leave_unsaid()
            raise

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        """Once it returns no intent of a live writer is open (True), or `timeout_s` seconds are over (False).

        An intent without a writer epoch may be a live writer's. Those of dead writers are settled by `freeze`.
        """

        def ask() -> InFlight:
            writers = self._reader.ask(lambda connection: open_writers(connection, rollout_id), Counter[str]())
            live = {epoch: count for epoch, count in writers.items() if self._epochs.is_live(epoch)}
            ours = sum(count for epoch, count in live.items() if self._epochs.mine(epoch))
            return InFlight(ours, sum(live.values()) - ours)

        return await wait_settled(self._changes, rollout_id, lambda: self._read(ask), timeout_s)

    async def settle_dead_writers(self) -> int:
        """Once it returns the intents that dead writers left are aborted, durably, where that can be told already.

        To be called by a writer that starts. What was streamed waits for a retry: `freeze` settles it. The number of
        intents closed now is returned.
        """
        if not self._file.exists():
            return 0
        return cast(int, await self._write(lambda writer: writer.settle()))

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Once it returns the set of entries is final, durably. Again: the same id and entries, the rest as of now."""
        await self._write(lambda writer: writer.freeze(rollout_id, secrets.token_hex(16)))
        for listener in self.freeze_listeners:
            listener(rollout_id)
        snapshot = await self._read(lambda: self._reader.snapshot(rollout_id))
        if snapshot is None:  # it was delivered, or set aside, between the two
            raise closed(rollout_id, "retired", "freeze")
        return snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """True once the payload is gone and a tombstone with receipts is durable; False for a stale pair."""
        receipts = await self._read(lambda: self._reader.receipts_to_keep(rollout_id))
        return cast(bool, await self._write(lambda writer: writer.drop(rollout_id, snapshot_id, version, receipts)))

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        """The receipts of a retired rollout in call order; None if it is not retired."""
        return await self._read(lambda: self._reader.receipts(rollout_id))

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The acknowledged entries after the first `since`, in order of acknowledgement, with whole prompts."""
        return await self._read(lambda: self._reader.open_entries(rollout_id, since))

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        """Every call that was begun, in order of beginning, the same for every process."""

        def ask() -> tuple[JournalledCall, ...]:
            return self._reader.ask(lambda connection: begun_calls(connection, rollout_id, self._epochs.is_live), ())

        return await self._read(ask)

    async def supersede(self, rollout_id: str) -> str | None:
        """Once it returns the key is new, durably; what stood there is `<key>~<n>`, whose name is returned."""
        name = cast("str | None", await self._write(lambda writer: writer.supersede(rollout_id)))
        for listener in self.freeze_listeners:
            listener(rollout_id)
        return name

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        """Every capture that is not retired, oldest first; with `retired` tombstones too."""
        return await self._read(lambda: self._reader.captures(retired=retired))

    async def sweep_retired(self, older_than: float) -> int:
        """Once it returns the tombstones older than `older_than` seconds are gone (their number); the fence stays."""
        if not self._file.exists():
            return 0
        return cast(int, await self._write(lambda writer: writer.sweep(older_than)))

    async def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Once it returns the captures under `keys` are gone, durably, but for those of live writers; which went."""
        if not keys or not self._file.exists():
            return ()
        return cast("tuple[str, ...]", await self._write(lambda writer: writer.discard(keys)))

    async def was_swept(self, rollout_id: str) -> bool:
        """Whether this key, or that of a later attempt, was swept or discarded."""
        return await self._read(lambda: self._reader.was_swept(rollout_id))

    async def close(self) -> None:
        """Once it returns everything submitted before is durable and no handle is open. Twice: no-op."""
        if self._closed:
            return
        self._closed = True
        await self._group.close()
        await asyncio.get_running_loop().run_in_executor(self._read_thread, self._reader.close)
        self._read_thread.shutdown()
        self._epochs.close()
        self._file.let_go()

    async def _write(self, operation: Operation) -> Any:
        try:
            return await self._group.submit(operation)
        except (sqlite3.OperationalError, OSError) as error:  # the lock and the directory are files too
            raise CaptureError(
                f"{self.path}: the disk refused this write, and nothing of it stands ({error})"
            ) from error

    async def _read(self, question: Callable[[], T]) -> T:
        if self._closed:
            raise RuntimeError("the capture store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._read_thread, question)

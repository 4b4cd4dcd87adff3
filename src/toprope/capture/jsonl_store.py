"""`JsonlStore`: custody in plain files, one set a rollout, in NeMo Gym's layout. Readable by anything, on any disk.

The same verbs and the same life cycle as every other store, without group commit: each write has device syncs of its
own. Use it to exchange captures with NeMo Gym's programs, on file systems that the sqlite store refuses, or where files
are wanted that can be read with ordinary tools. Work happens on threads (`jsonl_captures`); this is its front.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from toprope.capture.epochs import WriterEpochs
from toprope.capture.jsonl_captures import JsonlCaptures
from toprope.capture.jsonl_files import Files, OsFiles
from toprope.capture.jsonl_threads import KeyedThreads
from toprope.capture.protocols import BeginAck, CaptureInfo, Intent, JournalledCall, PutAck, check_ids
from toprope.capture.settling import Changes, InFlight, wait_settled
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import typed_reason
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot

T = TypeVar("T")
_WHOLE_DIRECTORY = "\0directory"


class JsonlStore:
    """Sink, source, reader, and every optional verb, over `directory`, which the first write makes.

    Any number of stores in any number of processes that share a working `flock` may use one directory, NeMo Gym's own
    store among them. All verbs raise `CaptureClosed` where the life cycle refuses them, `CaptureError` for a directory
    that cannot be written, for a put over a damaged record and where the disk refuses. A caller cancelled while a verb
    waits does not know whether it took effect. `freeze_listeners` are told the keys that this store froze or made new.
    `threads` is how many rollouts are worked on at once.
    """

    durable = True

    def __init__(
        self,
        directory: str | Path,
        *,
        files: Files | None = None,
        recent_bytes: int = 32 << 20,
        threads: int = 32,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self._epochs = WriterEpochs(self.directory / ".writers")
        self._changes = Changes()
        self._captures = JsonlCaptures(self.directory, files or OsFiles(), recent_bytes, clock, self._epochs)
        self._threads = KeyedThreads("capture-jsonl", threads)
        self._clock = clock
        self.freeze_listeners: list[Callable[[str], None]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        """Once it returns the intent survives a power cut. Known already: no-op."""
        check_ids("begin_call", rollout_id, model_call_id)
        told = intent or Intent()
        return await self._run(rollout_id, lambda: self._captures.begin(rollout_id, model_call_id, told))

    async def put(self, entry: TokenEntry) -> PutAck:
        """Once it returns the entry survives a power cut and every process sees it. Same bytes again: no-op.

        Other bytes under the same id raise `EntryConflict`, after the rollout was marked incomplete.
        """
        ack = await self._run(entry.rollout_id, lambda: self._captures.put(entry))
        self._changes.tell(entry.rollout_id)
        return ack

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        """Once it returns the intent is closed, durably, and does not count as lost. After its put: no-op."""
        check_ids("abort_call", rollout_id, model_call_id)
        await self._run(rollout_id, lambda: self._captures.abort(rollout_id, model_call_id, reason))
        self._changes.tell(rollout_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
        """Once it returns the loss is durable; `reason` is one of the typed reasons, a detail after a colon.

        Where the disk refuses, the call's open intent says it, also after this process died.
        """
        try:
            await self._run(rollout_id, lambda: self._captures.mark(rollout_id, typed_reason(reason, model_call_id)))
        except CaptureClosed:
            raise
        except Exception:
            self._epochs.leave_unsaid()
            raise

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        """Once it returns no intent of a live writer is open (True), or `timeout_s` seconds are over (False).

        An intent without a writer epoch may be a live writer's. Those of dead writers are settled by `freeze`.
        """

        async def ask() -> InFlight:
            return await self._run(rollout_id, lambda: self._captures.in_flight(rollout_id))

        return await wait_settled(self._changes, rollout_id, ask, timeout_s)

    async def settle_dead_writers(self) -> int:
        """Once it returns the intents that dead writers left are aborted, durably, where that can be told already.

        To be called by a writer that starts. What was streamed waits for a retry: `freeze` settles it. The number of
        intents closed now is returned.
        """
        keys = await self._run(_WHOLE_DIRECTORY, self._captures.keys)
        return sum([await self._run(key, partial(self._captures.settle, key)) for key in keys])

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Once it returns the set of entries is final, durably. Again: the same id and entries, the rest as of now."""
        snapshot = await self._run(rollout_id, lambda: self._captures.freeze(rollout_id, secrets.token_hex(16)))
        for listener in self.freeze_listeners:
            listener(rollout_id)
        return snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """True once the payload is gone and a tombstone with receipts is durable; False for a stale pair."""
        return await self._run(rollout_id, lambda: self._captures.drop(rollout_id, snapshot_id, version))

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        """The receipts of a retired rollout in call order; None if it is not retired, or NeMo Gym retired it."""
        return await self._run(rollout_id, lambda: self._captures.receipts(rollout_id))

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The acknowledged entries after the first `since`, in order of acknowledgement, with whole prompts."""
        return await self._run(rollout_id, lambda: self._captures.open_entries(rollout_id, since))

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        """Every call that was begun, in order of beginning, the same for every process."""
        return await self._run(rollout_id, lambda: self._captures.begun_calls(rollout_id))

    async def supersede(self, rollout_id: str) -> str | None:
        """Once it returns the key is new, durably; what stood there is `<key>~<n>`, whose name is returned."""
        name = await self._run(rollout_id, lambda: self._captures.supersede(rollout_id))
        for listener in self.freeze_listeners:
            listener(rollout_id)
        return name

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        """Every capture that is not retired, oldest first; with `retired` tombstones too. Leaves no trace."""
        found, asked, now = [], set[str](), self._clock()
        # Again until no name is new: asking for a key finishes the move that a dead writer began, to a new name.
        while new := [key for key in await self._run(_WHOLE_DIRECTORY, self._captures.keys) if key not in asked]:
            asked.update(new)
            for key in new:
                info = await self._run(key, partial(self._captures.info, key, now))
                if info is not None and (retired or info[1].state != "retired"):
                    found.append(info)
        return tuple(info for _, info in sorted(found, key=lambda each: each[0]))

    async def sweep_retired(self, older_than: float) -> int:
        """Once it returns the tombstones older than `older_than` seconds are gone (their number); the fence stays."""
        limit = self._clock() - older_than
        old = await self._run(_WHOLE_DIRECTORY, lambda: self._captures.retired_before(limit))
        swept = [await self._run(key, partial(self._captures.sweep, key, limit)) for key in old]
        await self._run(_WHOLE_DIRECTORY, lambda: self._captures.remove_scraps(older_than))
        return sum(swept)

    async def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Once it returns the captures under `keys` are gone, durably, but for those of live writers; which went."""
        gone = [await self._run(key, partial(self._captures.discard, key)) for key in keys]
        return tuple(key for key, went in zip(keys, gone, strict=True) if went)

    async def was_swept(self, rollout_id: str) -> bool:
        """Whether this key, or that of a later attempt, was swept or discarded."""
        return await self._run(rollout_id, lambda: self._captures.was_swept(rollout_id))

    async def close(self) -> None:
        """Once it returns everything submitted before is durable and no handle is open. Twice: no-op."""
        await self._threads.close()
        await asyncio.to_thread(self._epochs.close)

    async def _run(self, key: str, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(key, work)
        except OSError as error:  # with its file: a full disk, a directory of somebody else's
            raise CaptureError(f"{self.directory}: the capture store cannot be used now: {error}") from error

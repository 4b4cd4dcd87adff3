"""The ledger: result rows, failure rows and the journal of one run, written in the order that a crash allows.

    dispatch line synced -> request ... row synced -> outcome line synced -> (only now) anybody is told

The synced row is the outcome: if the process dies between row and outcome line, the row is adopted by the next
reader. One writer a directory. Left to others: what a row says (`rows`), reading (`read`, `account`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.canonical.digest import digest_bytes
from toprope.results.journal import (
    DispatchLine,
    EndLine,
    InterruptedLine,
    Journal,
    OutcomeLine,
    ReceiptsLine,
    RetiredLine,
    RunLine,
    SessionLine,
)
from toprope.results.layout import RunDir
from toprope.results.manifest import Manifest, write_manifest
from toprope.results.rows import FailureRecord, RowIdentity, encode_row, failure_row, now
from toprope.storage.atomic import replace_file
from toprope.storage.rows import DurableRows
from toprope.tokens.snapshot import Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """Where a row stands: offset of its first byte, SHA-256 of its bytes (without the newline)."""

    offset: int
    digest: str


class Ledger:
    """The writing side of a run directory; `begin` makes one. Every verb is durable when it returns."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._journal = Journal(run_dir.journal)
        self._results = DurableRows(run_dir.results)
        self._failures = DurableRows(run_dir.failures)
        self._notes: set[asyncio.Task[None]] = set()

    @classmethod
    async def begin(cls, run_dir: RunDir, manifest: Manifest, tasks: bytes) -> Ledger:
        """Start a run in a directory that holds none. Raises `ConfigError` if it does."""
        await asyncio.to_thread(_prepare, run_dir, manifest, tasks)
        ledger = cls(run_dir)
        await ledger._results.open()
        await ledger._failures.open()
        await ledger._journal.write(
            RunLine(at=now(), run_id=manifest.run_id, start=1, pid=os.getpid(), toprope=manifest.toprope)
        )
        return ledger

    async def dispatched(self, identity: RowIdentity, *, environment: str, captured: bool) -> None:
        """On return the attempt's number is taken for good, so that its request may leave."""
        await self._journal.write(
            DispatchLine(
                at=now(),
                rollout_id=identity.rollout_id,
                attempt=identity.attempt,
                task_index=identity.task_index,
                rollout_index=identity.rollout_index,
                environment=environment,
                captured=captured,
            )
        )

    async def result(self, identity: RowIdentity, row: Mapping[str, Any]) -> Written:
        """Write a result row, then its outcome. Raises `Unstorable`, and nothing was written, for a bad value."""
        data = encode_row(row)
        written = Written(await self._results.append(data), digest_bytes(data))
        await self._journal.write(
            OutcomeLine(
                at=now(),
                rollout_id=identity.rollout_id,
                attempt=identity.attempt,
                outcome="masked" if row.get("mask_sample") else "measured",
                file="results",
                offset=written.offset,
                digest=written.digest,
            )
        )
        return written

    async def failure(self, identity: RowIdentity, failure: FailureRecord, *, counts: bool = True) -> Written:
        """Write a failure row, then its outcome. `counts` is False where the attempt does not use up attempts."""
        data = encode_row(failure_row(identity, failure))
        written = Written(await self._failures.append(data), digest_bytes(data))
        await self._journal.write(
            OutcomeLine(
                at=now(),
                rollout_id=identity.rollout_id,
                attempt=identity.attempt,
                outcome="failed",
                file="failures",
                offset=written.offset,
                digest=written.digest,
                terminal=failure.terminal,
                counts=counts,
                kind=failure.kind,
            )
        )
        return written

    async def interrupted(self, identity: RowIdentity) -> None:
        """The attempt was given up by a stop of the run."""
        await self._journal.write(InterruptedLine(at=now(), rollout_id=identity.rollout_id, attempt=identity.attempt))

    async def receipts(self, key: str, snapshot_id: str, version: int, receipts: Sequence[Receipt]) -> None:
        """Keep the receipts of a capture whose source keeps none; before it is dropped."""
        await self._journal.write(
            ReceiptsLine(at=now(), key=key, snapshot_id=snapshot_id, version=version, receipts=list(receipts))
        )

    async def retired(self, key: str, snapshot_id: str, version: int) -> None:
        """The capture is gone."""
        await self._journal.write(RetiredLine(at=now(), key=key, snapshot_id=snapshot_id, version=version))

    def session(self, line: SessionLine) -> asyncio.Task[None]:
        """Write down that a session was opened or closed; await the task for its durability, `close` does anyway."""
        task = asyncio.get_running_loop().create_task(self._journal.write(line))
        self._notes.add(task)
        task.add_done_callback(self._noted)
        return task

    def _noted(self, task: asyncio.Task[None]) -> None:
        self._notes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session could not be journalled: %s", error)  # a diagnostic: it costs no rollout

    async def ended(self, reason: str, message: str = "") -> None:
        """The run is over."""
        await self._journal.write(EndLine(at=now(), reason=reason, message=message))

    async def close(self) -> None:
        """On return the three files are durable and closed."""
        if self._notes:
            await asyncio.wait(self._notes)
        await self._results.close()
        await self._failures.close()
        await self._journal.close()


def _prepare(run_dir: RunDir, manifest: Manifest, tasks: bytes) -> None:
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.refuse_used()
    # The manifest comes last: a directory without one holds no run, whatever else a crash left in it.
    replace_file(run_dir.tasks, tasks)
    write_manifest(run_dir.manifest, manifest)

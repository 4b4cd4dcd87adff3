"""A source that keeps no receipts: the run keeps them, of the very snapshot that its row was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.collector.test_capture import GymStore, captured, no_wait, tasks

from toprope.collector.audit import audit
from toprope.results.journal import ReceiptsLine, read_journal
from toprope.results.layout import RunDir
from toprope.testing.episodes import collect_scripted
from toprope.tokens.snapshot import TokenCaptureSnapshot


class PlainRecords(GymStore):
    """Answers with records of its own kind, as a transport of others does, and counts who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        self.asked += 1
        snapshot = await super().freeze(rollout_id)
        plain: Any = tuple(entry.model_dump() for entry in snapshot.entries)
        return TokenCaptureSnapshot(rollout_id, plain, snapshot.incomplete, snapshot.snapshot_id, snapshot.version)


@pytest.mark.promise("CP-16")
async def test_receipts_of_foreign_records_are_kept_without_asking_for_them_again(tmp_path: Path) -> None:
    store = PlainRecords()
    summary = await collect_scripted(
        tmp_path, captured(store), tasks(3), source=store, selected=True, capture=no_wait()
    )
    assert summary.coverage.measured == 2  # task 1 lost a call
    assert store.asked == 3
    kept = [line for line in read_journal(RunDir(tmp_path).journal) if isinstance(line, ReceiptsLine)]
    assert len(kept) == 2
    report = await audit(RunDir(tmp_path), None)
    assert report.ok, report.breaches
    assert report.counts["proven"] == 2

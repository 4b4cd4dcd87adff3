"""At a start: captures whose rows were delivered are retired, so that a crash between row and drop leaves nothing.

    row synced -> [the process died here] -> drop

The row says which snapshot it was built from (`snapshot_id`, `version`), and a drop with that pair can erase nothing
that came later. No row is written and none is delivered again. Safe beside a run that is still going: it would drop
with the same pair. Left to others: what is kept, and why (`kept`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from toprope.capture.delivery import SOURCE_TIMEOUT_S, retire_redundant_capture, retire_rollout_token_capture
from toprope.capture.protocols import CaptureLister, ReceiptSource, TokenSource
from toprope.correlation.ids import capture_key
from toprope.results.journal import DispatchLine, ReceiptsLine, read_journal
from toprope.results.layout import RunDir
from toprope.results.read import CaptureHead, Damage, read_result_heads


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The keys that were retired now, and those of delivered rows whose capture could not be."""

    retired: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """A row on disk that needs its capture no more. `pair` is None for a row with token ids of the agent's own."""

    key: str
    pair: tuple[str, int] | None


async def reconcile(run_dir: RunDir, source: TokenSource, *, timeout_s: float | None = SOURCE_TIMEOUT_S) -> Reconciled:
    """Retire the captures of the rows of `run_dir` that were delivered. Raises nothing for a failing source."""
    rows, journalled = await asyncio.to_thread(_read, run_dir)
    if isinstance(source, CaptureLister):
        state = {info.rollout_id: info.state for info in await source.list_captures()}
        rows = {key: row for key, row in rows.items() if state.get(key) == "frozen" or (key in state and not row.pair)}
    retired: list[str] = []
    kept: list[str] = []
    for row in rows.values():
        if row.pair is None:
            done = await retire_redundant_capture(row.key, source, timeout_s=timeout_s)
        elif not isinstance(source, ReceiptSource) and row.key not in journalled:
            done = False  # dropped now it could never be proven
        else:
            done = await retire_rollout_token_capture(row.key, source, _built(row.pair), timeout_s=timeout_s)
        (retired if done else kept).append(row.key)
    return Reconciled(tuple(retired), tuple(kept))


def delivered_rows(run_dir: RunDir, captured: Mapping[tuple[str, int], bool]) -> dict[str, Delivered]:
    """The delivered rows by capture key; `captured` says which attempts were dispatched to be rebuilt. Blocks."""
    found: dict[str, Delivered] = {}
    for placed in read_result_heads(run_dir.results) if run_dir.results.exists() else ():
        if isinstance(placed, Damage):
            continue
        head = placed.value
        if not captured.get((head.rollout_id, head.attempt), False):
            continue  # evaluation rows and rows that were never to be rebuilt: their captures are nobody's to drop
        key = capture_key(head.rollout_id, head.attempt)
        pair = _pair(head.capture)
        if head.capture is None or pair is not None:
            found[key] = Delivered(key, pair)
    return found


def _read(run_dir: RunDir) -> tuple[dict[str, Delivered], set[str]]:
    captured: dict[tuple[str, int], bool] = {}
    journalled: set[str] = set()
    for line in read_journal(run_dir.journal) if run_dir.journal.exists() else ():
        if isinstance(line, DispatchLine):
            captured[line.rollout_id, line.attempt] = line.captured
        elif isinstance(line, ReceiptsLine):
            journalled.add(line.key)
    return delivered_rows(run_dir, captured), journalled


def _pair(capture: CaptureHead | None) -> tuple[str, int] | None:
    if capture is None or capture.mask_reasons or capture.snapshot_id is None or capture.version is None:
        return None
    return capture.snapshot_id, capture.version


def _built(pair: tuple[str, int]) -> dict[str, object]:
    return {"mask_sample": False, "metrics": {"snapshot_id": pair[0], "version": pair[1]}}

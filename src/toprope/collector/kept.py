"""The evidence that a capture store keeps, told with what became of its rollouts: why each of it is still there.

The store knows phases, writers and losses; the rows of the run directory know which rollouts were masked, failed or
delivered. Left to others: printing (`cli`), what a sweep removes from a file (the store).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from toprope.capture.protocols import CaptureInfo, CaptureLister
from toprope.collector.reconcile import Delivered, delivered_rows
from toprope.correlation.ids import capture_key
from toprope.results.journal import DispatchLine, read_journal
from toprope.results.layout import RunDir
from toprope.results.read import Damage, read_failure_heads, read_result_heads


class Why(StrEnum):
    """Why a capture is kept."""

    OPEN = "open"
    """Its writer is alive, or may be: no epoch was told."""
    DEAD = "dead writer"
    """Nothing can come any more, and nobody froze it."""
    UNDELIVERED = "undelivered"
    """Frozen, and no row of it is on disk: it is being delivered, or delivery died before its row."""
    MASKED = "masked"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """Set aside by `supersede`."""
    WRITE_ONLY = "write only"
    """Its row is on disk and was not to be rebuilt."""
    HALF_DROPPED = "half-dropped"
    """Its row is delivered and its drop did not come about; a start or a sweep retires it."""
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Kept:
    """One capture, why it is kept, and the reasons in words."""

    info: CaptureInfo
    why: Why
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class _Rows:
    masked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    delivered: dict[str, Delivered] = field(default_factory=dict)


async def kept_evidence(run_dir: RunDir, store: CaptureLister, *, retired: bool = False) -> tuple[Kept, ...]:
    """Every capture of the store that is not retired, oldest first; with `retired` tombstones too. Leaves no trace."""
    # The store first: a row that is written meanwhile then finds its capture listed, and not the other way round.
    captures = await store.list_captures(retired=retired)
    rows = await asyncio.to_thread(_read, run_dir)
    return tuple(_told(info, rows) for info in captures)


def may_go(kept: Iterable[Kept], older_than_s: float, *, undelivered: bool = False) -> tuple[str, ...]:
    """The keys of the evidence that a sweep may discard: older than `older_than_s` seconds, its writer not alive.

    Masked, failed and abandoned captures, and those that can give no row (nothing recorded, or a call known to be
    lost). What could still be delivered, and what nobody else holds (write only), goes with `undelivered` alone; of a
    capture whose writer told no epoch its age is then all that speaks. Half-dropped captures are never among them (they
    are retired, which keeps receipts), nor are tombstones.
    """
    return tuple(
        each.info.rollout_id
        for each in kept
        if each.why not in (Why.RETIRED, Why.HALF_DROPPED)
        and each.info.age_s >= older_than_s
        and each.info.writer != "live"
        and (undelivered or not _may_be_wanted(each))
    )


def _may_be_wanted(each: Kept) -> bool:
    if each.why in (Why.OPEN, Why.WRITE_ONLY):
        return True
    return each.why in (Why.DEAD, Why.UNDELIVERED) and each.info.entries > 0 and not each.info.incomplete


def _told(info: CaptureInfo, rows: _Rows) -> Kept:
    said = (*info.reasons, *(f"{reason} x{count}" for reason, count in info.aborts))
    key = info.rollout_id
    if info.state == "retired":
        return Kept(info, Why.RETIRED)
    if info.abandoned:
        return Kept(info, Why.ABANDONED, said)
    if key in rows.masked:
        return Kept(info, Why.MASKED, tuple(dict.fromkeys((*rows.masked[key], *said))))
    if key in rows.delivered:
        return Kept(info, Why.HALF_DROPPED, said)
    if key in rows.written:
        return Kept(info, Why.WRITE_ONLY, said)
    if key in rows.failed:
        return Kept(info, Why.FAILED, (rows.failed[key], *said))
    if info.state == "frozen":
        return Kept(info, Why.UNDELIVERED, said)
    return Kept(info, Why.DEAD if info.writer == "dead" else Why.OPEN, said)


def _read(run_dir: RunDir) -> _Rows:
    rows = _Rows()
    captured = {
        (line.rollout_id, line.attempt): line.captured
        for line in (read_journal(run_dir.journal) if run_dir.journal.exists() else ())
        if isinstance(line, DispatchLine)
    }
    for result in read_result_heads(run_dir.results) if run_dir.results.exists() else ():
        if isinstance(result, Damage):
            continue
        key = capture_key(result.value.rollout_id, result.value.attempt)
        rows.written.add(key)
        if result.value.capture is not None and result.value.capture.mask_reasons:
            rows.masked[key] = tuple(result.value.capture.mask_reasons)
    for failure in read_failure_heads(run_dir.failures) if run_dir.failures.exists() else ():
        if not isinstance(failure, Damage):
            rows.failed[capture_key(failure.value.rollout_id, failure.value.attempt)] = failure.value.failure_kind
    rows.delivered = delivered_rows(run_dir, captured)
    return rows

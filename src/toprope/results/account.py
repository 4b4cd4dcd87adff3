"""The account of a run: what became of every rollout that was owed, from the files alone.

    expected = measured + masked + failed + omitted + unknown

measured, masked: a result row; failed: the latest attempt left a failure row; unknown: it was dispatched and left
nothing; omitted: never dispatched. The same function serves a finished, an interrupted and a killed run. Left to
others: metrics (`collector.summary`), proof (`collector.audit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from toprope.results.journal import (
    DamagedLine,
    DispatchLine,
    EndLine,
    InterruptedLine,
    RunLine,
    read_journal,
)
from toprope.results.layout import RunDir
from toprope.results.manifest import Manifest, read_manifest
from toprope.results.read import Damage, FailureHead, ResultHead, read_failure_heads, read_result_heads


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The identity, and what share of the owed rollouts has a verdict."""

    expected: int
    measured: int = 0
    masked: int = 0
    failed: int = 0
    omitted: int = 0
    unknown: int = 0

    @property
    def share(self) -> float:
        """(measured + masked) / expected."""
        return (self.measured + self.masked) / self.expected if self.expected else 0.0

    def holds(self) -> bool:
        """Whether the identity holds."""
        return self.expected == self.measured + self.masked + self.failed + self.omitted + self.unknown


@dataclass(slots=True)
class _Rollout:
    latest: int = -1
    failed: int = -1
    verdict: str | None = None


@dataclass(slots=True)
class Account:
    """Everything that summaries count. Memory grows with the rollouts, not with the size of their rows."""

    manifest: Manifest
    rollouts: dict[str, _Rollout] = field(default_factory=dict)
    dispatches: int = 0
    starts: int = 0
    interrupted: int = 0
    failure_rows: int = 0
    failure_kinds: Counter[str] = field(default_factory=Counter)
    last_failure: dict[str, tuple[int, str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    end: EndLine | None = None
    damage: list[Damage] = field(default_factory=list)

    def coverage(self) -> Coverage:
        """Fold the rollouts into the identity."""
        names = Counter(_fate(rollout) for rollout in self.rollouts.values())
        return Coverage(
            expected=self.manifest.expected,
            measured=names["measured"],
            masked=names["masked"],
            failed=names["failed"],
            unknown=names["unknown"],
            omitted=self.manifest.expected - len(self.rollouts),
        )

    def failed_kinds(self) -> Counter[str]:
        """How many rollouts ended as failed, by the kind of their last failure; `reasons` has one text a kind."""
        return Counter(
            self.last_failure[name][1]
            for name, rollout in self.rollouts.items()
            if _fate(rollout) == "failed" and name in self.last_failure
        )


def _fate(rollout: _Rollout) -> str:
    if rollout.verdict is not None:
        return rollout.verdict
    return "failed" if rollout.failed >= rollout.latest else "unknown"


def take_account(run_dir: RunDir, on_result: Callable[[ResultHead], None] | None = None) -> Account:
    """Read the directory once, rows in order of their files; `on_result` sees the head of every result row."""
    account = Account(read_manifest(run_dir.manifest))
    for line in read_journal(run_dir.journal):
        _take_line(account, line)
    for result in read_result_heads(run_dir.results):
        if isinstance(result, Damage):
            account.damage.append(result)
            continue
        _take_result(account, result.value)
        if on_result is not None:
            on_result(result.value)
    for failure in read_failure_heads(run_dir.failures):
        if isinstance(failure, Damage):
            account.damage.append(failure)
            continue
        _take_failure(account, failure.value)
    return account


def _take_line(account: Account, line: object) -> None:
    if isinstance(line, DispatchLine):
        account.dispatches += 1
        rollout = account.rollouts.setdefault(line.rollout_id, _Rollout())
        rollout.latest = max(rollout.latest, line.attempt)
    elif isinstance(line, RunLine):
        account.starts += 1
        account.end = None
    elif isinstance(line, InterruptedLine):
        account.interrupted += 1
    elif isinstance(line, EndLine):
        account.end = line
    elif isinstance(line, DamagedLine):
        account.damage.append(Damage("journal.jsonl", line.line_no, line.reason))


def _take_result(account: Account, head: ResultHead) -> None:
    rollout = account.rollouts.setdefault(head.rollout_id, _Rollout())
    rollout.verdict = "masked" if head.mask_sample else "measured"


def _take_failure(account: Account, head: FailureHead) -> None:
    account.failure_rows += 1
    account.failure_kinds[head.failure_kind] += 1
    rollout = account.rollouts.setdefault(head.rollout_id, _Rollout())
    rollout.failed = max(rollout.failed, head.attempt)
    known = account.last_failure.get(head.rollout_id)
    if known is None or known[0] <= head.attempt:
        account.last_failure[head.rollout_id] = (head.attempt, head.failure_kind)
    account.reasons.setdefault(head.failure_kind, head.failure_reason)

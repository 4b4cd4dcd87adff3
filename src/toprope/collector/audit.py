"""The audit: prove a run from its files and its capture store, and name everything that is not as it was delivered.

Every row is held against two witnesses that do not stand in it: the journal (the digest of its bytes) and the capture
record (receipts of each call: ids by chain hash, logprobs by digest). So tokens are vouched for by the receipts; text,
rewards and all else only by the digests in the journal. Whose row it is, is held against dispatch and tasks
(`audit_identity`). Left to others: how a row is proven against
receipts (`trajectory.proof`), what it adds up to (`results.account`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toprope.canonical.digest import digest_bytes
from toprope.canonical.json import NotJson, loads
from toprope.capture.protocols import CaptureInfo, CaptureLister, CaptureReader, DiscardingStore, ReceiptSource
from toprope.collector.audit_identity import PlannedTasks
from toprope.collector.summary import Summary, summarise
from toprope.correlation.ids import capture_key
from toprope.results.journal import (
    DamagedLine,
    DispatchLine,
    EndLine,
    OutcomeLine,
    ReceiptsLine,
    RunLine,
    SessionLine,
    read_journal,
)
from toprope.results.layout import RunDir
from toprope.results.rows import encode_row
from toprope.storage.rows import Row, read_rows
from toprope.tokens.receipts import receipts_of
from toprope.tokens.snapshot import Receipt
from toprope.trajectory.project import is_native
from toprope.trajectory.proof import check_row_against_receipts

_Attempt = tuple[str, int]
_COUNTS = (
    *("results", "failures", "dispatches", "captured", "proven", "not_proven", "unverifiable", "calls"),
    *("sampled_tokens", "delivered_tokens"),
)
_STRUCTURAL = frozenset({"malformed", "not_contiguous"})
"""Breaches that need no receipts: what they say of a row is wrong whoever sampled it."""


@dataclass(frozen=True, slots=True)
class AuditBreach:
    """One thing that is not as it was delivered. `where` is a file and line, or a capture key."""

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was checked and what was found; `ok` is the exit status. `notes` are no breaches.

    Of `counts`, `proven` and `not_proven` are rows with token ids: those that receipts bear out, and those with ids of
    an agent's own that no recorded call bears out (so may a forged row look). `sampled_tokens` are what the calls
    behind the proven rows sampled, `delivered_tokens` what of it is in the loss.
    """

    breaches: tuple[AuditBreach, ...]
    counts: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the run. Proven are the rows that `counts` says are."""
        return not self.breaches


@dataclass(slots=True)
class _Journalled:
    """The journal, indexed."""

    dispatches: dict[_Attempt, DispatchLine] = field(default_factory=dict)
    outcomes: dict[_Attempt, OutcomeLine] = field(default_factory=dict)
    receipts: dict[str, tuple[Receipt, ...]] = field(default_factory=dict)
    opened: dict[str, SessionLine] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    ended: bool = False


async def audit(run_dir: RunDir, store: object | None) -> AuditReport:
    """Check every row of a run. `store` is asked for what it can do: receipts, entries, its list of captures.

    Raises `ConfigError` if the directory holds no run. Changes nothing.
    """
    run_dir.require_run()
    work = _Audit(run_dir, store)
    await work.run()
    return AuditReport(tuple(work.breaches), dict(work.counts), tuple(work.notes))


class _Audit:
    def __init__(self, run_dir: RunDir, store: object | None) -> None:
        self._dir = run_dir
        self._store = store
        self._tasks = PlannedTasks(run_dir)
        self._journal = _Journalled()
        self._captures: dict[str, CaptureInfo] = {}
        self._seen: dict[_Attempt, str] = {}
        self._moved = 0
        self._reformatted = 0
        self.breaches: list[AuditBreach] = []
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))

    def say(self, kind: str, where: str, message: str) -> None:
        self.breaches.append(AuditBreach(kind, where, message))

    async def run(self) -> None:
        self._read_journal()
        if self._tasks.fault is not None:
            self.say("changed", "tasks.jsonl", self._tasks.fault)
        if isinstance(self._store, CaptureLister):
            self._captures = {info.rollout_id: info for info in await self._store.list_captures(retired=True)}
        for row, where in self._rows("results"):
            await self._result(row, where)
        for row, where in self._rows("failures"):
            self._failure(row, where)
        self._missing_rows()
        self._stray_captures()
        self._sessions()
        self._coverage()
        if self._moved:
            self.notes.append(f"{self._moved} rows are whole but do not stand where they were written")
        if self._reformatted:
            self.notes.append(f"{self._reformatted} rows hold what was written, in other bytes (white space, escapes)")

    # -- the journal -------------------------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        journal = self._journal
        for line in read_journal(self._dir.journal):
            match line:
                case DamagedLine(line_no=number, reason=reason):
                    self.say("damaged_line", f"journal.jsonl, line {number}", reason)
                case RunLine():
                    journal.ended = False
                case EndLine():
                    journal.ended = True
                case DispatchLine(rollout_id=rollout_id, attempt=attempt):
                    self.counts["dispatches"] += 1
                    if (rollout_id, attempt) in journal.dispatches:
                        self.say("attempt_used_twice", rollout_id, f"attempt {attempt} was dispatched twice")
                    journal.dispatches[rollout_id, attempt] = line
                case OutcomeLine(rollout_id=rollout_id, attempt=attempt):
                    if (rollout_id, attempt) in journal.outcomes:
                        self.say("attempt_used_twice", rollout_id, f"attempt {attempt} has two outcomes")
                    journal.outcomes[rollout_id, attempt] = line
                case ReceiptsLine():
                    journal.receipts[line.key] = tuple(line.receipts)
                case SessionLine(event="closed"):
                    journal.closed.add(line.session_id)
                case SessionLine():
                    journal.opened[line.session_id] = line

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, name: str) -> Iterator[tuple[dict[str, Any], str]]:
        """The readable rows of a file, each already held against the journal."""
        for row in read_rows(self._dir.path / f"{name}.jsonl"):
            where = f"{name}.jsonl, line {row.line_no}"
            value = self._parse(row, where)
            if value is None:
                continue
            self.counts[name] += 1
            attempt = _attempt_of(value)
            if attempt is None:
                self.say("malformed", where, "the row has no _ng_rollout_id and _ng_attempt_index")
                continue
            self._against_journal(attempt, name, row, value, where)
            for difference in self._tasks.differences(value, self._journal.dispatches.get(attempt)):
                self.say("identity_differs", where, difference)
            yield value, where

    def _parse(self, row: Row, where: str) -> dict[str, Any] | None:
        if row.damage == "torn":
            self.notes.append(f"{where} is torn: it was never acknowledged")
            return None
        try:
            value = loads(row.data)
        except NotJson as error:
            self.say("damaged_line", where, str(error))
            return None
        if not isinstance(value, dict):
            self.say("damaged_line", where, "not an object")
            return None
        return value

    def _against_journal(self, attempt: _Attempt, name: str, row: Row, value: dict[str, Any], where: str) -> None:
        shown = f"rollout {attempt[0]}, attempt {attempt[1]}"
        if attempt in self._seen:
            self.say("attempt_used_twice", where, f"{shown} has another row: {self._seen[attempt]}")
            return
        self._seen[attempt] = where
        if attempt not in self._journal.dispatches:
            self.say("never_dispatched", where, f"the journal has no dispatch of {shown}")
        outcome = self._journal.outcomes.get(attempt)
        if outcome is None:
            if self._journal.ended:
                self.say("no_outcome", where, f"the journal has no outcome of {shown}")
            else:
                self.notes.append(f"{where}: the run was killed before the outcome of {shown} was journalled")
        elif outcome.file != name:
            self.say("changed", where, f"{shown} was written to {outcome.file}.jsonl")
        elif outcome.digest == digest_bytes(row.data):
            self._moved += outcome.offset != row.offset
        elif outcome.digest == _digest_as_written(value, row.data):
            self._reformatted += 1  # other white space, the same keys and values in the same order
        else:
            self.say("changed", where, f"the row is not the one that was journalled for {shown}")

    async def _result(self, row: dict[str, Any], where: str) -> None:
        attempt = _attempt_of(row)
        dispatched = self._journal.dispatches.get(attempt) if attempt is not None else None
        metrics = row.get("_ng_token_capture")
        if attempt is None or dispatched is None or not dispatched.captured:
            self._structure(row, where)
            self.counts["not_proven"] += _carries_ids(row)
            return
        if not isinstance(metrics, dict):
            await self._native(row, capture_key(*attempt), where)
            return
        self.counts["captured"] += 1
        key = capture_key(*attempt)
        receipts = await self._receipts(key)
        masked = bool(metrics.get("mask_reasons"))
        if masked:
            await self._evidence(key, where)
        if receipts is None:
            self.counts["unverifiable"] += 1
            self._structure(row, where)
            return
        found = check_row_against_receipts(row, receipts)
        for breach in found:
            self.say(breach.kind, where, f"{breach.where}: {breach.message}")
        self._calls(metrics, receipts, where)
        self.counts["calls"] += len(receipts)
        if not found and not masked:
            self.counts["proven"] += 1
            self.counts["sampled_tokens"] += sum(receipt.gen_len for receipt in receipts)
            self.counts["delivered_tokens"] += metrics.get("generated_tokens_delivered", 0)

    async def _native(self, row: dict[str, Any], key: str, where: str) -> None:
        """A row of a captured attempt that delivery left alone: ids of the agent's own, or it was tampered with."""
        self._structure(row, where)
        receipts = await self._receipts(key)
        if receipts and not _carries_ids(row):
            message = f"{len(receipts)} calls are recorded, and the row has neither their ids nor _ng_token_capture"
            self.say("calls_unaccounted_for", where, message)
        elif receipts and not check_row_against_receipts(row, receipts):
            self.counts["proven"] += 1
        elif _carries_ids(row):
            self.counts["not_proven"] += 1
            self.notes.append(f"{where}: the row has token ids of the agent's own, which no recorded call bears out")

    def _structure(self, row: dict[str, Any], where: str) -> None:
        """What can be said without receipts: bundles whole, logprobs finite and aligned, prompts contiguous."""
        for breach in check_row_against_receipts(row, ()):
            if breach.kind in _STRUCTURAL:
                self.say(breach.kind, where, f"{breach.where}: {breach.message}")

    def _calls(self, metrics: Mapping[str, Any], receipts: Sequence[Receipt], where: str) -> None:
        """Every recorded call is counted by the row, and the row counts no other.

        Of a masked row the record may have grown since; of one with records set aside their tokens count nowhere.
        """
        said, generated = metrics.get("n_calls"), metrics.get("generated_tokens_captured")
        masked, aside = bool(metrics.get("mask_reasons")), bool(metrics.get("parent_link_failures"))
        if masked and said is None:
            return  # the capture could not be read when the row was written; the row says so
        held = len({receipt.model_call_id for receipt in receipts})
        held_tokens = sum(receipt.gen_len for receipt in receipts)
        fits = isinstance(said, int) and isinstance(generated, int) and said <= held and generated <= held_tokens
        exact = masked or (said == held and (aside or generated == held_tokens))
        if not (fits and exact):
            self.say(
                "calls_unaccounted_for",
                where,
                f"_ng_token_capture counts {said} calls with {generated} generated tokens, "
                f"the capture record has {held} with {held_tokens}",
            )

    async def _receipts(self, key: str) -> tuple[Receipt, ...] | None:
        """Receipts of a retired capture, or those that its kept entries would have; a copy says nothing more."""
        found: Sequence[Receipt] | None = None
        if isinstance(self._store, ReceiptSource):
            found = await self._store.receipts(key)
        if found is None:
            found = self._journal.receipts.get(key)
        info = self._captures.get(key)
        if found is None and info is not None and info.state != "retired" and isinstance(self._store, CaptureReader):
            found = receipts_of(await self._store.open_entries(key))
        return None if found is None else tuple(dict.fromkeys(found))

    async def _evidence(self, key: str, where: str) -> None:
        if not isinstance(self._store, CaptureLister):
            return
        info = self._captures.get(key)
        if info is None and isinstance(self._store, DiscardingStore) and await self._store.was_swept(key):
            return  # an explicit sweep: the row counts as unverifiable
        if info is None or info.state == "retired":
            self.say("evidence_missing", where, f"the row is masked by capture, but the record of {key} is gone")
        else:
            self.counts["kept_evidence"] += 1

    def _failure(self, row: dict[str, Any], where: str) -> None:
        if "reward" in row:
            self.say("reward_of_a_failure", where, "a failure row has a reward")

    # -- the whole ---------------------------------------------------------------------------------------------------

    def _missing_rows(self) -> None:
        for attempt, outcome in self._journal.outcomes.items():
            if attempt not in self._seen:
                message = f"the row of rollout {attempt[0]}, attempt {attempt[1]}, is gone (byte {outcome.offset})"
                self.say("deleted", f"{outcome.file}.jsonl", message)

    def _stray_captures(self) -> None:
        """Captures that no dispatch explains: calls that nobody accounts for."""
        owed = {capture_key(*attempt) for attempt in self._journal.dispatches}
        for key, info in self._captures.items():
            if not info.abandoned and key not in owed and info.entries:
                self.say("calls_unaccounted_for", key, f"{info.entries} recorded calls belong to no dispatched attempt")

    def _sessions(self) -> None:
        opened, closed = self._journal.opened, self._journal.closed
        self.counts["sessions"] = len(opened)
        if not closed:
            if opened:
                self.notes.append(f"{len(opened)} sessions were opened; the servers report no closes to the journal")
            return
        ended = {capture_key(*attempt) for attempt in self._journal.outcomes}
        cut_off = 0
        for session_id, line in opened.items():
            if session_id in closed:
                continue
            if line.key in ended:
                self.say("session_open", line.key, f"the {line.role} session {session_id} was never closed")
            else:
                cut_off += 1  # the run was killed under it: its lease ends it, and there is no row to vouch for
        if cut_off:
            self.notes.append(f"{cut_off} sessions of attempts without an outcome were open when the run ended")

    def _coverage(self) -> None:
        summary = summarise(self._dir)
        coverage = summary.coverage
        parts = {
            name: getattr(coverage, name) for name in ("expected", "measured", "masked", "failed", "omitted", "unknown")
        }
        self.counts.update(parts)
        if parts["expected"] != sum(parts.values()) - parts["expected"] or coverage.omitted < 0:
            told = ", ".join(f"{name} {value}" for name, value in parts.items())
            self.say("coverage", "manifest.json", f"the identity does not hold: {told}")
        if self._dir.summary.exists():
            for key in _differences(summary, self._dir.summary.read_bytes()):
                self.say("changed", "summary.json", f"{key} is not what the rows give")


def _carries_ids(row: Mapping[str, Any]) -> bool:
    """Whether a trainer would find sampled ids in the row's output, as an agent with ids of its own writes them."""
    response = row.get("response")
    return isinstance(response, dict) and is_native(response.get("output"))


def _attempt_of(row: Mapping[str, Any]) -> _Attempt | None:
    rollout_id, attempt = row.get("_ng_rollout_id"), row.get("_ng_attempt_index")
    if isinstance(rollout_id, str) and isinstance(attempt, int) and not isinstance(attempt, bool):
        return rollout_id, attempt
    return None


def _digest_as_written(value: Mapping[str, Any], data: bytes) -> str | None:
    """The digest that the row's value has in our own bytes; None where readers could disagree about the value."""
    try:
        json.loads(data, object_pairs_hook=_without_repeated_keys)
        return digest_bytes(encode_row(value))
    except ValueError:
        return None


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands in one object twice: some readers take the first, some the last")
    return found


def _differences(summary: Summary, stored: bytes) -> list[str]:
    """The top-level keys in which a stored summary differs from the one that the files give."""
    ours = msgspec.to_builtins(summary)
    try:
        theirs = msgspec.json.decode(stored)
    except msgspec.DecodeError as error:
        return [f"the file ({error})"]
    if not isinstance(theirs, dict):
        return ["the file"]
    ours = msgspec.json.decode(msgspec.json.encode(ours))
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))

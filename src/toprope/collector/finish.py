"""The end of an attempt: tokens attributed, the row durable, only then the capture retired.

    verdict -> check -> finalize -> row synced -> outcome journalled -> retire
    failure -------------------------> row synced -> outcome journalled     (its capture stays as evidence)

A rollout that its trainer gave up is a failure of kind `stale`, whatever its agent made of it. Whatever is wrong with
one verdict costs its row and nothing else. Left to others: what delivery makes of a capture (`capture.delivery`), what
a row may hold (`results.rows`), whether to try again (`schedule`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toprope.canonical.json import NotJson
from toprope.capture.bounds import is_callers, within
from toprope.capture.delivery import (
    Delivered,
    finalize_rollout_token_capture,
    masked_for_its_source,
    retire_redundant_capture,
    retire_rollout_token_capture,
    swap_into,
)
from toprope.capture.protocols import GIVEN_UP, CallJournal, ReceiptSource, TokenSource
from toprope.collector.request import Verdict
from toprope.collector.schedule import Attempt, uses_up_attempt
from toprope.collector.settings import CaptureSettings
from toprope.errors.kinds import Delivery, Kind, Stage
from toprope.results.ledger import Ledger
from toprope.results.rows import MASKED_BY, FailureRecord, Unstorable, check_bundles, check_verdict, result_row
from toprope.tokens.receipts import receipts_of
from toprope.tokens.snapshot import TokenCaptureSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A durable row. `failure` is set, and `reward` is not, where there is no verdict."""

    name: str
    reward: float | None = None
    failure: FailureRecord | None = None


class Finisher:
    """Writes the rows of a run. `source` None: no row is rebuilt. `warn` is told what the user should know."""

    def __init__(
        self,
        ledger: Ledger,
        source: TokenSource | None,
        capture: CaptureSettings,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._ledger = ledger
        self._source = source
        self._capture = capture
        self._warn = warn
        self._warned = False
        self.masks = MaskWatch(capture.max_mask_fraction, capture.mask_fraction_min_samples)

    async def finish(
        self, attempt: Attempt, came: Verdict | FailureRecord, *, captured: bool, doubt: str | None = None
    ) -> Outcome:
        """On return the attempt's row and its outcome survive a power cut. Raises only if the ledger cannot write.

        `doubt`: why the capture may hold what an earlier run left; then it is not read and the row is masked.
        """
        if isinstance(came, FailureRecord):
            stale = captured and doubt is None and await self._was_given_up(attempt.key)
            return await self._failed(attempt, _stale(came) if stale else came)
        verdict = came.fields
        try:
            check_verdict(verdict)
            row = result_row(attempt.identity, verdict)
            frozen: list[TokenCaptureSnapshot] = []
            delivered = await self._finalize(row, doubt, frozen.append) if captured else None
            if any(GIVEN_UP in snapshot.reasons for snapshot in frozen):
                return await self._failed(attempt, _stale(verdict))
            if delivered is not None:
                row = _rebuilt(row, delivered)
            check_bundles(row.get("response"))
            await self._ledger.result(attempt.identity, row)
        except (Unstorable, NotJson) as error:
            return await self._failed(attempt, _unstorable(error, verdict))
        if captured and self._source is not None:
            await self._retire(attempt.key, self._source, delivered, frozen)
        if delivered is not None:
            self.masks.add(delivered)
            self._warn_of_raw_logprobs(delivered)
        masked = bool(row["mask_sample"])
        return Outcome("masked" if masked else "measured", None if masked else float(verdict["reward"]))

    async def _failed(self, attempt: Attempt, failure: FailureRecord) -> Outcome:
        if attempt.number == 0 or failure.terminal:
            log.warning("rollout %s: %s in stage %s: %s", attempt.key, failure.kind, failure.stage, failure.reason)
        await self._ledger.failure(attempt.identity, failure, counts=uses_up_attempt(failure))
        return Outcome("failed", failure=failure)

    async def _was_given_up(self, key: str) -> bool:
        """Whether the capture of a failed attempt says so; it is read without freezing it."""
        if not isinstance(self._source, CallJournal):
            return False
        try:
            begun = await within(self._capture.source_timeout_s, self._source.begun_calls(key), "begun_calls")
        except (Exception, asyncio.CancelledError) as error:  # the failure is known and is written down as it came
            if is_callers(error):
                raise
            log.warning("capture of %s: not read: %s: %s", key, type(error).__name__, error)
            return False
        return any(call.abort == GIVEN_UP for call in begun)

    async def _finalize(
        self, row: Mapping[str, Any], doubt: str | None, keep: Callable[[TokenCaptureSnapshot], None]
    ) -> Delivered | None:
        """What delivery makes of the row's capture; None for a row with token ids of the agent's own."""
        if self._source is None:
            return None
        if doubt is not None:
            return masked_for_its_source(row, doubt)
        # A row with a verdict is no failure row, whatever the environment calls its reward: its tokens are delivered.
        graded = {name: value for name, value in row.items() if name != "failure_kind"}
        return await finalize_rollout_token_capture(
            graded,
            self._source,
            settle_s=self._capture.settle_s,
            format=self._capture.format,
            deliver=self._capture.deliver,
            timeout_s=self._capture.source_timeout_s,
            on_snapshot=keep,
        )

    def _warn_of_raw_logprobs(self, delivered: Delivered) -> None:
        """Say once that the captured logprobs are not those of the policy that sampled."""
        differ = delivered["metrics"].get("raw_logprobs_differ")
        if differ and not self._warned:
            self._warned = True
            self._warn(
                f"The captured logprobs are raw, and {', '.join(differ)} make the policy that sampled another one: "
                "ratios made from them are biased. Sample with temperature 1, top_p 1 and no top_k, or let the engine "
                "return processed logprobs."
            )

    async def _retire(
        self, key: str, source: TokenSource, delivered: Delivered | None, frozen: Sequence[TokenCaptureSnapshot]
    ) -> None:
        """Let go of a capture whose row is durable. What goes wrong here keeps the evidence and fails nothing.

        A source that keeps no receipts gets them journalled first, of the snapshot that the row was made from.
        """
        if delivered is not None and delivered["mask_sample"]:
            return
        bound = self._capture.source_timeout_s
        try:
            if delivered is None:
                retired = await retire_redundant_capture(key, source, timeout_s=bound)
            else:
                if self._capture.journal_receipts or not isinstance(source, ReceiptSource):
                    for snapshot in frozen:
                        receipts = receipts_of(snapshot.entries)
                        await self._ledger.receipts(key, snapshot.snapshot_id, snapshot.version, receipts)
                retired = await retire_rollout_token_capture(key, source, delivered, timeout_s=bound)
            if not retired:
                log.warning("rollout %s: its capture was not retired and stays as evidence", key)
        except (Exception, asyncio.CancelledError) as error:  # delivered; what stays is listed by `capture ls`
            if is_callers(error):
                raise
            log.exception("rollout %s: retiring its capture failed; it stays as evidence", key)


class MaskWatch:
    """Whether capture masks more rows than `limit` allows, once `min_samples` rows were finalised."""

    def __init__(self, limit: float | None, min_samples: int) -> None:
        self._limit = limit
        self._min_samples = min_samples
        self._finalised = 0
        self._masked = 0
        self._reasons: Counter[str] = Counter()

    def add(self, delivered: Mapping[str, Any]) -> None:
        """Count one finalised row, which is on disk."""
        self._finalised += 1
        if delivered.get("mask_sample"):
            self._masked += 1
            self._reasons.update({str(reason).partition(":")[0] for reason in _reasons(delivered)})

    def verdict(self) -> str | None:
        """Why the run must stop, or None."""
        if self._limit is None or self._finalised < max(1, self._min_samples):
            return None
        share = self._masked / self._finalised
        if share <= self._limit:
            return None
        named = ", ".join(f"{reason} ({count})" for reason, count in self._reasons.most_common())
        return (
            f"{self._masked} of {self._finalised} captured rollouts are masked ({share:.0%}), more than "
            f"token_id_capture.max_mask_fraction allows ({self._limit:.0%}); reasons: {named}."
        )


def _rebuilt(row: Mapping[str, Any], delivered: Delivered) -> dict[str, Any]:
    out = swap_into(row, delivered)
    if delivered["mask_sample"]:
        out[MASKED_BY] = [*row.get(MASKED_BY, ()), "capture"]
    if "error" in delivered:
        out["_ng_token_capture"] = {**delivered["metrics"], "error": delivered["error"]}
    return out


def _reasons(delivered: Mapping[str, Any]) -> list[Any]:
    return list((delivered.get("metrics") or {}).get("mask_reasons") or ())


def _stale(came: Mapping[str, Any] | FailureRecord) -> FailureRecord:
    """The failure of a rollout that was given up: another attempt would meet the same weights."""
    reason = "its trainer gave this rollout up (stale); what it had done stays as evidence"
    if isinstance(came, FailureRecord):
        if came.kind == Kind.STALE:
            return came
        return replace(came, kind=Kind.STALE, reason=f"{reason}. It ended as {came.kind}: {came.reason}", terminal=True)
    response = came.get("response")
    return FailureRecord(
        kind=Kind.STALE,
        stage=Stage.AGENT,
        reason=reason,
        terminal=True,
        delivery=Delivery.DELIVERED,
        env_session_id=_text(came.get("env_session_id")),
        partial_response=response if isinstance(response, dict) else None,
    )


def _unstorable(error: Unstorable | NotJson, verdict: Mapping[str, Any]) -> FailureRecord:
    """The failure that stands for a verdict no row can hold."""
    bad_reward = isinstance(error, Unstorable) and error.field == "reward"
    response = verdict.get("response")
    return FailureRecord(
        kind=Kind.BAD_REWARD if bad_reward else Kind.BAD_REPLY,
        stage=Stage.VERIFICATION,
        reason=f"the verdict cannot be stored: {error}",
        terminal=True,
        delivery=Delivery.DELIVERED,
        env_session_id=_text(verdict.get("env_session_id")),
        partial_response=response if isinstance(response, dict) else None,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None

"""The recorder: what stands between a model server and custody.

`begin` before a call goes upstream, then one of `record`, `abort`, `incomplete`; each is awaited, and what it promised
is durable when it returns. It decides each call's parent from an index of the rollout's recorded calls, which is fed by
its own puts and, where another process may have written, by the store. Left to others: what is judged bad (`evidence`),
how parents are found (`tokens.lineage`), durability (the sink).

A call joins the index when its put is handed to the sink, in the same step in which its parent was decided: parallel
calls of one rollout see each other without waiting for each other's device sync. A put that then fails marks the
rollout, so nothing can be built on the hole.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from toprope.capture.beginnings import Beginnings
from toprope.capture.bounds import is_callers
from toprope.capture.evidence import CallEvidence as CallEvidence
from toprope.capture.evidence import judged, record_of
from toprope.capture.known_rollout import Rollout, place_of
from toprope.capture.protocols import (
    AbortingSink,
    CallJournal,
    CaptureReader,
    EntryConflict,
    Intent,
    JournalledCall,
    PutAck,
    TokenSink,
    own_verb,
)
from toprope.errors.tree import CaptureClosed, CaptureError, ConfigError
from toprope.tokens.entry import BadRecord, TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.lifecycle import typed_reason
from toprope.tokens.lineage import (
    DEFERRED,
    DEFERRED_ALL_TOLD,
    ParentChoice,
    decide_asked,
)
from toprope.tokens.sampled import SampledTokens

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_ROLLOUTS = 16_384
"""Rollouts in the index: several times what one process runs at once; an empty one is about 3 KB."""

_NOTHING_SAMPLED = ("replay_of:", "waited_for:", "not_sent")
"""Aborts of calls that never went upstream: no part of a turn of theirs can stand in a later request."""

OnCaptureError = Literal["mask", "fail"]

_WHATEVER = (Exception, asyncio.CancelledError)
"""What a sink or reader may raise: also a cancellation of its own, which must not pass for that of the call."""


class Recorder:
    """Records the captured calls of one process into `sink`, on one event loop.

    `reader` reads the same custody; without it every decision is left to the builder and prompts are stored whole.
    `on_capture_error`: `mask` (a call never fails for its record, its rollout is masked) or `fail` (it raises
    `CaptureError`). `max_ids` bounds the memory of the index, in token ids over all rollouts. `notes` says in plain
    sentences what this sink cannot do, for the start-up log; `forget_listeners` are told the keys that ended, as far as
    this process learns of it. Raises `ConfigError` for a sink that cannot say that a call was lost. Closes nothing that
    it was given.
    """

    def __init__(
        self,
        sink: TokenSink,
        *,
        reader: CaptureReader | None = None,
        on_capture_error: OnCaptureError = "mask",
        writer_epoch: str | None = None,
        max_ids: int = 16_000_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for verb in ("put", "mark_incomplete"):
            if own_verb(sink, verb) is None:
                raise ConfigError(
                    f"capture sink {type(sink).__name__} has no {verb} of its own: without it a lost call could not be "
                    "told from one that never was. A sink needs async put(entry) and mark_incomplete(rollout_id, "
                    "model_call_id); what it inherits from a protocol does nothing."
                )
        if on_capture_error not in ("mask", "fail"):
            raise ConfigError(f"on_capture_error {on_capture_error!r}: expected 'mask' or 'fail'")
        self._sink = sink
        self._reader = reader
        self._strict = on_capture_error == "fail"
        self.writer_epoch = writer_epoch or f"{time.time_ns():x}-{secrets.token_hex(8)}"
        self._max_ids = max_ids
        self._clock = clock
        self._begin = own_verb(sink, "begin_call")
        self._begin_takes_intent = self._begin is not None and _accepts(self._begin, "intent")
        self._mark_takes_reason = _accepts(sink.mark_incomplete, "reason")
        self._aborting = sink if isinstance(sink, AbortingSink) else None
        # A begun call without a record then leaves an open intent, whose rollout is masked: none is lost unseen.
        self._all_told = self._begin is not None and self._aborting is None
        self._journal = reader if isinstance(reader, CallJournal) and self._begin_takes_intent else None
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()
        self._beginnings = Beginnings()
        self._ids = 0
        self._running: set[asyncio.Task[None]] = set()
        self.forget_listeners: list[Callable[[str], None]] = []
        self._listeners: list[Callable[[str], None]] | None = getattr(sink, "freeze_listeners", None)
        if self._listeners is not None:
            self._listeners.append(self.forget)
        self.notes = tuple(self._limits())
        for note in self.notes:
            log.info("capture: %s", note)

    # -- verbs ------------------------------------------------------------------------------------------------------

    async def begin(self, key: str, call_id: str, *, intent: Intent | None = None) -> None:
        """On return the call's intent is durable. Raises `CaptureClosed` for a key that is frozen, retired or fenced,
        `CaptureError` where the sink fails; the call must then not go upstream."""
        if self._begin is None:
            return
        told: dict[str, Any] = {}
        if self._begin_takes_intent:
            told["intent"] = replace(intent or Intent(), writer_epoch=self.writer_epoch)
        known = self._rollouts.get(key)
        held = known.told if known is not None else (0, 0)
        try:
            ack = await self._begin(key, call_id, **told)
        except CaptureClosed:
            self.forget(key)
            raise
        except _WHATEVER as error:
            if is_callers(error):
                raise
            raise CaptureError(f"call {call_id} of {key}: its intent could not be written ({_said(error)})") from error
        if self._reader is not None:
            if known is not None and known is self._rollouts.get(key) and known.is_outlived(ack, held):
                self.forget(key)
                held = (0, 0)
            # What this recorder forgot may have been made new since: only the very first call has its place then.
            place = place_of(ack, held) if key in self._rollouts else int(place_of(ack, held) == 1)
            self._rollout(key).learn_from_begin(ack)
            self._beginnings.began(key, call_id, place, stream=intent is None or intent.stream)

    async def record(self, call: CallEvidence) -> None:
        """On return the call is durable, or its rollout is durably marked incomplete and the reason is in the log.

        Goes on when its caller is cancelled. Raises nothing, except `CaptureError` with `on_capture_error="fail"`.
        """
        await self._whatever_happens(self._record(call))

    async def abort(
        self, key: str, call_id: str, reason: str, *, request_items: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """On return the intent is closed where the sink can do that; else it stays dangling and masks the rollout.

        `request_items` keep a first call that begins with shown model turns trainable after a clean retry. Raises
        nothing; goes on when its caller is cancelled.
        """
        await self._whatever_happens(self._abort(key, call_id, reason, request_items))

    async def incomplete(self, key: str, call_id: str, reason: str) -> None:
        """On return the loss is durable; `reason` is a typed reason, a detail after a colon. Raises as `record`."""
        await self._whatever_happens(self._lose(key, call_id, reason, reason))

    async def journal(self, key: str) -> tuple[JournalledCall, ...]:
        """The calls of `key` that were begun, in order, by whichever process; nothing where that cannot be read."""
        return await _read(self._journal.begun_calls(key)) if self._journal is not None else ()

    async def recorded(self, key: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The durable entries of `key` after the first `since`; nothing where they cannot be read."""
        return await _read(self._reader.open_entries(key, since)) if self._reader is not None else ()

    @property
    def readable(self) -> bool:
        """Whether `recorded` tells anything."""
        return self._reader is not None

    def shares(self, key: str) -> bool:
        """Whether another process wrote to `key`, as far as the last `begin` or `record` of it could tell."""
        rollout = self._rollouts.get(key)
        return rollout is not None and rollout.shared

    def forget(self, key: str) -> None:
        """Let go of the memory of a rollout that ended, here and with those who listen."""
        self._let_go(key)
        self._beginnings.outlived(key)
        for listener in self.forget_listeners:
            listener(key)

    def _let_go(self, key: str) -> None:
        rollout = self._rollouts.pop(key, None)
        if rollout is not None:
            self._ids -= rollout.size

    async def close(self) -> None:
        """On return every record, abort and mark that was begun has ended. The sink stays open: it is the caller's."""
        while self._running:
            await asyncio.wait(self._running)
        if self._listeners is not None and self.forget in self._listeners:
            self._listeners.remove(self.forget)

    # -- one call ---------------------------------------------------------------------------------------------------

    async def _record(self, call: CallEvidence) -> None:
        try:
            tokens = judged(call)
            entry = await self._decided(call, tokens)
        except BadRecord as fault:
            self._note_unrecorded(call.key, call.call_id, call.request_items)
            await self._lose(call.key, call.call_id, fault.reason, str(fault))
            return
        except _WHATEVER as error:  # a fault of ours must not fail the agent's call
            if is_callers(error):
                raise
            log.exception("capture: call %s of %s could not be made into a record", call.call_id, call.key)
            await self._lose(call.key, call.call_id, "write_failed", _said(error))
            return
        try:
            ack = await self._sink.put(entry)
        except CaptureClosed as error:
            self.forget(call.key)
            if call.client_gone:
                log.info(
                    "capture: call %s of %s ended after its client and its capture: %s", call.call_id, call.key, error
                )
                return
            await self._lose(call.key, call.call_id, "write_failed", str(error))
        except EntryConflict as error:
            log.error("capture: %s; the rollout is marked", error)
            if self._strict:
                raise
        except BadRecord as fault:
            await self._lose(call.key, call.call_id, fault.reason, str(fault))
        except _WHATEVER as error:  # whatever a sink raises, the loss is said
            if is_callers(error):
                raise
            await self._lose(call.key, call.call_id, "write_failed", _said(error))
        else:
            if isinstance(ack, PutAck) and call.key in self._rollouts:
                rollout = self._rollouts[call.key]
                rollout.shared |= ack.entries > rollout.entries + 1
                rollout.entries = max(rollout.entries, ack.entries)

    async def _decided(self, call: CallEvidence, tokens: SampledTokens) -> TokenEntry:
        """The record with its parent; it is in the index on return."""
        if self._reader is None:
            return self._deferred(call, tokens)
        rollout = self._rollout(call.key)
        if rollout.shared:
            try:
                await self._read_others(call.key, rollout)
            except _WHATEVER as error:  # blind is not lost: the builder decides with everything before it
                if is_callers(error):
                    raise
                log.exception("capture: %s: recorded calls could not be read", call.key)
                return self._deferred(call, tokens)
        # From here to the end nothing is awaited: a parallel call sees either none of this or all.
        asked = call.asked if call.asked is not None else rollout.history.asked_by(call.request_items)
        choice = decide_asked(
            rollout.history,
            asked,
            tokens.prompt_token_ids,
            continues=call.continues,
            items=call.request_items,
            before_any_reply=asked.count > 0 and self._beginnings.before_any_reply(call.key, call.call_id),
        )
        chain = choice.prompt_hash.extend(tokens.generation_token_ids)
        entry = record_of(call, rollout.laid_out(call.call_id, choice, tokens), choice, chain, self._clock())
        rollout.history.add(entry, choice.asked, chain=chain, beginning=choice.beginning)
        self._beginnings.recorded(call.key, call.call_id, choice.doubtful)
        self._grow(
            call.key, rollout, len(tokens.prompt_token_ids) - choice.suffix_start + len(entry.generation_log_probs)
        )
        return entry

    def _deferred(self, call: CallEvidence, tokens: SampledTokens) -> TokenEntry:
        self._beginnings.recorded(call.key, call.call_id)
        choice = ParentChoice(
            decision="unresolved",
            parent_call_id=None,
            reason=DEFERRED_ALL_TOLD if self._all_told else DEFERRED,
            prompt_hash=ChainHash.of(tokens.prompt_token_ids),
            item_digests=call.marks(),
        )
        chain = choice.prompt_hash.extend(tokens.generation_token_ids)
        return record_of(call, tokens, choice, chain, self._clock())

    async def _abort(self, key: str, call_id: str, reason: str, items: Sequence[Mapping[str, Any]]) -> None:
        if reason.startswith(_NOTHING_SAMPLED):
            self._beginnings.recorded(key, call_id)  # nothing of it can stand anywhere
        elif self._note_unrecorded(key, call_id, items) and not await self._mark(
            key, call_id, "unobserved_path:a recorded call may hold what this one said"
        ):
            return  # its open intent is what is left to say it
        if self._aborting is None:
            return
        try:
            await self._aborting.abort_call(key, call_id, reason=reason)
        except CaptureClosed as error:
            log.info("capture: abort of call %s (%s): %s", call_id, reason, error)
        except _WHATEVER as error:  # the intent stays open and will count as lost
            if is_callers(error):
                raise
            log.exception("capture: call %s of %s could not be aborted (%s)", call_id, key, reason)

    async def _lose(self, key: str, call_id: str, reason: str, detail: str) -> None:
        log.warning("capture: call %s of %s is not on record (%s): %s", call_id or "-", key, reason, detail)
        self._beginnings.lost(key, call_id)
        if await self._mark(key, call_id, reason) and call_id and self._aborting is not None:
            # Said durably: nobody need wait for this call any more.
            await self._abort(key, call_id, f"lost:{reason.partition(':')[0]}", ())
        if self._strict:
            raise CaptureError(f"call {call_id} of {key} could not be recorded ({reason}): {detail}")

    async def _mark(self, key: str, call_id: str, reason: str) -> bool:
        """Whether the rollout is durably marked on return."""
        try:
            if self._mark_takes_reason:
                await self._sink.mark_incomplete(key, call_id, reason=typed_reason(reason, call_id))  # type: ignore[call-arg]
            else:
                await self._sink.mark_incomplete(key, call_id)
        except CaptureClosed as error:
            log.warning("capture: the loss of call %s came after delivery: %s", call_id, error)
        except _WHATEVER as error:  # the open intent is what is left to say it
            if is_callers(error):
                raise
            log.exception("capture: %s could not be marked incomplete; its open intent has to mask it", key)
        else:
            return True
        return False

    # -- the index --------------------------------------------------------------------------------------------------

    def _rollout(self, key: str) -> Rollout:
        rollout = self._rollouts.get(key)
        if rollout is None:
            rollout = self._rollouts[key] = Rollout(all_told=self._all_told)
            if len(self._rollouts) > _MAX_ROLLOUTS:
                self._let_go(next(iter(self._rollouts)))
        self._rollouts.move_to_end(key)
        return rollout

    async def _read_others(self, key: str, rollout: Rollout) -> None:
        assert self._reader is not None
        async with rollout.lock:
            found = await self._reader.open_entries(key, rollout.synced)
            for entry in found:
                if entry.model_call_id not in rollout.history and not entry.prompt_is_delta:
                    rollout.history.add(entry)
                    self._grow(key, rollout, len(entry.generation_token_ids))
            rollout.synced += len(found)

    def _note_unrecorded(self, key: str, call_id: str, items: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a recorded call may hold what this one said."""
        if self._reader is None:
            return False
        self._rollout(key).history.note_unrecorded(items)
        return self._beginnings.lost(key, call_id, items)

    def _grow(self, key: str, rollout: Rollout, ids: int) -> None:
        if self._rollouts.get(key) is not rollout:
            return  # forgotten meanwhile
        rollout.size += ids
        self._ids += ids
        while self._ids > self._max_ids and len(self._rollouts) > 1:
            self._let_go(next(iter(self._rollouts)))

    async def _whatever_happens(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    def _limits(self) -> list[str]:
        name, limits = type(self._sink).__name__, []
        if getattr(self._sink, "durable", True) is False:
            limits.append(f"{name} keeps captures in memory: nothing survives this process")
        if self._begin is None:
            limits.append(f"{name} has no begin_call: a call whose server dies before its put leaves no trace")
        elif not self._begin_takes_intent:
            limits.append(f"{name} takes no intent: a dead writer's calls stay open and mask their rollouts")
        if self._aborting is None:
            limits.append(f"{name} has no abort_call: a call that failed upstream masks its rollout")
        if self._reader is None:
            limits.append(f"{name} cannot be read while open: prompts are stored whole, parents are found at freeze")
            if not self._all_told:
                limits.append(
                    f"{name} does not tell at freeze which calls were aborted: a rollout whose first request holds "
                    "assistant turns (shown examples) is masked, since they may be what a lost call said"
                )
        elif self._journal is None:
            limits.append(f"{name} keeps no journal that can be read: retries of clients are sampled again")
        return limits


async def _read(work: Awaitable[T]) -> T:
    """What a reader answers; a cancellation of its own is `CaptureError`: nobody takes it for that of the call."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if is_callers(error):
            raise
        raise CaptureError("the capture store broke off while it was read") from error


def _said(error: BaseException) -> str:
    """An error with its kind; `repr` leaves out the file of an `OSError`."""
    return f"{type(error).__name__}: {error}"


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

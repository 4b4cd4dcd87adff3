"""`MemoryStore`: custody without a disk, for tests and tiny runs. Says so: nothing survives the process.

The same verbs and the same `step` as every other store; also the plainest reading of what they mean.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from toprope.capture.fence import Fence, fence_key
from toprope.capture.packing import pack
from toprope.capture.prompts import PromptArena
from toprope.capture.protocols import (
    BeginAck,
    CaptureInfo,
    EntryConflict,
    Intent,
    JournalledCall,
    PutAck,
    check_ids,
    closed,
)
from toprope.capture.settling import Changes, InFlight, wait_settled
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import (
    Abort,
    Begin,
    Call,
    Drop,
    Event,
    Freeze,
    Head,
    Mark,
    Phase,
    Put,
    Step,
    Supersede,
    Sweep,
    Verdict,
    snapshot_reasons,
    step,
    typed_reason,
)
from toprope.tokens.receipts import receipts_of
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot


@dataclass(slots=True)
class _Capture:
    """Everything under one key. `replayed`: calls whose client came back and got the recorded reply."""

    head: Head = field(default_factory=Head)
    created: float = 0.0
    retired: float | None = None
    abandoned: bool = False
    calls: dict[str, Call] = field(default_factory=dict)
    intents: dict[str, Intent] = field(default_factory=dict)
    entries: dict[str, TokenEntry] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)
    replayed: set[str] = field(default_factory=set)
    receipts: tuple[Receipt, ...] | None = None

    def all_reasons(self) -> tuple[str, ...]:
        return snapshot_reasons(self.reasons, (call.abort for call in self.calls.values()))


class MemoryStore:
    """Sink, source, reader, and every optional verb, in this process only. Safe to use from several event loops.

    Every verb raises `RuntimeError` once it is closed, and `CaptureError` for a call id or key that is no Unicode text.
    """

    durable = False

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._captures: dict[str, _Capture] = {}
        self._fences: dict[str, Fence] = {}
        self._changes = Changes()
        self._closed = False
        self.freeze_listeners: list[Callable[[str], None]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> BeginAck:
        """Once it returns the intent stands. Raises `CaptureClosed` on a frozen, retired or fenced key."""
        with self._guard:
            capture, done = self._happen(rollout_id, model_call_id, Begin())
            if done.verdict is Verdict.DONE:
                capture.intents[model_call_id] = intent or Intent()
            return BeginAck(capture.head.calls, capture.head.entries)

    async def put(self, entry: TokenEntry) -> PutAck:
        """Once it returns the entry stands. Raises `CaptureClosed`, or `EntryConflict` for other bytes."""
        key, call_id = entry.rollout_id, entry.model_call_id
        with self._guard:
            data = pack(entry)  # refuses what no store could keep
            there = self._captures[key].entries.get(call_id) if key in self._captures else None
            same = there is not None and pack(there) == data
            capture, done = self._happen(key, call_id, Put(call_id, same))
            if done.verdict is Verdict.CONFLICT:
                raise EntryConflict(f"call {call_id!r} of {key!r} is recorded with other content")
            if done.verdict is Verdict.DONE:
                capture.entries[call_id] = entry
                self._changes.tell(key)
            return PutAck(capture.head.version, capture.head.entries)

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        """Once it returns the intent is closed. Raises `CaptureClosed` on a retired or fenced key."""
        with self._guard:
            open_before = self._phase(rollout_id) is not Phase.FROZEN
            capture, done = self._happen(rollout_id, model_call_id, Abort(reason))
            if done.verdict is Verdict.DONE and open_before and reason.startswith("replay_of:"):
                capture.replayed.add(reason.removeprefix("replay_of:"))
            self._changes.tell(rollout_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
        """Once it returns the rollout is known to lack a call. Raises `CaptureClosed` on a retired or fenced key."""
        with self._guard:
            self._happen(rollout_id, None, Mark(typed_reason(reason, model_call_id)))

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        """Once it returns no intent is open (True), or `timeout_s` seconds are over (False). Every writer lives."""

        async def ask() -> InFlight:
            with self._guard:
                capture = self._captures.get(rollout_id)
                flying = capture is not None and capture.head.phase is Phase.OPEN
                return InFlight(ours=capture.head.open_intents if capture is not None and flying else 0)

        return await wait_settled(self._changes, rollout_id, ask, timeout_s)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Once it returns the set of entries is final. Raises `CaptureClosed` on a retired or fenced key."""
        with self._guard:
            capture = self._captures.get(rollout_id)
            calls = capture.calls if capture is not None else {}
            dangling = tuple(call_id for call_id, call in calls.items() if call.open)
            capture, _ = self._happen(rollout_id, None, Freeze(secrets.token_hex(16), dangling))
            head = capture.head
            for listener in self.freeze_listeners:
                listener(rollout_id)
            assert head.snapshot_id is not None
            entries = tuple(
                replace(entry, client_gone=False) if entry.client_gone and call_id in capture.replayed else entry
                for call_id, entry in capture.entries.items()
            )
            return TokenCaptureSnapshot(
                rollout_id, entries, head.incomplete, head.snapshot_id, head.version, capture.all_reasons()
            )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """True once the payload is gone and a tombstone with receipts stands; False for a stale pair."""
        with self._guard:
            before = self._phase(rollout_id)
            capture, done = self._happen(rollout_id, None, Drop(snapshot_id, version))
            if done.verdict is Verdict.DONE and before is Phase.FROZEN:
                capture.receipts = receipts_of(tuple(capture.entries.values()))
                capture.retired = self._clock()
                for part in (capture.calls, capture.intents, capture.entries, capture.replayed):
                    part.clear()
            return done.verdict in (Verdict.DONE, Verdict.NOTHING)

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        """The receipts of a retired rollout in call order; None if it is not retired."""
        with self._guard:
            capture = self._captures.get(rollout_id)
            return capture.receipts if capture is not None else None

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The entries after the first `since`, in order of arrival, with whole prompts."""
        with self._guard:
            capture = self._captures.get(rollout_id)
            return _with_whole_prompts(tuple(capture.entries.values()))[since:] if capture is not None else ()

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        """Every call that was begun, in order."""
        with self._guard:
            capture = self._captures.get(rollout_id)
            if capture is None:
                return ()
            calls = [(call_id, intent, capture.calls[call_id]) for call_id, intent in capture.intents.items()]
            return tuple(JournalledCall(call_id, intent, call.put, call.abort) for call_id, intent, call in calls)

    async def supersede(self, rollout_id: str) -> str | None:
        """Once it returns the key is new; what stood there is `<key>~<n>`, whose name is returned."""
        with self._guard:
            before = self._captures.get(rollout_id)
            head = before.head if before is not None else Head(phase=self._phase(rollout_id))
            done = step(head, Call(), Supersede())
            if done.verdict is Verdict.DONE:
                rollout, attempt = fence_key(rollout_id)
                self._fences[rollout] = Fence(attempt, -1)
            if before is None:
                return None
            taken = [key.rpartition("~")[2] for key in self._captures if key.startswith(f"{rollout_id}~")]
            name = f"{rollout_id}~{1 + max((int(n) for n in taken if n.isdigit()), default=0)}"
            before.abandoned = True
            self._captures[name] = self._captures.pop(rollout_id)
            for listener in self.freeze_listeners:
                listener(rollout_id)
            return name

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        """Every capture that is not retired, oldest first; with `retired` tombstones too."""
        with self._guard:
            now = self._clock()
            found = sorted(self._captures.items(), key=lambda item: item[1].created)
            return tuple(_info(k, c, now) for k, c in found if retired or c.head.phase is not Phase.RETIRED)

    async def sweep_retired(self, older_than: float) -> int:
        """Once it returns the tombstones older than `older_than` seconds are gone; the fence stays."""
        with self._guard:
            limit = self._clock() - older_than
            old = [k for k, c in self._captures.items() if c.retired is not None and c.retired <= limit]
            for key in old:
                capture = self._captures[key]
                if step(capture.head, Call(), Sweep()).verdict is Verdict.DONE:
                    del self._captures[key]
                    if not capture.abandoned:
                        rollout, attempt = fence_key(key)
                        self._fences[rollout] = self._fences.get(rollout, Fence()).swept_to(attempt)
            return len(old)

    async def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Nothing goes: every writer of this store is alive, and all of it goes with the process."""
        return ()

    async def was_swept(self, rollout_id: str) -> bool:
        """Whether this key, or that of a later attempt, was swept."""
        with self._guard:
            rollout, attempt = fence_key(rollout_id)
            return attempt <= self._fences.get(rollout, Fence()).swept

    async def close(self) -> None:
        """Once it returns no verb is served any more; what was kept is gone with the store."""
        self._closed = True

    def _phase(self, key: str) -> Phase:
        if key in self._captures:
            return self._captures[key].head.phase
        rollout, attempt = fence_key(key)
        return Phase.FENCED if self._fences.get(rollout, Fence()).keeps_out(attempt) else Phase.ABSENT

    def _happen(self, key: str, call_id: str | None, event: Event) -> tuple[_Capture, Step]:
        if self._closed:
            raise RuntimeError("the capture store is closed")
        check_ids(event.verb, key, call_id or "")
        capture = self._captures.get(key) or _Capture(Head(phase=self._phase(key)), created=self._clock())
        call = capture.calls.get(call_id, Call()) if call_id is not None else Call()
        done = step(capture.head, call, event)
        if done.verdict is Verdict.REFUSED:
            raise closed(key, capture.head.phase, event.verb)
        if done.verdict in (Verdict.DONE, Verdict.CONFLICT):
            if key not in self._captures:
                rollout, attempt = fence_key(key)
                self._fences[rollout] = self._fences.get(rollout, Fence()).seen_up_to(attempt)
                self._captures[key] = capture
            capture.head = done.head
            if call_id is not None:
                capture.calls[call_id] = done.call
            capture.reasons.update(dict.fromkeys(done.reasons))
        return capture, done


def _with_whole_prompts(entries: tuple[TokenEntry, ...]) -> tuple[TokenEntry, ...]:
    arena, whole = PromptArena(), []
    for entry in entries:
        parent = entry.parent_call_id if entry.prompt_is_delta else None
        if parent is not None and parent not in arena:
            whole.append(entry)  # its parent was put elsewhere: there is no more of it
            continue
        prompt = arena.place(entry.model_call_id, parent, entry.prompt_token_ids, entry.generation_token_ids)
        whole.append(replace(entry, prompt_token_ids=prompt, prompt_is_delta=False) if parent is not None else entry)
    return tuple(whole)


def _info(key: str, capture: _Capture, now: float) -> CaptureInfo:
    head = capture.head
    aborts = Counter(call.abort for call in capture.calls.values() if call.abort is not None)
    open_calls = [call_id for call_id, call in capture.calls.items() if call.open]
    return CaptureInfo(
        rollout_id=key,
        state=head.phase,
        age_s=max(0.0, now - capture.created),
        calls=head.calls,
        entries=head.entries,
        open_intents=head.open_intents,
        incomplete=head.incomplete,
        version=head.version,
        snapshot_id=head.snapshot_id,
        reasons=capture.all_reasons(),
        aborts=tuple(sorted(aborts.items())),
        writer_epochs=tuple(sorted({capture.intents[call_id].writer_epoch for call_id in open_calls})),
        abandoned=capture.abandoned,
        writer="live" if head.phase is not Phase.RETIRED else None,
    )

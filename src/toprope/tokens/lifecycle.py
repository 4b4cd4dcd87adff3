"""The life of one rollout's captured tokens. Pure: no clock, no files, no awaits.

    ABSENT -> OPEN -> FROZEN -> RETIRED -> swept (FENCED)

`TABLE` says for every verb and phase how a store reacts; `step` carries a reaction out on the part of the state that a
verb can touch: the head of the key and the one call it names. A pair that is not in the table is refused. Every store
obeys this one function; where the parts are kept, and what is in an entry, is the store's affair.

Two things stand beside the phase. `version` moves with every change that a reader of a frozen capture could miss, so
that a drop with an old pair cannot erase it. `incomplete` is sticky: once a call is known to be lost, nothing makes the
rollout whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from toprope.tokens.snapshot import INCOMPLETE_REASONS


class Phase(StrEnum):
    """Where a key stands. FENCED: nothing stands there, and nothing may: it was swept, or a later attempt began."""

    ABSENT = "absent"
    OPEN = "open"
    FROZEN = "frozen"
    RETIRED = "retired"
    FENCED = "fenced"


class Verb(StrEnum):
    """What can happen to a key."""

    BEGIN = "begin_call"
    PUT = "put"
    ABORT = "abort_call"
    MARK = "mark_incomplete"
    FREEZE = "freeze"
    DROP = "drop"
    SUPERSEDE = "supersede"
    SWEEP = "sweep_retired"


class Verdict(StrEnum):
    """What became of an event. Only DONE and CONFLICT change anything that must be written down."""

    DONE = "done"
    NOTHING = "nothing"
    CONFLICT = "conflict"
    STALE = "stale"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Head:
    """What is true of a key as a whole. `entries` and `open_intents` are counts."""

    phase: Phase = Phase.ABSENT
    version: int = 0
    snapshot_id: str | None = None
    incomplete: bool = False
    calls: int = 0
    entries: int = 0
    open_intents: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """What is true of one call of a key: an intent was written, an entry stands there, it was aborted and why."""

    intent: bool = False
    put: bool = False
    abort: str | None = None

    @property
    def known(self) -> bool:
        return self.intent or self.put or self.abort is not None

    @property
    def open(self) -> bool:
        return self.intent and not self.put and self.abort is None


@dataclass(frozen=True, slots=True)
class Begin:
    """A call is about to go upstream."""

    verb = Verb.BEGIN


@dataclass(frozen=True, slots=True)
class Put:
    """An entry arrives. `same`: whether the entry that stands under its call id has the same bytes, if one does."""

    call_id: str
    same: bool = False
    verb = Verb.PUT


@dataclass(frozen=True, slots=True)
class Abort:
    """A call ended with nothing sampled that an agent could keep."""

    reason: str
    verb = Verb.ABORT


@dataclass(frozen=True, slots=True)
class Mark:
    """A call is known to be lost."""

    reason: str
    verb = Verb.MARK


@dataclass(frozen=True, slots=True)
class Freeze:
    """The set of entries becomes final. `dangling`: the calls whose intents are open now."""

    snapshot_id: str
    dangling: tuple[str, ...] = ()
    verb = Verb.FREEZE


@dataclass(frozen=True, slots=True)
class Drop:
    """Delivery holds what a snapshot showed."""

    snapshot_id: str
    version: int
    verb = Verb.DROP


@dataclass(frozen=True, slots=True)
class Supersede:
    """The key is to be new again."""

    verb = Verb.SUPERSEDE


@dataclass(frozen=True, slots=True)
class Sweep:
    """A tombstone is old enough."""

    verb = Verb.SWEEP


Event: TypeAlias = Begin | Put | Abort | Mark | Freeze | Drop | Supersede | Sweep


@dataclass(frozen=True, slots=True)
class Step:
    """What an event leads to. `reasons` are to be added to the key's reasons (a set, in order of arrival)."""

    head: Head
    call: Call
    verdict: Verdict
    reasons: tuple[str, ...] = ()


def step(head: Head, call: Call, event: Event) -> Step:
    """The table, carried out. `call` is the state of the call that the event names (a fresh `Call()` if none)."""
    reaction = TABLE.get((event.verb, head.phase), Reaction.REFUSE)
    return _CARRY_OUT[reaction](head, call, event)


class Reaction(StrEnum):
    """The cells of the table, in words."""

    REFUSE = "refused"
    NOTE_INTENT = "intent durable; known already: no-op"
    STORE = "new: durable, version+1; same bytes: no-op; other bytes: refused, incomplete, version+1"
    COMPARE = "new: refused; same bytes: no-op; other bytes: refused, incomplete, version+1"
    CLOSE_INTENT = "closes the intent; after its put: no-op"
    NOTE_ABORT = "recorded, version+1; after its put: no-op"
    MARK = "incomplete, version+1"
    FIX = "frozen, snapshot id fixed, version+1; open intents: incomplete"
    SHOW_AGAIN = "same snapshot id and entries; incomplete, reasons, version as of now"
    KEEP = "False"
    RETIRE = "payload gone, tombstone, True, if both match"
    WAS_RETIRED = "True for the same pair"
    NOTHING = "nothing to do"
    SET_ASIDE = "moves to `<key>~<n>` as abandoned evidence"
    LIFT = "the fence is lifted"
    FORGET = "tombstone removed, fence stays"


_P, _R = Phase, Reaction
TABLE: Mapping[tuple[Verb, Phase], Reaction] = {
    (verb, phase): reaction
    for verb, row in {
        Verb.BEGIN: {_P.ABSENT: _R.NOTE_INTENT, _P.OPEN: _R.NOTE_INTENT},
        Verb.PUT: {_P.ABSENT: _R.STORE, _P.OPEN: _R.STORE, _P.FROZEN: _R.COMPARE},
        Verb.ABORT: {_P.ABSENT: _R.CLOSE_INTENT, _P.OPEN: _R.CLOSE_INTENT, _P.FROZEN: _R.NOTE_ABORT},
        Verb.MARK: {_P.ABSENT: _R.MARK, _P.OPEN: _R.MARK, _P.FROZEN: _R.MARK},
        Verb.FREEZE: {_P.ABSENT: _R.FIX, _P.OPEN: _R.FIX, _P.FROZEN: _R.SHOW_AGAIN},
        Verb.DROP: {
            _P.ABSENT: _R.KEEP,
            _P.OPEN: _R.KEEP,
            _P.FROZEN: _R.RETIRE,
            _P.RETIRED: _R.WAS_RETIRED,
            _P.FENCED: _R.KEEP,
        },
        Verb.SUPERSEDE: {
            _P.ABSENT: _R.NOTHING,
            _P.OPEN: _R.SET_ASIDE,
            _P.FROZEN: _R.SET_ASIDE,
            _P.RETIRED: _R.SET_ASIDE,
            _P.FENCED: _R.LIFT,
        },
        Verb.SWEEP: {
            _P.ABSENT: _R.NOTHING,
            _P.OPEN: _R.NOTHING,
            _P.FROZEN: _R.NOTHING,
            _P.RETIRED: _R.FORGET,
            _P.FENCED: _R.NOTHING,
        },
    }.items()
    for phase, reaction in row.items()
}


def typed_reason(reason: str | None, call_id: str = "") -> str:
    """`<reason>` or `<reason>:<detail>` with one of the typed reasons first, whatever the caller gave.

    No reason is `write_failed` (a sink's caller that knows no reasons lost a call); one that is no typed reason becomes
    its detail, since a mark must never fail for its wording. The call id is the detail where there is none.
    """
    text = reason or "write_failed"
    if text.partition(":")[0] not in INCOMPLETE_REASONS:
        text = f"write_failed:{text}"
    if call_id and call_id not in text.split(":"):
        text = f"{text}:{call_id}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def snapshot_reasons(incomplete: Iterable[str], aborts: Iterable[str | None]) -> tuple[str, ...]:
    """The reasons that a snapshot carries: what is lost, then what a server of ours cut short (`truncated:<kind>`)."""
    cut = (reason for reason in aborts if reason is not None and reason.startswith("truncated:"))
    return tuple(dict.fromkeys((*incomplete, *cut)))


# -- reactions ---------------------------------------------------------------------------------------------------


def _refuse(head: Head, call: Call, event: Event) -> Step:
    return Step(head, call, Verdict.REFUSED)


def _nothing(head: Head, call: Call, event: Event) -> Step:
    return Step(head, call, Verdict.NOTHING)


def _note_intent(head: Head, call: Call, event: Event) -> Step:
    if call.known:
        return Step(head, call, Verdict.NOTHING)
    # Spelled out, here and in `_store`: the two run for every model call, and `replace` costs 2 us a time.
    opened = Head(
        Phase.OPEN,
        head.version,
        head.snapshot_id,
        head.incomplete,
        head.calls + 1,
        head.entries,
        head.open_intents + 1,
    )
    return Step(opened, Call(intent=True), Verdict.DONE)


def _store(head: Head, call: Call, event: Event) -> Step:
    if call.put:
        return _compare(head, call, event)
    after = Head(
        Phase.OPEN,
        head.version + 1,
        head.snapshot_id,
        head.incomplete,
        head.calls + (not call.known),
        head.entries + 1,
        head.open_intents - call.open,
    )
    return Step(after, Call(intent=call.intent, put=True), Verdict.DONE)


def _compare(head: Head, call: Call, event: Event) -> Step:
    assert isinstance(event, Put)
    if not call.put:
        return Step(head, call, Verdict.REFUSED)
    if event.same:
        return Step(head, call, Verdict.NOTHING)
    marked = replace(head, version=head.version + 1, incomplete=True)
    return Step(marked, call, Verdict.CONFLICT, (f"conflict:{event.call_id}",))


def _close_intent(head: Head, call: Call, event: Event) -> Step:
    assert isinstance(event, Abort)
    if call.put or call.abort == event.reason:
        return Step(head, call, Verdict.NOTHING)
    after = replace(
        head,
        phase=Phase.OPEN if head.phase is Phase.ABSENT else head.phase,
        calls=head.calls + (not call.known),
        open_intents=head.open_intents - call.open,
    )
    return Step(after, replace(call, abort=event.reason), Verdict.DONE)


def _note_abort(head: Head, call: Call, event: Event) -> Step:
    closed = _close_intent(head, call, event)
    if closed.verdict is Verdict.NOTHING:
        return closed
    return replace(closed, head=replace(closed.head, version=head.version + 1))


def _mark(head: Head, call: Call, event: Event) -> Step:
    assert isinstance(event, Mark)
    after = replace(
        head,
        phase=Phase.OPEN if head.phase is Phase.ABSENT else head.phase,
        version=head.version + 1,
        incomplete=True,
    )
    return Step(after, call, Verdict.DONE, (event.reason,))


def _fix(head: Head, call: Call, event: Event) -> Step:
    assert isinstance(event, Freeze)
    frozen = replace(
        head,
        phase=Phase.FROZEN,
        version=head.version + 1,
        snapshot_id=event.snapshot_id,
        incomplete=head.incomplete or bool(event.dangling),
    )
    return Step(frozen, call, Verdict.DONE, tuple(f"dangling_intent:{each}" for each in event.dangling))


def _keep(head: Head, call: Call, event: Event) -> Step:
    return Step(head, call, Verdict.STALE)


def _retire(head: Head, call: Call, event: Event) -> Step:
    if not _matches(head, event):
        return Step(head, call, Verdict.STALE)
    return Step(replace(head, phase=Phase.RETIRED), call, Verdict.DONE)


def _was_retired(head: Head, call: Call, event: Event) -> Step:
    return Step(head, call, Verdict.NOTHING if _matches(head, event) else Verdict.STALE)


def _vanish(head: Head, call: Call, event: Event) -> Step:
    return Step(Head(), Call(), Verdict.DONE)


def _forget(head: Head, call: Call, event: Event) -> Step:
    return Step(Head(phase=Phase.FENCED), Call(), Verdict.DONE)


def _matches(head: Head, event: Event) -> bool:
    assert isinstance(event, Drop)
    return head.snapshot_id == event.snapshot_id and head.version == event.version


_CARRY_OUT: Mapping[Reaction, Callable[[Head, Call, Event], Step]] = {
    Reaction.REFUSE: _refuse,
    Reaction.NOTE_INTENT: _note_intent,
    Reaction.STORE: _store,
    Reaction.COMPARE: _compare,
    Reaction.CLOSE_INTENT: _close_intent,
    Reaction.NOTE_ABORT: _note_abort,
    Reaction.MARK: _mark,
    Reaction.FIX: _fix,
    Reaction.SHOW_AGAIN: _nothing,
    Reaction.KEEP: _keep,
    Reaction.RETIRE: _retire,
    Reaction.WAS_RETIRED: _was_retired,
    Reaction.NOTHING: _nothing,
    Reaction.SET_ASIDE: _vanish,
    Reaction.LIFT: _vanish,
    Reaction.FORGET: _forget,
}

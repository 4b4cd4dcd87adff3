"""The verbs of custody, with NeMo Gym's names and signatures, and what is true when each returns.

What we add is optional and keyword-only (`intent`, `reason`); optional verbs have protocols of their own, so that a
sink and a source with exactly NeMo Gym's signatures serve a run. Whether a verb is there is asked by `own_verb`, or by
`isinstance` of the protocol of an optional one, and in no other way.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from toprope.errors.kinds import Kind
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.tokens.entry import TokenEntry, is_text
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot

if TYPE_CHECKING:
    _ProtocolMeta = ABCMeta
else:
    _ProtocolMeta = type(Protocol)

GIVEN_UP = f"truncated:{Kind.STALE}"
"""The abort that says that a trainer gave the rollout up: nothing more is sampled, and no row is made of it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What is written down of a call before it goes upstream.

    `request_digest` is what a repeat of the request is known by: equal for equal requests, opaque here.
    """

    stream: bool = False
    request_digest: str = ""
    retry_count: int = 0
    writer_epoch: str = ""


@dataclass(frozen=True, slots=True)
class BeginAck:
    """What `begin_call` of our own stores returns: how many calls and entries the key holds, this intent included.

    A recorder that knows of fewer than that learns here that another process writes to the same rollout.
    """

    calls: int
    entries: int


@dataclass(frozen=True, slots=True)
class PutAck:
    """What `put` of our own stores returns: the key's version and number of entries after the write."""

    version: int
    entries: int


def own_verb(end: object, name: str) -> Callable[..., Any] | None:
    """The verb of a sink or source; None if it has none, or only what it inherits from a protocol.

    A class that names a protocol as its base has all of the protocol's verbs by Python's account. Their bodies do
    nothing and say that they did it: a loss that such a `mark_incomplete` was told of is told to nobody. Of any
    protocol, not of these alone: a transport may be written against NeMo Gym's.
    """
    found = getattr(end, name, None)
    if not callable(found):
        return None
    function = getattr(found, "__func__", found)
    bases = type(getattr(found, "__self__", end)).__mro__
    protocols = (vars(base) for base in bases if vars(base).get("_is_protocol", False))
    return None if any(function is each for verbs in protocols for each in verbs.values()) else found


class OptionalVerbs(_ProtocolMeta):
    """The class of the protocols of optional verbs: `isinstance` asks whether every verb is the object's own."""

    def __instancecheck__(self, instance: object) -> bool:
        if not vars(self).get("_is_protocol", False):
            return super().__instancecheck__(instance)
        verbs = [name for name, verb in vars(self).items() if callable(verb) and not name.startswith("_")]
        return all(own_verb(instance, name) is not None for name in verbs)


class TokenSink(Protocol):
    """Where the recorder writes."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> object:
        """Once it returns the intent survives a power cut. Twice, or after the call's put: no-op."""

    async def put(self, entry: TokenEntry) -> object:
        """Once it returns the entry survives a power cut and is visible to every process. Same bytes again: no-op."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Once it returns the loss is durable; the rollout will be masked."""

    async def close(self) -> None:
        """Once it returns nothing is pending and no handle is open."""


class TokenSource(Protocol):
    """Where delivery reads."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Once it returns the set of entries is fixed; later writes are refused. Repeated: same id and entries."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """True once the payload is gone and a tombstone is durable; False, and nothing changed, for a stale pair."""

    async def close(self) -> None:
        """Once it returns no handle is open."""


@runtime_checkable
class AbortingSink(Protocol, metaclass=OptionalVerbs):
    """Optional: a call that ended without anything sampled that an agent could keep."""

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        """Once it returns the intent is closed and does not count as lost."""


@runtime_checkable
class SupersedingSource(Protocol, metaclass=OptionalVerbs):
    """Optional: make a used key new."""

    async def supersede(self, rollout_id: str) -> str | None:
        """Once it returns what stood there is kept as `<key>~<n>`, whose name is returned; None if nothing stood."""


@runtime_checkable
class CaptureReader(Protocol, metaclass=OptionalVerbs):
    """Optional: reads without freezing, for lineage and retries."""

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The acknowledged entries after the first `since`, in order of acknowledgement, with whole prompts."""


@dataclass(frozen=True, slots=True)
class JournalledCall:
    """One call of a key as its intent, its record and its abort tell it.

    `abort` is the reason of an abort that no later put removed; `live` says whether the intent's writer may be alive.
    """

    call_id: str
    intent: Intent
    recorded: bool = False
    abort: str | None = None
    live: bool = True

    @property
    def open(self) -> bool:
        """Neither record nor abort."""
        return not self.recorded and self.abort is None


@runtime_checkable
class CallJournal(Protocol, metaclass=OptionalVerbs):
    """Optional: what was begun, for retries."""

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        """Every call that `begin_call` was told of, in the order of its beginning, the same for every process.

        Whatever begun before this was called is in it, whoever began it. Nothing for a key that nobody began.
        """


@runtime_checkable
class ReceiptSource(Protocol, metaclass=OptionalVerbs):
    """Optional: the receipts that a tombstone keeps."""

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        """The receipts of a retired rollout in call order; None if it is not retired."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """One capture of a store, as `capture ls` shows it.

    `state` is open, frozen or retired; `abandoned` marks evidence that `supersede` set aside. `age_s` counts from the
    first write, `calls` everything that was begun, put or aborted, `open_intents` the calls without an end so far;
    `reasons` as in a snapshot, `aborts` the reasons of aborted calls by count, `writer_epochs` the writers whose
    intents are open; `writer`, whether one that began a call of it is alive
    (`writer_state`; None once it is retired).
    """

    rollout_id: str
    state: str
    age_s: float
    calls: int
    entries: int
    open_intents: int
    incomplete: bool
    version: int
    snapshot_id: str | None
    reasons: tuple[str, ...] = ()
    aborts: tuple[tuple[str, int], ...] = ()
    writer_epochs: tuple[str, ...] = ()
    abandoned: bool = False
    writer: str | None = None


def writer_state(epochs: Collection[str], alive: Mapping[str, bool]) -> str:
    """`live` if one of the writers is alive, `dead` if all are known to be gone, else `unknown` (no epoch was told)."""
    known = [epoch for epoch in epochs if epoch]
    if any(alive[epoch] for epoch in known):
        return "live"
    return "dead" if known and "" not in epochs else "unknown"


@runtime_checkable
class CaptureLister(Protocol, metaclass=OptionalVerbs):
    """Optional: what a store still holds, for `capture ls` and explicit garbage collection."""

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        """Every capture that is not retired, oldest first; with `retired` tombstones too. Leaves no trace."""

    async def sweep_retired(self, older_than: float) -> int:
        """Once it returns the tombstones older than `older_than` seconds are gone (their number); the fence stays."""


@runtime_checkable
class DiscardingStore(Protocol, metaclass=OptionalVerbs):
    """Optional: explicit garbage collection of kept evidence."""

    async def discard(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Once it returns the captures under `keys` are gone for good, but for those of live writers; which went.

        Nothing of them stays but the fence, so that no old worker brings one back.
        """

    async def was_swept(self, rollout_id: str) -> bool:
        """Whether this key, or that of a later attempt, was swept or discarded."""


class EntryConflict(CaptureError):
    """`put` refused other bytes under a recorded call id. The rollout is marked incomplete already."""


def check_ids(verb: str, rollout_id: str, model_call_id: str) -> None:
    """Raise `CaptureError` for an id that no file can hold: half a surrogate pair, which JSON can say in escapes."""
    if not is_text(rollout_id) or not is_text(model_call_id):
        raise CaptureError(f"{verb}: call {model_call_id!r} of {rollout_id!r}: an id must be Unicode text")


def closed(rollout_id: str, phase: str, verb: str) -> CaptureClosed:
    """The refusal of a verb on a frozen, retired or fenced key; clients are told not to repeat the request."""
    why = "a later attempt of this rollout has begun, or it was delivered and swept" if phase == "fenced" else phase
    error = CaptureClosed(f"{verb}: the capture of {rollout_id!r} is closed ({why})")
    error.headers = {"x-should-retry": "false"}
    return error

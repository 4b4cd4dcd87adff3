"""Which recorded call a repeated request is answered from. Pure: the journal of a rollout in, a verdict out.

The libraries of OpenAI and Anthropic repeat a request with the same bytes and count up (`x-stainless-retry-count`
0, 1, 2). Requests are equal when their tags are: same body, same dialect, same `Idempotency-Key` if there is one.

    marked     a retry with count n claims, once, an unclaimed attempt of its tag whose last count is n - 1, failed and
               refused ones included: first one that was not sent whole, as journal and record know, then one that
               still runs, then any; of several the newest (docs/decisions/0008-which-attempt-a-retry-takes.md)
    keyed      a request with an `Idempotency-Key` is the repeat of every earlier one of its tag: of the newest that is
               recorded, else of the newest that may still be
    unmarked   a repeat claims, once, the newest unclaimed call whose connection closed before its reply was sent whole;
               so does a retry whose own attempt was claimed by such a one, or never came here

A claim leads to a call that is recorded (answer from it), may still be recorded (wait) or never will be (a new call).
An attempt that was itself answered from the record, or was still waiting to be, leads on to what it stood for. A repeat
that ended with nothing (its client left while it waited, its server died) claims nothing any more.

The journal does not say what an unmarked repeat claims before it is answered. Its own process does (`Seen`). Another
one doubts each open call that may be such a repeat, for as long as what is claimed still runs, and a moment more: a
repeat says what it claims as soon as that is recorded, a sample of its own says nothing, however long it goes on.
Left to others: reading journal and record, waiting (`repeats`), how long a moment is (`claims`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from toprope.capture.protocols import JournalledCall
from toprope.tokens.entry import TokenEntry
from toprope.tokens.settling import WRITER_DIED

CLIENT_GONE = "client_gone"
"""The abort of a call whose client left; its generation is drained, and a put would remove the abort."""
NOT_SENT = "not_sent"
"""The abort of a call whose client left before anything went upstream."""
_REPLAY, _WAITED, _REFUSED = "replay_of:", "waited_for:", "truncated:"


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer from the record of `call_id`."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Wait:
    """`call_id` may still be recorded. `drained`: its client left, and its generation has a bound.

    `contested`: an earlier repeat at another worker may have claimed it, and will say so once it is recorded.
    """

    call_id: str
    drained: bool = False
    contested: bool = False


@dataclass(frozen=True, slots=True)
class Doubt:
    """`call_id` is recorded, and open calls at other workers may be repeats that claim it: they would say so at once.

    `of`: each of them, a recorded call that it may claim (`call_id`, and any other that was left), and the number of
    open calls before it, which it may be in doubt of itself.
    """

    call_id: str
    of: tuple[tuple[str, str, int], ...]


Verdict: TypeAlias = Replay | Wait | Doubt | None
"""None: a new call."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one process knows of the calls of a tag beyond the journal.

    `left`: calls whose connection closed here before their reply was sent whole. `claims`: for each repeat here the
    call that it waits for or was answered from. `gave_up`: repeats here whose client left before they had an answer.
    `writer_epoch` is its own; None: open calls of other workers claim nothing. `own_way`: calls of other workers, each
    with a recorded one that it does not claim, or it would have said so. `gone`: recorded calls whose record says that
    the client left, which every process reads. `lost`: calls of which nothing more is expected here.
    """

    left: Collection[str] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    gave_up: Collection[str] = ()
    writer_epoch: str | None = None
    own_way: Collection[tuple[str, str]] = ()
    gone: Collection[str] = ()
    lost: Collection[str] = ()


def request_tag(body_digest: str, dialect: str, idempotency_key: str | None = None) -> str:
    """What a repeat is known by, as intents hold it. `body_digest` is the SHA-256 of the body's bytes."""
    tag = f"{body_digest}/{dialect}"
    return tag if idempotency_key is None else f"{tag}/{_key_mark(idempotency_key)}"


def replay_of(call_id: str) -> str:
    """The abort reason of a retry that is answered from the record of `call_id`."""
    return _REPLAY + call_id


def waited_for(call_id: str) -> str:
    """The abort reason of a retry whose client left while it waited for `call_id`."""
    return _WAITED + call_id


def key_conflict(calls: Iterable[JournalledCall], tag: str) -> bool:
    """Whether the `Idempotency-Key` in `tag` is another body's: that of the first call which used it."""
    mark = tag.rpartition("/")[2]
    used = (call.intent.request_digest for call in calls)
    first = next((each for each in used if each.count("/") == 2 and each.rpartition("/")[2] == mark), tag)
    return first.partition("/")[0] != tag.partition("/")[0]


def decide(calls: Sequence[JournalledCall], call_id: str, seen: Seen | None = None) -> Verdict:
    """The verdict on `call_id`, which is in `calls` (in journal order), as the process that `seen` is of finds it."""
    mine = next((call for call in calls if call.call_id == call_id), None)
    if mine is None or not mine.intent.request_digest:
        return None
    tag = mine.intent.request_digest
    equal = _Equal([call for call in calls if call.intent.request_digest == tag], call_id, seen or Seen())
    if tag.count("/") == 2:
        return equal.any_of_a_key()
    claimed = equal.claims.get(call_id)
    return equal.left_behind() if claimed is None else equal.lead(equal.by_id[claimed])


def extended(call_id: str, entries: Sequence[TokenEntry]) -> bool:
    """Whether another recorded call goes on from `call_id`: its answer has reached the agent, and is never repeated.

    Where no parent could be told the tokens decide: a prompt that begins with all of the call's.
    """
    own = next((entry for entry in entries if entry.model_call_id == call_id), None)
    return any(
        entry.parent_call_id == call_id
        or (entry.parent_decision == "unresolved" and own is not None and _begins_with(entry, own))
        for entry in entries
        if entry.model_call_id != call_id
    )


class _Equal:
    """The calls of one tag in journal order, seen from one of them, and which call each repeat among them claims.

    An attempt is a call and the repeats that claimed it, each in turn; the last one's count is the attempt's. So an
    outer round, which counts from 0 again, takes an attempt from the retries of the round before.
    """

    def __init__(self, calls: Sequence[JournalledCall], call_id: str, seen: Seen) -> None:
        self.by_id = {call.call_id: call for call in calls}
        self.earlier = calls[: list(self.by_id).index(call_id)]
        self.claims: dict[str, str] = {}
        self._calls = calls
        self._me = call_id
        self._seen = seen
        self._claim()

    def _claim(self) -> None:
        first: dict[str, str] = {}  # of each call: the one that its attempt began with
        last: dict[str, str] = {}  # of each attempt
        free: dict[int, list[str]] = {}
        for call in self._calls:
            count = call.intent.retry_count
            claimed = self._told(call)
            if claimed in first:
                before = last[first[claimed]]
                ends = free[self.by_id[before].intent.retry_count]
                if before in ends:
                    ends.remove(before)
            else:
                claimed = self._take(call, free.get(count - 1, []) if count > 0 else [], first)
            if claimed is not None:
                self.claims[call.call_id] = claimed
            first[call.call_id] = call.call_id if claimed is None else first[claimed]
            last[first[call.call_id]] = call.call_id
            free.setdefault(count, []).append(call.call_id)

    def _told(self, call: JournalledCall) -> str | None:
        """What `call` is known to claim, by the journal or here; of the one that asks it is decided anew."""
        return None if call.call_id == self._me else _target(call) or self._seen.claims.get(call.call_id)

    def _take(self, call: JournalledCall, ends: list[str], first: Mapping[str, str]) -> str | None:
        """Take out of `ends`, in journal order, that of the attempt which the retry `call` claims.

        What it claimed before goes before its like, so that it does not turn to one that is as good. Not where the
        journal says that a later call was given it; one with a higher count may be this one's own next.
        """
        held, known = None, set[str]()
        if call.call_id == self._me:
            held = first.get(self._seen.claims.get(self._me, ""))
            later = [each for each in self._calls[len(self.earlier) + 1 :] if not self._has_nothing(each)]
            known = {first.get(told, told) for each in later if (told := self._told(each)) is not None}
            like = [each for each in later if each.intent.retry_count <= call.intent.retry_count]
            if held in {first.get(given, given) for each in like if (given := _after(_REPLAY, each)) is not None}:
                held = None
        free = [end for end in reversed(ends) if first[end] == held or first[end] not in known]
        if not free:
            return None
        taken = min(free, key=lambda end: (self._sent(self.by_id[end]), first[end] != held))
        ends.remove(taken)
        return taken

    def _sent(self, call: JournalledCall) -> int:
        """0: no client has its answer, as far as is known, or nobody knows; 1: it still runs; 2: it was sent whole.

        By journal and record alone: what only this process knows would make another order at every worker, and two
        retries claim one call.
        """
        if call.call_id in self._seen.gone or not call.live:
            return 0
        if call.recorded or (call.abort or "").startswith((_REPLAY, _REFUSED)):
            return 2
        return 1 if call.open else 0

    def any_of_a_key(self) -> Verdict:
        """The verdict of a keyed repeat: an equal one that failed, or ended with nothing, takes no answer away."""
        leads = [lead for call in reversed(self.earlier) if (lead := self.lead(call)) is not None]
        return next((lead for lead in leads if isinstance(lead, Replay)), leads[0] if leads else None)

    def left_behind(self) -> Verdict:
        """The verdict of an unmarked repeat: what it claimed before, else the newest that is to be had."""
        taken, held = self._taken(), self._seen.claims.get(self._me)
        newest_first = self.earlier[::-1]
        gone = [call for call in newest_first if self._left(call)]
        for call in sorted(gone, key=lambda call: call.call_id != held):
            verdict = self.lead(call)
            if verdict is not None and verdict.call_id not in taken:
                if not self._doubted(call, verdict):
                    return verdict
                if isinstance(verdict, Wait):
                    return Wait(verdict.call_id, verdict.drained, contested=True)
                # All at once: a repeat that does not get this one need not begin to doubt for the next.
                leads = [(each, lead) for each in gone if isinstance(lead := self.lead(each), Replay)]
                return Doubt(verdict.call_id, tuple(of for pair in leads for of in self._doubted(*pair)))
        return None

    def _left(self, call: JournalledCall) -> bool:
        seen = self._seen
        return call.abort == CLIENT_GONE or call.call_id in seen.left or call.call_id in seen.gone

    def _live(self, call: JournalledCall) -> bool:
        """Whether something may still become of a call that is not recorded, as far as this process knows."""
        return call.live and call.call_id not in self._seen.lost

    def _taken(self) -> set[str]:
        """What others claim, and what that stood for."""
        taken: set[str] = set()
        for call in self._calls:
            if call.call_id == self._me or self._has_nothing(call):
                continue
            claimed = self.claims.get(call.call_id)
            while claimed is not None:  # claims lead to earlier calls
                taken.add(claimed)
                claimed = self.claims.get(claimed)
        return taken

    def _has_nothing(self, call: JournalledCall) -> bool:
        """Whether this repeat ended with nothing: what it claimed is still to be had."""
        ended = call.abort in (NOT_SENT, WRITER_DIED) or _after(_WAITED, call) is not None
        return ended or call.call_id in self._seen.gave_up or (call.open and not self._live(call))

    def _doubted(self, gone: JournalledCall, lead: Replay | Wait) -> list[tuple[str, str, int]]:
        """As in `Doubt.of`: the open calls, repeats or samples of their own, that may have claimed `gone`."""
        own, seen = self._seen.writer_epoch, self._seen
        if own is None:
            return []
        since = self.earlier[self.earlier.index(gone) + 1 :]
        may = [call for call in since if call.open and self._live(call) and call.call_id not in self.claims]
        return [
            (call.call_id, lead.call_id, before)
            for before, call in enumerate(may)
            if call.intent.writer_epoch != own and (call.call_id, lead.call_id) not in seen.own_way
        ]

    def lead(self, call: JournalledCall) -> Replay | Wait | None:
        """The verdict of whoever claims `call`."""
        for _ in range(len(self.by_id)):  # every step leads to an earlier call; damage must not go in circles
            if call.recorded:
                return Replay(call.call_id)
            target = _target(call)
            if target is None and call.open:  # a repeat here, which waits
                target = self._seen.claims.get(call.call_id)
            if target is None:
                if self._live(call) and (call.open or call.abort == CLIENT_GONE):
                    return Wait(call.call_id, call.abort == CLIENT_GONE)
                # It failed, was refused, or died. Of a retry that died while it waited what it claimed may stand.
                target = self.claims.get(call.call_id)
            if target is None or target not in self.by_id:
                return None
            call = self.by_id[target]
        return None


def _target(call: JournalledCall) -> str | None:
    return _after(_REPLAY, call) or _after(_WAITED, call)


def _after(head: str, call: JournalledCall) -> str | None:
    """The call that an abort with this head names."""
    return call.abort.removeprefix(head) if call.abort is not None and call.abort.startswith(head) else None


def _begins_with(entry: TokenEntry, parent: TokenEntry) -> bool:
    ids, said = entry.prompt_token_ids, parent.generation_token_ids
    middle = len(parent.prompt_token_ids)
    if len(ids) < middle + len(said):
        return False
    return bool((ids[:middle] == parent.prompt_token_ids).all() and (ids[middle : middle + len(said)] == said).all())


def _key_mark(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode("utf-8", "surrogateescape")).hexdigest()[:32]

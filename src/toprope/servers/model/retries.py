"""Which recorded call a repeated request is answered from. Pure: the journal of a rollout in, a verdict out.

The libraries of OpenAI and Anthropic repeat a request with the same bytes and count up (`x-stainless-retry-count`
0, 1, 2). Requests are equal when their tags are: same body, same dialect, same `Idempotency-Key` if there is one.

    marked     a retry with count n claims, once, the newest unclaimed attempt of its tag whose count is n - 1, failed
               and refused ones included; the order of the journal decides, so that every process finds the same
    keyed      a request with an `Idempotency-Key` is the repeat of every earlier one of its tag
    unmarked   a repeat counts as a retry only of an attempt whose connection closed before its reply was sent whole

A claim leads to a call that is recorded (answer from it), may still be recorded (wait) or never will be (a new call).
An attempt that was itself answered from the record, or was still waiting to be, leads on to what it stood for. Left to
others: reading journal and record, waiting (`repeats`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from toprope.capture.protocols import JournalledCall
from toprope.tokens.entry import TokenEntry

CLIENT_GONE = "client_gone"
"""The abort of a call whose client left; its generation is drained, and a put would remove the abort."""
NOT_SENT = "not_sent"
"""The abort of a call whose client left before anything went upstream."""
_REPLAY, _WAITED = "replay_of:", "waited_for:"


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer from the record of `call_id`."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Wait:
    """`call_id` may still be recorded. `drained`: its client left, and its generation has a bound."""

    call_id: str
    drained: bool = False


Verdict: TypeAlias = Replay | Wait | None
"""None: a new call."""


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


def decide(calls: Sequence[JournalledCall], call_id: str, left: Collection[str] = ()) -> Verdict:
    """The verdict on `call_id`, which is in `calls` (in journal order). `left`: calls whose connection is known to have
    closed before their reply was sent whole."""
    at = next((place for place, call in enumerate(calls) if call.call_id == call_id), None)
    if at is None:
        return None
    claims = _claims(calls)
    mine = calls[at].intent
    if mine.request_digest.count("/") == 2:
        claimed = next((c for c in reversed(calls[:at]) if c.intent.request_digest == mine.request_digest), None)
    elif mine.retry_count > 0:
        by_id = {call.call_id: call for call in calls}
        claimed = by_id.get(claims.get(call_id, ""))
    else:
        claimed = _left_behind(calls, at, left, claims)
    return None if claimed is None else _lead(claimed, {call.call_id: call for call in calls}, claims)


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


def _claims(calls: Sequence[JournalledCall]) -> dict[str, str]:
    """For each marked retry the attempt that it claims."""
    free: dict[tuple[str, int], list[str]] = {}
    claims: dict[str, str] = {}
    for call in calls:
        tag, count = call.intent.request_digest, call.intent.retry_count
        waiting = free.get((tag, count - 1)) if tag and count > 0 else None
        if waiting:
            claims[call.call_id] = waiting.pop()
        free.setdefault((tag, count), []).append(call.call_id)
    return claims


def _left_behind(
    calls: Sequence[JournalledCall], at: int, left: Collection[str], claims: Mapping[str, str]
) -> JournalledCall | None:
    tag = calls[at].intent.request_digest
    # Who left while it waited got nothing: what it waited for is still to be had.
    answered = {_after(_REPLAY, call) for call in calls if call.call_id != calls[at].call_id}
    taken = {*claims.values(), *answered}
    for call in reversed(calls[:at]):
        gone = call.abort == CLIENT_GONE or call.call_id in left
        if tag and call.intent.request_digest == tag and gone and call.call_id not in taken:
            return call
    return None


def _lead(call: JournalledCall, by_id: Mapping[str, JournalledCall], claims: Mapping[str, str]) -> Verdict:
    for _ in range(len(by_id)):  # every step leads to an earlier call; damage must not go in circles
        if call.recorded:
            return Replay(call.call_id)
        target = _target(call)
        if target is None:
            if call.live and (call.open or call.abort == CLIENT_GONE):
                return Wait(call.call_id, call.abort == CLIENT_GONE)
            # It failed, was refused, or died. If it was a retry that died while it waited, what it claimed may stand.
            target = claims.get(call.call_id)
        if target is None or target not in by_id:
            return None
        call = by_id[target]
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

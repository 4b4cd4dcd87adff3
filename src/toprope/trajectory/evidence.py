"""From records to a forest of calls: duplicates, delta prompts, parent claims. Steps 1 to 4 of the builder.

Nothing is guessed here. What cannot be verified becomes a boundary (`Call.fault`) or leaves the set (`Evidence.aside`);
which of that matters for a rollout is decided later (`retries`, `terminal`, `build`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.deferred import decide_deferred
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash, begins_with
from toprope.trajectory import reasons

_NONE = np.zeros(0, dtype=np.uint32)


@dataclass(slots=True, eq=False)
class Call:
    """One held call in the forest.

    `claimed` is the parent that it names and whose ids its prompt was seen to begin with (an empty call too);
    `parent` the call with a generation that it continues, or None for the first of a conversation. `lead` are the ids
    between the end of `parent` and this generation. `fault` makes the place before this call a boundary.
    """

    entry: TokenEntry
    claimed: Call | None
    tail: NDArray[np.uint32]
    cum_len: int
    fault: str | None = None
    detail: str | None = None
    parent: Call | None = None
    lead: NDArray[np.uint32] = field(default_factory=lambda: _NONE)
    children: list[Call] = field(default_factory=list)
    extended: bool = False
    state: ChainHash | None = None

    @property
    def id(self) -> str:
        return self.entry.model_call_id

    @property
    def generated(self) -> NDArray[np.uint32]:
        return self.entry.generation_token_ids

    @property
    def is_empty(self) -> bool:
        return len(self.entry.generation_token_ids) == 0

    @property
    def is_unread(self) -> bool:
        """Whether its client had gone and nobody continued it: by all that is known, no agent saw what it said."""
        return self.entry.client_gone and not self.extended

    @property
    def prompt_len(self) -> int:
        return self.cum_len - len(self.entry.generation_token_ids)

    def digest(self) -> str:
        """The hash of all its ids, prompt and generation."""
        return _state(self).hexdigest()

    def prompt(self) -> NDArray[np.uint32]:
        """The whole prompt. Linear in its length for a delta, free for a record that holds it."""
        if not self.entry.prompt_is_delta:
            return self.entry.prompt_token_ids
        pieces = [self.tail]
        at = self.claimed
        while at is not None:
            pieces.append(at.generated)
            pieces.append(at.entry.prompt_token_ids)
            at = at.claimed if at.entry.prompt_is_delta else None
        return np.concatenate(pieces[::-1])

    def claims(self) -> Iterator[Call]:
        """The claimed parent, its claimed parent, and so on."""
        at = self.claimed
        while at is not None:
            yield at
            at = at.claimed

    def faults_here(self) -> Iterator[Call]:
        """Which of this call and the empty calls directly before it are boundaries."""
        if self.fault is not None:
            yield self
        for each in takewhile(lambda call: call.is_empty, self.claims()):
            if each.fault is not None:
                yield each

    def path(self) -> list[Call]:
        """The calls with a generation from the first of the conversation to this one."""
        calls, at = [], self
        while at.parent is not None:
            calls.append(at)
            at = at.parent
        calls.append(at)
        return calls[::-1]

    def descendants(self) -> set[str]:
        """The ids of all calls that continue this one, directly or not."""
        found: set[str] = set()
        pending = list(self.children)
        while pending:
            at = pending.pop()
            found.add(at.id)
            pending.extend(at.children)
        return found


@dataclass(slots=True)
class Evidence:
    """What a snapshot's records amount to.

    `calls` are the held ones by id, in order of id; `aside` the ones that left the set with their reason; `conflicts`
    the ids with differing copies.
    """

    calls: dict[str, Call]
    aside: dict[str, str]
    conflicts: frozenset[str]

    def sampling(self) -> list[Call]:
        """The calls that sampled something, in order of id."""
        return [call for call in self.calls.values() if not call.is_empty]

    def link_failures(self) -> dict[str, str]:
        """Call id to what is wrong with its place, for every boundary and every record set aside."""
        found = {call.id: call.detail or call.fault for call in self.calls.values() if call.fault is not None}
        return dict(sorted({**self.aside, **{key: str(value) for key, value in found.items()}}.items()))


def read(rollout_id: str, entries: Iterable[TokenEntry]) -> Evidence:
    """Verify the records of one rollout. The result depends on the set of records, not on order or copies."""
    held, conflicts = _distinct(entries)
    decided = decide_deferred(held.values(), rollout_id, missing=bool(conflicts))
    held = {entry.model_call_id: entry for entry in decided}
    evidence = Evidence(calls={}, aside=dict.fromkeys(sorted(conflicts), reasons.CONFLICT), conflicts=conflicts)
    ring = _rings(held)
    for call_id in _parents_first(held):
        _hold(evidence, held[call_id], rollout_id, held, in_ring=call_id in ring)
    evidence.calls = dict(sorted(evidence.calls.items()))
    _link(evidence)
    return evidence


def _distinct(entries: Iterable[TokenEntry]) -> tuple[dict[str, TokenEntry], frozenset[str]]:
    """The records by call id, and the ids whose copies differ: of those none is believed, nor what it claims."""
    held: dict[str, TokenEntry] = {}
    conflicts = set()
    for entry in entries:
        first = held.setdefault(entry.model_call_id, entry)
        if first is not entry and first != entry:
            conflicts.add(entry.model_call_id)
    return {call_id: entry for call_id, entry in held.items() if call_id not in conflicts}, frozenset(conflicts)


def _claim(entry: TokenEntry) -> str | None:
    return entry.parent_call_id if entry.parent_decision == "resolved" or entry.prompt_is_delta else None


def _rings(held: dict[str, TokenEntry]) -> frozenset[str]:
    """The calls that stand on a ring of claims (not those that merely hang from one)."""
    done: set[str] = set()
    ring: set[str] = set()
    for start in held:
        trail: list[str] = []
        place: dict[str, int] = {}
        at: str | None = start
        while at is not None and at in held and at not in done and at not in place:
            place[at] = len(trail)
            trail.append(at)
            at = _claim(held[at])
        if at in place:
            ring.update(trail[place[at] :])
        done.update(trail)
    return frozenset(ring)


def _parents_first(held: dict[str, TokenEntry]) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    for start in sorted(held):
        trail: list[str] = []
        at: str | None = start
        while at is not None and at in held and at not in seen:
            seen.add(at)
            trail.append(at)
            at = _claim(held[at])
        order.extend(reversed(trail))
    return order


def _hold(
    evidence: Evidence, entry: TokenEntry, rollout_id: str, held: dict[str, TokenEntry], *, in_ring: bool
) -> None:
    """Put one record into the forest: materialise, verify its claim and its hash; or set it aside."""
    call_id, claim = entry.model_call_id, _claim(entry)
    claimed = evidence.calls.get(claim) if claim is not None and not in_ring else None
    fault, detail = _fault_of(entry, claim, evidence, held, in_ring=in_ring)
    if entry.rollout_id != rollout_id:
        evidence.aside[call_id] = reasons.MALFORMED
        return
    if entry.prompt_is_delta:
        if claimed is None:
            evidence.aside[call_id] = fault or reasons.PARENT_UNUSABLE
            return
        tail, cum_len = entry.prompt_token_ids, claimed.cum_len + len(entry.prompt_token_ids)
    else:
        prompt = entry.prompt_token_ids
        if claimed is not None and not _continues(prompt, claimed):
            fault, detail, claimed = reasons.PARENT_MISMATCH, f"{reasons.PARENT_MISMATCH}:{claimed.id}", None
        tail, cum_len = prompt[claimed.cum_len :] if claimed else prompt, len(prompt)
    call = Call(entry, claimed, tail, cum_len + len(entry.generation_token_ids), fault, detail)
    if not _agrees_with_its_hash(call):
        evidence.aside[call_id] = reasons.HASH_MISMATCH
        return
    evidence.calls[call_id] = call


def _fault_of(
    entry: TokenEntry, claim: str | None, evidence: Evidence, held: dict[str, TokenEntry], *, in_ring: bool
) -> tuple[str | None, str | None]:
    """What is wrong with a record's decision and claim before its ids are looked at."""
    if in_ring:
        return reasons.PARENT_CYCLE, None
    if entry.parent_decision == "unresolved":
        detail = entry.parent_resolution_reason or reasons.UNRESOLVED_PARENT
        return reasons.UNRESOLVED_PARENT, detail
    if entry.parent_decision == "root":
        return (None, None) if entry.parent_call_id is None else (reasons.MALFORMED, None)
    if entry.parent_decision != "resolved":
        return reasons.MALFORMED, None
    if claim in evidence.conflicts:
        return reasons.CONFLICT, None
    if claim is None or claim not in held:
        return reasons.PARENT_MISSING, f"{reasons.PARENT_MISSING}:{claim}"
    if claim in evidence.aside:
        return reasons.PARENT_UNUSABLE, None
    return None, None


def _continues(prompt: NDArray[np.uint32], claimed: Call) -> bool:
    """Whether a whole prompt begins with the ids of the call that it claims."""
    if claimed.cum_len > len(prompt):
        return False
    cut = claimed.prompt_len
    return begins_with(prompt, claimed.prompt()) and begins_with(prompt[cut:], claimed.generated)


def _agrees_with_its_hash(call: Call) -> bool:
    """Whether length and hash that were recorded fit the ids; what was not recorded cannot disagree."""
    entry = call.entry
    if entry.cum_len is not None and entry.cum_len != call.cum_len:
        return False
    if entry.chain_hash is None:
        return True
    return _state(call).hexdigest() == entry.chain_hash


def _state(call: Call) -> ChainHash:
    """The hash state after a call, carried on from the nearest call before it that has one."""
    pending: list[Call] = []
    at: Call | None = call
    while at is not None and at.state is None:
        pending.append(at)
        at = at.claimed
    state = at.state if at is not None and at.state is not None else ChainHash()
    for each in reversed(pending):
        state = state.extend(each.tail).extend(each.generated)
        each.state = state
    return state


def _link(evidence: Evidence) -> None:
    """Find for each call the one with a generation that it continues."""
    firsts: list[Call] = []
    behind_empty: list[Call] = []
    for call in evidence.calls.values():
        if call.fault is not None:
            call.lead = call.prompt()
        elif call.claimed is None or not call.claimed.is_empty:
            _attach(call, call.claimed, call.tail, firsts)
        else:
            behind_empty.append(call)
    # Shorter prompts first: whatever a prompt contains was attached before it.
    for call in sorted(behind_empty, key=lambda each: (each.prompt_len, each.id)):
        prompt = call.prompt()
        base = next((each for each in call.claims() if not each.is_empty), None)
        parent = _shown_by_tokens(call, prompt, base, firsts)
        if call.fault is None:
            _attach(call, parent, prompt[parent.cum_len if parent else 0 :], firsts)


def _attach(call: Call, parent: Call | None, lead: NDArray[np.uint32], firsts: list[Call]) -> None:
    call.parent, call.lead = parent, lead
    if call.claimed is not None:
        call.claimed.extended = True
    if parent is not None:
        parent.extended = True
    if not call.is_empty:
        (firsts if parent is None else parent.children).append(call)


def _shown_by_tokens(call: Call, prompt: NDArray[np.uint32], base: Call | None, firsts: list[Call]) -> Call | None:
    """The call that `prompt` continues when it claims an empty one: the longest that it contains below `base`."""
    best = [base] if base is not None else []
    open_ends = list(base.children if base is not None else firsts)
    while open_ends:
        at = open_ends.pop()
        start = at.parent.cum_len if at.parent is not None else 0
        if at.cum_len > len(prompt) or not begins_with(prompt[start:], at.lead):
            continue
        if begins_with(prompt[at.prompt_len :], at.generated):
            open_ends.extend(at.children)
            longest = best[0].cum_len if best else 0
            best = [at] if at.cum_len > longest else [*best, at] if at.cum_len == longest else best
    if len({each.prompt_len for each in best}) > 1:
        call.fault, call.lead = reasons.AMBIGUOUS_PARENT, prompt
    return min(best, key=lambda each: each.id, default=None)

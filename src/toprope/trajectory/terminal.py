"""Which call was the last one: witnesses, and what they agree on. Step 6 of the builder.

A witness that speaks for nothing abstains. Those that speak must name one call, or calls with identical tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import THOUGHT, content_of, is_model_authored, item_digests
from toprope.trajectory import reasons
from toprope.trajectory.evidence import Call, Evidence

NOT_HELD = "response:"
"""Prefix of a claim that names a response id no record has."""


@dataclass(frozen=True, slots=True)
class TerminalWitnesses:
    """The call ids that each witness names, strongest first; an empty tuple abstains.

    `explicit`: the caller's `_ng_terminal_model_call_id`. `declared`: the records of the agent's
    `terminal_response_id`. `response_id`: those of the row's own response id. `content`: those whose output is the
    row's final output. The last two abstain when they name calls with different tokens, or one whose record was set
    aside beside others.
    """

    explicit: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    response_id: tuple[str, ...] = ()
    content: tuple[str, ...] = ()

    @classmethod
    def naming(cls, **claims: str) -> TerminalWitnesses:
        """Witnesses that name one call each: `naming(explicit="c2", content="c1")`."""
        return cls(**{method: (call_id,) for method, call_id in claims.items()})


@dataclass(frozen=True, slots=True)
class Terminal:
    """What the witnesses agree on: the call and the method that names it; or the reasons why none is believed.

    `named` are all call ids that some witness speaks for. Without any witness all three are empty.
    """

    call: Call | None = None
    method: str | None = None
    reasons: tuple[str, ...] = ()
    named: frozenset[str] = frozenset()


def witnesses_of(row: Mapping[str, Any], entries: Sequence[TokenEntry]) -> TerminalWitnesses:
    """Read the witnesses of a flat result row. Nothing in the row can make it raise."""
    raw = row.get("response")
    response: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    metadata = response.get("metadata")
    explicit = row.get("_ng_terminal_model_call_id")
    declared = next(
        (
            place["terminal_response_id"]
            for place in (row, response, metadata, row.get("ng_agent_observations"))
            if isinstance(place, Mapping) and isinstance(place.get("terminal_response_id"), str)
        ),
        None,
    )
    return TerminalWitnesses(
        explicit=(explicit,) if isinstance(explicit, str) and explicit else (),
        declared=(_with_response_id(entries, declared) or (NOT_HELD + declared,)) if declared else (),
        response_id=_with_response_id(entries, response.get("id")),
        content=_with_content(entries, response.get("output")),
    )


def choose(witnesses: TerminalWitnesses, evidence: Evidence) -> Terminal:
    """Weigh the witnesses against the held calls."""
    chosen: Call | None = None
    method: str | None = None
    found: set[str] = set()
    named: set[str] = set()
    for each in fields(witnesses):
        claim: tuple[str, ...] = getattr(witnesses, each.name)
        if not claim:
            continue
        calls = [evidence.calls[call_id] for call_id in sorted(set(claim)) if call_id in evidence.calls]
        all_held = len(calls) == len(set(claim))  # of a record that was set aside nobody knows what it sampled
        if calls and not (all_held and all(same_tokens(calls[0], other) for other in calls[1:])):
            if each.name in ("response_id", "content"):
                continue
            found.add(reasons.TERMINAL_AMBIGUOUS)
        named.update(claim)
        fault = _unusable(claim, calls, evidence)
        if fault is not None:
            found.add(fault)
        elif chosen is None:
            chosen, method = calls[0], each.name
        elif not same_tokens(chosen, calls[0]):
            found.add(reasons.TERMINAL_CONTRADICTION)
    return Terminal(chosen, method, reasons.in_order(found), frozenset(named))


def same_tokens(left: Call, right: Call) -> bool:
    """Whether two calls had one prompt and sampled the same ids."""
    if left is right:
        return True
    return np.array_equal(left.generated, right.generated) and np.array_equal(left.prompt(), right.prompt())


def _unusable(claim: tuple[str, ...], calls: list[Call], evidence: Evidence) -> str | None:
    if not calls:
        return next((evidence.aside[each] for each in claim if each in evidence.aside), reasons.TERMINAL_NOT_CAPTURED)
    return reasons.TERMINAL_EMPTY if all(call.is_empty for call in calls) else None


def _with_response_id(entries: Sequence[TokenEntry], response_id: Any) -> tuple[str, ...]:
    if not isinstance(response_id, str) or not response_id:
        return ()
    return tuple(sorted({entry.model_call_id for entry in entries if entry.response_id == response_id}))


def _with_content(entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    """The calls that may have written the row's final output, as far as the row and the record can tell.

    Content alone is compared: agents renumber ids. Reasoning may be left out of a row, so that a call which thought
    before it said the same is as good as one that did not. What a row shows before its final output decides between
    them: the call whose whole transcript it is, else those that go on from the turn shown last, else the one after
    which nothing was sampled (a conversation that was compacted). A row that shows its final output alone decides
    nothing: that it is some call's whole transcript may be chance. Thoughts that no record has were written anew by the
    agent and count for nothing.
    """
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        return ()
    shown = _contents(output)
    last = shown[len(shown) - _ending(output) :]
    before = _spoken(shown[: len(shown) - len(last)])
    said = _Said(entries)
    if not before:
        for wanted in (shown, _spoken(shown)):
            if found := said.just(wanted) | said.in_all(wanted):
                return tuple(sorted(found))
        return ()
    own = said.just(last) or said.just(_spoken(last))
    whole = said.in_all(shown) or said.in_all(_spoken(shown))
    following = {call_id for call_id in own if said.after(call_id, before[-1])}
    return tuple(sorted(whole or following or {call_id for call_id in own if said.nothing_after(call_id)}))


def _ending(output: Sequence[Mapping[str, Any]]) -> int:
    """How many model-authored items are the final output; none where a tool's result ends it, which a later call read.

    What stands before a tool's result or a user's turn is an earlier call's.
    """
    count = 0
    for item in reversed(output):
        if is_model_authored(item):
            count += 1
        elif count or item.get("type", "message") != "message":
            break
    return count


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one record says that its call wrote, after which call, and when."""

    wrote: tuple[str, ...]
    parent: str
    at: float


class _Said:
    """What each call wrote and after what, by the records. Copies of one call that differ all count as told."""

    def __init__(self, entries: Sequence[TokenEntry]) -> None:
        self._copies: dict[str, set[_Copy]] = {}
        for entry in entries:
            copy = _Copy(_contents(entry.output_items), entry.parent_call_id or "", entry.created_at)
            self._copies.setdefault(entry.model_call_id, set()).add(copy)

    def just(self, shown: tuple[str, ...]) -> set[str]:
        """The calls that wrote this and no more."""
        return {
            call_id
            for call_id, copies in self._copies.items()
            if shown and any(_begin_of(copy.wrote, shown, len(shown)) == 0 for copy in copies)
        }

    def in_all(self, shown: tuple[str, ...]) -> set[str]:
        """The calls whose whole transcript, from the first call of the conversation on, is this."""
        return {call_id for call_id in self._copies if shown and self._transcript_is(call_id, shown)}

    def after(self, call_id: str, mark: str) -> bool:
        """Whether the last thing that was said before this call is `mark`."""
        pending, seen = [copy.parent for copy in self._copies[call_id]], {call_id}
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            for copy in self._copies.get(at, ()):
                spoken = _spoken(copy.wrote)
                if spoken and spoken[-1] == mark:
                    return True
                if not spoken:
                    pending.append(copy.parent)
        return False

    def nothing_after(self, call_id: str) -> bool:
        """Whether this is the call that was recorded last, by their times."""
        began = min(copy.at for copy in self._copies[call_id])
        return all(copy.at < began for other, held in self._copies.items() if other != call_id for copy in held)

    def _transcript_is(self, call_id: str, wanted: tuple[str, ...]) -> bool:
        """Walk back from the end; the first turn that does not fit ends it."""
        pending, seen = [(call_id, len(wanted))], set[tuple[str, int]]()
        while pending:
            at, end = place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            for copy in self._copies[at]:
                begin = _begin_of(copy.wrote, wanted, end)
                if begin == 0 and copy.parent not in self._copies:
                    return True
                if begin is not None and copy.parent in self._copies:
                    pending.append((copy.parent, begin))
        return False


def _begin_of(wrote: tuple[str, ...], shown: tuple[str, ...], end: int) -> int | None:
    """Where in `shown`, up to `end`, what a call wrote begins, if only reasoning was left out; None if it is not it."""
    for mark in reversed(wrote):
        if end and shown[end - 1] == mark:
            end -= 1
        elif not mark.startswith(THOUGHT):
            return None
    return end


def _contents(items: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(content_of(mark) for mark in item_digests(items))


def _spoken(contents: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(content for content in contents if not content.startswith(THOUGHT))

"""Which call was the last one: witnesses, and what they agree on. Step 6 of the builder.

A witness that speaks for nothing abstains. Those that speak must name one call, or calls with identical tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import content_of, is_model_authored, item_digests
from toprope.trajectory import reasons
from toprope.trajectory.evidence import Call, Evidence

NOT_HELD = "response:"
"""Prefix of a claim that names a response id no record has."""


@dataclass(frozen=True, slots=True)
class TerminalWitnesses:
    """The call ids that each witness names, strongest first; an empty tuple abstains.

    `explicit`: the caller's `_ng_terminal_model_call_id`. `declared`: the records of the agent's
    `terminal_response_id`. `response_id`: those of the row's own response id. `content`: those whose output is the
    row's final output. The last two abstain when they name calls with different tokens.
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
        if calls and not all(same_tokens(calls[0], other) for other in calls[1:]):
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
    """The calls whose own output is the row's final output; among several, those whose whole transcript is the row's.

    What a call wrote is compared by content alone: agents renumber ids. Reasoning may be left out of a row.
    """
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        return ()
    final: list[Mapping[str, Any]] = []
    for item in reversed(output):
        if not is_model_authored(item):
            if final or item.get("type", "message") != "message":
                break  # what stands before a tool's result or a user's turn is an earlier call's
            continue
        final.insert(0, item)
    wrote = {entry.model_call_id: _contents(entry.output_items) for entry in entries}
    by_id = {entry.model_call_id: entry for entry in entries}
    own = _matching(wrote, _contents(final))
    if len(own) == 1:
        return own
    transcripts = {call_id: _transcript(by_id[call_id], by_id, wrote) for call_id in (own or wrote)}
    whole = _matching(transcripts, _contents(output))
    return whole or own


def _matching(wrote: Mapping[str, tuple[str, ...]], wanted: tuple[str, ...]) -> tuple[str, ...]:
    if not wanted:
        return ()
    exact = tuple(sorted(call_id for call_id, each in wrote.items() if each == wanted))
    if exact:
        return exact
    spoken = _spoken(wanted)
    return tuple(sorted(call_id for call_id, each in wrote.items() if spoken and _spoken(each) == spoken))


def _transcript(
    entry: TokenEntry, by_id: Mapping[str, TokenEntry], wrote: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    parts: list[tuple[str, ...]] = []
    seen: set[str] = set()
    at: TokenEntry | None = entry
    while at is not None and at.model_call_id not in seen:
        seen.add(at.model_call_id)
        parts.append(wrote[at.model_call_id])
        at = by_id.get(at.parent_call_id or "")
    return tuple(mark for part in reversed(parts) for mark in part)


def _contents(items: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(content_of(mark) for mark in item_digests(items))


def _spoken(contents: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(content for content in contents if not content.startswith("reasoning:"))

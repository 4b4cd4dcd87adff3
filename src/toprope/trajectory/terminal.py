"""Which call was the last one: witnesses, and what they agree on. Step 6 of the builder.

A witness that speaks for nothing abstains. Those that speak must name one call, or calls with identical tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toprope.tokens.entry import TokenEntry
from toprope.trajectory import reasons
from toprope.trajectory.content import read_row
from toprope.trajectory.evidence import Call, Evidence

METHODS = ("explicit", "declared", "response_id", "content")
"""The witnesses, strongest first."""
NOT_HELD = "response:"
"""Prefix of a claim that names a response id no record has."""


@dataclass(frozen=True, slots=True)
class TerminalWitnesses:
    """The call ids that each witness names, strongest first; an empty tuple abstains.

    `explicit`: the caller's `_ng_terminal_model_call_id`. `declared`: the records of the agent's
    `terminal_response_id`. `response_id`: those of the row's own response id. `content`: those that wrote the row's
    final output (`content.written_by`). The last two abstain when they name calls with different tokens, or one whose
    record was set aside beside others. `unread` are calls that may have written that output though their clients had
    gone (`content.read_row`): they name nobody. Where nobody is named they are not cut, but if calls that were read may
    have written it too (`read_too`), they end no trace either.
    """

    explicit: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    response_id: tuple[str, ...] = ()
    content: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    read_too: bool = False

    @classmethod
    def naming(cls, **claims: str) -> TerminalWitnesses:
        """Witnesses that name one call each: `naming(explicit="c2", content="c1")`."""
        named: dict[str, Any] = {method: (call_id,) for method, call_id in claims.items()}
        return cls(**named)


@dataclass(frozen=True, slots=True)
class Terminal:
    """What the witnesses agree on: the call and the method that names it; or the reasons why none is believed.

    `named` are all call ids that some witness speaks for, and without a call those that nobody read but that may be
    the last; `ambiguous` are those of them that the row does not need. Without any witness there is nothing else.
    """

    call: Call | None = None
    method: str | None = None
    reasons: tuple[str, ...] = ()
    named: frozenset[str] = frozenset()
    ambiguous: frozenset[str] = frozenset()


def witnesses_of(row: Mapping[str, Any], evidence: Evidence, entries: Sequence[TokenEntry]) -> TerminalWitnesses:
    """Read the witnesses of a flat result row. Nothing in the row can make it raise.

    `evidence` is what `read` made of `entries`: before that the decisions of some transports are not made yet, and no
    claim is verified.
    """
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
    read = read_row(evidence, entries, response.get("output"))
    return TerminalWitnesses(
        explicit=(explicit,) if isinstance(explicit, str) and explicit else (),
        declared=(_with_response_id(entries, declared) or (NOT_HELD + declared,)) if declared else (),
        response_id=_with_response_id(entries, response.get("id")),
        content=read.writers,
        unread=read.unread,
        read_too=read.read_too,
    )


def choose(witnesses: TerminalWitnesses, evidence: Evidence) -> Terminal:
    """Weigh the witnesses against the held calls."""
    chosen: Call | None = None
    method: str | None = None
    found: set[str] = set()
    named: set[str] = set()
    for name in METHODS:
        claim: tuple[str, ...] = getattr(witnesses, name)
        if not claim:
            continue
        calls = [evidence.calls[call_id] for call_id in sorted(set(claim)) if call_id in evidence.calls]
        all_held = len(calls) == len(set(claim))  # of a record that was set aside nobody knows what it sampled
        if calls and not (all_held and all(same_tokens(calls[0], other) for other in calls[1:])):
            if name in ("response_id", "content"):
                continue
            found.add(reasons.TERMINAL_AMBIGUOUS)
        named.update(claim)
        fault = _unusable(claim, calls, evidence)
        if fault is not None:
            found.add(fault)
        elif chosen is None:
            chosen, method = calls[0], name
        elif not same_tokens(chosen, calls[0]):
            found.add(reasons.TERMINAL_CONTRADICTION)
    if chosen is not None:
        return Terminal(chosen, method, reasons.in_order(found), frozenset(named))
    ambiguous = witnesses.unread if witnesses.read_too else frozenset[str]()
    return Terminal(None, None, reasons.in_order(found), frozenset(named | witnesses.unread), ambiguous)


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

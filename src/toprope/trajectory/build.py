"""The builder: a frozen snapshot in, safe traces or reasons to mask out. Pure, and never raises on bad evidence.

    read (evidence) -> weigh witnesses (terminal) -> settle retries (retries) -> count what is left -> lay out (trace)

The output depends on the set of records alone: byte-identical under any order and duplication. Time is linear in the
ids that the records hold. What a row looks like (`project`) and where it goes (`capture.delivery`) is left to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory import reasons
from toprope.trajectory.evidence import Call, Evidence, read
from toprope.trajectory.retries import Sorted, sort_out
from toprope.trajectory.terminal import Terminal, TerminalWitnesses, choose
from toprope.trajectory.trace import Role, Trace, make_trace

Deliver: TypeAlias = Literal["single", "all_chains"]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What `_ng_token_capture` says of the evidence and of what became of it; counts are calls unless named tokens.

    `n_calls` counts distinct held calls, `n_roots` and `n_chains` what is left after terminal selection,
    `delivered_fraction` delivered by captured generated tokens (0.0 when none were captured).
    """

    n_calls: int
    n_chains: int
    n_roots: int
    quarantined: tuple[str, ...]
    collapsed: tuple[str, ...]
    cut: tuple[str, ...]
    empty_generation_calls: int
    generated_tokens_captured: int
    generated_tokens_delivered: int
    parent_link_failures: dict[str, str]
    incomplete_reasons: tuple[str, ...]
    terminal_method: str | None
    terminal_call_id: str | None
    terminal_reason: str | None
    truncated: bool
    token_in: Mapping[str, Any] = field(default_factory=dict)

    @property
    def delivered_fraction(self) -> float:
        if self.generated_tokens_captured == 0:
            return 0.0
        return self.generated_tokens_delivered / self.generated_tokens_captured


@dataclass(frozen=True, slots=True)
class Trainable:
    """Traces that are safe to train on: one, or in `all_chains` mode one a safe chain (the terminal's first)."""

    traces: tuple[Trace, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Masked:
    """Nothing of this rollout may be trained on, for all of these reasons."""

    reasons: tuple[str, ...]
    metrics: Metrics


Built: TypeAlias = Trainable | Masked


@dataclass(slots=True)
class _Case:
    """Everything that was found out about one snapshot."""

    snapshot: TokenCaptureSnapshot
    evidence: Evidence
    terminal: Terminal
    path: list[Call]
    sorted: Sorted
    sampling: list[Call]

    def live(self) -> list[Call]:
        return [call for call in self.sampling if self.sorted.is_live(call)]

    def leaves(self) -> list[Call]:
        """Live calls that no live call continues; members of an undecided retry are leaves of their own."""
        return [call for call in self.live() if not any(self.sorted.is_live(child) for child in call.children)]

    def roots(self) -> list[Call]:
        return [call for call in self.live() if call.parent is None and not any(call.faults_here())]


def build(
    snapshot: TokenCaptureSnapshot,
    *,
    terminal: TerminalWitnesses | None = None,
    deliver: Deliver = "single",
    evidence: Evidence | None = None,
) -> Built:
    """Build the traces of one rollout, or say why there are none.

    `single` delivers the one safe chain: the named terminal's, or the only one there is. `all_chains` delivers every
    safe chain with its role, each sampled span owned by one of them. An incomplete snapshot always masks. `evidence`
    is what `read` made of this snapshot's entries, where the caller has it already.
    """
    evidence = evidence if evidence is not None else read(snapshot.rollout_id, snapshot.entries)
    chosen = choose(terminal or TerminalWitnesses(), evidence)
    path = chosen.call.path() if chosen.call is not None else []
    sampling = evidence.sampling()
    case = _Case(snapshot, evidence, chosen, path, sort_out(sampling, chosen.named, path), sampling)
    found = set(chosen.reasons) | _lost(snapshot) | _reasons_on_path(path)
    if deliver == "all_chains":
        chains = [] if found else _safe_chains(case)
        found |= set() if chains or found else _why_nothing_is_safe(case)
    elif chosen.call is not None:
        chains = [(path, "terminal")]
    else:
        found |= _reasons_without_terminal(case)
        leaves = case.leaves()
        chains = [(leaves[0].path(), "terminal")] if len(leaves) == 1 else []
    if found:
        ordered = reasons.in_order(found)
        return Masked(ordered, _metrics(case, (), ordered))
    traces = _lay_out(snapshot.rollout_id, chains)
    return Trainable(traces, _metrics(case, traces, ()))


# -- what masks -----------------------------------------------------------------------------------------------------


def _lost(snapshot: TokenCaptureSnapshot) -> set[str]:
    """The reasons of a snapshot that misses a call; a reason that says so counts even without the flag."""
    said = {reasons.bare(reason) for reason in snapshot.reasons if reasons.says_lost(reason)}
    return {reasons.INCOMPLETE, *said} if snapshot.incomplete or said else set()


def _reasons_of_fault(call: Call) -> set[str]:
    if call.fault == reasons.UNRESOLVED_PARENT:
        return set(reasons.of_unresolved(call.entry.parent_resolution_reason))
    return {str(call.fault)}


def _reasons_on_path(path: Iterable[Call]) -> set[str]:
    """Boundaries and media between the first call of a conversation and its leaf."""
    found: set[str] = set()
    for call in path:
        for fault in call.faults_here():
            found |= _reasons_of_fault(fault)
        if call.entry.media:
            found.add(reasons.MEDIA_UNSUPPORTED)
    return found


def _reasons_without_terminal(case: _Case) -> set[str]:
    """Nothing names the last call, so whatever is left counts."""
    found = set(case.evidence.aside.values())
    for call in case.evidence.calls.values():
        if call.fault is not None:
            found |= _reasons_of_fault(call)
    questions = case.sorted.open_questions()
    if questions:
        found.add(reasons.UNRESOLVED_RETRY)
    leaves, roots = case.leaves(), case.roots()
    sound = _sound(leaves)
    whole = [leaf for leaf in leaves if sound[leaf.id]]
    if len(roots) - sum(_spare(group, roots) for group in questions) > 1:
        found.add(reasons.SEVERAL_ROOTS)
    if len(whole) - sum(_spare(group, whole) for group in questions) > 1:
        found.add(reasons.SEVERAL_CHAINS)
    if any(leaf.id in case.terminal.ambiguous for leaf in leaves):
        found.add(reasons.SEVERAL_CHAINS)  # it ends with what nobody may have read, or before that
    if not leaves:
        found.add(reasons.NO_GENERATION)
    return found | _reasons_on_path(case.evidence.calls[call_id] for call_id in sound)


def _sound(leaves: Iterable[Call]) -> dict[str, bool]:
    """For each call on the way to a leaf, whether no boundary stands on its own way; paths share what they share."""
    sound: dict[str, bool] = {}
    for leaf in leaves:
        trail: list[Call] = []
        at: Call | None = leaf
        while at is not None and at.id not in sound:
            trail.append(at)
            at = at.parent
        so_far = at is None or sound[at.id]
        for call in reversed(trail):
            so_far = so_far and not any(call.faults_here())
            sound[call.id] = so_far
    return sound


def _spare(group: frozenset[str], calls: list[Call]) -> int:
    """How many of `calls` are further members of one undecided retry, which is one turn."""
    return max(0, sum(call.id in group for call in calls) - 1)


# -- every safe chain -----------------------------------------------------------------------------------------------


def _safe_chains(case: _Case) -> list[tuple[list[Call], Role]]:
    """The chains without a boundary, an image or an open question on them: the terminal's first, then by leaf id."""
    undecided = {call_id for group in case.sorted.open_questions() for call_id in group}
    # What follows the terminal is cut off, and so is a leaf that nobody read.
    ended = case.sorted.cut | (case.terminal.call.descendants() if case.terminal.call is not None else set())
    standing = [call for call in case.sampling if call.id not in ended]
    continued = {call.parent.id for call in standing if call.parent is not None}
    last = _last(case)
    chains: list[tuple[list[Call], Role]] = []
    for leaf in (call for call in standing if call.id not in continued):
        path = leaf.path()
        if any(call.id in undecided for call in path) or _reasons_on_path(path):
            continue
        chains.append((path, _role(path, case, last)))
    return sorted(chains, key=lambda chain: (chain[1] != "terminal", chain[0][-1].id))


def _last(case: _Case) -> Call | None:
    """The last call of the rollout: the named one, or that of the only chain that is left."""
    leaves = case.leaves() if case.terminal.call is None else [case.terminal.call]
    return leaves[0] if len(leaves) == 1 and leaves[0].id not in case.terminal.ambiguous else None


def _role(path: list[Call], case: _Case, last: Call | None) -> Role:
    """What a chain was, as far as evidence tells; a conversation beside the terminal one is a sub-agent's."""
    if path[-1] is last:
        return "terminal"
    if any(call.id in case.sorted.quarantined for call in path):
        return "abandoned_retry"
    if case.path and path[-1].entry.created_at < case.path[0].entry.created_at:
        return "before_compaction"
    return "sub_agent"


def _why_nothing_is_safe(case: _Case) -> set[str]:
    found = _reasons_without_terminal(case) - {reasons.SEVERAL_CHAINS, reasons.SEVERAL_ROOTS}
    return found or {reasons.NO_GENERATION}


def _lay_out(rollout_id: str, chains: Iterable[tuple[list[Call], Role]]) -> tuple[Trace, ...]:
    """Traces in order; the first that holds a sampled span owns it, and one that would own nothing is none.

    Twins (one prompt, equal samples) are one span to a trainer, whichever call a chain goes through.
    """
    owned: set[tuple[int, str]] = set()
    traces = []
    for path, role in chains:
        mine = {call.id for call in path if _sample(call) not in owned}
        owned |= {_sample(call) for call in path}
        if mine:
            traces.append(make_trace(rollout_id, path, role, lambda call, mine=mine: call.id in mine))  # type: ignore[misc]
    return tuple(traces)


def _sample(call: Call) -> tuple[int, str]:
    """What a call sampled, told by the ids alone: where it begins, and the hash of all up to its end."""
    return call.prompt_len, call.digest()


# -- what is told ---------------------------------------------------------------------------------------------------


def _metrics(case: _Case, traces: tuple[Trace, ...], found: tuple[str, ...]) -> Metrics:
    terminal, sorted_out = case.terminal, case.sorted
    delivered_roots = {trace.call_ids[0] for trace in traces}
    last = terminal.call.id if terminal.call is not None else traces[0].call_ids[-1] if traces else None
    return Metrics(
        n_calls=len(case.evidence.calls) + len(case.evidence.aside),
        n_chains=max(1, len(traces)) if terminal.call is not None else len(case.leaves()),
        n_roots=max(1, len(delivered_roots)) if terminal.call is not None else len(case.roots()),
        quarantined=tuple(sorted(sorted_out.quarantined)),
        collapsed=tuple(sorted(sorted_out.collapsed)),
        cut=tuple(sorted(sorted_out.cut)),
        empty_generation_calls=sum(call.is_empty for call in case.evidence.calls.values()),
        generated_tokens_captured=sum(len(call.generated) for call in case.sampling),
        generated_tokens_delivered=sum(int(trace.loss_mask.sum()) for trace in traces),
        parent_link_failures=case.evidence.link_failures(),
        incomplete_reasons=tuple(sorted({r for r in case.snapshot.reasons if reasons.says_lost(r)})),
        terminal_method=terminal.method or ("only_chain" if last is not None else None),
        terminal_call_id=last,
        terminal_reason=next((name for name in found if name.startswith("terminal_")), None),
        truncated=any(reasons.bare(reason) == "truncated" for reason in case.snapshot.reasons),
        token_in=_token_in(case.snapshot.entries),
    )


def _token_in(entries: Iterable[TokenEntry]) -> dict[str, Any]:
    """Calls by what their prompts were (`exact`, `first`, `fallback:<reason>`), and what was forgiven of histories;
    empty where token-in was not for them."""
    notes = {e.model_call_id: n for e in entries if isinstance(n := e.extra.get("token_in"), Mapping)}
    if not notes:
        return {}
    calls: Counter[str] = Counter()
    forgiven: Counter[str] = Counter()
    for note in notes.values():
        why = note.get("fallback")
        calls[f"fallback:{why}" if why else "exact" if "after" in note else "first"] += 1
        forgiven.update(note.get("forgiven") or {})
    return {"calls": dict(sorted(calls.items())), "forgiven": dict(sorted(forgiven.items()))}


def metrics_json(metrics: Metrics, mask_reasons: tuple[str, ...]) -> dict[str, Any]:
    """The part of `_ng_token_capture` that the evidence decides."""
    out: dict[str, Any] = {
        "n_calls": metrics.n_calls,
        "n_chains": metrics.n_chains,
        "n_roots": metrics.n_roots,
        "quarantined": len(metrics.quarantined),
        "collapsed": len(metrics.collapsed),
        "delivered_fraction": metrics.delivered_fraction,
        "generated_tokens_captured": metrics.generated_tokens_captured,
        "generated_tokens_delivered": metrics.generated_tokens_delivered,
        "parent_link_failures": metrics.parent_link_failures,
        "empty_generation_calls": metrics.empty_generation_calls,
        "incomplete_reasons": list(metrics.incomplete_reasons),
        "mask_reasons": list(mask_reasons),
        "terminal": {
            "method": metrics.terminal_method,
            "call_id": metrics.terminal_call_id,
            "reason": metrics.terminal_reason,
        },
    }
    if metrics.truncated:
        out["truncated"] = True
    if metrics.token_in:
        out["token_in"] = dict(metrics.token_in)
    return out

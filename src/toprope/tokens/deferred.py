"""Decisions that a recorder could not make, since it saw its own calls alone: made over the whole snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toprope.tokens.asked import Asked
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.lineage import DEFERRED, DEFERRED_ALL_TOLD, LineageHistory, decide_asked


def decide_deferred(entries: Iterable[TokenEntry], rollout_id: str, *, missing: bool = False) -> tuple[TokenEntry, ...]:
    """The entries with every deferred decision made, as if one recorder had seen all calls in order of `created_at`.

    Call ids are distinct. A deferred entry has its whole prompt, and all marks of its request as `item_digests`. One
    that comes out before its parent (skewed clocks) stays unresolved or becomes a root: masked, never guessed. Aborted
    calls are not told here: a first request with model-authored items stays unresolved, but for `DEFERRED_ALL_TOLD`;
    `missing` says that records of this rollout were set aside, so that not even then all is told. Entries of other
    rollouts and those whose ids are not the recorded ones vouch for nothing: they count as set aside.
    """
    held = tuple(entries)
    if not any(_is_deferred(entry) for entry in held):
        return held
    own = [entry for entry in held if entry.rollout_id == rollout_id and _is_as_recorded(entry)]
    missing = missing or len(own) < len(held)
    history, decided = LineageHistory(), {}
    for entry in sorted(own, key=lambda each: (each.created_at, each.model_call_id)):
        if _is_deferred(entry):
            history.unseen = missing or entry.parent_resolution_reason != DEFERRED_ALL_TOLD
            choice = decide_asked(history, Asked(entry.item_digests), entry.prompt_token_ids)
            decided[entry.model_call_id] = replace(
                entry,
                parent_decision=choice.decision,
                parent_call_id=choice.parent_call_id,
                parent_resolution_reason=choice.reason,
            )
        if not entry.prompt_is_delta:
            history.add(decided.get(entry.model_call_id, entry))
    return tuple(decided.get(entry.model_call_id, entry) for entry in held)


def _is_as_recorded(entry: TokenEntry) -> bool:
    """Whether length and hash fit the ids, as far as they were recorded and the prompt is whole."""
    if entry.prompt_is_delta:
        return True
    prompt, generated = entry.prompt_token_ids, entry.generation_token_ids
    if entry.cum_len is not None and entry.cum_len != len(prompt) + len(generated):
        return False
    return entry.chain_hash is None or ChainHash.of(prompt).extend(generated).hexdigest() == entry.chain_hash


def _is_deferred(entry: TokenEntry) -> bool:
    return entry.parent_resolution_reason in (DEFERRED, DEFERRED_ALL_TOLD) and not entry.prompt_is_delta

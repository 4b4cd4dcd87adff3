"""Decisions that a recorder could not make, since it saw its own calls alone: made over the whole snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from toprope.tokens.asked import Asked
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.items import content_of, item_digests
from toprope.tokens.lineage import DEFERRED, DEFERRED_ALL_TOLD, LineageHistory, decide_asked


def decide_deferred(entries: Iterable[TokenEntry], rollout_id: str, *, missing: bool = False) -> tuple[TokenEntry, ...]:
    """The entries with every deferred decision made, as if one recorder had seen all calls in their order.

    Call ids are distinct. A deferred entry has its whole prompt, and all marks of its request as `item_digests`. The
    order is that of `created_at`, but that a call comes after every call whose ids its prompt begins with: clocks of
    workers are skewed, ids are not. Aborted calls are not told here: a first request with model-authored items stays
    unresolved, but for `DEFERRED_ALL_TOLD`; `missing` says that records of this rollout were set aside, so that not
    even then all is told. Nor is it where another call said what the first request holds: the clocks may have made it
    the first. Entries of other rollouts and those whose ids are not the recorded ones vouch for nothing: they count as
    set aside.
    """
    held = tuple(entries)
    if not any(_is_deferred(entry) for entry in held):
        return held
    own = [entry for entry in held if entry.rollout_id == rollout_id and _is_as_recorded(entry)]
    missing = missing or len(own) < len(held)
    history, decided = LineageHistory(), {}
    for entry in _in_order(own):
        if _is_deferred(entry):
            told = entry.parent_resolution_reason == DEFERRED_ALL_TOLD and not missing
            history.unseen = not told or (len(history) == 0 and _was_said_before(entry, own))
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


def _in_order(entries: list[TokenEntry]) -> list[TokenEntry]:
    """By time, each after those whose prompt + generation its prompt begins with, however late these say they were."""
    timed = sorted(entries, key=lambda each: (each.created_at, each.model_call_id))
    whole = np.array([len(each.prompt_token_ids) + len(each.generation_token_ids) for each in timed])
    waiting = np.ones(len(timed), dtype=np.bool_)
    ordered: list[TokenEntry] = []
    for at, entry in enumerate(timed):
        if not waiting[at]:
            continue
        waiting[at] = False
        short = np.flatnonzero(waiting & (whole <= len(entry.prompt_token_ids)))
        before = [each for each in short if _begins(timed[each], entry)]
        waiting[before] = False
        # All of them begin the same prompt: the longer one goes on from the shorter one.
        ordered += [timed[each] for each in sorted(before, key=lambda each: len(timed[each].prompt_token_ids))]
        ordered.append(entry)
    return ordered


def _begins(parent: TokenEntry, child: TokenEntry) -> bool:
    """Whether the child's prompt begins with all ids of the parent, which has a generation."""
    prompt, generated = parent.prompt_token_ids, parent.generation_token_ids
    ids, length = child.prompt_token_ids, len(prompt) + len(generated)
    if len(generated) == 0 or parent.prompt_is_delta or child.prompt_is_delta:
        return False
    if ids[length - 1] != generated[-1]:  # spares most of those that do not the comparison of all
        return False
    return np.array_equal(ids[len(prompt) : length], generated) and np.array_equal(ids[: len(prompt)], prompt)


def _was_said_before(first: TokenEntry, entries: list[TokenEntry]) -> bool:
    """Whether another call said what the request of `first` holds, and was not itself asked with it."""
    held = {content_of(mark) for mark in first.item_digests}
    for entry in entries if held else ():
        said = {content_of(mark) for mark in item_digests(entry.output_items)}
        if entry is not first and said & held - {content_of(mark) for mark in entry.item_digests}:
            return True
    return False


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

"""Receipts: what a tombstone keeps of each call when its payload goes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash, logprobs_hash
from toprope.tokens.snapshot import Receipt


def receipts_of(entries: Sequence[TokenEntry]) -> tuple[Receipt, ...]:
    """One receipt a call, in the order given; prompts may be whole or deltas.

    `prompt_len` counts the whole prompt. A recorded `chain_hash` and `cum_len` are taken over; what was recorded
    without (by a foreign sink) is hashed here. A delta whose parent is not among `entries` and that carries no hash
    gets the empty string, which proves nothing.
    """
    states: dict[str, ChainHash | None] = {}
    by_id = {entry.model_call_id: entry for entry in entries}
    return tuple(_receipt(entry, by_id, states) for entry in entries)


def _receipt(entry: TokenEntry, by_id: dict[str, TokenEntry], states: dict[str, ChainHash | None]) -> Receipt:
    generated = len(entry.generation_token_ids)
    if entry.chain_hash is not None and (entry.cum_len is not None or not entry.prompt_is_delta):
        chain_hash = entry.chain_hash
        total = entry.cum_len if entry.cum_len is not None else len(entry.prompt_token_ids) + generated
    else:
        state = _state(entry, by_id, states)
        chain_hash = state.hexdigest() if state else ""
        total = state.count if state else len(entry.prompt_token_ids) + generated
    return Receipt(
        model_call_id=entry.model_call_id,
        parent_call_id=entry.parent_call_id,
        prompt_len=total - generated,
        gen_len=generated,
        chain_hash=chain_hash,
        logprobs_hash=logprobs_hash(entry.generation_log_probs),
    )


def _state(entry: TokenEntry, by_id: dict[str, TokenEntry], states: dict[str, ChainHash | None]) -> ChainHash | None:
    """The hash state after `entry`; None where a parent is missing or deltas form a ring."""
    pending: list[TokenEntry] = []
    at: TokenEntry | None = entry
    while at is not None and at.model_call_id not in states:
        states[at.model_call_id] = None  # stays so if the walk comes back here
        pending.append(at)
        at = by_id.get(at.parent_call_id or "") if at.prompt_is_delta else None
    for each in reversed(pending):
        before = states.get(each.parent_call_id or "") if each.prompt_is_delta else ChainHash()
        if before is not None:
            states[each.model_call_id] = before.extend(each.prompt_token_ids).extend(each.generation_token_ids)
    return states[entry.model_call_id]

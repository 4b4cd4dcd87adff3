"""What a model server saw of one call, judged and made into a record. Pure.

Whose continuation the call is comes from `tokens.lineage`; who waits, writes and marks is the recorder's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.asked import Asked
from toprope.tokens.entry import BadRecord, TokenEntry, WeightSpan, as_ids, as_log_probs
from toprope.tokens.hashing import ChainHash
from toprope.tokens.items import item_digests
from toprope.tokens.lineage import ParentChoice
from toprope.tokens.sampled import SampledTokens
from toprope.tokens.snapshot import INCOMPLETE_REASONS


@dataclass(frozen=True, slots=True)
class CallEvidence:
    """One finished model call.

    `request_items` and `output_items` are Responses items, the latter without token arrays. `tokens` may be
    anything an engine gave, `token_fault` says why they are missing or not to be trusted, `usage_input_tokens` and
    `usage_output_tokens` are the engine's own counts (None: unknown). `client_gone`: nobody may have read the
    reply. `asked`: the marks of `request_items`, from whoever has them; the items are not looked at then. `reply`
    is what else the reply needs when it is given once more from the record, `token_in` what the history of a later
    call is compared with. `continues` names the recorded call whose ids the engine was given; it was found by
    items, since ids of ours prove nothing. The arrays of `tokens` become read-only.
    """

    key: str
    call_id: str
    model: str
    request_items: Sequence[Mapping[str, Any]]
    output_items: Sequence[Mapping[str, Any]]
    tokens: SampledTokens | None
    token_fault: str | None = None
    usage_input_tokens: int | None = None
    usage_output_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    request_digest: str | None = None
    logprobs_mode: str = "raw"
    dialect: str | None = None
    client_gone: bool = False
    media: bool = False
    routed_experts: Any = None
    weight_versions: tuple[WeightSpan, ...] = ()
    reply: Mapping[str, Any] = field(default_factory=dict)
    asked: Asked | None = None
    token_in: Mapping[str, Any] = field(default_factory=dict)
    continues: str | None = None

    def marks(self) -> tuple[str, ...]:
        """The marks of all model-authored items of the request."""
        return self.asked.all() if self.asked is not None else item_digests(self.request_items)


def judged(call: CallEvidence) -> SampledTokens:
    """The call's ids and logprobs, checked. Raises `BadRecord` with the typed reason for what must not be recorded."""
    if call.tokens is None or call.token_fault is not None:
        fault = call.token_fault or "the engine returned no token ids"
        head = fault.partition(":")[0]
        raise BadRecord(head if head in INCOMPLETE_REASONS else "no_token_ids", fault)
    tokens = call.tokens
    prompt = as_ids(_given(tokens.prompt_token_ids), "prompt_token_ids")
    generation = as_ids(_given(tokens.generation_token_ids), "generation_token_ids")
    log_probs = as_log_probs(_given(tokens.generation_log_probs))
    counts = (("prompt", call.usage_input_tokens, prompt), ("output", call.usage_output_tokens, generation))
    for what, counted, ids in counts:
        if counted is not None and counted != len(ids):
            raise BadRecord("length_mismatch", f"usage counts {counted} {what} tokens, {len(ids)} ids came")
    return SampledTokens(prompt, generation, log_probs, tokens.grammar_forced)


def record_of(
    call: CallEvidence, tokens: SampledTokens, choice: ParentChoice, chain: ChainHash, created_at: float
) -> TokenEntry:
    """The record of the call, with its whole prompt; `chain` is the hash of prompt and generation.

    `tokens` were judged. Raises `BadRecord` as `TokenEntry` does.
    """
    items = tuple(dict(item) for item in call.output_items)
    return TokenEntry(
        rollout_id=call.key,
        model_call_id=call.call_id,
        model=call.model,
        created_at=created_at,
        prompt_token_ids=tokens.prompt_token_ids,
        generation_token_ids=tokens.generation_token_ids,
        generation_log_probs=tokens.generation_log_probs,
        output_items=items,
        token_item_index=len(items) - 1 if items else None,
        logprobs_mode=call.logprobs_mode,
        grammar_forced=tokens.grammar_forced,
        routed_experts=call.routed_experts,
        response_id=call.response_id,
        request_digest=call.request_digest,
        item_digests=choice.item_digests,
        parent_decision=choice.decision,
        parent_call_id=choice.parent_call_id,
        parent_resolution_reason=choice.reason,
        cum_len=len(tokens.prompt_token_ids) + len(tokens.generation_token_ids),
        chain_hash=chain.hexdigest(),
        finish_reason=call.finish_reason,
        sampling=dict(call.sampling),
        weight_versions=call.weight_versions,
        client_gone=call.client_gone,
        media=call.media,
        dialect=call.dialect,
        extra={name: dict(kept) for name, kept in (("reply", call.reply), ("token_in", call.token_in)) if kept},
    )


def _given(values: Any) -> Any:
    """Take an array over instead of copying it: at 100,000 ids a copy is most of what a record costs."""
    if values is None:
        raise BadRecord("no_token_ids", "half a bundle: ids or logprobs are missing")
    if isinstance(values, np.ndarray) and values.flags.owndata:
        _close(values)
    return values


def _close(array: NDArray[Any]) -> None:
    array.flags.writeable = False

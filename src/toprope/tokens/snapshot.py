"""What `freeze` returns: the fixed set of records of one rollout, and what is known to be missing."""

from __future__ import annotations

from dataclasses import dataclass

from toprope.tokens.entry import TokenEntry

INCOMPLETE_REASONS = (
    "dangling_intent",
    "write_failed",
    "no_token_ids",
    "bad_logprob",
    "length_mismatch",
    "conflict",
    "unobserved_path",
)


@dataclass(frozen=True, slots=True)
class TokenCaptureSnapshot:
    """The frozen capture of one rollout.

    `entries` never change for a `snapshot_id`; `incomplete` says that a call was lost and `reasons` why
    (`<reason>` or `<reason>:<detail>`; `truncated:<kind>` stands there without `incomplete`). `version` moves with
    every change of the key, so that a drop with an old pair cannot erase what came after.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a tombstone keeps of one call, enough to prove a delivered row against."""

    model_call_id: str
    parent_call_id: str | None
    prompt_len: int
    gen_len: int
    chain_hash: str
    logprobs_hash: str

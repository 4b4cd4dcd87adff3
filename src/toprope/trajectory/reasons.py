"""Why a row is masked: every reason by name, with one sentence each.

The names are fixed: rows, summaries and trainers read them. docs/reference/mask-reasons.md is written from this table.
"""

from __future__ import annotations

from typing import Final

from toprope.tokens.snapshot import INCOMPLETE_REASONS

INCOMPLETE: Final = "incomplete"
CONFLICT: Final = "conflict"
MALFORMED: Final = "malformed"
HASH_MISMATCH: Final = "hash_mismatch"
UNRESOLVED_PARENT: Final = "unresolved_parent"
UNRECORDED_TURN: Final = "unrecorded_turn"
HISTORY_REWRITTEN: Final = "history_rewritten"
AMBIGUOUS_PARENT: Final = "ambiguous_parent"
PARENT_MISSING: Final = "parent_missing"
PARENT_MISMATCH: Final = "parent_mismatch"
PARENT_CYCLE: Final = "parent_cycle"
PARENT_UNUSABLE: Final = "parent_unusable"
UNRESOLVED_RETRY: Final = "unresolved_retry"
SEVERAL_CHAINS: Final = "several_chains"
SEVERAL_ROOTS: Final = "several_roots"
NO_GENERATION: Final = "no_generation"
TERMINAL_CONTRADICTION: Final = "terminal_contradiction"
TERMINAL_NOT_CAPTURED: Final = "terminal_not_captured"
TERMINAL_AMBIGUOUS: Final = "terminal_ambiguous"
TERMINAL_EMPTY: Final = "terminal_empty"
MEDIA_UNSUPPORTED: Final = "media_unsupported"
ALREADY_DELIVERED: Final = "already_delivered"
SOURCE_FAILED: Final = "source_failed"
NO_IDENTITY: Final = "no_identity"
NO_RESPONSE: Final = "no_response"

REASONS: Final[dict[str, str]] = {
    INCOMPLETE: "The snapshot says that a call was lost; the reasons that follow say how.",
    "dangling_intent": "A call went upstream and neither a record nor an abort followed.",
    "write_failed": "A record could not be written, or was written by a newer version.",
    "no_token_ids": "The engine gave no token ids for a call, or ids out of range.",
    "bad_logprob": "A logprob was missing, not finite, positive, or the engine's placeholder.",
    "length_mismatch": "Ids, logprobs or the engine's own count differ in number.",
    "unobserved_path": "A generating route that capture does not know answered with success, or a call was lost that a"
    " recorded one may have gone on from.",
    CONFLICT: "Two records of one call differ; neither is believed.",
    MALFORMED: "A record contradicts itself or belongs to another rollout.",
    HASH_MISMATCH: "A record's ids do not give the hash or the length that was recorded with them.",
    UNRESOLVED_PARENT: "A call on the path continues no recorded call for certain; the reason that follows says why.",
    UNRECORDED_TURN: "A request held something model-authored that no recorded call explains.",
    HISTORY_REWRITTEN: "A request held recorded turns, but its prompt has other ids for them.",
    AMBIGUOUS_PARENT: "Two recorded calls with different splits fit a prompt equally well.",
    PARENT_MISSING: "A call names a parent that is not in the snapshot.",
    PARENT_MISMATCH: "A call's prompt does not begin with the ids of the parent that it names.",
    PARENT_CYCLE: "Calls name each other as parents in a ring.",
    PARENT_UNUSABLE: "A call hangs from a record that was set aside.",
    UNRESOLVED_RETRY: "One prompt was sampled several times with different results, and nothing tells which was used.",
    SEVERAL_CHAINS: "More than one conversation is left and nothing names the one that counts.",
    SEVERAL_ROOTS: "More than one first call is left and nothing names the conversation that counts.",
    NO_GENERATION: "No recorded call of the rollout sampled a token that could be delivered.",
    TERMINAL_CONTRADICTION: "The witnesses of the last call name different calls.",
    TERMINAL_NOT_CAPTURED: "The call named as the last one was not captured.",
    TERMINAL_AMBIGUOUS: "The response id declared as the last one belongs to several different calls.",
    TERMINAL_EMPTY: "The call named as the last one sampled nothing.",
    MEDIA_UNSUPPORTED: "A prompt on the path has images, whose references are not delivered with the ids.",
    ALREADY_DELIVERED: "The capture was retired: another copy of this row was accepted before.",
    SOURCE_FAILED: "The capture could not be read or rebuilt; the error says what went wrong.",
    NO_IDENTITY: "The row has no valid rollout id and attempt, so that no capture can be its own.",
    NO_RESPONSE: "The row has no response object that tokens could be put into.",
}

_UNRESOLVED_DETAIL = (UNRECORDED_TURN, HISTORY_REWRITTEN, AMBIGUOUS_PARENT)


def bare(reason: str) -> str:
    """The name of a reason without its detail (`dangling_intent:call-7` is `dangling_intent`)."""
    return reason.split(":", 1)[0]


def says_lost(reason: str) -> bool:
    """Whether a snapshot's reason is one of those that mean a lost call."""
    return bare(reason) in INCOMPLETE_REASONS


def of_unresolved(resolution_reason: str | None) -> tuple[str, ...]:
    """The reasons of a boundary whose decision was `unresolved`, from what the record says about it."""
    detail = bare(resolution_reason or "")
    return (UNRESOLVED_PARENT, detail) if detail in _UNRESOLVED_DETAIL else (UNRESOLVED_PARENT,)


def in_order(reasons: set[str]) -> tuple[str, ...]:
    """Reasons in the order of the table, unknown ones last by name."""
    rank = {name: index for index, name in enumerate(REASONS)}
    return tuple(sorted(reasons, key=lambda name: (rank.get(name, len(rank)), name)))


def page() -> str:
    """docs/reference/mask-reasons.md; `python -m toprope.trajectory.reasons` prints it."""
    rows = "\n".join(f"| `{name}` | {said} |" for name, said in REASONS.items())
    return f"""# Mask reasons

A row that capture masks has `mask_sample: true` at top level and all its reasons in `_ng_token_capture.mask_reasons`,
in the order of this table. Reward and the verifier's fields stay as they are; an environment's own mask gives no
reason here. Which calls are meant stands in `_ng_token_capture.parent_link_failures` (call id to reason and detail) and
`_ng_token_capture.incomplete_reasons`. Why these things mask: [masking](../explanation/masking.md).

| reason | what it means |
| --- | --- |
{rows}

This page is written from the table in `toprope.trajectory.reasons`.
"""


if __name__ == "__main__":
    print(page(), end="")

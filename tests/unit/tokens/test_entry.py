"""Records that came from elsewhere: what is wrong with one is said by its field, with a reason that a row can carry."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.tokens.entry import BadRecord, TokenEntry

GOOD: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c1",
    "model": "m",
    "created_at": 1,
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
    "output_items": [{"type": "message"}],
    "token_item_index": 0,
    "weight_versions": [[0, 1, "w1"]],
}


def test_a_good_record_reads_and_nulls_are_fields_left_out() -> None:
    nothing = dict.fromkeys(
        ("sampling", "client_gone", "media", "item_digests", "parent_decision", "chain_hash", "dialect")
    )
    entry = TokenEntry.from_dump({**GOOD, **nothing, "theirs": 1})
    assert (entry.parent_decision, entry.sampling, entry.client_gone) == ("unresolved", {}, False)
    assert TokenEntry.from_dump(entry.model_dump()) == entry


@pytest.mark.parametrize(
    ("field", "value", "reason", "said"),
    [
        ("prompt_token_ids", [[1, 2]], "no_token_ids", "flat list"),
        ("prompt_token_ids", [[1], [2, 3]], "no_token_ids", "flat list"),
        ("prompt_token_ids", [1, [2]], "no_token_ids", "flat list"),
        ("prompt_token_ids", [[]], "no_token_ids", "flat list"),
        ("prompt_token_ids", ["1"], "no_token_ids", "flat list"),
        ("prompt_token_ids", [1.0, 2.0], "no_token_ids", "flat list"),
        ("prompt_token_ids", [True], "no_token_ids", "flat list"),
        ("prompt_token_ids", None, "no_token_ids", "flat list"),
        ("prompt_token_ids", "12", "no_token_ids", "flat list"),
        ("prompt_token_ids", [1, 2**70], "no_token_ids", "flat list"),
        ("prompt_token_ids", [1, 2**32], "no_token_ids", "prompt_token_ids[1] is 4294967296"),
        ("generation_token_ids", [{}], "no_token_ids", "generation_token_ids"),
        ("generation_log_probs", [[-0.5]], "bad_logprob", "flat list"),
        ("generation_log_probs", [[-0.5], []], "bad_logprob", "generation_log_probs"),
        ("generation_log_probs", [None], "bad_logprob", "logprob"),
        ("generation_log_probs", ["low"], "bad_logprob", "generation_log_probs"),
        ("generation_log_probs", [10**400], "bad_logprob", "generation_log_probs"),
        ("output_items", ["text"], "write_failed", "output_items[0] is 'text', expected an object"),
        ("output_items", "text", "write_failed", "output_items is 'text', expected a list"),
        ("output_items", {"type": "message"}, "write_failed", "output_items is"),
        ("item_digests", [1], "write_failed", "item_digests[0] is 1"),
        ("model_call_id", 7, "write_failed", "model_call_id is 7"),
        ("model_call_id", None, "write_failed", "model_call_id is missing"),
        ("rollout_id", ["r"], "write_failed", "rollout_id is ['r']"),
        ("created_at", "today", "write_failed", "created_at is 'today'"),
        ("parent_call_id", {"id": "c"}, "write_failed", "parent_call_id"),
        ("parent_decision", "guessed", "write_failed", "expected root, resolved or unresolved"),
        ("parent_decision", ["root"], "write_failed", "expected root, resolved or unresolved"),
        ("cum_len", True, "write_failed", "cum_len is True, expected an integer"),
        ("token_item_index", "0", "write_failed", "token_item_index is '0'"),
        ("client_gone", "no", "write_failed", "client_gone is 'no', expected true or false"),
        ("sampling", [["temperature", 1]], "write_failed", "sampling is"),
        ("weight_versions", [[0, 1]], "write_failed", "weight_versions[0] is [0, 1], expected [start, end, version]"),
        ("weight_versions", [{"start": 0}], "write_failed", "weight_versions[0]"),
        ("weight_versions", 3, "write_failed", "weight_versions is 3"),
        ("schema_version", "1", "write_failed", "schema_version '1'"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_of_its_kind_is_named(field: str, value: Any, reason: str, said: str) -> None:
    with pytest.raises(BadRecord) as refused:
        TokenEntry.from_dump({**GOOD, field: value})
    assert refused.value.reason == reason
    assert said in str(refused.value)

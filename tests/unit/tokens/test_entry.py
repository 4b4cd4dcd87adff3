"""Records that came from elsewhere: what is wrong with one is said by its field, with a reason that a row can carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
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
        ("prompt_token_ids", [True, 5], "no_token_ids", "flat list"),
        ("generation_token_ids", [False], "no_token_ids", "flat list"),
        ("generation_log_probs", ["low"], "bad_logprob", "generation_log_probs"),
        ("generation_log_probs", ["-0.5"], "bad_logprob", "not of str"),
        ("generation_log_probs", [b"-0.5"], "bad_logprob", "not of bytes"),
        ("generation_log_probs", [False], "bad_logprob", "not of bool"),
        ("generation_log_probs", np.array(["-0.5"]), "bad_logprob", "not of str"),
        ("generation_log_probs", np.array(["-0.5"], dtype=object), "bad_logprob", "not of str"),
        ("generation_log_probs", "-", "bad_logprob", "not of str"),
        ("grammar_forced", ["no"], "write_failed", "grammar_forced is ['no'], expected a list of true and false"),
        ("grammar_forced", [0], "write_failed", "grammar_forced is [0]"),
        ("created_at", float("nan"), "write_failed", "created_at is nan"),
        ("model_call_id", "c\ud800", "write_failed", "model_call_id is 'c\\ud800', which is no Unicode text"),
        ("rollout_id", "\udfff", "write_failed", "no Unicode text"),
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


TRIPLE = {"prompt_token_ids": [1], "generation_token_ids": [9], "generation_log_probs": [-1.0]}
SAID = {"type": "message", "role": "assistant", "content": "a"}
EMPTY: dict[str, Any] = {name: [] for name in TRIPLE}


@pytest.mark.parametrize(
    ("items", "index", "reason", "said"),
    [
        ([SAID | TRIPLE, SAID], 1, "length_mismatch", "output_items[0] carries token ids, token_item_index is 1"),
        ([SAID | TRIPLE, SAID | TRIPLE], 1, "length_mismatch", "2 output items carry token ids ([0, 1]); one may"),
        ([SAID | TRIPLE, SAID | TRIPLE], None, "length_mismatch", "2 output items carry token ids"),
        ([SAID, SAID | {"generation_token_ids": [9]}], 1, "no_token_ids", "half a bundle in output_items[1]"),
        ([SAID | {**TRIPLE, "generation_log_probs": None}], 0, "no_token_ids", "generation_log_probs missing"),
    ],
)
def test_more_than_one_carrier_and_half_a_bundle_are_refused(
    items: list[dict[str, Any]], index: int | None, reason: str, said: str
) -> None:
    """Which generation is the call's own must not be open, whether a record is built here or comes from elsewhere."""
    good = TokenEntry.from_dump({**GOOD, "output_items": [SAID], "token_item_index": 0})
    for make in (
        lambda: TokenEntry.from_dump({**GOOD, "output_items": items, "token_item_index": index}),
        lambda: replace(good, output_items=tuple(items), token_item_index=index),
    ):
        with pytest.raises(BadRecord) as refused:
            make()
        assert refused.value.reason == reason
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("items", "index"), [([SAID, SAID | TRIPLE], 1), ([SAID | TRIPLE], None), ([SAID | EMPTY, SAID | TRIPLE], 1)]
)
def test_one_carrier_and_a_clients_empty_lists_are_read(items: list[dict[str, Any]], index: int | None) -> None:
    assert TokenEntry.from_dump({**GOOD, "output_items": items, "token_item_index": index}).output_items == tuple(items)

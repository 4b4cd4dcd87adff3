"""Rows: what stands in them, what is refused, and that every parser reads them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.protocol.ids import TaskId
from toprope.results.read import ResultHead
from toprope.results.rows import (
    FailureRecord,
    RowIdentity,
    Unstorable,
    check_verdict,
    encode_row,
    failure_row,
    restore,
    result_row,
)

WHO = RowIdentity("run.3-1", 2, TaskId("sums", "3"), 3, 1, {"agent_ref": {"name": "solver"}})
FAILED = FailureRecord(kind="agent_failed", stage="agent", reason="broke", terminal=False)


def read(data: bytes) -> dict[str, Any]:
    """Parse with two parsers, one of which refuses NaN, the other lone surrogates."""
    strict = json.loads(data, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    msgspec.json.decode(data)
    assert b"\n" not in data
    return dict(strict)


def test_a_result_row_is_the_verdict_flat_with_the_identity_beside_it() -> None:
    row = result_row(WHO, {"reward": 0.5, "response": {"output": []}, "extra": [1]})
    assert row == {
        "reward": 0.5,
        "response": {"output": []},
        "extra": [1],
        "mask_sample": False,
        "agent_ref": {"name": "solver"},
        "_ng_episode_id": {"rollout_id": "run.3-1", "attempt": 2},
        "_ng_task_id": {"taskset": "sums", "task_id": "3"},
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
        "_ng_attempt_index": 2,
        "_ng_rollout_id": "run.3-1",
        "_ng_schema": 1,
    }


def test_a_verdicts_own_fields_win_over_routing() -> None:
    row = result_row(WHO, {"reward": 1, "agent_ref": "theirs", "task_id": "theirs too"})
    assert (row["agent_ref"], row["task_id"]) == ("theirs", "theirs too")


def test_the_environments_mask_is_named_as_its_own() -> None:
    assert result_row(WHO, {"reward": 0.5, "mask_sample": True})["_ng_masked_by"] == ["environment"]
    assert "_ng_masked_by" not in result_row(WHO, {"reward": 0.5})


@pytest.mark.promise("CO-3")
def test_a_failure_row_has_no_reward() -> None:
    row = failure_row(WHO, FAILED)
    assert "reward" not in row
    assert (row["failure_kind"], row["stage"], row["terminal"]) == ("agent_failed", "agent", False)
    assert row["delivery"] is None
    assert row["upstream_status"] is None
    assert row["at"].endswith("Z")


def test_a_partial_response_that_cannot_be_stored_is_left_out_and_said_so() -> None:
    bad = FailureRecord(
        kind="x:y", stage="agent", reason="broke", terminal=True, partial_response={"a": [float("nan")]}
    )
    row = failure_row(WHO, bad)
    assert "partial_response" not in row
    assert "partial_response.a[0]" in row["failure_reason"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "0.5", True, 10**400, [1]])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_value(reward: Any) -> None:
    with pytest.raises(Unstorable) as refused:
        check_verdict({"reward": reward})
    assert refused.value.field == "reward"
    assert repr(reward)[:50] in str(refused.value)


def test_a_verdict_without_reward_or_with_a_reserved_key_is_refused_by_name() -> None:
    with pytest.raises(Unstorable, match="reward: the reply has none"):
        check_verdict({})
    with pytest.raises(Unstorable, match="_ng_x: the reply uses a reserved key"):
        check_verdict({"reward": 1, "_ng_x": 0})
    with pytest.raises(Unstorable, match="mask_sample"):
        check_verdict({"reward": 1, "mask_sample": "yes"})


def test_integers_beyond_floats_and_deep_nesting_are_fine() -> None:
    deep: Any = 2**64 + 1
    for _ in range(300):
        deep = [deep]
    row = {"big": 2**64 + 1, "deep": deep, "negative": -(2**70)}
    assert json.loads(encode_row(row)) == row


def test_separators_that_other_readers_cut_at_stay_in_their_line() -> None:
    row = {"text": "a\u2028b\u0085c\u2029d\u000be\r\n"}
    assert read(encode_row(row)) == row


@pytest.mark.promise("CO-7")
def test_a_lone_surrogate_is_readable_by_everybody_and_comes_back() -> None:
    row = {"response": {"output": [{"text": "half \ud835 pair", "fine": "\U0001d465"}]}, "big": 2**64 + 1}
    stored = read(encode_row(row))
    assert stored["response"]["output"][0]["text"] == "half \N{REPLACEMENT CHARACTER} pair"
    assert stored["big"] == 2**64 + 1
    assert restore(stored) == row


@pytest.mark.promise("CO-7")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_json_cannot_carry_names_its_field(value: float) -> None:
    with pytest.raises(Unstorable) as refused:
        encode_row({"fine": 1, "parts": [1.0, {"x": value}]})
    assert refused.value.field == "parts[1].x"


def test_a_key_with_a_lone_surrogate_names_its_field() -> None:
    with pytest.raises(Unstorable, match="a key with a lone surrogate"):
        encode_row({"outer": {"\ud800": 1}})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None, exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_every_value_comes_back_equal(row: dict[str, Any]) -> None:
    row.pop("_ng_lone_surrogates", None)
    assert restore(read(encode_row(row))) == row


@pytest.mark.promise("CO-3")
def test_a_reward_component_that_no_float_can_be_is_no_measure_and_ends_no_summary() -> None:
    identity = {"_ng_rollout_id": "r", "_ng_attempt_index": 0, "_ng_task_index": 0, "_ng_rollout_index": 0}
    components = {"large": 10**400, "small": -(10**400), "text": "1", "yes": True, "fine": 2, "half": 0.5}
    row = {**identity, "_ng_task_id": {"taskset": "t", "task_id": "1"}, "reward": 1, "reward_components": components}
    head = msgspec.json.decode(json.dumps(row), type=ResultHead)
    assert head.components() == {"fine": 2.0, "half": 0.5}

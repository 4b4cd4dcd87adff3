"""Rows against receipts: a proven row has no breach, and each kind of tampering is named, whatever was recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.trajectory.cases import NEXT, ROOT, go, linear
from tests.unit.trajectory.golden import entry

from toprope.tokens.receipts import receipts_of
from toprope.trajectory.build import build
from toprope.trajectory.project import TRACES, project
from toprope.trajectory.proof import check_row_against_receipts

RECEIPTS = receipts_of(linear())
Row = dict[str, Any]


def items_row() -> Row:
    entries = linear()
    (trace,) = go(build, entries).traces
    output = project(trace, {e.model_call_id: e for e in entries})
    return {"response": {"output": output}, "_ng_token_capture": {"generated_tokens_delivered": 3, "mask_reasons": []}}


def trace_row() -> Row:
    (trace,) = go(build, linear()).traces
    return {
        "response": {"output": [], TRACES: [trace.as_json()]},
        "_ng_token_capture": {"generated_tokens_delivered": 3},
    }


def kinds(row: Row) -> set[str]:
    return {breach.kind for breach in check_row_against_receipts(row, RECEIPTS)}


def test_rows_as_delivered_are_proven() -> None:
    assert kinds(items_row()) == set()
    assert kinds(trace_row()) == set()


def item(row: Row, at: int) -> Any:
    return row["response"]["output"][at]


def trace(row: Row) -> Any:
    return row["response"][TRACES][0]


def _put(holder: Callable[[Row], Any], key: str, change: Callable[[Any], Any]) -> Callable[[Row], None]:
    def tamper(row: Row) -> None:
        holder(row)[key] = change(holder(row)[key])

    return tamper


def _set(values: list[Any], at: int, value: Any) -> list[Any]:
    return [*values[:at], value, *values[at + 1 :]]


def _again(row: Row) -> None:
    """The same generation twice, made contiguous."""
    row["response"]["output"].append(copy.deepcopy(item(row, 2)))


ITEMS: dict[str, tuple[Callable[[Row], None], str]] = {
    "a generated id": (_put(lambda r: item(r, 1), "generation_token_ids", lambda ids: [8]), "not_sampled"),
    "a prompt id": (_put(lambda r: item(r, 0), "prompt_token_ids", lambda ids: [1, 9]), "not_sampled"),
    "a prompt cut": (_put(lambda r: item(r, 1), "prompt_token_ids", lambda ids: ids[1:]), "not_contiguous"),
    "a logprob": (_put(lambda r: item(r, 2), "generation_log_probs", lambda lp: [-0.1000001]), "logprobs_differ"),
    "a prompt id moved to the generation": (
        lambda row: item(row, 1).update(
            prompt_token_ids=[1, 2, 3], generation_token_ids=[4, 5], generation_log_probs=[-0.1, -0.1]
        ),
        "not_sampled",
    ),
    "a turn twice": (_again, "sampled_twice"),
    "half a bundle": (lambda row: item(row, 0).pop("generation_log_probs"), "malformed"),
    "a float as id": (_put(lambda r: item(r, 0), "prompt_token_ids", lambda ids: [1.0, 2]), "malformed"),
    "an id out of range": (_put(lambda r: item(r, 0), "prompt_token_ids", lambda ids: [-1, 2**70]), "malformed"),
    "a null logprob": (_put(lambda r: item(r, 0), "generation_log_probs", lambda lp: [None]), "malformed"),
    "lengths": (_put(lambda r: item(r, 0), "generation_log_probs", lambda lp: [-0.1, -0.1]), "malformed"),
    "a missing turn": (lambda row: row["response"]["output"].pop(), "count_differs"),
    "a masked row": (
        lambda row: row["_ng_token_capture"].update(mask_reasons=["incomplete"]),
        "masked_with_tokens",
    ),
}
TRACE: dict[str, tuple[Callable[[Row], None], str]] = {
    "a generated id": (_put(trace, "token_ids", lambda ids: _set(ids, 2, 8)), "not_sampled"),
    "a context id": (_put(trace, "token_ids", lambda ids: _set(ids, 0, 8)), "not_sampled"),
    "a logprob": (_put(trace, "logprobs", lambda lp: _set(lp, 1, -0.2)), "logprobs_differ"),
    "a context id in the loss": (
        lambda row: trace(row).update(loss_mask=[1, 0, 1, 0, 1, 0, 1], logprobs=[-0.5, *trace(row)["logprobs"]]),
        "unsampled_in_loss",
    ),
    "a mask that is no mask": (_put(trace, "loss_mask", lambda m: _set(m, 0, 2)), "malformed"),
    "a span moved": (
        lambda row: trace(row)["spans"][0].update(start=1),
        "not_sampled",
    ),
    "a span of another call": (lambda row: trace(row)["call_ids"].__setitem__(0, "c9"), "not_sampled"),
    "spans that change places": (lambda row: trace(row)["spans"][0].update(call=1), "not_sampled"),
    "a span of no call": (lambda row: trace(row)["spans"][0].update(call=3), "malformed"),
    "a span counted from behind": (lambda row: trace(row)["spans"][2].update(call=-1), "malformed"),
    "a logprob too few": (_put(trace, "logprobs", lambda lp: lp[1:]), "malformed"),
    "a logprob for every id": (_put(trace, "logprobs", lambda lp: [0, 0, lp[0], 0, lp[1], 0, lp[2]]), "malformed"),
    "spans out of order": (lambda row: trace(row)["spans"].reverse(), "malformed"),
    "lengths": (_put(trace, "loss_mask", lambda m: m[1:]), "malformed"),
    "no spans": (lambda row: trace(row).pop("spans"), "malformed"),
    "a trace twice": (lambda row: row["response"][TRACES].append(trace(row)), "sampled_twice"),
}


@pytest.mark.parametrize("name", list(ITEMS))
def test_tampering_with_items_is_named(name: str) -> None:
    row, (tamper, kind) = items_row(), ITEMS[name]
    tamper(row)
    assert kind in kinds(row)


@pytest.mark.parametrize("name", list(TRACE))
def test_tampering_with_a_trace_is_named(name: str) -> None:
    row, (tamper, kind) = trace_row(), TRACE[name]
    tamper(row)
    assert kind in kinds(row)


def test_half_a_generation_in_the_loss_is_named() -> None:
    entries = [entry("c1", [1], [2, 3], None, ROOT)]
    (made,) = go(build, entries).traces
    out = made.as_json()
    out["loss_mask"][1] = 0
    del out["logprobs"][0]
    breaches = check_row_against_receipts({"response": {TRACES: [out]}}, receipts_of(entries))
    assert "unsampled_in_loss" in {breach.kind for breach in breaches}


def test_a_row_of_another_rollout_is_not_proven() -> None:
    other = receipts_of([entry("c1", [1, 2], [4], None, ROOT), entry("c2", [1, 2, 4], [3], "c1", NEXT)])
    assert {breach.kind for breach in check_row_against_receipts(items_row(), other)} == {"not_sampled"}


def test_twins_stand_for_one_item_each() -> None:
    """Two calls with equal ids and logprobs: a row may hold that generation once for each, in two traces."""
    twins = [entry("a", [1], [2], None, ROOT), entry("b", [1], [2], None, ROOT)]
    row = items_row()
    row["response"]["output"] = [{"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}]
    row.pop("_ng_token_capture")
    assert check_row_against_receipts(row, receipts_of(twins)) == []


def test_nothing_in_a_row_makes_it_raise() -> None:
    strange: list[Any] = [None, 3, [], "x", {}, [None], [3], [{}], float("nan")]
    for value in strange:
        check_row_against_receipts({"response": value, "_ng_token_capture": value}, RECEIPTS)
        for key in ("output", TRACES):
            check_row_against_receipts({"response": {key: value}}, RECEIPTS)
        for key in ("token_ids", "loss_mask", "logprobs", "spans", "call_ids"):
            row = trace_row()
            trace(row)[key] = value
            check_row_against_receipts(row, RECEIPTS)
        for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            row = items_row()
            item(row, 0)[key] = value
            check_row_against_receipts(row, RECEIPTS)

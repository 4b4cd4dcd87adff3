"""Rows against receipts: a proven row has no breach, and each kind of tampering is named, whatever was recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.trajectory.cases import NEXT, ROOT, go, linear
from tests.unit.trajectory.golden import CASES, entries_of, entry, run

from toprope.tokens.entry import TokenEntry
from toprope.tokens.receipts import receipts_of
from toprope.trajectory.build import Trainable, build, metrics_json
from toprope.trajectory.project import TRACES, project
from toprope.trajectory.proof import Breach, check_row_against_receipts

RECEIPTS = receipts_of(linear())
Row = dict[str, Any]
METRICS = {"generated_tokens_delivered": 3, "terminal": {"method": "content", "call_id": "c3"}}


def items_row() -> Row:
    entries = linear()
    (trace,) = go(build, entries).traces
    output = project(trace, {e.model_call_id: e for e in entries})
    return {"response": {"output": output}, "_ng_token_capture": {**METRICS, "mask_reasons": []}}


def trace_row() -> Row:
    (trace,) = go(build, linear()).traces
    return {
        "response": {"output": [], TRACES: [trace.as_json()]},
        "_ng_token_capture": dict(METRICS),
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


def _without(row: Row, at: int, *, with_span: bool) -> None:
    """Take the generation of a call out of the loss of a trace, and adjust whatever counts it."""
    made = trace(row)
    span = made["spans"].pop(at) if with_span else made["spans"][at]
    if with_span:
        made["call_ids"].pop(at)
        made["spans"] = [{**each, "call": n} for n, each in enumerate(made["spans"])]
    first = sum(made["loss_mask"][: span["start"]])
    del made["logprobs"][first : first + span["end"] - span["start"]]
    made["loss_mask"][span["start"] : span["end"]] = [0] * (span["end"] - span["start"])
    row["_ng_token_capture"]["generated_tokens_delivered"] = sum(made["loss_mask"])


def _unbundle(at: int) -> Callable[[Row], None]:
    def tamper(row: Row) -> None:
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            del item(row, at)[name]
        row["_ng_token_capture"]["generated_tokens_delivered"] -= 1

    return tamper


def _deliver_nothing(row: Row) -> None:
    del row["response"][TRACES]
    row["_ng_token_capture"]["generated_tokens_delivered"] = 0


def _unowned_twin(row: Row) -> None:
    twin = copy.deepcopy(trace(row))
    twin.update(loss_mask=[0] * 7, logprobs=[])
    row["response"][TRACES].append(twin)


def _reorder(row: Row) -> None:
    made = trace(row)
    made["call_ids"].reverse()
    made["spans"] = [{**span, "call": 2 - span["call"]} for span in made["spans"]]


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
    "a logprob as text": (_put(lambda r: item(r, 0), "generation_log_probs", lambda lp: ["-0.1"]), "malformed"),
    "a bundle in the middle": (_unbundle(1), "left_out"),
    "the first bundle": (_unbundle(0), "left_out"),
    "the last bundle": (_unbundle(2), "terminal_differs"),
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
    "spans that change places": (lambda row: trace(row)["spans"][0].update(call=1), "malformed"),
    "a span of no call": (lambda row: trace(row)["spans"][0].update(call=3), "malformed"),
    "a span counted from behind": (lambda row: trace(row)["spans"][2].update(call=-1), "malformed"),
    "a logprob too few": (_put(trace, "logprobs", lambda lp: lp[1:]), "malformed"),
    "a logprob for every id": (_put(trace, "logprobs", lambda lp: [0, 0, lp[0], 0, lp[1], 0, lp[2]]), "malformed"),
    "spans out of order": (lambda row: trace(row)["spans"].reverse(), "malformed"),
    "lengths": (_put(trace, "loss_mask", lambda m: m[1:]), "malformed"),
    "no spans": (lambda row: trace(row).pop("spans"), "malformed"),
    "a generation out of the loss": (lambda row: _without(row, 1, with_span=False), "left_out"),
    "a generation and its span": (lambda row: _without(row, 0, with_span=True), "left_out"),
    "the last generation and its span": (lambda row: _without(row, 2, with_span=True), "malformed"),
    "everything": (_deliver_nothing, "nothing_delivered"),
    "ids at the end": (
        lambda row: trace(row).update(token_ids=[*trace(row)["token_ids"], 8], loss_mask=[*trace(row)["loss_mask"], 0]),
        "malformed",
    ),
    "logprobs as texts": (_put(trace, "logprobs", lambda lp: [str(each) for each in lp]), "malformed"),
    "a mask of numbers with a point": (_put(trace, "loss_mask", lambda m: [float(each) for each in m]), "malformed"),
    "a mask of truths": (_put(trace, "loss_mask", lambda m: [bool(each) for each in m]), "malformed"),
    "calls and spans in another order": (_reorder, "malformed"),
    "a call more": (lambda row: trace(row)["call_ids"].append("c9"), "malformed"),
    "a trace without loss": (_unowned_twin, "malformed"),
    "a trace that says it is masked": (lambda row: trace(row).update(mask_sample=True), "malformed"),
    "a role of nobody": (lambda row: trace(row).update(role="teacher"), "malformed"),
    "the role of another": (lambda row: trace(row).update(role="sub_agent"), "terminal_differs"),
    "a weight version that is no text": (lambda row: trace(row)["spans"][0].update(weight_version=3), "malformed"),
    "forced positions that are none": (lambda row: trace(row).update(grammar_forced=[0, 1]), "malformed"),
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


def proof_of(built: Any, entries: list[TokenEntry]) -> list[Breach]:
    """The proof of a row that was delivered so, by receipts of everything that was recorded."""
    metrics = metrics_json(built.metrics, ())
    row = {"response": {"output": [], TRACES: [each.as_json() for each in built.traces]}, "_ng_token_capture": metrics}
    breaches = check_row_against_receipts(row, receipts_of(entries))
    if len(built.traces) == 1:
        by_id = {each.model_call_id: each for each in entries}
        row["response"] = {"output": project(built.traces[0], by_id)}
        breaches += check_row_against_receipts(row, receipts_of(entries))
    return breaches


@pytest.mark.promise("CP-17")
@pytest.mark.parametrize("deliver", ["single", "all_chains"])
def test_whatever_the_builder_delivers_of_the_golden_vectors_is_proven(deliver: str) -> None:
    proven = 0
    for case in (each for each in CASES if each["expect"] == "trainable" or "all_chains" in each):
        built = run(case, deliver=deliver)
        if isinstance(built, Trainable):
            assert proof_of(built, entries_of(case)) == [], case["id"]
            proven += 1
    assert proven >= 18


def test_a_shared_generation_that_another_trace_owns_is_not_left_out() -> None:
    entries = [
        entry("c1", [1], [2], None, ROOT),
        entry("c2", [1, 2, 3], [4], "c1", NEXT),
        entry("c3", [1, 2, 5], [6], "c1", NEXT),
    ]
    built = go(build, entries, explicit="c2", deliver="all_chains")
    assert [each.loss_mask.tolist() for each in built.traces] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert proof_of(built, entries) == []


def test_what_a_call_sampled_after_the_last_one_is_not_left_out() -> None:
    """A first prompt with an example in it, and a call that samples just that example afterwards."""
    entries = [entry("c1", [1, 2, 3], [4], None, ROOT), entry("c2", [1], [2], None, ROOT)]
    assert proof_of(go(build, entries, explicit="c1"), entries) == []


def _context(row: Row, at: int) -> Row:
    """The row with one of its generations as mere context, and everything that counts it adjusted."""
    _unbundle(at)(row)
    return row


def found(row: Row, receipts: Any) -> set[str]:
    return {breach.kind for breach in check_row_against_receipts(row, receipts)}


def test_a_call_that_the_record_links_to_the_last_one_is_left_out_though_it_was_stored_after_it() -> None:
    """Writes may overtake each other: the order of receipts is that of their puts."""
    c1, c2, c3 = linear()
    assert found(items_row(), receipts_of([c3, c2, c1])) == set()
    for at in (0, 1):
        assert found(_context(items_row(), at), receipts_of([c3, c2, c1])) == {"left_out"}


def test_a_call_stored_before_the_last_one_is_left_out_though_the_record_does_not_link_them() -> None:
    """A record whose parent was not told, or was taken away, still has the ids."""
    alone = [replace(each, parent_call_id=None) for each in linear()]
    assert found(items_row(), receipts_of(alone)) == set()
    for at in (0, 1):
        assert found(_context(items_row(), at), receipts_of(alone)) == {"left_out"}
        # Stored after it and not linked, it may have sampled by chance what stood in the prompt.
        assert found(_context(items_row(), at), receipts_of([alone[2], *alone[:2]])) == set()


def test_a_span_of_a_twin_that_another_trace_owns_is_proven() -> None:
    entries = [
        *(entry(name, [1], [2], None, ROOT) for name in "ab"),
        *(entry(name, [1, 2, at], [9], via, NEXT) for name, via, at in (("x", "a", 3), ("y", "b", 4))),
    ]
    built = go(build, entries, explicit="y", deliver="all_chains")
    assert [int(each.loss_mask.sum()) for each in built.traces] == [2, 1]
    assert proof_of(built, entries) == []


@pytest.mark.parametrize("explicit", ["m", None])
def test_two_last_conversations_are_one_too_many(explicit: str | None) -> None:
    """Whether or not a last call was named."""
    entries = [entry("m", [1], [2], None, ROOT), entry("s", [7], [8], None, ROOT)]
    built = go(build, entries, deliver="all_chains", **({"explicit": explicit} if explicit else {}))
    made = [each.as_json() for each in built.traces]
    capture = {
        **metrics_json(built.metrics, ()),
        "terminal": {"method": "explicit" if explicit else "only_chain", "call_id": "m"},
    }
    row: Row = {"response": {TRACES: made}, "_ng_token_capture": capture}
    made[0]["role"] = "terminal"
    assert found(row, receipts_of(entries)) == set()
    made[1]["role"] = "terminal"
    assert found(row, receipts_of(entries)) == {"terminal_differs"}


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

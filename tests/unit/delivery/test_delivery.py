"""Delivery over a real store: what a row becomes, what fails for one row alone, what may be retired and when."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.unit.trajectory.cases import NEXT, ROOT, linear
from tests.unit.trajectory.golden import entry
from tests.unit.trajectory.test_project import trainer

from toprope.capture.delivery import (
    Delivered,
    delivered_of,
    finalize_rollout_token_capture,
    retire_redundant_capture,
    retire_rollout_token_capture,
    swap_into,
)
from toprope.capture.memory_store import MemoryStore
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.project import TRACES
from toprope.trajectory.proof import check_row_against_receipts

ENVIRONMENT = {"reward": 0.75, "accuracy": 1.0, "details": {"why": "right"}, "mask_sample": False}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def a_row(**more: Any) -> dict[str, Any]:
    response = {
        "id": "resp-agent",
        "object": "response",
        "model": "m",
        "output": [said("whatever the agent says")],
        "tools": [],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    }
    return {**ENVIRONMENT, "response": response, "_ng_rollout_id": "r", "_ng_attempt_index": 0, **more}


async def a_store(entries: list[TokenEntry], key: str = "r") -> MemoryStore:
    store = MemoryStore()
    for each in entries:
        await store.put(replace(each, rollout_id=key))
    return store


async def finalize(row: dict[str, Any], source: Any, **how: Any) -> Delivered:
    delivered = await finalize_rollout_token_capture(row, source, **how)
    assert delivered is not None
    return delivered


async def test_a_row_is_rebuilt_from_what_was_sampled_and_all_else_is_kept() -> None:
    row = a_row()
    before = copy.deepcopy(row)
    delivered = await finalize(row, await a_store(linear()))
    assert row == before, "the caller's row is not touched"
    assert delivered["mask_sample"] is False
    out = swap_into(row, delivered)
    assert {key: out[key] for key in ENVIRONMENT} == ENVIRONMENT
    response = out["response"]
    assert {k: v for k, v in response.items() if k not in ("output", "usage")} == {
        k: v for k, v in before["response"].items() if k not in ("output", "usage")
    }
    ids, mask = trainer(response["output"])
    assert (ids, mask) == ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 0, 1])
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (2, 3)
    metrics = out["_ng_token_capture"]
    assert metrics["format"] == "items"
    assert metrics["mask_reasons"] == []
    assert metrics["terminal"] == {"method": "only_chain", "call_id": "c3", "reason": None}
    assert metrics["delivered_fraction"] == 1.0
    assert metrics["build_s"] >= 0
    json.loads(json.dumps(out, allow_nan=False))


@pytest.mark.promise("CP-12")
async def test_a_masked_row_says_so_at_top_level_and_keeps_reward_and_verifier_fields() -> None:
    c1, c2, _ = linear()
    row = a_row()
    delivered = await finalize(row, await a_store([c1, replace(c2, parent_call_id="gone")]))
    out = swap_into(row, delivered)
    assert out["mask_sample"] is True
    assert out["_ng_token_capture"]["mask_reasons"] == ["parent_missing"]
    assert out["_ng_token_capture"]["parent_link_failures"] == {"c2": "parent_missing:gone"}
    assert "c2: parent_missing:gone" in delivered["error"]
    assert out["response"] == row["response"]
    assert {k: out[k] for k in ENVIRONMENT if k != "mask_sample"} == {
        k: v for k, v in ENVIRONMENT.items() if k != "mask_sample"
    }


@pytest.mark.promise("CP-12")
async def test_the_environments_own_mask_stays_and_is_not_counted_as_captures() -> None:
    row = a_row(mask_sample=True)
    out = swap_into(row, await finalize(row, await a_store(linear())))
    assert out["mask_sample"] is True
    assert out["_ng_token_capture"]["mask_reasons"] == []
    silent = a_row()
    del silent["mask_sample"]
    assert "mask_sample" not in swap_into(silent, await finalize(silent, await a_store(linear())))


async def test_no_trainable_token_is_left_in_a_masked_row() -> None:
    row = a_row()
    row["response"]["output"] = [{**said("x"), "prompt_token_ids": [1], "generation_token_ids": [2]}]
    out = swap_into(row, await finalize(row, await a_store([])))
    assert out["mask_sample"] is True
    assert out["_ng_token_capture"]["mask_reasons"] == ["no_generation"]
    assert out["response"]["output"] == [said("x")]


@pytest.mark.promise("CP-15")
async def test_a_native_row_is_left_alone_and_its_capture_is_retired_as_redundant() -> None:
    row = a_row()
    row["response"]["output"] = [
        {**said("x"), "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}
    ]
    store = await a_store(linear())
    assert await finalize_rollout_token_capture(row, store) is None
    assert swap_into(row, None) == row
    assert await retire_rollout_token_capture("r", store, None) is False
    assert await store.receipts("r") is None, "nothing was dropped yet"
    assert await retire_redundant_capture("r", store) is True
    assert await retire_redundant_capture("r", store) is True
    assert await store.list_captures() == ()


async def test_a_failure_row_is_not_built() -> None:
    assert await finalize_rollout_token_capture(a_row(failure_kind="agent_failed"), await a_store(linear())) is None


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize("kind", [None, ""])
async def test_a_row_whose_failure_is_null_is_no_failure_row(kind: str | None) -> None:
    """Left alone it would train on nothing, or on what the agent made up, and its capture would go as redundant."""
    delivered = await finalize(a_row(failure_kind=kind), await a_store(linear()))
    assert delivered["metrics"]["format"] == "items"


@pytest.mark.promise("CP-11")
async def test_finalize_twice_equals_once() -> None:
    row, store = a_row(), await a_store(linear())
    first, second = await finalize(row, store), await finalize(row, store)
    for each in (first, second):
        each["metrics"].pop("build_s")
    assert first == second
    for format in ("items", "trace"):
        rebuilt = swap_into(row, await finalize(row, store, format=format))
        assert await finalize_rollout_token_capture(rebuilt, store) is None, "a rebuilt row carries its ids"
    assert await retire_rollout_token_capture("r", store, first) is True
    assert await retire_rollout_token_capture("r", store, first) is True
    late = await finalize(row, store)
    assert (late["mask_sample"], late["metrics"]["mask_reasons"]) == (True, ["already_delivered"])


class Broken:
    """A source whose every verb fails, as a transport does when its far end is gone."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        raise self.error

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        raise self.error

    async def close(self) -> None:
        raise AssertionError("a caller's source is never closed by us")


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize(
    "error",
    [
        OSError("far end is gone"),
        RuntimeError("?"),
        KeyError("r"),
        TimeoutError(),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
)
async def test_a_failing_source_masks_one_row_and_not_the_batch(error: BaseException) -> None:
    good, bad = await a_store(linear()), Broken(error)
    rows = [a_row(), a_row(), a_row()]
    out = await asyncio.gather(*(finalize(r, s) for r, s in zip(rows, (good, bad, good), strict=True)))
    assert [each["mask_sample"] for each in out] == [False, True, False]
    assert out[1]["metrics"]["mask_reasons"] == ["source_failed"]
    assert type(error).__name__ in out[1]["error"]
    assert await retire_rollout_token_capture("r", bad, out[0]) is False
    assert await retire_redundant_capture("r", bad) is False


class Hanging(Broken):
    """A source that never answers, and says when it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this")

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return bool(await self.freeze(rollout_id))


class Early(Broken):
    """A source that breaks off before it gives anything to wait for."""

    def freeze(self, rollout_id: str) -> Any:
        raise asyncio.CancelledError

    def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> Any:
        raise asyncio.CancelledError


class Sour:
    """A foreign record that breaks off when it is read."""

    def model_dump(self) -> dict[str, Any]:
        raise asyncio.CancelledError


@pytest.mark.promise("CP-11")
async def test_a_source_that_cancels_before_and_after_it_answers_masks_its_row() -> None:
    good = await finalize(a_row(), await a_store(linear()))
    early = Early(OSError())
    for source in (early, Foreign(ForeignSnapshot("r", [Sour()]))):
        delivered = await finalize(a_row(), source)
        assert delivered["metrics"]["mask_reasons"] == ["source_failed"]
        assert "CancelledError" in delivered["error"]
    assert await retire_rollout_token_capture("r", early, good) is False
    assert await retire_redundant_capture("r", early) is False


async def test_cancelling_the_caller_is_no_failure_of_the_source() -> None:
    good = await finalize(a_row(), await a_store(linear()))
    for work in (
        lambda source: finalize_rollout_token_capture(a_row(), source),
        lambda source: retire_rollout_token_capture("r", source, good),
        lambda source: retire_redundant_capture("r", source),
    ):
        source = Hanging()
        task = asyncio.create_task(work(source))  # type: ignore[arg-type]
        await source.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@dataclass
class Foreign:
    """NeMo Gym's signatures and nothing else, holding whatever a far end sent."""

    snapshot: Any
    dropped: tuple[str, int] | None = None

    async def freeze(self, rollout_id: str) -> Any:
        return self.snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        self.dropped = (snapshot_id, version)
        return True

    async def close(self) -> None:
        pass


@dataclass
class ForeignSnapshot:
    """Without `reasons`, which is ours."""

    rollout_id: str
    entries: list[Any]
    incomplete: bool = False
    snapshot_id: str = "s-9"
    version: int = 4


async def test_a_source_with_exactly_nemo_gyms_signatures_serves() -> None:
    dumps = [each.model_dump() for each in linear()]
    for dump in dumps:
        dump["parent_resolution"] = dump.pop("parent_decision")
    source = Foreign(ForeignSnapshot("r", dumps))
    delivered = await finalize(a_row(), source)
    assert delivered["mask_sample"] is False
    assert await retire_rollout_token_capture("r", source, delivered) is True
    assert source.dropped == ("s-9", 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 99}, "write_failed"),
        ({"generation_log_probs": [float("nan")]}, "bad_logprob"),
        ({"generation_log_probs": [-9999.0]}, "bad_logprob"),
        ({"generation_log_probs": None}, "bad_logprob"),
        ({"generation_log_probs": [-0.1, -0.2]}, "length_mismatch"),
        ({"prompt_token_ids": [2**32]}, "no_token_ids"),
        ({"prompt_token_ids": []}, "no_token_ids"),
    ],
)
async def test_a_record_that_does_not_read_masks_with_its_reason(change: dict[str, Any], reason: str) -> None:
    c1, c2, _ = linear()
    bad = {**c2.model_dump(), **change}
    delivered = await finalize(a_row(), Foreign(ForeignSnapshot("r", [c1, bad])))
    assert delivered["mask_sample"] is True
    assert {"incomplete", reason} <= set(delivered["metrics"]["mask_reasons"])


@pytest.mark.parametrize("told", [{}, {"parent_resolution": None}, {"parent_decision": None}])
async def test_a_record_that_does_not_say_what_it_continues_is_no_first_call(told: dict[str, Any]) -> None:
    """Its prompt may hold the turn of a call that was lost: with a known last call too it is a boundary."""
    dump = entry("c2", [1, 2, 3, 4], [5], None, ROOT).model_dump()
    del dump["parent_decision"]
    row = a_row(_ng_terminal_model_call_id="c2")
    delivered = await finalize(row, Foreign(ForeignSnapshot("r", [{**dump, **told}])))
    assert delivered["metrics"]["mask_reasons"] == ["unresolved_parent"]


@pytest.mark.parametrize(
    "claims",
    [
        {"_ng_traces": []},
        {"_ng_traces": [{"token_ids": []}]},
        {"_ng_traces": [{"token_ids": [1, 2], "loss_mask": [0, 1]}]},
        {
            "output": [
                {"type": "message", "prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}
            ]
        },
    ],
)
async def test_a_reply_that_carries_no_token_is_not_native(claims: dict[str, Any]) -> None:
    """Left alone, its row would hold no ids of ours and its capture would be dropped as redundant."""
    row = a_row()
    row["response"] |= claims
    delivered = await finalize(row, await a_store(linear()))
    assert delivered is not None
    assert delivered["metrics"]["format"] == "items"
    assert delivered["rebuilt_response"] is not None
    assert "_ng_traces" not in delivered["rebuilt_response"]


async def test_half_a_bundle_from_a_source_masks() -> None:
    half = linear()[0].model_dump()
    del half["generation_log_probs"]
    delivered = await finalize(a_row(), Foreign(ForeignSnapshot("r", [half, 3])))
    assert {"incomplete", "no_token_ids", "write_failed"} <= set(delivered["metrics"]["mask_reasons"])


class Unreadable:
    """A foreign record that cannot even be dumped."""

    model_call_id = "c9"

    def model_dump(self) -> dict[str, Any]:
        raise KeyError("theirs")


@pytest.mark.parametrize(
    ("record", "reason", "said"),
    [
        ({"prompt_token_ids": [[1], [2, 3]]}, "no_token_ids", "c1: prompt_token_ids: expected a flat list of integers"),
        ({"output_items": ["text"]}, "write_failed", "c1: output_items[0] is 'text', expected an object"),
        ({"sampling": ["temperature"]}, "write_failed", "c1: sampling is ['temperature'], expected an object"),
        ({"generation_log_probs": [None]}, "bad_logprob", "c1: non-finite logprob at 0"),
        (Unreadable(), "write_failed", "c9: KeyError: 'theirs'"),
    ],
)
async def test_a_malformed_foreign_record_masks_with_its_own_reason_and_call(
    record: Any, reason: str, said: str
) -> None:
    first, *rest = linear()
    bad = {**first.model_dump(), **record} if isinstance(record, dict) else record
    delivered = await finalize(a_row(), Foreign(ForeignSnapshot("r", [bad, *rest])))
    found = delivered["metrics"]["mask_reasons"]
    assert {"incomplete", reason} <= set(found)
    assert "source_failed" not in found
    assert delivered["metrics"]["incomplete_reasons"][0].startswith(f"{reason}:{said}")


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize("row", [None, 3, "row", [], [("_ng_rollout_id", "r")]])
async def test_a_row_that_is_no_object_is_masked(row: Any) -> None:
    delivered = await finalize(row, await a_store(linear()))
    assert (delivered["mask_sample"], delivered["metrics"]["mask_reasons"]) == (True, ["no_identity"])
    assert type(row).__name__ in delivered["error"]


class Opaque:
    def __bool__(self) -> bool:
        raise ArithmeticError("neither true nor false")

    __iter__ = __len__ = __bool__  # type: ignore[assignment]


@pytest.mark.promise("CP-11")
async def test_a_response_of_a_kind_never_seen_masks() -> None:
    row = a_row()
    row["response"]["usage"] = {"input_tokens_details": Opaque()}
    delivered = await finalize(row, await a_store(linear()))
    assert delivered["metrics"]["mask_reasons"] == ["source_failed"]
    assert "ArithmeticError" in delivered["error"]


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize(
    "built",
    [
        "x",
        5,
        [],
        {},
        {"mask_sample": False},
        {"mask_sample": False, "metrics": 5},
        {"mask_sample": False, "metrics": "x"},
        {"mask_sample": False, "metrics": {"snapshot_id": 3, "version": 1}},
        {"mask_sample": False, "metrics": {"snapshot_id": "s", "version": True}},
    ],
)
async def test_what_is_no_delivery_retires_nothing_and_raises_nothing(built: Any) -> None:
    source = Foreign(ForeignSnapshot("r", []))
    assert await retire_rollout_token_capture("r", source, built) is False
    assert source.dropped is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"snapshot_id": None}, "snapshot_id None, expected a string"),
        ({"snapshot_id": 7}, "snapshot_id 7, expected a string"),
        ({"version": "1"}, "version '1', expected an integer"),
        ({"version": np.bool_(True)}, f"version {np.True_!r}, expected an integer of at least 0"),
        ({"version": -1}, "version -1, expected an integer of at least 0"),
        ({"version": np.int64(-1)}, f"version {np.int64(-1)!r}, expected an integer of at least 0"),
        ({"version": 2**63}, f"version {2**63}, expected an integer of at least 0"),
        ({"version": 1.0}, "version 1.0, expected an integer"),
        ({"version": None}, "version None, expected an integer"),
        ({"version": True}, "version True, expected an integer"),
        ({"incomplete": "false"}, "incomplete 'false', expected true or false"),
        ({"incomplete": None}, "incomplete None, expected true or false"),
        ({"reasons": [None]}, "reasons (None,), expected strings"),
    ],
)
async def test_a_snapshot_that_could_not_be_retired_or_read_is_masked_with_what_is_wrong(
    change: dict[str, Any], said: str
) -> None:
    """Delivered, it would train and stay in its store for good, and nothing would say so."""
    snapshot = ForeignSnapshot("r", [*linear()])
    vars(snapshot).update(change)
    delivered = await finalize(a_row(), Foreign(snapshot))
    assert delivered["metrics"]["mask_reasons"] == ["source_failed"]
    assert said in delivered["error"]


@pytest.mark.parametrize("version", [0, np.int64(3), np.uint32(3)])
async def test_a_count_of_numpys_is_a_version_and_retires(version: Any) -> None:
    """A source that keeps its counts in arrays; the row is JSON, and gives back a plain one."""
    snapshot = ForeignSnapshot("r", [*linear()])
    vars(snapshot).update(version=version, incomplete=np.int64(0))
    source = Foreign(snapshot)
    delivered = await finalize(a_row(), source)
    assert delivered["mask_sample"] is False
    assert type(delivered["metrics"]["version"]) is int
    json.dumps(swap_into(a_row(), delivered))
    assert await retire_rollout_token_capture("r", source, delivered) is True
    assert source.dropped == (snapshot.snapshot_id, version)


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize(
    "wrong",
    [
        {"generation_token_ids": "abc"},
        {"generation_log_probs": []},
        {"generation_log_probs": [-0.1, -0.1]},
        {"generation_log_probs": [-9999.0]},
        {"generation_log_probs": [None]},
        {"generation_token_ids": [-2]},
        {"generation_token_ids": [[2]]},
        {"generation_token_ids": {"0": 2}},
        {"prompt_token_ids": []},
        {"prompt_token_ids": "1"},
    ],
)
async def test_ids_of_the_agents_own_that_do_not_read_are_not_left_in_the_row(wrong: dict[str, Any]) -> None:
    row = a_row()
    own = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}
    row["response"]["output"] = [{**said("x"), **own}, {**said("y"), **own, **wrong}]
    rebuilt = await finalize(row, await a_store(linear()))
    assert rebuilt["metrics"]["format"] == "items"
    masked = await finalize(row, await a_store([]))
    assert masked["mask_sample"] is True
    assert masked["metrics"]["mask_reasons"] == ["no_generation"]
    assert "generation_token_ids" not in json.dumps(swap_into(row, masked))


async def test_a_source_that_freezes_to_nothing_masks_and_retires_nothing() -> None:
    source = Foreign(None)
    assert (await finalize(a_row(), source))["metrics"]["mask_reasons"] == ["source_failed"]
    assert await retire_redundant_capture("r", source) is False


@pytest.mark.parametrize(
    ("told", "masked"), [("dangling_intent:c9", True), ("truncated:context", False), (None, False)]
)
async def test_reasons_given_as_one_text_are_one_reason(told: Any, masked: bool) -> None:
    snapshot = ForeignSnapshot("r", [*linear()])
    vars(snapshot)["reasons"] = told
    delivered = await finalize(a_row(), Foreign(snapshot))
    assert delivered["mask_sample"] is masked
    assert delivered["metrics"]["incomplete_reasons"] == ([told] if masked else [])
    assert delivered["metrics"].get("truncated", False) is (told is not None and not masked)


async def test_logprobs_that_are_texts_mask() -> None:
    first, *rest = [each.model_dump() for each in linear()]
    first["generation_log_probs"] = [str(each) for each in first["generation_log_probs"]]
    delivered = await finalize(a_row(), Foreign(ForeignSnapshot("r", [first, *rest])))
    assert {"incomplete", "bad_logprob"} <= set(delivered["metrics"]["mask_reasons"])


async def test_a_source_that_answers_for_another_rollout_masks() -> None:
    delivered = await finalize(a_row(), Foreign(ForeignSnapshot("other", linear())))
    assert delivered["metrics"]["mask_reasons"] == ["source_failed"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_ng_rollout_id": "../x"}, "no_identity"),
        ({"_ng_rollout_id": None}, "no_identity"),
        ({"_ng_attempt_index": -1}, "no_identity"),
        ({"response": None}, "no_response"),
    ],
)
async def test_a_row_that_no_capture_can_belong_to_is_masked(change: dict[str, Any], reason: str) -> None:
    delivered = await finalize(a_row(**change), await a_store(linear()))
    assert (delivered["mask_sample"], delivered["metrics"]["mask_reasons"]) == (True, [reason])


async def test_each_attempt_has_a_capture_of_its_own() -> None:
    store = await a_store(linear(), key="r-a2")
    assert (await finalize(a_row(_ng_attempt_index=2), store))["mask_sample"] is False
    assert (await finalize(a_row(_ng_attempt_index=1), store))["mask_sample"] is True


async def test_a_nemo_gym_row_without_an_id_is_known_by_its_indices() -> None:
    store = await a_store(linear(), key="4-2")
    row = a_row(_ng_task_index=4, _ng_rollout_index=2)
    del row["_ng_rollout_id"]
    assert (await finalize(row, store))["mask_sample"] is False


async def test_a_masked_build_keeps_its_capture_as_evidence() -> None:
    store = await a_store([*linear(), entry("s", [9], [8], None, ROOT)])
    delivered = await finalize(a_row(), store)
    assert delivered["mask_sample"] is True
    assert await retire_rollout_token_capture("r", store, delivered) is False
    assert [info.rollout_id for info in await store.list_captures()] == ["r"]


async def test_a_write_after_freeze_makes_the_build_unretirable() -> None:
    store = await a_store(linear())
    delivered = await finalize(a_row(), store)
    await store.mark_incomplete("r", "late")
    assert await retire_rollout_token_capture("r", store, delivered) is False
    again = await finalize(a_row(), store)
    assert again["mask_sample"] is True


async def test_a_row_on_disk_retires_its_capture_after_a_restart() -> None:
    store, row = await a_store(linear()), a_row()
    on_disk = json.loads(json.dumps(swap_into(row, await finalize(row, store))))
    assert await retire_rollout_token_capture("r", store, delivered_of(on_disk)) is True
    assert delivered_of(row) is None
    receipts = await store.receipts("r")
    assert receipts is not None
    assert check_row_against_receipts(on_disk, receipts) == []
    on_disk["response"]["output"][1]["generation_token_ids"] = [8]
    assert "not_sampled" in {breach.kind for breach in check_row_against_receipts(on_disk, receipts)}


async def test_a_projection_over_the_limit_is_written_as_trace_and_reported() -> None:
    store, row = await a_store(linear()), a_row()
    small = await finalize(row, store)
    delivered = await finalize(row, store, size_limit=300)
    response = delivered["rebuilt_response"]
    assert response is not None
    assert small["metrics"]["format"] == "items"
    assert delivered["metrics"]["format"] == "trace"
    assert delivered["metrics"]["projected_bytes"] > 300
    assert [set(item) for item in response["output"]] == [{"type", "role", "content"}] * 3
    (trace,) = response[TRACES]
    assert trace["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert trace["loss_mask"] == [0, 0, 1, 0, 1, 0, 1]
    assert trace["logprobs"] == [-0.1, -0.1, -0.1]
    assert trace["spans"] == [{"call": at, "start": 2 * at + 2, "end": 2 * at + 3} for at in range(3)]
    assert trace["role"] == "terminal"
    assert response["usage"]["output_tokens"] == 3
    assert await retire_rollout_token_capture("r", store, delivered) is True
    assert check_row_against_receipts(swap_into(row, delivered), await store.receipts("r") or ()) == []


async def test_all_chains_deliver_a_fork_as_two_traces_that_prove() -> None:
    fork = [
        entry("root", [1, 2], [3], None, ROOT),
        entry("x", [1, 2, 3, 50], [5], "root", NEXT),
        entry("y", [1, 2, 3, 60], [6], "root", NEXT),
    ]
    store, row = await a_store(fork), a_row()
    delivered = await finalize(row, store, deliver="all_chains")
    response = delivered["rebuilt_response"]
    assert response is not None
    assert [trace["loss_mask"] for trace in response[TRACES]] == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    assert delivered["metrics"]["generated_tokens_delivered"] == 3
    assert response["usage"]["output_tokens"] == 3
    assert await retire_rollout_token_capture("r", store, delivered) is True
    assert check_row_against_receipts(swap_into(row, delivered), await store.receipts("r") or ()) == []


async def test_a_big_rollout_is_built_off_the_event_loop() -> None:
    prompt = list(range(25_000))
    store = await a_store([entry("c1", prompt, [1], None, ROOT)])
    delivered = await finalize(a_row(), store)
    assert delivered["rebuilt_response"] is not None
    assert delivered["rebuilt_response"]["output"][0]["prompt_token_ids"] == prompt


async def test_a_truncated_rollout_is_trainable_and_flagged() -> None:
    store = await a_store(linear())
    await store.begin_call("r", "c4")
    await store.abort_call("r", "c4", reason="truncated:context_length")
    delivered = await finalize(a_row(), store)
    assert delivered["mask_sample"] is False
    assert delivered["metrics"]["truncated"] is True


async def test_it_waits_for_calls_in_flight_before_it_freezes() -> None:
    store = await a_store(linear()[:2])
    await store.begin_call("r", "c3")

    class Settling(MemoryStore):
        def __init__(self) -> None:
            self.__dict__.update(store.__dict__)

        async def settle(self, rollout_id: str, timeout_s: float) -> bool:
            await self.put(linear()[2])
            return True

    assert (await finalize(a_row(), Settling()))["mask_sample"] is False


async def test_it_does_not_wait_when_told_not_to() -> None:
    store = await a_store(linear()[:2])
    await store.begin_call("r", "c3")
    delivered = await finalize(a_row(), store, settle_s=0)
    assert {"incomplete", "dangling_intent"} <= set(delivered["metrics"]["mask_reasons"])
    assert delivered["metrics"]["incomplete_reasons"] == ["dangling_intent:c3"]


@pytest.mark.parametrize(
    ("who", "last"),
    [({"_ng_terminal_model_call_id": "c2"}, "c2"), ({"terminal_response_id": "resp-1"}, "c1")],
)
async def test_a_named_terminal_cuts_what_came_after(who: dict[str, Any], last: str) -> None:
    entries = [replace(e, response_id=f"resp-{e.model_call_id[1]}") for e in linear()]
    delivered = await finalize(a_row(**who), await a_store(entries))
    assert delivered["metrics"]["terminal"]["call_id"] == last
    assert delivered["metrics"]["terminal"]["method"] in ("explicit", "declared")
    assert delivered["metrics"]["delivered_fraction"] < 1


async def test_a_contradiction_between_agent_and_content_masks() -> None:
    row = a_row(terminal_response_id="resp-1")
    row["response"]["output"] = [said("c3")]
    entries = [replace(e, response_id=f"resp-{e.model_call_id[1]}") for e in linear()]
    delivered = await finalize(row, await a_store(entries))
    assert delivered["metrics"]["mask_reasons"] == ["terminal_contradiction"]
    assert delivered["metrics"]["terminal"]["reason"] == "terminal_contradiction"

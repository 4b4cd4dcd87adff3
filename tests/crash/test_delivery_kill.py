"""freeze -> build -> row written -> synced -> outcome -> dropped: a real collector is killed at every step.

What is left must lead to exactly one delivered row, and the tokens are in the row or still in custody, never in
neither. A restart reconciles; where no row was written, finalizing again gives the same row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.crash.nursery import Fate, Nursery
from tests.crash.scenes import LATE, STORES, TURNS

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.collector.audit import audit
from toprope.collector.reconcile import Reconciled, reconcile
from toprope.results.layout import RunDir
from toprope.storage.rows import read_rows
from toprope.tokens.lifecycle import Phase

pytestmark = pytest.mark.promise("CP-10")

KEY = f"run.{LATE}-0"
GENERATED = [generated for _, generated in TURNS]


def whole_rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(row.data) for row in read_rows(RunDir(directory).results) if row.damage is None]


def generated(row: dict[str, Any]) -> list[list[int]]:
    return [item["generation_token_ids"] for item in row["response"]["output"] if "generation_token_ids" in item]


async def state_of(source: Any, key: str) -> str:
    return next((str(i.state) for i in await source.list_captures(retired=True) if i.rollout_id == key), "absent")


async def check(directory: Path, fate: Fate, store: str, where: str, verdict: dict[str, Any], lost: bool) -> str:
    """What one kill left; returns how far delivery had come."""
    rows = {row["_ng_rollout_id"]: row for row in whole_rows(directory)}
    assert len(rows) == len(whole_rows(directory)), where
    assert generated(rows["run.0-0"]) == GENERATED, where
    source = STORES[store](directory / "captures")
    try:
        state = await state_of(source, KEY)
        assert await state_of(source, "run.0-0") == Phase.RETIRED, where
        if f"Finished {KEY}" in fate.said:
            assert KEY in rows, where  # said is durable
        row = rows.get(KEY)
        if row is None:
            assert state in (Phase.OPEN, Phase.FROZEN), where
            again = await finalize_rollout_token_capture(verdict, source, settle_s=0)
            assert again is not None
            assert again["mask_sample"] == lost, where
            assert lost or generated({"response": again["rebuilt_response"]}) == GENERATED, where
            return "no row"
        assert row["mask_sample"] == lost, where
        if lost:
            assert state == Phase.FROZEN, where  # evidence stays
            assert (await reconcile(RunDir(directory), source)).retired == (), where
            assert await state_of(source, KEY) == Phase.FROZEN, where
            assert [e.model_call_id for e in (await source.freeze(KEY)).entries] == ["call-0001", "call-0002"]
            return "row"
        assert generated(row) == GENERATED, where
        assert state in (Phase.FROZEN, Phase.RETIRED), where
        for retired in ((KEY,) if state == Phase.FROZEN else (), ()):  # a second start finds nothing to do
            assert await reconcile(RunDir(directory), source) == Reconciled(retired, ()), where
            assert await state_of(source, KEY) == Phase.RETIRED, where
        refound = await finalize_rollout_token_capture(verdict, source, settle_s=0)
        assert refound is not None
        assert refound["metrics"]["mask_reasons"] == ["already_delivered"], where
        report = await audit(RunDir(directory), source)
        assert report.counts["proven"] == 2, where
        return "row" if state == Phase.FROZEN else "retired"
    finally:
        await source.close()


@pytest.mark.parametrize("lose", ["", "lost"])
@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_collector_killed_at_any_step_of_delivery_delivers_once_and_loses_nothing(
    ward: Nursery, memory_dir: Path, store: str, lose: str
) -> None:
    whole = ward.run("collect", memory_dir / "whole" / "run", store=store, lose=lose)
    assert whole.code == 0, whole.error
    row = next(row for row in whole_rows(memory_dir / "whole" / "run") if row["_ng_rollout_id"] == KEY)
    verdict = {name: value for name, value in row.items() if not name.startswith("_ng_token") and name != "mask_sample"}
    verdict["response"] = {"id": "resp-1", "object": "response", "output": []}
    steps = ["write results.jsonl", "fdatasync results.jsonl", "write journal.jsonl", "fdatasync journal.jsonl"]
    assert [each for each in whole.points if each in steps][:4] == steps  # the row, synced, before its outcome
    came: list[str] = []
    for at, label in enumerate(whole.points, 1):
        directory = memory_dir / str(at) / "run"
        fate = ward.run("collect", directory, kill_at=at, store=store, lose=lose)
        assert fate.code == -9, fate
        assert fate.points == whole.points[:at]
        came.append(await check(directory, fate, store, f"killed at {at}: {label}", verdict, bool(lose)))
    order = ["no row", "row"] if lose else ["no row", "row", "retired"]
    assert list(dict.fromkeys(came)) == order
    assert came == sorted(came, key=order.index)  # delivery only ever goes forward

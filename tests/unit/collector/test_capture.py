"""Captured rows in a run: delivered, masked, left alone; evidence kept or retired."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.audit import audit
from toprope.collector.collect import Collector
from toprope.collector.settings import CaptureSettings, Destination, RunSettings
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.results.journal import ReceiptsLine, read_journal
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, ScriptedEnvironment, collect_scripted, sample_calls
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot

TURNS = [([1, 10, 11], [50, 2]), ([9, 12], [51, 52, 2])]


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": str(index)}} for index in range(count)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def captured(store: Any) -> Callable[[Run], Any]:
    """Episodes whose model calls are recorded; task 1 loses a call."""

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        if run.task_id == "1":
            await store.begin_call(run.key, "lost")
            await store.mark_incomplete(run.key, "lost")
        return run.result(0.5, note="verifier's own")

    return answer


async def test_captured_rows_carry_what_was_sampled_and_their_captures_are_retired(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "capture.sqlite")
    summary = await collect_scripted(
        tmp_path, captured(store), tasks(1), source=store, selected=True, capture=no_wait()
    )
    [row] = rows(RunDir(tmp_path).results)
    bundles = [item for item in row["response"]["output"] if "generation_token_ids" in item]
    assert [item["prompt_token_ids"] for item in bundles] == [[1, 10, 11], [1, 10, 11, 50, 2, 9, 12]]
    assert [item["generation_token_ids"] for item in bundles] == [[50, 2], [51, 52, 2]]
    assert bundles[0]["generation_log_probs"] == [-0.1, -0.2]
    assert (row["reward"], row["note"], row["mask_sample"]) == (0.5, "verifier's own", False)
    assert await store.list_captures() == ()
    assert (summary.tokens.calls, summary.tokens.generated_delivered) == (2, 5)
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches
    assert (report.counts["captured"], report.counts["proven"], report.counts["calls"]) == (1, 1, 2)
    await store.close()


async def test_a_reward_that_its_environment_calls_a_failure_still_has_its_tokens(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(0.5, failure_kind="env:flaky", failure_reason="it was slow")

    summary = await collect_scripted(tmp_path, answer, tasks(1), source=store, selected=True, capture=no_wait())
    [row] = rows(RunDir(tmp_path).results)
    assert (row["reward"], row["failure_kind"], row["failure_reason"]) == (0.5, "env:flaky", "it was slow")
    assert summary.tokens.generated_delivered == 5
    assert await store.list_captures() == ()


@pytest.mark.promise("CP-12")
async def test_a_masked_row_keeps_reward_and_verifier_fields_and_its_evidence_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    summary = await collect_scripted(
        tmp_path, captured(store), tasks(2), source=store, selected=True, capture=no_wait()
    )
    row = next(row for row in rows(RunDir(tmp_path).results) if row["_ng_task_index"] == 1)
    assert (row["reward"], row["note"], row["mask_sample"]) == (0.5, "verifier's own", True)
    assert row["_ng_masked_by"] == ["capture"]
    assert "incomplete" in row["_ng_token_capture"]["mask_reasons"]
    assert not any("generation_token_ids" in item for item in row["response"]["output"])
    assert [info.rollout_id for info in await store.list_captures()] == ["run.1-0"]
    assert (summary.masks.capture, summary.masks.environment) == (1, 0)
    assert summary.masks.reasons["incomplete"] == 1
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches
    assert report.counts["kept_evidence"] == 1


@pytest.mark.promise("CP-15")
async def test_native_captured_and_evaluation_rollouts_in_one_run_each_get_their_due(tmp_path: Path) -> None:
    store = MemoryStore()

    async def native(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        reply = run.result(1.0)
        item = reply["result"]["response"]["output"][0]
        item |= {"prompt_token_ids": [7], "generation_token_ids": [8], "generation_log_probs": [-0.5]}
        return reply

    async def evaluation(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    environments = {
        "native": (ScriptedEnvironment(native), True),
        "captured": (ScriptedEnvironment(captured(store)), True),
        "evaluation": (ScriptedEnvironment(evaluation), False),
    }
    async with Client(inline={name: environment.app for name, (environment, _) in environments.items()}) as client:
        collector = Collector(
            run_dir=tmp_path,
            environments={
                name: Destination(peer=client.peer(f"inline://{name}", "environment"), selected=selected)
                for name, (_, selected) in environments.items()
            },
            source=store,
            settings=RunSettings(run_id="run"),
            capture=no_wait(),
        )
        sets = [*environments, "captured"]
        await collector.collect([{"responses_create_params": {}, "task_source": name} for name in sets])
    found = {row["_ng_task_index"]: row for row in rows(RunDir(tmp_path).results)}
    assert [found[index]["task_source"] for index in range(4)] == sets
    by_set = {found[index]["task_source"]: found[index] for index in range(3)}
    trained = found[3]
    carried = [item["generation_token_ids"] for item in trained["response"]["output"] if "prompt_token_ids" in item]
    assert (trained["mask_sample"], carried) == (False, [[50, 2], [51, 52, 2]])
    assert by_set["native"]["response"]["output"][0]["prompt_token_ids"] == [7]
    assert "_ng_token_capture" not in by_set["native"]
    assert "incomplete" in by_set["captured"]["_ng_token_capture"]["mask_reasons"]
    assert "_ng_token_capture" not in by_set["evaluation"]
    assert not by_set["evaluation"]["mask_sample"]
    kept = {info.rollout_id: info.state for info in await store.list_captures()}
    assert kept == {"run.1-0": "frozen", "run.2-0": "open"}  # the native one's redundant capture is gone


class GymStore:
    """A sink and a source with exactly NeMo Gym's verbs and signatures: no reason, no abort, no reads, no receipts."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.closed = False

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._store.begin_call(rollout_id, model_call_id)

    async def put(self, entry: TokenEntry) -> None:
        await self._store.put(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._store.mark_incomplete(rollout_id, model_call_id)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return await self._store.freeze(rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def close(self) -> None:
        self.closed = True


@pytest.mark.promise("CP-16")
@pytest.mark.promise("CP-11")
async def test_a_source_with_exactly_nemo_gyms_signatures_passes_a_run_and_is_never_closed(tmp_path: Path) -> None:
    store = GymStore()
    summary = await collect_scripted(
        tmp_path, captured(store), tasks(1), source=store, selected=True, capture=no_wait()
    )
    assert summary.coverage.measured == 1
    assert not store.closed
    [kept] = [line for line in read_journal(RunDir(tmp_path).journal) if isinstance(line, ReceiptsLine)]
    assert [receipt.gen_len for receipt in kept.receipts] == [2, 3]
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches
    assert (report.counts["proven"], report.counts["unverifiable"]) == (1, 0)


class FailingFor:
    """A source whose transport breaks for one key."""

    def __init__(self, store: MemoryStore, key: str, error: BaseException | None = None) -> None:
        self._store = store
        self._key = key
        self._error = error or ConnectionError("transport down")

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        if rollout_id == self._key:
            raise self._error
        return await self._store.freeze(rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def close(self) -> None:
        raise AssertionError("a caller's source is never closed")


@pytest.mark.promise("CP-11")
@pytest.mark.parametrize("error", [ConnectionError("transport down"), asyncio.CancelledError()])
async def test_a_failing_source_masks_one_row_and_not_the_batch(tmp_path: Path, error: BaseException) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    summary = await collect_scripted(
        tmp_path, answer, tasks(3), source=FailingFor(store, "run.1-0", error), selected=True, capture=no_wait()
    )
    assert (summary.coverage.measured, summary.coverage.masked, summary.coverage.omitted) == (2, 1, 0)
    assert summary.masks.reasons == {"source_failed": 1}


@pytest.mark.promise("CP-11")
async def test_a_drop_that_cancels_keeps_the_evidence_and_the_row(tmp_path: Path) -> None:
    store = MemoryStore()

    class Dropping(FailingFor):
        async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            raise asyncio.CancelledError

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    summary = await collect_scripted(
        tmp_path, answer, tasks(2), source=Dropping(store, ""), selected=True, capture=no_wait()
    )
    assert (summary.coverage.measured, summary.coverage.omitted) == (2, 0)
    assert {info.state for info in await store.list_captures()} == {"frozen"}


@pytest.mark.promise("CP-10")
async def test_the_row_is_on_disk_before_its_capture_is_dropped(tmp_path: Path) -> None:
    store = MemoryStore()
    on_disk: list[bool] = []

    class Watched(FailingFor):
        async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            on_disk.append(rollout_id.encode() in RunDir(tmp_path).results.read_bytes())
            return await store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    await collect_scripted(tmp_path, answer, tasks(3), source=Watched(store, ""), selected=True, capture=no_wait())
    assert on_disk == [True, True, True]


@pytest.mark.promise("CP-12")
async def test_the_mask_limit_stops_the_run_after_the_row_is_on_disk_and_names_the_reasons(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await store.mark_incomplete(run.key, "lost")
        return run.result(1.0)

    limit = CaptureSettings(enabled=True, settle_s=0.0, max_mask_fraction=0.5, mask_fraction_min_samples=4)
    settings = RunSettings(run_id="run", concurrency=1)
    summary = await collect_scripted(
        tmp_path, answer, tasks(20), source=store, selected=True, capture=limit, settings=settings
    )
    assert (summary.stop_reason, summary.exit_status) == ("mask_fraction", 1)
    assert (summary.coverage.masked, summary.coverage.omitted) == (4, 16)
    assert "incomplete (4)" in summary.message


async def test_what_an_earlier_run_left_under_a_key_is_set_aside_and_never_mixed(tmp_path: Path) -> None:
    store = MemoryStore()
    await sample_calls(store, "run.0-0", [([99], [98])])

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    summary = await collect_scripted(tmp_path, answer, tasks(1), source=store, selected=True, capture=no_wait())
    assert summary.coverage.measured == 1
    assert [(info.rollout_id, info.abandoned) for info in await store.list_captures()] == [("run.0-0~1", True)]
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches


async def test_a_used_key_that_cannot_be_set_aside_is_refused_before_dispatch(tmp_path: Path) -> None:
    store = MemoryStore()
    await sample_calls(store, "run.1-0", TURNS)

    class Reading(GymStore):
        async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
            return await store.open_entries(rollout_id, since)

    with pytest.raises(ConfigError, match=r"'run\.1-0'"):
        await collect_scripted(tmp_path / "run", captured(store), tasks(2), source=Reading(), selected=True)
    assert not (tmp_path / "run").exists()


async def test_a_new_attempt_never_holds_an_old_ones_entries(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS if run.attempt else [([5], [6])])
        return run.result(1.0) if run.attempt else run.failure()

    await collect_scripted(tmp_path, answer, tasks(1), source=store, selected=True, capture=no_wait())
    [row] = rows(RunDir(tmp_path).results)
    assert row["response"]["output"][0]["prompt_token_ids"] == [1, 10, 11]
    assert {info.rollout_id for info in await store.list_captures()} == {"run.0-0"}
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches


def no_wait() -> CaptureSettings:
    return CaptureSettings(enabled=True, settle_s=0.0)

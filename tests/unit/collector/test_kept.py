"""What stays in the store, why it is said to stay, and how it goes: at a start, or by a sweep that was asked for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import Intent
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.audit import audit
from toprope.collector.kept import Why, kept_evidence, may_go
from toprope.collector.reconcile import reconcile
from toprope.collector.settings import CaptureSettings
from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, collect_scripted, sample_calls

TURNS = [([1, 10], [50, 2]), ([9], [51, 2])]
NO_WAIT = CaptureSettings(enabled=True, settle_s=0.0)

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.settings import CaptureSettings
from toprope.testing.episodes import collect_scripted, sample_calls

class DiesBeforeDrop(SqliteStore):
    async def drop(self, rollout_id, *, snapshot_id, version):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    store = DiesBeforeDrop(Path(sys.argv[1]) / "capture.sqlite")
    async def answer(run):
        await sample_calls(store, run.key, [([1, 10], [50, 2]), ([9], [51, 2])])
        return run.result(1.0)
    tasks = [{"responses_create_params": {"input": "0"}}]
    capture = CaptureSettings(enabled=True, settle_s=0.0)
    await collect_scripted(sys.argv[1], answer, tasks, source=store, selected=True, capture=capture)

asyncio.run(main())
"""


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": str(index)}} for index in range(count)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed between its row and the drop of its capture."""
    path = tmp_path_factory.mktemp("killed")
    ran = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, check=False, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    return path


@pytest.mark.promise("CP-10")
async def test_a_start_retires_what_a_killed_run_had_delivered_and_delivers_no_row_twice(killed: Path) -> None:
    store = SqliteStore(killed / "capture.sqlite")
    run_dir = RunDir(killed)
    before = run_dir.results.read_bytes()
    [kept] = await kept_evidence(run_dir, store)
    assert (kept.info.state, kept.why) == ("frozen", Why.HALF_DROPPED)
    assert may_go([kept], 0.0) == ()  # a sweep of evidence keeps its hands off it: it is to be retired, with receipts

    async def never(run: Run) -> dict[str, Any]:
        raise AssertionError("dispatched again")

    with pytest.raises(ConfigError, match="already holds a run"):
        await collect_scripted(killed, never, tasks(1), source=store, selected=True, capture=NO_WAIT)
    assert await kept_evidence(run_dir, store) == ()
    assert run_dir.results.read_bytes() == before
    assert (await reconcile(run_dir, store)).retired == ()
    report = await audit(run_dir, store)
    assert (report.ok, report.counts["proven"]) == (True, 1)
    await store.close()


async def test_a_row_whose_capture_changed_after_it_was_written_keeps_its_evidence(tmp_path: Path) -> None:
    store = MemoryStore()

    class LateMark(MemoryStore):
        async def freeze(self, rollout_id: str) -> Any:
            return await store.freeze(rollout_id)

        async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            await store.mark_incomplete(rollout_id, "late")
            return await store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    await collect_scripted(tmp_path, answer, tasks(1), source=LateMark(), selected=True, capture=NO_WAIT)
    assert (await reconcile(RunDir(tmp_path), store)).kept == ("run.0-0",)
    assert [info.state for info in await store.list_captures()] == ["frozen"]


def opened(kind: str, directory: Path) -> SqliteStore | JsonlStore:
    return SqliteStore(directory / "capture.sqlite") if kind == "sqlite" else JsonlStore(directory / "captures")


async def every_kind(tmp_path: Path, kind: str = "sqlite") -> tuple[SqliteStore | JsonlStore, SqliteStore | JsonlStore]:
    """A run directory with one capture of every kind: the store, and a second one whose writer is alive."""
    store = opened(kind, tmp_path)
    await sample_calls(store, "run.0-0", [([7], [8])])  # an earlier run's

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        if run.task_id == "1":
            await store.mark_incomplete(run.key, "lost", reason="bad_logprob")
        return run.failure(terminal=True) if run.task_id == "2" else run.result(1.0)

    await collect_scripted(tmp_path, answer, tasks(3), source=store, selected=True, capture=NO_WAIT)
    gone = opened(kind, tmp_path)
    await gone.begin_call("intent-only", "c1", intent=Intent(writer_epoch="gone"))
    await gone.close()
    await store.abort_call("abort-only", "c1", reason="client_gone")
    await store.freeze("frozen-only")
    living = opened(kind, tmp_path)
    await living.begin_call("live", "c1", intent=Intent(writer_epoch="here"))
    return store, living


@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
async def test_everything_that_is_kept_is_listed_with_the_reason(kind: str, tmp_path: Path) -> None:
    store, living = await every_kind(tmp_path, kind)
    kept = {each.info.rollout_id: each for each in await kept_evidence(RunDir(tmp_path), store, retired=True)}
    assert {key: each.why.value for key, each in kept.items()} == {
        "run.0-0~1": "abandoned",
        "run.0-0": "retired",
        "run.1-0": "masked",
        "run.2-0": "failed",
        "intent-only": "dead writer",
        "abort-only": "open",
        "frozen-only": "undelivered",
        "live": "open",
    }
    assert "bad_logprob" in kept["run.1-0"].reasons
    assert kept["run.2-0"].reasons[0] == "agent_failed"
    assert kept["abort-only"].reasons == ("client_gone x1",)
    assert (kept["live"].info.writer, kept["abort-only"].info.writer) == ("live", "unknown")
    await living.close()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
async def test_a_sweep_discards_old_evidence_but_not_a_live_writers_and_leaves_the_fence(
    kind: str, tmp_path: Path
) -> None:
    store, living = await every_kind(tmp_path, kind)
    run_dir = RunDir(tmp_path)
    kept = await kept_evidence(run_dir, store)
    assert may_go(kept, 3600.0, undelivered=True) == ()
    going = may_go(kept, 0.0, undelivered=True)
    assert set(going) == {each.info.rollout_id for each in kept} - {"live"}
    assert set(await store.discard([*going, "live", "run.0-0", "never-heard-of"])) == set(going)
    assert await store.sweep_retired(0.0) == 1
    left = [each.info.rollout_id for each in await kept_evidence(run_dir, store, retired=True)]
    assert left == ["live"]
    for key in ("run.1-0", "run.2-0", "run.0-0"):
        with pytest.raises(Exception, match="closed"):
            await store.begin_call(key, "old-worker")
        assert await store.was_swept(key)
    report = await audit(run_dir, store)
    assert report.ok, report.breaches
    assert report.counts["unverifiable"] == 2
    await living.close()
    await store.close()


@pytest.mark.promise("CP-10")
@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
async def test_a_sweep_of_evidence_keeps_what_could_still_be_delivered(kind: str, tmp_path: Path) -> None:
    store, living = await every_kind(tmp_path, kind)
    for key in ("whole", "lost"):
        await sample_calls(store, key, TURNS)
    await store.mark_incomplete("lost", "c9")
    for key in ("whole", "lost"):
        await store.freeze(key)
    died = opened(kind, tmp_path)
    await died.begin_call("dead", "turn-0", intent=Intent(writer_epoch="gone, too"))
    await sample_calls(died, "dead", TURNS)
    await died.close()
    kept = await kept_evidence(RunDir(tmp_path), store)
    going = set(may_go(kept, 0.0))
    assert going == {"run.0-0~1", "run.1-0", "run.2-0", "intent-only", "frozen-only", "lost"}
    assert set(may_go(kept, 0.0, undelivered=True)) - going == {"whole", "dead", "abort-only"}
    await living.close()
    await store.close()


async def test_evidence_that_went_without_a_sweep_is_a_breach(tmp_path: Path) -> None:
    store, living = await every_kind(tmp_path)
    snapshot = await store.freeze("run.1-0")
    assert await store.drop("run.1-0", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    report = await audit(RunDir(tmp_path), store)
    assert "evidence_missing" in {breach.kind for breach in report.breaches}
    await living.close()
    await store.close()


async def test_the_captures_of_a_run_that_only_writes_are_kept_and_accounted_for(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        await store.mark_incomplete(run.key, "lost")
        return run.result(1.0)

    only = CaptureSettings(enabled=True, rebuild_response=False, max_mask_fraction=0.0, mask_fraction_min_samples=1)
    await store.abort_call("run.0-0", "of-an-earlier-run", reason="client_gone")
    summary = await collect_scripted(tmp_path, answer, tasks(2), source=None, selected=True, capture=only)
    assert (summary.coverage.measured, summary.masks.capture, summary.stop_reason) == (2, 0, "done")
    kept = {each.info.rollout_id: each.why for each in await kept_evidence(RunDir(tmp_path), store)}
    assert kept == {"run.0-0": Why.WRITE_ONLY, "run.1-0": Why.WRITE_ONLY}  # nothing set aside, nothing retired
    assert may_go(await kept_evidence(RunDir(tmp_path), store), 0.0) == ()
    assert (await reconcile(RunDir(tmp_path), store)).retired == ()
    for line in RunDir(tmp_path).results.read_text().splitlines():
        assert "_ng_token_capture" not in json.loads(line)
    report = await audit(RunDir(tmp_path), store)
    assert report.ok, report.breaches


async def test_a_source_without_supersede_refuses_a_key_that_only_holds_an_intent(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.begin_call("run.1-0-a1", "c1")

    class Listing:
        def __init__(self) -> None:
            self.freeze, self.drop, self.close = store.freeze, store.drop, store.close
            self.list_captures, self.sweep_retired = store.list_captures, store.sweep_retired

    async def never(run: Run) -> dict[str, Any]:
        raise AssertionError("dispatched")

    with pytest.raises(ConfigError, match=r"'run\.1-0-a1'"):
        await collect_scripted(tmp_path / "run", never, tasks(2), source=Listing(), selected=True, capture=NO_WAIT)
    assert not (tmp_path / "run").exists()


async def test_all_agents_selects_every_agent(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    every = CaptureSettings(enabled=True, all_agents=True, settle_s=0.0)
    summary = await collect_scripted(tmp_path, answer, tasks(1), source=store, selected=False, capture=every)
    assert (summary.tokens.rows, summary.tokens.generated_delivered) == (1, 4)
    with pytest.raises(ConfigError, match="no source"):
        await collect_scripted(tmp_path / "b", answer, tasks(1), source=None, selected=False, capture=every)

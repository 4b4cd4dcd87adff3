"""A run whose process was killed: the files alone still account for every rollout."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toprope.collector.audit import audit
from toprope.collector.summary import summarise
from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, collect_scripted

SCRIPT = """
import asyncio, os, signal, sys
from toprope.collector.settings import RunSettings
from toprope.testing.episodes import collect_scripted

async def answer(run):
    index = int(run.task_id)
    if index < 4:
        return run.result(1.0, mask_sample=index == 1) if index != 2 else run.failure(terminal=True)
    if index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.Event().wait()

tasks = [{"responses_create_params": {"input": str(index)}} for index in range(10)]
settings = RunSettings(run_id="run", concurrency=2)
asyncio.run(collect_scripted(sys.argv[1], answer, tasks, settings=settings))
"""


@pytest.fixture
def killed(tmp_path: Path) -> RunDir:
    """A run that was killed while tasks 4 and 5 were in flight."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, check=False, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    return RunDir(tmp_path)


@pytest.mark.promise("CO-1")
def test_the_coverage_identity_holds_after_kill_9(killed: RunDir) -> None:
    summary = summarise(killed)
    counts = summary.coverage
    assert (counts.measured, counts.masked, counts.failed) == (2, 1, 1)
    assert (counts.unknown, counts.omitted, counts.expected) == (2, 4, 10)
    assert (summary.stop_reason, summary.exit_status) == ("killed", 1)


async def test_a_killed_run_is_proven_as_far_as_it_went(killed: RunDir) -> None:
    report = await audit(killed, None)
    assert report.ok, report.breaches
    assert (report.counts["results"], report.counts["failures"], report.counts["dispatches"]) == (3, 1, 6)


@pytest.mark.promise("CO-5")
async def test_a_torn_last_row_was_never_acknowledged_and_counts_as_unknown(killed: RunDir) -> None:
    lines = killed.journal.read_bytes().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if b'"file":"results"' in line and b'"run.3-0"' in line)
    killed.journal.write_bytes(b"".join(lines[:last] + lines[last + 1 :]))
    rows = killed.results.read_bytes()
    torn = next(row for row in rows.splitlines(keepends=True) if b'"run.3-0"' in row)
    killed.results.write_bytes(rows.replace(torn, b"") + torn[:40])
    counts = summarise(killed).coverage
    assert (counts.measured, counts.unknown) == (1, 3)
    report = await audit(killed, None)
    assert report.ok, report.breaches
    assert any("torn" in note for note in report.notes)


@pytest.mark.promise("CO-5")
def test_a_corrupt_middle_line_is_reported_with_its_number(killed: RunDir) -> None:
    lines = killed.results.read_bytes().splitlines(keepends=True)
    killed.results.write_bytes(lines[0][:30] + b"\n" + b"".join(lines[1:]))
    summary = summarise(killed)
    assert summary.damage
    assert summary.damage[0].startswith("results.jsonl, line 1:")
    counts = summary.coverage
    assert counts.expected == counts.measured + counts.masked + counts.failed + counts.unknown + counts.omitted


async def test_a_killed_runs_directory_is_not_written_over(killed: RunDir) -> None:
    async def answer(run: Run) -> dict[str, object]:
        raise AssertionError("dispatched")

    with pytest.raises(ConfigError, match="already holds a run"):
        await collect_scripted(killed.path, answer, [{"responses_create_params": {}}])

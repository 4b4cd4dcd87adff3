"""A whole run against a scripted environment server, in process, with real files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.collector.collect import Collector
from toprope.collector.events import Event, Finished, Progress, Retrying, RunFinished, RunStarted
from toprope.collector.settings import CaptureSettings, Destination, RunSettings
from toprope.collector.summary import Summary, summarise
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply
from toprope.http.serve import serve
from toprope.results.journal import DispatchLine, EndLine, InterruptedLine, OutcomeLine, read_journal
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, ScriptedEnvironment, collect_scripted


def tasks(count: int, **keys: Any) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": str(index)}, **keys} for index in range(count)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def quick(**settings: Any) -> RunSettings:
    return RunSettings(**{"run_id": "run", "backoff_s": 0.0, **settings})


async def test_every_rollout_gets_a_row_and_the_summary_says_so(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0 if run.rollout_id.endswith("-0") else 0.0, reward_components={"format": 0.5})

    summary = await collect_scripted(tmp_path / "new" / "run", answer, tasks(3), settings=quick(repeats=2))
    run_dir = RunDir(tmp_path / "new" / "run")
    written = rows(run_dir.results)
    assert sorted(row["_ng_rollout_id"] for row in written) == [
        f"run.{task}-{repeat}" for task in (0, 1, 2) for repeat in (0, 1)
    ]
    assert summary.exit_status == 0
    assert (summary.coverage.expected, summary.coverage.measured) == (6, 6)
    assert summary.metrics.measures["reward"].rollouts.mean == 0.5
    assert summary.metrics.measures["reward_components.format"].tasks.mean == 0.5
    assert [(each.k, each.value) for each in summary.metrics.pass_at_k] == [(1, 0.5), (2, 1.0)]
    assert run_dir.failures.read_bytes() == b""


async def test_the_summary_on_disk_equals_the_one_returned_and_the_one_read_later(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.failure(terminal=True) if run.task_id == "1" else run.result(0.25, mask_sample=run.task_id == "2")

    summary = await collect_scripted(tmp_path, answer, tasks(4))
    stored = msgspec.json.decode(RunDir(tmp_path).summary.read_bytes(), type=Summary)
    assert stored == summary == summarise(RunDir(tmp_path))
    assert (summary.masks.environment, summary.masks.capture) == (1, 0)


@pytest.mark.promise("CO-3")
async def test_masked_and_failed_rollouts_enter_no_statistic(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        if run.task_id == "0":
            return run.failure(terminal=True)
        return run.result(1.0 if run.task_id == "1" else 0.0, mask_sample=run.task_id == "2")

    summary = await collect_scripted(tmp_path, answer, tasks(4))
    reward = summary.metrics.measures["reward"]
    assert (reward.rollouts.n, reward.rollouts.mean) == (2, 0.5)
    assert (summary.coverage.measured, summary.coverage.masked, summary.coverage.failed) == (2, 1, 1)
    assert all("reward" not in row for row in rows(RunDir(tmp_path).failures))


@pytest.mark.promise("CO-2")
async def test_a_retryable_failure_is_tried_again_as_a_new_attempt_and_a_terminal_one_never(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    async def answer(run: Run) -> dict[str, Any]:
        seen.append((run.task_id, run.attempt))
        if run.task_id == "0":
            return run.failure(terminal=True)
        if run.task_id == "1":
            return run.failure(terminal=False)
        return run.result(1.0) if run.attempt == 2 else run.failure(terminal=False)

    events: list[Event] = []
    summary = await collect_scripted(tmp_path, answer, tasks(3), observers=[events.append])
    assert sorted(seen) == [("0", 0), ("1", 0), ("1", 1), ("1", 2), ("2", 0), ("2", 1), ("2", 2)]
    [row] = rows(RunDir(tmp_path).results)
    assert (row["_ng_attempt_index"], row["_ng_episode_id"]) == (2, {"rollout_id": "run.2-0", "attempt": 2})
    assert (summary.failures.rows, summary.failures.rollouts, summary.dispatches) == (6, 2, 7)
    assert summary.exit_status == 1
    assert sum(isinstance(event, Retrying) for event in events) == 4
    assert sum(isinstance(event, Finished) for event in events) == 3


@pytest.mark.promise("ID-5")
async def test_a_dispatch_is_on_disk_before_its_request_is_sent(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        lines = [line for line in read_journal(RunDir(tmp_path).journal) if isinstance(line, DispatchLine)]
        known = {(line.rollout_id, line.attempt) for line in lines}
        assert (run.rollout_id, run.attempt) in known
        return run.failure() if run.attempt == 0 else run.result(1.0)

    assert (await collect_scripted(tmp_path, answer, tasks(5))).exit_status == 0


async def test_all_failed_is_never_success_and_names_the_commonest_reason(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        kind = "seed_failed" if run.task_id == "0" else "judge_unavailable"
        return run.failure(kind, terminal=True, reason=f"because of {kind}")

    summary = await collect_scripted(tmp_path, answer, tasks(3), settings=quick(min_coverage=0.0))
    assert summary.exit_status == 1
    assert summary.failures.commonest == "judge_unavailable"
    assert "because of judge_unavailable" in summary.message


async def test_coverage_below_the_threshold_fails_and_at_it_does_not(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.failure(terminal=True) if run.task_id == "0" else run.result(1.0)

    for share, status in ((0.75, 0), (0.76, 1)):
        settings = quick(min_coverage=share)
        assert (
            await collect_scripted(tmp_path / str(share), answer, tasks(4), settings=settings)
        ).exit_status == status


async def test_never_more_than_the_configured_concurrency(tmp_path: Path) -> None:
    environment = ScriptedEnvironment(slow)
    async with Client(inline={"e": environment.app}) as client:
        peer = client.peer("inline://e", "environment")
        collector = Collector(run_dir=tmp_path, environments={"*": peer}, settings=quick(concurrency=5))
        await collector.collect(tasks(40))
    assert environment.most_in_flight == 5
    assert environment.in_flight == 0


async def slow(run: Run) -> dict[str, Any]:
    for _ in range(10):
        await asyncio.sleep(0)
    return run.result(1.0)


async def test_the_same_over_real_sockets(tmp_path: Path) -> None:
    environment = ScriptedEnvironment(slow)
    server = await serve(environment.app)
    async with Client() as client:
        peer = client.peer(server.url, "environment")
        summary = await Collector(run_dir=tmp_path, environments={"*": peer}).collect(tasks(20))
    await server.close()
    assert summary.coverage.measured == 20


async def test_a_directory_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0)

    await collect_scripted(tmp_path, answer, tasks(1))
    before = RunDir(tmp_path).results.read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        await collect_scripted(tmp_path, answer, tasks(1))
    assert RunDir(tmp_path).results.read_bytes() == before


async def test_bad_tasks_leave_no_directory_and_send_nothing(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        raise AssertionError("sent")

    with pytest.raises(ConfigError):
        await collect_scripted(tmp_path / "run", answer, [*tasks(3), {"nothing": 1}])
    assert not (tmp_path / "run").exists()


async def test_several_environments_are_chosen_by_task_set(tmp_path: Path) -> None:
    sums, words = ScriptedEnvironment(slow), ScriptedEnvironment(slow)
    async with Client(inline={"sums": sums.app, "words": words.app}) as client:
        places = {
            "sums": Destination(peer=client.peer("inline://sums", "environment"), sampling={"temperature": 0.5}),
            "words": Destination(peer=client.peer("inline://words", "environment")),
        }
        given = tasks(2, task_source="sums") + tasks(3, task_source="words")
        summary = await Collector(run_dir=tmp_path, environments=places, settings=quick()).collect(given)
    assert (len(sums.runs), len(words.runs)) == (2, 3)
    assert {run.task_input["responses_create_params"].get("temperature") for run in sums.runs} == {0.5}
    assert {run.task_input["responses_create_params"].get("temperature") for run in words.runs} == {None}
    assert set(summary.tasksets) == {"sums", "words"}
    assert {row["task_source"] for row in rows(RunDir(tmp_path).results)} == {"sums", "words"}


@pytest.mark.promise("CO-1")
async def test_an_interrupt_keeps_what_is_finished_and_accounts_for_the_rest(tmp_path: Path) -> None:
    cancelled: list[str] = []
    two_hang = asyncio.Event()

    async def answer(run: Run) -> dict[str, Any]:
        if int(run.task_id) < 3:
            return run.result(1.0)
        try:
            if run.task_id == "4":
                two_hang.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(run.rollout_id)
            raise
        raise AssertionError("unreachable")

    environment = ScriptedEnvironment(answer)
    async with Client(inline={"e": environment.app}) as client:
        peer = client.peer("inline://e", "environment")
        collector = Collector(run_dir=tmp_path, environments={"*": peer}, settings=quick(concurrency=2))
        work = asyncio.create_task(collector.collect(tasks(9)))
        await two_hang.wait()
        collector.stop("interrupted", "Interrupted.")
        summary = await work
        await environment.app.stop()
    assert summary.exit_status == 130
    counts = summary.coverage
    assert (counts.measured, counts.unknown, counts.omitted, counts.failed) == (3, 2, 4, 0)
    assert summary.message.startswith("Interrupted. 3 of 9")
    assert sorted(cancelled) == ["run.3-0", "run.4-0"]
    lines = list(read_journal(RunDir(tmp_path).journal))
    assert sum(isinstance(line, InterruptedLine) for line in lines) == 2
    assert isinstance(lines[-1], EndLine)


async def test_a_used_up_budget_drains_and_the_rest_is_omitted(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def answer(run: Run) -> dict[str, Any]:
        await gate.wait()
        return run.result(1.0)

    def watch(event: Event) -> None:
        if type(event).__name__ == "Stopping":
            gate.set()

    summary = await collect_scripted(
        tmp_path, answer, tasks(10), settings=quick(concurrency=4, budget_s=0.01), observers=[watch]
    )
    assert (summary.stop_reason, summary.coverage.measured, summary.coverage.omitted) == ("budget", 4, 6)
    assert summary.exit_status == 1


async def test_a_fatal_error_of_the_run_ends_its_siblings_and_is_raised(tmp_path: Path) -> None:
    ended: list[str] = []
    third = asyncio.Event()

    async def answer(run: Run) -> dict[str, Any]:
        if run.task_id == "2":
            RunDir(tmp_path).results.unlink()
            third.set()
            return run.result(1.0)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(run.rollout_id)
        raise AssertionError("unreachable")

    with pytest.raises(Exception, match=r"results\.jsonl"):
        await collect_scripted(tmp_path, answer, tasks(5), settings=quick(concurrency=3))
    assert sorted(ended) == ["run.0-0", "run.1-0"]
    last = list(read_journal(RunDir(tmp_path).journal))[-1]
    assert isinstance(last, EndLine)
    assert last.reason == "failed"


async def test_an_observer_that_raises_changes_nothing(tmp_path: Path) -> None:
    def broken(event: Event) -> None:
        raise ValueError("broken observer")

    progress, events = Progress(), []
    summary = await collect_scripted(tmp_path, slow, tasks(4), observers=[broken, progress, events.append])
    assert summary.coverage.measured == 4
    assert (progress.done, progress.in_flight, progress.mean_reward) == (4, 0, 1.0)
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)


async def test_too_many_requests_are_waited_out_without_using_up_attempts(tmp_path: Path) -> None:
    refused = 0

    async def answer(run: Run) -> dict[str, Any] | Reply:
        nonlocal refused
        if refused < 5:
            refused += 1
            error = {"kind": "capacity", "message": "full", "retryable": True, "stage": "admission"}
            return json_reply({"error": error}, 429)
        return run.result(1.0)

    summary = await collect_scripted(tmp_path, answer, tasks(1), settings=quick(max_attempts=1, concurrency=1))
    assert (summary.coverage.measured, summary.failures.rows) == (1, 5)
    [row] = rows(RunDir(tmp_path).results)
    assert row["_ng_attempt_index"] == 5


async def test_a_dead_environment_server_gives_failure_rows_with_its_address(tmp_path: Path) -> None:
    async with Client(transport_budget_s=0.2, transport_attempts=1) as client:
        peer = client.peer("http://127.0.0.1:9", "environment")
        settings = quick(max_attempts=2)
        summary = await Collector(run_dir=tmp_path, environments={"*": peer}, settings=settings).collect(tasks(2))
    assert summary.exit_status == 1
    written = rows(RunDir(tmp_path).failures)
    assert len(written) == 4
    assert {row["failure_kind"] for row in written} == {"transport_unreachable"}
    assert all("127.0.0.1:9" in row["failure_reason"] and row["delivery"] == "not_sent" for row in written)


async def test_outcome_lines_point_at_the_rows(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0) if run.attempt else run.failure()

    await collect_scripted(tmp_path, answer, tasks(6))
    for line in read_journal(RunDir(tmp_path).journal):
        if isinstance(line, OutcomeLine):
            data = (tmp_path / f"{line.file}.jsonl").read_bytes()[line.offset :].partition(b"\n")[0]
            row = json.loads(data)
            assert (row["_ng_rollout_id"], row["_ng_attempt_index"]) == (line.rollout_id, line.attempt)


@pytest.mark.promise("CP-11")
async def test_captured_rows_without_a_source_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        raise AssertionError("sent")

    with pytest.raises(ConfigError, match="no source"):
        await collect_scripted(tmp_path / "run", answer, tasks(1), selected=True)
    assert not (tmp_path / "run").exists()


async def test_write_only_capture_needs_no_source_and_masks_nothing(tmp_path: Path) -> None:
    capture = CaptureSettings(enabled=True, rebuild_response=False)
    summary = await collect_scripted(tmp_path, slow, tasks(2), selected=True, capture=capture)
    assert summary.coverage.measured == 2
    assert all("_ng_token_capture" not in row for row in rows(RunDir(tmp_path).results))


@pytest.mark.parametrize(
    "settings",
    [
        {"repeats": 0},
        {"concurrency": 0},
        {"max_attempts": True},
        {"min_coverage": 1.5},
        {"budget_s": 0},
        {"run_id": "a/b"},
    ],
)
def test_a_setting_out_of_range_names_itself(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RunSettings(**settings)

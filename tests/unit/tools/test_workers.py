"""Plain functions in worker threads: context kept, bounded, and never abandoned half-way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.tools.workers import WorkerThreads


@pytest.fixture
async def workers() -> AsyncIterator[WorkerThreads]:
    pool = WorkerThreads(2)
    yield pool
    pool.close()


@pytest.mark.promise("ID-2")
async def test_the_rollout_is_known_in_the_thread(workers: WorkerThreads) -> None:
    with rollout_context("4-2"):
        assert await workers.call(current_rollout_id) == "4-2"
    assert await workers.call(current_rollout_id) is None


async def test_results_errors_and_coroutines_come_back(workers: WorkerThreads) -> None:
    async def double(n: int) -> int:
        return 2 * n

    def fail() -> None:
        raise KeyError("gone")

    assert await workers.call(double, 4) == 8
    assert await workers.call(lambda: double(5)) == 10
    with pytest.raises(KeyError, match="gone"):
        await workers.call(fail)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await workers.call(next, iter(()))


async def test_no_more_calls_run_at_once_than_there_are_threads(workers: WorkerThreads) -> None:
    inside, most, gate, lock = 0, 0, threading.Barrier(2), threading.Lock()

    def enter() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        gate.wait(10)  # passes only in pairs
        with lock:
            inside -= 1

    await asyncio.gather(*(workers.call(enter) for _ in range(8)))
    assert most <= 2
    assert inside == 0


async def test_a_cancelled_caller_waits_until_its_thread_is_done(workers: WorkerThreads) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(10)
        ended.set()

    task = asyncio.create_task(workers.call(work))
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    assert workers.stuck(0.0) == 1
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert workers.stuck(0.0) == 0


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WorkerThreads(0)

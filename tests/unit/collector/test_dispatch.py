"""Bounded dispatch: the bound, the stop, the fatal error."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from toprope.collector.dispatch import Stopped, StopSignal, dispatch
from toprope.collector.plan import Route, make_plan
from toprope.collector.schedule import Attempt, RetryPolicy, Schedule
from toprope.collector.tasks import read_tasks
from toprope.results.rows import FailureRecord

DROPPED = FailureRecord(kind="transport_dropped", stage="agent", reason="x", terminal=False)


def schedule(tasks: int, **policy: float) -> Schedule:
    rows = [{"responses_create_params": {}} for _ in range(tasks)]
    plan = make_plan(read_tasks(rows), {"*": Route("*", False, 1.0, {})}, run_id="run", repeats=1)
    return Schedule(plan.rollouts(), RetryPolicy(**policy), random=Random(0))  # type: ignore[arg-type]


async def run(schedule: Schedule, attempt: object, *, concurrency: int = 4, stop: StopSignal | None = None) -> None:
    loop = asyncio.get_running_loop()
    await dispatch(schedule, attempt, concurrency=concurrency, stop=stop or StopSignal(), clock=loop.time)  # type: ignore[arg-type]


async def test_all_run_and_never_more_than_the_bound_at_once() -> None:
    running, most, done = 0, 0, 0

    async def attempt(_: Attempt) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        done += 1

    await run(schedule(50), attempt, concurrency=7)
    assert (done, most, running) == (50, 7, 0)


async def test_a_retry_that_is_due_later_is_waited_for() -> None:
    plan = schedule(1, backoff_s=0.001)
    seen: list[int] = []

    async def attempt(which: Attempt) -> None:
        seen.append(which.number)
        if which.number < 2:
            plan.failed(which, DROPPED, asyncio.get_running_loop().time())

    await run(plan, attempt)
    assert seen == [0, 1, 2]


async def test_a_stop_ends_a_wait_for_a_retry_that_is_due_much_later() -> None:
    stop, plan = StopSignal(), schedule(1, backoff_s=3600.0, backoff_cap_s=3600.0)

    async def attempt(which: Attempt) -> None:
        plan.failed(which, DROPPED, asyncio.get_running_loop().time())

    async def stop_when_nothing_runs() -> None:
        for _ in range(20):  # the attempt ends, and dispatch begins to wait
            await asyncio.sleep(0)
        stop.request("interrupted", cancel=True)

    stopping = asyncio.create_task(stop_when_nothing_runs())
    await asyncio.wait_for(run(plan, attempt, stop=stop), 30)
    await stopping
    assert stop.reason == "interrupted"


async def test_a_stop_that_drains_lets_requests_end() -> None:
    stop, ended = StopSignal(), []
    started, gate = asyncio.Event(), asyncio.Event()

    async def attempt(which: Attempt) -> None:
        started.set()
        await stop.cancellable(_wait(gate))
        ended.append(which.number)

    work = asyncio.create_task(run(schedule(9), attempt, concurrency=2, stop=stop))
    await started.wait()
    stop.request("budget", cancel=False)
    gate.set()
    await work
    assert len(ended) == 2


async def test_a_stop_that_cancels_gives_up_requests_but_not_what_finishes() -> None:
    stop, finished, given_up = StopSignal(), [], []
    finishing, gate = asyncio.Event(), asyncio.Event()

    async def attempt(which: Attempt) -> None:
        if which.rollout.task.index == 0:
            finishing.set()
            await _wait(gate)  # a row on its way to the disk
            finished.append(which)
            return
        try:
            await stop.cancellable(_wait(asyncio.Event()))
        except Stopped:
            given_up.append(which)

    work = asyncio.create_task(run(schedule(5), attempt, concurrency=3, stop=stop))
    await finishing.wait()
    await asyncio.sleep(0)
    stop.request("interrupted", cancel=True)
    gate.set()
    await work
    assert (len(finished), len(given_up)) == (1, 2)


async def test_after_a_fatal_error_siblings_are_cancelled_and_awaited() -> None:
    stop, awaited = StopSignal(), []

    async def attempt(which: Attempt) -> None:
        if which.rollout.task.index == 2:
            raise OSError("no space left on device")
        try:
            await stop.cancellable(_wait(asyncio.Event()))
        finally:
            awaited.append(which)

    with pytest.raises(OSError, match="no space"):
        await run(schedule(6), attempt, concurrency=3, stop=stop)
    assert len(awaited) == 2


async def test_cancelling_the_caller_leaves_nothing_running() -> None:
    stop, started, ended = StopSignal(), asyncio.Event(), []

    async def attempt(which: Attempt) -> None:
        started.set()
        try:
            await stop.cancellable(_wait(asyncio.Event()))
        finally:
            ended.append(which)

    work = asyncio.create_task(run(schedule(3), attempt, concurrency=3, stop=stop))
    await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len(ended) == 3


async def _wait(event: asyncio.Event) -> None:
    await event.wait()

"""What is dispatched next, and what comes back."""

from __future__ import annotations

from random import Random

import pytest

from toprope.collector.plan import Plan, Route, make_plan
from toprope.collector.schedule import MAX_REFUSED_ADMISSIONS, Attempt, RetryPolicy, Schedule, Wait
from toprope.collector.tasks import read_tasks
from toprope.results.rows import FailureRecord

DROPPED = FailureRecord(kind="transport_dropped", stage="agent", reason="x", terminal=False)
BROKEN = FailureRecord(kind="bad_reply", stage="agent", reason="x", terminal=True)
FULL = FailureRecord(kind="admission_timeout", stage="admission", reason="x", terminal=False)
BUSY = FailureRecord(
    kind="model_unavailable", stage="agent", reason="x", terminal=False, upstream_status=429, retry_after_s=7.0
)


def plan(tasks: int) -> Plan:
    rows = [{"responses_create_params": {}} for _ in range(tasks)]
    return make_plan(read_tasks(rows), {"*": Route("*", False, 1.0, {})}, run_id="run", repeats=1)


def schedule(tasks: int = 1, **policy: float) -> Schedule:
    return Schedule(plan(tasks).rollouts(), RetryPolicy(**policy), random=Random(0))  # type: ignore[arg-type]


def take(schedule: Schedule, now: float = 0.0) -> Attempt:
    step = schedule.next(now)
    assert isinstance(step, Attempt)
    return step


def test_a_retryable_failure_comes_back_with_the_next_number_after_a_wait() -> None:
    plan = schedule(backoff_s=2.0)
    wait = plan.failed(take(plan), DROPPED, now=10.0)
    assert wait is not None
    assert 1.0 <= wait <= 2.0
    assert plan.next(10.0) == Wait(pytest.approx(wait))  # type: ignore[arg-type]
    again = take(plan, 10.0 + wait)
    assert (again.number, again.used) == (1, 1)
    assert again.key == "run.0-0-a1"


def test_a_terminal_failure_never_comes_back() -> None:
    plan = schedule()
    assert plan.failed(take(plan), BROKEN, now=0.0) is None
    assert plan.next(1e9) is None


def test_attempts_end_at_the_maximum() -> None:
    plan = schedule(max_attempts=3, backoff_s=0.0)
    assert plan.failed(take(plan), DROPPED, 0.0) is not None
    assert plan.failed(take(plan), DROPPED, 0.0) is not None
    assert plan.failed(take(plan), DROPPED, 0.0) is None


def test_being_turned_away_uses_up_no_attempt_but_ends_too() -> None:
    plan = schedule(max_attempts=1, backoff_s=0.0)
    for _ in range(MAX_REFUSED_ADMISSIONS - 1):
        attempt = take(plan)
        assert attempt.used == 0
        assert plan.failed(attempt, FULL, 0.0) is not None
    assert plan.failed(take(plan), FULL, 0.0) is None


def test_waits_double_up_to_the_cap() -> None:
    plan = schedule(max_attempts=100, backoff_s=1.0, backoff_cap_s=4.0)
    now, waits = 0.0, []
    for _ in range(6):
        wait = plan.failed(take(plan, now), DROPPED, now)
        assert wait is not None
        waits.append(wait)
        now += wait
    for wait, most in zip(waits, [1, 2, 4, 4, 4, 4], strict=True):
        assert most / 2 <= wait <= most


def test_due_retries_go_before_fresh_rollouts() -> None:
    plan = schedule(3, backoff_s=0.0)
    first = take(plan)
    plan.failed(first, DROPPED, 0.0)
    assert take(plan).rollout.rollout_id == first.rollout.rollout_id


def test_too_many_requests_makes_everything_wait_as_long_as_was_asked() -> None:
    plan = schedule(3, backoff_s=0.1)
    plan.failed(take(plan), BUSY, now=0.0)
    step = plan.next(1.0)
    assert step == Wait(6.0)
    assert isinstance(plan.next(7.0), Attempt)

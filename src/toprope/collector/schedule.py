"""What to dispatch next: fresh rollouts in the plan's order, due retries before them. Pure: the time is an argument.

A retryable failure comes back as a new attempt with the next number, after a doubling wait; a terminal one does not.
A failure of admission (the queue was full) uses up no attempt, but it too comes back a bounded number of times. Where
a server says "too many requests", everything waits, not only the rollout that was told so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from toprope.collector.plan import Rollout
from toprope.correlation.ids import capture_key
from toprope.errors.kinds import Kind, Stage
from toprope.results.rows import FailureRecord, RowIdentity

MAX_REFUSED_ADMISSIONS = 50
"""A rollout that was turned away this often has failed: with the longest wait of 30 s that is some 25 minutes."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One physical execution. `used` attempts were used up before it, `turned_away` were refused admission."""

    rollout: Rollout
    number: int = 0
    used: int = 0
    turned_away: int = 0

    @property
    def key(self) -> str:
        """The capture key."""
        return capture_key(self.rollout.rollout_id, self.number)

    @property
    def identity(self) -> RowIdentity:
        """Whose row this attempt writes."""
        task = self.rollout.task
        return RowIdentity(
            self.rollout.rollout_id, self.number, task.task_id, task.index, self.rollout.rollout_index, task.routing
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is due for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` in all; waits of `backoff_s`, doubling up to `backoff_cap_s`, with jitter, in seconds."""

    max_attempts: int = 3
    backoff_s: float = 1.0
    backoff_cap_s: float = 30.0


class Schedule:
    """Gives out attempts until every rollout has a verdict or is exhausted."""

    def __init__(self, rollouts: Iterator[Rollout], policy: RetryPolicy, *, random: Random) -> None:
        self._fresh = rollouts
        self._policy = policy
        self._random = random
        self._due: list[tuple[float, int, Attempt]] = []
        self._serial = 0
        self._hold_until = float("-inf")
        self._throttled = 0

    def next(self, now: float) -> Attempt | Wait | None:
        """The next attempt, or how long to wait, or None: nothing is left unless an attempt in flight fails."""
        if now < self._hold_until:
            return Wait(self._hold_until - now)
        if self._due and self._due[0][0] <= now:
            return heapq.heappop(self._due)[2]
        fresh = next(self._fresh, None)
        if fresh is not None:
            return Attempt(fresh)
        return Wait(self._due[0][0] - now) if self._due else None

    def succeeded(self) -> None:
        """A verdict came back: servers have room again."""
        self._throttled = 0

    def failed(self, attempt: Attempt, failure: FailureRecord, now: float) -> float | None:
        """Take a failure in: the wait in seconds before the next attempt, or None if there is none."""
        throttled = failure.upstream_status == 429 or failure.kind == Kind.CAPACITY
        if throttled:
            self._throttled += 1
            self._hold_until = max(self._hold_until, now + self._wait(self._throttled, failure.retry_after_s))
        if failure.terminal:
            return None
        counts = uses_up_attempt(failure)
        used, turned_away = attempt.used + counts, attempt.turned_away + (not counts)
        if used >= self._policy.max_attempts or turned_away >= MAX_REFUSED_ADMISSIONS:
            return None
        wait = self._wait(used + turned_away, failure.retry_after_s)
        self._serial += 1
        again = Attempt(attempt.rollout, attempt.number + 1, used, turned_away)
        heapq.heappush(self._due, (now + wait, self._serial, again))
        return wait

    def _wait(self, times: int, retry_after_s: float | None) -> float:
        doubled = self._policy.backoff_s * 2.0 ** min(times - 1, 30)
        wait = min(doubled, self._policy.backoff_cap_s) * self._random.uniform(0.5, 1.0)
        asked = min(retry_after_s or 0.0, self._policy.backoff_cap_s)
        return max(wait, asked)


def uses_up_attempt(failure: FailureRecord) -> bool:
    """Whether the failure counts against `max_attempts`: being turned away at the door does not."""
    refused = failure.kind in (Kind.CAPACITY, Kind.ADMISSION_TIMEOUT)
    return not (refused and failure.stage == Stage.ADMISSION)

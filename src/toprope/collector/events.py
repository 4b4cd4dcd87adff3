"""What a run tells whoever watches: a few values, handed out after the fact. Watching never changes a run.

An observer is a plain function that returns at once; one that raises is logged and not asked again. Left to others:
drawing (`cli`), statistics (`summary`, which reads the files and not these).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from toprope.collector.summary import Summary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The directory is made, nothing is dispatched yet."""

    run_id: str
    directory: str
    tasks: int
    repeats: int
    expected: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """An attempt's request is about to leave."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A row is durable and its rollout will not be tried again. `outcome` is measured, masked or failed."""

    rollout_id: str
    attempt: int
    task_index: int
    outcome: str
    seconds: float
    reward: float | None = None
    kind: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Retrying:
    """An attempt failed; the next one is due in `delay_s` seconds."""

    rollout_id: str
    attempt: int
    kind: str
    reason: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An attempt was given up because the run stops."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """Nothing more is dispatched."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that the user should know and that stops nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """Everything is on disk, summary.json too."""

    summary: Summary


Event: TypeAlias = RunStarted | Dispatched | Finished | Retrying | Interrupted | Stopping | Warned | RunFinished
Observer: TypeAlias = Callable[[Event], None]


class Announcer:
    """Hands each event to every observer."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def __call__(self, event: Event) -> None:
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:  # an observer must not cost a rollout: it is logged and not asked again
                log.exception("an observer of the run failed and is not asked again")
                self._observers.remove(observer)


@dataclass(slots=True)
class Progress:
    """An observer that keeps the figures of a progress line: counts, reward so far, rate, time left."""

    clock: Callable[[], float] = time.monotonic
    expected: int = 0
    measured: int = 0
    masked: int = 0
    failed: int = 0
    in_flight: int = 0
    retries: int = 0
    started: float = field(default=math.nan)
    _reward: float = 0.0

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, RunStarted):
            self.expected, self.started = event.expected, self.clock()
        elif isinstance(event, Dispatched):
            self.in_flight += 1
        elif isinstance(event, Retrying | Interrupted):
            self.in_flight -= 1
            self.retries += isinstance(event, Retrying)
        elif isinstance(event, Finished):
            self.in_flight -= 1
            self.measured += event.outcome == "measured"
            self.masked += event.outcome == "masked"
            self.failed += event.outcome == "failed"
            if event.outcome == "measured" and event.reward is not None:
                self._reward += event.reward

    @property
    def done(self) -> int:
        """Rollouts that need no further attempt."""
        return self.measured + self.masked + self.failed

    @property
    def mean_reward(self) -> float | None:
        """Over the measured rollouts so far."""
        return self._reward / self.measured if self.measured else None

    @property
    def per_second(self) -> float:
        """Rollouts done in a second, since the start."""
        elapsed = self.clock() - self.started
        return self.done / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None while there is none."""
        rate = self.per_second
        return (self.expected - self.done) / rate if rate > 0 else None

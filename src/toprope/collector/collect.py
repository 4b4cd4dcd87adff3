"""The collector: tasks in, results out. The loop and nothing else; every step is a module of this room.

    tasks -> plan -> dispatch -> (request -> finish) -> summary

Left to others: servers and clients (handed in), the source of captured tokens (handed in and never closed here),
signals (`cli` calls `stop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from importlib.metadata import version
from random import Random

from toprope.capture.protocols import TokenSource
from toprope.collector.dispatch import Stopped, StopSignal, dispatch
from toprope.collector.events import (
    Announcer,
    Dispatched,
    Finished,
    Interrupted,
    Observer,
    Retrying,
    RunFinished,
    RunStarted,
    Stopping,
    Warned,
)
from toprope.collector.finish import Finisher, Outcome
from toprope.collector.keys import make_new, require_new_keys
from toprope.collector.lost import LostAttempts
from toprope.collector.plan import Plan, Route, make_plan
from toprope.collector.reconcile import reconcile
from toprope.collector.request import send
from toprope.collector.schedule import Attempt, RetryPolicy, Schedule
from toprope.collector.settings import CaptureSettings, Destination, RunSettings
from toprope.collector.summary import Summary, summarise, write_summary
from toprope.collector.tasks import TaskLike, read_tasks
from toprope.errors.kinds import Delivery
from toprope.errors.tree import ConfigError, TopropeError
from toprope.http.client import Peer
from toprope.results.journal import SessionLine
from toprope.results.layout import RunDir
from toprope.results.ledger import Ledger
from toprope.results.manifest import Manifest, setting_digests
from toprope.results.rows import FailureRecord, now
from toprope.servers.environment.participant import SessionReport


class Collector:
    """One run into one new directory.

    `environments` maps a task set (`*`: every other one) to where its tasks go: a `Destination`, or a bare peer of an
    environment server. `source` gives captured tokens back; it is used and never closed. `observers` are told what
    happens (`collector.events`).
    """

    def __init__(
        self,
        *,
        run_dir: RunDir | str | os.PathLike[str],
        environments: Mapping[str, Destination | Peer],
        source: TokenSource | None = None,
        settings: RunSettings | None = None,
        capture: CaptureSettings | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.run_dir = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)  # type: ignore[arg-type]
        self.settings = settings or RunSettings()
        self.capture = capture or CaptureSettings()
        self.run_id = self.settings.run_id or f"r{secrets.token_hex(5)}"
        self._source = source
        self._destinations = {
            key: place if isinstance(place, Destination) else Destination(peer=place)
            for key, place in environments.items()
        }
        self._announce = Announcer(observers)
        self._stop = StopSignal()
        self._ledger: Ledger | None = None
        self._lost = LostAttempts(lambda report, event: self.session(report, event=event))

    async def collect(
        self, tasks: str | os.PathLike[str] | Iterable[TaskLike], *, taskset: str | None = None
    ) -> Summary:
        """Run every task and return the summary; its `exit_status` says how it went. Once an instance.

        Raises `ConfigError`, with nothing written and nothing sent, for bad input; what is fatal to the run itself
        (a full disk) is raised once every attempt in flight has ended.
        """
        if self._source is not None and self.run_dir.held():
            await reconcile(self.run_dir, self._source, timeout_s=self.capture.source_timeout_s)
        plan = await asyncio.to_thread(self._plan, tasks, taskset)
        await self._require_source(plan)
        lines = b"".join(task.line() + b"\n" for task in plan.tasks)
        self._ledger = ledger = await Ledger.begin(self.run_dir, self._manifest(plan), lines)
        try:
            self._announce(
                RunStarted(
                    self.run_id,
                    str(self.run_dir.path),
                    len(plan.tasks),
                    plan.repeats,
                    plan.expected,
                    self.settings.concurrency,
                )
            )
            await self._run(plan, ledger)
            await self._lost.ask()
            await ledger.ended(self._stop.reason or "done", self._stop.message)
        except BaseException as error:
            # The run is lost, its rows are not: say why it ended, if the disk still lets us, and let the error go on.
            with contextlib.suppress(OSError, TopropeError):
                reason = "interrupted" if isinstance(error, asyncio.CancelledError) else "failed"
                await ledger.ended(reason, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._ledger = None
            await ledger.close()
        summary = await asyncio.to_thread(summarise, self.run_dir)
        await asyncio.to_thread(write_summary, self.run_dir, summary)
        self._announce(RunFinished(summary))
        return summary

    def stop(self, reason: str = "interrupted", message: str = "", *, cancel: bool = True) -> None:
        """Dispatch nothing more; with `cancel` give up the requests in flight, else let them drain.

        Call it from the loop's thread. `collect` then returns with every finished row durable; with the reason
        `interrupted` the exit status is 130.
        """
        self._announce(Stopping(reason, message))
        self._stop.request(reason, message, cancel=cancel)

    def session(self, report: SessionReport, *, event: str = "opened") -> Awaitable[None] | None:
        """Journal a session of an episode (the `on_session` of our environment server). Outside a run: nothing.

        Where the report has an `env_session_id`, await what is returned: then the handle is durable.
        """
        if self._ledger is None:
            return None
        line = SessionLine(
            at=now(),
            key=report.episode_id.key,
            role=report.participant,
            event=event,
            session_id=report.session_id,
            env_session_id=report.env_session_id,
        )
        noted = self._ledger.session(line)
        return asyncio.shield(noted) if report.env_session_id is not None else None

    async def _run(self, plan: Plan, ledger: Ledger) -> None:
        """Dispatch the plan to its end, or to a stop."""
        policy = RetryPolicy(self.settings.max_attempts, self.settings.backoff_s, self.settings.backoff_cap_s)
        schedule = Schedule(plan.rollouts(), policy, random=Random(self.run_id))
        finisher = Finisher(ledger, self._source, self.capture, warn=lambda text: self._announce(Warned(text)))
        budget = None
        if self.settings.budget_s is not None:
            message = f"The wall-clock budget of {self.settings.budget_s:g} s is used up."
            budget = asyncio.get_running_loop().call_later(
                self.settings.budget_s, lambda: self.stop("budget", message, cancel=False)
            )

        async def run(attempt: Attempt) -> None:
            await self._attempt(attempt, ledger, finisher, schedule)

        try:
            await dispatch(schedule, run, concurrency=self.settings.concurrency, stop=self._stop, clock=time.monotonic)
        finally:
            if budget is not None:
                budget.cancel()

    async def _attempt(self, attempt: Attempt, ledger: Ledger, finisher: Finisher, schedule: Schedule) -> None:
        """One attempt: its number on disk, its request, its row, and what the schedule makes of it."""
        task = attempt.rollout.task
        destination = self._destinations[task.route]
        captured = task.selected and self._rebuilds
        started = time.monotonic()
        doubt = None
        if captured and self._source is not None:
            doubt = await make_new(attempt.key, self._source, self.capture.source_timeout_s)
        await ledger.dispatched(attempt.identity, environment=destination.name, captured=captured)
        self._announce(Dispatched(attempt.rollout.rollout_id, attempt.number))
        try:
            came = await self._stop.cancellable(
                send(
                    destination.peer,
                    attempt,
                    environment=destination.name,
                    timeout_s=self.settings.request_timeout_s,
                    agent_run=destination.agent_run,
                )
            )
        except Stopped:
            self._lose(destination, attempt)
            await ledger.interrupted(attempt.identity)
            self._announce(Interrupted(attempt.rollout.rollout_id, attempt.number))
            return
        if isinstance(came, FailureRecord) and came.delivery == Delivery.POSSIBLY_DELIVERED:
            self._lose(destination, attempt)
        outcome = await finisher.finish(attempt, came, captured=captured, doubt=doubt)
        self._report(attempt, outcome, schedule, time.monotonic() - started)
        too_many = finisher.masks.verdict()
        if too_many is not None and self._stop.reason is None:
            self.stop("mask_fraction", too_many, cancel=True)

    def _lose(self, destination: Destination, attempt: Attempt) -> None:
        """Nothing came back of `attempt`: what sessions it had is asked for at the end of the run."""
        if not destination.agent_run and not destination.tells_sessions:
            self._lost.add(destination.peer, attempt.key)

    def _report(self, attempt: Attempt, outcome: Outcome, schedule: Schedule, seconds: float) -> None:
        failure = outcome.failure
        if failure is None:
            schedule.succeeded()
        else:
            delay = schedule.failed(attempt, failure, time.monotonic())
            if delay is not None and self._stop.reason is None:
                self._announce(
                    Retrying(attempt.rollout.rollout_id, attempt.number, failure.kind, failure.reason, delay)
                )
                return
        self._announce(
            Finished(
                attempt.rollout.rollout_id,
                attempt.number,
                attempt.rollout.task.index,
                outcome.name,
                seconds,
                outcome.reward,
                None if failure is None else failure.kind,
                None if failure is None else failure.reason,
            )
        )

    def _plan(self, tasks: str | os.PathLike[str] | Iterable[TaskLike], taskset: str | None) -> Plan:
        self.run_dir.refuse_used()
        routes = {
            key: Route(key, self._selects(place), place.weight, place.sampling, place.read)
            for key, place in self._destinations.items()
        }
        return make_plan(read_tasks(tasks, taskset=taskset), routes, run_id=self.run_id, repeats=self.settings.repeats)

    def _selects(self, destination: Destination) -> bool:
        return self.capture.enabled and (self.capture.all_agents or destination.selected)

    @property
    def _rebuilds(self) -> bool:
        return self.capture.enabled and self.capture.rebuild_response

    async def _require_source(self, plan: Plan) -> None:
        """Refuse a run whose captured rows could not be delivered, or would mix with what an earlier run left."""
        if not plan.selected or not self._rebuilds:
            return
        source = self._source
        if source is None:
            raise ConfigError(
                "token_id_capture: rows of selected agents need their captured tokens, and this process has no source "
                "of them. Give the collector a `source`, or set token_id_capture.rebuild_response to false."
            )
        await require_new_keys(plan, source)

    def _manifest(self, plan: Plan) -> Manifest:
        scoring = {
            "run": {"pass_threshold": self.settings.pass_threshold, **dict(self.settings.scoring)},
            "token_id_capture": {
                "enabled": self.capture.enabled,
                "all_agents": self.capture.all_agents,
                "rebuild_response": self.capture.rebuild_response,
                "deliver": self.capture.deliver,
            },
            "environment": {
                key: {"name": place.name, "selected": place.selected, "sampling": dict(place.sampling)}
                for key, place in self._destinations.items()
            },
        }
        return Manifest(
            run_id=self.run_id,
            name=self.settings.name,
            started_at=now(),
            toprope=version("toprope"),
            tasks=len(plan.tasks),
            tasks_digest=plan.tasks_digest,
            repeats=plan.repeats,
            expected=plan.expected,
            max_attempts=self.settings.max_attempts,
            min_coverage=self.settings.min_coverage,
            pass_threshold=self.settings.pass_threshold,
            captured_tasks=sum(task.selected for task in plan.tasks),
            settings=setting_digests(scoring),
            servers=dict(self.settings.servers),
        )

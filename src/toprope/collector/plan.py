"""The plan: every rollout of a run, with its id, before anything is on disk or on the wire.

Pure. Refuses two tasks or two rollouts with one id, naming both places, an id that is none, a task set that no
environment serves, and an input that its protocol cannot read. What is dispatched when is `schedule`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.canonical.digest import digest_bytes
from toprope.canonical.json import dumps
from toprope.collector.tasks import SourceTask
from toprope.correlation.ids import check_rollout_id
from toprope.errors.body import said_by
from toprope.errors.tree import ConfigError, TopropeError
from toprope.protocol.ids import TaskId


@dataclass(frozen=True, slots=True)
class Route:
    """What the plan knows of a destination: the key of `run.environment` that serves a task set.

    `read` is its protocol's reader of a task's input, whose exception refuses the task; None: only the server knows.
    """

    key: str
    selected: bool
    weight: float
    sampling: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], object] | None = None


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One task. `body` is the JSON of `{task_id, task_input}` as it is sent, sampling settings applied."""

    index: int
    task_id: TaskId
    body: bytes
    route: str
    selected: bool
    first_rollout: int
    rollout_id: str | None
    routing: Mapping[str, Any]

    def line(self) -> bytes:
        """The task's line in `tasks.jsonl`: its body with the identity that the run gave it."""
        head: dict[str, Any] = {"_ng_task_index": self.index, "_ng_rollout_index": self.first_rollout}
        if self.rollout_id is not None:
            head["_ng_rollout_id"] = self.rollout_id
        return b"%s,%s" % (dumps({**head, **self.routing})[:-1], self.body[1:])


@dataclass(frozen=True, slots=True)
class Rollout:
    """One logical sample of one task."""

    rollout_id: str
    rollout_index: int
    task: PlannedTask


@dataclass(frozen=True, slots=True)
class Plan:
    """All rollouts of a run. `tasks` stand in the order of their source; memory does not depend on `repeats`."""

    run_id: str
    repeats: int
    tasks: tuple[PlannedTask, ...]
    tasks_digest: str
    weights: Mapping[str, float]

    @property
    def expected(self) -> int:
        """How many rollouts the run owes."""
        return len(self.tasks) * self.repeats

    @property
    def selected(self) -> bool:
        """Whether any task's tokens are to be captured."""
        return any(task.selected for task in self.tasks)

    def rollouts(self) -> Iterator[Rollout]:
        """Every rollout in order of dispatch: the repeats of a task together, so that groups complete early."""
        for task in _interleaved(self.tasks, self.weights):
            for repeat in range(self.repeats):
                yield Rollout(rollout_id(self.run_id, task, repeat, self.repeats), task.first_rollout + repeat, task)


def rollout_id(run_id: str, task: PlannedTask, repeat: int, repeats: int) -> str:
    """`<run>.<task index>-<repeat index>`, or the row's own id (with `.<repeat>` where there are several)."""
    if task.rollout_id is None:
        return f"{run_id}.{task.index}-{task.first_rollout + repeat}"
    return task.rollout_id if repeats == 1 else f"{task.rollout_id}.{repeat}"


def make_plan(sources: Iterable[SourceTask], routes: Mapping[str, Route], *, run_id: str, repeats: int) -> Plan:
    """Plan every rollout of `sources`. Raises `ConfigError` naming the places of what collides or cannot be served."""
    places: list[str] = []
    tasks: list[PlannedTask] = []
    for position, source in enumerate(sources):
        tasks.append(_planned(source, position, routes, repeats))
        places.append(source.where)
    if not tasks:
        raise ConfigError("tasks: there is none; accepted: at least one task.")
    _refuse_duplicate_tasks(tasks, places)
    _refuse_duplicate_rollouts(tasks, places, run_id, repeats)
    digest = digest_bytes(b"\n".join(task.line() for task in tasks))
    return Plan(run_id, repeats, tuple(tasks), digest, {route.key: route.weight for route in routes.values()})


def _planned(source: SourceTask, position: int, routes: Mapping[str, Route], repeats: int) -> PlannedTask:
    route = routes.get(source.taskset) or routes.get("*")
    if route is None:
        raise ConfigError(
            f"{source.where}: no environment serves the task set {source.taskset!r}; "
            f"run.environment names: {', '.join(sorted(routes))}."
        )
    index = position if source.task_index is None else source.task_index
    task_id = TaskId(source.taskset, str(index) if source.task_id is None else source.task_id)
    task_input = with_sampling(source.task_input, route.sampling)
    body = dumps({"task_id": {"taskset": task_id.taskset, "task_id": task_id.task_id}, "task_input": task_input})
    if route.read is not None:
        _judge(route.read, task_input, source.where)
    # A row that says which repeat it is (NeMo Gym's expanded rows) keeps its place in the group, repeated or not.
    first = 0 if source.rollout_index is None else source.rollout_index * repeats
    return PlannedTask(index, task_id, body, route.key, route.selected, first, source.rollout_id, dict(source.routing))


def _judge(read: Callable[[Mapping[str, Any]], object], task_input: Mapping[str, Any], where: str) -> None:
    try:
        read(task_input)
    except TopropeError as error:
        raise ConfigError(f"{where}: {error.message}.") from error
    except KeyboardInterrupt:  # the user's
        raise
    except BaseException as error:  # an author's own protocol, its sys.exit() too: told with its text, nothing ran
        raise ConfigError(f"{where}: the protocol cannot read the task: {said_by(error)}.") from error


def with_sampling(task_input: dict[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """`task_input` with `sampling` set in its `responses_create_params`; itself where there is nothing to set."""
    if not sampling:
        return task_input
    params = task_input.get("responses_create_params")
    return {**task_input, "responses_create_params": {**(params if isinstance(params, dict) else {}), **sampling}}


def _refuse_duplicate_tasks(tasks: Sequence[PlannedTask], places: Sequence[str]) -> None:
    seen: dict[tuple[str, str, int], str] = {}
    groups: dict[int, tuple[TaskId, str]] = {}
    for task, where in zip(tasks, places, strict=True):
        first = seen.setdefault((task.task_id.taskset, task.task_id.task_id, task.first_rollout), where)
        if first is not where:
            raise ConfigError(
                f"two tasks have the id {task.task_id.task_id!r} (task set {task.task_id.taskset!r}): {first}, and "
                f"{where}. Every task needs an id of its own; use run.repeats for several rollouts of one task."
            )
        group = groups.setdefault(task.index, (task.task_id, where))
        if group[0] != task.task_id:
            raise ConfigError(
                f"two tasks claim the task index {task.index}: {group[1]}, and {where}. "
                "Give every row its `_ng_task_index`, or none."
            )


def _refuse_duplicate_rollouts(tasks: Sequence[PlannedTask], places: Sequence[str], run_id: str, repeats: int) -> None:
    seen: dict[str, str] = {}
    for task, where in zip(tasks, places, strict=True):
        for repeat in range(repeats):
            name = rollout_id(run_id, task, repeat, repeats)
            try:
                check_rollout_id(name)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}.") from error
            if name in seen:
                raise ConfigError(f"two rollouts would have the id {name!r}: {seen[name]}, and {where}.")
            seen[name] = where


def _interleaved(tasks: Sequence[PlannedTask], weights: Mapping[str, float]) -> Iterator[PlannedTask]:
    """Task order within a route; routes take turns by weight (smooth weighted round robin)."""
    waiting: dict[str, deque[PlannedTask]] = {}
    for task in tasks:
        waiting.setdefault(task.route, deque()).append(task)
    if len(waiting) == 1:
        yield from tasks
        return
    credit = dict.fromkeys(waiting, 0.0)
    while waiting:
        for key in waiting:
            credit[key] += weights[key]
        best = max(waiting, key=lambda key: credit[key])
        credit[best] -= sum(weights[key] for key in waiting)
        yield waiting[best].popleft()
        if not waiting[best]:
            del waiting[best]

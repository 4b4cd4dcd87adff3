"""Tasks in: materialised rows, flat NeMo Gym rows, files of both, Python iterables; one shape out.

A row is materialised if `task_id` is an object and `task_input` is present; every other row is flat and is imported.
Nothing runs before every row was read: a malformed one is refused with its place and the reason. What ids the
rollouts of a task get, and whether two rows collide, is `plan`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.canonical.json import NotJson, dumps, key_written_twice, loads
from toprope.errors.tree import ConfigError
from toprope.protocol.episode import RESERVED_TASK_DATA, Task

ROUTING_KEYS = ("agent_ref", "task_source")
_OWN_KEYS = ("_ng_rollout_id", "_ng_task_id", "_ng_task_index", "_ng_rollout_index")
_IGNORED_KEYS = ("_ng_attempt_index", "_ng_episode_id", "_ng_schema", "_ng_token_capture")
"""What a result row of an earlier run carries beside its task: attempts are numbered anew by every run."""


@dataclass(frozen=True, slots=True)
class SourceTask:
    """One task as it was read. `where` names its place (`data.jsonl, line 3`); `body` is `{task_id, task_input}`.

    `rollout_id`, `task_index` and `rollout_index` are what the row itself asked for, or None. `routing` holds
    `agent_ref` and `task_source`, which go back onto the result rows.
    """

    where: str
    taskset: str
    task_id: str | None
    task_input: dict[str, Any]
    rollout_id: str | None = None
    task_index: int | None = None
    rollout_index: int | None = None
    routing: Mapping[str, Any] = field(default_factory=dict)


TaskLike = SourceTask | Task | Mapping[str, Any]


def read_tasks(
    source: str | os.PathLike[str] | Iterable[TaskLike], *, taskset: str | None = None
) -> Iterator[SourceTask]:
    """The tasks of a JSONL file or of an iterable, in order.

    `taskset` names the rows that do not name their own (default: the file's stem, or `tasks`). Raises `ConfigError`
    with the place and the reason for the first row that is no task. Reads as it is iterated; `plan` exhausts it
    before anything runs.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        for where, row in _read_file(path):
            yield import_row(row, where=where, taskset=taskset or path.stem)
        return
    for index, item in enumerate(source):
        where = f"task {index}"
        if isinstance(item, SourceTask):
            yield item
        elif isinstance(item, Task):
            yield SourceTask(where, item.task_id.taskset, item.task_id.task_id, item.task_input)
        elif isinstance(item, Mapping):
            yield import_row(dict(item), where=where, taskset=taskset or "tasks")
        else:
            raise _refused(where, f"expected a mapping, got {type(item).__name__}")


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL file, cut at newline bytes only; a BOM, CRLF and blank lines at the end are fine."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"tasks: cannot read {path}: {error.strerror}. Accepted: a JSONL file, one task a line."
        ) from error
    blank: int | None = None
    with file:
        for number, line in enumerate(file, 1):
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if not text.strip():
                blank = number if blank is None else blank
                continue
            if blank is not None:
                raise _refused(f"{path}, line {blank}", "a blank line stands between tasks; accepted at the end only")
            where = f"{path}, line {number}"
            try:
                row, twice = loads(text), key_written_twice(text)
            except NotJson as error:
                raise _refused(where, f"not JSON ({error})") from error
            if twice is not None:
                raise _refused(where, f"the key {twice!r} stands twice in one object; accepted: once")
            if not isinstance(row, dict):
                raise _refused(where, f"expected a JSON object, got {type(row).__name__}")
            yield where, row


def import_row(row: dict[str, Any], *, where: str, taskset: str) -> SourceTask:
    """One row, materialised or flat, as a `SourceTask`. Raises `ConfigError` naming `where`."""
    materialised = isinstance(row.get("task_id"), dict) and "task_input" in row
    own = {key: row[key] for key in _OWN_KEYS if row.get(key) is not None}
    routing = {key: row[key] for key in ROUTING_KEYS if row.get(key) is not None}
    rest = {key: value for key, value in row.items() if key not in (*_OWN_KEYS, *_IGNORED_KEYS, *ROUTING_KEYS)}
    for key in rest:
        if key.startswith("_ng_"):
            raise _refused(where, f"key {key!r} is unknown; of the reserved _ng_* keys {', '.join(_OWN_KEYS)} are read")
    named_set, named_id = (
        _materialised_id(rest, where) if materialised else _flat_id(rest, own, routing, taskset, where)
    )
    task_input = _materialised_input(rest, where) if materialised else _flat_input(rest, where)
    _check_task_data(task_input, where)
    _drop_nulls(task_input)
    try:
        dumps(task_input)
    except NotJson as error:
        raise _refused(where, f"task_input cannot be sent as JSON: {error}") from error
    return SourceTask(
        where=where,
        taskset=named_set,
        task_id=named_id,
        task_input=task_input,
        rollout_id=_as_id(own.get("_ng_rollout_id"), "_ng_rollout_id", where),
        task_index=_as_index(own.get("_ng_task_index"), "_ng_task_index", where),
        rollout_index=_as_index(own.get("_ng_rollout_index"), "_ng_rollout_index", where),
        routing=routing,
    )


def _materialised_id(rest: dict[str, Any], where: str) -> tuple[str, str]:
    unknown = sorted(set(rest) - {"task_id", "task_input"})
    if unknown:
        raise _refused(
            where,
            f"key {unknown[0]!r} beside task_id and task_input; accepted there: "
            f"{', '.join((*ROUTING_KEYS, *_OWN_KEYS))} (the task's own fields belong in task_input)",
        )
    return _pair(rest["task_id"], "task_id", where)


def _pair(value: Mapping[str, Any], name: str, where: str) -> tuple[str, str]:
    if set(value) != {"taskset", "task_id"} or not isinstance(value["taskset"], str):
        raise _refused(where, f'{name} must be {{"taskset": text, "task_id": text}}, got {dict(value)!r}')
    text = _as_id(value["task_id"], f"{name}.task_id", where)
    if text is None:
        raise _refused(where, f"{name}.task_id is null; expected text")
    return value["taskset"], text


def _flat_id(
    rest: dict[str, Any], own: Mapping[str, Any], routing: Mapping[str, Any], taskset: str, where: str
) -> tuple[str, str | None]:
    """The identity of a flat row: `_ng_task_id`, else its own `task_id`, else (None) its place in the run."""
    given = own.get("_ng_task_id")
    if isinstance(given, Mapping):
        return _pair(given, "_ng_task_id", where)
    if isinstance(routing.get("task_source"), str):
        taskset = routing["task_source"]
    elif isinstance(routing.get("agent_ref"), Mapping) and isinstance(routing["agent_ref"].get("name"), str):
        taskset = routing["agent_ref"]["name"]
    if given is not None:
        return taskset, _as_id(given, "_ng_task_id", where)
    theirs = rest.get("task_id")
    if isinstance(theirs, str | int) and not isinstance(theirs, bool):
        return taskset, str(theirs)
    return taskset, None


def _materialised_input(rest: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(rest["task_input"], dict):
        raise _refused(where, f"task_input must be an object, got {type(rest['task_input']).__name__}")
    return dict(rest["task_input"])


def _flat_input(rest: dict[str, Any], where: str) -> dict[str, Any]:
    params = rest.get("responses_create_params")
    if not isinstance(params, dict):
        what = "is missing" if "responses_create_params" not in rest else f"is {type(params).__name__}, not an object"
        raise _refused(
            where,
            f"responses_create_params {what}; accepted: a flat row with responses_create_params, or "
            '{"task_id": {"taskset", "task_id"}, "task_input": {...}}',
        )
    data = {key: value for key, value in rest.items() if key != "responses_create_params"}
    return {"responses_create_params": params, "task_data": data}


def _check_task_data(task_input: dict[str, Any], where: str) -> None:
    data = task_input.get("task_data")
    if not isinstance(data, dict):
        return
    for key in sorted(RESERVED_TASK_DATA & data.keys()):
        raise _refused(where, f"task data may not have the key {key!r}, which a verify request or its verdict uses")
    for key in data.keys() & task_input.keys():
        if task_input[key] != data[key]:
            raise _refused(where, f"key {key!r} stands in task_input and in its task_data with two values")


def _drop_nulls(task_input: dict[str, Any]) -> None:
    """`"tools": null` means what an absent key means, but closed models and engines refuse it."""
    params = task_input.get("responses_create_params")
    if isinstance(params, dict) and None in params.values():
        task_input["responses_create_params"] = {key: value for key, value in params.items() if value is not None}


def _as_id(value: Any, name: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _refused(where, f"{name} is {value!r}; expected text or an integer")


def _as_index(value: Any, name: str, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _refused(where, f"{name} is {value!r}; expected an integer >= 0")
    return value


def _refused(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{where}: {reason}.")

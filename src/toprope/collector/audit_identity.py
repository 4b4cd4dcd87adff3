"""Whose row it is, held against the plan: the identity of a row agrees in itself, with its dispatch, with its task.

Left to others: what else is wrong with a row (`audit`), how identities are made (`plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from toprope.canonical.digest import digest_bytes
from toprope.canonical.json import NotJson, loads
from toprope.results.journal import DispatchLine
from toprope.results.layout import RunDir
from toprope.results.manifest import read_manifest
from toprope.storage.rows import read_rows

_SURROGATE = re.compile("[\ud800-\udfff]")


class PlannedTasks:
    """The lines of `tasks.jsonl` by task index. `fault` says what is wrong with the file itself, or is None."""

    def __init__(self, run_dir: RunDir) -> None:
        self.fault: str | None = None
        self._ids: dict[int, dict[str, str]] = {}
        self._rollouts: set[tuple[int, int]] = set()
        manifest = read_manifest(run_dir.manifest)
        try:
            found = digest_bytes(run_dir.tasks.read_bytes().removesuffix(b"\n"))
        except OSError as error:
            self.fault = f"cannot be read: {error.strerror}"
            return
        if found != manifest.tasks_digest:
            self.fault = "the tasks are not those that the manifest was made for"
        for row in read_rows(run_dir.tasks):
            try:
                line = loads(row.data)
            except NotJson:
                continue  # the digest speaks against the file
            if not isinstance(line, dict):
                continue
            index, first, task_id = line.get("_ng_task_index"), line.get("_ng_rollout_index"), line.get("task_id")
            if isinstance(index, int) and isinstance(first, int) and isinstance(task_id, dict):
                # A row holds U+FFFD where half of a surrogate pair stood, a task keeps it as an escape.
                self._ids[index] = {key: _SURROGATE.sub("\ufffd", str(value)) for key, value in task_id.items()}
                self._rollouts.update((index, first + repeat) for repeat in range(manifest.repeats))

    def differences(self, row: Mapping[str, Any], dispatched: DispatchLine | None) -> Iterator[str]:
        """What in the identity of `row`, which has a rollout id and an attempt, is not as it was dispatched."""
        rollout_id, attempt = row["_ng_rollout_id"], row["_ng_attempt_index"]
        yield from _differs(row, "_ng_episode_id", {"rollout_id": rollout_id, "attempt": attempt}, "the row's own id")
        if dispatched is None:
            return  # a breach of its own
        index = dispatched.task_index
        yield from _differs(row, "_ng_task_index", index, "the dispatch")
        yield from _differs(row, "_ng_rollout_index", dispatched.rollout_index, "the dispatch")
        if self.fault is not None and not self._ids:
            return  # no tasks to hold it against, which was said
        if (index, dispatched.rollout_index) not in self._rollouts:
            yield f"tasks.jsonl has no task {index} with a rollout {dispatched.rollout_index}, which was dispatched"
        elif index in self._ids:
            yield from _differs(row, "_ng_task_id", self._ids[index], f"task {index} of tasks.jsonl")


def _differs(row: Mapping[str, Any], key: str, expected: object, witness: str) -> Iterator[str]:
    if row.get(key) != expected or isinstance(row.get(key), bool):
        yield f"{key} is {row.get(key)!r}, and {witness} says {expected!r}"

"""One attempt at an agent's own `/run` (`run: {agent: name}`): a flat row out, the verify response back.

NeMo Gym's older agents run the whole episode themselves. The row carries the rollout's identity under `_ng_*` names,
from which such an agent makes the capture key of its calls. Left to others: environment servers (`request`).
"""

from __future__ import annotations

from typing import Any

from toprope.canonical.json import dumps, loads
from toprope.collector.schedule import Attempt

_ECHOED = ("_ng_task_index", "_ng_rollout_index", "_ng_rollout_id", "_ng_attempt_index")


def agent_body(attempt: Attempt) -> bytes:
    """The body of an agent's `/run`: the task's fields flat, its routing, and whose rollout it is."""
    rollout = attempt.rollout
    task_input = loads(rollout.task.body)["task_input"]
    fields = {key: value for key, value in task_input.items() if key != "task_data"}
    return dumps({**task_input.get("task_data", {}), **fields, **rollout.task.routing, **_identity(attempt)})


def wrong_identity(value: dict[str, Any], attempt: Attempt) -> str | None:
    """What in a reply says that it is for another rollout; None if nothing does. Agents may echo the row or not."""
    expected = _identity(attempt)
    for key in _ECHOED:
        if value.get(key) is not None and value[key] != expected.get(key, 0):
            return f"the reply to /run is for {key} {value[key]!r}, asked was {expected.get(key, 0)!r}"
    return None


def verdict_of(value: dict[str, Any]) -> dict[str, Any]:
    """The verify response in a reply: everything but the identity that it echoes."""
    return {key: item for key, item in value.items() if key not in _ECHOED}


def _identity(attempt: Attempt) -> dict[str, Any]:
    rollout = attempt.rollout
    fields: dict[str, Any] = {
        "_ng_task_index": rollout.task.index,
        "_ng_rollout_index": rollout.rollout_index,
        "_ng_rollout_id": rollout.rollout_id,
    }
    return fields | ({"_ng_attempt_index": attempt.number} if attempt.number else {})

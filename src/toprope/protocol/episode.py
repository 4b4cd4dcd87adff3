"""Messages of the environment server: `POST /run` and what comes back."""

from __future__ import annotations

from typing import Any

import msgspec

from toprope.protocol.ids import EpisodeId, TaskId

RESERVED_TASK_DATA = frozenset(
    {
        "response",
        "responses_create_params",
        "reward",
        "mask_sample",
        "failure_kind",
        "failure_reason",
        "reward_components",
        "env_session_id",
        "seed_env_session_id",
        "termination",
        "ng_agent_observations",
    }
)
"""What a verify request, a verdict or a result says itself. A task's fields travel beside them in one flat object and
come back in it, so that a task with one of these names could say what became of it: no task has them."""


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A materialised task."""

    task_id: TaskId
    task_input: dict[str, Any]


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /run`: one episode."""

    episode_id: EpisodeId
    task: Task


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A no-result failure on the wire. It never carries a reward.

    `delivery`, `upstream_status`, `env_session_id` and `partial_response` are ours: `for_stranger` leaves them out.
    """

    failure_reason: str
    terminal: bool
    failure_kind: str
    stage: str
    delivery: str | None = None
    upstream_status: int | None = None
    env_session_id: str | None = None
    partial_response: dict[str, Any] | None = None

    def for_stranger(self) -> Failure:
        """The four fields that NeMo Gym's closed model knows."""
        return Failure(self.failure_reason, self.terminal, self.failure_kind, self.stage)


class RunReply(msgspec.Struct, frozen=True):
    """Exactly one of `result` and `failure` is set; both identities equal the request's."""

    episode_id: EpisodeId
    task_id: TaskId
    result: dict[str, Any] | None
    failure: Failure | None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.failure is None):
            raise ValueError("exactly one of result and failure must be set")

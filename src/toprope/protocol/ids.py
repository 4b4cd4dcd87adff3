"""Identities as they stand in bodies: `EpisodeId` and `TaskId`, closed and validated."""

from __future__ import annotations

import msgspec

from toprope.correlation.ids import capture_key, check_attempt, check_rollout_id


class EpisodeId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt of one rollout. Raises `ValueError` on construction (422 in a body) if either part is malformed."""

    rollout_id: str
    attempt: int

    def __post_init__(self) -> None:
        check_rollout_id(self.rollout_id)
        check_attempt(self.attempt)

    @property
    def key(self) -> str:
        """The capture key."""
        return capture_key(self.rollout_id, self.attempt)


class TaskId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of a data set."""

    taskset: str
    task_id: str

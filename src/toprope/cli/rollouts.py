"""The rollouts of a run as lines for people, read from its files. Left to others: statistics (`collector.summary`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from toprope.results.journal import DispatchLine, OutcomeLine, read_journal
from toprope.results.layout import RunDir
from toprope.results.read import Damage, read_failure_heads, read_result_heads


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One attempt that left a row, or that is still without one. `seconds` from dispatch to durable outcome."""

    rollout_id: str
    attempt: int
    taskset: str
    task_id: str
    task_index: int
    rollout_index: int
    outcome: str
    reward: float | None = None
    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    why: str | None = None


def read_rollouts(run_dir: RunDir) -> list[RolloutLine]:
    """Every attempt of the run that is known, by task, repeat and attempt."""
    took, dispatched = _journal(run_dir)
    lines = list(_results(run_dir, took)) + list(_failures(run_dir, took))
    seen = {(line.rollout_id, line.attempt) for line in lines}
    lines += [
        RolloutLine(d.rollout_id, d.attempt, d.environment, "", d.task_index, d.rollout_index, "no outcome")
        for key, d in dispatched.items()
        if key not in seen
    ]
    return sorted(lines, key=lambda line: (line.task_index, line.rollout_index, line.attempt))


def _results(run_dir: RunDir, took: dict[tuple[str, int], float]) -> Iterator[RolloutLine]:
    for row in read_result_heads(run_dir.results):
        if isinstance(row, Damage):
            continue
        head, capture = row.value, row.value.capture
        yield RolloutLine(
            head.rollout_id,
            head.attempt,
            head.task.taskset,
            head.task.task_id,
            head.task_index,
            head.rollout_index,
            "masked" if head.mask_sample else "measured",
            head.reward,
            None if capture is None else capture.n_calls,
            None if capture is None else capture.generated_tokens_captured,
            took.get((head.rollout_id, head.attempt)),
            "; ".join(capture.mask_reasons) if capture is not None and capture.mask_reasons else head.termination,
        )


def _failures(run_dir: RunDir, took: dict[tuple[str, int], float]) -> Iterator[RolloutLine]:
    for row in read_failure_heads(run_dir.failures):
        if isinstance(row, Damage):
            continue
        head = row.value
        yield RolloutLine(
            head.rollout_id,
            head.attempt,
            head.task.taskset,
            head.task.task_id,
            head.task_index,
            head.rollout_index,
            "failed",
            seconds=took.get((head.rollout_id, head.attempt)),
            why=f"{head.failure_kind} at {head.stage}: {head.failure_reason}",
        )


def _journal(run_dir: RunDir) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], DispatchLine]]:
    """Seconds from dispatch to outcome, and the dispatches, by (rollout, attempt)."""
    dispatched: dict[tuple[str, int], DispatchLine] = {}
    took: dict[tuple[str, int], float] = {}
    for line in read_journal(run_dir.journal):
        if isinstance(line, DispatchLine):
            dispatched[line.rollout_id, line.attempt] = line
        elif isinstance(line, OutcomeLine):
            start = dispatched.get((line.rollout_id, line.attempt))
            if start is not None:
                span = datetime.fromisoformat(line.at) - datetime.fromisoformat(start.at)
                took[line.rollout_id, line.attempt] = span.total_seconds()
    return took, dispatched

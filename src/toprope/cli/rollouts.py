"""The rollouts of a run as lines for people, read from its files. Left to others: statistics (`collector.summary`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from toprope.correlation.ids import capture_key
from toprope.results.journal import DispatchLine, InterruptedLine, OutcomeLine, SessionLine, read_journal
from toprope.results.layout import RunDir
from toprope.results.read import Damage, read_failure_heads, read_result_heads


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One attempt that left a row, or that is still without one. `seconds` from dispatch to durable outcome.

    `env_sessions` are the provider's handles for what it used, as far as a row or the journal names them.
    """

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
    env_sessions: tuple[str, ...] = ()


def read_rollouts(run_dir: RunDir) -> list[RolloutLine]:
    """Every attempt of the run that is known, by task, repeat and attempt."""
    journal = _read(run_dir)
    lines = list(_results(run_dir, journal.took)) + list(_failures(run_dir, journal.took))
    seen = {(line.rollout_id, line.attempt) for line in lines}
    lines += [
        RolloutLine(
            d.rollout_id,
            d.attempt,
            d.environment,
            "",
            d.task_index,
            d.rollout_index,
            "interrupted" if key in journal.interrupted else "no outcome",
        )
        for key, d in journal.dispatched.items()
        if key not in seen
    ]
    lines = [_with_sessions(line, journal) for line in lines]
    return sorted(lines, key=lambda line: (line.task_index, line.rollout_index, line.attempt))


def _with_sessions(line: RolloutLine, journal: _Journal) -> RolloutLine:
    """`line` with the handles that the journal has for it, beside those of its row."""
    known = journal.sessions.get(capture_key(line.rollout_id, line.attempt), {})
    return replace(line, env_sessions=tuple(dict.fromkeys((*line.env_sessions, *known)))) if known else line


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
            tuple(each for each in (head.env_session_id, head.seed_env_session_id) if isinstance(each, str)),
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
            env_sessions=() if head.env_session_id is None else (head.env_session_id,),
        )


@dataclass(slots=True)
class _Journal:
    """What the journal says, by (rollout, attempt); `took` in seconds from dispatch to outcome, `sessions` by key."""

    dispatched: dict[tuple[str, int], DispatchLine] = field(default_factory=dict)
    took: dict[tuple[str, int], float] = field(default_factory=dict)
    interrupted: set[tuple[str, int]] = field(default_factory=set)
    sessions: dict[str, dict[str, None]] = field(default_factory=dict)


def _read(run_dir: RunDir) -> _Journal:
    journal = _Journal()
    for line in read_journal(run_dir.journal):
        if isinstance(line, DispatchLine):
            journal.dispatched[line.rollout_id, line.attempt] = line
        elif isinstance(line, OutcomeLine):
            start = journal.dispatched.get((line.rollout_id, line.attempt))
            if start is not None:
                span = datetime.fromisoformat(line.at) - datetime.fromisoformat(start.at)
                journal.took[line.rollout_id, line.attempt] = span.total_seconds()
        elif isinstance(line, InterruptedLine):
            journal.interrupted.add((line.rollout_id, line.attempt))
        elif isinstance(line, SessionLine) and line.env_session_id is not None:
            journal.sessions.setdefault(line.key, {})[line.env_session_id] = None
    return journal

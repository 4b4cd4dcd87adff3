"""Reading rows back, streamed: heads for statistics, whole rows for people, damage with its line number.

A head is what statistics need of a row; decoding it passes over the tokens at memory speed. Left to others: what the
heads add up to (`account`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from toprope.canonical.json import NotJson, loads
from toprope.results.rows import restore
from toprope.storage.rows import read_rows

T = TypeVar("T")


class TaskRef(msgspec.Struct, frozen=True):
    """The task of a row."""

    taskset: str
    task_id: str


class CaptureHead(msgspec.Struct, frozen=True):
    """What statistics need of `_ng_token_capture`."""

    n_calls: int = 0
    generated_tokens_captured: int = 0
    generated_tokens_delivered: int = 0
    mask_reasons: list[str] = []
    snapshot_id: str | None = None
    version: int | None = None
    format: str | None = None
    truncated: bool = False
    projected_bytes: int | None = None
    raw_logprobs_differ: list[str] = []


class ResultHead(msgspec.Struct, frozen=True):
    """What statistics need of a result row."""

    rollout_id: str = msgspec.field(name="_ng_rollout_id")
    attempt: int = msgspec.field(name="_ng_attempt_index")
    task: TaskRef = msgspec.field(name="_ng_task_id")
    task_index: int = msgspec.field(name="_ng_task_index")
    rollout_index: int = msgspec.field(name="_ng_rollout_index")
    reward: float
    mask_sample: bool = False
    reward_components: Any = None
    termination: Any = None
    env_session_id: Any = None
    seed_env_session_id: Any = None
    masked_by: list[str] = msgspec.field(name="_ng_masked_by", default=[])
    capture: CaptureHead | None = msgspec.field(name="_ng_token_capture", default=None)

    def components(self) -> dict[str, float]:
        """The numeric reward components; what is no number, or none that a float can be, is no measure."""
        found = self.reward_components
        if not isinstance(found, dict):
            return {}
        return {k: float(v) for k, v in found.items() if _measurable(v)}


def _measurable(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or value.bit_length() < 1024


class FailureHead(msgspec.Struct, frozen=True):
    """What statistics need of a failure row."""

    rollout_id: str = msgspec.field(name="_ng_rollout_id")
    attempt: int = msgspec.field(name="_ng_attempt_index")
    task: TaskRef = msgspec.field(name="_ng_task_id")
    task_index: int = msgspec.field(name="_ng_task_index")
    rollout_index: int = msgspec.field(name="_ng_rollout_index")
    failure_kind: str
    stage: str
    terminal: bool
    failure_reason: str
    env_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that is no row, with its number and the reason. A torn last line was never acknowledged."""

    file: str
    line_no: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line_no}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A row read back, and where it stands."""

    value: T
    line_no: int
    offset: int
    data: bytes


_result_decoder = msgspec.json.Decoder(ResultHead)
_failure_decoder = msgspec.json.Decoder(FailureHead)


def read_result_heads(path: Path) -> Iterator[Placed[ResultHead] | Damage]:
    """The heads of results.jsonl in order of the file."""
    return _read(path, _result_decoder)


def read_failure_heads(path: Path) -> Iterator[Placed[FailureHead] | Damage]:
    """The heads of failures.jsonl in order of the file."""
    return _read(path, _failure_decoder)


def read_values(path: Path) -> Iterator[dict[str, Any] | Damage]:
    """Whole rows as Python values, every digit kept and lone surrogates put back."""
    for row in read_rows(path):
        if row.damage is not None:
            yield Damage(path.name, row.line_no, row.damage)
            continue
        try:
            value = loads(row.data)
        except NotJson as error:
            yield Damage(path.name, row.line_no, str(error))
            continue
        yield restore(value)


def _read(path: Path, decoder: msgspec.json.Decoder[T]) -> Iterator[Placed[T] | Damage]:
    for row in read_rows(path):
        if row.damage is not None:
            yield Damage(path.name, row.line_no, row.damage)
            continue
        try:
            yield Placed(decoder.decode(row.data), row.line_no, row.offset, row.data)
        except (msgspec.MsgspecError, ValueError) as error:
            yield Damage(path.name, row.line_no, str(error))

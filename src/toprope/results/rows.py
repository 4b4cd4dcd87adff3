r"""Rows: what stands in results.jsonl and failures.jsonl, and how a value becomes bytes that every parser reads.

A row is one JSON object on one line: no bare NaN or Infinity, integers with all their digits. A lone surrogate (half
of a pair, which UTF-8 cannot carry and many parsers refuse even as an escape) is replaced by U+FFFD, and what stood
there is kept beside it:

    "_ng_lone_surrogates": [[["response", "output", 0, "text"], "a\\ud835b"], ...]

path and text, the text with its non-ASCII characters as JSON escapes; `restore` puts it back. What cannot be stored
raises `Unstorable`, naming the field. Left to others: writing (`ledger`), reading (`read`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from toprope.canonical.json import NotJson, check_finite, dumps
from toprope.errors.body import MESSAGE_LIMIT, shorten
from toprope.protocol.ids import TaskId

ROW_SCHEMA = 1
MASKED_BY = "_ng_masked_by"
"""On masked rows: `environment`, `capture`, or both."""

LONE_SURROGATES = "_ng_lone_surrogates"

_Path = tuple[str | int, ...]
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unstorable(ValueError):
    """A value that no row can hold. `field` is its path in the row."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.field = where


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """Whose row it is. `routing` (`agent_ref`, `task_source`) goes onto the row where the verdict has no such key."""

    rollout_id: str
    attempt: int
    task_id: TaskId
    task_index: int
    rollout_index: int
    routing: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The `_ng_*` keys of every row."""
        return {
            "_ng_episode_id": {"rollout_id": self.rollout_id, "attempt": self.attempt},
            "_ng_task_id": {"taskset": self.task_id.taskset, "task_id": self.task_id.task_id},
            "_ng_task_index": self.task_index,
            "_ng_rollout_index": self.rollout_index,
            "_ng_attempt_index": self.attempt,
            "_ng_rollout_id": self.rollout_id,
            "_ng_schema": ROW_SCHEMA,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Why an attempt has no verdict. It has no reward, and no place for one."""

    kind: str
    stage: str
    reason: str
    terminal: bool
    delivery: str | None = None
    upstream_status: int | None = None
    env_session_id: str | None = None
    partial_response: Mapping[str, Any] | None = None
    retry_after_s: float | None = None


def result_row(identity: RowIdentity, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a verdict that `check_verdict` accepted: its fields flat, our identity beside them."""
    routing = {key: value for key, value in identity.routing.items() if key not in verdict}
    masked = bool(verdict.get("mask_sample"))
    row = {**verdict, "mask_sample": masked, **routing, **identity.fields()}
    if masked:
        row[MASKED_BY] = ["environment"]
    return row


def check_verdict(verdict: Mapping[str, Any]) -> None:
    """Raise `Unstorable` naming the field of a verdict that may not become a row.

    A verdict has a `reward`, a finite number and no bool; `mask_sample`, if it is there, is a bool; no key begins
    with `_ng_`.
    """
    for key in verdict:
        if key.startswith("_ng_"):
            raise Unstorable(key, "the reply uses a reserved key; _ng_* keys belong to the collector")
    if "reward" not in verdict:
        raise Unstorable("reward", "the reply has none; expected a finite number")
    reward = verdict["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not _finite(reward):
        raise Unstorable("reward", f"{shorten(repr(reward), 100)} is no finite number")
    mask = verdict.get("mask_sample")
    if mask is not None and not isinstance(mask, bool):
        raise Unstorable("mask_sample", f"{shorten(repr(mask), 100)} is neither true nor false")


TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def check_bundles(response: Any) -> None:
    """Raise `Unstorable` naming the item of a response that carries ids without logprobs, or fewer of one.

    The three token fields stand together or not at all (empty lists are legal): trainers read them as one bundle.
    """
    items = response.get("output") if isinstance(response, Mapping) else None
    for index, item in enumerate(items if isinstance(items, list) else ()):
        present = [name for name in TOKEN_FIELDS if isinstance(item, Mapping) and item.get(name) is not None]
        if not present:
            continue
        where = f"response.output[{index}]"
        missing = [name for name in TOKEN_FIELDS if name not in present]
        if missing:
            raise Unstorable(f"{where}.{missing[0]}", f"missing beside {present[0]}; token fields stand together")
        if not all(isinstance(item[name], list) for name in TOKEN_FIELDS):
            raise Unstorable(where, "token fields must be lists")
        if len(item["generation_token_ids"]) != len(item["generation_log_probs"]):
            raise Unstorable(f"{where}.generation_log_probs", "not one value for each of generation_token_ids")


def failure_row(identity: RowIdentity, failure: FailureRecord) -> dict[str, Any]:
    """The row of an attempt without verdict. A partial response that cannot be stored is left out, and said so."""
    reason, partial = failure.reason, failure.partial_response
    if partial is not None:
        try:
            encode_row({"partial_response": partial})
        except Unstorable as error:
            reason, partial = f"{reason} (the partial response is left out: {error})", None
    row: dict[str, Any] = {
        **identity.fields(),
        **identity.routing,
        "failure_kind": failure.kind,
        "stage": failure.stage,
        "terminal": failure.terminal,
        "failure_reason": shorten(reason, MESSAGE_LIMIT),
        "delivery": failure.delivery,
        "upstream_status": failure.upstream_status,
    }
    if failure.env_session_id is not None:
        row["env_session_id"] = failure.env_session_id
    if partial is not None:
        row["partial_response"] = partial
    row["at"] = now()
    return row


def now() -> str:
    """The time as it stands in rows and journal: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line without its newline. Raises `Unstorable` naming the field that JSON cannot carry."""
    try:
        check_finite(row, "")
        try:
            return msgspec.json.encode(row)
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
            return dumps(_without_lone_surrogates(row))
    except NotJson as error:
        where, _, reason = str(error).partition(" ")
        named = where.startswith(".")
        raise Unstorable(where[1:] if named else "row", reason if named else str(error)) from error


def restore(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as it was before lone surrogates were replaced; without `_ng_lone_surrogates`. Changes `row`."""
    for path, escaped in row.pop(LONE_SURROGATES, ()):
        at: Any = row
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = json.loads(f'"{escaped}"')
    return row


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _without_lone_surrogates(row: Mapping[str, Any]) -> dict[str, Any]:
    found: list[tuple[_Path, str]] = list(_lone_surrogates(row))
    if not found:
        return dict(row)
    clean = json.loads(json.dumps(row, allow_nan=False))
    for path, text in found:
        at: Any = clean
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
    clean[LONE_SURROGATES] = [[list(path), json.dumps(text)[1:-1]] for path, text in found]
    return dict(clean)


def _lone_surrogates(value: Any) -> Iterator[tuple[_Path, str]]:
    stack: list[tuple[_Path, Any]] = [((), value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str):
            if _is_lone(item):
                yield path, item
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if _is_lone(key):
                    where = ".".join(str(step) for step in (*path, ascii(key)))
                    raise Unstorable(where, "a key with a lone surrogate, which UTF-8 cannot carry")
                stack.append(((*path, key), inner))
        elif isinstance(item, list | tuple):
            stack.extend(((*path, index), inner) for index, inner in enumerate(item))


def _is_lone(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False

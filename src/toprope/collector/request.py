"""One attempt on the wire: `POST /run`, and what came back as a value. Never raises for anything a peer can do.

Left to others: whether to try again (`schedule`), rows and tokens (`finish`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from toprope.canonical.json import NotJson, check_finite, dumps, loads
from toprope.collector.agent_run import agent_body, verdict_of, wrong_identity
from toprope.collector.schedule import Attempt
from toprope.errors.body import read_error_body, shorten
from toprope.errors.kinds import Delivery, Kind, Stage, is_kind, known_kind
from toprope.errors.tree import TopropeError, TransportError
from toprope.http.client import Peer
from toprope.http.reply import Reply
from toprope.protocol.episode import Failure
from toprope.results.rows import FailureRecord

log = logging.getLogger(__name__)
EXCERPT = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an episode, as the environment server gave it; not checked for what a row may hold."""

    fields: dict[str, Any]


async def send(
    peer: Peer, attempt: Attempt, *, environment: str, timeout_s: float | None, agent_run: bool = False
) -> Verdict | FailureRecord:
    """Run one episode. On return the server has answered, or it is known that it will not.

    `agent_run`: the peer is an agent with a `/run` of its own.
    """
    body = agent_body(attempt) if agent_run else run_body(attempt)
    try:
        reply = await peer.request(
            "POST", "/run", body=body, headers={"content-type": "application/json"}, timeout_s=timeout_s
        )
        return read_agent_reply(reply, attempt) if agent_run else read_reply(reply, attempt, environment)
    except TransportError as error:
        stage = Stage.AGENT if agent_run else Stage.ADMISSION
        return _failed(error.kind, error.message, terminal=False, delivery=error.delivery, stage=stage)
    except TopropeError as error:
        return _failed(error.kind, error.message, terminal=not error.retryable, delivery=Delivery.DELIVERED)
    except Exception as error:  # a bug of ours or of the client costs this row and is logged, never the run
        log.exception("rollout %s: the attempt failed in the collector", attempt.key)
        return _failed(Kind.INTERNAL, f"{type(error).__name__}: {error}", terminal=True)


def run_body(attempt: Attempt) -> bytes:
    """The body of `/run`; the task goes out with the bytes that the plan made."""
    episode = dumps({"rollout_id": attempt.rollout.rollout_id, "attempt": attempt.number})
    return b'{"episode_id":%s,"task":%s}' % (episode, attempt.rollout.task.body)


def read_reply(reply: Reply, attempt: Attempt, environment: str) -> Verdict | FailureRecord:
    """What a reply to `/run` says."""
    if reply.status != 200:
        return _error_reply(reply)
    body = _object(reply)
    if isinstance(body, FailureRecord):
        return body
    task_id = attempt.rollout.task.task_id
    expected = {
        "episode_id": {"rollout_id": attempt.rollout.rollout_id, "attempt": attempt.number},
        "task_id": {"taskset": task_id.taskset, "task_id": task_id.task_id},
    }
    for key, value in expected.items():
        if body.get(key) != value:
            return _bad_reply(f"the reply to /run is for {key} {body.get(key)!r}, asked was {value!r}", b"")
    result, failure = body.get("result"), body.get("failure")
    if (result is None) == (failure is None):
        return _bad_reply("the reply to /run must have exactly one of result and failure", reply.body)
    if failure is not None:
        return _read_failure(failure, environment)
    if not isinstance(result, dict):
        return _bad_reply(f"result is {type(result).__name__}, not an object", reply.body)
    return Verdict(result)


def read_agent_reply(reply: Reply, attempt: Attempt) -> Verdict | FailureRecord:
    """What a reply to an agent's own `/run` says: the verify response, flat."""
    if reply.status != 200:
        failure = _error_reply(reply)
        if failure.kind != Kind.CAPACITY:  # one that was turned away at the door has not begun
            kind = Kind.AGENT_FAILED if failure.kind == Kind.BAD_REPLY else failure.kind
            stage = Stage.AGENT if failure.stage == Stage.ADMISSION else failure.stage
            failure = replace(failure, kind=kind, stage=stage)
        return failure
    body = _object(reply)
    if isinstance(body, FailureRecord):
        return body
    wrong = wrong_identity(body, attempt)
    return Verdict(verdict_of(body)) if wrong is None else _bad_reply(wrong, b"")


def _object(reply: Reply) -> dict[str, Any] | FailureRecord:
    try:
        body = loads(reply.body)
    except NotJson as error:
        return _bad_reply(f"the reply to /run is not JSON: {_where_not_json(reply.body) or error}", reply.body)
    if not isinstance(body, dict):
        return _bad_reply(f"the reply to /run is {type(body).__name__}, not an object", reply.body)
    return body


def _read_failure(value: Any, environment: str) -> FailureRecord:
    try:
        failure = msgspec.convert(value, Failure)
    except msgspec.ValidationError as error:
        return _bad_reply(f"the failure in the reply to /run cannot be read: {error}", dumps(value))
    return FailureRecord(
        kind=known_kind(failure.failure_kind, environment),
        stage=failure.stage,
        reason=failure.failure_reason,
        terminal=failure.terminal,
        delivery=failure.delivery,
        upstream_status=failure.upstream_status,
        env_session_id=failure.env_session_id,
        partial_response=failure.partial_response,
    )


def _error_reply(reply: Reply) -> FailureRecord:
    excerpt = reply.body[:EXCERPT].decode("utf-8", "replace")
    try:
        body = loads(reply.body)
    except NotJson:
        body = None
    info = read_error_body(reply.status, body, excerpt)
    default = Kind.CAPACITY if reply.status == 429 else Kind.BAD_REPLY
    return FailureRecord(
        kind=info.kind if is_kind(info.kind) and info.kind is not None else default,
        stage=info.stage or Stage.ADMISSION,
        reason=f"/run answered {reply.status}: {info.message}",
        terminal=not info.retryable,
        delivery=Delivery.DELIVERED,
        upstream_status=info.upstream_status or reply.status,
        retry_after_s=_seconds(reply.headers.get("retry-after")),
    )


def _bad_reply(reason: str, body: bytes) -> FailureRecord:
    excerpt = body[:EXCERPT].decode("utf-8", "replace")
    text = f"{shorten(reason, 1000)}; it begins: {excerpt!r}" if excerpt else reason
    return _failed(Kind.BAD_REPLY, text, terminal=True, delivery=Delivery.DELIVERED, stage=Stage.VERIFICATION)


def _failed(
    kind: str, reason: str, *, terminal: bool, delivery: str | None = None, stage: str = Stage.ADMISSION
) -> FailureRecord:
    return FailureRecord(kind=str(kind), stage=str(stage), reason=reason, terminal=terminal, delivery=delivery)


def _where_not_json(body: bytes) -> str | None:
    """The field whose value is no JSON (NaN, Infinity, 1e400), if the text is JSON apart from that."""
    try:
        check_finite(json.loads(body.decode("utf-8")), "")
    except NotJson as error:
        return str(error).lstrip(".")
    except (ValueError, RecursionError):
        return None
    return None


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None

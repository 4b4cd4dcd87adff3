"""Reading what participants answer: errors into failures, verify replies into results. Pure.

A reward is a finite JSON number. Everything else (absent, null, true, "0.5", NaN, 1e400) is a failure that names what
was sent, never a reward. Left to others: when a call is made and how long it may take (`episode`).
"""

from __future__ import annotations

import json
import math
from typing import Any

from toprope.canonical.json import MAX_DIGITS, NotJson
from toprope.errors.body import said_by, shorten
from toprope.errors.kinds import Delivery, Kind, Stage, is_kind
from toprope.errors.tree import PeerError, TopropeError
from toprope.http.jsonbody import decode_any
from toprope.http.reply import Reply
from toprope.protocol.episode import Failure

_UNTYPED_KINDS = {
    Stage.SEED: Kind.SEED_FAILED,
    Stage.AGENT: Kind.AGENT_FAILED,
    Stage.CLEANUP: Kind.SESSION_RELEASE_FAILED,
    Stage.VERIFICATION: Kind.VERIFY_FAILED,
}
_EXCERPT = 300


def accepted(reply: Reply, stage: Stage, what: str) -> Reply:
    """`reply` if its status is a 2xx. Raises `PeerError` with the peer's own words otherwise.

    A typed body's kind and retryable decide; without one the kind is the stage's and the status table decides.
    """
    if reply.status < 300:
        return reply
    info = reply.error_info()
    tried = f" ({reply.attempts} attempts)" if reply.attempts > 1 else ""
    raise PeerError(
        f"{what}: {reply.url} answered {reply.status}{tried}: {info.message}",
        kind=info.kind if is_kind(info.kind) else _UNTYPED_KINDS.get(stage, Kind.BAD_REPLY),
        retryable=info.retryable,
        delivery=Delivery.DELIVERED,
        upstream_status=info.upstream_status if info.upstream_status is not None else reply.status,
    )


def bad_reply(reply: Reply, what: str, why: str) -> PeerError:
    """The terminal error for a 2xx whose body is not what the protocol says."""
    return PeerError(
        f"{what}: {reply.url} answered {reply.status} with a body that {why}; it begins with "
        f"{shorten(reply.text, _EXCERPT)!r}",
        kind=Kind.BAD_REPLY,
        retryable=False,
        delivery=Delivery.DELIVERED,
        upstream_status=reply.status,
    )


def read_object(reply: Reply, what: str) -> dict[str, Any]:
    """The body as a JSON object. Raises as `bad_reply`."""
    try:
        value = decode_any(reply.body)
    except NotJson as error:
        raise bad_reply(reply, what, f"is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise bad_reply(reply, what, f"is {_shown(value)} and no object")
    return value


def read_response(reply: Reply, what: str) -> dict[str, Any]:
    """The body as a Responses object: a JSON object with an `output` list of objects. Raises as `bad_reply`."""
    value = read_object(reply, what)
    output = value.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise bad_reply(reply, what, "is no Responses object (`output`, a list of objects, is needed)")
    return value


def read_verdict(reply: Reply) -> dict[str, Any]:
    """A verify reply with a reward, every field kept. Raises `PeerError` of kind bad_reward or bad_reply, terminal."""
    what = "verify"
    try:
        value = decode_any(reply.body)
    except NotJson:
        value = None
        odd = _odd_reward(reply.body)
        if odd is not None:
            raise _bad_reward(reply, shorten(odd, 100)) from None
    if not isinstance(value, dict):
        return read_object(reply, what)  # raises: it is no object
    if "reward" not in value:
        raise _bad_reward(reply, "absent")
    reward = value["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not _finite(reward):
        raise _bad_reward(reply, _shown(reward))
    return value


def failure_of(error: BaseException, stage: Stage) -> Failure:
    """What `error` means for an episode that was in `stage`. What is no error of ours is a bug, and terminal."""
    if not isinstance(error, TopropeError):
        return Failure(shorten(said_by(error)), terminal=True, failure_kind=Kind.INTERNAL, stage=stage)
    return Failure(
        failure_reason=shorten(error.message),
        terminal=not error.retryable,
        failure_kind=str(error.kind),
        stage=str(stage),
        delivery=None if error.delivery is None else str(error.delivery),
        upstream_status=error.upstream_status,
    )


def _bad_reward(reply: Reply, shown: str) -> PeerError:
    return PeerError(
        f"verify: {reply.url} answered {reply.status} with the reward {shown}; a finite JSON number is needed",
        kind=Kind.BAD_REWARD,
        retryable=False,
        delivery=Delivery.DELIVERED,
        upstream_status=reply.status,
    )


def _finite(number: int | float) -> bool:
    try:
        return math.isfinite(float(number))
    except OverflowError:  # an integer beyond floats
        return False


def _shown(value: Any) -> str:
    return shorten(json.dumps(value), 100)


class _Odd(float):
    """A number that JSON does not have, with the text that stood there."""

    text: str = ""


def _odd_reward(body: bytes) -> str | None:
    """The text of `reward` where the body is JSON but for NaN, Infinity and numbers too large to be read."""

    def odd(text: str) -> float:
        number = _Odd(text)
        number.text = text
        return number

    def parse_float(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else odd(text)

    def parse_int(text: str) -> float:
        return int(text) if len(text) <= MAX_DIGITS else odd(text)

    try:
        value = json.loads(body, parse_constant=odd, parse_float=parse_float, parse_int=parse_int)
    except (ValueError, RecursionError):
        return None
    reward = value.get("reward") if isinstance(value, dict) else None
    return reward.text if isinstance(reward, _Odd) else None

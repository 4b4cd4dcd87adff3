"""The kinds of failure, their stages and deliveries: one vocabulary for every server, row and metric."""

from __future__ import annotations

import re
from enum import StrEnum

_OWN_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*:[A-Za-z0-9][A-Za-z0-9._-]*")


class Kind(StrEnum):
    """What went wrong. An environment's own kinds are `<server>:<kind>` and stand beside these."""

    TRANSPORT_UNREACHABLE = "transport_unreachable"
    TRANSPORT_DROPPED = "transport_dropped"
    TRANSPORT_TIMEOUT = "transport_timeout"
    TRANSPORT_RESOURCE = "transport_resource"
    BAD_REQUEST = "bad_request"
    BAD_REPLY = "bad_reply"
    CONFLICT = "conflict"
    FORBIDDEN = "forbidden"
    CAPACITY = "capacity"
    SESSION_LOST = "session_lost"
    SESSION_EXPIRED = "session_expired"
    SESSION_RELEASE_FAILED = "session_release_failed"
    SEED_FAILED = "seed_failed"
    GRANT_UNAVAILABLE = "grant_unavailable"
    AGENT_FAILED = "agent_failed"
    AGENT_TIMEOUT = "agent_timeout"
    TOOL_UNAVAILABLE = "tool_unavailable"
    MODEL_UNAVAILABLE = "model_unavailable"
    MODEL_REJECTED = "model_rejected"
    MODEL_AUTH = "model_auth"
    MODEL_QUOTA = "model_quota"
    MODEL_CONTEXT_LENGTH = "model_context_length"
    JUDGE_UNAVAILABLE = "judge_unavailable"
    VERIFY_FAILED = "verify_failed"
    VERIFY_TIMEOUT = "verify_timeout"
    BAD_REWARD = "bad_reward"
    EPISODE_TIMEOUT = "episode_timeout"
    ADMISSION_TIMEOUT = "admission_timeout"
    CANCELLED = "cancelled"
    CAPTURE_CLOSED = "capture_closed"
    CAPTURE_FAILED = "capture_failed"
    LIMIT_REACHED = "limit_reached"
    STALE = "stale"
    INTERNAL = "internal"


class Delivery(StrEnum):
    """What is known of a request that failed."""

    NOT_SENT = "not_sent"
    POSSIBLY_DELIVERED = "possibly_delivered"
    DELIVERED = "delivered"


class Stage(StrEnum):
    """Where in an episode a failure stands."""

    ADMISSION = "admission"
    SEED = "seed"
    AGENT = "agent"
    CLEANUP = "cleanup"
    VERIFICATION = "verification"


def is_kind(value: object) -> bool:
    """Whether `value` is a kind of the enum or an environment's own `<server>:<kind>`."""
    return isinstance(value, str) and (value in Kind._value2member_map_ or bool(_OWN_KIND.fullmatch(value)))


def known_kind(kind: str, server: str) -> str:
    """`kind` if the enum or an own grammar has it; the bare word of an author or stranger becomes `<server>:<word>`."""
    own = f"{server}:{kind}"
    return kind if is_kind(kind) else own if is_kind(own) else Kind.INTERNAL

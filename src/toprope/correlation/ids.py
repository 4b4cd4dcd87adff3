"""Identities: rollout ids, attempts, the capture key made of both, and the ids that we mint.

Pure grammar and minting. How a key stands in a URL is `path`'s, which key a call belongs to is `context`'s.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from typing import NamedTuple

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RESERVED_SUFFIX = re.compile(r"-a[1-9][0-9]*\Z")
CAPTURE_WORD = "training-token-capture"
"""Stands after the capture key in a path whose calls are captured."""
_ATTEMPT_SUFFIX = re.compile(r"(?P<rollout>.*)-a(?P<attempt>[1-9][0-9]*)", re.DOTALL)


_random = random.Random()
"""Seeded by the system, here and in every forked child; not the module's generator, which programs seed. The system's
own lets go of the interpreter lock at every number."""
os.register_at_fork(after_in_child=_random.seed)


class CaptureKey(NamedTuple):
    """A capture key taken apart: the logical rollout and which physical execution of it."""

    rollout_id: str
    attempt: int


def check_rollout_id(value: object) -> str:
    """Return `value` if it is a rollout id; raise `ValueError` showing it otherwise. Never rewrites."""
    if not isinstance(value, str):
        raise ValueError(f"rollout id {value!r}: expected a string")
    if not _ROLLOUT_ID.fullmatch(value):
        raise ValueError(
            f"rollout id {value!r}: expected 1 to 200 characters from A-Z a-z 0-9 . _ - "
            "beginning with a letter or digit"
        )
    if _RESERVED_SUFFIX.search(value):
        raise ValueError(f"rollout id {value!r}: the ending -a<number> is reserved for attempts")
    if value == CAPTURE_WORD:  # in a path it would be read as an id that was left out
        raise ValueError(
            f"rollout id {value!r}: this word is reserved; it stands after the id, "
            f"as in /ng-rollout/<rollout id>/{CAPTURE_WORD}/v1"
        )
    return value


def check_attempt(value: object) -> int:
    """Return `value` if it is an attempt number (an integer >= 0, not a bool); raise `ValueError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"attempt {value!r}: expected an integer >= 0")
    return value


def capture_key(rollout_id: str, attempt: int) -> str:
    """The string that stands for one attempt in URLs and stores: the id itself for attempt 0, `<id>-a<n>` after."""
    check_rollout_id(rollout_id)
    return rollout_id if check_attempt(attempt) == 0 else f"{rollout_id}-a{attempt}"


def parse_capture_key(key: object) -> CaptureKey:
    """The inverse of `capture_key`. Raises `ValueError` showing the key."""
    if not isinstance(key, str):
        raise ValueError(f"capture key {key!r}: expected a string")
    match = _ATTEMPT_SUFFIX.fullmatch(key)
    if match is None:
        return CaptureKey(check_rollout_id(key), 0)
    return CaptureKey(check_rollout_id(match["rollout"]), int(match["attempt"]))


def mint_model_call_id() -> str:
    """A fresh id for one model call: unique, sortable by time (48 bits of ms, 80 random bits, as hex); no secret."""
    return f"call-{time.time_ns() // 1_000_000:012x}{_random.getrandbits(80):020x}"


def mint_session_id() -> str:
    """A fresh session id with 128 random bits, minted by the caller before its first send."""
    return f"s-{secrets.token_hex(16)}"


def mint_close_token() -> str:
    """A fresh close token with 192 random bits; servers keep only its digest."""
    return secrets.token_urlsafe(24)

"""The life of one session as a table and one pure `step`. No clock, no tasks, no awaits.

A session lives from its seed to its close; a closed id is remembered (CLOSED), so that a seed which comes late or again
cannot bring it back to life. A close that arrives during the seed is remembered (CLOSE_PENDING). A release that failed
keeps the session (UNRELEASED) until a later close or sweep succeeds. Left to others: doing what the action says
(`sessions`), and what a session is to its role.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a session id stands at this server."""

    ABSENT = "absent"
    SEEDING = "seeding"
    CLOSE_PENDING = "close_pending"
    OPEN = "open"
    CLOSING = "closing"
    UNRELEASED = "unreleased"
    CLOSED = "closed"


class Event(StrEnum):
    """What can happen to it. The first four are requests, the others are what became of our own work, or the clock."""

    SEED = "seed"
    SEED_OTHER = "seed_other"
    USE = "use"
    CLOSE = "close"
    SEEDED = "seeded"
    SEED_FAILED = "seed_failed"
    RELEASED = "released"
    RELEASE_FAILED = "release_failed"
    EXPIRE = "expire"
    FORGET = "forget"


class Action(StrEnum):
    """What the registry has to do."""

    ALLOCATE = "allocate"
    JOIN = "join"
    REPLAY = "replay"
    CONFLICT = "conflict"
    ADMIT = "admit"
    LOST = "lost"
    RELEASE = "release"
    WAIT = "wait"
    FENCE = "fence"
    ALREADY_CLOSED = "already_closed"
    ANSWER = "answer"
    FAIL = "fail"
    NOTHING = "nothing"


_S, _E, _A = State, Event, Action

TABLE: dict[tuple[State, Event], tuple[State, Action]] = {
    (_S.ABSENT, _E.SEED): (_S.SEEDING, _A.ALLOCATE),
    (_S.ABSENT, _E.USE): (_S.ABSENT, _A.LOST),
    (_S.ABSENT, _E.CLOSE): (_S.CLOSED, _A.FENCE),
    (_S.SEEDING, _E.SEED): (_S.SEEDING, _A.JOIN),
    (_S.SEEDING, _E.SEED_OTHER): (_S.SEEDING, _A.CONFLICT),
    (_S.SEEDING, _E.USE): (_S.SEEDING, _A.CONFLICT),
    (_S.SEEDING, _E.CLOSE): (_S.CLOSE_PENDING, _A.WAIT),
    (_S.SEEDING, _E.SEEDED): (_S.OPEN, _A.ANSWER),
    (_S.SEEDING, _E.SEED_FAILED): (_S.ABSENT, _A.FAIL),
    (_S.CLOSE_PENDING, _E.SEED): (_S.CLOSE_PENDING, _A.CONFLICT),
    (_S.CLOSE_PENDING, _E.SEED_OTHER): (_S.CLOSE_PENDING, _A.CONFLICT),
    (_S.CLOSE_PENDING, _E.USE): (_S.CLOSE_PENDING, _A.LOST),
    (_S.CLOSE_PENDING, _E.CLOSE): (_S.CLOSE_PENDING, _A.WAIT),
    (_S.CLOSE_PENDING, _E.SEEDED): (_S.CLOSING, _A.RELEASE),
    (_S.CLOSE_PENDING, _E.SEED_FAILED): (_S.CLOSED, _A.FAIL),
    (_S.OPEN, _E.SEED): (_S.OPEN, _A.REPLAY),
    (_S.OPEN, _E.SEED_OTHER): (_S.OPEN, _A.CONFLICT),
    (_S.OPEN, _E.USE): (_S.OPEN, _A.ADMIT),
    (_S.OPEN, _E.CLOSE): (_S.CLOSING, _A.RELEASE),
    (_S.OPEN, _E.EXPIRE): (_S.CLOSING, _A.RELEASE),
    (_S.CLOSING, _E.SEED): (_S.CLOSING, _A.CONFLICT),
    (_S.CLOSING, _E.SEED_OTHER): (_S.CLOSING, _A.CONFLICT),
    (_S.CLOSING, _E.USE): (_S.CLOSING, _A.LOST),
    (_S.CLOSING, _E.CLOSE): (_S.CLOSING, _A.WAIT),
    (_S.CLOSING, _E.RELEASED): (_S.CLOSED, _A.ANSWER),
    (_S.CLOSING, _E.RELEASE_FAILED): (_S.UNRELEASED, _A.FAIL),
    (_S.UNRELEASED, _E.SEED): (_S.UNRELEASED, _A.CONFLICT),
    (_S.UNRELEASED, _E.SEED_OTHER): (_S.UNRELEASED, _A.CONFLICT),
    (_S.UNRELEASED, _E.USE): (_S.UNRELEASED, _A.LOST),
    (_S.UNRELEASED, _E.CLOSE): (_S.CLOSING, _A.RELEASE),
    (_S.UNRELEASED, _E.EXPIRE): (_S.CLOSING, _A.RELEASE),
    (_S.CLOSED, _E.SEED): (_S.CLOSED, _A.CONFLICT),
    (_S.CLOSED, _E.SEED_OTHER): (_S.CLOSED, _A.CONFLICT),
    (_S.CLOSED, _E.USE): (_S.CLOSED, _A.LOST),
    (_S.CLOSED, _E.CLOSE): (_S.CLOSED, _A.ALREADY_CLOSED),
    (_S.CLOSED, _E.FORGET): (_S.ABSENT, _A.NOTHING),
}


class ImpossibleStep(RuntimeError):
    """A pair that is not in the table: a fault of ours, never of a caller."""


def step(state: State, event: Event) -> tuple[State, Action]:
    """The state after `event`, and what is to be done. Raises `ImpossibleStep` for a pair that is not in the table."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise ImpossibleStep(f"a session that is {state} cannot meet {event}") from None

"""Which rollout the running code works for.

A context variable, so that child tasks and `asyncio.to_thread` inherit it, and a request's value ends with the
request. Other thread pools need `run_in_context`. Left to others: where the value comes from (`toprope.http`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from toprope.correlation.ids import parse_capture_key

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The capture key that is bound, and whether the path asked for token capture."""

    key: str
    capture: bool = False


_current: ContextVar[RolloutContext | None] = ContextVar("toprope_rollout", default=None)


def current_rollout_id() -> str | None:
    """The capture key that the running code works for, or None outside any rollout."""
    bound = _current.get()
    return None if bound is None else bound.key


def current_rollout() -> RolloutContext | None:
    """The whole bound context: key and capture flag."""
    return _current.get()


@contextmanager
def rollout_context(key: str, *, capture: bool = False) -> Iterator[RolloutContext]:
    """Bind `key` for the body of the `with` statement. Raises `ValueError` if it is no capture key."""
    parse_capture_key(key)
    bound = RolloutContext(key, capture)
    token = _current.set(bound)
    try:
        yield bound
    finally:
        _current.reset(token)


@contextmanager
def bound_rollout(context: RolloutContext | None) -> Iterator[None]:
    """Bind a context that was parsed already, or bind none (so that nothing of an outer one is seen)."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def run_in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that it runs in today's context wherever it is called, e.g. in a `ThreadPoolExecutor`.

    Each call runs in its own copy: `pool.submit(run_in_context(f), x)`.
    """
    snapshot = copy_context()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return snapshot.copy().run(function, *args, **kwargs)

    return call

"""Bounds on somebody else's source or sink: on its time, and on what it may raise into us.

What does not answer in time is given up, even if it will not be cancelled. A cancellation that it raises of its own
accord is a failure like another, and never taken for that of our caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """The source did not answer within its bound, or broke off."""


async def within(seconds: float | None, work: Awaitable[T], what: str) -> T:
    """What `work` returns or raises; raises `NoAnswer` after `seconds` (None: waits for ever).

    What was given up is cancelled and not waited for: a source that swallows the cancellation must not hold the caller.
    Raises `CancelledError` for the caller's own cancellation only: work that ends in one of its own, or in another
    exception that is no `Exception`, is `NoAnswer` too.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_unheard)
        raise
    if done:
        try:
            return task.result()
        except Exception:
            raise
        except BaseException as error:
            raise NoAnswer(f"{what}: broke off with {type(error).__name__}") from error
    task.cancel()
    task.add_done_callback(_unheard)
    raise NoAnswer(f"{what}: no answer within {seconds:g} s")


def is_callers(error: BaseException) -> bool:
    """Whether an exception that came out of somebody else's code is meant for us: the end of this task or process.

    A `CancelledError` is, if this task was asked to end; nobody asked where a source or sink raised one by itself.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return not isinstance(error, Exception)


def _unheard(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it any more; asked for, so that it is not reported as forgotten

"""A bound on somebody else's source: what does not answer in time is given up, even if it will not be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """The source did not answer within its bound."""


async def within(seconds: float | None, work: Awaitable[T], what: str) -> T:
    """What `work` returns or raises; raises `NoAnswer` after `seconds` (None: waits for ever).

    What was given up is cancelled and not waited for: a source that swallows the cancellation must not hold the caller.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_unheard)
        raise
    if done:
        return task.result()
    task.cancel()
    task.add_done_callback(_unheard)
    raise NoAnswer(f"{what}: no answer within {seconds:g} s")


def _unheard(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it any more; asked for, so that it is not reported as forgotten

"""What becomes of a run whose sandbox is ended while it goes on."""

from __future__ import annotations

import asyncio

import pytest

from toprope.sandbox.runs import Runs
from toprope.sandbox.spec import Completed, Kept


def completed(status: int | None, killed_by: str | None = None) -> Completed:
    return Completed(status, Kept(b"", 0), Kept(b"", 0), killed_by, (), 0.1)


@pytest.mark.promise("EP-14")
@pytest.mark.parametrize("reason", ["stop", "lease"])
@pytest.mark.parametrize("status", [137, 1])
async def test_a_program_that_dies_with_its_sandbox_between_two_looks_was_killed_by_its_end(
    reason: str, status: int
) -> None:
    gone = asyncio.Event()

    async def run() -> Completed:
        await gone.wait()
        return completed(status)

    runs = Runs("s", lambda: reason if gone.is_set() else None)
    running = asyncio.ensure_future(runs.track(run()))
    gone.set()
    done = await running
    assert (done.exit, done.killed_by) == (None, reason)


@pytest.mark.parametrize(
    ("ended", "done"),
    [(None, completed(137)), ("stop", completed(0)), ("stop", completed(None, "memory")), (None, completed(0))],
    ids=["failed-by-itself", "ended-well-before", "killed-by-a-limit", "well"],
)
async def test_what_ended_for_a_reason_of_its_own_keeps_it(ended: str | None, done: Completed) -> None:
    async def run() -> Completed:
        return done

    assert await Runs("s", lambda: ended).track(run()) == done

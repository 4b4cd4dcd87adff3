"""What becomes of a run whose sandbox is ended while it goes on."""

from __future__ import annotations

import asyncio

import pytest

from toprope.sandbox.runs import Runs
from toprope.sandbox.spec import Completed, Kept, SandboxLost


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


@pytest.mark.promise("EP-14")
async def test_who_lets_go_waits_until_its_runs_have_ended() -> None:
    began, cleaned_up = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def run() -> Completed:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await cleaned_up.wait()
            ended.append("the run")
        raise AssertionError("unreachable")

    runs = Runs("s", lambda: None)
    running = asyncio.ensure_future(runs.track(run()))
    await began.wait()
    letting_go = asyncio.ensure_future(runs.let_go())
    letting_go.add_done_callback(lambda _: ended.append("letting go"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert ended == []
    cleaned_up.set()
    await letting_go
    with pytest.raises(SandboxLost, match="let go"):
        await running
    assert ended == ["the run", "letting go"]


@pytest.mark.promise("EP-14")
@pytest.mark.parametrize(
    ("ended", "raised"), [(None, FileNotFoundError), ("stop", SandboxLost), ("lease", SandboxLost)]
)
def test_what_fails_in_a_sandbox_that_went_away_is_the_loss(ended: str | None, raised: type[Exception]) -> None:
    gone: list[str] = []
    runs = Runs("s", lambda: ended if gone else None)

    def use() -> None:
        with runs.using():
            gone.append("now")
            raise FileNotFoundError("answer")

    with pytest.raises(raised):
        use()

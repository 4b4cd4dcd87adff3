"""One commit serves all that wait; each gets its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from toprope.storage.group_commit import GroupCommit


async def test_what_gathers_during_one_commit_is_the_next_group() -> None:
    groups: list[list[int]] = []
    entered, go_on = threading.Event(), threading.Event()

    def commit(items: Sequence[int]) -> list[int]:
        groups.append(list(items))
        entered.set()
        go_on.wait(10)
        return [10 * item for item in items]

    group: GroupCommit[int, int] = GroupCommit("g", commit)
    first = asyncio.create_task(group.submit(0))
    await asyncio.to_thread(entered.wait)
    rest = [asyncio.create_task(group.submit(n)) for n in range(1, 300)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(first, *rest) == [10 * n for n in range(300)]
    await group.close()
    assert groups == [[0], list(range(1, 300))]


async def test_an_answer_may_be_an_exception_and_a_failing_commit_fails_its_group_only() -> None:
    def commit(items: Sequence[str]) -> list[str | BaseException]:
        if "bomb" in items:
            raise OSError("no space")
        return [ValueError(item) if item == "bad" else item for item in items]

    group: GroupCommit[str, str] = GroupCommit("g", commit)
    results = await asyncio.gather(*(group.submit(item) for item in ("a", "bad")), return_exceptions=True)
    assert results[0] == "a"
    assert isinstance(results[1], ValueError)
    with pytest.raises(OSError, match="no space"):
        await group.submit("bomb")
    assert await group.submit("after") == "after"
    await group.close()


async def test_close_waits_for_what_was_submitted_and_runs_finish_on_the_thread() -> None:
    done: list[object] = []

    def commit(items: Sequence[int]) -> list[None]:
        done.extend(items)
        return [None] * len(items)

    group: GroupCommit[int, None] = GroupCommit(
        "g", commit, finish=lambda: done.append(threading.current_thread().name)
    )
    waiting = [asyncio.create_task(group.submit(n)) for n in range(5)]
    await asyncio.sleep(0)
    await group.close()
    await group.close()
    await asyncio.gather(*waiting)
    assert done == [0, 1, 2, 3, 4, "g"]
    with pytest.raises(RuntimeError, match="closed"):
        await group.submit(6)


async def test_finish_runs_once_also_when_nothing_was_ever_submitted() -> None:
    ran: list[int] = []
    group: GroupCommit[int, None] = GroupCommit("g", lambda items: [None] * len(items), finish=lambda: ran.append(1))
    await group.close()
    await group.close()
    assert ran == [1]


def test_callers_of_several_loops_are_answered_on_their_own() -> None:
    group: GroupCommit[int, int] = GroupCommit("g", lambda items: list(items))
    got: dict[int, int] = {}

    def in_a_loop_of_its_own(n: int) -> None:
        async def ask() -> None:
            got[n] = await group.submit(n)

        asyncio.run(ask())

    threads = [threading.Thread(target=in_a_loop_of_its_own, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(group.close())
    assert got == {n: n for n in range(8)}

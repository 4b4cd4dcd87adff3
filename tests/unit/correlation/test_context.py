"""The bound rollout: what inherits it, what does not, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from toprope.correlation.context import (
    RolloutContext,
    bound_rollout,
    current_rollout,
    current_rollout_id,
    rollout_context,
    run_in_context,
)


def test_outside_any_rollout_there_is_none() -> None:
    assert current_rollout_id() is None
    assert current_rollout() is None


def test_contexts_nest_and_unwind_also_through_an_exception() -> None:
    with rollout_context("4-2", capture=True) as bound:
        assert bound == current_rollout() == RolloutContext("4-2", True)
        with contextlib.suppress(KeyError), rollout_context("5-1"):
            assert current_rollout() == RolloutContext("5-1", False)
            raise KeyError
        assert current_rollout_id() == "4-2"
        with bound_rollout(None):
            assert current_rollout_id() is None
        assert current_rollout_id() == "4-2"
    assert current_rollout_id() is None


@pytest.mark.parametrize("key", ["a/b", "", "x-a1-a2", "%2e%2e"])
def test_what_is_no_key_is_not_bound(key: str) -> None:
    with pytest.raises(ValueError), rollout_context(key):
        pytest.fail("the body ran")
    assert current_rollout_id() is None


@pytest.mark.promise("ID-2")
async def test_child_tasks_and_to_thread_inherit_and_keep_it_after_the_block() -> None:
    release = asyncio.Event()

    async def child() -> str | None:
        await release.wait()
        return current_rollout_id()

    with rollout_context("4-2"):
        task = asyncio.create_task(child())
        assert await asyncio.to_thread(current_rollout_id) == "4-2"
    release.set()
    assert await task == "4-2"
    assert current_rollout_id() is None


@pytest.mark.promise("ID-2")
def test_a_plain_pool_does_not_inherit_and_run_in_context_covers_it() -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        with rollout_context("4-2"):
            assert pool.submit(current_rollout_id).result() is None
            covered = run_in_context(current_rollout_id)
            with rollout_context("5-1"):
                assert list(pool.map(lambda _: covered(), range(8))) == ["4-2"] * 8
        assert pool.submit(current_rollout_id).result() is None


def test_a_covered_call_cannot_change_what_the_next_one_sees() -> None:
    def look_and_bind() -> str | None:
        seen = current_rollout_id()
        rollout_context("9-9").__enter__()
        return seen

    with rollout_context("4-2"):
        covered = run_in_context(look_and_bind)
    assert [covered(), covered()] == ["4-2", "4-2"]
    assert current_rollout_id() is None


@pytest.mark.promise("ID-2")
async def test_a_thousand_interleaved_tasks_see_only_their_own() -> None:
    turn = asyncio.Barrier(1000)

    async def one(number: int) -> bool:
        with rollout_context(f"r-{number}"):
            seen = []
            for _ in range(3):
                await turn.wait()
                seen.append(current_rollout_id())
            seen.append(await asyncio.get_running_loop().run_in_executor(None, run_in_context(current_rollout_id)))
        return seen == [f"r-{number}"] * 4 and current_rollout_id() is None

    assert all(await asyncio.gather(*(one(number) for number in range(1000))))

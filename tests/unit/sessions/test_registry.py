"""The registry: one allocation, one release, whatever is lost, repeated or raced."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.errors.kinds import Kind
from toprope.errors.tree import CapacityReached, Conflict, Forbidden, SessionLost, TopropeError
from toprope.servers.sessions import SeedCall, Session, SessionRegistry


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A registry over things that are counted, with a gate before each allocation."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.asked = 0
        self.allocated = 0
        self.released: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.allocating = asyncio.Event()
        self.fail_seed: Exception | None = None
        self.fail_release: Exception | None = None
        self.seen: list[str | None] = []
        self.registry: SessionRegistry[str] = SessionRegistry(
            noun="test", release=self.release, clock=self.clock, quiesce_s=options.pop("quiesce_s", 5.0), **options
        )

    async def allocate(self) -> tuple[str, str]:
        self.asked += 1
        self.allocating.set()
        await self.gate.wait()
        if self.fail_seed is not None:
            raise self.fail_seed
        self.allocated += 1
        return f"thing {self.allocated}", f"reply {self.allocated}"

    async def release(self, session: Session[str]) -> str:
        self.seen.append(current_rollout_id())
        if self.fail_release is not None:
            raise self.fail_release
        self.released.append(session.value)
        return "receipt"

    async def seed(self, name: str = "s", *, payload: str = "p", token: str | None = None, lease_s: float = 0) -> Any:
        return await self.registry.seed(SeedCall(name, "4-2", payload, token, lease_s), self.allocate)


@pytest.mark.promise("EP-3")
async def test_fifty_equal_seeds_at_once_are_one_allocation_and_fifty_equal_replies() -> None:
    house = House()
    house.gate.clear()
    seeds = [asyncio.create_task(house.seed()) for _ in range(50)]
    await house.allocating.wait()
    house.gate.set()
    assert set(await asyncio.gather(*seeds)) == {"reply 1"}
    assert await house.seed() == "reply 1"
    assert house.allocated == 1


@pytest.mark.promise("EP-3")
async def test_another_payload_or_a_seed_after_a_close_is_a_conflict() -> None:
    house = House()
    await house.seed()
    with pytest.raises(Conflict, match="another payload"):
        await house.seed(payload="q")
    with pytest.raises(Conflict, match="another payload"):
        await house.seed(token="t")
    await house.registry.close("s", None)
    with pytest.raises(Conflict, match="was closed"):
        await house.seed()
    assert (await house.registry.close("never", None)).outcome == "already_closed"
    with pytest.raises(Conflict, match="was closed"):
        await house.seed("never")
    assert house.allocated == 1


@pytest.mark.promise("EP-3")
async def test_another_payload_or_token_during_the_seed_is_a_conflict_at_once() -> None:
    house = House()
    house.gate.clear()
    seed = asyncio.create_task(house.seed(token="t"))
    await house.allocating.wait()
    try:
        for payload, token in (("q", "t"), ("p", "u"), ("p", None)):
            async with asyncio.timeout(30):  # one that joins would wait for the gate
                with pytest.raises(Conflict, match="another payload"):
                    await house.seed(payload=payload, token=token)
    finally:
        house.gate.set()
    assert await seed == "reply 1"
    assert house.allocated == 1


@pytest.mark.promise("EP-3")
async def test_the_second_close_gets_the_same_receipt_with_another_outcome() -> None:
    house = House()
    await house.seed()
    one, two = await house.registry.close("s", None), await house.registry.close("s", None)
    assert [one.outcome, two.outcome] == ["closed", "already_closed"]
    assert one.value == two.value == "receipt"
    assert house.released == ["thing 1"]


@pytest.mark.promise("EP-3")
async def test_a_release_that_fails_keeps_the_session_and_the_next_close_tries_again() -> None:
    house = House()
    await house.seed()
    house.fail_release = OSError("lease server is away")
    with pytest.raises(TopropeError, match="OSError: lease server is away") as caught:
        await house.registry.close("s", None)
    assert (caught.value.kind, caught.value.status, caught.value.retryable) == (Kind.SESSION_RELEASE_FAILED, 500, True)
    assert len(house.registry) == 1
    with pytest.raises(SessionLost), house.registry.use("s"):
        pass
    house.fail_release = None
    assert (await house.registry.close("s", None)).outcome == "closed"
    assert len(house.registry) == 0


@pytest.mark.promise("EP-4")
async def test_a_close_without_the_right_token_is_forbidden_and_changes_nothing() -> None:
    house = House()
    await house.seed(token="right")
    for token in ("wrong", None, ""):
        with pytest.raises(Forbidden):
            await house.registry.close("s", token)
    with house.registry.use("s") as session:
        assert session.value == "thing 1"
        assert "right" not in repr(session)
    assert (await house.registry.close("s", "right")).outcome == "closed"
    with pytest.raises(Forbidden):
        await house.registry.close("s", "wrong")


@pytest.mark.promise("EP-2")
async def test_a_close_during_the_seed_releases_what_the_seed_allocates_even_if_the_closer_left() -> None:
    house = House()
    house.gate.clear()
    seed = asyncio.create_task(house.seed())
    await house.allocating.wait()
    closer = asyncio.create_task(house.registry.close("s", None))
    await asyncio.sleep(0)
    closer.cancel()
    await asyncio.gather(closer, return_exceptions=True)
    house.gate.set()
    with pytest.raises(Conflict, match="closed while"):
        await seed
    assert (await house.registry.close("s", None)).outcome == "already_closed"
    assert house.released == ["thing 1"]
    with pytest.raises(Conflict):
        await house.seed()


async def test_a_close_during_the_seed_waits_for_the_release() -> None:
    house = House()
    house.gate.clear()
    seed = asyncio.create_task(house.seed())
    await house.allocating.wait()
    closer = asyncio.create_task(house.registry.close("s", None))
    await asyncio.sleep(0)
    house.gate.set()
    assert (await closer).outcome == "closed"
    assert house.released == ["thing 1"]
    assert isinstance((await asyncio.gather(seed, return_exceptions=True))[0], Conflict)


async def test_an_allocation_goes_on_when_its_caller_leaves() -> None:
    house = House()
    house.gate.clear()
    seed = asyncio.create_task(house.seed())
    await house.allocating.wait()
    seed.cancel()
    await asyncio.gather(seed, return_exceptions=True)
    house.gate.set()
    assert await house.seed() == "reply 1"
    assert house.allocated == 1


async def test_a_seed_that_failed_can_be_tried_again_unless_it_was_closed() -> None:
    house = House()
    house.fail_seed = RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        await house.seed()
    assert len(house.registry) == 0
    house.fail_seed = None
    assert await house.seed() == "reply 1"

    house.gate.clear()
    house.allocating.clear()
    house.fail_seed = RuntimeError("no room")
    seed = asyncio.create_task(house.seed("t"))
    await house.allocating.wait()
    closer = asyncio.create_task(house.registry.close("t", None))
    await asyncio.sleep(0)
    house.gate.set()
    await asyncio.gather(seed, closer, return_exceptions=True)
    with pytest.raises(Conflict):
        await house.seed("t")


async def test_a_release_waits_until_nobody_uses_the_session() -> None:
    house = House()
    await house.seed()
    with house.registry.use("s"):
        closer = asyncio.create_task(house.registry.close("s", None))
        await asyncio.sleep(0)
        assert house.released == []
        with pytest.raises(SessionLost), house.registry.use("s"):
            pass
    assert (await closer).outcome == "closed"


async def test_a_session_that_stays_in_use_is_a_failed_release_and_not_a_hang() -> None:
    house = House(quiesce_s=0.01)
    await house.seed()
    with house.registry.use("s"), pytest.raises(TopropeError, match="1 calls still use the session"):
        await house.registry.close("s", None)
    assert (await house.registry.close("s", None)).outcome == "closed"


@pytest.mark.promise("EP-11")
async def test_what_nobody_closes_expires_by_ttl_or_lease_but_never_in_use() -> None:
    house = House(ttl_s=100)
    await house.seed("short")
    await house.seed("leased", lease_s=500)
    await house.seed("used")
    with house.registry.use("used"):
        house.clock.now += 101
        assert house.registry.sweep() == 1
    await house.registry.close("short", None)
    assert house.released == ["thing 1"]
    with pytest.raises(SessionLost) as caught, house.registry.use("short"):
        pass
    assert caught.value.kind == Kind.SESSION_EXPIRED
    house.clock.now += 400
    assert house.registry.sweep() == 2
    await house.registry.release_all()
    assert len(house.registry) == 0


@pytest.mark.promise("EP-11")
async def test_a_session_expires_its_ttl_after_its_last_use_and_not_after_its_seed() -> None:
    house = House(ttl_s=100)
    await house.seed()
    for _ in range(3):
        house.clock.now += 90
        with house.registry.use("s"):
            house.clock.now += 5
        assert house.registry.sweep() == 0
    house.clock.now += 99
    assert house.registry.sweep() == 0
    house.clock.now += 1
    assert house.registry.sweep() == 1


@pytest.mark.promise("EP-11")
@pytest.mark.parametrize(("ttl_s", "every_s"), [(0.4, 0.1), (20.0, 5.0), (900.0, 15.0)])
async def test_an_expired_session_waits_for_one_sweep_at_most(ttl_s: float, every_s: float) -> None:
    house = House(ttl_s=ttl_s)
    await house.seed()
    began = house.clock.now
    gone = asyncio.Event()

    async def sleep(seconds: float) -> None:
        assert seconds == every_s
        house.clock.now += seconds
        await asyncio.sleep(0)
        if house.released:
            gone.set()
            await asyncio.Event().wait()

    sweeping = asyncio.create_task(house.registry.sweep_forever(sleep))
    seeing = asyncio.create_task(gone.wait())
    await asyncio.wait({sweeping, seeing}, return_when=asyncio.FIRST_COMPLETED)
    assert not sweeping.done(), sweeping.exception()
    sweeping.cancel()
    # The release was begun by the sweep before the sleep in which it was seen.
    assert house.clock.now - every_s - began <= ttl_s + every_s


@pytest.mark.promise("EP-11")
async def test_closed_ids_are_remembered_for_a_while_and_then_forgotten() -> None:
    house = House(remember_closed_s=300)
    for number in range(100):
        await house.registry.close(f"unknown-{number}", None)
    assert house.registry.remembered == 100
    house.clock.now += 299
    house.registry.sweep()
    assert house.registry.remembered == 100
    house.clock.now += 1
    house.registry.sweep()
    assert house.registry.remembered == 0


@pytest.mark.promise("EP-11")
async def test_a_receipt_outlives_every_retry_of_its_close_but_not_as_long_as_its_id() -> None:
    house = House()
    await house.seed()
    await house.registry.close("s", None)
    house.clock.now += 29
    house.registry.sweep()
    assert (await house.registry.close("s", None)).value == "receipt"
    house.clock.now += 1
    house.registry.sweep()
    late = await house.registry.close("s", None)
    assert (late.outcome, late.value) == ("already_closed", None)
    with pytest.raises(Conflict):
        await house.seed()


async def test_an_expired_session_whose_release_fails_is_tried_again_by_the_next_sweep() -> None:
    house = House(ttl_s=10)
    await house.seed()
    house.fail_release = OSError("away")
    house.clock.now += 11
    assert house.registry.sweep() == 1
    await asyncio.gather(*house.registry._tasks, return_exceptions=True)
    assert len(house.registry) == 1
    house.fail_release = None
    assert house.registry.sweep() == 1
    await house.registry.release_all()
    assert house.released == ["thing 1"]


async def test_a_full_house_says_so_and_a_replayed_seed_needs_no_room() -> None:
    house = House(max_sessions=1)
    await house.seed("a")
    with pytest.raises(CapacityReached) as caught:
        await house.seed("b")
    assert (caught.value.status, caught.value.retryable) == (429, True)
    assert "retry-after" in caught.value.headers
    assert await house.seed("a") == "reply 1"
    await house.registry.close("a", None)
    assert await house.seed("b") == "reply 2"


async def test_a_release_that_never_ends_does_not_keep_the_server_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House()
    await house.seed()
    with house.registry.use("s"):
        await house.registry.release_all(timeout_s=0.01)
    assert "1 test sessions could not be released within 0.01 s" in caplog.text


async def test_a_session_is_used_and_released_for_its_own_rollout() -> None:
    house = House(ttl_s=10)
    await house.seed()
    with pytest.raises(Conflict, match="belongs to rollout 4-2"), house.registry.use("s", key="5-1"):
        pass
    house.clock.now += 11
    with rollout_context("9-9"):
        house.registry.sweep()
    await house.registry.release_all()
    assert house.seen == ["4-2"]


@pytest.mark.promise("EP-3")
async def test_a_seeder_and_a_closer_that_leave_stop_neither_allocation_nor_release() -> None:
    house = House()
    house.gate.clear()
    seeding = asyncio.create_task(house.seed())
    await house.allocating.wait()
    seeding.cancel()
    await asyncio.gather(seeding, return_exceptions=True)
    house.gate.set()
    assert await house.seed() == "reply 1"
    assert (house.asked, house.allocated) == (1, 1)
    with house.registry.use("s"):  # so that the release waits
        closing = asyncio.create_task(house.registry.close("s", None))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
    assert (await house.registry.close("s", None)).value == "receipt"
    assert house.released == ["thing 1"]


async def test_a_closed_session_holds_nothing_of_what_was_allocated() -> None:
    class Thing:
        pass

    async def allocate() -> tuple[Thing, str]:
        return Thing(), "reply"

    async def release(session: Session[Thing]) -> None:
        held.append(weakref.ref(session.value))

    held: list[Any] = []
    registry: SessionRegistry[Thing] = SessionRegistry(noun="test", release=release)
    await registry.seed(SeedCall("s", "4-2", "p"), allocate)
    await registry.close("s", None)
    gc.collect()
    assert held[0]() is None
    assert registry.remembered == 1

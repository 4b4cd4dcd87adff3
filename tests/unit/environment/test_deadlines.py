"""Whose time is up, and when: on the event loop's clock, which these tests set, with the default timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from toprope.servers.environment.episode import Timeouts

from .conftest import RESPONSE, House

LATEST_S = 3600 - 300 - 15
"""Of an activation: the episode's time without verify's and half of the clean-up's."""


class Clock:
    """The loop's clock; `to` sets how long ago it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._real = self._loop.time
        self._began = self._real()
        self._ahead = 0.0
        self._loop.time = self._now  # type: ignore[method-assign]

    def _now(self) -> float:
        return self._real() + self._ahead

    def to(self, seconds: float) -> None:
        self._ahead += seconds - (self._now() - self._began)


@pytest.fixture
async def clock() -> Clock:
    return Clock()


async def settled(done: Callable[[], Any]) -> bool:
    """Whether `done` comes without any more time. What is due on the loop's clock needs turns of the loop only."""
    for _ in range(500):
        if done():
            return True
        await asyncio.sleep(0)
    return False


def spends(clock: Clock, until: float, then: Any) -> Any:
    """Answer when the clock stands at `until`."""

    async def act(seen: Any) -> Any:
        clock.to(until)
        return await then(seen) if callable(then) else then

    return act


class Hangs:
    """Never answers. `alive_at` and `gone_at`: the clock at which the caller still waits, and at which it has left."""

    def __init__(self, clock: Clock, house: House, alive_at: float, gone_at: float) -> None:
        self.clock, self.house, self.alive_at, self.gone_at = clock, house, alive_at, gone_at
        self.seen: list[bool] = []

    async def __call__(self, seen: Any) -> Any:
        calls = len(self.house.log)
        for moment in (self.alive_at, self.gone_at):
            self.clock.to(moment)
            self.seen.append(await settled(lambda: len(self.house.log) > calls))
        if not self.seen[-1]:
            self.clock.to(self.gone_at + 10_000)  # who waits longer fails its test, and does not hang it
        return "hang"


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize("seed_s", [0, 1000, 3000, 3280])
@pytest.mark.parametrize("gradable", [False, True])
async def test_an_agent_without_a_timeout_of_its_own_leaves_verify_and_clean_up_their_time_however_slow_the_seed(
    make_house: Any, clock: Clock, seed_s: float, gradable: bool
) -> None:
    house: House = await make_house(gradable_on_timeout=gradable)
    partial = {**RESPONSE, "status": "incomplete"}
    usual = house.agent.usual("/v1/agent_sessions/close")

    async def close(seen: Any) -> Any:
        status, body, headers = await usual(seen)
        return status, {**body, "partial_response": partial}, headers

    house.resources.acts["/seed_session"] = spends(clock, seed_s, house.resources.usual("/seed_session"))
    agent = house.agent.acts["/v1/responses"] = Hangs(clock, house, LATEST_S - 1, LATEST_S + 1)
    house.agent.acts["/v1/agent_sessions/close"] = spends(clock, LATEST_S + 14, close)
    house.resources.acts["/verify"] = spends(clock, 3595, house.resources.usual("/verify"))
    if gradable:
        assert (await house.result())["termination"] == "agent_timeout", "with all of verify's time"
    else:
        failure = await house.failure()
        assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("agent_timeout", "agent", False)
        assert failure["partial_response"]["status"] == "incomplete"
    assert agent.seen == [False, True]


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize(("seed_s", "until"), [(0, 100), (3000, 3100), (3250, LATEST_S)])
async def test_an_agents_own_timeout_counts_from_its_activation_and_never_beyond_what_the_episode_leaves(
    make_house: Any, clock: Clock, seed_s: float, until: float
) -> None:
    house: House = await make_house(agent_timeout_s=100.0)
    house.resources.acts["/seed_session"] = spends(clock, seed_s, house.resources.usual("/seed_session"))
    agent = house.agent.acts["/v1/responses"] = Hangs(clock, house, until - 1, until + 1)
    assert (await house.failure())["failure_kind"] == "agent_timeout"
    assert agent.seen == [False, True]


@pytest.mark.promise("EP-9")
@pytest.mark.promise("EP-10")
@pytest.mark.parametrize(
    ("listener_s", "hangs", "until", "kind", "stage"),
    [
        (None, "/seed_session", 3600, "episode_timeout", "seed"),
        (None, "/v1/agent_sessions", 3600, "episode_timeout", "agent"),
        (None, "/v1/responses", LATEST_S, "agent_timeout", "agent"),
        (200, "/verify", 500, "verify_timeout", "verification"),
        (3299, "/verify", 3599, "verify_timeout", "verification"),
        (3400, "/verify", 3600, "episode_timeout", "verification"),
    ],
)
async def test_a_timeout_is_named_by_whose_time_was_up(
    make_house: Any, clock: Clock, listener_s: float | None, hangs: str, until: float, kind: str, stage: str
) -> None:
    def closed(report: Any) -> None:
        if listener_s is not None and report.participant == "agent":
            clock.to(listener_s)

    house: House = await make_house(on_session_closed=closed)
    part = house.resources if hangs in ("/seed_session", "/verify") else house.agent
    act = part.acts[hangs] = Hangs(clock, house, until - 0.5, until + 0.5)
    failure = await house.failure()
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == (kind, stage, False)
    assert kind in failure["failure_reason"]
    assert act.seen == [False, True]


@pytest.mark.promise("EP-10")
def test_the_agents_budget_is_what_the_episode_leaves_at_most_its_own() -> None:
    assert Timeouts().agent_budget_s() == LATEST_S
    assert Timeouts().agent_budget_s(1000) == LATEST_S - 1000
    assert Timeouts(agent_s=100).agent_budget_s(3250) == LATEST_S - 3250
    assert Timeouts(agent_s=100).agent_budget_s(3000) == 100

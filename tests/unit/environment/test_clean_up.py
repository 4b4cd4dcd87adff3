"""What clean-up may cost, what it may never undo, and what is sent once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from toprope.servers.environment.participant import SessionReport

from .conftest import EPISODE, TASK, House, answer, cut, hang


@pytest.mark.promise("EP-8")
async def test_a_verify_whose_reply_is_lost_is_not_sent_again(house: House) -> None:
    house.resources.acts["/verify"] = cut
    failure = await house.failure()
    assert (failure["stage"], failure["terminal"]) == ("verification", False)
    assert len(house.calls("/verify")) == 1


@pytest.mark.promise("EP-10")
async def test_a_close_that_used_up_its_share_is_not_sent_by_the_unwind_again_and_no_deadline_is_blamed(
    make_house: Any,
) -> None:
    house = await make_house(cleanup_timeout_s=0.2)
    house.agent.acts["/v1/agent_sessions/close"] = hang
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"]) == ("cleanup", "transport_timeout")
    sent = [seen for seen in house.calls("/v1/agent_sessions/close") if seen.body is not None]
    assert len(sent) in (1, 2)  # half of the share for the first attempt, what is left for another


@pytest.mark.promise("EP-5")
async def test_a_close_that_hangs_once_still_yields_the_verified_reward(make_house: Any) -> None:
    house = await make_house(cleanup_timeout_s=4.0)
    hung = asyncio.Event()

    async def hang_once(seen: Any) -> Any:
        if hung.is_set():
            return await house.agent.usual("/v1/agent_sessions/close")(seen)
        hung.set()
        return await hang(seen)

    house.agent.acts["/v1/agent_sessions/close"] = hang_once
    assert (await house.result())["reward"] == 0.5
    assert len(house.calls("/v1/agent_sessions/close")) == 2


@pytest.mark.promise("EP-5")
async def test_an_optional_close_reply_is_needed_all_the_same_where_a_grant_carried_cookies(make_house: Any) -> None:
    house = await make_house(close_reply="optional", tools=["direct_http"])
    house.resources.speaks, house.resources.cookie = False, "r1"
    house.agent.acts["/v1/agent_sessions/close"] = answer(500, b"stuck")
    failure = await house.failure()
    assert (failure["stage"], failure["terminal"]) == ("cleanup", False)
    assert not house.calls("/verify")


async def test_a_peer_that_nothing_reached_is_owed_no_close(make_house: Any, caplog: pytest.LogCaptureFixture) -> None:
    house = await make_house(agent_url="inline://nobody")
    await house.failure()
    assert "agent session" not in caplog.text


async def test_a_caller_that_leaves_during_the_last_close_does_not_cut_it_short(make_house: Any) -> None:
    entered, left, go_on, told = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Queue[SessionReport]()
    house = await make_house(on_session_closed=told.put_nowait)
    usual = house.resources.usual("/close_session")

    async def slow(seen: Any) -> Any:
        entered.set()
        await go_on.wait()
        return await usual(seen)

    async def receive() -> Any:
        if not body:
            await entered.wait()
            left.set()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop()}

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there")

    house.resources.acts["/close_session"] = slow
    body = [json.dumps({"episode_id": EPISODE, "task": TASK}).encode()]
    scope = {"type": "http", "method": "POST", "path": "/run", "query_string": b"", "headers": []}
    running = asyncio.create_task(house.server.app(scope, receive, send))
    await left.wait()
    for _ in range(3):  # the cancellation travels to the episode
        await asyncio.sleep(0)
    go_on.set()
    await running
    assert [told.get_nowait().participant for _ in range(told.qsize())] == ["agent", "resources"]


async def test_a_session_is_reported_before_the_next_step_is_taken(make_house: Any) -> None:
    steps: list[list[str]] = []

    async def slowly(report: SessionReport) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        steps.append(list(house.steps))

    house = await make_house(on_session=slowly)
    await house.result()
    assert [len(seen) for seen in steps] == [1, 2]


async def test_an_episode_that_ended_gives_its_slot_back(make_house: Any) -> None:
    house = await make_house(max_concurrent_episodes=1, queue_timeout_s=30.0)
    house.resources.acts["/verify"] = answer(500, b"boom")
    await house.failure()
    del house.resources.acts["/verify"]
    for _ in range(2):
        assert (await asyncio.wait_for(house.result(), 20))["reward"] == 0.5

"""What clean-up may cost, what it may never undo, and what is sent once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from toprope.servers.environment import participant
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


MANY_DIGITS = b"1" * 5_000


def _with_number(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()[:-1] + b', "n": ' + MANY_DIGITS + b"}"


@pytest.mark.promise("EP-9")
@pytest.mark.promise("EP-17")
@pytest.mark.parametrize(
    ("part", "path", "body", "stage", "kind"),
    [
        ("resources", "/seed_session", _with_number({"resources_session_id": "x"}), "seed", "bad_reply"),
        ("agent", "/v1/responses", _with_number({"output": []}), "agent", "bad_reply"),
        ("agent", "/v1/agent_sessions/close", _with_number({"agent_session_id": "x"}), "cleanup", "bad_reply"),
        ("resources", "/verify", _with_number({"reward": 1.0}), "verification", "bad_reply"),
        ("resources", "/verify", b'{"reward": ' + MANY_DIGITS + b"}", "verification", "bad_reward"),
    ],
    ids=["seed", "activation", "close of the agent", "verify", "reward"],
)
async def test_a_number_that_nobody_reads_is_a_bad_reply_and_leaves_no_session_open(
    house: House, part: str, path: str, body: bytes, stage: str, kind: str
) -> None:
    getattr(house, part).acts[path] = answer(200, body)
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"]) == (stage, kind)
    assert house.calls("/close_session"), "the resources session is closed all the same"
    if kind == "bad_reward":
        assert "with the reward 1111" in failure["failure_reason"]
        assert len(failure["failure_reason"]) < 500


@pytest.mark.promise("EP-2")
@pytest.mark.parametrize("value", ["a\r\nX: 1", "\x00", "\ud83d", "a; other=b"])
async def test_cookies_that_no_header_carries_are_left_out_and_cost_nothing(house: House, value: str) -> None:
    usual = house.agent.usual("/v1/agent_sessions/close")

    async def close(seen: Any) -> Any:
        status, body, more = await usual(seen)
        return status, {**body, "resources_cookies": {"bad": value, "good": "1", "": "2"}}, more

    house.resources.speaks, house.resources.cookie = False, "r\x011"
    house.agent.acts["/v1/agent_sessions/close"] = close
    assert (await house.result())["reward"] == 0.5
    (verify,) = house.calls("/verify")
    assert verify.headers["cookie"] == "good=1"
    assert len(house.calls("/close_session")) == 1


@pytest.mark.promise("EP-9")
async def test_a_close_that_fails_in_a_way_nobody_thought_of_leaves_no_other_session_open(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    merge = participant.merge_cookies

    def odd(current: Any, reply: Any) -> Any:
        if reply.url.endswith("/v1/agent_sessions/close"):
            raise RuntimeError("nobody thought of this")
        return merge(current, reply)

    monkeypatch.setattr(participant, "merge_cookies", odd)
    house.agent.acts["/v1/responses"] = answer(500, b"broken")
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"]) == ("agent", "agent_failed")
    assert house.calls("/v1/agent_sessions/close")
    assert len(house.calls("/close_session")) == 1
    (told,) = [each for each in caplog.records if each.name == "toprope.episode" and "left open" in each.getMessage()]
    assert "RuntimeError: nobody thought of this" in told.getMessage()
    assert told.exc_info is not None


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize(
    ("part", "path"),
    [("resources", "/seed_session"), ("agent", "/v1/agent_sessions"), ("agent", "/v1/agent_sessions/close")],
)
async def test_no_log_and_no_failure_holds_an_id_that_calls_tools(
    house: House, caplog: pytest.LogCaptureFixture, part: str, path: str
) -> None:
    getattr(house, part).acts[path] = answer(200, {"resources_session_id": "other", "agent_session_id": "other"})
    failure = await house.failure()
    told = failure["failure_reason"] + caplog.text
    ids = [
        seen.body[name]
        for seen in house.log
        for name in ("resources_session_id", "agent_session_id")
        if name in seen.body
    ]
    assert ids
    assert "which was sent" in failure["failure_reason"]
    assert not [each for each in ids if each in told]

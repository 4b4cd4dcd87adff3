"""An older environment, known by its cookie: what it is sent, and what a lost cookie costs."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.errors.tree import ConfigError

from .conftest import KEY, PARAMS, RESPONSE, House, answer, cut, error


@pytest.fixture
async def house(make_house: Any) -> House:
    made: House = await make_house(resources_protocol="flat")
    made.resources.speaks = False
    made.resources.cookie = "r1"
    made.resources.acts["/seed_session"] = answer(200, b"{}")
    made.resources.acts["/close_session"] = answer(404, {"detail": "Not Found"})
    return made


@pytest.mark.promise("EP-18")
async def test_bodies_are_the_flat_task_and_nothing_of_ours_names_the_session(house: House) -> None:
    await house.result()
    seed, verify = house.calls("/seed_session")[0], house.calls("/verify")[0]
    assert seed.body == {"goal": 3, "responses_create_params": PARAMS}
    response = {key: value for key, value in RESPONSE.items() if key != "terminal_response_id"}
    assert verify.body == {"goal": 3, "responses_create_params": PARAMS, "response": response}
    for call in (seed, verify):
        assert not {"x-toprope-session", "x-toprope-close-token", "x-toprope-lease"} & set(call.headers)
    assert verify.headers["cookie"] == "session=r1"
    assert {seen.raw_path[: len("/ng-rollout/" + KEY)] for seen in house.log} == {"/ng-rollout/" + KEY}


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"anything": 1}'])
async def test_an_empty_reply_is_a_seed(house: House, body: bytes) -> None:
    house.resources.acts["/seed_session"] = answer(200, body)
    assert (await house.result())["reward"] == 0.5


@pytest.mark.promise("EP-8")
async def test_a_seed_whose_reply_was_lost_is_sent_once_and_told_as_a_leak_that_nobody_can_close(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.resources.acts["/seed_session"] = cut
    failure = await house.failure()
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("transport_dropped", "seed", False)
    assert len(house.calls("/seed_session")) == 1
    assert house.calls("/close_session") == []
    assert "its cookie was lost" in caplog.text


@pytest.mark.parametrize("status", [404, 405, 422])
async def test_a_server_that_has_no_close_leaves_nothing_to_log(
    house: House, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    house.resources.acts["/close_session"] = answer(status, {"detail": "no"})
    await house.result()
    assert len(house.calls("/close_session")) == 1
    assert "left open" not in caplog.text


@pytest.mark.promise("EP-6")
async def test_a_close_that_fails_costs_no_reward_and_is_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.resources.acts["/close_session"] = error(500, "internal", "stuck", retryable=True)
    assert (await house.result())["reward"] == 0.5
    assert "may be left open" in caplog.text


async def test_the_mcp_offer_of_an_older_server_becomes_a_grant(make_house: Any) -> None:
    house: House = await make_house(resources_protocol="flat", tools=["mcp"])
    offer = {"server_name": "counter", "url_path": "/mcp", "transport": "http", "headers": {"x-token": "t"}}
    house.resources.acts["/seed_session"] = answer(200, {"mcp": offer})
    await house.result()
    (grant,) = house.calls("/v1/agent_sessions")[0].body["tool_accesses"]
    assert (grant["kind"], grant["name"]) == ("mcp", "counter")
    assert grant["connection"]["headers"] == {"x-token": "t"}
    assert grant["connection"]["url"].endswith(f"/ng-rollout/{KEY}/mcp")


async def test_a_protocol_of_resources_that_is_none_is_refused(make_house: Any) -> None:
    with pytest.raises(ConfigError, match="typed, flat"):
        await make_house(resources_protocol="legacy")

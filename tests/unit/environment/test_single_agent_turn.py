"""The order of calls, what each carries, and what becomes of each plain failure."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from toprope.errors.kinds import is_kind
from toprope.errors.tree import TopropeError
from toprope.protocol.episode import RESERVED_TASK_DATA
from toprope.protocol.sessions import session_name
from toprope.servers.environment.single_agent_turn import SingleAgentTurn

from .conftest import EPISODE, KEY, PARAMS, RESPONSE, TASK, TASK_ID, House, answer, cut, error, hang

ORDER = [
    "resources /seed_session",
    "agent /v1/agent_sessions",
    "agent /v1/responses",
    "agent /v1/agent_sessions/close",
    "resources /verify",
    "resources /close_session",
]


@pytest.mark.promise("EP-1")
async def test_the_calls_of_an_episode_come_in_the_order_of_the_protocol(house: House) -> None:
    result = await house.result()
    assert house.steps == ORDER
    assert result["reward"] == 0.5


@pytest.mark.promise("ID-3")
@pytest.mark.parametrize("capture", [False, True])
async def test_every_call_carries_the_key_and_only_the_activation_the_capture_segment(
    make_house: Any, capture: bool
) -> None:
    house = await make_house(capture=capture)
    await house.result()
    prefixes = [seen.raw_path[: len("/ng-rollout/" + KEY)] for seen in house.log]
    assert prefixes == ["/ng-rollout/" + KEY] * 6
    captured = [seen.raw_path for seen in house.log if "training-token-capture" in seen.raw_path]
    assert captured == ([f"/ng-rollout/{KEY}/training-token-capture/v1/responses"] if capture else [])


async def test_sessions_tokens_numbers_and_leases_travel_in_headers(make_house: Any) -> None:
    house = await make_house(episode_timeout_s=1000, cleanup_timeout_s=20)
    await house.result()
    seed, agent_seed, activation, agent_close, verify, close = house.log
    session, agent_session = seed.body["resources_session_id"], agent_seed.body["agent_session_id"]
    token, agent_token = seed.headers["x-toprope-close-token"], agent_seed.headers["x-toprope-close-token"]
    assert len({session, agent_session, token, agent_token}) == 4
    assert seed.headers["x-toprope-lease"] == agent_seed.headers["x-toprope-lease"] == "1020"
    assert activation.headers["x-toprope-session"] == agent_session
    assert activation.headers["x-toprope-activation"] == "1"
    assert "x-toprope-close-token" not in activation.headers
    assert verify.headers["x-toprope-session"] == session
    assert verify.headers["x-toprope-close-token"] == close.headers["x-toprope-close-token"] == token
    assert agent_close.headers["x-toprope-close-token"] == agent_token
    assert {seen.headers["x-toprope-protocol"] for seen in house.log} == {"1"}


async def test_bodies_are_exactly_the_protocols(house: House) -> None:
    await house.result()
    seed, agent_seed, activation, agent_close, verify, close = (seen.body for seen in house.log)
    session, agent_session = seed["resources_session_id"], agent_seed["agent_session_id"]
    assert seed == {
        "resources_session_id": session,
        "episode_id": EPISODE,
        "task_id": TASK_ID,
        "task_data": {"goal": 3},
    }
    assert agent_seed == {
        "agent_session_id": agent_session,
        "episode_id": EPISODE,
        "task_id": TASK_ID,
        "tool_accesses": [],
    }
    assert activation == PARAMS
    assert agent_close == {"agent_session_id": agent_session, "episode_id": EPISODE}
    assert verify == {"goal": 3, "responses_create_params": PARAMS, "response": RESPONSE}
    assert close == {"resources_session_id": session, "episode_id": EPISODE}


@pytest.mark.promise("EP-12")
async def test_the_result_is_the_verify_reply_with_the_observations_beside_it(house: House) -> None:
    assert await house.result() == {
        "goal": 3,
        "responses_create_params": PARAMS,
        "response": RESPONSE,
        "reward": 0.5,
        "own_field": [1, None],
        "ng_agent_observations": {"source": "agent", "records": [{"kind": "invocation"}], "gaps": []},
    }


@pytest.mark.promise("EP-12")
async def test_no_verifier_can_say_what_the_agent_was_seen_to_do(house: House) -> None:
    forged = {"source": "verifier", "records": [], "gaps": []}
    house.resources.acts["/verify"] = answer(200, {"reward": 1.0, "ng_agent_observations": forged})
    assert (await house.result())["ng_agent_observations"]["source"] == "agent"


class Leaves(SingleAgentTurn):
    """A protocol of somebody's own that ends the process."""

    async def run(self, episode: Any, given: Any) -> Any:
        sys.exit(3)


@pytest.mark.promise("EP-9")
async def test_a_protocol_that_ends_the_process_ends_its_episode_only(make_house: Any) -> None:
    house: House = await make_house(protocol=Leaves())
    failure = await house.failure()
    assert (failure["failure_kind"], failure["terminal"]) == ("internal", True)
    assert "SystemExit: 3" in failure["failure_reason"]


class Silent(dict[str, Any]):
    """A result that ends the process when it is asked."""

    def get(self, *_: Any) -> Any:
        sys.exit(3)

    def items(self) -> Any:
        sys.exit(3)


class Odd(SingleAgentTurn):
    """A protocol of somebody's own that reads, and gives, what its test wants."""

    def __init__(self, read: Any = None, run: Any = None) -> None:
        self._read, self._run = read, run

    def read(self, task_input: Any) -> Any:
        return super().read(task_input) if self._read is None else self._read()

    async def run(self, episode: Any, given: Any) -> Any:
        result = await super().run(episode, given)
        return result if self._run is None else self._run(result)


def _refuse(**said: Any) -> Any:
    raise TopropeError(said.pop("message", "no"), **said)


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("run", "kind", "said"),
    [
        (lambda _: Silent(reward=1.0), "internal", "SystemExit: 3"),
        (lambda _: None, "internal", "NoneType"),
        (lambda result: {**result, "thing": object()}, "internal", "object"),
        (lambda result: {**result, "thing": Silent()}, None, ""),
        (lambda _: _refuse(kind=7), "episode:7", "no"),
        (lambda _: _refuse(message=7), "internal", "7"),
    ],
)
@pytest.mark.parametrize("speaks", [True, False])
async def test_a_protocol_whose_result_is_code_costs_its_episode_only(
    make_house: Any, run: Any, kind: str | None, said: str, speaks: bool
) -> None:
    house: House = await make_house(protocol=Odd(run=run))
    house.speaks = speaks
    if kind is None:
        assert (await house.result())["thing"] == {}
    else:
        failure = await house.failure()
        assert (failure["failure_kind"], failure["terminal"]) == (kind, True)
        assert said in failure["failure_reason"]
    assert house.steps == ORDER


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("read", "status", "said"),
    [(lambda: sys.exit(3), 500, "SystemExit: 3"), (lambda: _refuse(message=7, status=422), 422, "7")],
)
async def test_a_protocol_that_ends_the_process_while_it_reads_a_task_costs_its_request_only(
    make_house: Any, read: Any, status: int, said: str
) -> None:
    house: House = await make_house(protocol=Odd(read=read))
    reply = await house.run()
    assert (reply.status, reply.error_info().kind) == (status, "internal")
    assert said in reply.error_info().message
    assert house.steps == []


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("late", [True, False])
async def test_a_listener_that_ends_the_process_costs_its_report_only(make_house: Any, late: bool) -> None:
    def leave(report: Any) -> Any:
        sys.exit(3)

    async def leave_later(report: Any) -> Any:
        sys.exit(3)

    house: House = await make_house(on_session=leave_later if late else leave)
    assert (await house.result())["reward"] == 0.5


@pytest.mark.promise("EP-13")
async def test_a_direct_grant_carries_a_tools_only_credential_and_its_kind(make_house: Any) -> None:
    house = await make_house(tools=["direct_http"])
    house.resources.cookie = "signed"
    await house.result()
    seed, agent_seed = house.log[0], house.log[1]
    assert agent_seed.body["tool_accesses"] == [
        {
            "kind": "direct_http",
            "name": "environment",
            "base_url": f"inline://resources/ng-rollout/{KEY}",
            "required": True,
            "cookies": {},
            "headers": {"x-toprope-session": seed.body["resources_session_id"]},
        }
    ]


@pytest.mark.promise("EP-16")
async def test_a_strangers_cookies_go_into_the_grant_and_come_back_before_verify(make_house: Any) -> None:
    house = await make_house(tools=["direct_http"])
    house.resources.speaks = house.agent.speaks = False
    house.resources.cookie, house.agent.cookie = "r1", "a1"
    usual = house.agent.usual("/v1/agent_sessions/close")

    async def close_with_cookies(seen: Any) -> Any:
        status, body, headers = await usual(seen)
        return status, {**body, "resources_cookies": {"session": "r2"}}, headers

    house.agent.acts["/v1/agent_sessions/close"] = close_with_cookies
    result = await house.result()
    cookies = [seen.headers.get("cookie") for seen in house.log]
    assert house.log[1].body["tool_accesses"][0]["cookies"] == {"session": "r1"}
    assert house.log[1].body["tool_accesses"][0]["headers"] == {}
    assert cookies == [None, None, "session=a1", "session=a1", "session=r2", "session=r2"]
    assert "terminal_response_id" not in house.log[4].body["response"]
    assert result["response"]["terminal_response_id"] == "resp-1"


async def test_a_grant_that_is_asked_for_and_not_offered_is_a_terminal_seed_failure(make_house: Any) -> None:
    house = await make_house(tools=["mcp"])
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("seed", "grant_unavailable", True)
    assert house.steps == ["resources /seed_session", "resources /close_session"]


async def test_an_offered_mcp_server_becomes_a_grant(make_house: Any) -> None:
    house = await make_house(tools=["mcp"])
    offer = {"server_name": "env", "url_path": "/mcp", "transport": "http", "headers": {"x-s": "1"}}

    async def seed(seen: Any) -> Any:
        return 200, {"resources_session_id": seen.body["resources_session_id"], "resources_tools": offer}, {}

    house.resources.acts["/seed_session"] = seed
    await house.result()
    assert house.log[1].body["tool_accesses"] == [
        {
            "kind": "mcp",
            "name": "env",
            "required": True,
            "connection": {
                "transport": "streamable_http",
                "url": f"inline://resources/ng-rollout/{KEY}/mcp",
                "headers": {"x-s": "1"},
            },
        }
    ]


# Each row: where, what happens there, and then stage, terminal, kind, and whether the partial response is kept.
FAILURES: list[tuple[str, Any, str, bool, str, bool]] = [
    ("/seed_session", error(500, "seed_failed", "no room", retryable=True), "seed", False, "seed_failed", False),
    ("/seed_session", answer(503, b"busy"), "seed", False, "seed_failed", False),
    ("/seed_session", answer(429, {}, **{"retry-after": "0"}), "seed", False, "seed_failed", False),
    ("/seed_session", cut, "seed", False, "transport_dropped", False),
    ("/seed_session", answer(422, {"detail": "bad"}), "seed", True, "seed_failed", False),
    ("/seed_session", error(409, "conflict", "closed", retryable=False), "seed", True, "conflict", False),
    ("/seed_session", answer(200, {"resources_session_id": "other"}), "seed", True, "bad_reply", False),
    ("/seed_session", answer(200, {}), "seed", True, "bad_reply", False),
    ("/seed_session", answer(200, b"<html>"), "seed", True, "bad_reply", False),
    ("/v1/agent_sessions", answer(500, b"oops"), "agent", False, "agent_failed", False),
    ("/v1/agent_sessions", answer(400, b"no"), "agent", True, "agent_failed", False),
    ("/v1/agent_sessions", answer(200, {"agent_session_id": "x"}), "agent", True, "bad_reply", False),
    ("/v1/responses", answer(500, b"oops"), "agent", False, "agent_failed", False),
    ("/v1/responses", answer(408, b"slow"), "agent", False, "agent_failed", False),
    ("/v1/responses", cut, "agent", False, "transport_dropped", False),
    ("/v1/responses", answer(404, b"what"), "agent", True, "agent_failed", False),
    ("/v1/responses", answer(200, b"not json"), "agent", True, "bad_reply", False),
    ("/v1/responses", answer(200, {"choices": []}), "agent", True, "bad_reply", False),
    (
        "/v1/responses",
        error(502, "tool_unavailable", "dead", retryable=True),
        "agent",
        False,
        "tool_unavailable",
        False,
    ),
    (
        "/v1/responses",
        error(502, "model_context_length", "too long", retryable=False, upstream_status=400),
        "agent",
        True,
        "model_context_length",
        False,
    ),
    ("/v1/agent_sessions/close", answer(500, b"stuck"), "cleanup", False, "session_release_failed", True),
    ("/v1/agent_sessions/close", answer(403, b"no"), "cleanup", False, "session_release_failed", True),
    ("/verify", answer(500, b"boom"), "verification", False, "verify_failed", True),
    ("/verify", error(500, "verify_failed", "KeyError", retryable=True), "verification", False, "verify_failed", True),
    ("/verify", error(404, "session_lost", "who", retryable=True), "verification", False, "session_lost", True),
    ("/verify", error(503, "judge_unavailable", "", retryable=True), "verification", False, "judge_unavailable", True),
    ("/verify", cut, "verification", False, "transport_dropped", True),
    ("/verify", answer(422, {"detail": "bad"}), "verification", True, "verify_failed", True),
    ("/verify", answer(200, b"not json"), "verification", True, "bad_reply", True),
    ("/verify", answer(200, {"score": 1}), "verification", True, "bad_reward", True),
    ("/verify", answer(200, {"reward": "0.5"}), "verification", True, "bad_reward", True),
]  # fmt: skip


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("path", "act", "stage", "terminal", "kind", "partial"),
    FAILURES,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(FAILURES)],
)
async def test_each_failure_has_its_stage_kind_and_end_and_leaves_no_session_owed(
    house: House, path: str, act: Any, stage: str, terminal: bool, kind: str, partial: bool
) -> None:
    part = house.resources if path in ("/seed_session", "/verify") else house.agent
    part.acts[path] = act
    failure = await house.failure()
    assert (failure["stage"], failure["terminal"], failure["failure_kind"]) == (stage, terminal, kind)
    assert is_kind(failure["failure_kind"])
    assert len(failure["failure_reason"]) <= 2000
    assert ("partial_response" in failure) == partial
    assert len(house.calls("/close_session")) == 1
    if path != "/seed_session":
        assert house.calls("/v1/agent_sessions/close")
    if stage in ("seed", "agent", "cleanup"):
        assert not house.calls("/verify")


@pytest.mark.promise("EP-9")
async def test_root_causes_and_statuses_reach_the_failure(house: House) -> None:
    house.resources.acts["/verify"] = error(500, "verify_failed", "env: verify: KeyError: 'x'", retryable=True)
    failure = await house.failure()
    assert "env: verify: KeyError: 'x'" in failure["failure_reason"]
    assert (failure["upstream_status"], failure["delivery"]) == (500, "delivered")
    house.resources.acts["/verify"] = answer(418, b"short and stout")
    failure = await house.failure()
    assert "short and stout" in failure["failure_reason"]
    assert failure["upstream_status"] == 418


@pytest.mark.promise("EP-8")
async def test_a_status_that_stays_says_how_often_it_was_asked(house: House) -> None:
    house.resources.acts["/seed_session"] = answer(503, b"busy")
    failure = await house.failure()
    assert len(house.calls("/seed_session")) == 2
    assert "answered 503 (2 attempts): busy" in failure["failure_reason"]


@pytest.mark.promise("EP-7")
async def test_a_dead_participant_is_named_and_a_session_that_nothing_reached_is_not_closed(make_house: Any) -> None:
    house = await make_house(agent_url="inline://nobody")
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"], failure["delivery"], failure["terminal"]) == (
        "agent",
        "transport_unreachable",
        "not_sent",
        False,
    )
    assert "inline://nobody" in failure["failure_reason"]
    assert house.steps == ["resources /seed_session", "resources /close_session"]


@pytest.mark.promise("EP-1")
@pytest.mark.parametrize("path", ["/seed_session", "/v1/agent_sessions"])
async def test_a_seed_whose_reply_is_lost_is_closed_all_the_same(house: House, path: str) -> None:
    part = house.resources if path == "/seed_session" else house.agent
    part.acts[path] = cut
    await house.failure()
    seeds = [seen for seen in house.log if seen.raw_path.endswith(path)]
    assert len(seeds) == 2
    assert seeds[0].body == seeds[1].body  # sent again with the same id, so that one allocation answers both
    closes = house.calls("/close_session" if path == "/seed_session" else "/v1/agent_sessions/close")
    field = "resources_session_id" if path == "/seed_session" else "agent_session_id"
    assert closes[0].body[field] == seeds[0].body[field]


@pytest.mark.promise("EP-8")
@pytest.mark.parametrize(("speaks", "sent"), [(True, 2), (False, 1)])
async def test_an_activation_is_sent_again_only_to_a_peer_that_joins_and_replays(
    house: House, speaks: bool, sent: int
) -> None:
    house.agent.speaks = speaks
    house.agent.acts["/v1/responses"] = cut
    await house.failure()
    assert len(house.calls("/v1/responses")) == sent


async def test_a_failed_or_incomplete_response_is_the_verifiers_to_judge(house: House) -> None:
    for status in ("failed", "incomplete"):
        house.agent.acts["/v1/responses"] = answer(200, {**RESPONSE, "status": status})
        assert (await house.result())["response"]["status"] == status


async def test_a_masked_verdict_is_a_result(house: House) -> None:
    house.resources.acts["/verify"] = answer(200, {"reward": 1, "mask_sample": True})
    result = await house.result()
    assert (result["reward"], result["mask_sample"]) == (1, True)


@pytest.mark.promise("EP-6")
@pytest.mark.parametrize("act", [hang, cut, answer(500, b"no"), answer(200, {"resources_session_id": "x"})])
async def test_a_resources_close_that_fails_changes_nothing_in_the_result(make_house: Any, act: Any) -> None:
    house = await make_house(cleanup_timeout_s=0.2)
    house.resources.acts["/close_session"] = act
    assert (await house.result())["reward"] == 0.5


@pytest.mark.promise("EP-5")
async def test_a_transient_agent_close_failure_still_yields_the_reward(house: House) -> None:
    usual = house.agent.usual("/v1/agent_sessions/close")
    tries: list[int] = []

    async def second_time(seen: Any) -> Any:
        tries.append(1)
        return await cut(seen) if len(tries) == 1 else await usual(seen)

    house.agent.acts["/v1/agent_sessions/close"] = second_time
    assert (await house.result())["reward"] == 0.5
    assert len(tries) == 2


@pytest.mark.promise("EP-5")
async def test_an_agent_that_cannot_be_closed_in_its_share_is_not_verified_and_cannot_eat_the_resources_share(
    make_house: Any,
) -> None:
    house = await make_house(cleanup_timeout_s=0.2)
    house.agent.acts["/v1/agent_sessions/close"] = hang
    failure = await house.failure()
    assert (failure["stage"], failure["terminal"]) == ("cleanup", False)
    assert failure["partial_response"] == RESPONSE
    assert house.steps[-1] == "resources /close_session"
    assert not house.calls("/verify")


@pytest.mark.promise("EP-5")
async def test_an_agent_whose_close_reply_is_optional_is_verified_without_it_and_with_a_gap(make_house: Any) -> None:
    house = await make_house(close_reply="optional")
    house.agent.acts["/v1/agent_sessions/close"] = answer(500, b"stuck")
    result = await house.result()
    assert result["reward"] == 0.5
    assert "stuck" in result["ng_agent_observations"]["gaps"][0]


@pytest.mark.promise("EP-10")
async def test_an_agent_that_runs_out_of_time_is_closed_first_and_what_it_had_is_kept(make_house: Any) -> None:
    house = await make_house(agent_timeout_s=0.05)
    house.agent.acts["/v1/responses"] = hang
    usual = house.agent.usual("/v1/agent_sessions/close")

    async def with_partial(seen: Any) -> Any:
        status, body, headers = await usual(seen)
        return status, {**body, "partial_response": {"output": [{"type": "message"}]}}, headers

    house.agent.acts["/v1/agent_sessions/close"] = with_partial
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "agent_timeout", False)
    assert failure["partial_response"] == {"output": [{"type": "message"}], "status": "incomplete"}
    assert [step for step in house.steps if step in ORDER[3:]] == [
        "agent /v1/agent_sessions/close",
        "resources /close_session",
    ]


@pytest.mark.promise("EP-10")
async def test_a_gradable_state_is_verified_after_the_agent_ran_out_of_time(make_house: Any) -> None:
    house = await make_house(agent_timeout_s=0.05, gradable_on_timeout=True)
    house.agent.acts["/v1/responses"] = hang
    usual = house.agent.usual("/v1/agent_sessions/close")

    async def with_partial(seen: Any) -> Any:
        status, body, headers = await usual(seen)
        return status, {**body, "partial_response": {"output": []}}, headers

    house.agent.acts["/v1/agent_sessions/close"] = with_partial
    result = await house.result()
    assert (result["reward"], result["termination"]) == (0.5, "agent_timeout")
    assert result["response"] == {"output": [], "status": "incomplete"}
    assert house.steps == ORDER
    del house.agent.acts["/v1/agent_sessions/close"]  # an agent that returns nothing cannot be graded
    assert (await house.failure())["failure_kind"] == "agent_timeout"


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize(
    ("path", "stage", "kind", "options"),
    [
        ("/verify", "verification", "verify_timeout", {"verify_timeout_s": 0.05}),
        (
            "/seed_session",
            "seed",
            "episode_timeout",
            {"episode_timeout_s": 0.2, "verify_timeout_s": 0.05, "cleanup_timeout_s": 0.1},
        ),
    ],
)
async def test_a_deadline_that_expired_names_its_stage(
    make_house: Any, path: str, stage: str, kind: str, options: dict[str, float]
) -> None:
    house = await make_house(**options)
    house.resources.acts[path] = hang
    failure = await house.failure()
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == (stage, kind, False)


@pytest.mark.promise("EP-10")
async def test_a_caller_that_leaves_has_the_agent_closed_and_then_the_resources(house: House) -> None:
    entered, closed = asyncio.Event(), asyncio.Event()

    async def enter(seen: Any) -> Any:
        entered.set()
        return await hang(seen)

    usual = house.resources.usual("/close_session")

    async def last(seen: Any) -> Any:
        closed.set()
        return await usual(seen)

    house.agent.acts["/v1/responses"] = enter
    house.resources.acts["/close_session"] = last
    running = asyncio.create_task(house.run())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(closed.wait(), 10)
    assert house.steps == [*ORDER[:4], ORDER[5]]


async def test_admission_is_bounded_and_a_full_queue_is_a_retryable_failure_of_its_own_stage(make_house: Any) -> None:
    house = await make_house(max_concurrent_episodes=1, queue_timeout_s=0.05)
    entered = asyncio.Event()

    async def enter(seen: Any) -> Any:
        entered.set()
        return await hang(seen)

    house.resources.acts["/seed_session"] = enter
    first = asyncio.create_task(house.run())
    await entered.wait()
    reply = await house.run(episode={"rollout_id": "run.0-1", "attempt": 0})
    failure = reply.json()["failure"]
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("admission", "admission_timeout", False)
    assert len(house.log) == 1
    assert (await house.run()).status == 409  # the same episode is in flight
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.promise("EP-4")
async def test_no_log_line_and_no_failure_holds_a_close_token(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    house.resources.acts["/verify"] = answer(500, b"boom")
    house.resources.acts["/close_session"] = house.agent.acts["/v1/agent_sessions/close"] = answer(500, b"no")
    failure = await house.failure()
    tokens = {seen.headers["x-toprope-close-token"] for seen in house.log if "x-toprope-close-token" in seen.headers}
    assert len(tokens) == 2
    assert "may be left open" in caplog.text
    for seen in house.log[:2]:
        (session_id,) = (value for name, value in seen.body.items() if name.endswith("_session_id"))
        assert session_id not in caplog.text, "with it the session's tools could be called"
        assert session_name(session_id) in caplog.text
    assert not any(token in caplog.text or token in str(failure) for token in tokens)


async def test_each_answered_close_is_told_and_a_lost_one_is_not(make_house: Any) -> None:
    told: list[Any] = []
    house = await make_house(on_session_closed=told.append)
    await house.result()
    assert [report.participant for report in told] == ["agent", "resources"]
    assert {report.session_id for report in told} == {
        session_name(house.log[0].body["resources_session_id"]),
        session_name(house.log[1].body["agent_session_id"]),
    }
    told.clear()
    house.resources.acts["/close_session"] = answer(500, b"no")
    await house.result()
    assert [report.participant for report in told] == ["agent"]


async def test_the_provider_handle_is_told_at_once_and_stands_on_result_and_failure(make_house: Any) -> None:
    told: list[Any] = []
    house = await make_house(on_session=told.append)

    async def seed(seen: Any) -> Any:
        assert told == []
        return 200, {"resources_session_id": seen.body["resources_session_id"], "env_session_id": "box-1"}, {}

    house.resources.acts["/seed_session"] = seed
    assert (await house.result())["env_session_id"] == "box-1"
    assert [(report.participant, report.env_session_id) for report in told] == [
        ("resources", "box-1"),
        ("agent", None),
    ]
    told.clear()
    house.resources.acts["/verify"] = answer(200, {"reward": 1, "env_session_id": "box-2"})
    result = await house.result()
    assert (result["env_session_id"], result["seed_env_session_id"]) == ("box-2", "box-1")
    told.clear()
    house.resources.acts["/verify"] = answer(500, b"")
    assert (await house.failure())["env_session_id"] == "box-1"
    listed = await house.client.peer("inline://episode", "environment").request("GET", "/sessions?since=1")
    entries = listed.json()["sessions"]
    assert [entry["number"] for entry in entries] == [2, 3, 4, 5, 6]
    for no_number in ("x", "1" * 5_000, "-1"):
        path = f"/sessions?since={no_number}"
        whole = await house.client.peer("inline://episode", "environment").request("GET", path)
        assert [entry["number"] for entry in whole.json()["sessions"]] == [1, 2, 3, 4, 5, 6]
    assert all(
        set(entry) <= {"number", "episode_id", "participant", "session_id", "env_session_id", "closed"}
        for entry in entries
    )


@pytest.mark.promise("ID-6")
@pytest.mark.parametrize("handle", [7, "", "x" * 513, "a\nb", {"id": "box"}])
async def test_a_handle_that_nobody_could_look_for_is_left_out_and_costs_nothing(
    make_house: Any, handle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    house = await make_house(on_session=told.append)

    async def seed(seen: Any) -> Any:
        return 200, {"resources_session_id": seen.body["resources_session_id"], "env_session_id": handle}, {}

    house.resources.acts["/seed_session"] = seed
    assert "env_session_id" not in await house.result()
    assert [report.env_session_id for report in told] == [None, None]
    assert "no short printable text" in caplog.text


@pytest.mark.promise("ID-6")
@pytest.mark.parametrize("handle", [7, "", "x" * 513, "a\nb", {"id": "box"}, [], True])
@pytest.mark.parametrize("field", ["env_session_id", "seed_env_session_id"])
async def test_a_verifiers_handle_that_nobody_could_look_for_is_left_out_too(
    house: House, field: str, handle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house.resources.acts["/verify"] = answer(200, {"reward": 1.0, field: handle})
    result = await house.result()
    assert (result["reward"], field in result) == (1.0, False)
    assert f"verify's {field} is no short printable text" in caplog.text

    async def seed(seen: Any) -> Any:
        return 200, {"resources_session_id": seen.body["resources_session_id"], "env_session_id": "box-1"}, {}

    house.resources.acts["/seed_session"] = seed
    assert (await house.result())["env_session_id"] == "box-1"


@pytest.mark.promise("EP-18")
async def test_a_stranger_sees_only_the_fields_it_knows(house: House) -> None:
    house.speaks = False
    house.resources.acts["/verify"] = answer(500, b"boom")
    failure = await house.failure()
    assert set(failure) == {"failure_reason", "terminal", "failure_kind", "stage"}


@pytest.mark.parametrize(
    ("task_input", "said"),
    [
        ({"task_data": {}}, "responses_create_params"),
        ({"responses_create_params": {"input": 3}}, "input"),
        ({"responses_create_params": PARAMS, "task_data": []}, "task_data"),
        ({"responses_create_params": PARAMS, "task_data": {"a": 1}, "a": 2}, "two values"),
        ({"responses_create_params": PARAMS, "reward": 1}, "reserved"),
        *(
            ({"responses_create_params": PARAMS, "task_data": {name: 1}}, f"{name}: this name is reserved")
            for name in sorted(RESERVED_TASK_DATA - {"responses_create_params"})
        ),
    ],
)
async def test_a_malformed_task_is_a_422_that_names_the_field(house: House, task_input: Any, said: str) -> None:
    reply = await house.run({"task_id": TASK_ID, "task_input": task_input})
    assert reply.status == 422
    assert said in reply.json()["error"]["message"]
    assert house.log == []


async def test_flat_fields_beside_task_data_fold_into_it(house: House) -> None:
    task_input = {"responses_create_params": PARAMS, "task_data": {"a": 1}, "b": 2, "a": 1}
    await house.run({"task_id": TASK_ID, "task_input": task_input})
    assert house.log[0].body["task_data"] == {"a": 1, "b": 2}


async def test_a_run_whose_path_names_another_rollout_is_a_conflict(house: House) -> None:
    peer = house.client.peer("inline://episode", "environment")
    body = {"episode_id": EPISODE, "task": TASK}
    assert (await peer.request("POST", "/ng-rollout/other/run", body=body)).status == 409
    assert (await peer.request("POST", f"/ng-rollout/{KEY}/run", body=body)).status == 200


async def test_metrics_are_forwarded_to_the_resources_server(house: House) -> None:
    house.resources.acts["/aggregate_metrics"] = answer(200, {"mean": 0.5})
    peer = house.client.peer("inline://episode", "environment")
    assert (await peer.request("POST", "/aggregate_metrics", body={"rows": [1]})).json() == {"mean": 0.5}
    assert house.log[-1].body == {"rows": [1]}

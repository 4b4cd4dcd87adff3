"""The resources server over its real app: sessions, tools, verify, close."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.errors.kinds import Kind
from toprope.errors.tree import ToolError, TopropeError
from toprope.http.client import Client, Peer
from toprope.http.cookies import merge_cookies
from toprope.http.reply import Reply
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

EPISODE = {"rollout_id": "run.0-0", "attempt": 0}
SEED = {"episode_id": EPISODE, "task_id": {"taskset": "t", "task_id": "1"}, "task_data": {"start": 3}}
VERIFY = {"responses_create_params": {"input": []}, "response": {"output": []}, "start": 3}


class Counter(Environment):
    """A state, tools of every kind, and switches for what goes wrong."""

    def __init__(self) -> None:
        self.reward: Any = 1.0
        self.seeds = 0
        self.released: list[Any] = []
        self.seen: dict[str, str | None] = {}
        self.inside = 0
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    def seed(self, task: dict[str, Any]) -> dict[str, Any]:
        self.seeds += 1
        self.seen["seed"] = current_rollout_id()
        if task.get("fail"):
            raise ConnectionError("no container")
        return {"n": task["start"]}

    @tool
    async def add(self, state: dict[str, Any], n: int) -> int:
        """Add n."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        await self.gate.wait()
        self.inside -= 1
        self.seen["tool"] = current_rollout_id()
        self.seen["tool_thread"] = await asyncio.to_thread(current_rollout_id)
        self.seen["tool_task"] = await asyncio.create_task(_seen())
        state["n"] += n
        return int(state["n"])

    @tool
    def say(self, state: Any, text: str) -> str:
        self.seen["sync_tool"] = current_rollout_id()
        assert threading.current_thread() is not threading.main_thread()
        return text

    @tool
    def refuse(self, state: Any) -> None:
        raise ToolError("not today")

    @tool
    def crash(self, state: Any) -> None:
        raise ZeroDivisionError("broken inside")

    @tool
    def facts(self, state: Any) -> dict[str, Any]:
        return {"n": state["n"]}

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        self.seen["verify"] = current_rollout_id()
        if isinstance(self.reward, Exception):
            raise self.reward
        return self.reward

    def release(self, state: Any) -> None:
        self.seen["release"] = current_rollout_id()
        self.released.append(state)

    def env_session_id(self, state: Any) -> str:
        return "container-7"


async def _seen() -> str | None:
    return current_rollout_id()


class Answer(Environment):
    """Stateless."""

    @tool
    def double(self, state: None, n: int) -> int:
        return 2 * n

    def verify(self, state: None, task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(response["answer"] == task["want"])


@dataclass
class House:
    """A served environment and a caller that speaks the protocol, plus one that does not."""

    environment: Any
    server: ResourcesServer
    peer: Peer
    stranger: Peer
    cookies: dict[str, str] = field(default_factory=dict)

    async def seed(self, session: str = "s1", *, token: str | None = "tok", **changes: Any) -> Reply:
        headers = {} if token is None else {"x-toprope-close-token": token}
        body = {"resources_session_id": session, **SEED, **changes}
        reply = await self.peer.request("POST", "/seed_session", body=body, headers=headers)
        self.cookies = merge_cookies(self.cookies, reply)
        return reply

    async def post(self, path: str, body: Any, *, session: str | None = "s1", token: str | None = None) -> Reply:
        headers = {} if session is None else {"x-toprope-session": session}
        if token is not None:
            headers["x-toprope-close-token"] = token
        return await self.peer.request("POST", path, body=body, headers=headers)

    async def close(self, session: str = "s1", *, token: str | None = "tok") -> Reply:
        body = {"resources_session_id": session, "episode_id": EPISODE}
        return await self.post("/close_session", body, session=None, token=token)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client() as client:
        yield client


async def serve(client: Client, environment: Environment, **options: Any) -> House:
    server = ResourcesServer(name="env", environment=environment, signing_key=b"k" * 32, **options)
    client.register("inline://env", server.app)
    await server.app.start()
    return House(environment, server, client.peer("inline://env", "resources"), client.peer("inline://env", None))


@pytest.fixture
async def house(client: Client) -> AsyncIterator[House]:
    house = await serve(client, Counter())
    yield house
    await house.server.app.stop()


@pytest.mark.promise("EP-3")
async def test_concurrent_equal_seeds_over_the_wire_are_one_allocation(house: House) -> None:
    replies = await asyncio.gather(*(house.seed() for _ in range(50)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert house.environment.seeds == 1
    assert (await house.seed(task_data={"start": 4})).status == 409
    assert (await house.seed(token="other")).status == 409


@pytest.mark.promise("ID-2")
async def test_the_rollout_is_known_everywhere_the_author_looks(house: House) -> None:
    with rollout_context("run.0-0"):
        await house.seed()
        await house.post("/add", {"n": 1})
        await house.post("/say", {"text": "x"})
        await house.post("/verify", VERIFY, token="tok")
        await house.close()
    assert house.environment.seen == dict.fromkeys(
        ["seed", "tool", "tool_thread", "tool_task", "sync_tool", "verify", "release"], "run.0-0"
    )


async def test_a_request_without_a_prefix_works_for_its_sessions_rollout_and_another_key_is_a_conflict(
    house: House,
) -> None:
    await house.seed()
    await house.post("/add", {"n": 1})
    assert house.environment.seen["tool"] == "run.0-0"
    with rollout_context("run.0-1"):
        assert (await house.post("/add", {"n": 1})).status == 409
        assert (await house.seed("s2")).status == 409


async def test_what_a_tool_returns_is_json_or_text(house: House) -> None:
    await house.seed()
    assert (await house.post("/add", {"n": 2})).json() == 5
    said = await house.post("/say", {"text": "hé"})
    assert (said.text, said.headers["content-type"]) == ("hé", "text/plain; charset=utf-8")
    assert (await house.post("/facts", {})).json() == {"n": 5}


async def test_a_tools_own_error_is_typed_so_that_an_agent_can_tell_it_from_trouble(house: House) -> None:
    await house.seed()
    refused = await house.post("/refuse", {})
    assert refused.status == 422
    assert refused.json()["error"] == {
        "kind": "bad_request",
        "message": "not today",
        "retryable": False,
        "type": "tool_error",
    }
    wrong = await house.post("/add", {"n": "two"})
    assert (wrong.status, wrong.json()["error"]["type"]) == (422, "tool_error")
    assert "Expected `int`, got `str`" in wrong.json()["error"]["message"]
    crashed = await house.post("/crash", {})
    assert (crashed.status, crashed.json()["error"]["kind"]) == (500, "tool_unavailable")
    assert "ZeroDivisionError: broken inside" in crashed.json()["error"]["message"]


async def test_tools_of_one_session_run_one_at_a_time_and_those_of_two_do_not_wait(house: House) -> None:
    environment = house.environment
    await house.seed()
    await house.seed("s2")
    environment.gate.clear()
    calls = [asyncio.create_task(house.post("/add", {"n": 1})) for _ in range(5)]
    await environment.entered.wait()
    environment.entered.clear()
    other = asyncio.create_task(house.post("/add", {"n": 1}, session="s2"))
    await environment.entered.wait()
    assert environment.inside == 2
    environment.gate.set()
    assert sorted(reply.json() for reply in await asyncio.gather(*calls)) == [4, 5, 6, 7, 8]
    await other
    assert environment.most == 2


async def test_a_call_that_waited_for_its_turn_while_the_session_closed_does_not_touch_it(house: House) -> None:
    environment = house.environment
    await house.seed()
    environment.gate.clear()
    first = asyncio.create_task(house.post("/add", {"n": 1}))
    await environment.entered.wait()
    second = asyncio.create_task(house.post("/add", {"n": 100}))
    session = house.server.sessions.open_session("s1")
    while session.users < 2:  # noqa: ASYNC110  # no event says that a call came in and waits for its turn
        await asyncio.sleep(0)
    closing = asyncio.create_task(house.close())
    while session.state != "closing":  # noqa: ASYNC110  # as above
        await asyncio.sleep(0)
    environment.gate.set()
    assert (await first).json() == 4
    assert (await second).json()["error"]["kind"] == "session_lost"
    assert (await closing).json()["outcome"] == "closed"
    assert environment.released == [{"n": 4}]


@pytest.mark.promise("EP-19")
async def test_the_sessions_name_alone_can_call_tools_but_neither_verify_nor_close(house: House) -> None:
    await house.seed()
    assert (await house.post("/add", {"n": 1})).status == 200
    for path, body in (
        ("/verify", VERIFY),
        ("/close_session", {"resources_session_id": "s1", "episode_id": EPISODE}),
    ):
        reply = await house.post(path, body)
        assert (reply.status, reply.json()["error"]["kind"]) == (403, "forbidden")
        with_cookie = await house.stranger.request("POST", path, body=body, cookies=house.cookies)
        assert with_cookie.status == 403
    assert house.environment.released == []
    assert (await house.post("/verify", VERIFY, token="tok")).status == 200


@pytest.mark.promise("EP-4")
async def test_a_close_needs_the_token_and_the_session_stays_open_without_it(house: House) -> None:
    await house.seed()
    for token in (None, "wrong"):
        assert (await house.close(token=token)).status == 403
    assert (await house.post("/add", {"n": 1})).json() == 4
    assert (await house.close()).json() == {"resources_session_id": "s1", "outcome": "closed"}
    assert (await house.close()).json() == {"resources_session_id": "s1", "outcome": "already_closed"}
    assert (await house.seed()).status == 409


async def test_an_unknown_session_is_lost_and_no_session_is_named_as_the_fault(house: House) -> None:
    lost = await house.post("/add", {"n": 1}, session="nobody")
    assert (lost.status, lost.json()["error"]["kind"], lost.json()["error"]["retryable"]) == (404, "session_lost", True)
    unnamed = await house.post("/add", {"n": 1}, session=None)
    assert unnamed.status == 422
    assert "x-toprope-session" in unnamed.json()["error"]["message"]
    assert (await house.post("/verify", VERIFY, session="nobody")).json()["error"]["kind"] == "session_lost"


async def test_a_stranger_is_known_by_the_signed_cookie_and_sees_no_extension(house: House) -> None:
    seeded = await house.stranger.request("POST", "/seed_session", body={"resources_session_id": "s9", **SEED})
    assert seeded.json() == {"resources_session_id": "s9"}
    cookies = merge_cookies({}, seeded)
    assert (await house.stranger.request("POST", "/add", body={"n": 1}, cookies=cookies)).json() == 4
    forged = {name: value[:-1] + ("0" if value[-1] != "0" else "1") for name, value in cookies.items()}
    refused = await house.stranger.request("POST", "/add", body={"n": 1}, cookies=forged)
    assert (refused.status, refused.json()["error"]["kind"]) == (404, "session_lost")
    assert (await house.stranger.request("POST", "/verify", body=VERIFY, cookies=cookies)).json()["reward"] == 1.0
    body = {"resources_session_id": "s9", "episode_id": EPISODE}
    assert (await house.stranger.request("POST", "/close_session", body=body)).json() == {"resources_session_id": "s9"}


async def test_one_who_speaks_the_protocol_is_told_the_providers_handle(house: House) -> None:
    assert (await house.seed()).json() == {"resources_session_id": "s1", "env_session_id": "container-7"}


@pytest.mark.promise("EP-12")
async def test_verify_echoes_its_body_and_adds_every_field_of_the_verdict(house: House) -> None:
    await house.seed()
    house.environment.reward = Verdict(
        reward=0.25,
        mask_sample=True,
        failure_kind="env:flaky",
        failure_reason="the sandbox was slow",
        reward_components={"a": 0.25},
        env_session_id="container-8",
        extra={"parts": [1, 2]},
    )
    reply = (await house.post("/verify", VERIFY, token="tok")).json()
    assert reply == {
        **VERIFY,
        "reward": 0.25,
        "mask_sample": True,
        "failure_kind": "env:flaky",
        "failure_reason": "the sandbox was slow",
        "reward_components": {"a": 0.25},
        "env_session_id": "container-8",
        "parts": [1, 2],
    }


@pytest.mark.parametrize("reward", [True, "0.5", None, math.nan, math.inf, [1.0]])
async def test_a_reward_that_is_no_finite_number_is_refused_with_its_value(house: House, reward: Any) -> None:
    await house.seed()
    house.environment.reward = Verdict(reward=reward)
    reply = await house.post("/verify", VERIFY, token="tok")
    error = reply.json()["error"]
    assert (reply.status, error["kind"], error["retryable"]) == (500, "bad_reward", False)
    assert repr(reward) in error["message"]


async def test_a_verifiers_exception_keeps_its_type_and_text_and_can_be_tried_again(house: House) -> None:
    await house.seed()
    house.environment.reward = KeyError("answer")
    error = (await house.post("/verify", VERIFY, token="tok")).json()["error"]
    assert (error["kind"], error["retryable"]) == ("verify_failed", True)
    assert "KeyError: 'answer'" in error["message"]
    house.environment.reward = TopropeError("judge is away", kind=Kind.JUDGE_UNAVAILABLE, status=503, retryable=True)
    judged = await house.post("/verify", VERIFY, token="tok")
    assert (judged.status, judged.json()["error"]["kind"]) == (503, "judge_unavailable")


async def test_a_verdicts_extra_fields_cannot_replace_the_verdict(house: House) -> None:
    await house.seed()
    house.environment.reward = Verdict(reward=0.0, extra={"reward": 1.0})
    error = (await house.post("/verify", VERIFY, token="tok")).json()["error"]
    assert (error["kind"], error["retryable"]) == ("verify_failed", False)


async def test_a_seed_that_fails_says_why_and_may_be_sent_again(house: House) -> None:
    failed = await house.seed(task_data={"fail": True, "start": 0})
    assert (failed.status, failed.json()["error"]["kind"]) == (500, "seed_failed")
    assert "ConnectionError: no container" in failed.json()["error"]["message"]
    assert len(house.server.sessions) == 0
    assert (await house.seed()).status == 200


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surplus": 1}, "surplus"),
        ({"task_data": []}, "task_data"),
        ({"episode_id": {"rollout_id": "../x", "attempt": 0}}, "../x"),
        ({"episode_id": {"rollout_id": "x", "attempt": -1}}, "-1"),
    ],
)
async def test_a_malformed_seed_names_the_field(house: House, changes: dict[str, Any], said: str) -> None:
    reply = await house.seed(**changes)
    assert reply.status == 422
    assert said in reply.json()["error"]["message"]


async def test_stop_releases_what_is_left(house: House) -> None:
    await house.seed()
    await house.server.app.stop()
    assert house.environment.released == [{"n": 3}]


async def test_a_stateless_environment_verifies_and_calls_tools_without_a_session(client: Client) -> None:
    house = await serve(client, Answer())
    body = {"responses_create_params": {}, "response": {"answer": 4}, "want": 4}
    assert (await house.post("/verify", body, session=None)).json()["reward"] == 1.0
    assert (await house.post("/double", {"n": 4}, session=None)).json() == 8
    await house.server.app.stop()


async def test_metrics_are_aggregated_only_by_environments_that_do(client: Client, house: House) -> None:
    assert (await house.post("/aggregate_metrics", {"verify_responses": []}, session=None)).status == 404


class VerifiesOnTheLoop(Counter):
    """Its verify runs as soon as it may, without a thread in between."""

    async def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(state["n"])


async def test_verify_waits_for_a_tool_call_that_still_runs(client: Client) -> None:
    environment = VerifiesOnTheLoop()
    house = await serve(client, environment)
    await house.seed()
    environment.gate.clear()
    running = asyncio.create_task(house.post("/add", {"n": 1}))
    await environment.entered.wait()
    verifying = asyncio.create_task(house.post("/verify", VERIFY, token="tok"))
    session = house.server.sessions.open_session("s1")
    while session.users < 2 and not verifying.done():  # noqa: ASYNC110  # no event says that a call came in and waits for its turn
        await asyncio.sleep(0)
    environment.gate.set()
    assert (await running).json() == 4
    assert (await verifying).json()["reward"] == 4.0, "not what the state was before the tool's turn"
    await house.server.app.stop()


async def test_a_seed_ends_before_its_server_does(client: Client) -> None:
    class Slow(Counter):
        async def seed(self, task: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            self.entered.set()
            await self.gate.wait()
            return {"n": 1}

    environment = Slow()
    environment.gate.clear()
    house = await serve(client, environment)
    seeding = asyncio.create_task(house.seed())
    await environment.entered.wait()
    stopping = asyncio.create_task(house.server.app.stop())
    while house.server.app.not_ready() is None:  # noqa: ASYNC110  # no event says that a stop began
        await asyncio.sleep(0)
    environment.gate.set()
    await stopping
    assert (await seeding).status == 200, "a seed is stopped by its owner only: a close, its deadline, the drain bound"
    assert environment.released == [{"n": 1}]


async def test_a_close_ends_before_its_server_does(client: Client) -> None:
    class Slow(Counter):
        async def release(self, state: Any) -> None:  # type: ignore[override]
            self.entered.set()
            await self.gate.wait()
            self.released.append(state)

    environment = Slow()
    environment.gate.clear()
    house = await serve(client, environment)
    await house.seed()
    closing = asyncio.create_task(house.close())
    await environment.entered.wait()
    stopping = asyncio.create_task(house.server.app.stop())
    while house.server.app.not_ready() is None:  # noqa: ASYNC110  # no event says that a stop began
        await asyncio.sleep(0)
    environment.gate.set()
    await stopping
    assert (await closing).json()["outcome"] == "closed"
    assert environment.released == [{"n": 3}]


async def test_the_text_of_an_authors_error_is_made_in_a_worker_and_holds_nothing_up(client: Client) -> None:
    made_in: list[str] = []

    class Slow(Exception):
        def __str__(self) -> str:
            made_in.append(threading.current_thread().name)
            return "slow words"

    class Breaks(Counter):
        def verify(self, state: Any, task: Any, response: Any) -> float:  # type: ignore[override]
            raise Slow

        @tool
        async def breaks(self, state: Any) -> str:
            """Fail."""
            raise Slow

    house = await serve(client, Breaks())
    await house.seed()
    for reply in (await house.post("/breaks", {}), await house.post("/verify", VERIFY, token="tok")):
        assert "slow words" in reply.json()["error"]["message"]
    assert made_in
    assert threading.main_thread().name not in made_in

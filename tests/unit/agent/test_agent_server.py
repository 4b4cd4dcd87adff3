"""Agent sessions and activations over the real app: joined, replayed, refused, stopped."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from toprope.correlation.context import rollout_context
from toprope.errors.tree import Conflict
from toprope.http.cookies import merge_cookies
from toprope.http.reply import json_reply
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.plain import PlainDirectory, PlainSandbox
from toprope.sandbox.spec import SandboxSpec
from toprope.servers.agent.activations import Activations
from toprope.servers.agent.agent import Activation, Agent

from .conftest import EPISODE, SEED, call, say

ASK = {"input": [{"role": "user", "content": "hi"}]}


class Gate:
    """A model turn that waits until the test lets it go."""

    def __init__(self, then: Any) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.then = then

    async def __call__(self, body: Any) -> Any:
        self.entered.set()
        await self.open.wait()
        return self.then


async def test_the_same_activation_joins_the_running_one_and_is_replayed_after(make_house: Any) -> None:
    gate = Gate([say("hello")])
    house = await make_house(gate)
    await house.seed()
    first = asyncio.create_task(house.activate(ASK))
    await gate.entered.wait()
    second = asyncio.create_task(house.activate(ASK))
    try:
        async with asyncio.timeout(30):  # one that joined would wait for the gate
            other_body = await house.activate({"input": "other"})
            next_one = await house.activate(ASK, number=2)
    finally:
        gate.open.set()
    assert (other_body.status, next_one.status) == (409, 409)
    assert (await first).body == (await second).body == (await house.activate(ASK)).body
    assert len(house.model.bodies) == 1


async def test_the_next_number_is_a_new_activation_and_a_gap_is_a_conflict(make_house: Any) -> None:
    house = await make_house([say("a")], [say("b")])
    await house.seed()
    assert (await house.activate(ASK)).json()["output"] == [say("a")]
    assert (await house.activate(ASK, number=3)).status == 409
    assert (await house.activate(ASK, number=2)).json()["output"] == [say("b")]
    assert (await house.activate(ASK, number=1)).status == 409
    assert (await house.activate(ASK, number=None)).json()["output"] == [say("b")]


async def test_an_activation_under_another_key_or_of_no_session_is_refused(make_house: Any) -> None:
    house = await make_house([say("a")])
    await house.seed()
    assert (await house.activate(ASK, key="run.0-1")).status == 409
    assert (await house.activate(ASK, session=None)).status == 422
    lost = await house.activate(ASK, session="nobody")
    assert (lost.status, lost.json()["error"]["kind"]) == (404, "session_lost")
    assert (await house.activate({"input": 3})).status == 422
    for no_number in ("x", "1" * 5_000):
        assert (await house.activate(ASK, number=no_number)).status == 422
    assert house.model.bodies == []


async def test_a_sessionless_call_runs_where_it_is_allowed(make_house: Any) -> None:
    house = await make_house([say("a")], allow_sessionless=True)
    assert (await house.activate(ASK, session=None)).json()["output"] == [say("a")]


@pytest.mark.promise("ID-2")
async def test_capture_travels_from_the_activations_path_to_the_model_call_and_nowhere_else(make_house: Any) -> None:
    house = await make_house([say("a")])
    await house.seed()
    await house.activate(ASK, capture=True)
    await house.activate(ASK, number=2)
    assert [(context.key, context.capture) for context in house.model.contexts] == [
        ("run.0-0", True),
        ("run.0-0", False),
    ]


@pytest.mark.promise("EP-10")
async def test_a_close_stops_the_activation_and_returns_what_it_had(make_house: Any) -> None:
    gate = Gate([say("never")])
    house = await make_house([call("t", {})], gate)
    await house.seed()
    running = asyncio.create_task(house.activate({**ASK, "tools": []}))
    await gate.entered.wait()
    closed = (await house.close()).json()
    assert closed["outcome"] == "closed"
    assert closed["partial_response"]["status"] == "incomplete"
    assert [item["type"] for item in closed["partial_response"]["output"]] == ["function_call", "function_call_output"]
    stopped = await running
    assert (stopped.status, stopped.json()["error"]["kind"]) == (503, "cancelled")
    kinds = [record["kind"] for record in closed["agent_observations"]["records"]]
    assert kinds == ["invocation", "tool_call"]
    assert (await house.close()).json()["outcome"] == "already_closed"
    assert (await house.activate(ASK, number=2)).json()["error"]["kind"] == "session_lost"


async def test_an_activation_goes_on_when_its_client_leaves(make_house: Any) -> None:
    gate = Gate([say("done")])
    house = await make_house(gate)
    await house.seed()
    leaving = asyncio.create_task(house.activate(ASK))
    await gate.entered.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.open.set()
    assert (await house.activate(ASK)).json()["output"] == [say("done")]
    assert len(house.model.bodies) == 1


async def test_a_failed_activation_is_replayed_as_failed_and_not_run_again(make_house: Any) -> None:
    house = await make_house(
        json_reply({"error": {"kind": "model_quota", "message": "spent", "retryable": False}}, 402)
    )
    await house.seed()
    first = await house.activate(ASK)
    assert first.status == 502
    assert first.headers["x-should-retry"] == "false"
    error = first.json()["error"]
    assert (error["kind"], error["retryable"], error["upstream_status"]) == ("model_quota", False, 402)
    assert "spent" in error["message"]
    assert (await house.activate(ASK)).body == first.body
    assert len(house.model.bodies) == 1


async def test_a_retryable_model_error_stays_retryable_in_the_body(make_house: Any) -> None:
    body = {"error": {"kind": "model_unavailable", "message": "no engine", "retryable": True}}
    house = await make_house(json_reply(body, 503))
    await house.seed()
    error = (await house.activate(ASK)).json()["error"]
    assert (error["kind"], error["retryable"]) == ("model_unavailable", True)


async def test_an_agents_own_exception_keeps_its_type_and_text(make_house: Any) -> None:
    class Broken(Agent):
        async def respond(self, activation: Activation) -> dict[str, Any]:
            raise IndexError("no such turn")

    house = await make_house([], agent=Broken())
    await house.seed()
    reply = await house.activate(ASK)
    assert (reply.status, reply.json()["error"]["kind"]) == (500, "agent_failed")
    assert "IndexError: no such turn" in reply.json()["error"]["message"]


async def test_a_stranger_sees_no_extension_and_is_known_by_its_cookie(make_house: Any) -> None:
    house = await make_house([say("a")])
    seeded = await house.stranger.request("POST", "/v1/agent_sessions", body={"agent_session_id": "x", **SEED})
    assert seeded.json() == {"agent_session_id": "x"}
    cookies = merge_cookies({}, seeded)
    answered = await house.stranger.request("POST", "/v1/responses", body=ASK, cookies=cookies)
    assert "terminal_response_id" not in answered.json()
    closed = await house.stranger.request(
        "POST", "/v1/agent_sessions/close", body={"agent_session_id": "x", "episode_id": EPISODE}, cookies=cookies
    )
    assert set(closed.json()) == {"agent_session_id", "agent_observations"}


async def test_one_who_speaks_the_protocol_is_told_the_last_calls_response_id(make_house: Any) -> None:
    house = await make_house([call("t", {})], [say("a")])
    await house.seed()
    reply = (await house.activate(ASK)).json()
    assert reply["terminal_response_id"] == reply["id"] == "resp-2"


@pytest.mark.promise("EP-13")
async def test_duplicate_grant_names_and_unknown_grants_are_refused(make_house: Any) -> None:
    house = await make_house([])
    direct = {"kind": "direct_http", "name": "env", "base_url": "http://127.0.0.1:1"}
    stdio = {"kind": "mcp", "name": "sh", "connection": {"transport": "stdio", "command": "sh"}}
    twice = await house.seed(tool_accesses=[direct, direct])
    assert twice.status == 422
    assert "two grants are named 'env'" in twice.json()["error"]["message"]
    assert (await house.seed(tool_accesses=[{**direct, "name": ".."}])).status == 422
    refused = await house.seed(tool_accesses=[stdio])
    assert (refused.json()["error"]["kind"], refused.json()["error"]["retryable"]) == ("grant_unavailable", False)
    second = await house.seed(tool_accesses=[direct, {**direct, "name": "other"}])
    assert second.json()["error"]["kind"] == "grant_unavailable"
    assert "env is it" in second.json()["error"]["message"]
    assert (await house.seed(tool_accesses=[direct, {**stdio, "required": False}])).status == 200
    gaps = (await house.close()).json()["agent_observations"]["gaps"]
    assert len(gaps) == 1
    assert "optional grant sh" in gaps[0]


async def test_a_seed_or_a_close_under_another_rollouts_path_is_a_conflict(make_house: Any) -> None:
    house = await make_house([])
    with rollout_context("run.0-1"):
        assert (await house.seed()).status == 409
    await house.seed()
    with rollout_context("run.0-1"):
        assert (await house.close()).status == 409
    assert len(house.server.sessions) == 1


async def test_stop_closes_the_sessions_that_are_left(make_house: Any) -> None:
    house = await make_house([])
    await house.seed()
    await house.server.app.stop()
    assert len(house.server.sessions) == 0


async def test_an_activation_that_arrives_while_its_session_closes_is_refused() -> None:
    activations = Activations()
    activations.stop()

    async def start(number: int) -> None:
        raise AssertionError("started")

    with pytest.raises(Conflict, match="being closed"):
        await activations.run(None, "digest", start)


class Leaves(Agent):
    """Ends the process, or says something that nobody can send."""

    def __init__(self, what: BaseException | None = None, partial: Any = None) -> None:
        self.what = what
        self.partial = partial
        self.entered = asyncio.Event()

    async def respond(self, activation: Activation) -> dict[str, Any]:
        if self.what is not None:
            raise self.what
        activation.partial = self.partial
        self.entered.set()
        await asyncio.Event().wait()
        return {}


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("what", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), BaseException("low")])
async def test_an_agent_that_ends_the_process_ends_its_activation_only(make_house: Any, what: BaseException) -> None:
    house = await make_house(agent=Leaves(what), allow_sessionless=True)
    await house.seed()
    for session in ("a1", None):
        info = (await house.activate(ASK, session=session)).error_info()
        assert (info.kind, info.retryable) == ("agent_failed", True)
        assert type(what).__name__ in info.message
    assert (await house.close()).json()["outcome"] == "closed"


def _leave() -> dict[str, Any]:
    sys.exit(3)


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize(("partial", "said"), [(_leave, "SystemExit: 3"), (lambda: {"output": [object()]}, "object")])
async def test_an_agent_that_cannot_say_what_it_had_is_closed_all_the_same(
    make_house: Any, partial: Any, said: str
) -> None:
    agent = Leaves(partial=partial)
    house = await make_house(agent=agent)
    await house.seed()
    running = asyncio.create_task(house.activate(ASK))
    await agent.entered.wait()
    closed = (await house.close()).json()
    assert closed["outcome"] == "closed"
    assert "partial_response" not in closed
    assert said in closed["agent_observations"]["gaps"][0]
    assert (await running).error_info().kind == "cancelled"


async def test_an_activation_of_a_session_ends_before_its_server_does(make_house: Any) -> None:
    gate = Gate([say("hello")])
    house = await make_house(gate)
    await house.seed()
    running = asyncio.create_task(house.activate(ASK))
    await gate.entered.wait()
    stopping = asyncio.create_task(house.server.app.stop())
    while house.server.app.not_ready() is None:  # noqa: ASYNC110  # no event says that a stop began
        await asyncio.sleep(0)
    gate.open.set()
    await stopping
    assert (await running).json()["output"] == [say("hello")]


class Lingers(Agent):
    """Takes its time to end when it is told to."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.stopped = asyncio.Event()
        self.go_on = asyncio.Event()

    async def respond(self, activation: Activation) -> dict[str, Any]:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()
            await self.go_on.wait()
        return {}


async def test_a_close_ends_before_its_server_does(make_house: Any) -> None:
    agent = Lingers()
    house = await make_house(agent=agent)
    await house.seed()
    running = asyncio.create_task(house.activate(ASK))
    await agent.entered.wait()
    closing = asyncio.create_task(house.close())
    await agent.stopped.wait()
    stopping = asyncio.create_task(house.server.app.stop())
    while house.server.app.not_ready() is None:  # noqa: ASYNC110  # no event says that a stop began
        await asyncio.sleep(0)
    agent.go_on.set()
    await stopping
    assert (await closing).json()["outcome"] == "closed"
    assert (await running).error_info().kind == "cancelled"


async def test_a_seed_ends_before_its_server_does(make_house: Any, tmp_path: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(PlainDirectory):
        async def create(self, spec: SandboxSpec) -> PlainSandbox:
            asked.set()
            await go_on.wait()
            return await super().create(spec)

    class Coder(Agent):
        sandbox = SandboxSpec()

    desk = SandboxDesk(Slow(tmp_path, name="box"))
    await desk.open()
    house = await make_house(agent=Coder(), own_sandbox=desk)
    seeding = asyncio.create_task(house.seed())
    await asked.wait()
    stopping = asyncio.create_task(house.server.app.stop())
    while house.server.app.not_ready() is None:  # noqa: ASYNC110  # no event says that a stop began
        await asyncio.sleep(0)
    go_on.set()
    await stopping
    await desk.close()
    assert (await seeding).status == 200
    assert len(house.server.sessions) == 0

"""Field cases A15, A16, A18, A20, A25, A27, A28 at the environment, agent and resources servers, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.http.app import Limits
from toprope.http.client import Client, Peer
from toprope.http.serve import serve
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, UpstreamRequest, completion, serving
from toprope.testing.upstream import error as upstream_error
from toprope.tools.spec import tool

KEY = b"k" * 32
SAID = {"object": "response", "id": "r", "status": "completed", "output": []}


class Raw:
    """A participant of others. `odd` maps (path, row number) to bytes sent instead of the usual reply."""

    def __init__(self) -> None:
        self.odd: dict[tuple[str, str], tuple[int, bytes, bool]] = {}
        self.cookies_seen: dict[str, str | None] = {}
        self.set_cookie: dict[str, str] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        _, _, key, path = scope["path"].split("/", 3)
        row = key.rpartition("-")[2]
        cookies = [value.decode() for name, value in scope["headers"] if name == b"cookie"]
        self.cookies_seen[path] = cookies[0] if cookies else None
        status, data, whole = self.odd.get((path, row)) or (200, self.usual(path, json.loads(body)), True)
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % (len(data) + (not whole)))]
        if path in self.set_cookie:
            fields.append((b"set-cookie", self.set_cookie[path].encode()))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": data, "more_body": not whole})

    def usual(self, path: str, body: Any) -> bytes:
        replies: dict[str, Callable[[], Any]] = {
            "seed_session": lambda: {"resources_session_id": body["resources_session_id"]},
            "v1/agent_sessions": lambda: {"agent_session_id": body["agent_session_id"]},
            "v1/responses": lambda: SAID,
            "v1/agent_sessions/close": lambda: {"agent_session_id": body["agent_session_id"]},
            "verify": lambda: {**body, "reward": 1.0},
            "close_session": lambda: {"resources_session_id": body["resources_session_id"]},
            "look": lambda: "seen",
        }
        return json.dumps(replies[path]()).encode()


class World:
    """Two raw participants on sockets under an environment server of ours."""

    def __init__(self, stack: AsyncExitStack, client: Client) -> None:
        self.stack = stack
        self.client = client
        self.resources = Raw()
        self.agent = Raw()

    async def environment(self, resources_url: str, agent_url: str, **options: Any) -> Peer:
        server = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=self.client.peer(resources_url, "resources"),
            agent=self.client.peer(agent_url, "agent"),
            **options,
        )
        bound = await serve(server.app)
        self.stack.push_async_callback(bound.close)
        return self.client.peer(bound.url, "environment")

    async def standard(self, **options: Any) -> Peer:
        urls = [await self.stack.enter_async_context(serving(part)) for part in (self.resources, self.agent)]
        return await self.environment(*urls, **options)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=2, transport_budget_s=1.0))
        yield World(stack, client)


async def run(peer: Peer, row: int, params: Any = None, data: Any = None) -> Any:
    task_input = {"responses_create_params": params or {"input": "x"}, "task_data": data or {}}
    task = {"task_id": {"taskset": "t", "task_id": str(row)}, "task_input": task_input}
    body = {"episode_id": {"rollout_id": f"run.0-{row}", "attempt": 0}, "task": task}
    return (await peer.request("POST", "/run", body=body)).json()


async def test_a15_each_bad_episode_costs_itself_and_no_sibling(world: World) -> None:
    world.agent.odd = {
        ("v1/responses", "5"): (500, b"engine room on fire", True),
        ("v1/responses", "6"): (200, b"not json", True),
        ("v1/responses", "7"): (200, b'{"output": [', False),
    }
    environment = await world.standard()
    outcomes = await asyncio.gather(*(run(environment, row) for row in range(8)))
    assert [row for row, outcome in enumerate(outcomes) if outcome["failure"] is None] == [0, 1, 2, 3, 4]
    assert {outcome["result"]["reward"] for outcome in outcomes[:5]} == {1.0}
    five, six, seven = (outcome["failure"] for outcome in outcomes[5:])
    assert (five["failure_kind"], five["upstream_status"], five["terminal"]) == ("agent_failed", 500, False)
    assert "engine room on fire" in five["failure_reason"]
    assert (six["failure_kind"], six["upstream_status"], six["terminal"]) == ("bad_reply", 200, True)
    assert "not json" in six["failure_reason"]
    assert (seven["failure_kind"], seven["delivery"], seven["terminal"]) == ("transport_dropped", "delivered", False)


@pytest.mark.promise("EP-17")
async def test_a16_trouble_behind_a_verdict_is_a_failure_without_a_reward(world: World) -> None:
    world.resources.odd = {
        ("verify", "2"): (503, b"sandbox never started", True),
        ("verify", "3"): (200, b'{"score": 0.0}', True),
    }
    environment = await world.standard()
    outcomes = [await run(environment, row) for row in range(4)]
    resources_url = await world.stack.enter_async_context(serving(world.resources))
    async with serving(world.agent) as gone:
        pass
    outcomes.append(await run(await world.environment(resources_url, gone), 4))
    assert [outcome["failure"] is None for outcome in outcomes] == [True, True, False, False, False]
    two, three, four = (outcome["failure"] for outcome in outcomes[2:])
    assert (two["failure_kind"], two["stage"], two["terminal"]) == ("verify_failed", "verification", False)
    assert "sandbox never started" in two["failure_reason"]
    assert (three["failure_kind"], three["terminal"]) == ("bad_reward", True)
    assert (four["failure_kind"], four["stage"], four["terminal"]) == ("transport_unreachable", "agent", False)
    assert not any("reward" in failure for failure in (two, three, four))


@pytest.mark.promise("EP-16")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a18_the_seeds_cookie_reaches_verify_though_the_tool_set_none(world: World, host: str) -> None:
    world.resources.set_cookie = {"seed_session": "s=1; Path=/", "close_session": "s=gone; Path=/"}
    world.agent.set_cookie = {"v1/agent_sessions": "s=agent; Path=/"}
    turns = iter(
        [
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "assistant", "content": "done"},
        ]
    )  # fmt: skip
    upstream = ScriptedUpstream(answer=lambda request: completion(next(turns)))
    base_url = await world.stack.enter_async_context(serving(upstream))
    engine = OpenAIEngine(client=world.client, base_url=f"{base_url}/v1", model="m")
    model = await serve(ModelServer(name="policy", engine=engine).app)
    agent = await serve(
        AgentServer(
            name="solver",
            agent=ToolLoop(),
            model=world.client.peer(model.url, "model"),
            client=world.client,
            signing_key=KEY,
        ).app
    )
    world.stack.push_async_callback(model.close)
    world.stack.push_async_callback(agent.close)
    resources_url = await world.stack.enter_async_context(serving(world.resources))
    environment = await world.environment(
        resources_url.replace("127.0.0.1", host), agent.url.replace("127.0.0.1", host), tools=["direct_http"]
    )
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    outcome = await run(environment, 0, {"input": "x", "tools": [look]})
    assert outcome["failure"] is None
    assert world.resources.cookies_seen == {
        "seed_session": None,
        "look": "s=1",
        "verify": "s=1",
        "close_session": "s=1",
    }


class Slots(Environment):
    """Three slots, and a seed that waits where the test says so."""

    def __init__(self) -> None:
        self.seeded = 0

    def seed(self, task: Any) -> str:
        self.seeded += 1
        return "slot"

    @tool
    def look(self, state: str) -> str:
        return state

    def verify(self, state: str, task: Any, response: Any) -> float:
        return 0.0


async def test_a20_lost_seed_replies_hold_no_slot_that_nobody_can_name(world: World) -> None:
    environment = Slots()
    server = ResourcesServer(name="slots", environment=environment, signing_key=KEY, max_sessions=3)
    bound = await serve(server.app)
    world.stack.push_async_callback(bound.close)
    peer = world.client.peer(bound.url, None)
    host, port = bound.url.removeprefix("http://").split(":")

    def seed(name: str) -> dict[str, Any]:
        return {
            "resources_session_id": name,
            "episode_id": {"rollout_id": "run.0-0", "attempt": 0},
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_data": {},
        }

    for name in ("a", "b", "c"):  # the request is sent, and the client is gone before it reads the answer
        data = json.dumps(seed(name)).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /seed_session HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        writer.write(head + data)
        await writer.drain()
        writer.close()
        again = await peer.request("POST", "/seed_session", body=seed(name))  # the same id: one session
        assert again.status == 200
    assert environment.seeded == 3
    full = await peer.request("POST", "/seed_session", body=seed("d"))
    assert (full.status, full.json()["error"]["kind"], full.json()["error"]["retryable"]) == (429, "capacity", True)
    assert "retry-after" in full.headers
    close = {"resources_session_id": "a", "episode_id": {"rollout_id": "run.0-0", "attempt": 0}}
    assert (await peer.request("POST", "/close_session", body=close)).status == 200
    assert (await peer.request("POST", "/seed_session", body=seed("d"))).status == 200


@pytest.mark.promise("EP-17")
@pytest.mark.parametrize("text", ["NaN", "Infinity", "null", '"0.5"', "true", "1e400"])
async def test_a25_a_reward_that_is_no_number_is_a_terminal_failure_that_names_it(world: World, text: str) -> None:
    world.resources.odd = {("verify", "0"): (200, f'{{"reward": {text}}}'.encode(), True)}
    failure = (await run(await world.standard(), 0))["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("bad_reward", "verification", True)
    assert f"the reward {text};" in failure["failure_reason"]


async def test_a25_a_nan_in_another_field_costs_the_verdict_too(world: World) -> None:
    world.resources.odd = {("verify", "0"): (200, b'{"reward": 1.0, "parts": [1.0, NaN]}', True)}
    failure = (await run(await world.standard(), 0))["failure"]
    assert (failure["failure_kind"], failure["terminal"]) == ("bad_reply", True)
    assert "NaN" in failure["failure_reason"]


@pytest.mark.parametrize("strict_upstream", [False, True])
async def test_a27_a_broken_tool_call_is_told_to_the_model_and_a_refusal_is_no_infrastructure_failure(
    world: World, strict_upstream: bool
) -> None:
    broken = '{"cmd": "ls'
    bodies: list[Any] = []

    def answer(request: UpstreamRequest) -> UpstreamReply:
        body = request.json()
        bodies.append(body)
        if len(bodies) == 1:
            function = {"name": "look", "arguments": broken}
            calls = [{"id": "c1", "type": "function", "function": function}]
            return completion({"role": "assistant", "content": None, "tool_calls": calls}, finish_reason="tool_calls")
        if strict_upstream:
            return upstream_error(400, "tool call arguments are not valid JSON")
        return completion({"role": "assistant", "content": "I will say it again."})

    upstream_url = await world.stack.enter_async_context(serving(ScriptedUpstream(answer=answer)))
    engine = OpenAIEngine(client=world.client, base_url=f"{upstream_url}/v1", model="m")
    model = await serve(ModelServer(name="policy", engine=engine).app)
    agent_server = AgentServer(
        name="solver",
        agent=ToolLoop(),
        model=world.client.peer(model.url, "model"),
        client=world.client,
        signing_key=KEY,
    )
    agent = await serve(agent_server.app)
    resources = await serve(ResourcesServer(name="slots", environment=Slots(), signing_key=KEY).app)
    for bound in (model, agent, resources):
        world.stack.push_async_callback(bound.close)
    environment = await world.environment(resources.url, agent.url, tools=["direct_http"])
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    outcome = await run(environment, 0, {"input": "x", "tools": [look]})
    history = bodies[1]["messages"]
    assert history[1]["tool_calls"][0]["function"]["arguments"] == broken
    assert "not valid JSON" in history[2]["content"]
    if strict_upstream:
        failure = outcome["failure"]
        told = (failure["failure_kind"], failure["terminal"], failure["stage"])
        assert told == ("solver:bad_tool_arguments", True, "agent")
        assert failure["upstream_status"] == 400
        assert "tool call arguments are not valid JSON" in failure["failure_reason"]
    else:
        output = outcome["result"]["response"]["output"]
        assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
        assert output[0]["arguments"] == broken


class Long(Environment):
    """The reward is the length of the answer in megabytes."""

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:
        return len(response["output"][0]["content"][0]["text"]) / 1e6


@pytest.mark.parametrize(("limit", "megabytes"), [(None, 60), (8_000_000, 9)])
async def test_a28_a_long_response_reaches_verify_up_to_the_limit_and_over_it_the_failure_names_the_limit(
    world: World, limit: int | None, megabytes: int
) -> None:
    text = {"type": "output_text", "text": "x" * (megabytes * 1_000_000), "annotations": []}
    item = {"type": "message", "role": "assistant", "content": [text]}
    world.agent.odd = {("v1/responses", "0"): (200, json.dumps({**SAID, "output": [item]}).encode(), True)}
    limits = None if limit is None else Limits(max_body_bytes=limit)
    resources = await serve(ResourcesServer(name="long", environment=Long(), signing_key=KEY, limits=limits).app)
    world.stack.push_async_callback(resources.close)
    agent = await world.stack.enter_async_context(serving(world.agent))
    outcome = await run(await world.environment(resources.url, agent), 0)
    if limit is None:
        assert outcome["result"]["reward"] == 60.0
        return
    failure = outcome["failure"]
    assert (failure["stage"], failure["terminal"], failure["upstream_status"]) == ("verification", True, 413)
    assert "8000000" in failure["failure_reason"].replace(",", "").replace(" ", "")

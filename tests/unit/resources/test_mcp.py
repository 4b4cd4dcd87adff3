"""The tools over MCP at the resources server: JSON-RPC in and out, sessions, limits, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from toprope.errors.kinds import Kind
from toprope.http.app import Limits
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply
from toprope.servers.resources import server as module
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

ACCEPT = {"accept": "application/json, text/event-stream"}
MODERN = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "hang"}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Slow(Environment):
    """A tool that never ends by itself, and a seed that counts what it gave and got back."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.given: list[Any] = []
        self.released: list[Any] = []

    def seed(self, task: dict[str, Any]) -> dict[str, Any]:
        state = dict(task)
        self.given.append(state)
        return state

    def session_tools(self, state: dict[str, Any], task: dict[str, Any]) -> Any:
        return task.get("tools", list(self.tools))

    @tool
    async def hang(self, state: Any) -> str:
        """Waits."""
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return "never"

    @tool
    def odd(self, state: Any) -> dict[str, Any]:
        return {"text": "\ud800", "n": 2**70}

    @tool
    def broken(self, state: Any, how: str) -> Any:
        if how == "raises":
            raise Wordless("a word of its own that is \ud800")
        if how == "exits":
            raise SystemExit(3)
        cycle: list[Any] = []
        cycle.append(cycle)
        returned = {"object": object(), "nan": {"a": float("nan")}, "cycle": cycle, "text": "a\ud800b"}
        return returned[how]

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:
        return 1.0

    def release(self, state: Any) -> None:
        self.released.append(state)


class Home:
    """A served `Slow` and a caller."""

    def __init__(self, server: ResourcesServer, environment: Slow, peer: Peer) -> None:
        self.server, self.environment, self.peer = server, environment, peer

    async def seed(self, session: str = "s1", **task: Any) -> Reply:
        body = {
            "resources_session_id": session,
            "episode_id": {"rollout_id": "r", "attempt": 0},
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_data": task,
        }
        return await self.peer.request("POST", "/seed_session", body=body)

    async def rpc(self, method: str, headers: dict[str, str], **params: Any) -> Reply:
        body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        return await self.peer.request("POST", "/mcp", body=body, headers={**ACCEPT, **headers})

    async def close(self, session: str = "s1") -> Reply:
        body = {"resources_session_id": session, "episode_id": {"rollout_id": "r", "attempt": 0}}
        return await self.peer.request("POST", "/close_session", body=body)


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    environment = Slow()
    server = ResourcesServer(
        name="slow",
        environment=environment,
        signing_key=b"k" * 32,
        mcp=True,
        limits=Limits(max_body_bytes=5_000_000),
    )
    async with Client(inline={"slow": server.app}, transport_attempts=1) as client:
        await server.app.start()
        yield Home(server, environment, client.peer("inline://slow", "resources"))
        await server.app.stop()


@pytest.mark.parametrize("modern", [False, True])
async def test_a_client_that_leaves_ends_its_tool_and_the_session_can_be_closed(home: Home, modern: bool) -> None:
    headers = {"x-toprope-tools": (await home.seed()).headers["x-toprope-tools"], **(MODERN if modern else {})}
    params = {"name": "hang", "arguments": {}, **({"_meta": META} if modern else {})}
    running = asyncio.create_task(home.rpc("tools/call", headers, **params))
    await home.environment.entered.wait()
    running.cancel()
    await home.environment.left.wait()
    assert (await home.close()).json()["outcome"] == "closed"
    assert home.environment.released == home.environment.given
    assert len(home.server.sessions) == 0


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("object", "it returned a object that JSON cannot carry"),
        ("nan", "$.a is nan"),
        ("cycle", "RecursionError"),
        ("raises", "Wordless (its text cannot be had: RuntimeError)"),
        ("exits", "SystemExit: 3"),
    ],
)
async def test_the_root_cause_of_a_broken_tool_is_told_over_mcp_as_over_http(
    home: Home, caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    named = {"x-toprope-session": "s1"}
    await home.seed()
    error = (await home.rpc("tools/call", named, name="broken", arguments={"how": how})).json()["error"]
    assert "tool broken" in error["message"]
    assert why in error["message"]
    assert (error["data"]["kind"], error["data"]["retryable"]) == (Kind.TOOL_UNAVAILABLE, True)
    plain = await home.peer.request("POST", "/broken", body={"how": how}, headers=named)
    assert plain.status == 500
    assert plain.json()["error"] == error["data"]
    of_ours = [record for record in caplog.records if record.name != "asyncio"]  # whose words are of earlier tests
    assert not [record for record in of_ours if record.exc_info or "Traceback" in record.getMessage()]


async def test_a_text_that_no_json_of_the_sdk_carries_is_told_with_a_mark_in_its_place(home: Home) -> None:
    await home.seed()
    reply = await home.rpc("tools/call", {"x-toprope-session": "s1"}, name="broken", arguments={"how": "text"})
    assert reply.json()["result"]["content"][0]["text"] == "a?b"


async def test_a_close_waits_for_no_tool_that_a_stopping_server_cut_off(home: Home) -> None:
    headers = {"x-toprope-tools": (await home.seed()).headers["x-toprope-tools"]}
    running = asyncio.create_task(home.rpc("tools/call", headers, name="hang", arguments={}))
    await home.environment.entered.wait()
    await home.server.app.stop(drain_s=0)
    reply = await running
    assert reply.status == 503
    assert home.environment.left.is_set()
    assert home.environment.released == home.environment.given


async def test_sessions_are_named_as_on_every_route(home: Home) -> None:
    seeded = await home.seed()
    cookie = {cookie.name: cookie.value for cookie in seeded.set_cookies}
    for headers, cookies in (
        ({"x-toprope-session": "s1"}, None),
        ({"x-toprope-tools": seeded.headers["x-toprope-tools"]}, None),
        ({}, cookie),
    ):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        reply = await home.peer.request("POST", "/mcp", body=body, headers={**ACCEPT, **headers}, cookies=cookies)
        assert [entry["name"] for entry in reply.json()["result"]["tools"]] == ["broken", "hang", "odd"]
    unnamed = await home.rpc("tools/list", {})
    assert (unnamed.status, unnamed.error_info().kind) == (422, Kind.BAD_REQUEST)
    lost = await home.rpc("tools/list", {"x-toprope-session": "other"})
    assert (lost.status, lost.error_info().kind) == (404, Kind.SESSION_LOST)


async def test_bodies_are_bounded_as_on_every_route_and_what_is_no_rpc_is_said_so(home: Home) -> None:
    named = {"x-toprope-session": "s1", **ACCEPT}
    await home.seed()
    large = await home.peer.request("POST", "/mcp", body=b" " * 5_000_001, headers=named)
    assert large.status == 413
    below = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"' + b" " * 4_500_000 + b"}"
    more = {**named, "content-type": "application/json"}
    assert (await home.peer.request("POST", "/mcp", body=below, headers=more)).json()["result"] == {}
    assert (await home.peer.request("POST", "/mcp", body=b"{", headers=more)).status == 400
    assert (await home.peer.request("GET", "/mcp", headers=named)).status == 405


async def test_a_result_is_the_same_text_as_over_http(home: Home) -> None:
    await home.seed()
    named = {"x-toprope-session": "s1"}
    direct = await home.peer.request("POST", "/odd", body={}, headers=named)
    over_mcp = await home.rpc("tools/call", named, name="odd")
    assert over_mcp.json()["result"]["content"] == [{"type": "text", "text": direct.text}]


async def test_a_seed_that_fails_after_the_state_was_made_gives_it_back(home: Home) -> None:
    failed = await home.seed(tools=["typo"])
    assert (failed.status, failed.error_info().kind) == (500, Kind.SEED_FAILED)
    broken = await home.seed("s2", tools=7)
    assert (broken.status, broken.error_info().kind) == (500, Kind.SEED_FAILED)
    assert home.environment.released == home.environment.given
    assert len(home.server.sessions) == 0


async def test_a_server_without_mcp_offers_none_and_has_no_route() -> None:
    server = ResourcesServer(name="plain", environment=Slow(), signing_key=b"k" * 32)
    async with Client(inline={"plain": server.app}) as client:
        await server.app.start()
        plain = Home(server, Slow(), client.peer("inline://plain", "resources"))
        seeded = await plain.seed()
        assert "resources_tools" not in seeded.json()
        assert (await plain.rpc("tools/list", {"x-toprope-session": "s1"})).status == 404
        await server.app.stop()


def test_mcp_without_its_extra_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(module.ConfigError) as caught:
        ResourcesServer(name="slow", environment=Slow(), signing_key=b"k" * 32, mcp=True)
    assert caught.value.message == f"slow: {module.MCP_MISSING}"

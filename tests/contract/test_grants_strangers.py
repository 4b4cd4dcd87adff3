"""An agent that others wrote, with an MCP client of its own, in one configuration with our resources server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toprope.http.client import Client
from toprope.launch.config import read_configuration
from toprope.launch.parts import build_parts
from toprope.launch.world import World

from .strangers import PREFIX, Running

TILL = "toprope.catalog.ledger:Ledger"
KEY = "the-servers-own-key"


class TheirAgent:
    """Seeded as NeMo Gym's agents are; it moves money over the MCP grant, then tries the other routes with it."""

    def __init__(self) -> None:
        self.grants: dict[str, list[dict[str, Any]]] = {}
        self.tried: dict[str, int] = {}
        self.said: list[str] = []

    def app(self) -> Any:
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/agent_sessions", self.seed, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/agent_sessions/close", self.close, methods=["POST"]),
        ]
        inner = Starlette(routes=routes)

        async def strip(scope: Any, receive: Any, send: Any) -> None:
            match = PREFIX.match(scope["path"]) if scope["type"] == "http" else None
            if match:
                scope = {**scope, "path": match[3], "raw_path": match[3].encode()}
            await inner(scope, receive, send)

        return strip

    async def health(self, request: Request) -> Response:
        return JSONResponse({})

    async def seed(self, request: Request) -> Response:
        asked = await request.json()
        self.grants[asked["agent_session_id"]] = asked["tool_accesses"]
        reply = JSONResponse({"agent_session_id": asked["agent_session_id"]})
        reply.set_cookie("session", asked["agent_session_id"])
        return reply

    async def respond(self, request: Request) -> Response:
        (grant,) = self.grants[request.cookies["session"]]
        url, headers = grant["connection"]["url"], grant["connection"]["headers"]
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            McpClient(streamable_http_client(url, http_client=http)) as mcp,
        ):
            names = [entry.name for entry in (await mcp.list_tools()).tools]
            result = await mcp.call_tool("deposit", {"account": "ann", "amount": 7})
            self.said = [*names, result.content[0].text]  # type: ignore[union-attr]
            with pytest.raises(MCPError):
                await mcp.call_tool("verify", {})
            for path in ("/verify", "/close_session", "/seed_session"):
                body = {"responses_create_params": {}, "response": {}, "accounts": {}, "goal": {"ann": 7}}
                reply = await http.post(url.removesuffix("/mcp") + path, content=json.dumps(body))
                self.tried[path] = reply.status_code
        return JSONResponse({"id": "resp-theirs", "object": "response", "status": "completed", "output": []})

    async def close(self, request: Request) -> Response:
        return JSONResponse({"agent_session_id": (await request.json())["agent_session_id"]})


@asynccontextmanager
async def world(servers: dict[str, Any], place: Path) -> AsyncIterator[World]:
    configuration = read_configuration({"servers": servers}, file="test.yaml", directory=place)
    client = Client()
    running = World(configuration, build_parts(configuration, client), client, workspace=None, capture=False)
    await running.start()
    try:
        yield running
    finally:
        await running.stop(drain_s=0)


@pytest.mark.promise("EP-13")
@pytest.mark.promise("EP-18")
@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("key", [None, KEY])
async def test_a_strangers_agent_uses_our_tools_over_mcp_and_can_do_nothing_else(
    tmp_path: Path, key: str | None
) -> None:
    theirs = TheirAgent()
    running = Running(theirs.app())
    servers = {
        "books": {"role": "resources", "use": TILL, **({} if key is None else {"api_key": key})},
        "harness": {"role": "agent", "url": running.url},
        "episode": {"role": "environment", "resources": "books", "agent": "harness", "tools": ["mcp"]},
    }
    body = {
        "episode_id": {"rollout_id": "r.0-0", "attempt": 0},
        "task": {
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_input": {
                "responses_create_params": {"input": "Put 7 into the account of ann."},
                "task_data": {"accounts": {"ann": 0}, "goal": {"ann": 7}},
            },
        },
    }
    try:
        async with world(servers, tmp_path) as home:
            reply = (await home.peer("episode").request("POST", "/run", body=body)).json()
    finally:
        running.stop()
    assert reply["failure"] is None, reply
    assert reply["result"]["reward"] == 1.0
    assert theirs.said == ["balance", "deposit", "transfer", "7"]
    assert set(theirs.tried.values()) == {403}, theirs.tried
    assert KEY not in json.dumps(theirs.grants)


async def test_a_keyed_strangers_server_that_offers_no_credential_is_not_granted(tmp_path: Path) -> None:
    async def seed(request: Request) -> Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        return JSONResponse({"resources_session_id": (await request.json())["resources_session_id"]})

    theirs = Running(Starlette(routes=[Route("/ng-rollout/{key}/{rest}", seed, methods=["POST"])]))
    servers = {
        "policy": {"role": "model", "engine": {"kind": "scripted"}},
        "books": {"role": "resources", "url": theirs.url, "api_key": KEY},
        "clerk": {"role": "agent", "use": "tool_loop", "model": "policy"},
        "episode": {"role": "environment", "resources": "books", "agent": "clerk", "tools": ["direct_http"]},
    }
    body = {
        "episode_id": {"rollout_id": "r.0-0", "attempt": 0},
        "task": {
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_input": {"responses_create_params": {"input": "go"}, "task_data": {}},
        },
    }
    try:
        async with world(servers, tmp_path) as home:
            reply = (await home.peer("episode").request("POST", "/run", body=body)).json()
    finally:
        theirs.stop()
    failure = reply["failure"]
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("seed", "grant_unavailable", True)
    assert "never given to an agent" in failure["failure_reason"]

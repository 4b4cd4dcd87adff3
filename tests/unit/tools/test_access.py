"""Grants opened and called: servers of others over real sockets, what is no text, what hangs, what clashes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, TextResourceContents

from toprope.errors.tree import BadRequest, TopropeError
from toprope.http.app import Route, build_app
from toprope.http.client import Client
from toprope.http.reply import json_reply
from toprope.http.request import Request
from toprope.protocol.grants import DirectHttpGrant, Grant, McpGrant, StreamableHttp
from toprope.tools import mcp as module
from toprope.tools.access import ToolAccess
from toprope.tools.outcome import ToolUnavailable

from ...contract.strangers import Running  # noqa: TID252 (tests are no package that could be named)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(transport_attempts=1) as client:
        yield client


def their_server() -> MCPServer:
    """A server as the SDK's users write them: with sessions, and streams for replies."""
    server = MCPServer("theirs")

    @server.tool()
    async def slowly(steps: int, ctx: Context) -> str:
        """Reports progress before it answers."""
        for step in range(steps):
            await ctx.report_progress(step, steps)
        return f"{steps} steps"

    @server.tool()
    def picture() -> Image:
        """Gives no text."""
        return Image(data=b"png", format="png")

    @server.tool()
    def several() -> list[Any]:
        """Gives text, and a resource with text."""
        inner = TextResourceContents(uri="note://1", text="from the resource")
        return ["first", EmbeddedResource(resource=inner)]

    @server.tool()
    def fails() -> str:
        """Raises."""
        raise ToolError("no such page")

    return server


@pytest.mark.promise("EP-13")
async def test_a_strangers_server_with_sessions_and_streams_is_used_like_ours(client: Client) -> None:
    running = Running(their_server().streamable_http_app(), lifespan="on")
    try:
        access = await ToolAccess.open([McpGrant("theirs", StreamableHttp(f"{running.url}/mcp"))], client)
        try:
            names = frozenset(entry["name"] for entry in access.offered([]))
            assert names == {"slowly", "picture", "several", "fails"}

            async def ask(name: str, arguments: str = "{}") -> tuple[str, bool]:
                result = await access.call(name, arguments, offered=names)
                return result.text, result.is_error

            assert await ask("slowly", '{"steps": 3}') == ("3 steps", False)
            size = len(base64.b64encode(b"png"))
            assert await ask("picture") == (f"[image, {size} characters of base64: this agent reads text only]", False)
            assert await ask("several") == ("first\nfrom the resource", False)
            text, is_error = await ask("fails")
            assert is_error
            assert "no such page" in text
            assert (await ask("slowly", '{"steps": "x"}'))[1]
            several = await asyncio.gather(*(ask("slowly", f'{{"steps": {n}}}') for n in range(20)))
            assert several == [(f"{n} steps", False) for n in range(20)]
        finally:
            await access.close()
        access = await ToolAccess.open([McpGrant("theirs", StreamableHttp(f"{running.url}/mcp"))], client)
    finally:
        running.stop()
    with pytest.raises(ToolUnavailable):
        await access.call("slowly", '{"steps": 1}', offered=frozenset({"slowly"}))
    await access.close()


async def test_a_server_that_never_says_what_it_has_is_given_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_S", 0.2)
    left = asyncio.Event()

    async def hang(request: Request) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    client.register("inline://hangs", build_app(name="hangs", role="resources", routes=[Route("POST", "/mcp", hang)]))
    with pytest.raises(TopropeError, match=r"did not say within 0\.2 s which tools it has") as caught:
        await ToolAccess.open([McpGrant("hangs", StreamableHttp("inline://hangs/mcp"))], client)
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)
    await left.wait()


@pytest.mark.parametrize(("status", "retryable"), [(401, False), (422, False), (404, True), (429, True), (503, True)])
async def test_whether_another_attempt_helps_is_what_the_servers_status_says(
    client: Client, status: int, retryable: bool
) -> None:
    async def refuse(request: Request) -> Any:
        return json_reply({"detail": "come back on Tuesday"}, status)

    client.register("inline://no", build_app(name="no", role="resources", routes=[Route("POST", "/mcp", refuse)]))
    with pytest.raises(TopropeError, match="come back on Tuesday") as caught:
        await ToolAccess.open([McpGrant("no", StreamableHttp("inline://no/mcp"))], client)
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", retryable)
    assert caught.value.upstream_status == status


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize(
    ("names", "said"), [(("a", "a"), "two grants are named 'a'"), (("-a",), "'-a'"), (("a b",), "'a b'"), (("",), "''")]
)
async def test_names_of_grants_are_plain_and_unique(client: Client, names: tuple[str, ...], said: str) -> None:
    grants: list[Grant] = [DirectHttpGrant(name, "http://127.0.0.1:1") for name in names]
    with pytest.raises(BadRequest, match=said):
        await ToolAccess.open(grants, client)


async def test_one_direct_grant_can_be_used_and_an_optional_second_is_a_gap(client: Client) -> None:
    one, two = DirectHttpGrant("one", "http://127.0.0.1:1"), DirectHttpGrant("two", "http://127.0.0.1:1")
    with pytest.raises(TopropeError, match="one direct_http grant can be used, and one is it"):
        await ToolAccess.open([one, two], client)
    optional = DirectHttpGrant("two", "http://127.0.0.1:1", required=False)
    access = await ToolAccess.open([one, optional], client)
    assert access.gaps == ["optional grant two: grant two: one direct_http grant can be used, and one is it"]
    assert access.reached("anything") == {"grant": "one", "transport": "direct_http"}


async def test_without_grants_nothing_is_offered_and_every_call_is_a_clean_error() -> None:
    access = ToolAccess()
    assert access.offered([{"type": "function", "name": "add"}]) == [{"type": "function", "name": "add"}]
    result = await access.call("add", "{}", offered=frozenset({"add"}))
    assert (result.is_error, result.text) == (True, "error: no tool named 'add' can be called; available: none")
    assert access.reached("add") == {}

"""Grants opened and called: servers of others over real sockets, what is no text, what hangs, what clashes."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
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
from toprope.tools import mcp_http
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


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("value", ["a\r\nX: 1", "\x00", "\ud83d"])
async def test_headers_and_cookies_that_cannot_be_sent_are_refused_at_the_seed(client: Client, value: str) -> None:
    url = "http://127.0.0.1:1"
    grants: list[Grant] = [
        DirectHttpGrant("a", url, headers={"x-key": value}),
        DirectHttpGrant("a", url, cookies={"x-key": value}),
        McpGrant("a", StreamableHttp(url, {"x-key": value})),
    ]
    for grant in grants:
        with pytest.raises(BadRequest, match=r"grant .a.: .*x-key") as caught:
            await ToolAccess.open([grant], client)
        assert value not in caught.value.message, "it may be a secret"


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


async def raw_server(reply: bytes) -> asyncio.Server:
    """Answers every connection with `reply`, whatever is asked, and closes it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (HEAD + b"content-length: 100\r\n\r\n" + b" " * 99, "peer closed connection"),
        (HEAD + b"content-length: 101\r\n\r\n" + b" " * 101, "longer than 100 bytes"),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", "compressed, which was not asked for"),
        (b"", "disconnected"),
        (b"no HTTP at all\r\n\r\n", "illegal status line"),
    ],
)
async def test_replies_that_are_cut_too_long_or_no_http_are_trouble_with_a_name(
    client: Client, monkeypatch: pytest.MonkeyPatch, reply: bytes, said: str
) -> None:
    monkeypatch.setattr(mcp_http, "MAX_REPLY_BYTES", 100)
    async with await raw_server(reply) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        with pytest.raises(TopropeError, match=said) as caught:
            await ToolAccess.open([McpGrant("raw", StreamableHttp(url))], client)
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)


@pytest.mark.parametrize("on_a_page", [20, 0])
async def test_a_listing_without_end_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, on_a_page: int
) -> None:
    monkeypatch.setattr(module, "MAX_TOOLS", 50)
    pages = 0

    async def answer(request: Request) -> Any:
        nonlocal pages
        asked = await request.json()
        if asked["method"] != "tools/list":
            versions = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "resultType": "complete"}
            told = {**versions, "serverInfo": {"name": "endless", "version": "1"}, "ttlMs": 0, "cacheScope": "private"}
            return json_reply({"jsonrpc": "2.0", "id": asked["id"], "result": told})
        pages += 1
        tools = [{"name": f"t{pages}-{n}", "inputSchema": {"type": "object"}} for n in range(on_a_page)]
        listed = {"tools": tools, "ttlMs": 0, "cacheScope": "private"}
        if pages < 100:  # where the bound is gone the test must end all the same
            listed["nextCursor"] = f"page {pages}"
        return json_reply({"jsonrpc": "2.0", "id": asked["id"], "result": {**listed, "resultType": "complete"}})

    app = build_app(name="endless", role="resources", routes=[Route("POST", "/mcp", answer)])
    client.register("inline://endless", app)
    with pytest.raises(TopropeError, match="it offers more than 50 tools"):
        await ToolAccess.open([McpGrant("endless", StreamableHttp("inline://endless/mcp"))], client)
    assert pages == (3 if on_a_page else 51)


def test_nothing_of_the_core_imports_the_sdk() -> None:
    names = "toprope, toprope.cli.app, toprope.launch.world, toprope.catalog.tool_loop, toprope.tools.access"
    program = f"import sys, {names}; print([name for name in sys.modules if name.split('.')[0] in ('mcp', 'httpx2')])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""An MCP server that breaks in the middle of a call: always trouble with a name, never text for the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from toprope.http.client import Client
from toprope.protocol.grants import McpGrant, StreamableHttp
from toprope.tools.access import ToolAccess
from toprope.tools.outcome import ToolUnavailable

HANDSHAKE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "breaks", "version": "1"},
}
TOOL = {"name": "add", "inputSchema": {"type": "object"}}
Fault = Callable[[Any], bytes]


def http(status: str, body: bytes, kind: str = "application/json", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def result(number: Any, value: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": value}).encode()


def error(number: Any, code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}).encode()


GOOD = {"content": [{"type": "text", "text": "5"}]}
STREAM = "text/event-stream"

FAULTS: dict[str, Fault] = {
    "dropped": lambda number: b"",
    "cut head": lambda number: b"HTTP/1.1 200 OK\r\ncontent-",
    "cut body": lambda number: http("200 OK", result(number, GOOD)[:-5], length=len(result(number, GOOD))),
    "cut stream": lambda number: http("200 OK", b"event: message\ndata: {", STREAM, length=500),
    "ended stream": lambda number: http("200 OK", b": ping\n\n", STREAM),
    "500": lambda number: http("500 Internal Server Error", b"stack trace with a secret", "text/plain"),
    "502 html": lambda number: http("502 Bad Gateway", b"<html>bad gateway</html>", "text/html"),
    "429": lambda number: http("429 Too Many Requests", b"{}"),
    "401": lambda number: http("401 Unauthorized", b"{}"),
    "404": lambda number: http("404 Not Found", b"{}"),
    "garbage": lambda number: http("200 OK", b"this is no JSON"),
    "garbage in the stream": lambda number: http("200 OK", b"event: message\ndata: nonsense\n\n", STREAM),
    "no result": lambda number: http("200 OK", result(number, {"content": "not a list"})),
    "wrong id": lambda number: http("200 OK", result("other", GOOD)),
    "no id": lambda number: http("200 OK", result(None, GOOD)),
    "an error without id": lambda number: http("200 OK", error(None, -32700, "Parse error")),
    "a list": lambda number: http("200 OK", b"[" + result(number, GOOD) + b"]"),
    "accepted": lambda number: http("202 Accepted", b""),
    "redirect": lambda number: b"HTTP/1.1 307 Moved\r\nlocation: http://127.0.0.1:9/mcp\r\ncontent-length: 0\r\n\r\n",
    "no kind": lambda number: http("200 OK", result(number, GOOD), "text/plain"),
    "internal error": lambda number: http("200 OK", error(number, -32603, "the database is gone")),
    "error of its own": lambda number: http("200 OK", error(number, -32001, "session expired")),
    "503 that blames the arguments": lambda number: http("503 Busy", error(number, -32602, "database connection lost")),
    "no such method": lambda number: http("200 OK", error(number, -32601, "Method not found")),
}


@asynccontextmanager
async def breaking(fault: Fault) -> AsyncIterator[str]:
    """A server that shakes hands and lists one tool; a call of it gets the bytes of `fault`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        asked = json.loads(await reader.readexactly(int(lines.get(b"content-length", b"0"))) or b"{}")
        number, method = asked.get("id"), asked.get("method")
        if method == "initialize":
            reply = http("200 OK", result(number, HANDSHAKE))
        elif method == "tools/list":
            reply = http("200 OK", result(number, {"tools": [TOOL]}))
        elif method == "tools/call":
            reply = fault(number)
        elif number is None:
            reply = http("202 Accepted", b"") if method else http("405 Method Not Allowed", b"")
        else:
            reply = http("200 OK", error(number, -32601, "Method not found"))
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


@asynccontextmanager
async def access_to(fault: Fault) -> AsyncIterator[ToolAccess]:
    async with breaking(fault) as url, Client(transport_attempts=1) as client:
        access = await ToolAccess.open([McpGrant("breaks", StreamableHttp(url))], client)
        try:
            yield access
        finally:
            await access.close()


async def test_the_server_is_fine_where_it_does_not_break() -> None:
    async with access_to(lambda number: http("200 OK", result(number, GOOD))) as access:
        assert (await access.call("add", "{}", offered=frozenset({"add"}))).text == "5"


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_in_the_middle_of_a_call_is_retryable_trouble(fault: str) -> None:
    async with access_to(FAULTS[fault]) as access:
        with pytest.raises(ToolUnavailable) as caught:
            async with asyncio.timeout(20):  # a call that no answer can reach would wait for ever
                await access.call("add", "{}", offered=frozenset({"add"}))
    assert (caught.value.kind, caught.value.status, caught.value.retryable) == ("tool_unavailable", 502, True)
    assert caught.value.delivery is not None
    assert "grant breaks" in caught.value.message


@pytest.mark.promise("EP-19")
async def test_what_the_server_says_of_the_arguments_is_for_the_model() -> None:
    for status in ("200 OK", "400 Bad Request"):
        fault = http(status, error(1, -32602, "n must be a number"))

        def answer(number: Any, reply: bytes = fault) -> bytes:
            return reply.replace(b'"id": 1', b'"id": %d' % number)

        async with access_to(answer) as access:
            told = await access.call("add", "{}", offered=frozenset({"add"}))
        assert (told.is_error, told.text) == (True, "error: n must be a number")

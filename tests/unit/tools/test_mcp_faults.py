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


def message(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode()


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
    "a number without end": lambda number: http("200 OK", result(number, GOOD)[:-1] + b', "n": ' + b"1" * 5_000 + b"}"),
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
    "401 that blames the arguments": lambda number: http("401 Unauthorized", error(number, -32602, "bad token")),
    "403 that blames the arguments": lambda number: http("403 Forbidden", error(number, -32602, "no licence")),
    "404 that blames the arguments": lambda number: http("404 Not Found", error(number, -32602, "no session")),
    "429 that blames the arguments": lambda number: http("429 Too Many", error(number, -32602, "slow down")),
    "400 of another call": lambda number: http("400 Bad Request", error("other", -32602, "n must be a number")),
    "a result that is a number": lambda number: http("200 OK", result(number, 5)),
    "a result that is null": lambda number: http("200 OK", result(number, None)),
    "a result and an error": lambda number: http("200 OK", message(id=number, result=GOOD, error={"code": 1})),
    "neither of them": lambda number: http("200 OK", message(id=number)),
    "version 1.0": lambda number: http("200 OK", message(jsonrpc="1.0", id=number, result=GOOD)),
    "no version": lambda number: http("200 OK", json.dumps({"id": number, "result": GOOD}).encode()),
    "the id as text": lambda number: http("200 OK", result(str(number), GOOD)),
    "the id as a fraction": lambda number: http("200 OK", result(float(number), GOOD)),
    "the id of the call before": lambda number: http("200 OK", result(number - 1, GOOD)),
    "a question with the same id": lambda number: http("200 OK", message(id=number, method="ping")),
    "a question": lambda number: http("200 OK", message(id="theirs", method="ping")),
    "a notification": lambda number: http("200 OK", message(method="notifications/message", params={"level": "info"})),
    "wrong id in capitals": lambda number: http("200 OK", result("other", GOOD), "Application/JSON"),
    "wrong id with a charset": lambda number: http("200 OK", result("other", GOOD), "application/json ; charset=utf-8"),
    "nearly the kind": lambda number: http("200 OK", result(number, GOOD), "application/jsonlines"),
}


def over_sse(fault: Fault) -> Fault:
    """The same bytes as the one event of a stream: cut where they were cut, under the same status."""

    def reply(number: Any) -> bytes:
        head, parted, body = fault(number).partition(b"\r\n\r\n")
        if not parted:
            return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nevent: message\ndata: " + head
        lines = [line for line in head.split(b"\r\n") if not line.startswith((b"content-type", b"content-length"))]
        kind = b"Text/Event-Stream ;charset=UTF-8" if b"Application/JSON" in head else b"text/event-stream"
        if b"text/plain" in head or b"jsonlines" in head:
            kind = b"text/event-streams"
        event = b"event: message\ndata: " + body.replace(b"\n", b"\ndata: ") + b"\n\n" if body else b""
        return b"\r\n".join([*lines, b"content-type: " + kind, b"", event])

    return reply


FAULTS |= {f"{name}, over SSE": over_sse(fault) for name, fault in FAULTS.items() if "stream" not in name}


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


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;x"])
@pytest.mark.parametrize("way", ["json", "sse"])
async def test_the_server_is_fine_where_it_does_not_break(kind: str, way: str) -> None:
    def fine(number: Any) -> bytes:
        return http("200 OK", result(number, GOOD), kind)

    async with access_to(fine if way == "json" else over_sse(fine)) as access:
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
@pytest.mark.parametrize("way", ["json", "sse"])
async def test_what_the_server_says_of_the_arguments_is_for_the_model(way: str) -> None:
    for status in ("200 OK", *(["400 Bad Request"] if way == "json" else [])):

        def answer(number: Any, status: str = status) -> bytes:
            return http(status, error(number, -32602, "n must be a number"))

        async with access_to(answer if way == "json" else over_sse(answer)) as access:
            told = await access.call("add", "{}", offered=frozenset({"add"}))
        assert (told.is_error, told.text) == (True, "error: n must be a number")


@pytest.mark.promise("EP-19")
async def test_a_call_after_a_fault_is_none_the_worse_for_it() -> None:
    replies = [FAULTS["wrong id, over SSE"], FAULTS["401 that blames the arguments"], FAULTS["a list"]]

    def answer(number: Any) -> bytes:
        return replies.pop(0)(number) if replies else http("200 OK", result(number, GOOD))

    async with access_to(answer) as access:
        for _ in range(3):
            with pytest.raises(ToolUnavailable):
                await access.call("add", "{}", offered=frozenset({"add"}))
        assert (await access.call("add", "{}", offered=frozenset({"add"}))).text == "5"

"""MCP servers over HTTP that stream, stall, flood, redirect and ask: real sockets, and how each call ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from toprope.errors.tree import TopropeError
from toprope.http.client import Client
from toprope.protocol.grants import McpGrant, StreamableHttp
from toprope.tools import mcp_http
from toprope.tools.access import ToolAccess
from toprope.tools.mcp_messages import Trouble
from toprope.tools.outcome import ToolResult, ToolUnavailable

from .test_mcp_faults import GOOD, HANDSHAKE, TOOL, error, http, message, result

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
LOG = message(method="notifications/message", params={"level": "info", "data": "x" * 60_000})


def event(data: bytes, end: bytes = b"\n", **fields: str) -> bytes:
    lines = [*(f"{name}: {value}".encode() for name, value in fields.items()), b"data: " + data, b""]
    return end.join([*lines, b""])


@dataclass
class Asked:
    """One request as the server read it. `gone` is set when whoever asked has hung up."""

    verb: str
    headers: Mapping[bytes, bytes]
    body: Any
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    number: Any = None

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hung_up(self) -> None:
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    async def flood(self, data: bytes) -> int:
        """Say it until nobody listens; returns how many bytes went out."""
        sent = 0
        with suppress(ConnectionError):
            while True:
                await self.say(data)
                sent += len(data)
        return sent


Answer = Callable[[Asked], Awaitable[None]]


@dataclass
class Server:
    """Shakes hands, lists one tool, and leaves the rest to `on`: by method, or by verb for what has none."""

    on: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.rstrip().split(b"\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
            body = json.loads(await reader.readexactly(int(headers.get(b"content-length", b"0"))) or b"null")
            asked = Asked(first.split()[0].decode(), headers, body, writer, reader)
            asked.number = body.get("id") if isinstance(body, dict) else None
            name = body.get("method", "answer") if isinstance(body, dict) else asked.verb
            self.asked.append(name)
            await self.on.get(name, self.otherwise)(asked)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def otherwise(self, asked: Asked) -> None:
        name = self.asked[-1]
        if name == "initialize":
            reply = http("200 OK", result(asked.number, HANDSHAKE)).replace(b"\r\n", b"\r\nmcp-session-id: s1\r\n", 1)
        elif name == "tools/list":
            reply = http("200 OK", result(asked.number, {"tools": [TOOL]}))
        elif asked.number is not None and name != "answer":
            reply = http("200 OK", error(asked.number, -32601, "Method not found"))
        else:
            reply = http("405 Method Not Allowed" if asked.verb == "GET" else "202 Accepted", b"")
        await asked.say(reply)


@asynccontextmanager
async def serving(**on: Answer) -> AsyncIterator[Server]:
    """Names of methods with `_` for `/`."""
    server = Server({name.replace("_", "/"): answer for name, answer in on.items()})
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
        yield server


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[ToolAccess]:
    async with Client(transport_attempts=1) as client:
        access = await ToolAccess.open([McpGrant("theirs", StreamableHttp(server.url))], client)
        try:
            yield access
        finally:
            await access.close()


async def call(access: ToolAccess) -> ToolResult:
    async with asyncio.timeout(30):  # where nobody says that the answer cannot come, it would wait for ever
        return await access.call("add", "{}", offered=frozenset({"add"}))


async def calls(access: ToolAccess, times: int) -> None:
    for _ in range(times):
        await call(access)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_that_stays_open_after_its_answer_is_left_at_once(end: bytes) -> None:
    left = asyncio.Event()

    async def talks(asked: Asked) -> None:
        log = message(method="notifications/message", params={"level": "info", "data": "started"})
        await asked.say(EVENTS + b": hello" + end + event(log, end) + event(b"", end, id="7"))
        await asked.say(event(result(asked.number, GOOD), end, event="message"))
        await asked.hung_up()
        left.set()

    async with serving(tools_call=talks) as server, opened(server) as access:
        assert (await call(access)).text == "5"
        async with asyncio.timeout(20):
            await left.wait()


async def test_the_first_answer_of_a_stream_is_the_answer() -> None:
    async def twice(asked: Asked) -> None:
        other = {"content": [{"type": "text", "text": "6"}]}
        await asked.say(EVENTS + event(result(asked.number, GOOD)) + event(result(asked.number, other)))

    async with serving(tools_call=twice) as server, opened(server) as access:
        assert [(await call(access)).text for _ in range(3)] == ["5"] * 3


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    ("flood", "why"),
    [
        (event(LOG), "more than 10000 messages or 67108864 bytes that answer no open request"),
        (event(b"x" * 60_000, event="progress"), "67108864 bytes that answer no open request"),
        (b": nothing yet" + b"." * 60_000 + b"\n", "longer than 3000000 bytes"),
        *((line * 5000, "more than 50000 lines") for line in (b":\n", b"id: 1\n\n", b"data:\n", b"event: e\n", b"\n")),
        (b"data: " + b"x" * 60_000, "one line of the stream is longer than 1000000 bytes"),
        (b"data: " + b"x" * 60_000 + b"\n", "one event of the stream is larger than the limit of 1000000 bytes"),
    ],
)
async def test_a_stream_without_end_is_trouble_and_is_not_read_to_the_end(
    flood: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "open request" not in why:
        monkeypatch.setattr(mcp_http, "MAX_REPLY_BYTES", 3_000_000)
        monkeypatch.setattr(mcp_http, "MAX_EVENT_BYTES", 1_000_000)
        monkeypatch.setattr(mcp_http, "MAX_LINES", 50_000)
    sent: list[int] = []
    over = asyncio.Event()

    async def floods(asked: Asked) -> None:
        await asked.say(EVENTS)
        sent.append(await asked.flood(flood))
        over.set()

    async with serving(tools_call=floods) as server, opened(server) as access:
        with pytest.raises(ToolUnavailable, match=why) as caught:
            await call(access)
        async with asyncio.timeout(20):
            await over.wait()
    assert caught.value.retryable
    assert sent[0] < 100 * 2**20
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in loud if record.name != "asyncio"] == []  # its words are of what earlier tests left


async def test_what_a_server_asks_in_the_middle_of_a_call_is_answered() -> None:
    told: dict[str, Any] = {}
    all_told = asyncio.Event()
    asks = ("ping", "sampling/createMessage", "elicitation/create", "roots/list")

    async def answered(asked: Asked) -> None:
        told[asked.number] = "result" if "result" in asked.body else "error"
        if len(told) == len(asks):
            all_told.set()
        await asked.say(http("202 Accepted", b""))

    async def asking(asked: Asked) -> None:
        given = {"messages": [], "maxTokens": 1, "message": "who?"}
        questions = [message(id=f"q{number}", method=name, params=given) for number, name in enumerate(asks)]
        await asked.say(EVENTS + b"".join(event(question) for question in questions))
        await all_told.wait()
        await asked.say(event(result(asked.number, GOOD)))

    async with serving(tools_call=asking, answer=answered) as server, opened(server) as access:
        assert (await call(access)).text == "5"
    assert told == {"q0": "result", "q1": "error", "q2": "error", "q3": "error"}


@pytest.mark.promise("EP-19")
async def test_who_does_not_take_an_answer_to_its_own_question_does_not_hold_the_next_call_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_http, "ASIDE_S", 0.05)

    async def asking(asked: Asked) -> None:
        await asked.say(EVENTS + event(message(id="q", method="ping")) + event(result(asked.number, GOOD)))

    async def deaf(asked: Asked) -> None:
        await asked.hung_up()

    async with serving(tools_call=asking, answer=deaf) as server, opened(server) as access:
        with pytest.raises(ToolUnavailable, match=r"did not take within 0\.05 s what was no question"):
            await calls(access, 100)


async def test_who_does_not_take_the_end_of_the_handshake_is_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "ASIDE_S", 0.05)

    async def deaf(asked: Asked) -> None:
        await asked.hung_up()

    async with serving(notifications_initialized=deaf) as server:
        with pytest.raises(TopropeError, match="did not take within") as caught:
            async with asyncio.timeout(20), opened(server):
                raise AssertionError("it opened")
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
@pytest.mark.parametrize("status", ["202 Accepted", "307 Moved", "400 Bad Request", "401 Unauthorized", "500 Broken"])
async def test_a_refusal_whose_body_never_ends_is_a_refusal(
    status: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_http, "ASIDE_S", 0.05)

    async def stalls(asked: Asked) -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: 900\r\nlocation: http://127.0.0.1:9/\r\n"
        await asked.say(head.encode() + b"\r\n{")
        await asked.hung_up()

    async with serving(tools_call=stalls) as server, opened(server) as access:
        with pytest.raises(ToolUnavailable) as caught:
            await call(access)
    assert caught.value.upstream_status == (int(status[:3]) if status[0] in "45" else None)


async def test_a_redirect_that_goes_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def around(asked: Asked) -> None:
        await asked.say(http("307 Moved", b"").replace(b"\r\n", b"\r\nlocation: /mcp\r\n", 1))

    async with serving(tools_call=around) as server, opened(server) as access:
        with pytest.raises(ToolUnavailable, match="Redirect to"):
            await call(access)
        assert server.asked.count("tools/call") < 30


@pytest.mark.parametrize("mine", [True, False])
async def test_a_stream_that_breaks_off_is_come_back_to_for_its_own_answer_only(mine: bool) -> None:
    numbers: list[Any] = []

    async def begins(asked: Asked) -> None:
        numbers.append(asked.number)
        await asked.say(EVENTS + b"retry: 86400000\n" + event(b"", id="e1", retry="86400000"))

    async def goes_on(asked: Asked) -> None:
        if b"last-event-id" not in asked.headers:
            await asked.say(http("405 Method Not Allowed", b""))
            return
        assert asked.headers[b"last-event-id"] == b"e1"
        await asked.say(EVENTS + event(result(numbers[-1] if mine else numbers[-1] - 1, GOOD)))

    async with serving(tools_call=begins, GET=goes_on) as server, opened(server) as access:
        if mine:
            assert (await call(access)).text == "5"
            return
        with pytest.raises(ToolUnavailable, match=r"answers no request of id \d"):
            await call(access)


@pytest.mark.promise("EP-19")
async def test_a_stream_that_breaks_off_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_RESUMES", 1)

    async def begins(asked: Asked) -> None:
        await asked.say(EVENTS + event(b"", id="e1"))

    async with serving(tools_call=begins, GET=begins) as server, opened(server) as access:
        with pytest.raises(ToolUnavailable, match="its stream ended 1 times without an answer"):
            await call(access)


async def test_answers_on_a_stream_that_nobody_asked_on_are_no_answers() -> None:
    there, said = asyncio.Event(), asyncio.Event()
    numbers: list[Any] = []

    async def aside(asked: Asked) -> None:
        await asked.say(EVENTS)
        await there.wait()
        forged = {"content": [{"type": "text", "text": "forged"}]}
        await asked.say(event(result(numbers[-1], forged)))
        await asked.hung_up()
        said.set()

    async def answers(asked: Asked) -> None:
        numbers.append(asked.number)
        there.set()
        await said.wait()
        await asked.say(http("200 OK", result(asked.number, GOOD)))

    async with serving(tools_call=answers, GET=aside) as server, opened(server) as access:
        assert (await call(access)).text == "5"


@pytest.mark.parametrize(("end", "blank"), [(b"\n", b"\n"), (b"\r\n", b"\r\n"), (b"\r", b"\r"), (b"\r\n", b"\n")])
async def test_a_stream_says_the_same_however_it_is_cut(end: bytes, blank: bytes) -> None:
    log = message(method="notifications/message", params={"level": "info", "data": "ä\u2028"})
    pretty = json.dumps(json.loads(result(3, GOOD)), indent=1).encode().replace(b"\n", end + b"data: ")
    whole = b": hello" + end + b"retry: 9" + end + event(log, end, id="4") + event(pretty, end, event="message") + b"x"
    whole = whole.replace(end + end, end + blank)
    expected = b"id: 4\n\ndata: " + log + b"\n\ndata: " + b" ".join(pretty.split(end + b"data: ")) + b"\n\n"

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    request = httpx2.Request("POST", "http://theirs/mcp")
    for size in range(1, len(whole) + 1):
        reply = httpx2.Response(200, content=pieces(size))
        events = mcp_http._Events(request, reply, mcp_http._Question(3), Trouble("theirs"), {})
        assert b"".join([piece async for piece in events]) == expected


@pytest.mark.parametrize("way", ["json", "sse"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "pattern": "^(a+)+$"}, {"anyOf": [{"allOf": [{"type": "integer"}]}]}, {"type": "integer"}],
    ids=["pattern", "choices", "plain"],
)
async def test_no_result_is_checked_against_a_schema_of_the_servers(way: str, schema: dict[str, Any]) -> None:
    listing = {"tools": [{**TOOL, "outputSchema": {"type": "object", "properties": {"n": schema}}}]}

    async def lists(asked: Asked) -> None:
        reply = result(asked.number, listing)
        await asked.say(http("200 OK", reply) if way == "json" else EVENTS + event(reply))

    async def answers(asked: Asked) -> None:
        await asked.say(http("200 OK", result(asked.number, {**GOOD, "structuredContent": {"n": "b"}})))

    async with serving(tools_list=lists, tools_call=answers) as server, opened(server) as access:
        assert (await call(access)).text == "5"

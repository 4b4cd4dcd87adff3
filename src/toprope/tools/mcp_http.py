"""MCP over HTTP, over the network or to a server of this process, with each reply judged before the SDK has it.

The SDK takes whatever a stream answers for the answer to its question, goes on waiting for one that a JSON reply does
not give, reads without bound, and comes back to a broken stream when its server says. Here a reply that is no answer
fails at once, whichever way it comes. Left to others: what a message is (`mcp_messages`), what is said (`mcp`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp.types import JSONRPCMessage

from toprope.canonical import json
from toprope.errors.body import read_error_body, shorten
from toprope.errors.kinds import Delivery
from toprope.errors.tree import TopropeError
from toprope.http.peer import MAX_REPLY_BYTES
from toprope.protocol.grants import StreamableHttp
from toprope.tools.mcp_messages import Trouble, Unasked, Unfit, check_answer, is_answer, passed_on, read_message, shown
from toprope.wire.sse import SseEvent, SseReader, SseTooLarge

if TYPE_CHECKING:
    from toprope.http.client import Client

MAX_EVENT_BYTES = 64 * 2**20
"""Of one event of a stream; all of the stream has the bound of every reply, `MAX_REPLY_BYTES`."""

MAX_LINES = 1_000_000
"""Of one stream of events, comments and all: a line costs some microseconds, however little it says."""

MAX_ERROR_BYTES = 2**20
"""Of a reply that is no answer, for its words."""

ASIDE_S = 10.0
"""Seconds for the rest of a reply that is no answer, and for what a server says to a message that asks for none."""

MAX_RESUMES = 300
"""Times that the answer to one question is asked for again over a new stream, a second after the last one ended."""

_TROUBLE = frozenset({401, 403, 404, 407, 408, 425, 429})
_BODILESS = ("content-encoding", "content-length", "transfer-encoding")
_JSON, _EVENTS = "application/json", "text/event-stream"


@asynccontextmanager
async def streamable_http(connection: StreamableHttp, client: Client, trouble: Trouble) -> AsyncIterator[Any]:
    """The streams of a session at the connection's URL; `trouble` is told of every failure."""
    inline = connection.url.startswith("inline://")
    secure = connection.url.startswith("https:")  # to load the authorities takes 0.1 s, and plain HTTP asks for none
    below = _Inline(client) if inline else httpx2.AsyncHTTPTransport(retries=2, verify=secure)
    # The SDK knows no inline servers: it is given a name of the same form, and what is below it the real one.
    url = "http" + connection.url.removeprefix("inline") if inline else connection.url
    async with (
        httpx2.AsyncClient(
            transport=_Watched(below, trouble),
            headers={"accept-encoding": "identity", **connection.headers},
            timeout=httpx2.Timeout(None, connect=5.0),
            trust_env=False,
        ) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=2 * MAX_EVENT_BYTES) as streams,
    ):
        yield streams


class _Watched(httpx2.AsyncBaseTransport):
    """Notes each failure, and gives the SDK a 503 for a transport's, so that it ends the call and not everything."""

    def __init__(self, below: httpx2.AsyncBaseTransport, trouble: Trouble) -> None:
        self._below = below
        self._trouble = trouble
        self._resumable: dict[str, _Question] = {}  # by the ids of the events that their streams had

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        question = self._question_of(request, await request.aread())
        try:
            if self._trouble.ended and request.method == "POST":
                raise Unfit(self._trouble.ended)
            if question is None and request.method == "POST":
                # The SDK says one thing after the other: what is no question must not keep the next one waiting.
                with anyio.fail_after(ASIDE_S):
                    reply = await self._below.handle_async_request(request)
                    return await _rest(reply, request, read=_kind_of(reply) != _EVENTS)
            reply = await self._below.handle_async_request(request)
            return await self._judged(reply, request, question)
        except (httpx2.TransportError, TopropeError, Unfit, TimeoutError) as error:
            return self._failed(request, error, question)

    def _question_of(self, request: httpx2.Request, body: bytes) -> _Question | None:
        """What the request asks; None for one that no answer is due to."""
        if request.method == "GET":
            return self._resumable.get(request.headers.get("last-event-id", ""))
        said = json.loads(body) if body else None
        if isinstance(said, dict) and "id" in said and "method" in said:
            return _Question(said["id"])
        return None

    async def _judged(
        self, reply: httpx2.Response, request: httpx2.Request, question: _Question | None
    ) -> httpx2.Response:
        if reply.headers.get("content-encoding", "identity") != "identity":
            await reply.aclose()
            raise httpx2.RemoteProtocolError("the reply is compressed, which was not asked for")
        kind = _kind_of(reply)
        if reply.status_code >= 300 or reply.status_code == 202:
            return self._refused(await _rest(reply, request), request, question)
        if kind == _EVENTS and (question is not None or request.method == "GET"):
            return _with(reply, request, kind, stream=_Events(request, reply, question, self._trouble, self._resumable))
        if question is None or request.method == "GET":
            return await _rest(reply, request)
        if kind != _JSON:
            await reply.aclose()
            raise Unfit(f"the reply has the content type {kind!r}; accepted: {_JSON}, {_EVENTS}")
        body = await _whole(reply)
        message = read_message(body)
        check_answer(question.number, message, body)
        return _with(reply, request, kind, content=passed_on(message, body))

    def _refused(self, reply: httpx2.Response, request: httpx2.Request, question: _Question | None) -> httpx2.Response:
        """The reply, noted if it is an error; its body is left to the SDK only where it can be about the question."""
        status = reply.status_code
        if status < 400 or question is None or request.method != "POST":
            return reply
        told = _json_of(reply)
        info = read_error_body(status, told, shorten(reply.text, 500))
        self._trouble.text = f"{request.url} answered {status}: {info.message}"
        self._trouble.status, self._trouble.delivery = status, Delivery.DELIVERED
        number = told.get("id") if isinstance(told, dict) else None
        if status >= 500 or status in _TROUBLE or number not in (None, question.number):
            return httpx2.Response(status, request=request)
        return reply

    def _failed(self, request: httpx2.Request, error: Exception, question: _Question | None) -> httpx2.Response:
        if request.method != "POST":
            pass  # a stream that the SDK opens by itself
        elif question is not None:
            self._note(request, error)
        elif isinstance(error, TimeoutError):
            self._trouble.end(f"{request.url} did not take within {ASIDE_S:g} s what was no question")
        return httpx2.Response(503, request=request)

    def _note(self, request: httpx2.Request, error: Exception) -> None:
        if isinstance(error, TopropeError):
            self._trouble.text, self._trouble.delivery = error.message, error.delivery
            return
        self._trouble.text = self._trouble.ended or f"{request.url}: {error or type(error).__name__}"
        if isinstance(error, Unfit):
            self._trouble.delivery = Delivery.DELIVERED
        elif isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
            self._trouble.delivery = Delivery.NOT_SENT
        else:
            self._trouble.delivery = Delivery.POSSIBLY_DELIVERED

    async def aclose(self) -> None:
        await self._below.aclose()


class _Question:
    """A request that an answer is due to, and how often its answer was asked for again."""

    def __init__(self, number: Any) -> None:
        self.number = number
        self.resumes = -1  # the first stream is none
        self._mark: str | None = None

    def mark_at(self, mark: str, resumable: dict[str, _Question]) -> None:
        """The stream got as far as `mark`: who comes back with it asks this question."""
        self.forget_mark(resumable)
        self._mark = mark
        resumable[mark] = self

    def forget_mark(self, resumable: dict[str, _Question]) -> None:
        """Nobody comes back with it."""
        if self._mark is not None and resumable.get(self._mark) is self:
            del resumable[self._mark]


class _Events(httpx2.AsyncByteStream):
    """A stream of events, each passed on when it was read and is in order; ends after the answer.

    The server's word on when to come back (`retry`) is not among them: the SDK would sleep that long, and days are
    possible.
    A stream that belongs to no question may have no answers. Raises `httpx2.SSEError`, upon which the SDK does not
    come back.
    """

    def __init__(
        self,
        request: httpx2.Request,
        reply: httpx2.Response,
        question: _Question | None,
        trouble: Trouble,
        resumable: dict[str, _Question],
    ) -> None:
        self._url = request.url
        self._reply = reply
        self._question = question
        self._trouble = trouble
        self._resumable = resumable
        self._reader = SseReader(MAX_EVENT_BYTES)
        self._unasked = Unasked()
        self._lines = 0
        self._answered = False
        if question is not None:
            question.resumes += 1

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            if self._question is not None and self._question.resumes > MAX_RESUMES:
                raise Unfit(f"its stream ended {MAX_RESUMES} times without an answer")
            async for lines in _lines_of(_pieces_of(self._reply)):
                yield self._checked(lines)
                if self._answered:
                    return
        except (Unfit, SseTooLarge) as error:
            why = f"{self._url}: {error}"
            if self._question is not None:
                self._trouble.text, self._trouble.delivery = why, Delivery.DELIVERED
            raise httpx2.SSEError(why) from error

    def _checked(self, lines: list[bytes]) -> bytes:
        """What the SDK gets of these lines: the messages that they complete, and ids to come back with."""
        passed: list[bytes] = []
        self._lines += len(lines)
        if self._lines > MAX_LINES:
            raise Unfit(f"the stream has more than {MAX_LINES} lines")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"id" and self._question is not None:
                mark = value.removeprefix(b" ")
                self._question.mark_at(mark.decode("utf-8", "replace"), self._resumable)
                passed.append(b"id: " + mark + b"\n\n")
            for event in self._reader.feed(line + b"\n"):
                message = self._message_of(event)
                if message is not None:
                    # One line: where strict JSON has a line end, it is a space between two tokens.
                    passed.append(b"data: " + passed_on(message, event.data).replace(b"\n", b" ") + b"\n\n")
                if self._answered:
                    return b"".join(passed)
        return b"".join(passed)

    def _message_of(self, event: SseEvent) -> JSONRPCMessage | None:
        message = read_message(event.data) if event.event in (None, "", "message") and event.data else None
        if message is None or not is_answer(message):
            self._unasked.add(len(event.data))
        elif self._question is None:
            raise Unfit(f"an answer came where nothing was asked: {shown(event.data)}")
        else:
            check_answer(self._question.number, message, event.data)
            self._answered = True
            self._question.forget_mark(self._resumable)
        return message

    async def aclose(self) -> None:
        await self._reply.aclose()


class _Inline(httpx2.AsyncBaseTransport):
    """HTTP of the SDK, sent to a server of this process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        peer = self._client.peer(f"inline://{request.url.host}", "resources")
        headers = {name: value for name, value in request.headers.items() if name not in (*_BODILESS, "host")}
        body = await request.aread()
        target = request.url.raw_path.decode("ascii")
        reply = await peer.request(request.method, target, body=body or None, headers=headers)
        kept = [(name, value) for name, value in reply.headers.items() if name.lower() not in _BODILESS]
        return httpx2.Response(reply.status, headers=kept, content=reply.body, request=request)


# -- bodies ------------------------------------------------------------------------------------------------------


async def _pieces_of(reply: httpx2.Response) -> AsyncIterator[bytes]:
    """The body as it comes, within the bound that every peer's has. Raises `Unfit` beyond it."""
    if reply.is_stream_consumed:  # a server of this process: whole, and bounded, already
        yield reply.content
        return
    size = 0
    async for piece in reply.aiter_raw():
        size += len(piece)
        if size > MAX_REPLY_BYTES:
            raise Unfit(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
        yield piece


async def _whole(reply: httpx2.Response) -> bytes:
    try:
        return b"".join([piece async for piece in _pieces_of(reply)])
    finally:
        await reply.aclose()


async def _rest(reply: httpx2.Response, request: httpx2.Request, *, read: bool = True) -> httpx2.Response:
    """The reply, which is no answer, with what of its body comes in time."""
    pieces: list[bytes] = []
    size = 0
    with anyio.move_on_after(ASIDE_S if read else 0), suppress(httpx2.TransportError, Unfit):
        async for piece in _pieces_of(reply):
            pieces.append(piece[: MAX_ERROR_BYTES - size])
            size += len(pieces[-1])
            if size >= MAX_ERROR_BYTES:
                break
    await reply.aclose()
    return _with(reply, request, reply.headers.get("content-type", ""), content=b"".join(pieces))


async def _lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The lines that are complete, whichever way they end. Raises `SseTooLarge`."""
    held: list[bytes] = []
    size, after_cr = 0, False
    async for piece in pieces:
        if after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the rest of a line end that was cut
            after_cr = False
        if not piece:
            continue
        after_cr = piece.endswith(b"\r")
        held.append(piece)
        size += len(piece)
        if b"\n" in piece or b"\r" in piece:
            *lines, last = b"".join(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            held, size = [last], len(last)
            yield lines
        elif size > MAX_EVENT_BYTES:
            raise SseTooLarge(f"one line of the stream is longer than {MAX_EVENT_BYTES} bytes")


def _with(reply: httpx2.Response, request: httpx2.Request, kind: str, **body: Any) -> httpx2.Response:
    """The reply with another body, said to be of `kind` without parameters: text of MCP is UTF-8."""
    kept = [
        (name, value) for name, value in reply.headers.multi_items() if name.lower() not in (*_BODILESS, "content-type")
    ]
    return httpx2.Response(reply.status_code, headers=[*kept, ("content-type", kind)], request=request, **body)


def _kind_of(reply: httpx2.Response) -> str:
    return str(reply.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _json_of(reply: httpx2.Response) -> Any:
    try:
        return json.loads(reply.content)
    except json.NotJson:
        return None

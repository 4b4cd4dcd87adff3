"""An `mcp` grant as an agent uses it, through the official SDK: opened, listed, called, closed.

    streamable_http   over the network, or to a server of this process (`inline://`)
    stdio             a program of this host, which the agent's own configuration must list

A connection of the SDK belongs to the task that opened it, so each grant has a task of its own. A 4xx or 5xx, a lost
connection and an error of the protocol end the activation; what a tool itself says, its errors too, is for the model.
Needs the extra `toprope[mcp]`; imported only where a grant is one. Left to others: which grants there are (`access`),
programs (`mcp_stdio`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND, CallToolResult, Implementation, TextContent

from toprope.canonical import json
from toprope.errors.body import read_error_body, shorten
from toprope.errors.kinds import Delivery
from toprope.errors.tree import TopropeError
from toprope.http.peer import MAX_REPLY_BYTES
from toprope.protocol.grants import McpGrant, Stdio, StreamableHttp
from toprope.tools.mcp_stdio import Trouble, stdio
from toprope.tools.outcome import GrantUnavailable, ToolResult, ToolUnavailable

if TYPE_CHECKING:
    from mcp.client import Transport

    from toprope.http.client import Client

log = logging.getLogger("toprope.tools")

T = TypeVar("T")

OPEN_S = 30.0
"""Seconds that a server gets to say which tools it has."""

LEAVE_S = 2.0
"""Seconds that a server elsewhere gets to hear that its session ends; then it is left without a word."""

END_S = 8.0
"""Seconds that a program gets to end: the SDK waits 2 s each for a closed pipe, SIGTERM and SIGKILL."""

MAX_TOOLS = 1000
"""Tools of one server, at most: a listing goes on for as long as the server says so."""

_CALLABLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NEVER = (METHOD_NOT_FOUND, INVALID_PARAMS)  # of the handshake or the listing: the same question gets the same answer
_ME = Implementation(name="toprope", version="1")
_BODILESS = ("content-encoding", "content-length", "transfer-encoding")


class McpTools:
    """The tools behind one grant; made by `open_mcp`. `specs` are entries for `tools` of a Responses request.

    `gaps` names what the server offers and no model can call.
    """

    def __init__(self, grant: McpGrant) -> None:
        self.name = grant.name
        self.transport = "mcp/" + ("stdio" if isinstance(grant.connection, Stdio) else "streamable_http")
        self.specs: tuple[dict[str, Any], ...] = ()
        self.gaps: list[str] = []
        self._client: McpClient | None = None
        self._trouble = Trouble()
        self._leave = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call the tool. Raises `ToolUnavailable` where what came back is not the tool's own word."""
        assert self._client is not None
        self._trouble.clear()
        try:
            result = await self._alive(self._client.call_tool(name, arguments))
        except MCPError as error:
            # A name or arguments that it does not take: the model's to mend. A server error that says so is none.
            if error.code == INVALID_PARAMS and not _is_trouble(self._trouble.status):
                return ToolResult(f"error: {error.message}", is_error=True)
            answered = None if error.code == CONNECTION_CLOSED else Delivery.DELIVERED
            raise self._unavailable(name, error.message, answered) from error
        except (RuntimeError, ValueError, OSError, httpx2.HTTPError) as error:
            raise self._unavailable(name, f"{type(error).__name__}: {error}") from error
        return ToolResult(_text_of(result), is_error=bool(result.is_error))

    async def close(self) -> None:
        """On return the connection is gone, and with it a program that was started for it and all its children."""
        self._leave.set()
        if self._owner is None:
            return
        _, late = await asyncio.wait({self._owner}, timeout=END_S if self.transport == "mcp/stdio" else LEAVE_S)
        if late:
            self._owner.cancel()
            await asyncio.wait({self._owner})

    # -- the connection's own task -------------------------------------------------------------------------------

    async def _open(self, transport: Transport) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(transport, ready))
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.wait({ready, self._owner}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            self._owner.cancel()
            await asyncio.wait({self._owner})
            if not isinstance(error, TimeoutError):
                raise
            raise self._not_open(f"it did not say within {OPEN_S:g} s which tools it has") from None
        if not ready.done():
            why = self._owner.exception()
            # With a status of HTTP that one decides, and the SDK makes codes of some of them.
            told = _innermost(why) if self._trouble.status is None else None
            if isinstance(told, MCPError) and told.code in _NEVER:
                self._trouble.refusal = self._trouble.refusal or f"it refused: {told.message}"
            raise self._not_open(_root(why) if why is not None else "the connection ended at once") from why

    async def _own(self, transport: Transport, ready: asyncio.Future[None]) -> None:
        async with McpClient(transport, client_info=_ME, cache=None) as client:
            self._client = client
            await self._list(client)
            ready.set_result(None)
            await self._leave.wait()

    async def _list(self, client: McpClient) -> None:
        specs: list[dict[str, Any]] = []
        cursor: str | None = None
        listed = 0
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += max(1, len(page.tools))
            if listed > MAX_TOOLS:
                self._trouble.refusal = f"it offers more than {MAX_TOOLS} tools, or pages of them; accepted: fewer"
                raise RuntimeError(self._trouble.refusal)
            for tool in page.tools:
                if not _CALLABLE.fullmatch(tool.name):
                    self.gaps.append(f"grant {self.name}: no model can call a tool named {tool.name!r}")
                    continue
                specs.append(
                    {
                        "type": "function",
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": dict(tool.input_schema),
                        "strict": False,
                    }
                )
            if page.next_cursor is None or page.next_cursor == cursor:
                break
            cursor = page.next_cursor
        self.specs = tuple(specs)

    async def _alive(self, call: Awaitable[T]) -> T:
        """The outcome of `call`; the end of the connection, should that come first. Cancelling it cancels the call."""
        assert self._owner is not None
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RuntimeError("the connection ended during the call")
            return task.result()
        finally:
            task.cancel()

    def _unavailable(self, name: str, why: str, delivery: Delivery | None = None) -> ToolUnavailable:
        trouble = self._trouble
        return ToolUnavailable(
            f"tool {name} of grant {self.name}: {trouble.text or why + trouble.last_words()}",
            delivery=trouble.delivery or delivery or Delivery.POSSIBLY_DELIVERED,
            upstream_status=trouble.status,
        )

    def _not_open(self, why: str) -> GrantUnavailable:
        text, status = self._trouble.text, self._trouble.status
        refusal = self._trouble.refusal
        refused = refusal is not None or (
            status is not None and 400 <= status < 500 and status not in (404, 408, 425, 429)
        )
        return GrantUnavailable(
            f"grant {self.name}: {refusal or text or why}{self._trouble.last_words()}",
            status=422 if refused else 502,
            retryable=not refused,
            upstream_status=status,
        )


async def open_mcp(grant: McpGrant, client: Client) -> McpTools:
    """The grant, connected, its tools listed. Raises `GrantUnavailable`: retryable where the server cannot be reached.

    A `stdio` connection is started as it is: whether it may be is judged before (`access`).
    """
    tools = McpTools(grant)
    if isinstance(grant.connection, Stdio):
        await tools._open(stdio(grant.connection, tools._trouble))
    else:
        await tools._open(_streamable_http(grant.connection, client, tools._trouble))
    return tools


# -- transports --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _streamable_http(connection: StreamableHttp, client: Client, trouble: Trouble) -> AsyncIterator[Any]:
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
        streamable_http_client(url, http_client=http, max_sse_event_size=64 * 2**20) as streams,
    ):
        yield streams


class _Watched(httpx2.AsyncBaseTransport):
    """Notes each failure, and gives the SDK a 503 for a transport's, so that it ends the call and not everything."""

    def __init__(self, below: httpx2.AsyncBaseTransport, trouble: Trouble) -> None:
        self._below = below
        self._trouble = trouble

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            reply = await self._below.handle_async_request(request)
            if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                reply = await _whole(reply, request)
                _check_id(await request.aread(), reply)
        except (httpx2.TransportError, TopropeError) as error:
            return self._failed(request, error)
        if reply.status_code >= 400 and request.method == "POST":
            info = read_error_body(reply.status_code, _json_of(reply), shorten(reply.text, 500))
            self._trouble.text = f"{request.url} answered {reply.status_code}: {info.message}"
            self._trouble.status, self._trouble.delivery = reply.status_code, Delivery.DELIVERED
        return reply

    def _failed(self, request: httpx2.Request, error: Exception) -> httpx2.Response:
        if isinstance(error, TopropeError):
            self._trouble.text, self._trouble.delivery = error.message, error.delivery
        else:
            early = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            self._trouble.text = f"{request.url}: {error or type(error).__name__}"
            self._trouble.delivery = Delivery.NOT_SENT if early else Delivery.POSSIBLY_DELIVERED
        return httpx2.Response(503, request=request)

    async def aclose(self) -> None:
        await self._below.aclose()


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


async def _whole(reply: httpx2.Response, request: httpx2.Request) -> httpx2.Response:
    """The reply with its body, within the bound that every peer's has. Raises `httpx2.TransportError` beyond it."""
    if reply.is_stream_consumed:  # a server of this process: whole, and bounded, already
        return reply
    if reply.headers.get("content-encoding", "identity") != "identity":
        await reply.aclose()
        raise httpx2.RemoteProtocolError("the reply is compressed, which was not asked for")
    pieces, size = [], 0
    try:
        async for piece in reply.aiter_raw():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_REPLY_BYTES:
                raise httpx2.RemoteProtocolError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    finally:
        await reply.aclose()
    kept = [(name, value) for name, value in reply.headers.multi_items() if name.lower() not in _BODILESS]
    return httpx2.Response(reply.status_code, headers=kept, content=b"".join(pieces), request=request)


def _check_id(asked: bytes, reply: httpx2.Response) -> None:
    """Return unless a JSON reply answers another request, for which the SDK would go on waiting for ever."""
    if reply.status_code != 200 or not reply.headers.get("content-type", "").startswith("application/json"):
        return
    question, told = json.loads(asked) if asked else None, _json_of(reply)
    if not isinstance(question, dict) or "id" not in question or "method" not in question:
        return
    if not isinstance(told, dict) or told.get("id") != question["id"]:
        said = shorten(reply.text, 200)
        raise httpx2.RemoteProtocolError(f"what came back answers no request of id {question['id']!r}: {said}")


def _json_of(reply: httpx2.Response) -> Any:
    try:
        return json.loads(reply.content)
    except json.NotJson:
        return None


def _text_of(result: CallToolResult) -> str:
    """What the model reads: the texts, one after the other; of what is no text its kind and size."""
    parts = [part.text if isinstance(part, TextContent) else _described(part.model_dump()) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content).decode("utf-8")
    return "\n".join(parts)


def _described(part: Mapping[str, Any]) -> str:
    resource = part.get("resource")
    if isinstance(resource, Mapping) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    data = part.get("data") or part.get("blob")
    size = f", {len(data)} characters of base64" if isinstance(data, str) else ""
    return f"[{part.get('type', 'content')}{size}: this agent reads text only]"


def _is_trouble(status: int | None) -> bool:
    return status is not None and (status >= 500 or status in (401, 403, 404, 407, 408, 425, 429))


def _innermost(error: BaseException | None) -> BaseException | None:
    """The error itself; task groups wrap it."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _root(error: BaseException) -> str:
    """The words of the innermost error."""
    inner = _innermost(error)
    return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__

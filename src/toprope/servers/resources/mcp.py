"""`POST /mcp`: the tools of a session over MCP's streamable HTTP, stateless, through the official SDK.

The SDK reads and writes JSON-RPC; sessions, limits, keys and the rollout are the kit's, since a request comes here like
any other. What the SDK would stream is gathered into one reply: no tool of ours speaks before it ends. Needs the extra
`toprope[mcp]`; imported only where MCP is asked for. Left to others: which tools a session has, and running them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from toprope.canonical import json
from toprope.errors.body import error_body
from toprope.errors.tree import ToolError, TopropeError
from toprope.http.asgi import Message
from toprope.http.headers import Headers
from toprope.http.reply import Reply
from toprope.http.request import Request
from toprope.tools.spec import ToolSpec

PATH = "/mcp"
_REQUEST = "toprope.request"
# The body is here already, decoded and counted: what describes how it travelled no longer holds.
_OF_THE_BODY = (b"content-encoding", b"content-length", b"transfer-encoding")

ToolsOf = Callable[[Request], Mapping[str, ToolSpec]]
RunTool = Callable[[ToolSpec, Request, bytes], Awaitable[bytes | str]]


class McpDoor:
    """Serves the tools that `tools_of` gives for a request; `run` runs one and gives its text.

    `tools_of` raises what is wrong with the request's session before anything of MCP is read.
    """

    def __init__(self, *, name: str, tools_of: ToolsOf, run: RunTool, max_body_bytes: int) -> None:
        self._tools_of = tools_of
        self._run = run
        self._max_body_bytes = max_body_bytes
        self._server = Server(name, version=version("toprope"), on_list_tools=self._list, on_call_tool=self._call)
        self._server.get_tool_input_schema = lambda _: None  # no argument of ours travels in a header
        self._manager: StreamableHTTPSessionManager | None = None
        self._owner: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()

    async def start(self) -> None:
        """On return requests can be served."""
        ready = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._owner = asyncio.create_task(self._own(ready))
        await asyncio.wait({ready, self._owner}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._owner.result()

    async def stop(self) -> None:
        """On return nothing of MCP runs."""
        self._leave.set()
        if self._owner is not None:
            await asyncio.wait({self._owner})

    async def _own(self, ready: asyncio.Future[None]) -> None:
        # The manager's tasks must be left by the task that entered them; start and stop come from different ones.
        self._manager = StreamableHTTPSessionManager(
            self._server,
            json_response=True,
            stateless=True,
            # A session's credential is asked for whatever the host is called, so a rebound name opens nothing.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=self._max_body_bytes,
        )
        async with self._manager.run():
            ready.set_result(None)
            await self._leave.wait()

    async def handle(self, request: Request) -> Reply:
        """The SDK's whole reply. Raises what `tools_of` raises."""
        self._tools_of(request)
        assert self._manager is not None
        exchange = _Exchange(await request.body())
        headers = [field for field in request.scope["headers"] if field[0] not in _OF_THE_BODY]
        scope = {**request.scope, "path": PATH, "raw_path": PATH.encode(), "headers": headers, _REQUEST: request}
        await self._manager.handle_request(scope, exchange.receive, exchange.send)
        return exchange.reply()

    async def _list(self, ctx: ServerRequestContext[Any], params: PaginatedRequestParams | None) -> ListToolsResult:
        try:
            found = self._tools_of(_request_of(ctx))
        except TopropeError as error:
            raise _as_rpc(error) from error
        listed = [
            Tool(
                name=spec.name, description=spec.description or None, input_schema={"type": "object", **spec.parameters}
            )
            for spec in found.values()
        ]
        return ListToolsResult(tools=listed)

    async def _call(self, ctx: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        request = _request_of(ctx)
        try:
            found = self._tools_of(request)
            spec = found.get(params.name)
            if spec is None:
                available = ", ".join(found) or "none"
                raise MCPError(INVALID_PARAMS, f"no tool named {params.name!r} in this session; available: {available}")
            text = await self._run(spec, request, json.dumps(params.arguments or {}))
        except ToolError as error:
            return CallToolResult(content=[TextContent(text=_carried(error.message))], is_error=True)
        except TopropeError as error:
            raise _as_rpc(error) from error
        return CallToolResult(content=[TextContent(text=_carried(text))])


def _request_of(ctx: ServerRequestContext[Any]) -> Request:
    assert ctx.request is not None
    request: Request = ctx.request.scope[_REQUEST]
    return request


def _as_rpc(error: TopropeError) -> MCPError:
    """Trouble that is no word of a tool: an internal error of JSON-RPC with the typed error as its data."""
    body = error_body(error)["error"]
    body["message"] = _carried(body["message"])
    return MCPError(INTERNAL_ERROR, body["message"], body)


def _carried(text: str | bytes) -> str:
    """`text` as the SDK can write it: it takes no lone surrogates, and would tell nobody why."""
    known = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return known.decode("utf-8", "replace")


class _Exchange:
    """One request as the SDK reads it, and its reply, gathered."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # a client that leaves cancels the handler itself
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        else:
            self._pieces.append(bytes(message.get("body", b"")))

    def reply(self) -> Reply:
        kept = [(name.lower(), value) for name, value in self._headers if name.lower() not in _OF_THE_BODY]
        return Reply(self._status, b"".join(self._pieces), Headers(kept))

"""An `mcp` grant as an agent uses it, through the official SDK: opened, listed, called, closed.

    streamable_http   over the network, or to a server of this process (`inline://`)
    stdio             a program of this host, which the agent's own configuration must list

A connection of the SDK belongs to the task that opened it, so each grant has a task of its own. A 4xx or 5xx, a lost
connection and an error of the protocol end the activation; what a tool itself says, its errors too, is for the model.
Needs the extra `toprope[mcp]`; imported only where a grant is one. Left to others: which grants there are (`access`),
what comes over the network (`mcp_http`) and from programs (`mcp_stdio`), and whether it is MCP (`mcp_messages`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
from mcp import Client as McpClient
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND, CallToolResult, Implementation, TextContent

from toprope.canonical import json
from toprope.errors.kinds import Delivery
from toprope.protocol.grants import McpGrant, Stdio
from toprope.tools.mcp_http import streamable_http
from toprope.tools.mcp_messages import Trouble
from toprope.tools.mcp_stdio import stdio
from toprope.tools.outcome import GrantUnavailable, ToolResult, ToolUnavailable

if TYPE_CHECKING:
    from mcp.client import Transport

    from toprope.http.client import Client

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
        self._trouble = Trouble(grant.name)
        self._leave = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call the tool. Raises `ToolUnavailable` where what came back is not the tool's own word."""
        assert self._client is not None
        self._trouble.clear()
        try:
            result = await self._alive(self._client.call_tool(name, arguments))
        except MCPError as error:
            # A name or arguments that it does not take: the model's to mend. A server error that says so never gets
            # here: of a status of trouble the transport passes no body on.
            if error.code == INVALID_PARAMS:
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
        await tools._open(streamable_http(grant.connection, client, tools._trouble))
    return tools


# -- results ------------------------------------------------------------------------------------------------------


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


def _innermost(error: BaseException | None) -> BaseException | None:
    """The error itself; task groups wrap it."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _root(error: BaseException) -> str:
    """The words of the innermost error."""
    inner = _innermost(error)
    return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__

"""Tools as an agent reaches them: the grants of one session, opened, and what a call gives the model.

The text of a 2xx, and of an error that the tool itself raised, goes to the model. Trouble of the infrastructure (no
connection, 5xx, a lost session) never does: it raises, and ends the activation. A name that was not granted is a clean
tool error. Left to others: which calls are made (the agent), how grants come to be (the environment server), the two
ways to a tool (`direct`, `mcp`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from toprope.canonical import json
from toprope.errors.tree import BadRequest, TopropeError
from toprope.http.cookies import told_cookies
from toprope.http.headers import Headers
from toprope.protocol.grants import GRANT_NAME, DirectHttpGrant, Grant, McpGrant, Stdio
from toprope.tools.direct import DirectHttpTools
from toprope.tools.outcome import MAX_OUTPUT_CHARS, GrantUnavailable
from toprope.tools.outcome import ToolResult as ToolResult
from toprope.tools.outcome import ToolUnavailable as ToolUnavailable
from toprope.tools.spec import RESERVED_NAMES

if TYPE_CHECKING:
    from toprope.http.client import Client
    from toprope.tools.mcp import McpTools

log = logging.getLogger("toprope.tools")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolAccess:
    """Every grant of one agent session. `gaps` names what could not be had: optional grants, tools nobody can call.

    `max_output_chars`: how much of one output its model is told; an agent may set it for its session.
    """

    def __init__(
        self, direct: DirectHttpTools | None = None, mcp: Sequence[McpTools] = (), gaps: Sequence[str] = ()
    ) -> None:
        self._direct = direct
        self._mcp = tuple(mcp)
        self._owners = {spec["name"]: tools for tools in mcp for spec in tools.specs}
        self.gaps = list(gaps)
        self.max_output_chars = MAX_OUTPUT_CHARS

    @classmethod
    async def open(cls, grants: Sequence[Grant], client: Client, *, stdio: Collection[Stdio] = ()) -> ToolAccess:
        """On return every required grant can be used. `stdio` are the programs that a grant may have started.

        Raises `BadRequest` for malformed or equal names and headers that cannot be sent, and kind grant_unavailable for
        a required grant that cannot be established: retryable only where its server cannot be reached. Then nothing is
        left open.
        """
        _check(grants)
        direct: DirectHttpTools | None = None
        mcp: list[McpTools] = []
        gaps: list[str] = []
        try:
            for grant in grants:
                try:
                    if isinstance(grant, DirectHttpGrant):
                        direct = _open_direct(grant, direct, client)
                    else:
                        opened = await _open_mcp(grant, client, stdio)
                        mcp.append(opened)
                        _refuse_known(grant, opened, mcp[:-1])
                        gaps += opened.gaps
                except TopropeError as error:
                    if mcp and mcp[-1].name == grant.name:
                        await mcp.pop().close()
                    if grant.required:
                        raise
                    gaps.append(f"optional grant {grant.name}: {error.message}")
        except BaseException:
            await _close_all(mcp)
            raise
        return cls(direct, mcp, gaps)

    def offered(self, named: Sequence[Any]) -> list[Any]:
        """The tools of a request, and after them those of the MCP grants that it does not name itself.

        Raises `BadRequest` for a tool that the request names for a direct grant and an MCP grant offers too: nothing
        in a call would say which of the two it means.
        """
        names = {tool.get("name") for tool in named if isinstance(tool, Mapping)}
        for name in names & set(self._owners):
            if self._direct is not None:
                raise BadRequest(
                    f"tools: {name!r} is named by the request, to be called over the grant {self._direct.name!r}, and "
                    f"offered by the grant {self._owners[name].name!r} over MCP; accepted: one of them"
                )
        own = [spec for tools in self._mcp for spec in tools.specs if spec["name"] not in names]
        return [*named, *own]

    def reached(self, name: str) -> dict[str, str]:
        """Over which grant, and how, a call of `name` goes, for the record; empty where it goes nowhere."""
        tools = self._owners.get(name) or self._direct
        return {} if tools is None else {"grant": tools.name, "transport": tools.transport}

    async def call(self, name: str, arguments: str, *, offered: frozenset[str]) -> ToolResult:
        """Run one function call of the model. `offered` are the names that its request listed.

        What is wrong with the name or the arguments is a result with `is_error`, for the model to read. A text longer
        than `max_output_chars` is cut, and says so. Raises `ToolUnavailable`.
        """
        return (await self._call(name, arguments, offered)).cut(self.max_output_chars)

    async def _call(self, name: str, arguments: str, offered: frozenset[str]) -> ToolResult:
        owner = self._owners.get(name)
        direct = self._direct if _TOOL_NAME.fullmatch(name) and name not in RESERVED_NAMES else None
        if name not in offered or (owner is None and direct is None):
            listed = ", ".join(sorted(offered)) if self._direct or self._owners else ""
            return ToolResult(
                f"error: no tool named {name!r} can be called; available: {listed or 'none'}", is_error=True
            )
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except json.NotJson as error:
            return ToolResult(f"error: the arguments of {name} are not valid JSON: {error}", is_error=True)
        if not isinstance(value, dict):
            return ToolResult(f"error: the arguments of {name} must be a JSON object", is_error=True)
        if owner is not None:
            return await owner.call(name, value)
        assert direct is not None
        return await direct.call(name, arguments.encode("utf-8", "surrogatepass") if arguments.strip() else b"{}")

    async def close(self) -> None:
        """Disconnect. Servers elsewhere go on; programs that were started for this session are gone on return."""
        await _close_all(self._mcp)

    @property
    def speaks_mcp(self) -> bool:
        """Whether a grant brings tools of its own."""
        return bool(self._owners)

    @property
    def resources_cookies(self) -> dict[str, str] | None:
        """The cookies as they stand now, if a grant carried any."""
        return dict(self._direct.cookies) if self._direct is not None and self._direct.had_cookies else None


def _check(grants: Sequence[Grant]) -> None:
    seen: set[str] = set()
    for grant in grants:
        if not GRANT_NAME.fullmatch(grant.name):
            raise BadRequest(f"tool_accesses: the name {grant.name!r} is not letters, digits, '.', '_', '-'")
        if grant.name in seen:
            raise BadRequest(f"tool_accesses: two grants are named {grant.name!r}")
        seen.add(grant.name)
        carrier = grant if isinstance(grant, DirectHttpGrant) else grant.connection
        try:
            Headers.of({} if isinstance(carrier, Stdio) else carrier.headers)
        except ValueError as error:
            raise BadRequest(f"tool_accesses: grant {grant.name!r}: {error}") from error
        if isinstance(grant, DirectHttpGrant) and (unsent := grant.cookies.keys() - told_cookies(grant.cookies).keys()):
            raise BadRequest(
                f"tool_accesses: grant {grant.name!r}: no header can carry the cookies {sorted(unsent)}; accepted: a "
                "value without line breaks, control characters and semicolons"
            )


def _open_direct(grant: DirectHttpGrant, other: DirectHttpTools | None, client: Client) -> DirectHttpTools:
    if other is not None:  # nothing in a call says which of two it means
        raise GrantUnavailable(f"grant {grant.name}: one direct_http grant can be used, and {other.name} is it")
    return DirectHttpTools(grant, client)


async def _open_mcp(grant: McpGrant, client: Client, stdio: Collection[Stdio]) -> McpTools:
    if isinstance(grant.connection, Stdio) and grant.connection not in stdio:
        raise GrantUnavailable(
            f"grant {grant.name}: this agent starts only the programs that its own configuration lists (`mcp_stdio`), "
            f"and {[grant.connection.command, *grant.connection.args]} is not listed with these arguments, this "
            "environment and this directory"
        )
    if find_spec("mcp") is None:
        raise GrantUnavailable(
            f"grant {grant.name}: this agent server has no MCP; `pip install toprope[mcp]` brings it"
        )
    from toprope.tools.mcp import open_mcp  # the SDK takes most of a second to import

    return await open_mcp(grant, client)


def _refuse_known(grant: Grant, opened: McpTools, others: Sequence[McpTools]) -> None:
    names = [spec["name"] for spec in opened.specs]
    for name in names:
        owner = next((tools for tools in others if any(spec["name"] == name for spec in tools.specs)), None)
        if owner is not None or names.count(name) > 1:
            by = f"the grant {owner.name!r} offers one too" if owner is not None else "it offers two"
            raise GrantUnavailable(f"grant {grant.name}: a tool named {name!r}, and {by}")


async def _close_all(opened: Sequence[McpTools]) -> None:
    for outcome in await asyncio.gather(*(tools.close() for tools in opened), return_exceptions=True):
        if isinstance(outcome, Exception):  # a server that cannot be left must not keep the others
            log.warning("an MCP grant did not close cleanly: %s", outcome)

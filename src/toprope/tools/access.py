"""Tools as an agent reaches them: the grants of one session, opened, and what a call gives the model.

The text of a 2xx, and of an error that the tool itself raised, goes to the model. Trouble of the infrastructure (no
connection, 5xx, a lost session) never does: it raises, and ends the activation. A name that was not granted is a clean
tool error. Left to others: which calls are made (the agent), how grants come to be (the environment server).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toprope.canonical import json
from toprope.errors.body import shorten
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import BadRequest, PeerError, TopropeError, TransportError
from toprope.http.cookies import merge_cookies
from toprope.http.reply import Reply
from toprope.protocol.grants import DirectHttpGrant, Grant
from toprope.protocol.headers import PROTOCOL
from toprope.tools.spec import RESERVED_NAMES, TOOL_ERROR_TYPE

if TYPE_CHECKING:
    from toprope.http.client import Client

_GRANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INFRASTRUCTURE_STATUSES = frozenset({401, 407, 408, 425, 429})
_INFRASTRUCTURE_KINDS = frozenset(
    {Kind.SESSION_LOST, Kind.SESSION_EXPIRED, Kind.FORBIDDEN, Kind.CONFLICT, Kind.CAPACITY, Kind.TOOL_UNAVAILABLE}
)
# What a server of ours says to the caller's choice of tool or size of arguments: the model's to mend.
_ABOUT_THE_CALL = frozenset({404, 405, 413})


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told. `is_error` is for the record; the text says it too."""

    text: str
    is_error: bool = False


class ToolUnavailable(TopropeError):
    """A tool could not be reached, or its server broke: 502, retryable, never shown to the model."""

    kind = Kind.TOOL_UNAVAILABLE
    status = 502
    retryable = True


class DirectHttpTools:
    """A `direct_http` grant: `POST <base_url>/<tool>` with its headers and cookies."""

    def __init__(self, grant: DirectHttpGrant, client: Client) -> None:
        self.name = grant.name
        self.had_cookies = bool(grant.cookies)
        self.cookies = dict(grant.cookies)
        self._headers = {**grant.headers, "content-type": "application/json"}
        # The role stamps the rollout where the grant's URL does not carry it already.
        self._peer = client.peer(grant.base_url, "resources")

    async def call(self, name: str, arguments: bytes) -> ToolResult:
        """Call the tool. Raises `ToolUnavailable` where what came back is not the tool's own word."""
        try:
            reply = await self._peer.request(
                "POST", f"/{name}", body=arguments, headers=self._headers, cookies=self.cookies or None
            )
        except TransportError as error:
            raise ToolUnavailable(f"tool {name}: {error.message}", delivery=error.delivery) from error
        self.cookies = merge_cookies(self.cookies, reply)
        return _result(name, reply)


def _result(name: str, reply: Reply) -> ToolResult:
    if reply.status < 400:
        return ToolResult(reply.text)
    info = reply.error_info()
    trouble = reply.status >= 500 or reply.status in _INFRASTRUCTURE_STATUSES or info.kind in _INFRASTRUCTURE_KINDS
    if trouble or (info.kind is not None and _refused(reply)):
        raise ToolUnavailable(
            f"tool {name}: {reply.url} answered {reply.status}: {info.message}",
            delivery=Delivery.DELIVERED,
            upstream_status=reply.status,
        )
    return ToolResult(info.message if info.kind is not None else shorten(reply.text), is_error=True)


def _refused(reply: Reply) -> bool:
    """Whether a server of ours refused a request before any tool ran; an error of its tools says that it is one."""
    if PROTOCOL not in reply.headers or reply.status in _ABOUT_THE_CALL:
        return False
    try:
        return bool(reply.json()["error"].get("type") != TOOL_ERROR_TYPE)
    except (PeerError, TypeError, KeyError, AttributeError):
        return True


class ToolAccess:
    """Every grant of one agent session. `gaps` names the optional grants that could not be had."""

    def __init__(self, direct: Sequence[DirectHttpTools] = (), gaps: Sequence[str] = ()) -> None:
        self._direct = tuple(direct)
        self.gaps = list(gaps)

    @classmethod
    async def open(cls, grants: Sequence[Grant], client: Client) -> ToolAccess:
        """On return every required grant can be used.

        Raises `BadRequest` for malformed or equal names, and kind grant_unavailable (terminal) for a required grant
        that cannot be established.
        """
        seen: set[str] = set()
        for grant in grants:
            if not _GRANT_NAME.fullmatch(grant.name):
                raise BadRequest(f"tool_accesses: the name {grant.name!r} is not letters, digits, '.', '_', '-'")
            if grant.name in seen:
                raise BadRequest(f"tool_accesses: two grants are named {grant.name!r}")
            seen.add(grant.name)
        direct: list[DirectHttpTools] = []
        gaps: list[str] = []
        for grant in grants:
            try:
                opened = _open_direct(grant, client)
                if direct:  # nothing in a call says which of two it means
                    raise _unavailable(grant, f"one direct_http grant can be used, and {direct[0].name} is it")
                direct.append(opened)
            except TopropeError as error:
                if grant.required:
                    raise
                gaps.append(f"optional grant {grant.name}: {error.message}")
        return cls(direct, gaps)

    async def call(self, name: str, arguments: str, *, offered: frozenset[str]) -> ToolResult:
        """Run one function call of the model. `offered` are the names that its request listed.

        What is wrong with the name or the arguments is a result with `is_error`, for the model to read. Raises
        `ToolUnavailable`.
        """
        if name not in offered or not self._direct or name in RESERVED_NAMES or not _TOOL_NAME.fullmatch(name):
            listed = ", ".join(sorted(offered)) if self._direct and offered else "none"
            return ToolResult(f"error: no tool named {name!r} can be called; available: {listed}", is_error=True)
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except json.NotJson as error:
            return ToolResult(f"error: the arguments of {name} are not valid JSON: {error}", is_error=True)
        if not isinstance(value, dict):
            return ToolResult(f"error: the arguments of {name} must be a JSON object", is_error=True)
        body = arguments.encode("utf-8", "surrogatepass") if arguments.strip() else b"{}"
        return await self._direct[0].call(name, body)

    @property
    def resources_cookies(self) -> dict[str, str] | None:
        """The cookies as they stand now, if a grant carried any."""
        for tools in self._direct:
            if tools.had_cookies:
                return dict(tools.cookies)
        return None


def _open_direct(grant: Grant, client: Client) -> DirectHttpTools:
    if not isinstance(grant, DirectHttpGrant):
        raise _unavailable(grant, f"this agent server uses direct_http grants only, not {type(grant).__name__}")
    return DirectHttpTools(grant, client)


def _unavailable(grant: Grant, why: str) -> TopropeError:
    return TopropeError(f"grant {grant.name}: {why}", kind=Kind.GRANT_UNAVAILABLE, status=422, retryable=False)
